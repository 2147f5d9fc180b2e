//! Records each probe and its answer, and finds the gaps in a span of time. No I/O: times come in
//! as numbers.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

/// Probes kept of each target: eight minutes at 1 kHz, 16 bytes each.
pub const MAX_PROBES: usize = 1 << 19;
/// A probe that old without an answer is lost even if no later one was answered.
const LOST_AFTER_NS: u64 = 1_000_000_000;

/// One probe. Its position in the log gives its sequence number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Probe {
    sent_ns: u64,
    /// Zero while there is no answer.
    received_ns: u64,
}

/// The latest [`MAX_PROBES`] probes of one target.
#[derive(Debug, Default)]
pub struct ProbeLog {
    first_sequence: u64,
    probes: VecDeque<Probe>,
    highest_answered: Option<u64>,
}

/// Counts and gaps of the probes in a span of time. Times are `CLOCK_MONOTONIC` nanoseconds.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gaps {
    /// Probes that were sent in the span.
    pub sent: u64,
    /// Probes of them that were answered.
    pub received: u64,
    /// Probes of them that were not answered, and no longer can be.
    pub lost: u64,
    /// Probes of them that may still be answered: the last ones.
    pub pending: u64,
    /// Longest time between two consecutive answers that both came in the span: the blackout.
    /// `None` if fewer than two came.
    pub longest_gap_ns: Option<u64>,
    /// Time of the answer before that gap.
    pub gap_start_ns: Option<u64>,
    /// Time from the last answer to the end of the span, or to now if that is earlier; the whole
    /// span if no answer came.
    pub open_gap_ns: u64,
    /// Most probes lost in a row.
    pub longest_lost_run: u64,
    /// Median time from a probe to its answer.
    pub median_rtt_ns: Option<u64>,
    /// Longest time between two probes. If it is far above the interval, the prober itself was
    /// delayed, and a gap of that length is not the target's.
    pub longest_send_gap_ns: u64,
}

impl ProbeLog {
    /// Records a probe sent at `now_ns`. Returns its sequence number.
    pub fn sent(&mut self, now_ns: u64) -> u64 {
        if self.probes.len() == MAX_PROBES {
            self.probes.pop_front();
            self.first_sequence += 1;
        }
        self.probes.push_back(Probe { sent_ns: now_ns, received_ns: 0 });
        self.first_sequence + self.probes.len() as u64 - 1
    }

    /// Records an answer. Returns false if the probe was never sent, is no longer kept, or was
    /// answered before.
    pub fn received(&mut self, sequence: u64, now_ns: u64) -> bool {
        let place =
            sequence.checked_sub(self.first_sequence).and_then(|place| usize::try_from(place).ok());
        let Some(probe) = place.and_then(|place| self.probes.get_mut(place)) else {
            return false;
        };
        if probe.received_ns != 0 {
            return false;
        }
        probe.received_ns = now_ns;
        self.highest_answered = self.highest_answered.max(Some(sequence));
        true
    }

    /// Returns the time of the latest answer at or after `since_ns`.
    #[must_use]
    pub fn answered_since(&self, since_ns: u64) -> Option<u64> {
        let recent = self
            .probes
            .iter()
            .rev()
            .take_while(|probe| probe.sent_ns + LOST_AFTER_NS * 10 >= since_ns);
        recent
            .map(|probe| probe.received_ns)
            .find(|received_ns| *received_ns != 0 && *received_ns >= since_ns)
    }

    /// Returns the gaps in `since_ns ..= until_ns`, seen at `now_ns`.
    #[must_use]
    pub fn gaps(&self, since_ns: u64, until_ns: u64, now_ns: u64) -> Gaps {
        let mut gaps = Gaps::default();
        self.count_sent(since_ns, until_ns, now_ns, &mut gaps);
        let mut arrivals: Vec<u64> = (self.probes.iter().map(|probe| probe.received_ns))
            .filter(|received_ns| (since_ns.max(1)..=until_ns).contains(received_ns))
            .collect();
        arrivals.sort_unstable();
        for pair in arrivals.windows(2) {
            let gap = pair[1] - pair[0];
            if gaps.longest_gap_ns.is_none_or(|longest| gap > longest) {
                gaps.longest_gap_ns = Some(gap);
                gaps.gap_start_ns = Some(pair[0]);
            }
        }
        let last = arrivals.last().copied().unwrap_or(since_ns);
        gaps.open_gap_ns = until_ns.min(now_ns).saturating_sub(last);
        gaps
    }

    fn count_sent(&self, since_ns: u64, until_ns: u64, now_ns: u64, gaps: &mut Gaps) {
        let start = self.probes.partition_point(|probe| probe.sent_ns < since_ns);
        let end = self.probes.partition_point(|probe| probe.sent_ns <= until_ns);
        let (mut lost_run, mut last_sent, mut round_trips) = (0, None, Vec::new());
        for place in start..end.max(start) {
            let probe = self.probes[place];
            let sequence = self.first_sequence + place as u64;
            gaps.sent += 1;
            if let Some(last_sent_ns) = last_sent.replace(probe.sent_ns) {
                gaps.longest_send_gap_ns =
                    gaps.longest_send_gap_ns.max(probe.sent_ns - last_sent_ns);
            }
            if probe.received_ns != 0 {
                gaps.received += 1;
                lost_run = 0;
                round_trips.push(probe.received_ns.saturating_sub(probe.sent_ns));
            } else if self.is_lost(sequence, probe, now_ns) {
                gaps.lost += 1;
                lost_run += 1;
                gaps.longest_lost_run = gaps.longest_lost_run.max(lost_run);
            } else {
                gaps.pending += 1;
            }
        }
        let middle = round_trips.len() / 2;
        gaps.median_rtt_ns =
            (!round_trips.is_empty()).then(|| *round_trips.select_nth_unstable(middle).1);
    }

    /// The path keeps the order: a probe is lost once a later one was answered, or after a second.
    fn is_lost(&self, sequence: u64, probe: Probe, now_ns: u64) -> bool {
        self.highest_answered.is_some_and(|highest| highest > sequence)
            || now_ns.saturating_sub(probe.sent_ns) >= LOST_AFTER_NS
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MS: u64 = 1_000_000;
    const START: u64 = 1_000 * MS;

    /// A probe each millisecond from START, answered after 0.2 ms where `is_answered(sequence)`.
    fn log_of(probes: u64, is_answered: impl Fn(u64) -> bool) -> ProbeLog {
        let mut log = ProbeLog::default();
        for number in 0..probes {
            let sent_ns = START + number * MS;
            let sequence = log.sent(sent_ns);
            if is_answered(number) {
                assert!(log.received(sequence, sent_ns + MS / 5));
            }
        }
        log
    }

    #[test]
    fn a_blackout_is_the_time_between_two_answers() {
        let log = log_of(1000, |number| !(500..517).contains(&number));
        let gaps = log.gaps(0, u64::MAX, START + 1000 * MS);
        assert_eq!((gaps.sent, gaps.received, gaps.lost, gaps.pending), (1000, 983, 17, 0));
        assert_eq!(gaps.longest_gap_ns, Some(18 * MS));
        assert_eq!(gaps.gap_start_ns, Some(START + 499 * MS + MS / 5));
        assert_eq!((gaps.longest_lost_run, gaps.median_rtt_ns), (17, Some(MS / 5)));
        assert_eq!(gaps.longest_send_gap_ns, MS);
    }

    #[test]
    fn answers_that_come_late_end_the_gap_when_they_come() {
        let mut log = log_of(100, |number| number < 50);
        for number in 50..100 {
            log.received(number, START + 100 * MS);
        }
        let gaps = log.gaps(0, u64::MAX, START + 101 * MS);
        assert_eq!((gaps.lost, gaps.longest_gap_ns), (0, Some(51 * MS - MS / 5)));
    }

    #[test]
    fn only_the_span_counts() {
        let log =
            log_of(1000, |number| !(100..200).contains(&number) && !(500..520).contains(&number));
        let gaps = log.gaps(START + 400 * MS, START + 600 * MS, START + 1000 * MS);
        assert_eq!((gaps.sent, gaps.lost, gaps.longest_gap_ns), (201, 20, Some(21 * MS)));
    }

    #[test]
    fn a_target_that_falls_silent_has_an_open_gap() {
        let log = log_of(1000, |number| number < 900);
        let now = START + 1000 * MS;
        let gaps = log.gaps(START, u64::MAX, now);
        assert_eq!((gaps.longest_gap_ns, gaps.open_gap_ns), (Some(MS), 101 * MS - MS / 5));
        assert_eq!((gaps.lost, gaps.pending), (0, 100));
        assert_eq!(log.gaps(START, u64::MAX, now + 2000 * MS).lost, 100);
    }

    #[test]
    fn a_target_that_never_answers() {
        let gaps = log_of(10, |_| false).gaps(START, START + 10 * MS, START + 10 * MS);
        assert_eq!(
            (gaps.longest_gap_ns, gaps.gap_start_ns, gaps.median_rtt_ns),
            (None, None, None)
        );
        assert_eq!(gaps.open_gap_ns, 10 * MS);
        assert_eq!(ProbeLog::default().gaps(0, 5, 5), Gaps { open_gap_ns: 5, ..Gaps::default() });
        assert_eq!(ProbeLog::default().gaps(9, 5, 5), Gaps::default());
    }

    #[test]
    fn strange_answers_are_refused() {
        let mut log = log_of(10, |number| number == 3);
        assert!(!log.received(3, START + 20 * MS), "answered twice");
        assert!(!log.received(10, START + 20 * MS), "never sent");
        assert!(!log.received(u64::MAX, START + 20 * MS), "never sent");
        assert_eq!(log.answered_since(START), Some(START + 3 * MS + MS / 5));
        assert_eq!(log.answered_since(START + 4 * MS), None);
    }

    #[test]
    fn the_log_is_bounded() {
        let mut log = ProbeLog::default();
        for number in 0..MAX_PROBES as u64 + 10 {
            assert_eq!(log.sent(START + number), number);
        }
        assert_eq!(log.gaps(0, u64::MAX, START).sent, MAX_PROBES as u64);
        assert!(!log.received(9, START + MS));
        assert!(log.received(10, START + MS));
    }

    proptest! {
        #[test]
        fn every_probe_is_accounted_for(
            answered in prop::collection::vec(any::<bool>(), 1..300),
            since in 0_u64..300,
            span in 0_u64..300,
        ) {
            let is_answered = |number: u64| answered[usize::try_from(number).unwrap()];
            let log = log_of(answered.len() as u64, is_answered);
            let (from, to) = (START + since * MS, START + (since + span) * MS);
            let gaps = log.gaps(from, to, START + 10_000 * MS);
            prop_assert_eq!(gaps.sent, gaps.received + gaps.lost + gaps.pending);
            prop_assert!(gaps.longest_lost_run <= gaps.lost);
            prop_assert!(gaps.longest_gap_ns.unwrap_or(0) <= span * MS);
            // Answered one after the other, a gap in the middle of the span is a run of lost
            // probes.
            if let Some(gap) = gaps.longest_gap_ns {
                prop_assert!(gap / MS <= gaps.longest_lost_run + 1);
            }
        }
    }
}
