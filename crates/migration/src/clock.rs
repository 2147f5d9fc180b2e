//! Comparison of two hosts' clocks by the lane's pings, as in NTP: the answer's clock value is
//! assumed to be that of the middle of the round trip (RFC 5905, section 8). The sample with the
//! shortest round trip counts.

use std::time::Duration;

/// Number of recent samples that count. Older ones do not, because paths and clocks drift.
const SAMPLES: usize = 64;

/// Comparison of the local clock with a peer's. Clocks are in ns since any fixed point of each
/// host.
#[derive(Clone, Debug, Default)]
pub struct PeerClock {
    samples: std::collections::VecDeque<Sample>,
}

#[derive(Clone, Copy, Debug)]
struct Sample {
    round_trip_ns: u64,
    /// Peer's clock minus the local clock.
    offset_ns: i128,
}

impl PeerClock {
    /// Adds a ping sent at `sent_ns`, answered at the peer's `answered_ns`, and returned at
    /// `received_ns`.
    pub fn pong(&mut self, sent_ns: u64, answered_ns: u64, received_ns: u64) {
        let Some(round_trip_ns) = received_ns.checked_sub(sent_ns) else {
            return;
        };
        let middle = i128::from(sent_ns) + i128::from(round_trip_ns / 2);
        if self.samples.len() == SAMPLES {
            self.samples.pop_front();
        }
        self.samples
            .push_back(Sample { round_trip_ns, offset_ns: i128::from(answered_ns) - middle });
    }

    fn best(&self) -> Option<&Sample> {
        self.samples.iter().min_by_key(|sample| sample.round_trip_ns)
    }

    /// Returns the shortest round trip seen.
    #[must_use]
    pub fn round_trip(&self) -> Option<Duration> {
        self.best().map(|sample| Duration::from_nanos(sample.round_trip_ns))
    }

    /// Converts a time of the peer's clock to the local clock.
    #[must_use]
    pub fn to_local_ns(&self, peer_ns: u64) -> Option<u64> {
        let offset = self.best()?.offset_ns;
        u64::try_from(i128::from(peer_ns) - offset).ok()
    }

    /// Converts a time of the local clock to the peer's.
    #[must_use]
    pub fn to_peer_ns(&self, local_ns: u64) -> Option<u64> {
        let offset = self.best()?.offset_ns;
        u64::try_from(i128::from(local_ns) + offset).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shortest_round_trip_gives_the_offset() {
        let mut clock = PeerClock::default();
        assert_eq!(clock.round_trip(), None);
        // The peer's clock is 1,000,000 ahead; the first sample was queued on its way out.
        clock.pong(1_000, 1_091_000, 101_000);
        clock.pong(200_000, 1_220_000, 240_000);
        assert_eq!(clock.round_trip(), Some(Duration::from_nanos(40_000)));
        assert_eq!(clock.to_local_ns(1_500_000), Some(500_000));
        assert_eq!(clock.to_peer_ns(500_000), Some(1_500_000));
    }

    #[test]
    fn invalid_figures_of_a_peer_are_not_samples() {
        let mut clock = PeerClock::default();
        clock.pong(500, 0, 100);
        assert_eq!(clock.round_trip(), None);
        clock.pong(100, u64::MAX, 200);
        assert_eq!(clock.to_local_ns(0), None);
    }
}
