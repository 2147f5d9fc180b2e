//! What an agent tells as it happens: server-sent events, each of a kind that the stream's type knows.

use std::collections::VecDeque;
use std::time::Duration;

use hyper::body::Incoming;
use tokio::time::timeout;

use crate::client::next_bytes;
use crate::sse::EventParser;
use crate::{ClientError, Endpoint, HostEvent, MigrationEvent, ProbeEvent};

/// An event as its name and its data tell it.
pub trait Told: Sized {
    /// None: an event of a later version.
    ///
    /// # Errors
    /// The data is not what an event of that name has.
    fn read(name: &str, data: &str) -> Result<Option<Self>, serde_json::Error>;
}

impl Told for MigrationEvent {
    fn read(name: &str, data: &str) -> Result<Option<Self>, serde_json::Error> {
        Ok(Some(match name {
            "progress" => MigrationEvent::Progress(serde_json::from_str(data)?),
            "report" => MigrationEvent::Report(serde_json::from_str(data)?),
            _ => return Ok(None),
        }))
    }
}

impl Told for ProbeEvent {
    fn read(name: &str, data: &str) -> Result<Option<Self>, serde_json::Error> {
        Ok(Some(match name {
            "progress" => ProbeEvent::Progress(serde_json::from_str(data)?),
            "report" => ProbeEvent::Report(serde_json::from_str(data)?),
            "failed" => ProbeEvent::Failed(serde_json::from_str(data)?),
            _ => return Ok(None),
        }))
    }
}

impl Told for HostEvent {
    fn read(name: &str, data: &str) -> Result<Option<Self>, serde_json::Error> {
        Ok(Some(match name {
            "host" => HostEvent::Host(serde_json::from_str(data)?),
            "vm" => HostEvent::Vm(serde_json::from_str(data)?),
            "vm-gone" => HostEvent::VmGone(serde_json::from_str(data)?),
            "migration" => HostEvent::Migration(serde_json::from_str(data)?),
            "known" => HostEvent::Known,
            _ => return Ok(None),
        }))
    }
}

/// What a host has and how it changes, until the agent goes away.
pub type HostEvents = Events<HostEvent>;
/// A migration's events as they come. The agent closes the stream after the report; before it, the agent went away and the
/// migration's fate is to be asked for again.
pub type MigrationEvents = Events<MigrationEvent>;
/// A probe's events as they come; the last is a report or a failure. Dropping them ends the probe.
pub type ProbeEvents = Events<ProbeEvent>;

/// Events as they come.
#[derive(Debug)]
pub struct Events<E> {
    endpoint: Endpoint,
    body: Incoming,
    parser: EventParser,
    /// Events, and what was wrong with those that are none: what follows one is read all the same.
    ready: VecDeque<Result<E, String>>,
}

impl<E: Told> Events<E> {
    pub(crate) fn new(endpoint: Endpoint, body: Incoming) -> Self {
        Events { endpoint, body, parser: EventParser::default(), ready: VecDeque::new() }
    }

    /// The same stream, which refuses longer events.
    pub(crate) fn with_events_of_at_most(self, bytes: usize) -> Self {
        Events { parser: EventParser::with_events_of_at_most(bytes), ..self }
    }

    /// The next event; none when the agent closed the stream.
    ///
    /// # Errors
    /// [`ClientError`]: the agent is gone, or sends what is no event.
    pub async fn next(&mut self) -> Result<Option<E>, ClientError> {
        while self.ready.is_empty() {
            if !self.hear().await? {
                return Ok(None);
            }
        }
        self.pop()
    }

    /// The next event of an agent that says something at least this often, if only that it lives; none when it closed the stream.
    ///
    /// # Errors
    /// As [`next`](Self::next), and where the agent has been silent for longer.
    pub async fn next_unless_silent(&mut self, limit: Duration) -> Result<Option<E>, ClientError> {
        while self.ready.is_empty() {
            let heard =
                timeout(limit, self.hear()).await.map_err(|_| ClientError::Unreachable {
                    endpoint: self.endpoint.clone(),
                    why: format!("it has said nothing for {} s", limit.as_secs_f64()),
                })?;
            if !heard? {
                return Ok(None);
            }
        }
        self.pop()
    }

    fn pop(&mut self) -> Result<Option<E>, ClientError> {
        let protocol = |why| ClientError::Protocol { endpoint: self.endpoint.clone(), why };
        self.ready.pop_front().transpose().map_err(protocol)
    }

    /// Takes in what comes next, which may be a part of an event, or that the agent lives; false: the agent closed the stream.
    async fn hear(&mut self) -> Result<bool, ClientError> {
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

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;
    use crate::{ApiError, ErrorCode};

    #[test]
    fn events_of_a_later_version_are_passed_over_and_broken_ones_are_not() {
        assert_eq!(MigrationEvent::read("failed", "").unwrap(), None);
        assert_eq!(ProbeEvent::read("hint", "later").unwrap(), None);
        assert!(MigrationEvent::read("report", "{}").is_err());
        let error = ApiError::new(ErrorCode::Busy, "another probe", "wait");
        let data = serde_json::to_string(&error).unwrap();
        assert_eq!(ProbeEvent::read("failed", &data).unwrap(), Some(ProbeEvent::Failed(error)));
    }

    /// An agent that has no news for longer than the limit, but lives; then it hangs.
    #[tokio::test]
    async fn an_agent_without_news_is_not_silent() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("agent.sock");
        let listener = tokio::net::UnixListener::bind(&path).unwrap();
        let limit = Duration::from_secs(2);
        let agent = tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut request = [0; 1024];
            let _ = stream.read(&mut request).await.unwrap();
            stream.write_all(b"HTTP/1.1 200 OK\r\n\r\n").await.unwrap();
            let began = Instant::now();
            while began.elapsed() < limit + Duration::from_millis(500) {
                stream.write_all(b":\n\n").await.unwrap();
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            stream.write_all(b"event: known\ndata: null\n\n").await.unwrap();
            stream
        });
        let mut events = crate::Client::new(Endpoint::Unix(path)).watch().await.unwrap();
        assert_eq!(events.next_unless_silent(limit).await.unwrap(), Some(HostEvent::Known));
        let _hangs = agent.await.unwrap();
        let silent = events.next_unless_silent(Duration::from_millis(10)).await;
        assert!(matches!(silent, Err(ClientError::Unreachable { .. })), "{silent:?}");
    }
}
