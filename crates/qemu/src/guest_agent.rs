//! Client of the agent inside a guest (`qemu-ga`, protocol of QEMU 7.2 to 10.0), over the VM's
//! virtio-serial port.
//!
//! The guest is hostile. It may be silent, lie, or send without end. So each session has a time
//! limit and a limit of bytes, lines have a longest length, and texts are cleaned and cut before
//! anyone sees them. Nothing that the guest sends goes to a log or an error.
//!
//! A session begins with `guest-sync-delimited`. What an earlier session left in the port is
//! discarded: the byte 0xFF, which no JSON contains, precedes the answer.

mod facts;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::sync::Mutex;
use uuid::Uuid;

pub use facts::{GuestFacts, GuestInterface};
pub(crate) use facts::{interfaces, os_name, text};

/// Socket of the guest agent's port in a VM's run directory.
pub const GUEST_AGENT_SOCKET: &str = "guest-agent.sock";
/// Name of the port, which the guest's agent opens.
pub const GUEST_AGENT_PORT: &str = "org.qemu.guest_agent.0";

/// Longest answer that is read, in bytes: a guest with some hundred interfaces.
const MOST_LINE_BYTES: usize = 256 << 10;
/// Most bytes that are read in one session.
const MOST_SESSION_BYTES: usize = 1 << 20;
/// Longest session that asks for facts or sets the clock, including the wait for its turn.
const ASK_LIMIT: Duration = Duration::from_secs(5);
/// Longest wait for the answer to the first message of a session. An agent that runs answers at
/// once.
const SYNC_LIMIT: Duration = Duration::from_secs(2);
/// Longest freeze or thaw: file systems write what is in their caches.
const FREEZE_LIMIT: Duration = Duration::from_secs(30);
/// Wait for a refusal of a shutdown. An agent that obeys does not answer.
const SHUTDOWN_REFUSAL_LIMIT: Duration = Duration::from_secs(1);
/// Smallest difference of the guest's clock that is corrected. A session takes some milliseconds,
/// so a guest with a time service has a better clock than this would set.
const MOST_CLOCK_ERROR: Duration = Duration::from_millis(250);

/// First byte of a delimited message.
const DELIMITER: u8 = 0xff;

/// Why the guest's agent did not do what it was asked for. The texts contain nothing that the guest
/// sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GuestAgentError {
    /// QEMU does not accept a connection to the port.
    #[error("QEMU does not accept a connection to its port")]
    Unreachable,
    /// The agent does not answer, so it received no command.
    #[error("it does not answer")]
    Silent,
    /// The agent did not answer a command in time, or closed the port.
    #[error("it did not answer {command}")]
    Unanswered { command: &'static str },
    /// The answer is not one of the protocol, or too long.
    #[error("it sent something else than an answer to {command}")]
    Garbage { command: &'static str },
    /// The agent refused the command, or does not know it.
    #[error("it refused {command}")]
    Refused { command: &'static str },
}

impl GuestAgentError {
    /// Whether the agent certainly received no command.
    #[must_use]
    pub fn is_unsent(self) -> bool {
        matches!(self, GuestAgentError::Unreachable | GuestAgentError::Silent)
    }
}

/// The agent of one guest. One session at a time: QEMU serves one connection.
#[derive(Clone, Debug)]
pub struct GuestAgent {
    socket: PathBuf,
    turn: Arc<Mutex<()>>,
}

impl GuestAgent {
    /// Creates a client; nothing is connected yet.
    #[must_use]
    pub fn new(socket: PathBuf) -> GuestAgent {
        GuestAgent { socket, turn: Arc::default() }
    }

    /// Asks for the guest's name, operating system and interfaces. What the agent does not know is
    /// left out.
    ///
    /// # Errors
    /// The agent does not answer in time, or not according to the protocol.
    pub async fn facts(&self) -> Result<GuestFacts, GuestAgentError> {
        self.within(ASK_LIMIT, "guest-info", async |session| {
            let info = session.execute("guest-info", Value::Null).await?;
            let host_name = session.ask("guest-get-host-name").await?;
            let os = session.ask("guest-get-osinfo").await?;
            let network = session.ask("guest-network-get-interfaces").await?;
            Ok(GuestFacts {
                agent_version: text(&info["version"]),
                host_name: text(&host_name["host-name"]),
                os: os_name(&os),
                kernel: text(&os["kernel-release"]),
                interfaces: interfaces(&network),
            })
        })
        .await
    }

    /// Asks the guest to power itself off. Returns once the agent has the request.
    ///
    /// # Errors
    /// The agent does not answer, or refuses.
    pub async fn shut_down(&self) -> Result<(), GuestAgentError> {
        const COMMAND: &str = "guest-shutdown";
        self.within(ASK_LIMIT, COMMAND, async |session| {
            session.send(COMMAND, json!({ "mode": "powerdown" })).await?;
            match tokio::time::timeout(SHUTDOWN_REFUSAL_LIMIT, session.answer(COMMAND)).await {
                Ok(Err(refused @ GuestAgentError::Refused { .. })) => Err(refused),
                // An answer, the end of the port or silence: the guest shuts down.
                _ => Ok(()),
            }
        })
        .await
    }

    /// Freezes the guest's file systems; returns how many.
    ///
    /// # Errors
    /// The agent does not answer in time, or refuses. Unless [`GuestAgentError::is_unsent`], file
    /// systems may be frozen.
    pub async fn freeze(&self) -> Result<u64, GuestAgentError> {
        const COMMAND: &str = "guest-fsfreeze-freeze";
        self.within(FREEZE_LIMIT, COMMAND, async |session| {
            let frozen = session.execute(COMMAND, Value::Null).await?;
            frozen.as_u64().ok_or(GuestAgentError::Garbage { command: COMMAND })
        })
        .await
    }

    /// Thaws the guest's file systems; has no effect on a guest that is not frozen.
    ///
    /// # Errors
    /// The agent does not answer in time, or refuses.
    pub async fn thaw(&self) -> Result<(), GuestAgentError> {
        const COMMAND: &str = "guest-fsfreeze-thaw";
        self.within(FREEZE_LIMIT, COMMAND, async |session| {
            session.execute(COMMAND, Value::Null).await.map(drop)
        })
        .await
    }

    /// Whether the agent has frozen file systems.
    ///
    /// # Errors
    /// The agent does not answer in time, or refuses.
    pub async fn is_frozen(&self) -> Result<bool, GuestAgentError> {
        const COMMAND: &str = "guest-fsfreeze-status";
        self.within(ASK_LIMIT, COMMAND, async |session| {
            Ok(session.execute(COMMAND, Value::Null).await? == "frozen")
        })
        .await
    }

    /// Sets the guest's clock to the host's if it is wrong by more than 250 ms; returns whether it
    /// was.
    ///
    /// # Errors
    /// The agent does not answer in time, or refuses.
    pub async fn correct_clock(&self) -> Result<bool, GuestAgentError> {
        const ASK: &str = "guest-get-time";
        const SET: &str = "guest-set-time";
        self.within(ASK_LIMIT, ASK, async |session| {
            let before = since_1970();
            let guest = session.execute(ASK, Value::Null).await?;
            let guest = guest.as_u64().ok_or(GuestAgentError::Garbage { command: ASK })?;
            let (guest, after) = (Duration::from_nanos(guest), since_1970());
            // The guest read its clock at some time between the two.
            let wrong_by = before.saturating_sub(guest).max(guest.saturating_sub(after));
            if wrong_by <= MOST_CLOCK_ERROR {
                return Ok(false);
            }
            let nanos = u64::try_from(since_1970().as_nanos()).unwrap_or(u64::MAX);
            session.execute(SET, json!({ "time": nanos })).await?;
            Ok(true)
        })
        .await
    }

    /// Waits for the turn, opens a session and uses it, all within the limit.
    async fn within<T>(
        &self,
        limit: Duration,
        command: &'static str,
        work: impl AsyncFnOnce(&mut Session) -> Result<T, GuestAgentError>,
    ) -> Result<T, GuestAgentError> {
        let whole = async {
            let _turn = self.turn.lock().await;
            let mut session = Session::open(&self.socket).await?;
            work(&mut session).await
        };
        let done = tokio::time::timeout(limit, whole).await;
        done.unwrap_or(Err(GuestAgentError::Unanswered { command }))
    }
}

/// Returns the value in the line that answers a command.
pub(crate) fn returned(line: &[u8], command: &'static str) -> Result<Value, GuestAgentError> {
    let garbage = GuestAgentError::Garbage { command };
    let answer: Value = serde_json::from_slice(line).map_err(|_| garbage)?;
    let Value::Object(mut answer) = answer else { return Err(garbage) };
    match (answer.remove("return"), answer.contains_key("error")) {
        (Some(value), false) => Ok(value),
        (None, true) => Err(GuestAgentError::Refused { command }),
        _ => Err(garbage),
    }
}

fn since_1970() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// A connection to the port whose other end has answered.
struct Session {
    stream: UnixStream,
    /// Bytes after the last complete line.
    read: Vec<u8>,
    /// Bytes that may still be read.
    budget: usize,
}

impl Session {
    async fn open(socket: &std::path::Path) -> Result<Session, GuestAgentError> {
        let connected = tokio::time::timeout(SYNC_LIMIT, UnixStream::connect(socket)).await;
        let stream = match connected {
            Ok(Ok(stream)) => stream,
            _ => return Err(GuestAgentError::Unreachable),
        };
        let mut session = Session { stream, read: Vec::new(), budget: MOST_SESSION_BYTES };
        let synchronized = tokio::time::timeout(SYNC_LIMIT, session.synchronize()).await;
        match synchronized {
            Ok(Ok(())) => Ok(session),
            _ => Err(GuestAgentError::Silent),
        }
    }

    async fn synchronize(&mut self) -> Result<(), GuestAgentError> {
        const COMMAND: &str = "guest-sync-delimited";
        let (id, ..) = Uuid::new_v4().as_fields();
        // The delimiter ends what the guest's parser may have of an earlier session.
        self.write(&[DELIMITER], COMMAND).await?;
        self.send(COMMAND, json!({ "id": id })).await?;
        loop {
            let line = self.line(COMMAND).await?;
            let Some(at) = line.iter().rposition(|byte| *byte == DELIMITER) else { continue };
            let answer = serde_json::from_slice::<Value>(&line[at + 1..]);
            if answer.is_ok_and(|answer| answer["return"] == id) {
                return Ok(());
            }
        }
    }

    /// Asks for something that an older agent may not know; the answer is then null.
    async fn ask(&mut self, command: &'static str) -> Result<Value, GuestAgentError> {
        match self.execute(command, Value::Null).await {
            Err(GuestAgentError::Refused { .. }) => Ok(Value::Null),
            other => other,
        }
    }

    async fn execute(
        &mut self,
        command: &'static str,
        arguments: Value,
    ) -> Result<Value, GuestAgentError> {
        self.send(command, arguments).await?;
        self.answer(command).await
    }

    async fn send(
        &mut self,
        command: &'static str,
        arguments: Value,
    ) -> Result<(), GuestAgentError> {
        let mut message = json!({ "execute": command });
        if !arguments.is_null() {
            message["arguments"] = arguments;
        }
        self.write(format!("{message}\n").as_bytes(), command).await
    }

    async fn write(&mut self, bytes: &[u8], command: &'static str) -> Result<(), GuestAgentError> {
        let written = self.stream.write_all(bytes).await;
        written.map_err(|_| GuestAgentError::Unanswered { command })
    }

    async fn answer(&mut self, command: &'static str) -> Result<Value, GuestAgentError> {
        returned(&self.line(command).await?, command)
    }

    /// Reads a line, without its end.
    async fn line(&mut self, command: &'static str) -> Result<Vec<u8>, GuestAgentError> {
        let mut searched = 0;
        loop {
            if let Some(at) = self.read[searched..].iter().position(|byte| *byte == b'\n') {
                let rest = self.read.split_off(searched + at + 1);
                let mut line = std::mem::replace(&mut self.read, rest);
                line.pop();
                return Ok(line);
            }
            searched = self.read.len();
            if searched >= MOST_LINE_BYTES || self.budget == 0 {
                return Err(GuestAgentError::Garbage { command });
            }
            let mut piece = [0; 4096];
            let most = piece.len().min(self.budget);
            let count = self.stream.read(&mut piece[..most]).await.unwrap_or(0);
            if count == 0 {
                return Err(GuestAgentError::Unanswered { command });
            }
            self.budget -= count;
            self.read.extend_from_slice(&piece[..count]);
        }
    }
}

#[cfg(test)]
mod tests;
