//! What an agent tells as it happens: server-sent events, each of a kind that the stream's type knows.

use std::collections::VecDeque;

use hyper::body::Incoming;

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
    ready: VecDeque<E>,
}

impl<E: Told> Events<E> {
    pub(crate) fn new(endpoint: Endpoint, body: Incoming) -> Self {
        Events { endpoint, body, parser: EventParser::default(), ready: VecDeque::new() }
    }

    /// The next event; none when the agent closed the stream.
    ///
    /// # Errors
    /// [`ClientError`]: the agent is gone, or sends what is no event.
    pub async fn next(&mut self) -> Result<Option<E>, ClientError> {
        loop {
            if let Some(event) = self.ready.pop_front() {
                return Ok(Some(event));
            }
            let Some(bytes) = next_bytes(&self.endpoint, &mut self.body).await? else {
                return Ok(None);
            };
            let protocol = |why: String| ClientError::Protocol { endpoint: self.endpoint.clone(), why };
            for event in self.parser.push(&bytes).map_err(|error| protocol(error.to_string()))? {
                self.ready
                    .extend(E::read(&event.name, &event.data).map_err(|error| protocol(error.to_string()))?);
            }
        }
    }
}

#[cfg(test)]
mod tests {
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
}
