//! QMP, QEMU's control protocol: one JSON object a line over a unix socket.
//!
//! A thin client of our own, because a switchover waits for it: one task reads the connection, stamps each event
//! with the moment of its reading and hands answers to those who wait; nothing polls. It takes what QEMU 7.2 to 10.x
//! say and ignores fields and events that it doesn't know.

use std::collections::HashMap;
use std::io::IoSlice;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncReadExt, Interest};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::{broadcast, oneshot, watch};
use tokio::task::AbortHandle;

use crate::commands::SHUTDOWN;
use godwit_types::Fault;

pub(crate) mod fuzzing;
mod message;

use message::Message;

/// How long QEMU may take to greet. It answers once its main loop runs.
const GREETING_LIMIT: Duration = Duration::from_secs(30);
/// How long a command may take unless said otherwise: a few (`stop`, `cont`) wait for disks.
const COMMAND_LIMIT: Duration = Duration::from_secs(60);
/// The longest line taken. The longest known, the schema of QEMU 10, has 0.3 MB. As JSON values it may take a hundred times as much.
const LONGEST_LINE_BYTES: usize = 1 << 20;
/// Events kept for a receiver that doesn't look; older ones are lost to it.
const EVENTS_KEPT: usize = 256;
/// The longest of them: a few hundred bytes in QEMU 10. Longer ones are dropped, as so many are kept.
const LONGEST_EVENT_BYTES: usize = 8 << 10;
/// Most values in one of them: about ten in QEMU 10. As JSON values 8 KiB of text may take a hundred times as much: those
/// that are kept take 16 MiB at most.
const MOST_EVENT_VALUES: usize = 64;

/// A connection to one QEMU. Cheap to clone; the connection ends with the last clone.
#[derive(Clone, Debug)]
pub struct Qmp {
    connection: Arc<Connection>,
}

/// Something that QEMU tells unasked.
#[derive(Clone, Debug, PartialEq)]
pub struct QmpEvent {
    /// `STOP`, `RESUME`, `MIGRATION` and so on.
    pub name: String,
    /// What belongs to it; null where there is nothing.
    pub data: Value,
    /// When it was read from the connection.
    pub at: Instant,
    /// When QEMU made it, by the wall clock since the epoch; microseconds.
    pub emitted: Option<Duration>,
}

/// Why a command has no answer, or a bad one.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum QmpError {
    /// QEMU refuses.
    #[error("QEMU refuses {command}: {desc}")]
    Command {
        command: String,
        /// QEMU's class of the error, mostly `GenericError`.
        class: String,
        /// QEMU's words.
        desc: String,
    },
    /// The connection ended: QEMU is gone, as a rule.
    #[error("the connection to QEMU's monitor is closed: {why}")]
    Closed {
        /// How it ended.
        why: String,
    },
    /// The socket can't be reached.
    #[error("QEMU's monitor at {} can't be reached: {why}", path.display())]
    Io {
        /// The socket.
        path: PathBuf,
        /// What the system said.
        why: String,
    },
    /// No answer in time.
    #[error("QEMU did not answer {command} within {limit:?}")]
    Timeout {
        /// The command, or what was waited for.
        command: String,
        /// How long it had.
        limit: Duration,
    },
    /// QEMU does not start the vCPUs.
    #[error("QEMU does not let the guest run: {why}")]
    NotResumed {
        /// QEMU's words, or what it does instead.
        why: String,
    },
    /// What came is no QMP, or lacks what the command promises.
    #[error("QEMU's monitor does not keep to the protocol: {why}")]
    Protocol {
        /// What came.
        why: String,
    },
}

impl QmpError {
    /// A stable code for programs.
    #[must_use]
    pub fn code(&self) -> &'static str {
        match self {
            QmpError::Command { .. } => "qmp-command",
            QmpError::Closed { .. } => "qmp-closed",
            QmpError::Io { .. } => "qmp-unreachable",
            QmpError::Timeout { .. } => "qmp-timeout",
            QmpError::NotResumed { .. } => "qmp-not-resumed",
            QmpError::Protocol { .. } => "qmp-protocol",
        }
    }

    /// What the operator can do about it.
    #[must_use]
    pub fn remedy(&self) -> String {
        let text = match self {
            QmpError::Command { .. } => "see the VM's log for what QEMU says beside this",
            QmpError::Closed { .. } => "see the VM's log for why QEMU ended, then start the VM",
            QmpError::Io { .. } => {
                "check that the VM's QEMU runs; only the agent may use its monitor"
            }
            QmpError::Timeout { .. } => {
                "check the host's load and disks, and that nobody else holds the monitor"
            }
            QmpError::NotResumed { .. } => {
                "see the VM's log for what holds its QEMU up; stop the VM and start it if that stays"
            }
            QmpError::Protocol { .. } => "check that the VM runs under a stock QEMU, 7.2 or later",
        };
        text.to_owned()
    }

    /// Code, message and remedy together.
    #[must_use]
    pub fn fault(&self) -> Fault {
        Fault::new(self.code(), self.to_string(), self.remedy())
    }
}

#[derive(Debug)]
struct Connection {
    shared: Arc<Shared>,
    writer: tokio::sync::Mutex<OwnedWriteHalf>,
    /// Held from sending a descriptor to the answer: QEMU keeps those of the last message only.
    descriptor_turn: tokio::sync::Mutex<()>,
    next_id: AtomicU64,
    reader: AbortHandle,
}

/// What the reading task and the callers share.
#[derive(Debug)]
struct Shared {
    waiting: Mutex<HashMap<u64, Waiting>>,
    /// The reading task owns the sender, so that receivers see the end of the connection.
    events: broadcast::WeakSender<QmpEvent>,
    /// Why the connection ended, once it has.
    closed: watch::Sender<Option<String>>,
    /// The guest has shut itself down.
    guest_has_shut_down: watch::Sender<bool>,
}

#[derive(Debug)]
struct Waiting {
    command: String,
    answer: oneshot::Sender<Result<Value, QmpError>>,
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.reader.abort();
    }
}

impl Qmp {
    /// Connects to the unix socket of a QEMU and negotiates.
    ///
    /// # Errors
    /// Nobody listens there, the greeting does not come within 30 s (QEMU serves one connection at a time), or what
    /// comes is no QMP.
    pub async fn connect(path: impl AsRef<Path>) -> Result<Qmp, QmpError> {
        let path = path.as_ref();
        let stream = UnixStream::connect(path)
            .await
            .map_err(|why| QmpError::Io { path: path.to_owned(), why: why.to_string() })?;
        Qmp::negotiate(stream).await
    }

    /// Negotiates on a connected stream.
    pub(crate) async fn negotiate(stream: UnixStream) -> Result<Qmp, QmpError> {
        let (read_half, write_half) = stream.into_split();
        let events = broadcast::Sender::new(EVENTS_KEPT);
        let shared = Arc::new(Shared {
            waiting: Mutex::new(HashMap::new()),
            events: events.downgrade(),
            closed: watch::Sender::new(None),
            guest_has_shut_down: watch::Sender::new(false),
        });
        let mut lines = Lines::new(read_half);
        let greeting = tokio::time::timeout(GREETING_LIMIT, lines.next()).await.map_err(|_| {
            QmpError::Timeout {
                command: "the connection with its greeting".to_owned(),
                limit: GREETING_LIMIT,
            }
        })?;
        let greeting = greeting.map_err(|why| QmpError::Closed { why })?;
        if !matches!(message::parse(greeting), Ok(Message::Greeting)) {
            return Err(QmpError::Protocol {
                why: format!("it greets with {}", message::shorten(greeting)),
            });
        }
        let reader = tokio::spawn(read(lines, events, Arc::clone(&shared))).abort_handle();
        let connection = Connection {
            shared,
            writer: tokio::sync::Mutex::new(write_half),
            descriptor_turn: tokio::sync::Mutex::new(()),
            next_id: AtomicU64::new(1),
            reader,
        };
        let qmp = Qmp { connection: Arc::new(connection) };
        qmp.execute("qmp_capabilities", json!({})).await?;
        Ok(qmp)
    }

    /// Runs a command; returns what QEMU returns (`{}` for most). `arguments` is an object, or null for none.
    ///
    /// # Errors
    /// QEMU refuses, the connection ends, or no answer comes within 60 s.
    pub async fn execute(&self, command: &str, arguments: Value) -> Result<Value, QmpError> {
        self.execute_within(command, arguments, COMMAND_LIMIT).await
    }

    /// Runs a command with a time limit of its own. The command is not undone when the limit passes.
    ///
    /// # Errors
    /// As [`Qmp::execute`].
    pub async fn execute_within(
        &self,
        command: &str,
        arguments: Value,
        limit: Duration,
    ) -> Result<Value, QmpError> {
        self.run(command, arguments, None, limit).await
    }

    /// Runs a command that takes a descriptor (`getfd`, `add-fd`). QEMU gets a duplicate; `fd` stays the caller's.
    ///
    /// # Errors
    /// As [`Qmp::execute`].
    pub async fn execute_with_fd(
        &self,
        command: &str,
        arguments: Value,
        fd: BorrowedFd<'_>,
    ) -> Result<Value, QmpError> {
        let _turn = self.connection.descriptor_turn.lock().await;
        self.run(command, arguments, Some(fd), COMMAND_LIMIT).await
    }

    /// Events from here on, each with the moment it was read. Subscribe before the command whose events matter.
    #[must_use]
    pub fn events(&self) -> broadcast::Receiver<QmpEvent> {
        match self.connection.shared.events.upgrade() {
            Some(events) => events.subscribe(),
            // A receiver that tells the end at once.
            None => broadcast::channel(1).1,
        }
    }

    /// Waits until the connection ends; returns how it ended.
    pub async fn closed(&self) -> String {
        let mut closed = self.connection.shared.closed.subscribe();
        match closed.wait_for(Option::is_some).await {
            Ok(why) => why.clone().unwrap_or_default(),
            Err(_) => "it was dropped".to_owned(),
        }
    }

    /// Returns whether the guest has shut itself down. QEMU ends after that.
    ///
    /// Set before any message that follows QEMU's [`SHUTDOWN`](crate::SHUTDOWN) event reaches a caller:
    /// an event, an answer, the end of the connection.
    #[must_use]
    pub fn guest_has_shut_down(&self) -> bool {
        *self.connection.shared.guest_has_shut_down.borrow()
    }

    /// Waits until the guest shuts itself down, for ever if it does not.
    pub async fn until_guest_shuts_down(&self) {
        let mut shut_down = self.connection.shared.guest_has_shut_down.subscribe();
        if shut_down.wait_for(|shut_down| *shut_down).await.is_err() {
            std::future::pending::<()>().await;
        }
    }

    /// Whether the connection has ended.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.connection.shared.closed.borrow().is_some()
    }

    async fn run(
        &self,
        command: &str,
        arguments: Value,
        fd: Option<BorrowedFd<'_>>,
        limit: Duration,
    ) -> Result<Value, QmpError> {
        let id = self.connection.next_id.fetch_add(1, Ordering::Relaxed);
        let mut request = json!({"execute": command, "id": id});
        if !arguments.is_null() {
            request["arguments"] = arguments;
        }
        let mut line = request.to_string().into_bytes();
        line.push(b'\n');
        let (answer, answered) = oneshot::channel();
        // Forgets the command when this call ends early: a late answer then finds nobody.
        let _forget = Forget { shared: &self.connection.shared, id };
        self.connection
            .shared
            .wait_for_answer(id, Waiting { command: command.to_owned(), answer })?;
        let exchange = async {
            self.send(&line, fd).await?;
            answered.await.unwrap_or_else(|_| Err(self.connection.shared.closed_error()))
        };
        match tokio::time::timeout(limit, exchange).await {
            Ok(result) => result,
            Err(_) => Err(QmpError::Timeout { command: command.to_owned(), limit }),
        }
    }

    async fn send(&self, line: &[u8], fd: Option<BorrowedFd<'_>>) -> Result<(), QmpError> {
        let writer = self.connection.writer.lock().await;
        let stream: &UnixStream = (*writer).as_ref();
        // Half a line would spoil every command after it.
        let mut whole =
            CloseUnlessWhole { shared: &self.connection.shared, stream, is_between_lines: true };
        let mut sent = 0;
        while sent < line.len() {
            let fd_now = if sent == 0 { fd } else { None };
            let result = stream
                .async_io(Interest::WRITABLE, || send_some(stream, &line[sent..], fd_now))
                .await;
            sent += result.map_err(|why| {
                self.connection.shared.close(format!("writing to it failed: {why}"));
                self.connection.shared.closed_error()
            })?;
            whole.is_between_lines = sent == line.len();
        }
        Ok(())
    }
}

/// Sends what the socket takes, the descriptor with the first byte.
fn send_some(
    stream: &UnixStream,
    bytes: &[u8],
    fd: Option<BorrowedFd<'_>>,
) -> std::io::Result<usize> {
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds = fd.as_slice();
    if !fds.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(fds));
    }
    Ok(sendmsg(stream, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL)?)
}

/// Closes the connection if a call is dropped in the middle of a line.
struct CloseUnlessWhole<'a> {
    shared: &'a Shared,
    stream: &'a UnixStream,
    is_between_lines: bool,
}

impl Drop for CloseUnlessWhole<'_> {
    fn drop(&mut self) {
        if !self.is_between_lines {
            let why = "a command was given up while it was being written";
            self.shared.close(why.to_owned());
            // The reading task ends by it; it may have ended already.
            let _ = rustix::net::shutdown(self.stream, rustix::net::Shutdown::Both);
        }
    }
}

struct Forget<'a> {
    shared: &'a Shared,
    id: u64,
}

impl Drop for Forget<'_> {
    fn drop(&mut self) {
        self.shared.waiting().remove(&self.id);
    }
}

impl Shared {
    fn waiting(&self) -> std::sync::MutexGuard<'_, HashMap<u64, Waiting>> {
        // The map is whole whatever its last holder did.
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait_for_answer(&self, id: u64, waiting: Waiting) -> Result<(), QmpError> {
        let mut all = self.waiting();
        // Looked at under the lock that close() takes: either it finds this entry or this sees the end.
        if self.closed.borrow().is_some() {
            return Err(self.closed_error());
        }
        all.insert(id, waiting);
        Ok(())
    }

    fn closed_error(&self) -> QmpError {
        let why = self.closed.borrow().clone().unwrap_or_else(|| "it was dropped".to_owned());
        QmpError::Closed { why }
    }

    /// Marks the connection as ended, the first reason counts, and tells all who wait.
    fn close(&self, why: String) {
        let mut waiting = self.waiting();
        self.closed.send_if_modified(|closed| {
            let is_first = closed.is_none();
            closed.get_or_insert(why);
            is_first
        });
        // Their senders drop; they then ask for the reason.
        waiting.clear();
    }

    fn answer(&self, id: Option<u64>, result: Result<Value, (String, String)>) {
        let Some(waiting) = id.and_then(|id| self.waiting().remove(&id)) else {
            tracing::debug!(?id, "QMP answer that nobody waits for");
            return;
        };
        let command = waiting.command;
        let result = result.map_err(|(class, desc)| QmpError::Command { command, class, desc });
        // Who stopped waiting in this moment doesn't want it.
        let _ = waiting.answer.send(result);
    }
}

/// Reads the connection to its end.
async fn read(
    mut lines: Lines<OwnedReadHalf>,
    events: broadcast::Sender<QmpEvent>,
    shared: Arc<Shared>,
) {
    let why = loop {
        let line = match lines.next().await {
            Ok(line) => line,
            Err(why) => break why,
        };
        let (at, length) = (Instant::now(), line.len());
        match message::parse(line) {
            Ok(Message::Event { name, data, .. })
                if length > LONGEST_EVENT_BYTES || count_values(&data) > MOST_EVENT_VALUES =>
            {
                tracing::warn!(
                    length,
                    event = message::shorten(name.as_bytes()),
                    "QEMU told something too long to keep"
                );
            }
            Ok(Message::Event { name, data, emitted }) => {
                if name == SHUTDOWN && data["guest"] == true {
                    shared.guest_has_shut_down.send_replace(true);
                }
                // Nobody may be listening.
                let _ = events.send(QmpEvent { name, data, at, emitted });
            }
            Ok(Message::Answer { id, result }) => shared.answer(id, result),
            Ok(Message::Greeting | Message::Unknown) => tracing::debug!("QMP message of no use"),
            Err(why) => break why,
        }
    };
    shared.close(why);
}

/// How many values there are, those in lists and objects included.
fn count_values(value: &Value) -> usize {
    1 + match value {
        Value::Array(items) => items.iter().map(count_values).sum::<usize>(),
        Value::Object(fields) => fields.values().map(count_values).sum(),
        _ => 0,
    }
}

/// Cuts the stream into lines of bounded length.
struct Lines<R> {
    stream: R,
    buffer: Vec<u8>,
    /// Where in the buffer the next line starts.
    start: usize,
    /// Up to where the buffer is known to hold no further line end.
    searched: usize,
}

impl<R: AsyncRead + Unpin> Lines<R> {
    fn new(stream: R) -> Lines<R> {
        Lines { stream, buffer: Vec::with_capacity(64 << 10), start: 0, searched: 0 }
    }

    /// The next line, without its end.
    async fn next(&mut self) -> Result<&[u8], String> {
        loop {
            if let Some(length) =
                self.buffer[self.searched..].iter().position(|&byte| byte == b'\n')
            {
                let (start, end) = (self.start, self.searched + length);
                (self.start, self.searched) = (end + 1, end + 1);
                return Ok(&self.buffer[start..end]);
            }
            self.buffer.drain(..self.start);
            self.start = 0;
            self.searched = self.buffer.len();
            if self.buffer.len() > LONGEST_LINE_BYTES {
                return Err(format!("it sent a line of more than {LONGEST_LINE_BYTES} bytes"));
            }
            match self.stream.read_buf(&mut self.buffer).await {
                Ok(0) => return Err("QEMU closed it".to_owned()),
                Ok(_) => {}
                Err(why) => return Err(format!("reading from it failed: {why}")),
            }
        }
    }
}

/// Waits for the next event that `wanted` takes; others go by.
///
/// # Errors
/// The connection ends, the limit passes, or so many events came that some were lost.
pub async fn wait_for_event(
    events: &mut broadcast::Receiver<QmpEvent>,
    what: &str,
    limit: Duration,
    mut wanted: impl FnMut(&QmpEvent) -> bool,
) -> Result<QmpEvent, QmpError> {
    let search = async {
        loop {
            match events.recv().await {
                Ok(event) if wanted(&event) => return Ok(event),
                Ok(_) => {}
                Err(broadcast::error::RecvError::Closed) => {
                    return Err(QmpError::Closed { why: format!("it ended before {what}") });
                }
                Err(broadcast::error::RecvError::Lagged(count)) => {
                    return Err(QmpError::Protocol {
                        why: format!("{count} events were lost before {what}"),
                    });
                }
            }
        }
    };
    match tokio::time::timeout(limit, search).await {
        Ok(result) => result,
        Err(_) => Err(QmpError::Timeout { command: what.to_owned(), limit }),
    }
}

#[cfg(test)]
mod tests;
