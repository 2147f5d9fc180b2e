//! Dirty tracking of a real process of another user: exactly the pages that it wrote, no more and
//! no fewer.
#![allow(
    unsafe_code,
    clippy::expect_used,
    clippy::panic,
    reason = "starts processes and mount namespaces; helpers of tests fail the test"
)]

mod support;

use std::collections::BTreeSet;
use std::sync::Arc;

use godwit_ram::{CHUNK_PAGES, DirtyTracker, PageRange, Region, ScanCores};
use support::{Bench, Random, TwoBlocks, Writer};

/// Two blocks, neither of which is a multiple of 2 MiB.
const PAGES: [u64; 2] = [9 * 512 + 3, 5 * 512 + 77];

struct Tracked {
    bench: Bench,
    regions: Vec<Arc<Region>>,
    writer: Writer,
    tracker: DirtyTracker,
}

fn tracked() -> Option<Tracked> {
    let TwoBlocks { bench, regions, writer } = TwoBlocks::new(PAGES, |_| {})?;
    let tracker = DirtyTracker::attach(&writer.socket, writer.pid(), &regions).expect("attaches");
    let cores = ScanCores { running: 3, paused: 2, range_pages: CHUNK_PAGES };
    Some(Tracked { bench, regions, writer, tracker: tracker.scan_on(cores) })
}

impl Tracked {
    /// Takes all dirty pages of a block, in calls of at most `max_pages`.
    fn take(&mut self, block: usize, max_pages: u64) -> BTreeSet<u64> {
        let all = self.regions[block].all_pages();
        let mut pages = BTreeSet::new();
        let mut next = 0;
        while next < all.end() {
            let mut out = vec![PageRange::new(1 << 40, 1)];
            let within = PageRange::between(next, all.end());
            let after = self.tracker.take_dirty(block, within, max_pages, &mut out).expect("takes");
            assert!(after > next, "no progress at page {next}");
            assert_eq!(out.remove(0), PageRange::new(1 << 40, 1), "earlier entries stay");
            assert!(godwit_ram::pages::page_count(&out) <= max_pages);
            assert!(out.windows(2).all(|pair| pair[0].end() < pair[1].first));
            for page in out.iter().flat_map(|range| range.first..range.end()) {
                assert!((next..after).contains(&page) && pages.insert(page));
            }
            next = after;
        }
        pages
    }
}

#[test]
fn exactly_the_written_pages() {
    let Some(mut tracked) = tracked() else { return };
    // Written before the start, so not dirty afterwards. The rest are holes.
    tracked.writer.run("write", 0, 100, 700);
    tracked.tracker.start().expect("starts");
    assert_eq!(tracked.tracker.count_dirty().expect("counts").pages, 0);
    let mut random = Random(7);
    for round in 0..150 {
        let mut expected = [BTreeSet::new(), BTreeSet::new()];
        for _ in 0..random.below(12) {
            let mapping = usize::try_from(random.below(3)).expect("small");
            let block = mapping % 2;
            let first = random.below(PAGES[block]);
            let count = 1 + random.below((PAGES[block] - first).min(1 + (round % 3) * 700));
            let command = ["write", "kernel"][usize::try_from(random.below(2)).expect("small")];
            tracked.writer.run(command, mapping, first, count);
            expected[block].extend(first..first + count);
            let clean = random.below(PAGES[block]);
            tracked.writer.run("read", mapping, clean, 1);
        }
        let count = expected.iter().map(BTreeSet::len).sum::<usize>() as u64;
        assert_eq!(tracked.tracker.count_dirty().expect("counts").pages, count);
        let max_pages =
            [1 + random.below(64), 5000, u64::MAX][usize::try_from(round % 3).expect("small")];
        for (block, expected) in expected.iter().enumerate() {
            assert_eq!(&tracked.take(block, max_pages), expected, "round {round}, block {block}");
        }
    }
    assert_eq!(tracked.tracker.count_dirty().expect("counts").pages, 0);
}

#[test]
fn scattered_pages_are_all_reported() {
    let Some(mut tracked) = tracked() else { return };
    tracked.tracker.start().expect("starts");
    // More runs than the kernel gathers at a time (512).
    for (step, mapping) in [(2, 0), (3, 2), (2, 1)] {
        let block = mapping % 2;
        for max_pages in [100, 512, 513, 1025, 1100, u64::MAX] {
            let expected: BTreeSet<u64> = (1..PAGES[block]).step_by(step).collect();
            tracked.writer.scatter(mapping, 1, PAGES[block] - 1, step);
            assert_eq!(tracked.take(block, max_pages), expected, "by {step}, at most {max_pages}");
        }
    }
}

#[test]
fn a_part_of_a_block_can_be_removed() {
    let Some(mut tracked) = tracked() else { return };
    tracked.tracker.start().expect("starts");
    tracked.writer.run("write", 0, 10, 20);
    let mut out = Vec::new();
    let next = tracked.tracker.take_dirty(0, PageRange::new(15, 5), 100, &mut out);
    assert_eq!((next.expect("takes"), out), (20, vec![PageRange::new(15, 5)]));
    let rest: BTreeSet<u64> = (10..15).chain(20..30).collect();
    assert_eq!(tracked.take(0, 1000), rest);
    let outside = tracked.tracker.take_dirty(0, PageRange::new(PAGES[0], 1), 1, &mut Vec::new());
    assert!(outside.is_err_and(|error| error.to_string().contains("not among those tracked")));
    let block = tracked.tracker.take_dirty(2, PageRange::new(0, 0), 1, &mut Vec::new());
    assert!(block.is_err());
}

#[test]
fn a_discarded_page_is_dirty_once_it_is_written_again() {
    let Some(mut tracked) = tracked() else { return };
    tracked.writer.run("write", 0, 0, 1500);
    tracked.tracker.start().expect("starts");
    tracked.writer.run("discard", 0, 600, 3);
    let mut data = Vec::new();
    tracked.regions[0].nonzero_ranges(PageRange::new(0, 1500), &mut data).expect("reads");
    assert_eq!(data, [PageRange::new(0, 600), PageRange::new(603, 897)]);
    tracked.writer.run("write", 0, 601, 1);
    assert_eq!(tracked.take(0, u64::MAX), BTreeSet::from([601]));
}

#[test]
fn writes_during_the_scan_are_never_lost() {
    let Some(mut tracked) = tracked() else { return };
    tracked.tracker.start().expect("starts");
    // The writer receives commands while scans run, so that writes occur in the middle of them.
    let mut random = Random(11);
    let Tracked { mut writer, mut tracker, regions, bench } = tracked;
    let all = regions[0].all_pages();
    let (asked, answered) = std::thread::scope(|scope| {
        let (done, finished) = std::sync::mpsc::channel();
        let writing = scope.spawn(move || {
            let mut asked = BTreeSet::new();
            for _ in 0..2000 {
                let first = random.below(PAGES[0] - 4);
                writer.run("write", 0, first, 4);
                asked.extend(first..first + 4);
            }
            // The end is signalled, not guessed: a scan after it sees all that was written.
            let _ = done.send(());
            (asked, writer)
        });
        let mut answered = BTreeSet::new();
        let mut last = false;
        loop {
            let mut out = Vec::new();
            tracker.take_dirty(0, all, u64::MAX, &mut out).expect("takes");
            answered.extend(out.iter().flat_map(|range| range.first..range.end()));
            if last {
                break;
            }
            last = finished.try_recv().is_ok();
        }
        let (asked, _writer) = writing.join().expect("writes");
        (asked, answered)
    });
    assert_eq!(answered, asked);
    drop(bench);
}

#[test]
fn dropping_ends_the_tracking_and_another_may_attach() {
    let Some(mut tracked) = tracked() else { return };
    let socket = tracked.writer.socket.clone();
    let pid = tracked.writer.pid();
    tracked.tracker.start().expect("starts");
    let second = DirtyTracker::attach(&socket, pid, &tracked.regions).map(|_| ());
    let message = second.expect_err("one at a time").to_string();
    assert!(message.contains("tracked already"), "{message}");
    drop(tracked.tracker);
    tracked.writer.run("write", 0, 0, 50);
    tracked.tracker = DirtyTracker::attach(&socket, pid, &tracked.regions).expect("attaches again");
    tracked.tracker.start().expect("starts");
    tracked.writer.run("write", 1, 7, 2);
    assert_eq!(tracked.take(0, u64::MAX), BTreeSet::new());
    assert_eq!(tracked.take(1, u64::MAX), BTreeSet::from([7, 8]));
}

#[test]
fn children_of_the_tracked_process_inherit_nothing() {
    let Some(mut tracked) = tracked() else { return };
    // The agent's own variables are not secret; those that load and set up the library must not be
    // passed on.
    assert_eq!(
        tracked.writer.ask("environment"),
        "environment",
        "a variable of the tracker's is left"
    );
    let names: Vec<String> = std::fs::read_dir(format!("/proc/{}/task", tracked.writer.pid()))
        .expect("it runs")
        .map(|task| {
            std::fs::read_to_string(task.expect("it runs").path().join("comm")).expect("a name")
        })
        .collect();
    assert!(names.iter().any(|name| name.trim() == "godwit-tracker"), "{names:?}");
}
