//! Detects a lane that drops large packets: the network between the hosts does not carry the
//! interface's MTU, and no router reports it. Streams on such a lane connect, and stall as soon as
//! they have full-size segments to send. No I/O, no clock.
//!
//! Repeated timeouts of a stream are not sufficient evidence, because the lane may be cut. So
//! another stream with small segments is opened beside it. Once the destination has welcomed that
//! one, small packets pass in both directions; segments that the stalled stream retransmits after
//! that without an answer are lost only because of their size. From then on the lane's streams use
//! small segments.

use std::time::Duration;

use crate::drive::dispatch::stream_state::FullSize;

/// So many consecutive timeouts are suspicious: 1.4 s on a near path.
const SUSPICIOUS_TIMEOUTS: u8 = 3;
/// Time limit for an answer to a retransmission, in addition to round trips.
const ANSWER_LIMIT: Duration = Duration::from_millis(200);
/// Round trips added to [`ANSWER_LIMIT`].
const ANSWER_ROUND_TRIPS: u32 = 2;
/// False alarms after which a lane is no longer examined.
const MOST_TRIES: u32 = 3;

/// State of the stream with small segments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Beside {
    Connecting,
    Ready,
    Broken,
}

/// Action to take on the lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    Nothing,
    /// Open a stream with small segments, and pass its number to [`Narrowness::tries`].
    Try,
    /// Large packets do not pass: the lane's streams must use small segments.
    Narrow,
}

/// What is known about a lane.
#[derive(Clone, Debug, Default)]
pub(crate) struct Narrowness {
    stage: Stage,
    tries: u32,
}

#[derive(Clone, Debug, Default)]
enum Stage {
    #[default]
    Usual,
    /// This stream has small segments.
    Trying(usize),
    /// The stream with small segments was ready when the others were in this state. Since then one
    /// of them has been seen to retransmit.
    Comparing {
        others: Vec<FullSize>,
        since: Option<Duration>,
    },
    Narrow,
}

impl Narrowness {
    /// Returns the stream that is to show whether small packets pass.
    pub(crate) fn trial(&self) -> Option<usize> {
        match self.stage {
            Stage::Trying(stream) => Some(stream),
            _ => None,
        }
    }

    pub(crate) fn is_narrow(&self) -> bool {
        matches!(self.stage, Stage::Narrow)
    }

    /// Notes that the stream with this number has small segments.
    pub(crate) fn tries(&mut self, stream: usize) {
        self.tries += 1;
        self.stage = Stage::Trying(stream);
    }

    /// Evaluates the lane. Call it now and then with the lane's streams of full size; `beside` is
    /// the state of [`Narrowness::trial`].
    pub(crate) fn step(
        &mut self,
        now: Duration,
        round_trip: Duration,
        streams: &[FullSize],
        beside: Beside,
    ) -> Step {
        let suspicious = |stream: &FullSize| stream.timeouts >= SUSPICIOUS_TIMEOUTS;
        match &mut self.stage {
            Stage::Usual if self.tries < MOST_TRIES && streams.iter().any(suspicious) => {
                return Step::Try;
            }
            Stage::Usual | Stage::Narrow => {}
            Stage::Trying(_) => match beside {
                Beside::Connecting => {}
                Beside::Broken => self.stage = Stage::Usual,
                Beside::Ready => {
                    let others = streams.iter().copied().filter(suspicious).collect();
                    self.stage = Stage::Comparing { others, since: None };
                }
            },
            Stage::Comparing { others, since } => {
                others.retain(|then| streams.iter().any(|stream| stream.stands_still_since(then)));
                if others.is_empty() {
                    self.stage = Stage::Usual;
                    return Step::Nothing;
                }
                if !streams
                    .iter()
                    .any(|stream| others.iter().any(|then| stream.sent_anew_since(then)))
                {
                    return Step::Nothing;
                }
                let since = *since.get_or_insert(now);
                if now.saturating_sub(since) >= ANSWER_LIMIT + round_trip * ANSWER_ROUND_TRIPS {
                    self.stage = Stage::Narrow;
                    return Step::Narrow;
                }
            }
        }
        Step::Nothing
    }
}

impl FullSize {
    fn stands_still_since(&self, then: &FullSize) -> bool {
        self.stream == then.stream
            && self.carried_bytes == then.carried_bytes
            && self.timeouts >= then.timeouts
    }

    fn sent_anew_since(&self, then: &FullSize) -> bool {
        self.stands_still_since(then) && self.timeouts > then.timeouts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROUND_TRIP: Duration = Duration::from_millis(10);

    fn ms(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    fn at(carried_bytes: u64, timeouts: u8) -> [FullSize; 1] {
        [FullSize { stream: 0, carried_bytes, timeouts }]
    }

    /// Returns a lane that is tried with stream 1, which is ready.
    fn tried() -> Narrowness {
        let mut lane = Narrowness::default();
        assert_eq!(lane.step(ms(600), ROUND_TRIP, &at(900, 2), Beside::Broken), Step::Nothing);
        assert_eq!(lane.step(ms(1400), ROUND_TRIP, &at(900, 3), Beside::Broken), Step::Try);
        lane.tries(1);
        assert_eq!(lane.trial(), Some(1));
        assert_eq!(lane.step(ms(1500), ROUND_TRIP, &at(900, 3), Beside::Connecting), Step::Nothing);
        assert_eq!(lane.step(ms(1600), ROUND_TRIP, &at(900, 3), Beside::Ready), Step::Nothing);
        assert_eq!(lane.trial(), None);
        lane
    }

    #[test]
    fn what_is_sent_anew_beside_small_packets_that_pass_is_lost_for_its_size() {
        let mut lane = tried();
        assert_eq!(lane.step(ms(2900), ROUND_TRIP, &at(900, 3), Beside::Ready), Step::Nothing);
        assert_eq!(lane.step(ms(3000), ROUND_TRIP, &at(900, 4), Beside::Ready), Step::Nothing);
        assert_eq!(lane.step(ms(3210), ROUND_TRIP, &at(900, 4), Beside::Ready), Step::Nothing);
        assert_eq!(lane.step(ms(3220), ROUND_TRIP, &at(900, 4), Beside::Ready), Step::Narrow);
        assert!(lane.is_narrow());
        assert_eq!(lane.step(ms(9000), ROUND_TRIP, &at(900, 9), Beside::Ready), Step::Nothing);
    }

    #[test]
    fn a_lane_that_was_only_cut_for_a_while_is_not_narrow() {
        let mut lane = tried();
        assert_eq!(lane.step(ms(3000), ROUND_TRIP, &at(900, 4), Beside::Ready), Step::Nothing);
        // The answer has arrived.
        assert_eq!(lane.step(ms(3300), ROUND_TRIP, &at(90_000, 0), Beside::Ready), Step::Nothing);
        assert!(!lane.is_narrow());
        // The stream has ended, or its end is not reported.
        let mut lane = tried();
        assert_eq!(lane.step(ms(3300), ROUND_TRIP, &[], Beside::Ready), Step::Nothing);
        assert!(!lane.is_narrow());
    }

    #[test]
    fn a_stalled_lane_is_retried_a_few_times() {
        let mut lane = Narrowness::default();
        for tried in 0..MOST_TRIES {
            assert_eq!(lane.step(ms(1400), ROUND_TRIP, &at(0, 3), Beside::Broken), Step::Try);
            lane.tries(1 + tried as usize);
            assert_eq!(lane.step(ms(6400), ROUND_TRIP, &at(0, 5), Beside::Broken), Step::Nothing);
        }
        assert_eq!(lane.step(ms(9000), ROUND_TRIP, &at(0, 6), Beside::Broken), Step::Nothing);
    }
}
