//! Inputs of the driver: those that others put into its inbox, and those that it causes itself.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::drive::inbox::{Events, Inbox, Input};
use crate::source::Event;

pub(super) struct Inputs<'a> {
    pub(super) inbox: &'a Inbox,
    events: Events,
    /// Inputs that the driver causes: they precede all others.
    own: VecDeque<(Instant, Input)>,
}

impl<'a> Inputs<'a> {
    pub(super) fn new(inbox: &'a Inbox, events: Events) -> Inputs<'a> {
        Inputs { inbox, events, own: VecDeque::new() }
    }

    /// Returns the next input, if there is one.
    pub(super) fn next(&mut self) -> Option<(Instant, Input)> {
        self.own.pop_front().or_else(|| self.events.receiver.try_recv().ok())
    }

    /// Waits up to `limit` for an input.
    pub(super) fn wait(&mut self, limit: Duration) -> Option<(Instant, Input)> {
        self.own.pop_front().or_else(|| self.events.receiver.recv_timeout(limit).ok())
    }

    /// Queues an event before all other inputs.
    pub(super) fn first(&mut self, event: Event) {
        self.own.push_front((Instant::now(), Input::Machine(event)));
    }

    /// Makes the driver look at the streams, after the other inputs that it has caused.
    pub(super) fn check_streams(&mut self) {
        self.own.push_back((Instant::now(), Input::Moved));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::drive::inbox::inbox;

    #[test]
    fn own_events_precede_what_others_report() {
        let (inbox, events) = inbox();
        let mut inputs = Inputs::new(&inbox, events);
        inbox.cancel();
        inputs.check_streams();
        inputs.first(Event::Released);
        assert!(matches!(inputs.next(), Some((_, Input::Machine(Event::Released)))));
        assert!(matches!(inputs.next(), Some((_, Input::Moved))));
        assert!(matches!(inputs.next(), Some((_, Input::Machine(Event::CancelRequested)))));
        assert!(inputs.next().is_none() && inputs.wait(Duration::ZERO).is_none());
    }
}
