//! The asking side of the daemon ([`crate::server`]).

use std::io::{self, BufRead, BufReader, Write};
use std::net::IpAddr;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::record::Gaps;
use crate::server::{Refusal, Request};

/// Longest time that an answer may take, beyond the wait that the request asks for.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);

/// Why the daemon gave no answer.
#[derive(Debug, thiserror::Error)]
pub enum AskError {
    /// The daemon does not listen.
    #[error(
        "cannot connect to the prober at {}: {source}; start it, or remove [watch] from the hosts \
         file",
        socket.display()
    )]
    Connect {
        socket: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The connection broke.
    #[error("the prober closed the connection: {0}; check that it runs")]
    Io(#[from] io::Error),
    /// The answer is not one of this version.
    #[error(
        "cannot read the prober's answer: {0}; restart the prober with the version of this program"
    )]
    Protocol(#[from] serde_json::Error),
    /// The daemon refused the request.
    #[error("{message}; {remedy}")]
    Refused {
        /// For programs: `not_watched`, `failed`, `bad_request`.
        code: String,
        /// What failed, and why.
        message: String,
        /// What to do.
        remedy: String,
    },
}

/// A connection to the daemon. Blocking; one request at a time.
#[derive(Debug)]
pub struct Client {
    stream: BufReader<UnixStream>,
}

impl Client {
    /// Connects to the daemon's socket.
    ///
    /// # Errors
    /// No daemon listens there.
    pub fn connect(socket: &Path) -> Result<Client, AskError> {
        let stream = UnixStream::connect(socket)
            .map_err(|source| AskError::Connect { socket: socket.to_owned(), source })?;
        Ok(Client { stream: BufReader::new(stream) })
    }

    /// Starts to probe `target`, which need not exist yet. Changes nothing if it is probed already.
    ///
    /// # Errors
    /// There are too many targets, or the daemon is unreachable.
    pub fn watch(&mut self, target: IpAddr) -> Result<(), AskError> {
        self.ask(&Request::Watch { target }, Duration::ZERO).map(|_: Value| ())
    }

    /// Stops probing `target` and drops its records.
    ///
    /// # Errors
    /// The daemon is unreachable.
    pub fn unwatch(&mut self, target: IpAddr) -> Result<(), AskError> {
        self.ask(&Request::Unwatch { target }, Duration::ZERO).map(|_: Value| ())
    }

    /// Returns the gaps of `target` in a span of time (`CLOCK_MONOTONIC`, see
    /// [`monotonic_ns`](crate::clock::monotonic_ns)). The daemon keeps eight minutes.
    ///
    /// # Errors
    /// The target is not watched, or the daemon is unreachable.
    pub fn gaps(&mut self, target: IpAddr, since_ns: u64, until_ns: u64) -> Result<Gaps, AskError> {
        self.ask(&Request::Gaps { target, since_ns, until_ns }, Duration::ZERO)
    }

    /// Waits until `target` has answered at or after `since_ns`. Returns the time of that answer,
    /// or `None` after `limit`.
    ///
    /// # Errors
    /// The target is not watched, or the daemon is unreachable.
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
        let answered: Answered =
            self.ask(&Request::Wait { target, since_ns, timeout_ms }, limit)?;
        Ok(answered.answered_ns)
    }

    /// Returns the targets that are probed.
    ///
    /// # Errors
    /// The daemon is unreachable.
    pub fn targets(&mut self) -> Result<Vec<IpAddr>, AskError> {
        #[derive(Deserialize)]
        struct Targets {
            targets: Vec<IpAddr>,
        }
        let targets: Targets = self.ask(&Request::Targets, Duration::ZERO)?;
        Ok(targets.targets)
    }

    fn ask<T: DeserializeOwned>(
        &mut self,
        request: &Request,
        wait: Duration,
    ) -> Result<T, AskError> {
        self.stream.get_ref().set_read_timeout(Some(ANSWER_LIMIT.saturating_add(wait)))?;
        let line = format!("{}\n", serde_json::to_string(request)?);
        self.stream.get_mut().write_all(line.as_bytes())?;
        let mut answer = String::new();
        if self.stream.read_line(&mut answer)? == 0 {
            return Err(AskError::Io(io::ErrorKind::UnexpectedEof.into()));
        }
        let value: Value = serde_json::from_str(&answer)?;
        if let Some(error) = value.get("error") {
            let Refusal { code, message, remedy } = serde_json::from_value(error.clone())?;
            return Err(AskError::Refused { code, message, remedy });
        }
        Ok(serde_json::from_value(value)?)
    }
}
