//! The daemon: it probes each target that it is asked to watch. Requests come over a unix socket,
//! one JSON line each, and so do the answers:
//!
//! ```text
//! {"cmd":"watch","target":"10.88.0.21"}
//!   → {"ok":true}
//! {"cmd":"gaps","target":"10.88.0.21","since_ns":N,"until_ns":M}
//!   → {"sent":…,"received":…,"lost":…,…}
//! {"cmd":"wait","target":"10.88.0.21","since_ns":N,"timeout_ms":T}
//!   → {"answered_ns":N}, or {"answered_ns":null}
//! {"cmd":"targets"}
//!   → {"targets":["10.88.0.21"]}
//! {"cmd":"unwatch","target":"10.88.0.21"}
//!   → {"ok":true}
//! ```
//!
//! Times are `CLOCK_MONOTONIC` nanoseconds, which all processes of a machine share. A request that
//! fails is answered by `{"error":{"code","message","remedy"}}`.

use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::IpAddr;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::clock;
use crate::prober::{Prober, Target};

/// Longest request, bytes.
const MAX_REQUEST_BYTES: u64 = 4096;
/// Longest time that one request waits.
const MAX_WAIT: Duration = Duration::from_secs(600);

/// The daemon's configuration.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServerConfig {
    /// Unix socket on which it listens.
    pub socket: PathBuf,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "cmd", rename_all = "lowercase")]
pub(crate) enum Request {
    Watch { target: IpAddr },
    Unwatch { target: IpAddr },
    Gaps { target: IpAddr, since_ns: u64, until_ns: u64 },
    Wait { target: IpAddr, since_ns: u64, timeout_ms: u64 },
    Targets,
}

/// Why a request failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Refusal {
    pub(crate) code: String,
    pub(crate) message: String,
    pub(crate) remedy: String,
}

/// Listens, calls `ready`, then probes until the process ends. Runs in the network namespace that
/// it probes from.
///
/// # Errors
/// It cannot listen on the socket, or the kernel cannot wait for sockets.
pub fn run(config: &ServerConfig, ready: impl FnOnce() -> Result<()>) -> Result<()> {
    let socket = &config.socket;
    match std::fs::remove_file(socket) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            bail!("cannot replace {}: {error}", socket.display())
        }
        _ => {}
    }
    let listener = UnixListener::bind(socket)
        .with_context(|| format!("cannot listen on {}", socket.display()))?;
    let prober = Arc::new(Prober::new()?);
    let served = Arc::clone(&prober);
    std::thread::Builder::new()
        .name("listen".to_owned())
        .spawn(move || listen(&listener, &served))?;
    ready()?;
    prober.run()
}

/// Serves each connection with a thread: there are few.
fn listen(listener: &UnixListener, prober: &Arc<Prober>) {
    for stream in listener.incoming().flatten() {
        let prober = Arc::clone(prober);
        let serve = move || drop(serve(&stream, &prober));
        drop(std::thread::Builder::new().name("serve".to_owned()).spawn(serve));
    }
}

/// Answers one connection until its other end closes it.
fn serve(stream: &UnixStream, prober: &Prober) -> Result<()> {
    let mut reader = BufReader::new(stream);
    loop {
        let mut line = String::new();
        if (&mut reader).take(MAX_REQUEST_BYTES).read_line(&mut line)? == 0 {
            return Ok(());
        }
        let answer = match serde_json::from_str::<Request>(&line) {
            Ok(request) => answer(prober, &request),
            Err(error) => refuse(
                "bad_request",
                &format!("not a request: {error}"),
                "send one JSON object a line",
            ),
        };
        let mut writer = stream;
        writer.write_all(format!("{answer}\n").as_bytes())?;
        if !line.ends_with('\n') {
            return Ok(());
        }
    }
}

fn answer(prober: &Prober, request: &Request) -> Value {
    match request {
        Request::Watch { target } => done(prober.watch(*target)),
        Request::Unwatch { target } => done(prober.unwatch(*target)),
        Request::Gaps { target, since_ns, until_ns } => watched(prober, *target, |target| {
            let gaps = target.log().gaps(*since_ns, *until_ns, clock::monotonic_ns());
            serde_json::to_value(gaps).unwrap_or_default()
        }),
        Request::Wait { target, since_ns, timeout_ms } => watched(prober, *target, |target| {
            let limit = Duration::from_millis(*timeout_ms).min(MAX_WAIT);
            json!({ "answered_ns": target.wait_answer(*since_ns, limit) })
        }),
        Request::Targets => {
            let targets = prober.targets();
            json!({ "targets": targets.iter().map(|target| target.address()).collect::<Vec<_>>() })
        }
    }
}

fn watched(prober: &Prober, address: IpAddr, answer: impl FnOnce(&Target) -> Value) -> Value {
    match prober.target(address) {
        Some(target) => answer(&target),
        None => refuse("not_watched", &format!("{address} is not watched"), "send watch first"),
    }
}

fn done(result: Result<()>) -> Value {
    match result {
        Ok(()) => json!({ "ok": true }),
        Err(error) => refuse("failed", &format!("{error:#}"), "look at the prober's log"),
    }
}

fn refuse(code: &str, message: &str, remedy: &str) -> Value {
    let refusal =
        Refusal { code: code.to_owned(), message: message.to_owned(), remedy: remedy.to_owned() };
    json!({ "error": refusal })
}

#[cfg(test)]
mod tests {
    use crate::client::{AskError, Client};

    use super::*;

    #[test]
    fn requests_are_read_as_documented() {
        let text = r#"{"cmd":"gaps","target":"fd88::21","since_ns":1,"until_ns":2}"#;
        let target = "fd88::21".parse().unwrap();
        assert_eq!(
            serde_json::from_str::<Request>(text).unwrap(),
            Request::Gaps { target, since_ns: 1, until_ns: 2 }
        );
        assert!(serde_json::from_str::<Request>(r#"{"cmd":"watch","target":"nobody"}"#).is_err());
    }

    #[test]
    fn a_client_gets_answers() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("client.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let prober = Arc::new(Prober::new().unwrap());
        let served = Arc::clone(&prober);
        // Both end with the test's process: they wait for connections without an end.
        std::thread::spawn(move || listen(&listener, &served));
        let mut client = Client::connect(&path).unwrap();
        let target: IpAddr = "127.0.0.9".parse().unwrap();
        let not_watched = client.gaps(target, 0, u64::MAX).unwrap_err();
        assert!(
            matches!(not_watched, AskError::Refused { ref code, .. } if code == "not_watched"),
            "{not_watched}"
        );
        client.watch(target).unwrap();
        assert_eq!(client.targets().unwrap(), [target]);
        assert_eq!(client.gaps(target, 0, u64::MAX).unwrap().sent, 0);
        assert_eq!(client.wait_answer(target, 0, Duration::from_millis(1)).unwrap(), None);
        client.unwatch(target).unwrap();
        assert!(client.targets().unwrap().is_empty());
    }

    #[test]
    fn nonsense_gets_an_error() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("client.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let prober = Arc::new(Prober::new().unwrap());
        std::thread::spawn(move || listen(&listener, &prober));
        let mut stream = UnixStream::connect(&path).unwrap();
        stream.write_all(b"hello\n").unwrap();
        let mut line = String::new();
        BufReader::new(stream).read_line(&mut line).unwrap();
        let answer: Value = serde_json::from_str(&line).unwrap();
        assert_eq!(answer["error"]["code"], "bad_request");
    }
}
