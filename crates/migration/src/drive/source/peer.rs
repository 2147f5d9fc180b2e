//! The destination as the driver sees it over the control stream: messages to it, its clock, and
//! how long it has been silent.

use std::time::{Duration, Instant};

use godwit_lanes::{LaneError, Stream, StreamSender};
use godwit_wire::Message;

use crate::clock::PeerClock;
use crate::drive::dispatch::pings::Pings;
use crate::report::nanos;

pub(super) struct Peer<'a> {
    pub(super) control: Stream,
    pub(super) sender: StreamSender,
    pub(super) clock: PeerClock,
    /// Time of the last ping.
    pub(super) last_ping: Instant,
    pings: &'a Pings,
    /// Time of the migration's request: times in messages count from it.
    begun: Instant,
    last_message: Instant,
}

impl<'a> Peer<'a> {
    pub(super) fn new(control: Stream, pings: &'a Pings, begun: Instant) -> Peer<'a> {
        let (sender, now) = (control.sender(), Instant::now());
        let clock = PeerClock::default();
        Peer { control, sender, clock, last_ping: now, pings, begun, last_message: now }
    }

    /// Returns the shortest round trip seen: pings wait behind pages if the wire is full, but the
    /// connection was made while it was empty.
    pub(super) fn round_trip(&self) -> Duration {
        let connected = self.control.connected_in();
        self.clock.round_trip().into_iter().chain(connected).min().unwrap_or_default()
    }

    /// Sends a ping, unless too many are unanswered.
    pub(super) fn ping(&mut self) -> Result<(), LaneError> {
        self.last_ping = Instant::now();
        if !self.pings.asks() {
            return Ok(());
        }
        self.sender.send(&Message::Ping { sent_ns: self.clock_ns(self.last_ping) })
    }

    /// Takes the answer to a ping.
    pub(super) fn pong(&mut self, at: Instant, sent_ns: u64, answered_ns: u64) {
        self.pings.took_answer();
        self.clock.pong(sent_ns, answered_ns, self.clock_ns(at));
    }

    /// Notes that nothing is known about silence before `at`: a message arrived, or none was taken
    /// until then.
    pub(super) fn note_message(&mut self, at: Instant) {
        self.last_message = self.last_message.max(at);
    }

    pub(super) fn is_silent_for(&self, limit: Duration) -> bool {
        self.last_message.elapsed() > limit + 4 * self.round_trip()
    }

    pub(super) fn clock_ns(&self, at: Instant) -> u64 {
        nanos(at.saturating_duration_since(self.begun))
    }
}
