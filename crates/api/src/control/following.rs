//! The manager's events, as somebody hears them.

use std::time::Duration;

use serde::Deserialize;

use super::{ClusterEvent, ManagerClient, ManagerError};
use crate::{Events, StreamEvent};

/// A manager says something every 5 s, if only that it lives.
const SILENCE_LIMIT: Duration = Duration::from_secs(20);

#[derive(Clone, Debug, PartialEq)]
pub enum ManagerEvent {
    Change(Box<ClusterEvent>),
    /// Changes were missed that are kept no more: ask for everything anew.
    Missed,
}

/// An event of a later version.
#[derive(Deserialize)]
#[expect(dead_code, reason = "it is read to see that it is one")]
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

/// A manager's events as they come.
#[derive(Debug)]
pub struct ManagerEvents {
    manager: ManagerClient,
    events: Events<ManagerEvent>,
}

impl ManagerEvents {
    pub(super) fn new(manager: ManagerClient, events: Events<ManagerEvent>) -> ManagerEvents {
        ManagerEvents { manager, events }
    }

    /// The next event; none where the manager has closed the stream.
    ///
    /// # Errors
    /// [`ManagerError`]: it is gone, has been silent for 20 s, or sends what is no event.
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
    fn events_of_a_later_version_are_passed_over_and_broken_ones_are_not() {
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
