//! The asking side of the client daemon.

use std::io::{self, BufRead, BufReader, Write};
use std::net::IpAddr;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::client::record::Gaps;
use crate::client::{Refusal, Request};

/// Longest that an answer takes beyond what was asked to wait for.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);

/// Why the client daemon gave no answer.
#[derive(Debug, thiserror::Error)]
pub enum AskError {
    /// It does not listen.
    #[error("the lab's client does not answer on {}: {source}; `godwit lab up` starts it", socket.display())]
    Connect {
        /// Where it should.
        socket: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// The conversation broke.
    #[error("the lab's client broke off: {0}; `godwit lab status` tells whether it runs")]
    Io(#[from] io::Error),
    /// It answered something else.
    #[error(
        "the lab's client gave an answer of another version: {0}; bring the lab up anew with this godwit"
    )]
    Protocol(#[from] serde_json::Error),
    /// It refused.
    #[error("{message}; {mend}")]
    Refused {
        /// For programs: `not_watched`, `failed`, `bad_request`.
        code: String,
        /// What and why.
        message: String,
        /// What to do.
        mend: String,
    },
}

/// A connection to the client daemon. Blocking; one request at a time.
#[derive(Debug)]
pub struct Client {
    stream: BufReader<UnixStream>,
}

impl Client {
    /// Connects to the daemon's socket.
    ///
    /// # Errors
    /// Nobody listens there.
    pub fn connect(socket: &Path) -> Result<Client, AskError> {
        let stream = UnixStream::connect(socket)
            .map_err(|source| AskError::Connect { socket: socket.to_owned(), source })?;
        Ok(Client { stream: BufReader::new(stream) })
    }

    /// Has `target` probed from now on; no matter if it is already, or does not exist yet.
    ///
    /// # Errors
    /// There are too many targets, or the daemon is gone.
    pub fn watch(&mut self, target: IpAddr) -> Result<(), AskError> {
        self.ask(&Request::Watch { target }, Duration::ZERO).map(|_: Value| ())
    }

    /// Has `target` left alone; its records are gone.
    ///
    /// # Errors
    /// The daemon is gone.
    pub fn unwatch(&mut self, target: IpAddr) -> Result<(), AskError> {
        self.ask(&Request::Unwatch { target }, Duration::ZERO).map(|_: Value| ())
    }

    /// What the probes to `target` say of a span of time (`CLOCK_MONOTONIC`, see
    /// [`monotonic_ns`](crate::clock::monotonic_ns)); eight minutes are kept.
    ///
    /// # Errors
    /// It is not watched, or the daemon is gone.
    pub fn gaps(&mut self, target: IpAddr, since_ns: u64, until_ns: u64) -> Result<Gaps, AskError> {
        self.ask(&Request::Gaps { target, since_ns, until_ns }, Duration::ZERO)
    }

    /// Waits until `target` has answered at or after `since_ns`; gives when, or `None` past the limit.
    ///
    /// # Errors
    /// It is not watched, or the daemon is gone.
    pub fn wait_answer(
        &mut self,
        target: IpAddr,
        since_ns: u64,
        limit: Duration,
    ) -> Result<Option<u64>, AskError> {
        #[derive(Deserialize)]
        struct Answered {
            answered_ns: Option<u64>,
        }
        let timeout_ms = u64::try_from(limit.as_millis()).unwrap_or(u64::MAX);
        let answered: Answered = self.ask(&Request::Wait { target, since_ns, timeout_ms }, limit)?;
        Ok(answered.answered_ns)
    }

    /// Who is watched.
    ///
    /// # Errors
    /// The daemon is gone.
    pub fn targets(&mut self) -> Result<Vec<IpAddr>, AskError> {
        #[derive(Deserialize)]
        struct Targets {
            targets: Vec<IpAddr>,
        }
        let targets: Targets = self.ask(&Request::Targets, Duration::ZERO)?;
        Ok(targets.targets)
    }

    fn ask<T: DeserializeOwned>(&mut self, request: &Request, wait: Duration) -> Result<T, AskError> {
        self.stream.get_ref().set_read_timeout(Some(ANSWER_LIMIT.saturating_add(wait)))?;
        let line = format!("{}\n", serde_json::to_string(request)?);
        self.stream.get_mut().write_all(line.as_bytes())?;
        let mut answer = String::new();
        if self.stream.read_line(&mut answer)? == 0 {
            return Err(AskError::Io(io::ErrorKind::UnexpectedEof.into()));
        }
        let value: Value = serde_json::from_str(&answer)?;
        if let Some(error) = value.get("error") {
            let Refusal { code, message, mend } = serde_json::from_value(error.clone())?;
            return Err(AskError::Refused { code, message, mend });
        }
        Ok(serde_json::from_value(value)?)
    }
}
