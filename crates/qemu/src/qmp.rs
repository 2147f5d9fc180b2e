//! QMP, QEMU's control protocol: one JSON object a line over a unix socket.
//!
//! A small client of Godwit's own, because a switchover waits for it. One task reads the
//! connection, stamps each event with the time of its reading and passes responses to their
//! callers; nothing polls. It accepts the messages of QEMU 7.2 to 10.x and ignores unknown fields
//! and events.

use std::collections::HashMap;
use std::io::IoSlice;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncReadExt, Interest};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::{broadcast, oneshot, watch};
use tokio::task::AbortHandle;

use godwit_types::Fault;

pub(crate) mod message;

/// Event: QEMU is about to end; `guest` in its data says whether the guest requested that. QEMU's
/// main loop sends it in the turn in which it finds the request: before it answers a later command,
/// and before the completion of a migration whose guest was stopped after the request (7.2
/// `main_loop_should_exit`).
pub const SHUTDOWN: &str = "SHUTDOWN";
/// Event: the guest's kernel panicked, and said so by its pvpanic device.
const GUEST_PANICKED: &str = "GUEST_PANICKED";
/// Event: the guest's watchdog ran out; `action` in its data is what QEMU does.
pub const WATCHDOG: &str = "WATCHDOG";

use message::Message;

/// Longest time until QEMU's greeting. It responds once its main loop runs.
const GREETING_LIMIT: Duration = Duration::from_secs(30);
/// Longest time for a command by default: a few (`stop`, `cont`) wait for disks.
const COMMAND_LIMIT: Duration = Duration::from_secs(60);
/// Longest line accepted. The longest known, the schema of QEMU 10, has 0.3 MB. As JSON values it
/// may use a hundred times as much.
const LONGEST_LINE_BYTES: usize = 1 << 20;
/// Events kept for a receiver that does not read; it loses older ones.
const EVENTS_KEPT: usize = 256;
/// Longest event that is kept: a few hundred bytes in QEMU 10. Longer ones are dropped, because so
/// many are kept.
const LONGEST_EVENT_BYTES: usize = 8 << 10;
/// Most values in an event that is kept: about ten in QEMU 10. As JSON values, 8 KiB of text may
/// use a hundred times as much; with this limit all kept events use 16 MiB at most.
const MOST_EVENT_VALUES: usize = 64;
/// Event for each write that the target of a copy refuses, as many as the guest writes. Nobody
/// reads it: it must not take the place of others.
const REFUSED_WRITE: &str = "BLOCK_JOB_ERROR";

/// A connection to one QEMU. Cheap to clone; the connection ends with the last clone.
#[derive(Clone, Debug)]
pub struct Qmp {
    connection: Arc<Connection>,
}

/// Why a QEMU ends that was not asked to, as its events say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CrashSign {
    /// The guest's kernel panicked.
    Panic,
    /// The guest's watchdog ran out, and its action ends QEMU.
    Watchdog,
}

impl CrashSign {
    fn of_event(name: &str, data: &Value) -> Option<CrashSign> {
        match name {
            // A guest that is only paused, or goes on, can be reset and end in any other way.
            GUEST_PANICKED if data["action"] == "poweroff" => Some(CrashSign::Panic),
            WATCHDOG if data["action"] == "poweroff" => Some(CrashSign::Watchdog),
            _ => None,
        }
    }
}

/// An event from QEMU.
#[derive(Clone, Debug, PartialEq)]
pub struct QmpEvent {
    /// `STOP`, `RESUME`, `MIGRATION` and so on.
    pub name: String,
    /// Data of the event; null if it has none.
    pub data: Value,
    /// Time when it was read from the connection.
    pub at: Instant,
    /// Time when QEMU created it, by the wall clock since the epoch; microseconds.
    pub emitted: Option<Duration>,
}

/// Why a command has no response, or an invalid one.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum QmpError {
    /// QEMU refuses the command.
    #[error("QEMU refuses {command}: {desc}")]
    Command {
        command: String,
        /// QEMU's error class, mostly `GenericError`.
        class: String,
        /// QEMU's message.
        desc: String,
    },
    /// The connection ended; usually QEMU is gone.
    #[error("the connection to QEMU's monitor is closed: {why}")]
    Closed {
        /// How the connection ended.
        why: String,
    },
    /// The socket cannot be reached.
    #[error("cannot reach QEMU's monitor at {}: {why}", path.display())]
    Io {
        /// The socket.
        path: PathBuf,
        /// The system error.
        why: String,
    },
    /// No response within the limit.
    #[error("QEMU did not respond to {command} within {limit:?}")]
    Timeout {
        /// The command, or what was awaited.
        command: String,
        /// The time limit.
        limit: Duration,
    },
    /// QEMU does not start the vCPUs.
    #[error("QEMU does not start the vCPUs: {why}")]
    NotResumed {
        /// QEMU's message, or its state.
        why: String,
    },
    /// The message is not QMP, or lacks what the command promises.
    #[error("QEMU's monitor violates the protocol: {why}")]
    Protocol {
        /// The offending message.
        why: String,
    },
}

impl QmpError {
    /// Stable code for programs.
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
            QmpError::Command { .. } => "see the VM's log for further messages of QEMU",
            QmpError::Closed { .. } => "see the VM's log for why QEMU ended, then start the VM",
            QmpError::Io { .. } => {
                "check that the VM's QEMU runs; only the agent may use its monitor"
            }
            QmpError::Timeout { .. } => {
                "check the host's load and disks, and that no other program uses the monitor"
            }
            QmpError::NotResumed { .. } => {
                "see the VM's log for what blocks its QEMU; if that persists, stop the VM and \
                start it"
            }
            QmpError::Protocol { .. } => "check that the VM runs under a stock QEMU, 7.2 or later",
        };
        text.to_owned()
    }

    /// Combines code, message and remedy.
    #[must_use]
    pub fn fault(&self) -> Fault {
        Fault::new(self.code(), self.to_string(), self.remedy())
    }
}

#[derive(Debug)]
struct Connection {
    shared: Arc<Shared>,
    writer: tokio::sync::Mutex<OwnedWriteHalf>,
    /// Held from sending a descriptor to the response: QEMU keeps only those of the last message.
    descriptor_turn: tokio::sync::Mutex<()>,
    next_id: AtomicU64,
    reader: AbortHandle,
}

/// State shared by the reading task and the callers.
#[derive(Debug)]
struct Shared {
    waiting: Mutex<HashMap<u64, Waiting>>,
    /// Weak, because the reading task owns the sender: receivers then see the end of the
    /// connection.
    events: broadcast::WeakSender<QmpEvent>,
    /// Why the connection ended; `None` while it is open.
    closed: watch::Sender<Option<String>>,
    /// Whether the guest has shut itself down.
    guest_has_shut_down: watch::Sender<bool>,
    /// What QEMU last said of a crash.
    crash: Mutex<Option<CrashSign>>,
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
    /// Nothing listens there, the greeting does not come within 30 s (QEMU serves one connection at
    /// a time), or the peer does not speak QMP.
    pub async fn connect(path: impl AsRef<Path>) -> Result<Qmp, QmpError> {
        let path = path.as_ref();
        let stream = UnixStream::connect(path)
            .await
            .map_err(|why| QmpError::Io { path: path.to_owned(), why: why.to_string() })?;
        Qmp::negotiate(stream).await
    }

    /// Connects to the socket of a QEMU that another program started. Returns also the process that
    /// listens there, as the kernel knows it.
    ///
    /// # Errors
    /// Those of [`Qmp::connect`].
    pub async fn connect_to_process(path: &Path) -> Result<(Qmp, Option<i32>), QmpError> {
        let stream = UnixStream::connect(path)
            .await
            .map_err(|why| QmpError::Io { path: path.to_owned(), why: why.to_string() })?;
        let pid = stream.peer_cred().ok().and_then(|peer| peer.pid());
        Ok((Qmp::negotiate(stream).await?, pid))
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
            crash: Mutex::default(),
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
                why: format!("its greeting is {}", message::shorten(greeting)),
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

    /// Runs a command; returns QEMU's return value (`{}` for most). `arguments` is an object, or
    /// null for none.
    ///
    /// # Errors
    /// QEMU refuses, the connection ends, or no response comes within 60 s.
    pub async fn execute(&self, command: &str, arguments: Value) -> Result<Value, QmpError> {
        self.execute_within(command, arguments, COMMAND_LIMIT).await
    }

    /// Runs a command with its own time limit. The command is not undone when the limit passes.
    ///
    /// # Errors
    /// Those of [`Qmp::execute`].
    pub async fn execute_within(
        &self,
        command: &str,
        arguments: Value,
        limit: Duration,
    ) -> Result<Value, QmpError> {
        self.run(command, arguments, None, limit).await
    }

    /// Runs a command that takes a descriptor (`getfd`, `add-fd`). QEMU gets a duplicate; the
    /// caller keeps `fd`.
    ///
    /// # Errors
    /// Those of [`Qmp::execute`].
    pub async fn execute_with_fd(
        &self,
        command: &str,
        arguments: Value,
        fd: BorrowedFd<'_>,
    ) -> Result<Value, QmpError> {
        let _turn = self.connection.descriptor_turn.lock().await;
        self.run(command, arguments, Some(fd), COMMAND_LIMIT).await
    }

    /// Subscribes to events from now on, each with the time it was read. Subscribe before the
    /// command whose events matter.
    #[must_use]
    pub fn events(&self) -> broadcast::Receiver<QmpEvent> {
        match self.connection.shared.events.upgrade() {
            Some(events) => events.subscribe(),
            // A receiver that reports the end at once.
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
    /// It is set before a caller gets any message that follows QEMU's [`SHUTDOWN`](crate::SHUTDOWN)
    /// event: an event, a response, the end of the connection.
    #[must_use]
    pub fn guest_has_shut_down(&self) -> bool {
        *self.connection.shared.guest_has_shut_down.borrow()
    }

    /// Returns what QEMU said of a crash, if it did. QEMU calls the end after a panic a shutdown by
    /// the guest, too.
    #[must_use]
    pub fn crash(&self) -> Option<CrashSign> {
        *self.connection.shared.crash.lock()
    }

    /// Waits until the guest shuts itself down; forever if it does not.
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
        // Forgets the command when this call ends early: a late response is then dropped.
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
        // Half a line would corrupt every command after it.
        let mut whole =
            CloseUnlessWhole { shared: &self.connection.shared, stream, is_between_lines: true };
        let mut sent = 0;
        while sent < line.len() {
            let fd_now = if sent == 0 { fd } else { None };
            let result = stream
                .async_io(Interest::WRITABLE, || send_some(stream, &line[sent..], fd_now))
                .await;
            sent += result.map_err(|why| {
                self.connection.shared.close(format!("cannot write to it: {why}"));
                self.connection.shared.closed_error()
            })?;
            whole.is_between_lines = sent == line.len();
        }
        Ok(())
    }
}

/// Sends as much as the socket accepts, with the descriptor on the first byte.
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
            let why = "a command was cancelled while it was being written";
            self.shared.close(why.to_owned());
            // This ends the reading task, unless it has ended already.
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
    fn waiting(&self) -> parking_lot::MutexGuard<'_, HashMap<u64, Waiting>> {
        self.waiting.lock()
    }

    fn wait_for_answer(&self, id: u64, waiting: Waiting) -> Result<(), QmpError> {
        let mut all = self.waiting();
        // Checked under the lock that close() takes: either close() finds this entry, or this sees
        // the end.
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

    /// Marks the connection as ended and wakes all callers. The first reason counts.
    fn close(&self, why: String) {
        let mut waiting = self.waiting();
        self.closed.send_if_modified(|closed| {
            let is_first = closed.is_none();
            closed.get_or_insert(why);
            is_first
        });
        // Their senders drop; the callers then read the reason.
        waiting.clear();
    }

    fn answer(&self, id: Option<u64>, result: Result<Value, (String, String)>) {
        let Some(waiting) = id.and_then(|id| self.waiting().remove(&id)) else {
            tracing::debug!(?id, "unexpected QMP response");
            return;
        };
        let command = waiting.command;
        let result = result.map_err(|(class, desc)| QmpError::Command { command, class, desc });
        // The caller may just have stopped waiting.
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
            Ok(Message::Event { name, .. }) if name == REFUSED_WRITE => {}
            Ok(Message::Event { name, data, .. })
                if length > LONGEST_EVENT_BYTES || count_values(&data) > MOST_EVENT_VALUES =>
            {
                tracing::warn!(
                    length,
                    event = message::shorten(name.as_bytes()),
                    "dropping an event of QEMU that is too long to keep"
                );
            }
            Ok(Message::Event { name, data, emitted }) => {
                if name == SHUTDOWN && data["guest"] == true {
                    shared.guest_has_shut_down.send_replace(true);
                }
                if let Some(sign) = CrashSign::of_event(&name, &data) {
                    *shared.crash.lock() = Some(sign);
                }
                // There may be no subscriber.
                let _ = events.send(QmpEvent { name, data, at, emitted });
            }
            Ok(Message::Answer { id, result }) => shared.answer(id, result),
            Ok(Message::Greeting | Message::Unknown) => tracing::debug!("ignoring a QMP message"),
            Err(why) => break why,
        }
    };
    shared.close(why);
}

/// Counts the values, including those in lists and objects.
fn count_values(value: &Value) -> usize {
    1 + match value {
        Value::Array(items) => items.iter().map(count_values).sum::<usize>(),
        Value::Object(fields) => fields.values().map(count_values).sum(),
        _ => 0,
    }
}

/// Splits the stream into lines of bounded length.
pub(crate) struct Lines<R> {
    stream: R,
    buffer: Vec<u8>,
    /// Offset in the buffer of the next line.
    start: usize,
    /// Offset in the buffer up to which no further line end exists.
    searched: usize,
}

impl<R: AsyncRead + Unpin> Lines<R> {
    pub(crate) fn new(stream: R) -> Lines<R> {
        Lines { stream, buffer: Vec::with_capacity(64 << 10), start: 0, searched: 0 }
    }

    /// Returns the next line without its end.
    pub(crate) async fn next(&mut self) -> Result<&[u8], String> {
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
                Err(why) => return Err(format!("cannot read from it: {why}")),
            }
        }
    }
}

/// Waits for the next event that `wanted` accepts; skips others.
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
pub(crate) mod scripted;
#[cfg(test)]
mod tests;
