//! A process that runs while pages of its memory are missing sees each page whole, or waits for it.
#![allow(
    unsafe_code,
    clippy::expect_used,
    clippy::panic,
    reason = "starts processes and mount namespaces; helpers of tests fail the test"
)]

mod support;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use godwit_ram::{
    Access, CHUNK_PAGES, DirtyTracker, MissingPages, PAGE_SIZE, PageIn, PageRange, Region,
    TrackError,
};
use parking_lot::Mutex;
use support::{Random, TwoBlocks, mappings_of};

/// Two blocks, neither of which is a multiple of 2 MiB.
const PAGES: [u64; 2] = [3 * 512 + 5, 2 * 512 + 77];
const STALE: u8 = 1;

/// Returns the byte that fills a page after it has arrived.
fn fresh(block: usize, page: u64) -> u8 {
    u8::try_from(2 + (page * 7 + block as u64) % 250).expect("a byte")
}

/// Creates memory in which every other page holds stale bytes.
fn shadow() -> Option<TwoBlocks> {
    TwoBlocks::new(PAGES, |region| {
        for page in (0..region.pages()).step_by(2) {
            region.copy_in(page * PAGE_SIZE, &[STALE; 4096]).expect("in bounds");
        }
    })
}

fn attach(shadow: &TwoBlocks) -> PageIn {
    PageIn::attach(&shadow.writer.socket, shadow.writer.pid(), &shadow.regions).expect("attaches")
}

/// Attaches and watches everything.
fn watch_all(shadow: &TwoBlocks) -> PageIn {
    let page_in = attach(shadow);
    for (block, region) in shadow.regions.iter().enumerate() {
        for chunk in region.all_pages().chunks(CHUNK_PAGES) {
            page_in.watch(block, chunk).expect("it runs");
        }
    }
    page_in
}

type Pages = BTreeSet<(usize, u64)>;

/// Fetches the pages that threads wait for now and that are neither in `present` nor fetched
/// already.
fn fetch(
    page_in: &PageIn,
    regions: &[Arc<Region>],
    present: &(dyn Fn(usize, u64) -> bool + Sync),
    fetched: &mut Pages,
) {
    let mut accesses: Vec<Access> = Vec::new();
    page_in.accesses(&mut accesses).expect("it runs");
    for Access { block, page, .. } in accesses {
        if !present(block, page) && fetched.insert((block, page)) {
            put(regions, block, page);
        }
        page_in.show(block, PageRange::new(page, 1)).expect("it runs");
    }
}

/// Writes the page's bytes into the file.
fn put(regions: &[Arc<Region>], block: usize, page: u64) {
    regions[block].copy_in(page * PAGE_SIZE, &[fresh(block, page); 4096]).expect("in bounds");
}

fn fresh_bytes(block: usize, pages: PageRange) -> Vec<u8> {
    (pages.first..pages.end()).map(|page| fresh(block, page)).collect()
}

/// Reads accesses without answering them, until so many threads wait.
fn until_waiting(page_in: &PageIn, threads: usize) -> Vec<Access> {
    let mut accesses: Vec<Access> = Vec::new();
    while accesses.iter().map(|access| access.thread).collect::<BTreeSet<_>>().len() < threads {
        page_in.accesses(&mut accesses).expect("it runs");
        std::thread::yield_now();
    }
    accesses
}

/// Runs `use_memory` while fetching the pages that threads wait for, and returns those pages. Pages
/// of `present` have arrived already.
fn while_fetching<T: Send>(
    page_in: &PageIn,
    regions: &[Arc<Region>],
    present: &(dyn Fn(usize, u64) -> bool + Sync),
    use_memory: impl FnOnce() -> T + Send,
) -> (T, Pages) {
    let (over, fetched) = (AtomicBool::new(false), Mutex::new(BTreeSet::new()));
    let result = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::SeqCst) {
                let mut fetched = fetched.lock();
                fetch(page_in, regions, present, &mut fetched);
                std::thread::yield_now();
            }
        });
        let result = use_memory();
        over.store(true, Ordering::SeqCst);
        result
    });
    (result, fetched.into_inner())
}

#[test]
fn the_guest_waits_for_missing_pages_and_never_sees_stale_ones() {
    let Some(shadow) = shadow() else { return };
    let page_in = watch_all(&shadow);
    let TwoBlocks { bench, regions, mut writer } = shadow;
    let (writer, fetched) = while_fetching(&page_in, &regions, &|_, _| false, || {
        let mut random = Random(3);
        for _ in 0..400 {
            let mapping = usize::try_from(random.below(3)).expect("small");
            let block = mapping % 2;
            let (first, count) = (random.below(PAGES[block] - 8), 1 + random.below(8));
            let seen = writer.bytes(mapping, first, count);
            let expected: Vec<u8> = (first..first + count).map(|page| fresh(block, page)).collect();
            assert_eq!(seen, expected, "block {block}, page {first}");
        }
        writer
    });
    assert!(fetched.len() > 500, "{}", fetched.len());
    drop((page_in, writer, bench));
}

#[test]
fn writes_of_the_process_and_of_the_kernel_wait_too() {
    let Some(shadow) = shadow() else { return };
    let page_in = watch_all(&shadow);
    let TwoBlocks { bench, regions, mut writer } = shadow;
    let ((), fetched) = while_fetching(&page_in, &regions, &|_, _| false, || {
        writer.run("write", 0, 10, 5);
        writer.run("kernel", 2, 1030, 5);
    });
    let expected = (10..15).chain(1030..1035).map(|page| (0, page)).collect();
    assert_eq!(fetched, expected);
    let mut page = [0; 4096];
    regions[0].copy_out(10 * PAGE_SIZE, &mut page).expect("in bounds");
    assert_eq!(page[..2], [fresh(0, 10) + 1, fresh(0, 10)], "one byte was added to");
    regions[0].copy_out(1030 * PAGE_SIZE, &mut page).expect("in bounds");
    assert_eq!(page[15..17], [0, fresh(0, 1030)], "16 bytes of zeros were read");
    drop((page_in, writer, bench));
}

#[test]
fn pages_shown_beforehand_are_not_waited_for() {
    let Some(shadow) = shadow() else { return };
    let page_in = watch_all(&shadow);
    let TwoBlocks { bench, regions, mut writer } = shadow;
    // Every other one of these pages is a hole, which reads as zero.
    page_in.show(0, PageRange::new(100, 900)).expect("shows");
    page_in.show(0, PageRange::new(200, 10)).expect("again");
    let all_there = |block: usize, page: u64| block == 0 && (100..1000).contains(&page);
    let (seen, fetched) =
        while_fetching(&page_in, &regions, &all_there, || writer.bytes(2, 98, 904));
    let expected: Vec<u8> = (98..1002)
        .map(|page| match (all_there(0, page), page % 2) {
            (false, _) => fresh(0, page),
            (true, 0) => STALE,
            (true, _) => 0,
        })
        .collect();
    assert_eq!(seen, expected);
    assert_eq!(fetched, [98, 99, 1000, 1001].map(|page| (0, page)).into());
    assert!(page_in.show(0, PageRange::new(PAGES[0], 1)).is_err());
    drop((page_in, writer, bench));
}

#[test]
fn the_mappings_of_the_process_are_reported() {
    let Some(mut shadow) = shadow() else { return };
    let before = shadow.writer.bytes(0, 700, 1);
    assert_eq!(before, [STALE]);
    shadow.writer.run("write", 2, 801, 2);
    let page_in = watch_all(&shadow);
    let mapped = page_in.mapped(0, shadow.regions[0].all_pages()).expect("reports");
    // The kernel may have mapped the pages around it as well.
    for page in [700, 801, 802] {
        assert!(mapped.iter().any(|run| run.contains(page)), "{mapped:?}");
    }
    let mapped_pages: Vec<u64> = mapped.iter().flat_map(|run| run.first..run.end()).collect();
    let is_mapped = |_: usize, page: u64| mapped_pages.contains(&page);
    let TwoBlocks { regions, writer, .. } = &mut shadow;
    let (_, fetched) =
        while_fetching(&page_in, regions, &|_, _| false, || writer.bytes(0, 0, PAGES[0]));
    let all: BTreeSet<_> =
        (0..PAGES[0]).filter(|page| !is_mapped(0, *page)).map(|page| (0, page)).collect();
    assert!(fetched.is_subset(&all) && !all.is_empty(), "a mapped page was waited for");
    assert_eq!(page_in.mapped(0, PageRange::new(5, 3)).expect("reports"), [PageRange::new(5, 3)]);
    assert_eq!(page_in.mapped(1, PageRange::new(0, PAGES[1])).expect("reports"), []);
}

#[test]
fn the_end_releases_all_waiters() {
    let Some(shadow) = shadow() else { return };
    let page_in = watch_all(&shadow);
    let TwoBlocks { bench, regions, mut writer } = shadow;
    std::thread::scope(|scope| {
        let waiting = scope.spawn(move || (writer.bytes(1, 64, 1), writer));
        let accesses = until_waiting(&page_in, 1);
        assert_eq!((accesses[0].block, accesses[0].page), (1, 64));
        page_in.end().expect("it runs");
        let (seen, _writer) = waiting.join().expect("continues");
        assert_eq!(seen, [STALE]);
    });
    drop((regions, bench));
}

/// Long enough for threads that do not wait to finish.
const A_WHILE: Duration = Duration::from_millis(200);

#[test]
fn only_what_is_watched_is_waited_for() {
    let Some(shadow) = shadow() else { return };
    let page_in = attach(&shadow);
    let chunk = PageRange::new(CHUNK_PAGES, CHUNK_PAGES);
    page_in.watch(0, chunk).expect("watches");
    // Again, together with the pages around them.
    page_in.watch(0, PageRange::new(CHUNK_PAGES - 3, 20)).expect("watches");
    page_in.watch(0, chunk).expect("watches");
    assert!(matches!(
        page_in.watch(0, PageRange::new(PAGES[0], 1)),
        Err(TrackError::OutOfBounds { .. })
    ));
    assert!(matches!(page_in.release(2, chunk), Err(TrackError::OutOfBounds { .. })));
    let watched = PageRange::between(CHUNK_PAGES - 3, chunk.end());
    let TwoBlocks { bench, regions, mut writer } = shadow;
    let path = regions[0].path().to_owned();
    assert_eq!(mappings_of(writer.pid(), &path), 6, "each of the two is cut in three");
    let (seen, fetched) = while_fetching(&page_in, &regions, &|_, _| false, || {
        (writer.crowd(0, 0, PAGES[0], 3), writer.crowd(1, 0, PAGES[1], 3))
    });
    let as_it_was = |page: u64| if page.is_multiple_of(2) { STALE } else { 0 };
    let expected: Vec<u8> = (0..PAGES[0])
        .map(|page| if watched.contains(page) { fresh(0, page) } else { as_it_was(page) })
        .collect();
    assert!(
        seen.0 == expected && seen.1.iter().zip(0..).all(|(byte, page)| *byte == as_it_was(page))
    );
    assert_eq!(fetched, (watched.first..watched.end()).map(|page| (0, page)).collect());
    page_in.release(0, watched).expect("releases");
    page_in.release(0, watched).expect("again");
    // No thread waits, so there is nothing to wake.
    page_in.show(0, watched).expect("shows");
    assert_eq!(mappings_of(writer.pid(), &path), 2, "they are whole again");
    page_in.end().expect("ends");
    drop((writer, bench));
}

#[test]
fn file_content_is_invisible_until_it_is_shown() {
    let Some(shadow) = shadow() else { return };
    let page_in = watch_all(&shadow);
    let TwoBlocks { bench, regions, mut writer } = shadow;
    let (answered, answer) = mpsc::channel();
    std::thread::scope(|scope| {
        // One waits for a page that the file holds, one for a hole.
        for page in [40, 41] {
            put(&regions, 0, page);
        }
        // Kept until the end, as dropping it kills it. It may answer before all of its mappings
        // have the pages.
        let reading = scope.spawn(move || {
            answered.send(writer.crowd(2, 40, 2, 2)).expect("heard");
            writer
        });
        let waiting = until_waiting(&page_in, 2);
        assert_eq!(
            waiting.iter().map(|access| access.page).collect::<BTreeSet<_>>(),
            [40, 41].into()
        );
        assert!(answer.recv_timeout(A_WHILE).is_err(), "a reader saw a page that was not shown");
        page_in.show(0, PageRange::new(40, 2)).expect("shows");
        assert_eq!(answer.recv().expect("answers"), fresh_bytes(0, PageRange::new(40, 2)));
        reading.join().expect("it has answered");
    });
    drop((page_in, bench));
}

#[test]
fn the_death_of_an_agent_releases_no_waiter() {
    let Some(shadow) = shadow() else { return };
    let (socket, pid) = (shadow.writer.socket.clone(), shadow.writer.pid());
    let page_in = watch_all(&shadow);
    let TwoBlocks { bench, regions, mut writer } = shadow;
    let (answered, answer) = mpsc::channel();
    let all = PageRange::new(0, PAGES[0]);
    let mut fetched = Pages::new();
    let (page_in, mut writer) = std::thread::scope(|scope| {
        let mut page_in = page_in;
        let reading = scope.spawn(move || {
            answered.send(writer.crowd(0, 0, PAGES[0], 4)).expect("heard");
            writer
        });
        for goal in [0, 50, 400] {
            while fetched.len() < goal {
                fetch(&page_in, &regions, &|_, _| false, &mut fetched);
            }
            // The agent receives some accesses and dies; others occur while there is no agent.
            let reported = until_waiting(&page_in, 2);
            drop(page_in);
            assert!(answer.recv_timeout(A_WHILE).is_err(), "a reader continued without an agent");
            page_in = PageIn::attach_again(&socket, pid, &regions).expect("attaches");
            let reported_again = until_waiting(&page_in, 4);
            assert!(
                reported.iter().all(|access| reported_again.contains(access)),
                "{reported:?}, {reported_again:?}"
            );
            // The next agent has not seen the accesses reported to a dead one.
            drop(page_in);
            page_in = PageIn::attach_again(&socket, pid, &regions).expect("attaches");
        }
        let seen = loop {
            fetch(&page_in, &regions, &|_, _| false, &mut fetched);
            if let Ok(seen) = answer.try_recv() {
                break seen;
            }
        };
        assert!(seen == fresh_bytes(0, all), "a reader saw a stale page");
        (page_in, reading.join().expect("it has answered"))
    });
    assert_eq!(fetched.len() as u64, PAGES[0]);
    page_in.release(0, all).expect("releases");
    page_in.end().expect("ends");
    // Everything of the other block was missing, and from now on is what the file holds.
    assert_eq!(writer.bytes(1, 0, 2), [STALE, 0]);
    let again = PageIn::attach_again(&socket, pid, &regions);
    assert!(matches!(again.err(), Some(TrackError::NothingKept { .. })));
    drop(bench);
}

#[test]
fn a_requester_during_a_release_gets_the_memory() {
    let Some(shadow) = shadow() else { return };
    let page_in = attach(&shadow);
    let TwoBlocks { bench, regions, mut writer } = shadow;
    let mut random = Random(11);
    for round in 0..60 {
        let chunk = PageRange::new((round % 3) * CHUNK_PAGES, 64);
        writer.run("discard", 0, chunk.first, chunk.count);
        page_in.watch(0, chunk).expect("watches");
        assert_eq!(page_in.mapped(0, chunk).expect("reports"), []);
        let (started, delay) = (Instant::now(), Duration::from_micros(random.below(3000)));
        writer = std::thread::scope(|scope| {
            let reading =
                scope.spawn(move || (writer.crowd(0, chunk.first, chunk.count, 4), writer));
            (chunk.first..chunk.end()).for_each(|page| put(&regions, 0, page));
            while started.elapsed() < delay {
                std::hint::spin_loop();
            }
            if round % 2 == 0 {
                page_in.show(0, PageRange::new(chunk.first, 32)).expect("shows");
            }
            page_in.release(0, chunk).expect("releases");
            let (seen, writer) = reading.join().expect("continues");
            assert!(seen == fresh_bytes(0, chunk), "round {round}: {seen:?}");
            writer
        });
    }
    page_in.end().expect("ends");
    drop((writer, bench));
}

#[test]
fn discarded_pages_are_waited_for_again() {
    let Some(shadow) = shadow() else { return };
    let page_in = watch_all(&shadow);
    let TwoBlocks { bench, regions, mut writer } = shadow;
    let all_there = |_: usize, _: u64| true;
    page_in.show(0, PageRange::new(0, 64)).expect("shows");
    writer.run("discard", 0, 10, 4);
    let (seen, _) = while_fetching(&page_in, &regions, &all_there, || writer.crowd(0, 8, 8, 2));
    assert_eq!(seen, [STALE, 0, 0, 0, 0, 0, STALE, 0]);
    drop((page_in, writer, bench));
}

#[test]
fn a_fully_watched_huge_page_stays_mapped() {
    // Whole huge pages: if a file ends inside one, the kernel uses small pages.
    let pages = [4 * CHUNK_PAGES; 2];
    let prepared =
        TwoBlocks::new(pages, |region| region.allocate(region.all_pages()).expect("fits"));
    let Some(mut shadow) = prepared else { return };
    shadow.writer.run("write", 0, 0, 1);
    shadow.writer.run("write", 0, CHUNK_PAGES, 1);
    let page_in = attach(&shadow);
    let chunk = |index: u64| PageRange::new(index * CHUNK_PAGES, CHUNK_PAGES);
    if page_in.mapped(0, chunk(0)).expect("reports") != [chunk(0)]
        || huge_kib(shadow.writer.pid()) == 0
    {
        eprintln!("skipped: this kernel maps no huge pages of a tmpfs");
        return;
    }
    page_in.watch(0, chunk(0)).expect("watches");
    assert_eq!(
        page_in.mapped(0, chunk(0)).expect("reports"),
        [chunk(0)],
        "watching unmaps \
        nothing"
    );
    // If the boundary of the watched range cuts a huge page, the kernel unmaps all of it, and
    // accesses to its pages wait.
    let half = PageRange::new(CHUNK_PAGES, CHUNK_PAGES / 2);
    page_in.watch(0, half).expect("watches");
    assert_eq!(page_in.mapped(0, chunk(1)).expect("reports"), []);
    // Memory that is not watched is mapped as a whole at the first access.
    shadow.writer.run("write", 0, 3 * CHUNK_PAGES, 1);
    assert_eq!(page_in.mapped(0, chunk(3)).expect("reports"), [chunk(3)]);
    // Watched memory is mapped page by page.
    page_in.watch(1, chunk(1)).expect("watches");
    page_in.show(1, PageRange::new(CHUNK_PAGES, 3)).expect("shows");
    assert_eq!(page_in.mapped(1, chunk(1)).expect("reports"), [PageRange::new(CHUNK_PAGES, 3)]);
    page_in.show(1, chunk(1)).expect("shows");
    page_in.show(0, chunk(0)).expect("shows what is mapped");
    page_in.release(1, chunk(1)).expect("releases");
    let TwoBlocks { bench, regions, mut writer } = shadow;
    let all_there = |_: usize, _: u64| true;
    let ((), _) = while_fetching(&page_in, &regions, &all_there, || {
        (0..3).for_each(|mapping| writer.run("write", mapping, 0, 4 * CHUNK_PAGES));
    });
    page_in.end().expect("ends");
    drop((writer, bench));
}

/// Returns how much memory the process has mapped with huge pages of a tmpfs.
fn huge_kib(pid: i32) -> u64 {
    let rollup = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).expect("it runs");
    let line = rollup.lines().find_map(|line| line.strip_prefix("ShmemPmdMapped:"));
    line.and_then(|line| line.split_whitespace().next()?.parse().ok()).unwrap_or(0)
}

#[test]
fn more_stretches_than_the_kernel_has_mappings_are_refused() {
    let limit = std::fs::read_to_string("/proc/sys/vm/max_map_count").expect("procfs");
    let limit: u64 = limit.trim().parse().expect("a number");
    if limit > 1 << 17 {
        eprintln!("skipped: this kernel allows {limit} mappings");
        return;
    }
    // Holes, of which the test touches three pages.
    let Some(mut shadow) = TwoBlocks::new([PAGES[0], 1200 + 2 * limit], |_| {}) else { return };
    let page_in = attach(&shadow);
    page_in.watch(1, PageRange::new(0, 1000)).expect("watches");
    let (started, mut watched) = (Instant::now(), 0u64);
    let refused = loop {
        match page_in.watch(1, PageRange::new(1001 + 2 * watched, 1)) {
            Ok(()) => watched += 1,
            Err(refused) => break refused,
        }
    };
    println!("{watched} stretches watched in {:?}", started.elapsed());
    assert!(matches!(refused, TrackError::TooManyMappings { .. }), "{refused}");
    assert!(2 * watched > limit / 2);
    // It cannot be cut out, and so stays watched.
    page_in.release(1, PageRange::new(500, 1)).expect("is as if released");
    let started = Instant::now();
    let (socket, pid) = (shadow.writer.socket.clone(), shadow.writer.pid());
    drop(page_in);
    let page_in = PageIn::attach_again(&socket, pid, &shadow.regions).expect("attaches");
    println!("attached again in {:?}", started.elapsed());
    let TwoBlocks { regions, writer, .. } = &mut shadow;
    let (seen, fetched) = while_fetching(&page_in, regions, &|_, _| false, || {
        [writer.bytes(1, 500, 1), writer.bytes(1, 1000, 2)].concat()
    });
    assert_eq!(seen, [fresh(1, 500), 0, fresh(1, 1001)]);
    assert_eq!(fetched, [(1, 500), (1, 1001)].into());
    let started = Instant::now();
    page_in.end().expect("ends");
    println!("ended in {:?}", started.elapsed());
    // When the kernel reaches the limit in the middle of the second, it leaves a cut.
    assert!(mappings_of(pid, shadow.regions[1].path()) <= 2);
}

#[test]
fn tracking_and_page_in_keep_out_of_each_others_way() {
    let Some(shadow) = shadow() else { return };
    let (socket, pid, regions) = (&shadow.writer.socket, shadow.writer.pid(), &shadow.regions);
    let tracker = DirtyTracker::attach(socket, pid, regions).expect("attaches");
    let refused = PageIn::attach(socket, pid, regions).err();
    assert!(matches!(refused, Some(TrackError::AlreadyTracked { .. })), "{refused:?}");
    drop(tracker);
    let page_in = attach(&shadow);
    page_in.watch(0, PageRange::new(0, 7)).expect("watches");
    let refused = DirtyTracker::attach(socket, pid, regions).err();
    assert!(matches!(refused, Some(TrackError::AlreadyTracked { .. })), "{refused:?}");
    page_in.end().expect("ends");
    DirtyTracker::attach(socket, pid, regions).expect("attaches");
}

#[test]
fn an_ended_process_is_reported() {
    let Some(mut shadow) = shadow() else { return };
    let (socket, pid) = (shadow.writer.socket.clone(), shadow.writer.pid());
    let page_in = watch_all(&shadow);
    shadow.writer.end();
    let some = PageRange::new(3, 4);
    let all = [
        page_in.watch(0, some),
        page_in.mapped(0, some).map(|_| ()),
        page_in.accesses(&mut Vec::new()),
        page_in.show(0, some),
        page_in.release(0, some),
        page_in.end(),
        PageIn::attach(&socket, pid, &shadow.regions).map(|_| ()),
        PageIn::attach_again(&socket, pid, &shadow.regions).map(|_| ()),
    ];
    for (index, result) in all.into_iter().enumerate() {
        assert!(matches!(result, Err(TrackError::ProcessGone { .. })), "{index}: {result:?}");
    }
}

/// Agent that works like the engine's: threads that answer and threads that push; the thread that
/// claims a page brings it.
struct Agent<'a> {
    page_in: PageIn,
    regions: &'a [Arc<Region>],
    missing: MissingPages,
    /// Missing pages that no thread is bringing.
    unclaimed: MissingPages,
    dies: AtomicBool,
}

impl Agent<'_> {
    fn new<'a>(page_in: PageIn, regions: &'a [Arc<Region>], missing: MissingPages) -> Agent<'a> {
        let unclaimed = MissingPages::in_memory(missing.block_pages());
        for (block, region) in regions.iter().enumerate() {
            missing
                .runs(block, region.all_pages())
                .iter()
                .for_each(|run| unclaimed.insert(block, *run));
        }
        Agent { page_in, regions, missing, unclaimed, dies: AtomicBool::new(false) }
    }

    fn bring(&self, block: usize, page: u64) {
        if !self.unclaimed.remove(block, page) {
            return;
        }
        put(self.regions, block, page);
        if self.dies.load(Ordering::SeqCst) {
            return;
        }
        assert!(self.missing.remove(block, page));
        self.page_in.show(block, PageRange::new(page, 1)).expect("it runs");
        let chunk = PageRange::new(page - page % CHUNK_PAGES, CHUNK_PAGES);
        let chunk = chunk.intersect(self.regions[block].all_pages());
        if self.missing.count_in(block, chunk) == 0 {
            self.page_in.release(block, chunk).expect("it runs");
        }
    }

    fn answer(&self) {
        let mut accesses: Vec<Access> = Vec::new();
        self.page_in.accesses(&mut accesses).expect("it runs");
        for Access { block, page, .. } in accesses {
            if self.missing.contains(block, page) {
                self.bring(block, page);
            } else {
                self.page_in.show(block, PageRange::new(page, 1)).expect("it runs");
            }
        }
    }

    /// Answers and pushes until only so few pages are missing, or until none are and `over` is set.
    fn run_until(&self, few: u64, over: &AtomicBool) {
        // Each thread looks before each page, so no order of the threads brings all of them.
        let goes_on = || {
            if few > 0 && self.missing.count() <= few {
                self.dies.store(true, Ordering::SeqCst);
            }
            !self.dies.load(Ordering::SeqCst) && !over.load(Ordering::SeqCst)
        };
        std::thread::scope(|scope| {
            for (block, pages) in PAGES.into_iter().enumerate() {
                scope.spawn(move || {
                    for page in (0..pages).take_while(|_| goes_on()) {
                        self.bring(block, page);
                        std::thread::yield_now();
                    }
                });
                scope.spawn(|| {
                    while goes_on() {
                        self.answer();
                        std::thread::yield_now();
                    }
                });
            }
        });
    }
}

#[test]
fn several_threads_bring_all_of_it_over_the_death_of_agents() {
    let Some(shadow) = shadow() else { return };
    let missing_path = shadow.bench.ram.path().join("missing");
    let missing = MissingPages::create(&missing_path, &PAGES).expect("creates");
    (0..2).for_each(|block| missing.insert(block, shadow.regions[block].all_pages()));
    let (socket, pid) = (shadow.writer.socket.clone(), shadow.writer.pid());
    let page_in = watch_all(&shadow);
    let TwoBlocks { bench, regions, mut writer } = shadow;
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let reading = scope.spawn(|| {
            // Whatever happens, the agents end.
            let seen = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                [2, 1, 0].map(|mapping: usize| writer.crowd(mapping, 0, PAGES[mapping % 2], 4))
            }));
            over.store(true, Ordering::SeqCst);
            seen
        });
        let mut agent = Agent::new(page_in, &regions, missing);
        for few in [2500, 1800, 900, 100] {
            agent.run_until(few, &over);
            drop(agent);
            let page_in = PageIn::attach_again(&socket, pid, &regions).expect("attaches");
            agent =
                Agent::new(page_in, &regions, MissingPages::open(&missing_path).expect("opens"));
            assert!(over.load(Ordering::SeqCst) || agent.missing.count() > 0);
        }
        agent.run_until(0, &over);
        let seen = reading.join().expect("ends").expect("sees whole pages");
        for (mapping, seen) in [2, 1, 0].into_iter().zip(seen) {
            assert!(
                seen == fresh_bytes(mapping % 2, PageRange::new(0, PAGES[mapping % 2])),
                "{mapping}"
            );
        }
        let mappings = mappings_of(pid, regions[0].path());
        assert_eq!(
            (agent.missing.count(), mappings),
            (0, 2),
            "all is there, and nothing watched any more"
        );
        agent.page_in.end().expect("ends");
    });
    drop((writer, bench));
}
