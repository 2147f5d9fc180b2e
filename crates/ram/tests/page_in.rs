//! A process that runs while pages of its memory are missing: it sees each page whole, or waits for it.
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
use std::sync::{Mutex, PoisonError};

use godwit_ram::{Access, CHUNK_PAGES, PAGE_SIZE, PageIn, PageRange, Region};
use support::{Random, TwoBlocks};

/// Two blocks of which neither is a multiple of 2 MiB.
const PAGES: [u64; 2] = [3 * 512 + 5, 2 * 512 + 77];
const STALE: u8 = 1;

/// What a page holds once it is there.
fn fresh(block: usize, page: u64) -> u8 {
    u8::try_from(2 + (page * 7 + block as u64) % 250).expect("a byte")
}

/// Every other page holds stale bytes.
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

/// Has `use_memory` run while whatever is waited for is fetched, and gives what was. Pages of `present` are there already.
fn while_fetching<T: Send>(
    page_in: &PageIn,
    regions: &[Arc<Region>],
    present: &(dyn Fn(usize, u64) -> bool + Sync),
    use_memory: impl FnOnce() -> T + Send,
) -> (T, BTreeSet<(usize, u64)>) {
    let (over, fetched) = (AtomicBool::new(false), Mutex::new(BTreeSet::new()));
    let result = std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut accesses: Vec<Access> = Vec::new();
            while !over.load(Ordering::SeqCst) {
                page_in.accesses(&mut accesses).expect("it runs");
                for Access { block, page, .. } in accesses.drain(..) {
                    let mut fetched = fetched.lock().unwrap_or_else(PoisonError::into_inner);
                    if !present(block, page) && fetched.insert((block, page)) {
                        let bytes = [fresh(block, page); 4096];
                        regions[block].copy_in(page * PAGE_SIZE, &bytes).expect("in bounds");
                    }
                    page_in.show(block, PageRange::new(page, 1)).expect("it runs");
                }
                std::thread::yield_now();
            }
        });
        let result = use_memory();
        over.store(true, Ordering::SeqCst);
        result
    });
    (result, fetched.into_inner().unwrap_or_else(PoisonError::into_inner))
}

#[test]
fn what_is_missing_is_waited_for_and_never_seen_stale() {
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
fn what_is_shown_beforehand_is_not_waited_for() {
    let Some(shadow) = shadow() else { return };
    let page_in = watch_all(&shadow);
    let TwoBlocks { bench, regions, mut writer } = shadow;
    // Of these every other one is a hole, which reads as zero.
    page_in.show(0, PageRange::new(100, 900)).expect("shows");
    page_in.show(0, PageRange::new(200, 10)).expect("again");
    let all_there = |block: usize, page: u64| block == 0 && (100..1000).contains(&page);
    let (seen, fetched) = while_fetching(&page_in, &regions, &all_there, || writer.bytes(2, 98, 904));
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
fn what_the_process_has_mapped_is_told() {
    let Some(mut shadow) = shadow() else { return };
    let before = shadow.writer.bytes(0, 700, 1);
    assert_eq!(before, [STALE]);
    shadow.writer.run("write", 2, 801, 2);
    let page_in = watch_all(&shadow);
    let mapped = page_in.mapped(0, shadow.regions[0].all_pages()).expect("tells");
    // The kernel may have mapped what lies around as well.
    for page in [700, 801, 802] {
        assert!(mapped.iter().any(|run| run.contains(page)), "{mapped:?}");
    }
    let mapped_pages: Vec<u64> = mapped.iter().flat_map(|run| run.first..run.end()).collect();
    let is_mapped = |_: usize, page: u64| mapped_pages.contains(&page);
    let TwoBlocks { regions, writer, .. } = &mut shadow;
    let (_, fetched) = while_fetching(&page_in, regions, &|_, _| false, || writer.bytes(0, 0, PAGES[0]));
    let all: BTreeSet<_> = (0..PAGES[0]).filter(|page| !is_mapped(0, *page)).map(|page| (0, page)).collect();
    assert!(fetched.is_subset(&all) && !all.is_empty(), "a mapped page was waited for");
    assert_eq!(page_in.mapped(0, PageRange::new(5, 3)).expect("tells"), [PageRange::new(5, 3)]);
    assert_eq!(page_in.mapped(1, PageRange::new(0, PAGES[1])).expect("tells"), []);
}

#[test]
fn the_end_lets_everybody_go_on() {
    let Some(shadow) = shadow() else { return };
    let page_in = watch_all(&shadow);
    let TwoBlocks { bench, regions, mut writer } = shadow;
    std::thread::scope(|scope| {
        let waiting = scope.spawn(move || (writer.bytes(1, 64, 1), writer));
        let mut accesses = Vec::new();
        while accesses.is_empty() {
            page_in.accesses(&mut accesses).expect("it runs");
            std::thread::yield_now();
        }
        assert_eq!((accesses[0].block, accesses[0].page), (1, 64));
        page_in.end().expect("it runs");
        let (seen, _writer) = waiting.join().expect("goes on");
        assert_eq!(seen, [STALE]);
    });
    drop((regions, bench));
}
