//! Inputs that have arrived and are not handled yet.

use std::collections::VecDeque;
use std::time::Instant;

use godwit_wire::Message;

use crate::drive::{HypervisorEvent, Input};
use crate::source::Event;

/// Queue of inputs that were taken from the inbox during other work, and of those that the driver
/// causes itself.
#[derive(Debug, Default)]
pub(super) struct Waiting {
    inputs: VecDeque<(Instant, Input)>,
    /// Number of those that make a sweep pointless. It is kept because it is queried repeatedly.
    interrupting: usize,
}

impl Waiting {
    pub(super) fn push_back(&mut self, at: Instant, input: Input) {
        self.interrupting += usize::from(interrupts(&input));
        self.inputs.push_back((at, input));
    }

    pub(super) fn push_front(&mut self, at: Instant, input: Input) {
        self.interrupting += usize::from(interrupts(&input));
        self.inputs.push_front((at, input));
    }

    pub(super) fn pop_front(&mut self) -> Option<(Instant, Input)> {
        let (at, input) = self.inputs.pop_front()?;
        self.interrupting -= usize::from(interrupts(&input));
        Some((at, input))
    }

    /// Returns whether any of them makes a sweep pointless.
    pub(super) fn interrupt(&self) -> bool {
        self.interrupting > 0
    }
}

/// Returns whether this input makes the current round pointless.
fn interrupts(input: &Input) -> bool {
    match input {
        Input::Machine(event) => {
            matches!(
                event,
                Event::CancelRequested
                    | Event::LaneLost(_)
                    | Event::Failed(_)
                    | Event::PeerRefused(_)
            )
        }
        Input::Hypervisor(event) => matches!(event, HypervisorEvent::Failed(_)),
        Input::Lane(message) => !matches!(
            message,
            Message::Pong { .. }
                | Message::Ready
                | Message::PageInReady { .. }
                | Message::Running(_)
        ),
        Input::DeviceState
        | Input::Moved
        | Input::StreamBroke { .. }
        | Input::PageInStreams { .. }
        | Input::PagedIn(_) => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sweep_is_pointless_as_long_as_its_end_waits() {
        let mut waiting = Waiting::default();
        waiting.push_back(Instant::now(), Input::Lane(Message::Ready));
        waiting.push_back(Instant::now(), Input::Moved);
        assert!(!waiting.interrupt());
        waiting.push_front(Instant::now(), Input::Machine(Event::CancelRequested));
        waiting.push_back(Instant::now(), Input::Lane(Message::UnitEnd));
        assert!(waiting.interrupt());
        assert!(matches!(waiting.pop_front(), Some((_, Input::Machine(Event::CancelRequested)))));
        assert!(waiting.interrupt(), "what the destination must not say still waits");
        while waiting.pop_front().is_some() {}
        assert!(!waiting.interrupt());
    }
}
