//! Scans of a paused guest's page tables: none by faults, one of all memory by scans. The guest is
//! this process.

use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering;

use super::simulation::with_library;
use super::*;
use crate::pages::page_count;

/// Memory of the smaller and of the larger guest.
const SIZES_GIB: [u64; 2] = [1, 64];
/// Pages that either guest writes before it stops, each too far from the next to be claimed with
/// it, and too few in 2 MiB for more of it to be released.
const WRITTEN_PAGES: u64 = 64;
const DISTANCE_PAGES: u64 = 4096;
const _: () = assert!(WRITTEN_PAGES * DISTANCE_PAGES * PAGE_SIZE <= 1 << 30);
const _: () = assert!(DISTANCE_PAGES > take::CLUSTER_GAP_PAGES);

/// What a pause takes.
#[derive(Debug, PartialEq, Eq)]
struct Pause {
    scanned_pages: u64,
    taken: Vec<PageRange>,
}

fn written() -> impl Iterator<Item = PageRange> {
    (0..WRITTEN_PAGES).map(|number| PageRange::new(number * DISTANCE_PAGES, 1))
}

/// Writes through the mapping, as a guest writes.
fn write(region: &Region) {
    let (mut from, to) = UnixStream::pair().unwrap();
    for page in written() {
        from.write_all(&[0xa5; 4096]).unwrap();
        region.receive(to.as_fd(), page).unwrap();
    }
}

fn take_all(tracker: &mut DirtyTracker, all: PageRange) -> Vec<PageRange> {
    let (mut rest, mut taken) = (all, Vec::new());
    while !rest.is_empty() {
        let next = tracker.take_dirty(0, rest, u64::MAX, &mut taken).unwrap();
        rest = PageRange::between(next, rest.end());
    }
    taken
}

/// Stops a guest. Returns `None`, and prints the reason, if this machine cannot track it so.
fn pause(gib: u64, by_faults: bool) -> Option<Pause> {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let path = folder.path().join("ram");
    let regions = [Arc::new(Region::create(&path, gib << 30, None).unwrap())];
    let all = regions[0].all_pages();
    if let Err(error) = check_kernel() {
        eprintln!("skipped: {error}");
        return None;
    }
    let socket = folder.path().join("tracker.sock");
    let pid = rustix::process::getpid().as_raw_nonzero().get();
    with_library(&socket, || {
        let tracker = DirtyTracker::attach(&socket, pid, &regions).unwrap();
        let mut tracker = tracker.by_faults(by_faults);
        tracker.start().unwrap();
        if tracker.fault_figures().by_faults != by_faults {
            eprintln!("skipped: this process may not handle faults of the kernel");
            return None;
        }
        assert!(take_all(&mut tracker, all).is_empty());
        tracker.let_stop();
        write(&regions[0]);
        let before = tracker.pagemap.scanned_pages.load(Ordering::SeqCst);
        let taken = take_all(&mut tracker, all);
        let scanned_pages = tracker.pagemap.scanned_pages.load(Ordering::SeqCst) - before;
        Some(Pause { scanned_pages, taken })
    })
    .unwrap()
}

#[test]
fn by_faults_no_page_table_is_read_in_the_pause_whatever_the_size() {
    for gib in SIZES_GIB {
        let Some(pause) = pause(gib, true) else { return };
        assert_eq!(pause, Pause { scanned_pages: 0, taken: written().collect() }, "{gib} GiB");
    }
}

#[test]
fn by_scans_the_page_tables_are_read_once_in_the_pause() {
    for gib in SIZES_GIB {
        let Some(Pause { scanned_pages, taken }) = pause(gib, false) else { return };
        assert_eq!(page_count(&taken), WRITTEN_PAGES, "{gib} GiB");
        let pages = (gib << 30) / PAGE_SIZE;
        // Each dirty page is also looked at again, and claimed.
        let most = pages + 2 * WRITTEN_PAGES;
        assert!((pages..=most).contains(&scanned_pages), "{gib} GiB: {scanned_pages} pages");
    }
}
