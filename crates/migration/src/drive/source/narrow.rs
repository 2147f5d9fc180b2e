//! Finds that a lane swallows large packets: an interface whose MTU the network between the hosts does not carry, and nobody who
//! says so. Streams then set up, and stand still as soon as they have full-size segments to send. No I/O, no clock.
//!
//! A stream that times out again and again is not enough, as the lane may be cut: another stream with small segments is opened
//! beside it. Once that one has been welcomed, small packets pass both ways; what the stalled one sends anew after that and is not
//! answered is lost for its size alone. From there on the lane's streams have small segments.

use std::time::Duration;

/// So many timeouts in a row are suspicious: 1.4 s where the way is near.
const SUSPICIOUS_TIMEOUTS: u8 = 3;
/// How long an answer to what was sent anew may take, beside round trips.
const ANSWER_LIMIT: Duration = Duration::from_millis(200);
/// The same in round trips.
const ANSWER_ROUND_TRIPS: u32 = 2;
/// False alarms until a lane is not looked at any more.
const MOST_TRIES: u32 = 3;

/// A stream with full-size segments as it is now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FullSize {
    /// Its number on the board.
    pub(crate) stream: usize,
    /// What TCP has carried.
    pub(crate) carried_bytes: u64,
    /// How often in a row it has sent the same in vain.
    pub(crate) timeouts: u8,
}

/// How far the stream with small segments is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Beside {
    Connecting,
    Ready,
    Broken,
}

/// What is to be done with the lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    Nothing,
    /// A stream with small segments is to be opened, and told by [`Narrowness::tries`].
    Try,
    /// Large packets do not pass: its streams are to have small segments.
    Narrow,
}

/// What is known of a lane.
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
    /// It was ready when the others were like this; since when one of them has been seen to send anew.
    Comparing {
        others: Vec<FullSize>,
        since: Option<Duration>,
    },
    Narrow,
}

impl Narrowness {
    /// The stream that is to show whether small packets pass.
    pub(crate) fn trial(&self) -> Option<usize> {
        match self.stage {
            Stage::Trying(stream) => Some(stream),
            _ => None,
        }
    }

    pub(crate) fn is_narrow(&self) -> bool {
        matches!(self.stage, Stage::Narrow)
    }

    /// The stream of this number has small segments.
    pub(crate) fn tries(&mut self, stream: usize) {
        self.tries += 1;
        self.stage = Stage::Trying(stream);
    }

    /// To be called every now and then with the lane's streams of full size; `beside` is how far [`Narrowness::trial`] is.
    pub(crate) fn look(
        &mut self,
        now: Duration,
        round_trip: Duration,
        streams: &[FullSize],
        beside: Beside,
    ) -> Step {
        let suspicious = |stream: &FullSize| stream.timeouts >= SUSPICIOUS_TIMEOUTS;
        match &mut self.stage {
            Stage::Usual if self.tries < MOST_TRIES && streams.iter().any(suspicious) => return Step::Try,
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
                if !streams.iter().any(|stream| others.iter().any(|then| stream.sent_anew_since(then))) {
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

    /// A lane that is tried by stream 1, which is ready.
    fn tried() -> Narrowness {
        let mut lane = Narrowness::default();
        assert_eq!(lane.look(ms(600), ROUND_TRIP, &at(900, 2), Beside::Broken), Step::Nothing);
        assert_eq!(lane.look(ms(1400), ROUND_TRIP, &at(900, 3), Beside::Broken), Step::Try);
        lane.tries(1);
        assert_eq!(lane.trial(), Some(1));
        assert_eq!(lane.look(ms(1500), ROUND_TRIP, &at(900, 3), Beside::Connecting), Step::Nothing);
        assert_eq!(lane.look(ms(1600), ROUND_TRIP, &at(900, 3), Beside::Ready), Step::Nothing);
        assert_eq!(lane.trial(), None);
        lane
    }

    #[test]
    fn what_is_sent_anew_beside_small_packets_that_pass_is_lost_for_its_size() {
        let mut lane = tried();
        assert_eq!(lane.look(ms(2900), ROUND_TRIP, &at(900, 3), Beside::Ready), Step::Nothing);
        assert_eq!(lane.look(ms(3000), ROUND_TRIP, &at(900, 4), Beside::Ready), Step::Nothing);
        assert_eq!(lane.look(ms(3210), ROUND_TRIP, &at(900, 4), Beside::Ready), Step::Nothing);
        assert_eq!(lane.look(ms(3220), ROUND_TRIP, &at(900, 4), Beside::Ready), Step::Narrow);
        assert!(lane.is_narrow());
        assert_eq!(lane.look(ms(9000), ROUND_TRIP, &at(900, 9), Beside::Ready), Step::Nothing);
    }

    #[test]
    fn a_lane_that_was_only_cut_for_a_while_is_not_narrow() {
        let mut lane = tried();
        assert_eq!(lane.look(ms(3000), ROUND_TRIP, &at(900, 4), Beside::Ready), Step::Nothing);
        // The answer has come.
        assert_eq!(lane.look(ms(3300), ROUND_TRIP, &at(90_000, 0), Beside::Ready), Step::Nothing);
        assert!(!lane.is_narrow());
        // So has the stream's end, or it is not told.
        let mut lane = tried();
        assert_eq!(lane.look(ms(3300), ROUND_TRIP, &[], Beside::Ready), Step::Nothing);
        assert!(!lane.is_narrow());
    }

    #[test]
    fn a_lane_that_carries_nothing_is_tried_a_few_times() {
        let mut lane = Narrowness::default();
        for tried in 0..MOST_TRIES {
            assert_eq!(lane.look(ms(1400), ROUND_TRIP, &at(0, 3), Beside::Broken), Step::Try);
            lane.tries(1 + tried as usize);
            assert_eq!(lane.look(ms(6400), ROUND_TRIP, &at(0, 5), Beside::Broken), Step::Nothing);
        }
        assert_eq!(lane.look(ms(9000), ROUND_TRIP, &at(0, 6), Beside::Broken), Step::Nothing);
    }
}
