//! Work on much memory, in ranges on several cores. Memory below [`LEAST_RANGES`] ranges is scanned
//! by the caller alone: starting a thread costs more than it saves.

use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::block::STEP_PAGES;

/// Most threads that scan at once. All of them read the page tables under the kernel's lock for
/// readers, so more gain little.
const MOST_THREADS: usize = 16;
/// Ranges from which on several threads scan: 2 GiB with the default size.
const LEAST_RANGES: u64 = 8;

/// Division of scans among cores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScanCores {
    /// Threads that scan while the guest runs: all cores but one, which is left to the guest.
    pub running: usize,
    /// Threads that scan while it is being stopped or is paused: all cores.
    pub paused: usize,
    /// Pages of a range that a thread scans at a time.
    pub range_pages: u64,
}

impl ScanCores {
    /// Returns the division for the CPUs that this process may use.
    #[must_use]
    pub fn of_this_machine() -> ScanCores {
        let cores = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
        ScanCores::of(cores)
    }

    fn of(cores: usize) -> ScanCores {
        let bounded = |threads: usize| threads.clamp(1, MOST_THREADS);
        ScanCores {
            running: bounded(cores.saturating_sub(1)),
            paused: bounded(cores),
            range_pages: STEP_PAGES,
        }
    }

    /// Returns whether so many pages are worth several threads, if there are several.
    pub(super) fn are_worth(&self, pages: u64) -> bool {
        self.range_pages.checked_mul(LEAST_RANGES).is_some_and(|least| pages >= least)
    }
}

/// Does `work` on each item, on so many threads with a state of their own, and returns the results
/// in the order of the items. A thread that cannot be started leaves its share to the others.
pub(super) fn each<T: Sync, S, R: Send>(
    threads: usize,
    items: &[T],
    state: impl Fn() -> S + Sync,
    work: impl Fn(&mut S, &T) -> R + Sync,
) -> Vec<R> {
    let next = AtomicUsize::new(0);
    let run = || {
        let (mut done, mut state) = (Vec::new(), state());
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some(item) = items.get(index) else { return done };
            done.push((index, work(&mut state, item)));
        }
    };
    let helpers = threads.min(items.len()).saturating_sub(1);
    let mut results = std::thread::scope(|scope| {
        let start = |_| {
            let builder = std::thread::Builder::new().name("godwit-scan".to_owned());
            builder.spawn_scoped(scope, run).ok()
        };
        let started: Vec<_> = (0..helpers).filter_map(start).collect();
        let mut results = run();
        for thread in started {
            match thread.join() {
                Ok(of_thread) => results.extend(of_thread),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
        results
    });
    results.sort_unstable_by_key(|(index, _)| *index);
    results.into_iter().map(|(_, result)| result).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_core_is_left_to_the_guest_while_it_runs() {
        let threads = |cores| (ScanCores::of(cores).running, ScanCores::of(cores).paused);
        assert_eq!(threads(1), (1, 1));
        assert_eq!(threads(2), (1, 2));
        assert_eq!(threads(8), (7, 8));
        assert_eq!(threads(256), (MOST_THREADS, MOST_THREADS));
        assert!(!ScanCores::of(8).are_worth((2 << 18) - 1));
        assert!(ScanCores::of(8).are_worth(2 << 18));
    }

    #[test]
    fn results_come_in_the_order_of_the_items() {
        for threads in [0, 1, 3, 50] {
            let items: Vec<usize> = (0..200).collect();
            let states = AtomicUsize::new(0);
            let state = || states.fetch_add(1, Ordering::Relaxed);
            let squares = each(threads, &items, state, |_, item| item * item);
            assert!(squares.iter().enumerate().all(|(item, square)| item * item == *square));
            assert_eq!(squares.len(), items.len());
            assert!((1..=threads.max(1)).contains(&states.into_inner()));
        }
        assert!(each(2, &[0_u8; 0], || (), |(), item| *item).is_empty());
    }
}
