//! Serial port or screen of a VM for a reader at the manager: bytes in both directions between the
//! reader and the agent of the host that runs the VM. If the VM moves, a console follows it: the
//! reader's connection stays open and continues on the other host. A screen's protocol (RFB) cannot
//! continue with another server, so its reader gets a request to connect again at once. The rights
//! to open either are checked elsewhere.

pub(crate) mod http;
pub(crate) mod screen;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::Duration;

use axum::body::Bytes;
use axum::extract::ws::{CloseFrame, Message, WebSocket};
use futures::stream::{SplitSink, SplitStream};
use futures::{SinkExt, StreamExt};
use godwit_api::control::{Problem, ProblemCode};
use godwit_api::{ClientError, ConsoleStream, ErrorCode, LogSource, VmInfo};
use tokio::io::{AsyncReadExt, AsyncWriteExt, ReadHalf, WriteHalf};
use tokio::time::{Instant, interval, timeout, timeout_at};

use crate::access::Caller;
use crate::agents::AgentClients;
use crate::cluster::state::State;
use crate::journal::events::Listener;
use crate::problems::no_vm;
use crate::vms::Vms;

/// Time limit for reconnecting after a cut, such as by the end of a migration or the restart of an
/// agent.
const RECONNECT_LIMIT: Duration = Duration::from_secs(30);
/// Pause between two attempts.
const RETRY: Duration = Duration::from_millis(200);
/// Interval of pings to the reader, which keep the connection open through intermediate systems.
const PING_INTERVAL: Duration = Duration::from_secs(20);
/// Time after which a silent reader, who answers no pings either, counts as gone. Then another
/// reader may open the console.
const SILENCE_LIMIT: Duration = Duration::from_secs(50);
/// Time limit for the close message to a reader.
const CLOSE_LIMIT: Duration = Duration::from_secs(5);
/// Most bytes of guest output in one message.
const MOST_PIECE_BYTES: usize = 16 << 10;
/// Longest reason in a close message (RFC 6455, section 5.5).
const MOST_REASON_BYTES: usize = 123;
/// Close code for a console that cannot continue; the reason has the text (RFC 6455, section 7.4.2:
/// private use).
const CANNOT_GO_ON: u16 = 4000;

/// Close code for a screen that continues in another connection, which the reader opens at once.
const CONNECT_AGAIN: u16 = 4001;

/// What a reader opens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum What {
    /// A serial port, from 1.
    Console(u32),
    Screen,
}

impl What {
    fn name(self) -> &'static str {
        match self {
            What::Console(_) => "console",
            What::Screen => "screen",
        }
    }
}

/// Reason why bytes are no longer passed on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cut {
    ByReader,
    /// The host closed the console, or the VM runs elsewhere.
    AtHost,
}

/// How a connection ended that did not fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ended {
    ByReader,
    /// The screen's host closed it, or the VM runs elsewhere.
    ContinuesElsewhere,
}

struct Console {
    what: What,
    state: Arc<State>,
    agents: Arc<AgentClients>,
    vm: String,
    news: Listener,
}

/// Returns the VM, whose host has the console or screen.
///
/// # Errors
/// No host has the VM, it does not run, or it has no screen.
pub(crate) fn runs_at(state: &State, vm: &str, what: What) -> Result<Arc<VmInfo>, Problem> {
    let inventory = state.inventory();
    let info = inventory.vm_info(vm).ok_or_else(|| no_vm(vm))?;
    if info.state.is_off() {
        let detail = format!("VM \"{vm}\" is {}: it has no {}", info.state, what.name());
        return Err(Problem::new(ProblemCode::WrongState, detail, "start it, or read its log"));
    }
    if let What::Console(port) = what {
        check_port(info, port)?;
    }
    if what == What::Screen && info.spec.video.is_none() {
        let detail = format!("VM \"{vm}\" has no screen: it has no video device");
        let remedy = "stop it and give it one: `godwit vm set NAME --video vga`";
        return Err(Problem::new(ProblemCode::WrongState, detail, remedy));
    }
    Ok(Arc::clone(info))
}

/// Refuses a serial port that a VM does not have.
fn check_port(info: &VmInfo, port: u32) -> Result<(), Problem> {
    let ports = info.spec.serial_ports;
    if (1..=ports).contains(&port) {
        return Ok(());
    }
    let detail = format!("VM \"{}\" has no serial port {port}: it has {ports}", info.name);
    Err(Problem::new(ProblemCode::InvalidRequest, detail, "name one, from 1"))
}

/// Connects a reader to a VM's console or screen until the reader leaves, loses the right to read
/// it, or the connection ends.
pub(crate) async fn carry(vms: Vms, caller: Caller, (vm, what): (String, What), reader: WebSocket) {
    let news = vms.state.events().listen(None);
    let (state, agents) = (Arc::clone(&vms.state), Arc::clone(&vms.agents));
    let mut console = Console { what, state, agents, vm, news };
    let (mut to_reader, mut from_reader) = reader.split();
    let ended = tokio::select! {
        ended = console.run(&mut to_reader, &mut from_reader) => ended,
        () = vms.tokens.is_good_no_more(&caller) => {
            let detail = format!("the token that opened the {} is no longer valid", what.name());
            Err(Problem::new(ProblemCode::Unauthenticated, detail, "log in again"))
        }
    };
    let (code, reason) = match ended {
        Ok(Ended::ByReader) => return,
        Ok(Ended::ContinuesElsewhere) => (CONNECT_AGAIN, "connect again".to_owned()),
        Err(problem) => (CANNOT_GO_ON, problem.detail),
    };
    close(&mut to_reader, code, reason).await;
}

/// Closes a reader's connection with the reason.
async fn close(to_reader: &mut SplitSink<WebSocket, Message>, code: u16, mut reason: String) {
    let end = (0..=MOST_REASON_BYTES).rev().find(|end| reason.is_char_boundary(*end)).unwrap_or(0);
    reason.truncate(end.min(reason.len()));
    let close = CloseFrame { code, reason: reason.into() };
    // A reader that is gone does not receive it.
    let _ = timeout(CLOSE_LIMIT, to_reader.send(Message::Close(Some(close)))).await;
}

impl Console {
    async fn run(
        &mut self,
        to_reader: &mut SplitSink<WebSocket, Message>,
        from_reader: &mut SplitStream<WebSocket>,
    ) -> Result<Ended, Problem> {
        let (mut host, mut guest) = match self.what {
            What::Console(_) => self.open().await?,
            // The VM may be on its way to another host.
            What::Screen => self.open_again().await?,
        };
        loop {
            let (mut from_guest, mut to_guest) = tokio::io::split(guest);
            let cut = tokio::select! {
                cut = pass_in(from_reader, &mut to_guest) => cut,
                cut = pass_out(&mut from_guest, to_reader) => cut,
                () = self.leaves(&host) => Cut::AtHost,
            };
            if cut == Cut::ByReader {
                return Ok(Ended::ByReader);
            }
            if self.what == What::Screen {
                // A VM that has stopped has no other screen.
                self.runs_at()?;
                return Ok(Ended::ContinuesElsewhere);
            }
            // The host allows no other reader before the stream is closed.
            drop((from_guest, to_guest));
            (host, guest) = self.open_again().await?;
        }
    }

    /// Opens the console or screen on the host that runs the VM.
    async fn open(&self) -> Result<(String, ConsoleStream), Problem> {
        let info = self.runs_at()?;
        let client = self.agents.client_of(&info.host)?;
        let stream = match self.what {
            // An agent of an older version knows only the first.
            What::Console(1) => client.console(&self.vm).await?,
            What::Console(port) => client.serial_port(&self.vm, port).await?,
            What::Screen => client.screen(&self.vm).await.map_err(of_screen)?,
        };
        Ok((info.host.clone(), stream))
    }

    fn runs_at(&self) -> Result<Arc<VmInfo>, Problem> {
        runs_at(&self.state, &self.vm, self.what)
    }

    /// Opens it, also after a cut. The new host of the VM may have to report first.
    async fn open_again(&mut self) -> Result<(String, ConsoleStream), Problem> {
        let until = Instant::now() + RECONNECT_LIMIT;
        loop {
            let problem = match self.open().await {
                Ok(opened) => return Ok(opened),
                Err(problem) => problem,
            };
            if matches!(problem.code, ProblemCode::NotFound | ProblemCode::WrongState) {
                // The VM has ended since the host was asked: the inventory has the reason.
                self.runs_at()?;
            }
            if problem.code == ProblemCode::Conflict || Instant::now() >= until {
                return Err(problem);
            }
            let host = self.runs_at().map(|info| info.host.clone()).unwrap_or_default();
            // Retries at once if the VM is reported on another host.
            let _ = timeout_at(Instant::now() + RETRY, self.leaves(&host)).await;
        }
    }

    /// Waits until the VM is reported on another host or as not running.
    async fn leaves(&mut self, host: &str) {
        while self.runs_at().is_ok_and(|info| info.host == host) {
            if self.news.next().await.is_none() {
                return;
            }
        }
    }
}

/// Converts the error of a host that opens no screen. Too many viewers are a conflict, which
/// waiting does not resolve.
fn of_screen(error: ClientError) -> Problem {
    match error {
        ClientError::Refused(error) if error.code == ErrorCode::Busy => {
            Problem::new(ProblemCode::Conflict, error.message, error.remedy)
        }
        other => other.into(),
    }
}

/// Passes the reader's input to the guest.
async fn pass_in(
    from_reader: &mut SplitStream<WebSocket>,
    to_guest: &mut WriteHalf<ConsoleStream>,
) -> Cut {
    // The reader answers pings; a reader that disappeared sends nothing.
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

/// Passes the guest's output to the reader.
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
    /// Returns the end of a VM's log on its host: at most this many bytes, from the start of a
    /// line. With the source is the serial port, from 1.
    pub(crate) async fn vm_log(
        &self,
        vm: &str,
        (source, port): (LogSource, u32),
        tail: u64,
    ) -> Result<Vec<u8>, Problem> {
        let info = self.state.inventory().vm_info(vm).cloned().ok_or_else(|| no_vm(vm))?;
        check_port(&info, port)?;
        let client = self.agents.client_of(&info.host)?;
        // One byte more than requested shows whether the log was cut.
        let mut log = match port {
            1 => client.log_tail(vm, source, tail + 1).await?,
            port => client.serial_log_tail(vm, port, tail + 1).await?,
        };
        let most = usize::try_from(tail).unwrap_or(usize::MAX);
        let (mut kept, mut is_cut) = (Vec::new(), false);
        while let Some(piece) = log.next().await? {
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
