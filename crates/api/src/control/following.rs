//! Stream of the manager's events.

use std::time::Duration;

use serde::Deserialize;

use super::client::{ManagerClient, ManagerError};
use super::events::ClusterEvent;
use crate::{Events, StreamEvent};

/// Longest silence of a manager, which sends at least a keep-alive every 5 s.
const SILENCE_LIMIT: Duration = Duration::from_secs(20);

#[derive(Clone, Debug, PartialEq)]
pub enum ManagerEvent {
    Change(Box<ClusterEvent>),
    /// Events were missed and are no longer stored: query everything again.
    Missed,
}

/// An event of a later version.
#[derive(Deserialize)]
#[expect(dead_code, reason = "deserialized only to check the shape of the event")]
struct Later {
    number: u64,
    kind: String,
}

impl StreamEvent for ManagerEvent {
    fn read(name: &str, data: &str) -> Result<Option<Self>, serde_json::Error> {
        if name == "missed" {
            return Ok(Some(ManagerEvent::Missed));
        }
        match serde_json::from_str(data) {
            Ok(change) => Ok(Some(ManagerEvent::Change(change))),
            Err(error) => serde_json::from_str::<Later>(data).map(|_| None).map_err(|_| error),
        }
    }
}

/// Stream of a manager's events.
#[derive(Debug)]
pub struct ManagerEvents {
    manager: ManagerClient,
    events: Events<ManagerEvent>,
}

impl ManagerEvents {
    pub(super) fn new(manager: ManagerClient, events: Events<ManagerEvent>) -> ManagerEvents {
        ManagerEvents { manager, events }
    }

    /// Returns the next event, or `None` when the manager has closed the stream.
    ///
    /// # Errors
    /// [`ManagerError`]: the manager is gone, has been silent for 20 s, or sends an invalid event.
    pub async fn next(&mut self) -> Result<Option<ManagerEvent>, ManagerError> {
        let next = self.events.next_unless_silent(SILENCE_LIMIT).await;
        next.map_err(|error| self.manager.failed(error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::Change;

    #[test]
    fn later_events_are_ignored_and_invalid_ones_refused() {
        let gone = r#"{"number":7,"unix_ms":1,"kind":"vm-gone","data":"web"}"#;
        let Some(ManagerEvent::Change(change)) = ManagerEvent::read("vm-gone", gone).unwrap()
        else {
            panic!("{gone}");
        };
        assert_eq!((change.number, change.change), (7, Change::VmGone("web".into())));
        let later = r#"{"number":8,"unix_ms":1,"kind":"comet","data":{}}"#;
        assert_eq!(ManagerEvent::read("comet", later).unwrap(), None);
        assert_eq!(ManagerEvent::read("missed", "null").unwrap(), Some(ManagerEvent::Missed));
        assert!(ManagerEvent::read("vm-gone", "{").is_err());
    }
}
