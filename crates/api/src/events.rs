//! Streams of an agent: server-sent events whose names the type of the stream knows.

use std::collections::VecDeque;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use tokio::time::timeout;

use crate::sse::EventParser;
use crate::{ClientError, Endpoint, HostEvent, MigrationEvent, ProbeEvent};

/// Event that can be decoded from its name and its data.
pub trait StreamEvent: Sized {
    /// Decodes an event; returns `None` for an event of a later version.
    ///
    /// # Errors
    /// The data does not match the name of the event.
    fn read(name: &str, data: &str) -> Result<Option<Self>, serde_json::Error>;
}

impl StreamEvent for MigrationEvent {
    fn read(name: &str, data: &str) -> Result<Option<Self>, serde_json::Error> {
        Ok(Some(match name {
            "progress" => MigrationEvent::Progress(serde_json::from_str(data)?),
            "report" => MigrationEvent::Report(serde_json::from_str(data)?),
            _ => return Ok(None),
        }))
    }
}

impl StreamEvent for ProbeEvent {
    fn read(name: &str, data: &str) -> Result<Option<Self>, serde_json::Error> {
        Ok(Some(match name {
            "progress" => ProbeEvent::Progress(serde_json::from_str(data)?),
            "report" => ProbeEvent::Report(serde_json::from_str(data)?),
            "failed" => ProbeEvent::Failed(serde_json::from_str(data)?),
            _ => return Ok(None),
        }))
    }
}

impl StreamEvent for HostEvent {
    fn read(name: &str, data: &str) -> Result<Option<Self>, serde_json::Error> {
        Ok(Some(match name {
            "host" => HostEvent::Host(serde_json::from_str(data)?),
            "vm" => HostEvent::Vm(serde_json::from_str(data)?),
            "vm-gone" => HostEvent::VmGone(serde_json::from_str(data)?),
            "migration" => HostEvent::Migration(serde_json::from_str(data)?),
            "load" => HostEvent::Load(serde_json::from_str(data)?),
            "known" => HostEvent::Known,
            _ => return Ok(None),
        }))
    }
}

/// State of a host and its changes, until the agent disconnects.
pub type HostEvents = Events<HostEvent>;
/// Events of a migration. The agent closes the stream after the report. If it closes earlier, the
/// agent has gone away and the caller has to query the outcome again.
pub type MigrationEvents = Events<MigrationEvent>;
/// Events of a probe; the last one is a report or a failure. Dropping the stream ends the probe.
pub type ProbeEvents = Events<ProbeEvent>;

/// Stream of events.
#[derive(Debug)]
pub struct Events<E> {
    endpoint: Endpoint,
    body: Incoming,
    parser: EventParser,
    /// Decoded events, and errors of those that could not be decoded: later events are still read.
    ready: VecDeque<Result<E, String>>,
}

impl<E: StreamEvent> Events<E> {
    pub(crate) fn new(endpoint: Endpoint, body: Incoming) -> Self {
        Events { endpoint, body, parser: EventParser::default(), ready: VecDeque::new() }
    }

    /// Limits the length of an event.
    pub(crate) fn with_events_of_at_most(self, bytes: usize) -> Self {
        Events { parser: EventParser::with_events_of_at_most(bytes), ..self }
    }

    /// Returns the next event, or `None` when the agent has closed the stream.
    ///
    /// # Errors
    /// [`ClientError`]: the agent is gone, or sends an invalid event.
    pub async fn next(&mut self) -> Result<Option<E>, ClientError> {
        while self.ready.is_empty() {
            if !self.receive().await? {
                return Ok(None);
            }
        }
        self.pop()
    }

    /// Returns the next event, or `None` when the agent has closed the stream. The agent must send
    /// something within each `limit`, at least a keep-alive.
    ///
    /// # Errors
    /// Those of [`next`](Self::next), and where the agent has been silent for longer than `limit`.
    pub async fn next_unless_silent(&mut self, limit: Duration) -> Result<Option<E>, ClientError> {
        while self.ready.is_empty() {
            let received =
                timeout(limit, self.receive()).await.map_err(|_| ClientError::Unreachable {
                    endpoint: self.endpoint.clone(),
                    why: format!("it has been silent for {} s", limit.as_secs_f64()),
                    is_untrusted: false,
                })?;
            if !received? {
                return Ok(None);
            }
        }
        self.pop()
    }

    fn pop(&mut self) -> Result<Option<E>, ClientError> {
        let protocol = |why| ClientError::Protocol { endpoint: self.endpoint.clone(), why };
        self.ready.pop_front().transpose().map_err(protocol)
    }

    /// Reads the next bytes: a part of an event, or a keep-alive. Returns false when the agent has
    /// closed the stream.
    async fn receive(&mut self) -> Result<bool, ClientError> {
        let Some(bytes) = next_bytes(&self.endpoint, &mut self.body).await? else {
            return Ok(false);
        };
        let protocol = |why: String| ClientError::Protocol { endpoint: self.endpoint.clone(), why };
        for event in self.parser.push(&bytes).map_err(|error| protocol(error.to_string()))? {
            let read = E::read(&event.name, &event.data).map_err(|error| error.to_string());
            self.ready.extend(read.transpose());
        }
        Ok(true)
    }
}

/// Returns the next bytes of a response, or `None` at its end.
pub(crate) async fn next_bytes(
    endpoint: &Endpoint,
    body: &mut Incoming,
) -> Result<Option<Bytes>, ClientError> {
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| ClientError::Unreachable {
            endpoint: endpoint.clone(),
            why: format!("the connection was lost: {error}"),
            is_untrusted: false,
        })?;
        if let Ok(bytes) = frame.into_data() {
            return Ok(Some(bytes));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::{UnixListener, UnixStream};

    use super::*;
    use crate::{ApiError, ErrorCode};

    #[test]
    fn later_events_are_ignored_and_invalid_ones_refused() {
        assert_eq!(MigrationEvent::read("failed", "").unwrap(), None);
        assert_eq!(ProbeEvent::read("hint", "later").unwrap(), None);
        assert!(MigrationEvent::read("report", "{}").is_err());
        let error = ApiError::new(ErrorCode::Busy, "another probe", "wait");
        let data = serde_json::to_string(&error).unwrap();
        assert_eq!(ProbeEvent::read("failed", &data).unwrap(), Some(ProbeEvent::Failed(error)));
    }

    /// Sends a client only keep-alives for longer than the limit, and then an event. Returns the
    /// connection, and the longest time between two of them.
    async fn keep_alive(listener: UnixListener, limit: Duration) -> (UnixStream, Duration) {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut request = [0; 1024];
        let _ = stream.read(&mut request).await.unwrap();
        stream.write_all(b"HTTP/1.1 200 OK\r\n\r\n").await.unwrap();
        let (began, mut last, mut longest) = (Instant::now(), Instant::now(), Duration::ZERO);
        while began.elapsed() < limit * 3 / 2 {
            stream.write_all(b":\n\n").await.unwrap();
            tokio::time::sleep(Duration::from_millis(10)).await;
            longest = longest.max(last.elapsed());
            last = Instant::now();
        }
        stream.write_all(b"event: known\ndata: null\n\n").await.unwrap();
        (stream, longest)
    }

    #[tokio::test]
    async fn an_agent_without_news_is_not_silent_until_it_hangs() {
        let limit = Duration::from_secs(1);
        loop {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("agent.sock");
            let agent = tokio::spawn(keep_alive(UnixListener::bind(&path).unwrap(), limit));
            let mut events = crate::Client::new(Endpoint::Unix(path)).watch().await.unwrap();
            let heard = events.next_unless_silent(limit).await;
            let (_hangs, longest_pause) = agent.await.unwrap();
            // A machine that stalls makes the agent silent.
            if longest_pause > limit / 2 {
                continue;
            }
            assert_eq!(heard.unwrap(), Some(HostEvent::Known));
            let silent = events.next_unless_silent(Duration::from_millis(10)).await;
            assert!(matches!(silent, Err(ClientError::Unreachable { .. })), "{silent:?}");
            return;
        }
    }
}
