//! Figures of disks that travel: progress while they do, and their part of the report.

use std::time::{Duration, Instant};

use godwit_migration::disks::{DiskSent, RoundSent};
use godwit_migration::millis;
use godwit_types::{DiskMeans, DiskReport, DiskRound, DisksProgress, DisksReport};
use parking_lot::Mutex;

/// Rounds of a report. Later ones are added up in the last.
const MOST_ROUNDS: usize = 200;
/// Bytes of a round from which its rate says something about the link.
const SAMPLE_BYTES: u64 = 1 << 20;

/// Figures of one transfer.
#[derive(Debug, Default)]
pub(super) struct Figures(Mutex<Inner>);

#[derive(Debug, Default)]
struct Inner {
    means: DiskMeans,
    /// Bytes in use when the transfer began.
    total_bytes: u64,
    /// Number of the round in progress.
    round: u32,
    /// Bytes of that round, and how many of them are done.
    planned_bytes: u64,
    done_bytes: u64,
    /// Bytes that no round has planned yet.
    behind_bytes: u64,
    round_begun: Option<Instant>,
    /// Bytes of earlier rounds that are on the destination's disk.
    sent_bytes: u64,
    /// Rate of the last round that says something, before compression.
    bytes_per_s: f64,
    rounds: Vec<DiskRound>,
    wire_bytes: u64,
    resent_bytes: u64,
    /// What was sent of each disk.
    by_disk: Vec<DiskSent>,
    limit: Limit,
    last_round: Option<Duration>,
    is_cut: bool,
}

/// Limit of the guest's writes.
#[derive(Debug, Default)]
struct Limit {
    now: Option<u64>,
    least: Option<u64>,
    since: Option<Instant>,
    lasted: Duration,
}

impl Figures {
    /// Sets the bytes that are in use.
    pub(super) fn total(&self, bytes: u64) {
        self.0.lock().total_bytes = bytes;
    }

    /// Sets the means.
    pub(super) fn means(&self, means: DiskMeans) {
        self.0.lock().means = means;
    }

    /// Sets the bytes that are left beside those of the next round.
    pub(super) fn behind(&self, bytes: u64) {
        self.0.lock().behind_bytes = bytes;
    }

    /// Begins a round of this many bytes.
    pub(super) fn round_begins(&self, bytes: u64) {
        let mut inner = self.0.lock();
        (inner.planned_bytes, inner.done_bytes) = (bytes, 0);
        inner.round_begun = Some(Instant::now());
        inner.is_cut = false;
    }

    /// Counts bytes of the round that are done.
    pub(super) fn done(&self, bytes: u64) {
        self.0.lock().done_bytes += bytes;
    }

    /// Ends a round: all of it is on the destination's disk.
    pub(super) fn round_ends(&self, sent: &RoundSent) {
        let mut inner = self.0.lock();
        inner.add(sent);
        inner.round += 1;
        (inner.planned_bytes, inner.done_bytes, inner.round_begun) = (0, 0, None);
        if sent.bytes >= SAMPLE_BYTES {
            inner.bytes_per_s = rate(sent.bytes, sent.took);
        }
    }

    /// Counts what a round had sent when its connection was cut. `unmarked_bytes`: what of it is
    /// not on the destination's disk.
    pub(super) fn cut(&self, sent: &RoundSent, unmarked_bytes: u64) {
        let mut inner = self.0.lock();
        let marked = inner.planned_bytes.saturating_sub(unmarked_bytes);
        let again = sent.bytes.saturating_sub(marked);
        inner.add(sent);
        // The streams have counted them among those that are sent again.
        inner.sent_bytes = inner.sent_bytes.saturating_sub(again);
        (inner.planned_bytes, inner.done_bytes, inner.round_begun) = (unmarked_bytes, 0, None);
        inner.is_cut = true;
    }

    /// Ends the last round, which was sent while the guest was stopped.
    pub(super) fn last_round_ends(&self, sent: &RoundSent, took: Duration) {
        let mut inner = self.0.lock();
        inner.add(&RoundSent { took, ..sent.clone() });
        inner.last_round = Some(took);
        (inner.planned_bytes, inner.done_bytes, inner.round_begun) = (0, 0, None);
    }

    /// Notes a limit of the guest's writes, or its end.
    pub(super) fn limited(&self, bytes_per_s: Option<u64>) {
        let mut inner = self.0.lock();
        let limit = &mut inner.limit;
        if let Some(since) = limit.since.take() {
            limit.lasted += since.elapsed();
        }
        limit.now = bytes_per_s;
        if let Some(now) = bytes_per_s {
            limit.since = Some(Instant::now());
            limit.least = Some(limit.least.map_or(now, |least| least.min(now)));
        }
    }

    /// Whether the connection is cut.
    pub(super) fn is_cut(&self) -> bool {
        self.0.lock().is_cut
    }

    /// Whether anything is on the destination's disk.
    pub(super) fn has_sent(&self) -> bool {
        self.0.lock().sent_bytes > 0
    }

    /// Returns the progress.
    pub(super) fn progress(&self) -> DisksProgress {
        let inner = self.0.lock();
        let so_far = inner.round_begun.map_or(0.0, |begun| rate(inner.done_bytes, begun.elapsed()));
        let of_this = inner.bytes_per_s == 0.0 || inner.done_bytes >= SAMPLE_BYTES;
        DisksProgress {
            round: inner.round,
            remaining_bytes: inner
                .planned_bytes
                .saturating_sub(inner.done_bytes)
                .saturating_add(inner.behind_bytes),
            total_bytes: inner.total_bytes,
            sent_bytes: inner.sent_bytes + inner.done_bytes,
            referenced_bytes: inner.by_disk.iter().map(|disk| disk.referenced_bytes).sum(),
            bytes_per_s: if of_this && so_far > 0.0 { so_far } else { inner.bytes_per_s },
            limited_to_bytes_per_s: inner.limit.now,
        }
    }

    /// Returns the report. `disks`: each disk without its figures.
    pub(super) fn report(&self, disks: &[DiskReport]) -> DisksReport {
        let inner = self.0.lock();
        let limit = &inner.limit;
        let limited = limit.lasted + limit.since.map_or(Duration::ZERO, |since| since.elapsed());
        let disks = disks.iter().enumerate().map(|(number, disk)| {
            let sent = inner.by_disk.get(number).copied().unwrap_or_default();
            DiskReport {
                sent_bytes: sent.bytes,
                zero_bytes: sent.zero_bytes,
                referenced_bytes: sent.referenced_bytes,
                ..disk.clone()
            }
        });
        DisksReport {
            means: inner.means,
            disks: disks.collect(),
            rounds: inner.rounds.clone(),
            wire_bytes: inner.wire_bytes,
            resent_bytes: inner.resent_bytes,
            limited_to_bytes_per_s: limit.least,
            limited_ms: millis(limited),
            last_round_ms: inner.last_round.map(millis),
            kept_until_unix_ms: None,
        }
    }
}

impl Inner {
    fn add(&mut self, sent: &RoundSent) {
        self.sent_bytes += sent.bytes;
        self.wire_bytes += sent.wire_bytes;
        self.resent_bytes += sent.resent_bytes;
        if self.by_disk.len() < sent.by_disk.len() {
            self.by_disk.resize(sent.by_disk.len(), DiskSent::default());
        }
        for (all, disk) in self.by_disk.iter_mut().zip(&sent.by_disk) {
            all.add(*disk);
        }
        let round = DiskRound { bytes: sent.bytes, duration_ms: millis(sent.took) };
        let is_full = self.rounds.len() >= MOST_ROUNDS;
        match self.rounds.last_mut().filter(|_| is_full) {
            _ if sent.bytes == 0 => {}
            Some(last) => {
                last.bytes += round.bytes;
                last.duration_ms += round.duration_ms;
            }
            None => self.rounds.push(round),
        }
    }
}

fn rate(bytes: u64, took: Duration) -> f64 {
    bytes as f64 / took.as_secs_f64().max(1e-3)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sent(bytes: u64) -> RoundSent {
        RoundSent {
            bytes,
            zero_bytes: 1,
            referenced_bytes: 1,
            wire_bytes: bytes / 2,
            resent_bytes: 0,
            took: Duration::from_millis(500),
            by_disk: vec![DiskSent { bytes, zero_bytes: 1, referenced_bytes: 1 }],
        }
    }

    #[test]
    fn a_cut_counts_what_is_sent_again_and_rounds_are_few() {
        let figures = Figures::default();
        figures.total(10 << 20);
        figures.round_begins(8 << 20);
        figures.done(2 << 20);
        assert!(!figures.has_sent() && !figures.is_cut());
        figures.cut(&RoundSent { resent_bytes: 2 << 20, ..sent(6 << 20) }, 4 << 20);
        assert!(figures.has_sent() && figures.is_cut());
        figures.round_begins(4 << 20);
        figures.round_ends(&sent(4 << 20));
        let progress = figures.progress();
        assert_eq!((progress.sent_bytes, progress.total_bytes), (8 << 20, 10 << 20));
        assert_eq!((progress.round, progress.remaining_bytes), (1, 0));
        assert_eq!(progress.bytes_per_s, f64::from(8 << 20));
        for _ in 0..2 * MOST_ROUNDS {
            figures.round_ends(&sent(1));
        }
        figures.last_round_ends(&sent(2), Duration::from_millis(7));
        let disk = DiskReport { from: "/a".into(), to: "/b".into(), ..DiskReport::default() };
        let report = figures.report(&[disk]);
        assert_eq!((report.resent_bytes, report.last_round_ms), (2 << 20, Some(7.0)));
        assert_eq!(report.rounds.len(), MOST_ROUNDS);
        let bytes: u64 = report.rounds.iter().map(|round| round.bytes).sum();
        assert_eq!(bytes, (10 << 20) + 2 * MOST_ROUNDS as u64 + 2);
        assert_eq!((report.disks[0].sent_bytes, &*report.disks[0].to), (bytes, "/b"));
        let referenced_bytes = report.disks[0].referenced_bytes;
        assert_eq!(referenced_bytes, 2 * MOST_ROUNDS as u64 + 3);
        assert_eq!(figures.progress().referenced_bytes, referenced_bytes);
    }

    #[test]
    fn the_lowest_limit_is_reported() {
        let figures = Figures::default();
        assert_eq!(figures.report(&[]).limited_to_bytes_per_s, None);
        figures.limited(Some(20));
        figures.limited(Some(10));
        assert_eq!(figures.progress().limited_to_bytes_per_s, Some(10));
        figures.limited(None);
        assert_eq!(figures.progress().limited_to_bytes_per_s, None);
        let report = figures.report(&[]);
        assert_eq!(report.limited_to_bytes_per_s, Some(10));
        assert!(report.limited_ms >= 0.0);
    }
}
