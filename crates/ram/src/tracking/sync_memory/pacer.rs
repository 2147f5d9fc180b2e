//! Decides which waiting write goes on next, and when. It does no I/O and reads no clock.
//!
//! A bucket holds pages. It fills at the limit's rate, and a thread that writes a page takes from
//! it. Of the waiting threads, the one that has received least goes next. This is start-time fair
//! queueing (Goyal, Vin, Cheng 1996), with which a thread that writes now and then never waits
//! behind those that write all the time.

use std::collections::HashMap;
use std::time::Duration;

use crate::tracking::uffd::Fault;

/// Faults per second that are answered without the handler becoming the bottleneck: a third of the
/// rate measured with pages released eight at a time (ARCHITECTURE.md). If the limit is higher,
/// neighbours are released along with a page.
const FAULTS_PER_S: f64 = 10_000.0;
/// Most pages that one answer releases: 256 KiB.
const MOST_WINDOW_PAGES: u32 = 64;
/// The bucket holds what flows in during this time: the writes of one scheduler time slice may come
/// at once.
const BURST: Duration = Duration::from_millis(5);
/// Longest wait of a write, however low the limit. A vCPU that emulates a device may hold QEMU's
/// own lock meanwhile.
const MOST_HELD: Duration = Duration::from_millis(50);
/// Longest wait of a write while the guest is being stopped: a vCPU that waits cannot stop.
const MOST_HELD_STOPPING: Duration = Duration::from_millis(1);
/// Most threads whose shares are remembered; beyond it, threads that do not wait are forgotten.
const MOST_WRITERS: usize = 1024;

/// State of the bucket and of the waiting threads.
#[derive(Debug)]
pub(super) struct Pacer {
    /// The limit; `None`: no write waits.
    limit_pages_per_s: Option<f64>,
    /// Pages that may be released; negative after releases that could not wait.
    tokens: f64,
    refilled: Duration,
    most_held: Duration,
    /// The virtual time, in pages, that all shares have reached.
    virtual_time: f64,
    /// The virtual time that each thread's share has reached.
    shares: HashMap<u32, f64>,
    waiting: Vec<Waiting>,
}

#[derive(Clone, Copy, Debug)]
struct Waiting {
    fault: Fault,
    since: Duration,
    /// The thread's share so far, or the others' progress if that is more: an idle thread saves
    /// nothing up.
    start: f64,
    /// The thread's share so far.
    share: f64,
}

/// Write that goes on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Release {
    pub(super) fault: Fault,
    /// Number of pages released with it: a power of two.
    pub(super) pages: u32,
    /// Time that it waited.
    pub(super) held: Duration,
}

impl Pacer {
    /// Creates a pacer without a limit, at time zero.
    pub(super) fn new() -> Pacer {
        Pacer {
            limit_pages_per_s: None,
            tokens: 0.0,
            refilled: Duration::ZERO,
            most_held: MOST_HELD,
            virtual_time: 0.0,
            shares: HashMap::new(),
            waiting: Vec::new(),
        }
    }

    /// Sets the limit in pages per second; `None`: no limit.
    pub(super) fn set_limit(&mut self, now: Duration, pages_per_s: Option<f64>) {
        self.refill(now);
        self.limit_pages_per_s = pages_per_s.map(|limit| limit.max(1.0));
        self.tokens = self.tokens.min(self.most_tokens());
        self.most_held = MOST_HELD;
    }

    /// Announces that the guest is being stopped: waiting writes go on soon, and the limit holds as
    /// far as that permits, until the next limit is set.
    pub(super) fn let_stop(&mut self) {
        self.most_held = MOST_HELD_STOPPING;
    }

    /// Returns whether there is a limit.
    pub(super) fn is_limited(&self) -> bool {
        self.limit_pages_per_s.is_some()
    }

    /// Adds a write that begins to wait.
    pub(super) fn add(&mut self, now: Duration, fault: Fault) {
        if self.shares.len() > MOST_WRITERS {
            let waiting: Vec<u32> =
                self.waiting.iter().map(|waiting| waiting.fault.thread).collect();
            self.shares.retain(|thread, _| waiting.contains(thread));
        }
        let share = self.shares.entry(fault.thread).or_insert(0.0);
        self.waiting.push(Waiting {
            fault,
            since: now,
            start: share.max(self.virtual_time),
            share: *share,
        });
    }

    /// Counts pages that were released outside the queue: the others wait for them.
    pub(super) fn charge(&mut self, now: Duration, pages: u32) {
        self.refill(now);
        self.tokens = (self.tokens - f64::from(pages)).max(-self.most_tokens());
    }

    /// Returns the next write to go on, if one may go on now.
    pub(super) fn next(&mut self, now: Duration) -> Option<Release> {
        self.refill(now);
        let pages = self.window_pages();
        let may = self.limit_pages_per_s.is_none() || self.tokens >= f64::from(pages);
        let index = if may { self.least_served() } else { self.overdue(now) }?;
        let Waiting { fault, since, start, .. } = self.waiting.swap_remove(index);
        self.virtual_time = self.virtual_time.max(start);
        self.shares.insert(fault.thread, start + f64::from(pages));
        if self.limit_pages_per_s.is_some() {
            self.tokens = (self.tokens - f64::from(pages)).max(-self.most_tokens());
        }
        Some(Release { fault, pages, held: now.saturating_sub(since) })
    }

    /// Returns when [`Pacer::next`] will return a write; `None`: not before another write begins to
    /// wait.
    pub(super) fn next_at(&self, now: Duration) -> Option<Duration> {
        let oldest = self.waiting.iter().map(|waiting| waiting.since).min()?;
        let Some(limit) = self.limit_pages_per_s else { return Some(now) };
        let lacking = (f64::from(self.window_pages()) - self.tokens).max(0.0);
        let filled = Duration::try_from_secs_f64(lacking / limit).unwrap_or(MOST_HELD);
        Some((self.refilled + filled).min(oldest + self.most_held))
    }

    /// Returns how many pages to release at a time: one, if the handler can keep up with that.
    pub(super) fn window_pages(&self) -> u32 {
        let faults = self.limit_pages_per_s.unwrap_or(0.0) / FAULTS_PER_S;
        let mut pages = 1;
        while f64::from(pages) < faults && pages < MOST_WINDOW_PAGES {
            pages *= 2;
        }
        pages
    }

    fn most_tokens(&self) -> f64 {
        let burst = self.limit_pages_per_s.unwrap_or(0.0) * BURST.as_secs_f64();
        burst.max(f64::from(self.window_pages()))
    }

    fn refill(&mut self, now: Duration) {
        let passed = now.saturating_sub(self.refilled).as_secs_f64();
        self.refilled = self.refilled.max(now);
        let came = self.limit_pages_per_s.unwrap_or(0.0) * passed;
        self.tokens = (self.tokens + came).min(self.most_tokens());
    }

    fn least_served(&self) -> Option<usize> {
        let order = |a: &Waiting, b: &Waiting| {
            let by_share = a.start.total_cmp(&b.start).then(a.share.total_cmp(&b.share));
            by_share.then(a.since.cmp(&b.since))
        };
        self.waiting.iter().enumerate().min_by(|(_, a), (_, b)| order(a, b)).map(|(index, _)| index)
    }

    fn overdue(&self, now: Duration) -> Option<usize> {
        self.waiting.iter().position(|waiting| now >= waiting.since + self.most_held)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const PAGE: u64 = 4096;

    fn fault(thread: u32, page: u64) -> Fault {
        Fault { address: page * PAGE, thread }
    }

    /// Runs for `time` with threads that write again as soon as they may, after a pause of their
    /// own. Returns the writes that went on, and when.
    fn run(pacer: &mut Pacer, pauses: &[Duration], time: Duration) -> Vec<(Duration, Release)> {
        let mut begin: Vec<_> = pauses.iter().map(|_| Some(Duration::ZERO)).collect();
        let (mut now, mut released) = (Duration::ZERO, Vec::new());
        while now < time {
            for (thread, at) in (0..).zip(&mut begin) {
                if at.is_some_and(|at| at <= now) {
                    *at = None;
                    pacer.add(now, fault(thread, 7));
                }
            }
            while let Some(release) = pacer.next(now) {
                released.push((now, release));
                let thread = usize::try_from(release.fault.thread).unwrap();
                begin[thread] = Some(now + pauses[thread] + Duration::from_micros(1));
            }
            let write = begin.iter().flatten().min().copied();
            now = [write, pacer.next_at(now)]
                .into_iter()
                .flatten()
                .min()
                .unwrap()
                .max(now + Duration::from_nanos(100));
        }
        released
    }

    fn pages_of(released: &[(Duration, Release)], thread: u32) -> u64 {
        let of_thread = released.iter().filter(|(_, release)| release.fault.thread == thread);
        of_thread.map(|(_, release)| u64::from(release.pages)).sum()
    }

    #[test]
    fn without_a_limit_no_waiter_waits() {
        let mut pacer = Pacer::new();
        for page in 0..1000 {
            pacer.add(Duration::ZERO, fault(1, page));
            assert_eq!(pacer.next_at(Duration::ZERO), Some(Duration::ZERO));
            let release = pacer.next(Duration::ZERO).unwrap();
            assert_eq!((release.fault.address, release.pages), (page * PAGE, 1));
        }
        assert_eq!(pacer.next_at(Duration::ZERO), None);
    }

    #[test]
    fn a_removed_limit_releases_all_waiters() {
        let mut pacer = Pacer::new();
        pacer.set_limit(Duration::ZERO, Some(10.0));
        (0..20).for_each(|thread| pacer.add(Duration::ZERO, fault(thread, 1)));
        while pacer.next(Duration::ZERO).is_some() {}
        assert!(!pacer.waiting.is_empty());
        pacer.set_limit(Duration::ZERO, None);
        while pacer.next(Duration::ZERO).is_some() {}
        assert!(pacer.waiting.is_empty());
    }

    #[test]
    fn a_guest_that_is_being_stopped_waits_for_no_limit() {
        let mut pacer = Pacer::new();
        pacer.set_limit(Duration::ZERO, Some(1.0));
        pacer.let_stop();
        (0..64).for_each(|thread| pacer.add(Duration::ZERO, fault(thread, 1)));
        let soon = Duration::from_millis(1);
        assert!(pacer.next(soon - Duration::from_nanos(1)).is_none());
        assert_eq!(pacer.next_at(Duration::ZERO), Some(soon));
        assert_eq!((0..64).filter_map(|_| pacer.next(soon)).count(), 64);
        // It runs on after all.
        pacer.set_limit(soon, Some(1.0));
        pacer.add(soon, fault(1, 2));
        assert!(pacer.next(Duration::from_millis(40)).is_none());
    }

    #[test]
    fn threads_that_write_alike_get_alike() {
        let mut pacer = Pacer::new();
        pacer.set_limit(Duration::ZERO, Some(3000.0));
        let released = run(&mut pacer, &[Duration::ZERO; 3], Duration::from_secs(2));
        let pages: Vec<_> = (0..3).map(|thread| pages_of(&released, thread)).collect();
        assert!(pages.iter().all(|pages| (1950..=2050).contains(pages)), "{pages:?}");
    }

    #[test]
    fn a_rare_writer_does_not_wait_behind_a_constant_one() {
        let mut pacer = Pacer::new();
        pacer.set_limit(Duration::ZERO, Some(1000.0));
        let mut pauses = vec![Duration::ZERO; 30];
        // A third of its fair share.
        pauses.push(Duration::from_millis(100));
        let released = run(&mut pacer, &pauses, Duration::from_secs(3));
        // At each of its writes, one page of the others may have to come first.
        let seldom = released.iter().skip(100).filter(|(_, release)| release.fault.thread == 30);
        let longest = seldom.map(|(_, release)| release.held).max().unwrap();
        assert!(longest <= Duration::from_millis(3), "{longest:?}");
    }

    #[test]
    fn neighbours_go_along_where_single_pages_would_be_too_slow() {
        let mut pacer = Pacer::new();
        for (limit, pages) in [(500.0, 1), (10_000.0, 1), (10_001.0, 2), (75_000.0, 8), (1e9, 64)] {
            pacer.set_limit(Duration::ZERO, Some(limit));
            assert_eq!(pacer.window_pages(), pages, "{limit}");
        }
    }

    #[test]
    fn ended_threads_are_forgotten() {
        let mut pacer = Pacer::new();
        for thread in 0..100_000 {
            pacer.add(Duration::ZERO, fault(thread, 1));
            pacer.next(Duration::ZERO).unwrap();
        }
        assert!(pacer.shares.len() <= MOST_WRITERS + 1);
    }

    proptest! {
        #[test]
        fn the_limit_is_kept_and_used(
            limit in 400.0..200_000.0f64, pauses in prop::collection::vec(0..50u64, 1..12)
        ) {
            let mut pacer = Pacer::new();
            pacer.set_limit(Duration::ZERO, Some(limit));
            let mut pauses: Vec<_> = pauses.into_iter().map(Duration::from_micros).collect();
            // Enough of them to use up the limit.
            pauses.resize(pauses.len().max(4), Duration::ZERO);
            let time = Duration::from_millis(500);
            let released = run(&mut pacer, &pauses, time);
            let pages: u64 =
                (0..).take(pauses.len()).map(|thread| pages_of(&released, thread)).sum();
            let due = limit * time.as_secs_f64();
            let pages = f64::from(u32::try_from(pages).unwrap());
            let window = f64::from(pacer.window_pages());
            prop_assert!(pages <= due + pacer.most_tokens() + window, "{pages} of {due}");
            prop_assert!(pages >= 0.97 * due - 2.0 * window, "{pages} of {due}");
        }

        #[test]
        fn no_waiter_waits_forever(limit in 0.001..20.0f64, threads in 1..200usize) {
            let mut pacer = Pacer::new();
            pacer.set_limit(Duration::ZERO, Some(limit));
            let released = run(&mut pacer, &vec![Duration::ZERO; threads], Duration::from_secs(2));
            let longest = released.iter().map(|(_, release)| release.held).max().unwrap();
            prop_assert!(longest <= MOST_HELD + Duration::from_millis(1), "{longest:?}");
            prop_assert!(released.len() >= threads);
        }
    }
}
