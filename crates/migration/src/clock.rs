//! Two hosts' clocks compared by the lane's pings, as NTP does: the answerer's clock is taken to stand for the middle of the
//! round trip (RFC 5905, section 8). The sample with the shortest round trip counts.

use std::time::Duration;

/// Samples older than this no longer count: paths and clocks drift.
const SAMPLES: usize = 64;

/// The comparison of the local clock with a peer's. Clocks are ns since any fixed point of each host.
#[derive(Clone, Debug, Default)]
pub struct PeerClock {
    samples: std::collections::VecDeque<Sample>,
}

#[derive(Clone, Copy, Debug)]
struct Sample {
    round_trip_ns: u64,
    /// Peer's clock minus ours.
    offset_ns: i128,
}

impl PeerClock {
    /// A ping sent at `sent_ns`, answered at the peer's `answered_ns`, back at `received_ns`.
    pub fn pong(&mut self, sent_ns: u64, answered_ns: u64, received_ns: u64) {
        let Some(round_trip_ns) = received_ns.checked_sub(sent_ns) else {
            return;
        };
        let middle = i128::from(sent_ns) + i128::from(round_trip_ns / 2);
        if self.samples.len() == SAMPLES {
            self.samples.pop_front();
        }
        self.samples.push_back(Sample { round_trip_ns, offset_ns: i128::from(answered_ns) - middle });
    }

    fn best(&self) -> Option<&Sample> {
        self.samples.iter().min_by_key(|sample| sample.round_trip_ns)
    }

    /// The shortest round trip seen.
    #[must_use]
    pub fn round_trip(&self) -> Option<Duration> {
        self.best().map(|sample| Duration::from_nanos(sample.round_trip_ns))
    }

    /// A time of the peer's clock on ours.
    #[must_use]
    pub fn to_local_ns(&self, peer_ns: u64) -> Option<u64> {
        let offset = self.best()?.offset_ns;
        u64::try_from(i128::from(peer_ns) - offset).ok()
    }

    /// A time of our clock on the peer's.
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
    fn the_shortest_round_trip_tells_the_offset() {
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
    fn nonsense_of_a_peer_is_no_sample() {
        let mut clock = PeerClock::default();
        clock.pong(500, 0, 100);
        assert_eq!(clock.round_trip(), None);
        clock.pong(100, u64::MAX, 200);
        assert_eq!(clock.to_local_ns(0), None);
    }
}
