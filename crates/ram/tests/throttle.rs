//! Synchronous memory of a real process of another user, throttled and not: no write is lost,
//! whatever changes during the write.
#![allow(
    unsafe_code,
    clippy::expect_used,
    clippy::panic,
    reason = "starts processes and mount namespaces; helpers of tests fail the test"
)]

mod support;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::mpsc;

use godwit_ram::{CHUNK_PAGES, DirtyTracker, PAGE_SIZE, PageRange, Region, ScanCores};
use support::{Bench, Random, TwoBlocks, Writer};

/// Two blocks, neither of which is a multiple of what changes hands at a time (8 MiB).
const PAGES: [u64; 2] = [5 * 2048 + 3, 2048 + 77];
/// Limit that no test approaches: writers wait only for the answer, and one page is released at a
/// time.
const HIGH: f64 = 10_000.0;
/// Limit at which the second write waits for the longest time allowed.
const LOW: f64 = 1.0;

struct Tracked {
    bench: Bench,
    regions: Vec<Arc<Region>>,
    writer: Writer,
    tracker: DirtyTracker,
}

/// Starts to track by scans.
fn tracked() -> Option<Tracked> {
    tracked_by(false)
}

/// Starts to track, with all memory synchronous or none.
fn tracked_by(faults: bool) -> Option<Tracked> {
    let TwoBlocks { bench, regions, writer } = TwoBlocks::new(PAGES, |_| {})?;
    let attached = DirtyTracker::attach(&writer.socket, writer.pid(), &regions);
    let cores = ScanCores { running: 2, paused: 3, range_pages: CHUNK_PAGES };
    let mut tracker = attached.expect("attaches").by_faults(faults).scan_on(cores);
    tracker.start().expect("starts");
    Some(Tracked { bench, regions, writer, tracker })
}

/// Takes all dirty pages of a block, in calls of at most `max_pages`.
fn take(tracker: &mut DirtyTracker, block: usize, max_pages: u64) -> BTreeSet<u64> {
    let (mut pages, mut next) = (BTreeSet::new(), 0);
    while next < PAGES[block] {
        let mut out = Vec::new();
        let within = PageRange::between(next, PAGES[block]);
        let after = tracker.take_dirty(block, within, max_pages, &mut out).expect("takes");
        assert!(after > next, "no progress at page {next}");
        assert!(godwit_ram::pages::page_count(&out) <= max_pages);
        for page in out.iter().flat_map(|range| range.first..range.end()) {
            assert!((next..after).contains(&page) && pages.insert(page), "page {page}");
        }
        next = after;
    }
    pages
}

/// Checks that pages written with the throttle on and off, by the process and by the kernel,
/// through each mapping, are exactly the dirty ones.
#[test]
fn exactly_the_written_pages_are_dirty_under_a_throttle() {
    let Some(mut tracked) = tracked() else { return };
    let mut random = Random(23);
    for round in 0..90 {
        match round % 9 {
            2 => tracked.tracker.throttle(Some(HIGH)).expect("throttles"),
            7 => tracked.tracker.throttle(None).expect("lets go"),
            _ => {}
        }
        let mut expected = [BTreeSet::new(), BTreeSet::new()];
        for _ in 0..random.below(8) {
            let mapping = usize::try_from(random.below(3)).expect("small");
            let block = mapping % 2;
            // The first rounds stay in one part, so that the rest changes hands later.
            let first = random.below(PAGES[block].min(1500 + 100 * round));
            let count = 1 + random.below((PAGES[block] - first).min(1 + (round % 3) * 60));
            let command = ["write", "kernel"][usize::try_from(random.below(2)).expect("small")];
            tracked.writer.run(command, mapping, first, count);
            expected[block].extend(first..first + count);
        }
        let count = expected.iter().map(BTreeSet::len).sum::<usize>() as u64;
        assert_eq!(tracked.tracker.count_dirty().expect("counts").pages, count, "round {round}");
        let max_pages =
            [1 + random.below(64), 500, u64::MAX][usize::try_from(round % 3).expect("small")];
        for (block, expected) in expected.iter().enumerate() {
            let taken = take(&mut tracked.tracker, block, max_pages);
            assert_eq!(&taken, expected, "round {round}, block {block}");
        }
    }
    assert_eq!(tracked.tracker.count_dirty().expect("counts").pages, 0);
    let figures = tracked.tracker.throttle_figures();
    assert!(figures.faults > 0 && figures.pages == figures.faults, "{figures:?}");
}

/// Checks that the pages that faults name are those written, and whole chunks of 2 MiB of which a
/// part was written; that such a chunk becomes asynchronous; and that a tracker that is about to
/// stop the guest finds the same pages by its notes.
#[test]
fn faults_name_the_written_pages() {
    let Some(mut tracked) = tracked_by(true) else { return };
    let mut random = Random(29);
    let mut asynchronous = BTreeSet::new();
    for round in 0..60 {
        let mut expected = [BTreeSet::new(), BTreeSet::new()];
        for _ in 0..random.below(8) {
            let mapping = usize::try_from(random.below(3)).expect("small");
            let block = mapping % 2;
            let first = random.below(PAGES[block]);
            let count = 1 + random.below((PAGES[block] - first).min(40));
            let command = ["write", "kernel"][usize::try_from(random.below(2)).expect("small")];
            tracked.writer.run(command, mapping, first, count);
            expected[block].extend(first..first + count);
        }
        // Every third round as for the paused guest.
        match round % 3 {
            0 => {
                tracked.tracker.check_notes().expect("checks");
                tracked.tracker.let_stop();
            }
            _ => tracked.tracker.throttle(None).expect("goes on"),
        }
        let counted = tracked.tracker.count_dirty().expect("counts").pages;
        let max_pages =
            [1 + random.below(64), 500, u64::MAX][usize::try_from(round % 3).expect("small")];
        let mut taken_pages = 0;
        for (block, expected) in expected.iter().enumerate() {
            let taken = take(&mut tracked.tracker, block, max_pages);
            taken_pages += taken.len() as u64;
            assert!(taken.is_superset(expected), "round {round}, block {block}");
            let chunk = |page: &u64| page / CHUNK_PAGES;
            let written: BTreeSet<u64> = expected.iter().map(chunk).collect();
            for more in taken.difference(expected) {
                let of_chunk = expected.iter().filter(|page| chunk(page) == chunk(more)).count();
                assert!(of_chunk >= 8, "page {more} of {written:?}");
                asynchronous.insert((block, more / 2048));
            }
        }
        assert_eq!(counted, taken_pages, "round {round}");
    }
    assert_eq!(tracked.tracker.count_dirty().expect("counts").pages, 0);
    let figures = tracked.tracker.fault_figures();
    assert!(figures.faults > 0 && figures.unnoted_pages == 0, "{figures:?}");
    let all = PAGES.iter().sum::<u64>();
    assert!(
        (1..all).contains(&figures.synchronous_pages) && !asynchronous.is_empty(),
        "{figures:?}"
    );
}

#[test]
fn a_guest_that_writes_scattered_pages_is_tracked_by_scans() {
    let Some(mut tracked) = tracked_by(true) else { return };
    tracked.writer.run("write", 0, 512, 512);
    tracked.tracker.settle(0, 0.0).expect("settles");
    assert!(tracked.tracker.fault_figures().by_faults, "2 MiB that are dirty as a whole");
    tracked.writer.run("write", 0, 0, 1);
    tracked.tracker.settle(0, 0.0).expect("settles");
    let figures = tracked.tracker.fault_figures();
    assert!(!figures.by_faults && figures.synchronous_pages == 0, "{figures:?}");
    tracked.writer.run("write", 0, 77, 3);
    assert_eq!(take(&mut tracked.tracker, 0, u64::MAX), (77..80).collect());
}

/// Checks that a copy made of the pages taken, while the writer writes and memory changes over,
/// ends equal to the memory. The last pages are taken as from a paused guest.
#[test]
fn a_change_of_means_loses_no_page() {
    [false, true].into_iter().for_each(copy_while_it_is_written);
}

fn copy_while_it_is_written(by_faults: bool) {
    let Some(tracked) = tracked_by(by_faults) else { return };
    let Tracked { mut writer, mut tracker, regions, bench } = tracked;
    let all = regions[0].all_pages();
    let mut copy = vec![0; usize::try_from(all.len_bytes()).expect("small")];
    regions[0].copy_out(0, &mut copy).expect("reads");
    let copy_dirty = |tracker: &mut DirtyTracker, copy: &mut [u8]| {
        let mut out = Vec::new();
        let mut next = 0;
        while next < all.end() {
            let within = PageRange::between(next, all.end());
            next = tracker.take_dirty(0, within, u64::MAX, &mut out).expect("takes");
        }
        for page in out.iter().flat_map(|range| range.first..range.end()) {
            let at = usize::try_from(page * PAGE_SIZE).expect("small");
            regions[0].copy_out(page * PAGE_SIZE, &mut copy[at..at + 4096]).expect("reads");
        }
    };
    std::thread::scope(|scope| {
        let (done, finished) = mpsc::channel();
        let writing = scope.spawn(move || {
            let mut random = Random(31);
            for burst in 0..1500u16 {
                // Most writes hit the memory that changes over at the moment.
                let part = u64::from(burst / 300) * 2048;
                let first = (part + random.below(2000)).min(PAGES[0] - 24);
                writer.run(
                    ["write", "kernel"][usize::from(burst % 2)],
                    0,
                    first,
                    1 + random.below(24),
                );
                writer.run("write", 2, random.below(PAGES[0] - 2), 2);
            }
            let _ = done.send(());
            writer
        });
        let mut round = 0;
        while finished.try_recv().is_err() {
            match round % 9 {
                3 => tracker.throttle(Some(50_000.0)).expect("throttles"),
                6 => tracker.throttle(None).expect("lets go"),
                8 => tracker.let_stop(),
                0 if round > 0 => tracker.throttle(None).expect("goes on"),
                _ => {}
            }
            copy_dirty(&mut tracker, &mut copy);
            round += 1;
        }
        let _writer = writing.join().expect("writes");
        tracker.let_stop();
        copy_dirty(&mut tracker, &mut copy);
    });
    let mut memory = vec![0; copy.len()];
    regions[0].copy_out(0, &mut memory).expect("reads");
    let wrong: Vec<usize> = (0..copy.len() / 4096)
        .filter(|page| copy[page * 4096..][..4096] != memory[page * 4096..][..4096])
        .collect();
    assert!(wrong.is_empty(), "by faults: {by_faults}; pages that differ: {wrong:?}");
    assert!(tracker.throttle_figures().faults > 0);
    assert_eq!(tracker.fault_figures().unnoted_pages, 0);
    drop(bench);
}

/// Ends the tracking and begins it anew.
fn attach_again(tracked: Tracked) -> Tracked {
    let Tracked { bench, regions, writer, tracker } = tracked;
    drop(tracker);
    let mut tracker =
        DirtyTracker::attach(&writer.socket, writer.pid(), &regions).expect("attaches again");
    tracker.start().expect("starts");
    Tracked { bench, regions, writer, tracker }
}

/// Throttles block 0 to the end of its first chunk, with no dirty pages in it.
fn throttle_the_first_chunk(tracked: &mut Tracked, limit: f64) {
    tracked.writer.run("write", 0, 0, 1);
    tracked.tracker.throttle(Some(limit)).expect("throttles");
    assert_eq!(take(&mut tracked.tracker, 0, u64::MAX), BTreeSet::from([0]));
}

#[test]
fn a_waiting_write_continues_when_the_throttle_ends() {
    let ends: [fn(&mut DirtyTracker); 3] =
        [|tracker| tracker.throttle(None).expect("lets go"), |tracker| tracker.let_stop(), |_| {}];
    for (end, by_itself) in ends.into_iter().zip([true, true, false]) {
        let Some(mut tracked) = tracked() else { return };
        throttle_the_first_chunk(&mut tracked, LOW);
        // Each of them waits for the longest time allowed: without the end it would take half a
        // minute.
        let Tracked { mut writer, mut tracker, bench, regions } = tracked;
        std::thread::scope(|scope| {
            let writing = scope.spawn(move || {
                writer.run("write", 0, 1, 100);
                writer
            });
            while tracker.throttle_figures().faults < 3 {
                std::thread::yield_now();
            }
            end(&mut tracker);
            let waits = || !writing.is_finished();
            while by_itself && waits() {
                std::thread::yield_now();
            }
            // In the last case the tracker itself is dropped while writes wait.
            drop(tracker);
            let _writer = writing.join().expect("writes");
        });
        drop((bench, regions));
    }
}

#[test]
fn only_the_processors_of_the_guest_wait() {
    let Some(mut tracked) = tracked() else { return };
    // The writer's thread belongs to the process, but is not the one named.
    tracked.tracker = tracked.tracker.with_vcpus(vec![1]);
    throttle_the_first_chunk(&mut tracked, LOW);
    tracked.writer.run("write", 0, 1, 200);
    let figures = tracked.tracker.throttle_figures();
    assert_eq!((figures.faults, figures.held.as_nanos()), (200, 0));
    // If it is named, it waits.
    let pid = u32::try_from(tracked.writer.pid()).expect("pids are positive");
    let mut tracked = attach_again(tracked);
    tracked.tracker = tracked.tracker.with_vcpus(vec![pid]);
    throttle_the_first_chunk(&mut tracked, 500.0);
    tracked.writer.run("write", 0, 1, 20);
    let figures = tracked.tracker.throttle_figures();
    assert!(figures.faults == 20 && figures.held.as_nanos() > 0, "{figures:?}");
}

#[test]
fn the_end_of_the_process_is_reported_under_a_throttle_too() {
    let Some(mut tracked) = tracked() else { return };
    throttle_the_first_chunk(&mut tracked, HIGH);
    tracked.writer.end();
    let error = tracked.tracker.count_dirty().expect_err("it is gone").to_string();
    assert!(error.contains("has ended"), "{error}");
}

#[test]
fn a_throttle_that_ended_can_be_followed_by_another() {
    let Some(mut tracked) = tracked() else { return };
    for _ in 0..3 {
        throttle_the_first_chunk(&mut tracked, HIGH);
        tracked.writer.run("write", 2, 2040, 20);
        assert_eq!(take(&mut tracked.tracker, 0, 7), (2040..2060).collect());
        tracked = attach_again(tracked);
    }
}

#[test]
fn memory_changes_over_only_where_allowed_and_is_reported() {
    let Some(mut tracked) = tracked() else { return };
    tracked.tracker.throttle(Some(HIGH)).expect("throttles");
    tracked.tracker.let_change(false);
    tracked.writer.run("write", 0, 2050, 3);
    assert_eq!(take(&mut tracked.tracker, 0, u64::MAX), (2050..2053).collect());
    assert!(tracked.tracker.changed_over().is_empty());
    tracked.writer.run("write", 0, 2050, 3);
    assert_eq!(tracked.tracker.throttle_figures().faults, 0, "no write waited");

    tracked.tracker.let_change(true);
    let mut out = Vec::new();
    // It begins in the middle of the chunk, of which something was returned before.
    let middle = PageRange::between(2051, PAGES[0]);
    tracked.tracker.take_dirty(0, middle, u64::MAX, &mut out).expect("takes");
    assert_eq!((out, tracked.tracker.changed_over()), (vec![PageRange::new(2051, 2)], &[][..]));
    assert_eq!(take(&mut tracked.tracker, 0, u64::MAX), BTreeSet::from([2050]));
    assert_eq!(tracked.tracker.changed_over(), [PageRange::new(2048, 2048)]);
    tracked.writer.run("write", 0, 2050, 3);
    assert_eq!(tracked.tracker.throttle_figures().faults, 3);

    // Nothing changes over any more once the guest is about to be stopped.
    tracked.tracker.let_stop();
    tracked.writer.run("write", 0, 5000, 1);
    assert_eq!(take(&mut tracked.tracker, 0, u64::MAX), BTreeSet::from([2050, 2051, 2052, 5000]));
    assert!(tracked.tracker.changed_over().is_empty());
}
