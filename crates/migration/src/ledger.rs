//! Account of a migration: time per phase, rounds, bytes, bandwidth. The source's state machine
//! feeds it, and the report reads it.

use std::time::Duration;

use godwit_wire::PAGE_SIZE;

use crate::dirty_rate::DirtyRate;
use crate::report::millis;
use godwit_types::{Phase, PhaseReport, RoundReport};

/// Rounds of fewer bytes say more about the round trip than about the bandwidth.
const SAMPLE_BYTES: u64 = 1 << 20;
/// A shorter round says little about the wire if a larger one has measured it: a round's fixed
/// costs, and buffers, weigh too much in it. The same holds for a round shorter than so many looks
/// at all of the memory, which a round takes at least.
const SAMPLE_TIME: Duration = Duration::from_millis(100);
/// Fraction of that time that the round's bytes must account for at the known rate: a stall does
/// not mean a slow wire.
const SAMPLE_SHARE: f64 = 0.5;
const SAMPLE_SCANS: u32 = 3;
/// A round that took this multiple of the time expected at the known rate, plus this time, shows
/// that the wire has become slower, however few its bytes. In the lab, single rounds of 0.1 MB
/// stalled for up to 0.22 s.
const MUCH_SLOWER: f64 = 2.0;
const SLOWER_BY: Duration = Duration::from_millis(250);
/// A shorter sample says more about one moment than about the guest.
const LEAST_SAMPLE: Duration = Duration::from_millis(50);
/// Rate assumed before any measurement: 1 Gb/s.
const ASSUMED_BYTES_PER_S: f64 = 125e6;

/// Pages and bytes that a sweep handed to the wire, or all sweeps so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SentTotals {
    /// Pages sent, zero pages included.
    pub pages: u64,
    /// Zero pages among them.
    pub zero_pages: u64,
    /// Pages among them that were sent by reference or as deltas.
    pub rebuilt_pages: u64,
    /// Pages among those that were sent by reference. The destination verifies them before it takes
    /// what follows.
    pub referred_pages: u64,
    /// Bytes handed to the wire.
    pub bytes: u64,
}

/// Measured rates, bytes per second.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rates {
    pub wire_bytes_per_s: f64,
    /// Bytes of pages that the wire carries, compressed or not, without those that cost a few bytes
    /// (zero, or sent by reference).
    pub carried_bytes_per_s: f64,
    /// Bytes of pages that the guest dirties.
    pub dirty_bytes_per_s: f64,
}

#[derive(Clone, Debug)]
pub(crate) struct Ledger {
    phase: Phase,
    phase_since: Duration,
    phases: Vec<(Phase, Duration)>,
    rounds: Vec<RoundReport>,
    round_since: Duration,
    /// Padding sent with the round.
    padding_bytes: u64,
    /// Limit on the guest's writes in the round, pages per second.
    throttle: Option<f64>,
    /// Pages of the last round that were sent by reference or as deltas, and those of them sent by
    /// reference.
    rebuilt_pages: u64,
    referred_pages: u64,
    /// Duration of a look at all of the memory.
    scan: Duration,
    /// Duration of the round's search for its pages, which the round takes at least. With tracking
    /// by faults it scans, and the look does not.
    search: Duration,
    /// Pages that were counted as dirty only because pages around them are.
    filled_pages: u64,
    /// Rate on the wire, measured by a round of `sample_bytes`.
    wire_bytes_per_s: Option<f64>,
    /// Bytes of the round that measured the wire's rate.
    sample_bytes: u64,
    /// Bytes of pages, without zero pages, per byte on the wire.
    expansion: f64,
    /// What the limits in force leave for pages.
    limit_bytes_per_s: Option<u64>,
    dirty_rate: DirtyRate,
    /// Time when tracking began.
    tracked_since: Duration,
    /// Pages written per second while the destination prepared, or some time into round 0. A long
    /// round shows less, because a page that is written again in it counts once.
    sampled_pages_per_s: Option<f64>,
}

impl Ledger {
    pub(crate) fn new(phase: Phase) -> Self {
        Ledger {
            phase,
            phase_since: Duration::ZERO,
            phases: Vec::new(),
            rounds: Vec::new(),
            round_since: Duration::ZERO,
            padding_bytes: 0,
            throttle: None,
            rebuilt_pages: 0,
            referred_pages: 0,
            scan: Duration::ZERO,
            search: Duration::ZERO,
            filled_pages: 0,
            wire_bytes_per_s: None,
            sample_bytes: 0,
            expansion: 1.0,
            limit_bytes_per_s: None,
            dirty_rate: DirtyRate::default(),
            tracked_since: Duration::ZERO,
            sampled_pages_per_s: None,
        }
    }

    pub(crate) fn phase(&self) -> Phase {
        self.phase
    }

    pub(crate) fn enter(&mut self, now: Duration, phase: Phase) {
        let spent = now.saturating_sub(self.phase_since);
        match self.phases.iter_mut().find(|(known, _)| *known == self.phase) {
            Some((_, total)) => *total += spent,
            None => self.phases.push((self.phase, spent)),
        }
        (self.phase, self.phase_since) = (phase, now);
    }

    /// Begins a round. `throttle`: limit on the guest's writes from now on, pages per second.
    pub(crate) fn round_begins(&mut self, now: Duration, throttle: Option<f64>) {
        (self.round_since, self.padding_bytes, self.throttle) = (now, 0, throttle);
        self.dirty_rate.round_begins(throttle);
        if !self.rounds.is_empty() {
            self.sampled_pages_per_s = None;
        }
    }

    /// Notes that so many bytes of padding went with the round: their time must not be attributed
    /// to it.
    pub(crate) fn padded(&mut self, bytes: u64) {
        self.padding_bytes = bytes;
    }

    /// Notes that these pages are handed to the wire. The destination has not applied them yet.
    pub(crate) fn round_sent(&mut self, round: u32, sent: SentTotals) {
        (self.rebuilt_pages, self.referred_pages) = (sent.rebuilt_pages, sent.referred_pages);
        self.rounds.push(RoundReport {
            round,
            pages: sent.pages,
            zero_pages: sent.zero_pages,
            bytes: sent.bytes,
            duration_ms: 0.0,
            dirty_pages_per_s: 0.0,
            throttled_to_pages_per_s: self.throttle,
        });
    }

    /// Ends a round: what was sent is on the wire, or applied if `applied` gives the round trip of
    /// the destination's report.
    pub(crate) fn round_over(&mut self, now: Duration, applied: Option<Duration>) {
        let Some(report) = self.rounds.last_mut() else {
            return;
        };
        let took = now.saturating_sub(self.round_since);
        report.duration_ms = millis(took);
        let RoundReport { pages, zero_pages, bytes, .. } = *report;
        let sent_pages = pages.saturating_sub(zero_pages).saturating_sub(self.rebuilt_pages);
        // A sweep that found almost only zeros, or content that the destination holds, spent its
        // time reading and checking, not sending.
        let mostly_sending = zero_pages + self.rebuilt_pages <= 8 * sent_pages;
        let is_known_better = self.is_mostly_referred() && self.wire_bytes_per_s.is_some();
        if !mostly_sending || is_known_better {
            return;
        }
        let on_the_wire =
            took.saturating_sub(applied.unwrap_or_default()).max(Duration::from_micros(100));
        let padded = bytes.saturating_add(self.padding_bytes);
        let wire = padded as f64 / on_the_wire.as_secs_f64();
        if self.is_sample(bytes, wire, on_the_wire, applied.is_some()) {
            (self.wire_bytes_per_s, self.sample_bytes) = (Some(wire), bytes);
        }
        if bytes >= SAMPLE_BYTES {
            // Raw pages cost a little more than their bytes.
            let sent_bytes = sent_pages * u64::from(PAGE_SIZE);
            self.expansion = (sent_bytes as f64 / bytes as f64).max(1.0);
        }
    }

    /// Ends a round that began with an empty wire and is in buffers: it shows no rate.
    pub(crate) fn brief_round_over(&mut self, now: Duration) {
        if let Some(report) = self.rounds.last_mut() {
            report.duration_ms = millis(now.saturating_sub(self.round_since));
        }
    }

    /// Returns whether a round of so many bytes, without its padding, shows what the wire carries.
    fn is_sample(
        &self,
        bytes: u64,
        wire_bytes_per_s: f64,
        on_the_wire: Duration,
        applied: bool,
    ) -> bool {
        let is_large = bytes >= SAMPLE_BYTES;
        let Some(known) = self.wire_bytes_per_s else { return is_large };
        // Applied data is in no buffer; padding does not wait for its windows as pages do.
        let is_faster = applied && self.padding_bytes == 0 && wire_bytes_per_s > known;
        let expected_s = (bytes + self.padding_bytes) as f64 / known;
        let scans = SAMPLE_SCANS * self.scan.max(self.search);
        let is_long = on_the_wire >= SAMPLE_TIME.max(scans)
            && expected_s >= SAMPLE_SHARE * SAMPLE_TIME.as_secs_f64();
        let slower_by = SLOWER_BY.max(scans);
        let is_slower =
            on_the_wire.as_secs_f64() > MUCH_SLOWER * expected_s + slower_by.as_secs_f64();
        is_slower || (is_large && (is_long || is_faster || bytes >= self.sample_bytes))
    }

    /// Returns the pages of the round that the wire cannot have carried since they were found: they
    /// delay what follows.
    pub(crate) fn pages_in_buffers(&self) -> u64 {
        let Some(round) = self.rounds.last() else { return 0 };
        let sending_ms = (round.duration_ms - millis(self.search)).max(0.0);
        let carried_bytes = self.rates().carried_bytes_per_s * sending_ms / 1e3;
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "saturates")]
        let carried_pages = (carried_bytes / f64::from(PAGE_SIZE)) as u64;
        (round.pages - round.zero_pages.min(round.pages)).saturating_sub(carried_pages)
    }

    /// Sets how many bytes per second the limits in force leave for pages. If that changes, the
    /// next round measures the wire anew.
    pub(crate) fn limited(&mut self, bytes_per_s: Option<u64>) {
        if self.limit_bytes_per_s != bytes_per_s {
            (self.limit_bytes_per_s, self.sample_bytes) = (bytes_per_s, 0);
        }
    }

    /// Notes the durations of a look at all of the memory and of the round's search for its pages.
    pub(crate) fn scanned(&mut self, scan: Duration, search: Duration) {
        (self.scan, self.search) = (scan, search);
    }

    pub(crate) fn scan(&self) -> Duration {
        self.scan
    }

    /// Notes that the guest cannot be held to the round's limit.
    pub(crate) fn not_throttled(&mut self) {
        self.throttle = None;
        self.dirty_rate.not_held();
    }

    pub(crate) fn tracking_begins(&mut self, now: Duration) {
        self.tracked_since = now;
    }

    /// Notes that `pages` were written since tracking began. An earlier sample stays in force if
    /// its rate is higher: over a longer time fewer pages are written for the first time.
    pub(crate) fn sampled(&mut self, now: Duration, pages: u64) {
        let since = now.saturating_sub(self.tracked_since).max(LEAST_SAMPLE);
        let sampled = pages as f64 / since.as_secs_f64();
        self.sampled_pages_per_s = Some(self.sampled_pages_per_s.unwrap_or(0.0).max(sampled));
    }

    /// Notes how many of the pages counted next are dirty only because pages around them are.
    pub(crate) fn filled(&mut self, pages: u64) {
        self.filled_pages = pages;
    }

    /// Notes that `remaining` pages were dirtied since the round began to protect them.
    pub(crate) fn counted(&mut self, now: Duration, remaining: u64) {
        let since = now.saturating_sub(self.round_since);
        let remaining = remaining.saturating_sub(self.filled_pages);
        let seen =
            if since > Duration::ZERO { remaining as f64 / since.as_secs_f64() } else { 0.0 };
        // Applies to round 0, which lasts longest and whose remaining pages include those written
        // before it.
        let sampled = self.sampled_pages_per_s.unwrap_or(0.0);
        let seen = seen.max(sampled);
        self.dirty_rate.counted(since, seen);
        if let Some(report) = self.rounds.last_mut() {
            report.dirty_pages_per_s = seen;
        }
    }

    /// Adds what was sent in the last round, while the guest was paused, in one or two sweeps.
    pub(crate) fn last_round(&mut self, now: Duration, round: u32, sent: SentTotals) {
        match self.rounds.last_mut().filter(|report| report.round == round) {
            Some(report) => {
                report.pages += sent.pages;
                report.zero_pages += sent.zero_pages;
                report.bytes += sent.bytes;
            }
            None => {
                self.round_since = now;
                self.round_sent(round, sent);
            }
        }
    }

    pub(crate) fn last_round_over(&mut self, now: Duration) {
        if let Some(report) = self.rounds.last_mut() {
            report.duration_ms = millis(now.saturating_sub(self.round_since));
        }
    }

    /// Returns the measured rates, with the wire's rate limited to what the limits now permit: a
    /// round measured before a limit was set does not predict the rate.
    pub(crate) fn rates(&self) -> Rates {
        let wire = self.wire_bytes_per_s.unwrap_or(ASSUMED_BYTES_PER_S);
        let limited = self.limit_bytes_per_s.map_or(wire, |limit| wire.min(limit as f64));
        Rates {
            wire_bytes_per_s: limited,
            carried_bytes_per_s: limited * self.expansion,
            dirty_bytes_per_s: self.dirty_pages_per_s() * f64::from(PAGE_SIZE),
        }
    }

    pub(crate) fn dirty_pages_per_s(&self) -> f64 {
        self.dirty_rate.pages_per_s()
    }

    /// Returns whether most of the round's pages were sent by reference: the destination verifies
    /// them before it takes what follows.
    pub(crate) fn is_mostly_referred(&self) -> bool {
        let pages =
            self.rounds.last().map_or(0, |report| report.pages.saturating_sub(report.zero_pages));
        self.referred_pages > pages / 2
    }

    pub(crate) fn rounds(&self) -> Vec<RoundReport> {
        self.rounds.clone()
    }

    pub(crate) fn phases(&self, now: Duration) -> Vec<PhaseReport> {
        let mut closed = self.clone();
        closed.enter(now, Phase::Report);
        closed
            .phases
            .iter()
            .map(|&(phase, spent)| PhaseReport { phase, duration_ms: millis(spent) })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_of_a_phase_adds_up_over_its_visits() {
        let ms = Duration::from_millis;
        let mut ledger = Ledger::new(Phase::Prepare);
        ledger.enter(ms(10), Phase::PreCopy);
        ledger.enter(ms(30), Phase::Convergence);
        ledger.enter(ms(31), Phase::PreCopy);
        let phases = ledger.phases(ms(41));
        let spent: Vec<_> =
            phases.iter().map(|report| (report.phase, report.duration_ms)).collect();
        assert_eq!(
            spent,
            [(Phase::Prepare, 10.0), (Phase::PreCopy, 30.0), (Phase::Convergence, 1.0)]
        );
    }

    #[test]
    fn bandwidth_comes_from_long_rounds() {
        let ms = Duration::from_millis;
        let mut ledger = Ledger::new(Phase::PreCopy);
        ledger.round_begins(ms(0), None);
        ledger.round_sent(
            0,
            SentTotals {
                pages: 24_000,
                zero_pages: 0,
                bytes: 100_000_000,
                ..SentTotals::default()
            },
        );
        ledger.round_over(ms(1040), Some(ms(40)));
        assert!((ledger.rates().wire_bytes_per_s - 1e8).abs() < 1.0);
        ledger.round_begins(ms(1040), None);
        ledger.round_sent(
            1,
            SentTotals { pages: 1, zero_pages: 0, bytes: 4124, ..SentTotals::default() },
        );
        ledger.round_over(ms(1080), Some(ms(40)));
        assert!((ledger.rates().wire_bytes_per_s - 1e8).abs() < 1.0);
    }

    #[test]
    fn a_short_round_is_not_a_bandwidth_sample() {
        let ms = Duration::from_millis;
        let mut ledger = Ledger::new(Phase::PreCopy);
        let mut round = |begins, ends, applied: bool, pages: u64, packed_to: u64| {
            ledger.round_begins(ms(begins), None);
            ledger.round_sent(
                0,
                SentTotals { pages, bytes: pages * 4096 / packed_to, ..SentTotals::default() },
            );
            ledger.round_over(ms(ends), applied.then_some(ms(0)));
            let Rates { wire_bytes_per_s, carried_bytes_per_s, .. } = ledger.rates();
            [wire_bytes_per_s, carried_bytes_per_s].map(|rate| (rate / 4096.0).round())
        };
        assert_eq!(round(0, 1000, true, 50_000, 2), [25_000.0, 50_000.0]);
        // It does show the size of its pages on the wire.
        assert_eq!(round(1000, 1050, true, 500, 1), [25_000.0, 25_000.0]);
        assert_eq!(round(1050, 1055, false, 500, 1), [25_000.0, 25_000.0], "it sits in buffers");
        assert_eq!(round(1055, 1205, true, 500, 1), [25_000.0, 25_000.0], "it has stalled");
        assert_eq!(round(1205, 1455, true, 2500, 1), [10_000.0, 10_000.0], "long enough");
        assert_eq!(
            round(1455, 1460, true, 500, 1),
            [100_000.0, 100_000.0],
            "it is applied, and faster"
        );
        assert_eq!(round(1460, 1560, true, 500, 1), [5000.0, 5000.0], "the slower one counts");
        assert_eq!(round(1560, 1580, false, 600, 1), [30_000.0, 30_000.0], "the larger one counts");
        // However few bytes: they would take 3 ms.
        assert_eq!(round(1580, 2580, true, 100, 1), [100.0, 100.0]);
    }

    #[test]
    fn one_scan_of_a_large_guest_does_not_mean_a_slow_link() {
        let ms = Duration::from_millis;
        let round = |ledger: &mut Ledger, begins, ends, pages: u64| {
            ledger.round_begins(ms(begins), None);
            ledger
                .round_sent(0, SentTotals { pages, bytes: pages * 4096, ..SentTotals::default() });
            ledger.round_over(ms(ends), Some(ms(0)));
            (ledger.rates().wire_bytes_per_s / 1e9).round()
        };
        let mut ledger = Ledger::new(Phase::PreCopy);
        ledger.scanned(ms(130), ms(0));
        assert_eq!(round(&mut ledger, 0, 10_000, 10_000_000), 4.0);
        assert_eq!(round(&mut ledger, 10_000, 10_140, 3000), 4.0);
        // By faults the look is short, and the sweep scans: here, and once more for the notes.
        ledger.scanned(ms(1), ms(300));
        assert_eq!(round(&mut ledger, 20_000, 20_620, 12_000), 4.0);
        // The wire has become slower nevertheless.
        assert_eq!(round(&mut ledger, 30_000, 32_000, 12_000), 0.0);
    }

    #[test]
    fn what_is_pointed_to_says_nothing_of_a_wire_that_is_known() {
        let ms = Duration::from_millis;
        let mut ledger = Ledger::new(Phase::PreCopy);
        let round = |ledger: &mut Ledger, begins, ends, pages, referred_pages| {
            let rebuilt_pages = referred_pages;
            ledger.round_begins(ms(begins), None);
            let bytes = (pages - referred_pages) * 4096;
            ledger.round_sent(
                0,
                SentTotals { pages, bytes, rebuilt_pages, referred_pages, ..SentTotals::default() },
            );
            ledger.round_over(ms(ends), Some(ms(0)));
            ((ledger.rates().wire_bytes_per_s / 4096.0).round(), ledger.is_mostly_referred())
        };
        assert_eq!(round(&mut ledger, 0, 1000, 30_000, 0), (30_000.0, false));
        assert_eq!(round(&mut ledger, 1000, 3000, 30_000, 20_000), (30_000.0, true));
        assert_eq!(round(&mut ledger, 3000, 4000, 30_000, 10_000), (20_000.0, false));
    }

    #[test]
    fn the_time_of_padding_is_not_the_pages() {
        let ms = Duration::from_millis;
        let mut ledger = Ledger::new(Phase::PreCopy);
        ledger.round_begins(ms(0), None);
        ledger.round_sent(
            1,
            SentTotals { pages: 1000, zero_pages: 0, bytes: 4_100_000, ..SentTotals::default() },
        );
        ledger.padded(12_300_000);
        ledger.round_over(ms(204), Some(ms(40)));
        // 16.4 MB in 164 ms.
        assert!((ledger.rates().wire_bytes_per_s - 1e8).abs() < 1.0);
        ledger.round_begins(ms(204), None);
        ledger.round_sent(
            2,
            SentTotals { pages: 2000, zero_pages: 0, bytes: 8_200_000, ..SentTotals::default() },
        );
        ledger.round_over(ms(368), Some(ms(0)));
        assert!((ledger.rates().wire_bytes_per_s - 5e7).abs() < 1.0, "the next round has none");
    }

    #[test]
    fn a_limit_counts_at_once_and_its_end_too() {
        let ms = Duration::from_millis;
        let mut ledger = Ledger::new(Phase::PreCopy);
        ledger.limited(Some(1_000_000));
        assert!((ledger.rates().wire_bytes_per_s - 1e6).abs() < 1.0, "nothing was measured yet");
        ledger.round_begins(ms(0), None);
        ledger.round_sent(
            0,
            SentTotals {
                pages: 25_600,
                zero_pages: 0,
                bytes: 100_000_000,
                ..SentTotals::default()
            },
        );
        ledger.round_over(ms(1000), Some(ms(0)));
        assert!(
            (ledger.rates().wire_bytes_per_s - 1e6).abs() < 1.0,
            "it was faster before the limit came"
        );
        ledger.limited(Some(1_000_000_000));
        assert!((ledger.rates().wire_bytes_per_s - 1e8).abs() < 1.0);
        ledger.limited(None);
        assert!((ledger.rates().wire_bytes_per_s - 1e8).abs() < 1.0);
    }

    #[test]
    fn pages_at_the_destination_predict_nothing_about_others() {
        let ms = Duration::from_millis;
        let mut ledger = Ledger::new(Phase::PreCopy);
        ledger.round_begins(ms(0), None);
        ledger.round_sent(
            0,
            SentTotals {
                pages: 50_000,
                rebuilt_pages: 25_000,
                bytes: 103_000_000,
                ..SentTotals::default()
            },
        );
        ledger.round_over(ms(1000), Some(ms(0)));
        assert!((ledger.rates().carried_bytes_per_s - 103e6).abs() < 1.0);
        ledger.round_begins(ms(1000), None);
        ledger.round_sent(
            1,
            SentTotals {
                pages: 50_000,
                rebuilt_pages: 49_000,
                bytes: 8_000_000,
                ..SentTotals::default()
            },
        );
        ledger.round_over(ms(2000), Some(ms(0)));
        assert!((ledger.rates().carried_bytes_per_s - 103e6).abs() < 1.0);
    }

    #[test]
    fn compressed_pages_count_as_whole_pages() {
        let ms = Duration::from_millis;
        let mut ledger = Ledger::new(Phase::PreCopy);
        ledger.round_begins(ms(0), None);
        ledger.round_sent(
            0,
            SentTotals {
                pages: 26_000,
                zero_pages: 1000,
                bytes: 25_000_000,
                ..SentTotals::default()
            },
        );
        ledger.round_over(ms(1000), Some(ms(0)));
        let rates = ledger.rates();
        assert!((rates.wire_bytes_per_s - 25e6).abs() < 1.0);
        assert!((rates.carried_bytes_per_s - 25_000.0 * 4096.0).abs() < 1.0);
    }
}
