//! A VM's text console for somebody who reads it by the manager: bytes both ways between them and the agent of the host that runs the VM. Where
//! the VM moves meanwhile the console follows it: its reader's connection stays, and goes on at the other host. Who may open one is not known
//! here.

pub(crate) mod http;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::Duration;

use axum::body::Bytes;
use axum::extract::ws::{CloseFrame, Message, WebSocket};
use futures::stream::{SplitSink, SplitStream};
use futures::{SinkExt, StreamExt};
use godwit_api::control::{Problem, ProblemCode};
use godwit_api::{ConsoleStream, LogSource, VmInfo, VmState};
use tokio::io::{AsyncReadExt, AsyncWriteExt, ReadHalf, WriteHalf};
use tokio::time::{Instant, interval, timeout, timeout_at};

use crate::access::Caller;
use crate::agents::Hosts;
use crate::answers::Refusal;
use crate::cluster::state::State;
use crate::journal::events::Listener;
use crate::vms::Vms;

/// How long a console that was cut is tried for: a migration's last moments, or an agent that is started anew.
const RECONNECT_LIMIT: Duration = Duration::from_secs(30);
/// Between two attempts.
const RETRY: Duration = Duration::from_millis(200);
/// So often something is said to the reader, so that what is in between keeps the connection.
const PING_INTERVAL: Duration = Duration::from_secs(20);
/// A reader of whom nothing is heard for so long, no answer to a ping either, has gone: somebody else may open the console.
const SILENCE_LIMIT: Duration = Duration::from_secs(50);
/// How long the last word to a reader may take.
const CLOSE_LIMIT: Duration = Duration::from_secs(5);
/// Bytes of the guest that go in one message at most.
const MOST_PIECE_BYTES: usize = 16 << 10;
/// The longest reason that a close message carries (RFC 6455, section 5.5).
const MOST_REASON_BYTES: usize = 123;
/// What a close message says of a console that can't go on; the reason has the words (RFC 6455, section 7.4.2: free for use).
const CANNOT_GO_ON: u16 = 4000;

/// Why bytes are not passed on any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cut {
    ByReader,
    /// The host has closed it, or the VM runs elsewhere.
    AtHost,
}

struct Console {
    state: Arc<State>,
    hosts: Arc<Hosts>,
    vm: String,
    news: Listener,
}

/// What a VM's console can be opened at.
///
/// # Errors
/// No host has the VM, or it does not run.
pub(crate) fn runs_at(state: &State, vm: &str) -> Result<Arc<VmInfo>, Problem> {
    let inventory = state.inventory();
    let info = inventory.vm_info(vm).ok_or_else(|| no_vm(vm))?;
    if matches!(info.state, VmState::Stopped | VmState::Failed) {
        let detail = format!("VM \"{vm}\" is {}: it has no console", info.state);
        return Err(Problem::new(ProblemCode::WrongState, detail, "start it, or read its log"));
    }
    Ok(Arc::clone(info))
}

/// Carries a VM's console to a reader until they leave, may not read it any more, or there is none any more.
pub(crate) async fn carry(vms: Vms, caller: Caller, vm: String, reader: WebSocket) {
    let news = vms.state.events().listen(None);
    let (state, hosts) = (Arc::clone(&vms.state), Arc::clone(&vms.agents));
    let mut console = Console { state, hosts, vm, news };
    let (mut to_reader, mut from_reader) = reader.split();
    let ended = tokio::select! {
        ended = console.run(&mut to_reader, &mut from_reader) => ended,
        () = vms.tokens.is_good_no_more(&caller) => {
            let detail = "the token that it was opened with is good no more";
            Err(Problem::new(ProblemCode::Unauthenticated, detail, "log in again"))
        }
    };
    if let Err(problem) = ended {
        let mut reason = problem.detail;
        let end =
            (0..=MOST_REASON_BYTES).rev().find(|end| reason.is_char_boundary(*end)).unwrap_or(0);
        reason.truncate(end.min(reason.len()));
        let close = CloseFrame { code: CANNOT_GO_ON, reason: reason.into() };
        // Whoever has gone does not hear it.
        let _ = timeout(CLOSE_LIMIT, to_reader.send(Message::Close(Some(close)))).await;
    }
}

impl Console {
    async fn run(
        &mut self,
        to_reader: &mut SplitSink<WebSocket, Message>,
        from_reader: &mut SplitStream<WebSocket>,
    ) -> Result<(), Problem> {
        let (mut host, mut guest) = self.open().await?;
        loop {
            let (mut from_guest, mut to_guest) = tokio::io::split(guest);
            let cut = tokio::select! {
                cut = pass_in(from_reader, &mut to_guest) => cut,
                cut = pass_out(&mut from_guest, to_reader) => cut,
                () = self.leaves(&host) => Cut::AtHost,
            };
            if cut == Cut::ByReader {
                return Ok(());
            }
            // The host gives it to nobody else before it is closed.
            drop((from_guest, to_guest));
            (host, guest) = self.open_again().await?;
        }
    }

    /// Opens it where the VM runs.
    async fn open(&self) -> Result<(String, ConsoleStream), Problem> {
        let info = runs_at(&self.state, &self.vm)?;
        let client = self.hosts.client_of(&info.host)?;
        let stream = client.console(&self.vm).await.map_err(|error| Refusal::from(error).0)?;
        Ok((info.host.clone(), stream))
    }

    /// The same after a cut: the host where it runs by now may have to be heard first.
    async fn open_again(&mut self) -> Result<(String, ConsoleStream), Problem> {
        let until = Instant::now() + RECONNECT_LIMIT;
        loop {
            let problem = match self.open().await {
                Ok(opened) => return Ok(opened),
                Err(problem) => problem,
            };
            if matches!(problem.code, ProblemCode::NotFound | ProblemCode::WrongState) {
                // The VM has ended since the host was asked: the inventory knows why.
                runs_at(&self.state, &self.vm)?;
            }
            if Instant::now() >= until {
                return Err(problem);
            }
            let host =
                runs_at(&self.state, &self.vm).map(|info| info.host.clone()).unwrap_or_default();
            // At once where it is told to run elsewhere.
            let _ = timeout_at(Instant::now() + RETRY, self.leaves(&host)).await;
        }
    }

    /// Waits until the VM is told to run at another host, or not any more.
    async fn leaves(&mut self, host: &str) {
        while runs_at(&self.state, &self.vm).is_ok_and(|info| info.host == host) {
            if self.news.next().await.is_none() {
                return;
            }
        }
    }
}

/// What the reader types.
async fn pass_in(
    from_reader: &mut SplitStream<WebSocket>,
    to_guest: &mut WriteHalf<ConsoleStream>,
) -> Cut {
    // It answers pings; one that has gone without a word says nothing more.
    while let Ok(Some(Ok(message))) = timeout(SILENCE_LIMIT, from_reader.next()).await {
        let typed = match message {
            Message::Binary(bytes) => bytes,
            Message::Text(text) => text.into(),
            Message::Close(_) => return Cut::ByReader,
            Message::Ping(_) | Message::Pong(_) => continue,
        };
        if to_guest.write_all(&typed).await.is_err() {
            return Cut::AtHost;
        }
    }
    Cut::ByReader
}

/// What the guest writes.
async fn pass_out(
    from_guest: &mut ReadHalf<ConsoleStream>,
    to_reader: &mut SplitSink<WebSocket, Message>,
) -> Cut {
    let mut piece = vec![0; MOST_PIECE_BYTES];
    let mut ping = interval(PING_INTERVAL);
    loop {
        let message = tokio::select! {
            read = from_guest.read(&mut piece) => match read {
                Ok(bytes) if bytes > 0 => Message::Binary(Bytes::copy_from_slice(&piece[..bytes])),
                _ => return Cut::AtHost,
            },
            _ = ping.tick() => Message::Ping(Bytes::new()),
        };
        if !matches!(timeout(SILENCE_LIMIT, to_reader.send(message)).await, Ok(Ok(()))) {
            return Cut::ByReader;
        }
    }
}

impl Vms {
    /// The end of a VM's log at its host, so many bytes at most, from the beginning of a line on.
    pub(crate) async fn vm_log(
        &self,
        vm: &str,
        source: LogSource,
        tail: u64,
    ) -> Result<Vec<u8>, Problem> {
        let host = self.state.inventory().vm_info(vm).map(|info| info.host.clone());
        let client = self.agents.client_of(&host.ok_or_else(|| no_vm(vm))?)?;
        let away = |error| Refusal::from(error).0;
        // One more than is wanted: by it what was cut off is known.
        let mut log = client.log_tail(vm, source, tail + 1).await.map_err(away)?;
        let most = usize::try_from(tail).unwrap_or(usize::MAX);
        let (mut kept, mut is_cut) = (Vec::new(), false);
        while let Some(piece) = log.next().await.map_err(away)? {
            kept.extend_from_slice(&piece);
            let beyond = kept.len().saturating_sub(most);
            is_cut |= beyond > 0;
            kept.drain(..beyond);
        }
        let line = kept.iter().position(|byte| *byte == b'\n').filter(|_| is_cut);
        kept.drain(..line.map_or(0, |end| end + 1));
        Ok(kept)
    }
}

fn no_vm(vm: &str) -> Problem {
    Problem::new(
        ProblemCode::NotFound,
        format!("no host has a VM \"{vm}\""),
        "see `godwit vm list`",
    )
}
