//! Regions on a real tmpfs: files, holes, zeros, and pages over sockets.
#![allow(
    unsafe_code,
    clippy::expect_used,
    clippy::panic,
    reason = "mount namespaces; helpers of tests fail the test"
)]

mod support;

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::Path;

use godwit_ram::pages::gaps;
use godwit_ram::{PAGE_SIZE, PageRange, RamDir, RamError, Region};
use proptest::prelude::*;
use support::{Bench, NOBODY, Random};

/// Not a multiple of 2 MiB.
const PAGES: u64 = 3 * 512 + 5;

fn pattern(page: u64) -> Vec<u8> {
    let mut random = Random(page);
    (0..PAGE_SIZE / 8).flat_map(|_| random.below(u64::MAX).to_le_bytes()).collect()
}

fn fill(region: &Region, range: PageRange) {
    for page in range.first..range.end() {
        region.copy_in(page * PAGE_SIZE, &pattern(page)).expect("writes");
    }
}

fn content(region: &Region, page: u64) -> Vec<u8> {
    let mut bytes = vec![0; 4096];
    region.copy_out(page * PAGE_SIZE, &mut bytes).expect("reads");
    bytes
}

fn allocated_bytes(region: &Region) -> u64 {
    std::fs::metadata(region.path()).expect("a file").blocks() * 512
}

fn without_huge_pages() -> Option<Bench> {
    let bench = Bench::new()?;
    let path = bench.ram.path();
    rustix::mount::mount_remount(path, rustix::mount::MountFlags::empty(), c"huge=never")
        .expect("ours");
    Some(bench)
}

#[test]
fn a_separate_tmpfs_is_mounted_once() {
    let Some(bench) = Bench::new() else { return };
    let again = RamDir::open(bench.ram.path()).expect("takes the one there");
    let mounts = std::fs::read_to_string("/proc/thread-self/mountinfo").expect("reads");
    let ours = bench.ram.path().to_str().expect("text");
    assert_eq!(mounts.lines().filter(|line| line.contains(ours)).count(), 1);
    assert_eq!(again.huge_pages(), bench.ram.huge_pages());
    assert_eq!(bench.ram.huge_pages(), Path::new("/sys/kernel/mm/transparent_hugepage").exists());
    let mode = std::fs::metadata(ours).expect("there").permissions().mode();
    assert_eq!(mode & 0o7777, 0o700);

    let before = bench.ram.available_bytes();
    assert!(before > 0);
    let proc = bench.dir.path().join("proc");
    std::fs::create_dir(&proc).expect("a directory");
    rustix::mount::mount(
        "proc",
        &proc,
        "proc",
        rustix::mount::MountFlags::empty(),
        c"".to_owned().as_c_str(),
    )
    .expect("the namespace is ours");
    assert!(matches!(RamDir::open(&proc), Err(RamError::NotTmpfs { .. })));
}

#[test]
fn a_file_is_created_once_and_opened_often() {
    let Some(bench) = Bench::new() else { return };
    let path = bench.ram.path().join("vm.0");
    let region = Region::create(&path, PAGES * PAGE_SIZE, Some(NOBODY)).expect("creates");
    let metadata = std::fs::metadata(&path).expect("there");
    assert_eq!((metadata.uid(), metadata.gid(), metadata.mode() & 0o7777), (65534, 65534, 0o600));
    assert!(matches!(Region::create(&path, PAGE_SIZE, None), Err(RamError::Exists { .. })));
    let other = Region::open(&path).expect("opens");
    assert_eq!((other.file_id(), other.pages()), (region.file_id(), PAGES));
    fill(&region, PageRange::new(PAGES - 1, 1));
    assert_eq!(content(&other, PAGES - 1), pattern(PAGES - 1));
    for size in [0, 1, PAGE_SIZE + 1, !(PAGE_SIZE - 1)] {
        let path = bench.ram.path().join("odd");
        assert!(matches!(Region::create(&path, size, None), Err(RamError::Size { .. })));
        assert!(!path.exists());
    }
    let absent = Region::open(&bench.ram.path().join("absent")).expect_err("not there");
    assert!(absent.to_string().contains("absent"), "{absent}");
}

#[test]
fn bounds_are_kept() {
    let Some(bench) = Bench::new() else { return };
    let region = bench.region("a", PAGES);
    let outside = [
        PageRange::new(PAGES, 1),
        PageRange::new(0, PAGES + 1),
        PageRange::new(u64::MAX, 1),
        PageRange::new(1, u64::MAX),
    ];
    let (left, _right) = UnixStream::pair().expect("a pair");
    for range in outside {
        assert!(region.allocate(range).is_err());
        assert!(region.zero(range).is_err());
        assert!(region.data_ranges(range, &mut Vec::new()).is_err());
        let received = region.receive(left.as_fd(), range).expect_err("before it reads");
        assert_eq!(received.kind(), std::io::ErrorKind::InvalidInput);
    }
    assert!(!region.is_zero(PAGES));
    assert!(region.copy_in(PAGES * PAGE_SIZE - 1, &[1, 2]).is_err());
    for offset in [u64::MAX, PAGES * PAGE_SIZE - 1] {
        assert!(region.copy_out(offset, &mut [0; 2]).is_err());
        assert!(region.copy_data_out(offset, &mut [0; 2]).is_err());
    }
}

#[test]
fn more_than_there_is_cannot_be_allocated() {
    let Some(bench) = Bench::new() else { return };
    let limit = rustix::mount::MountFlags::empty();
    rustix::mount::mount_remount(bench.ram.path(), limit, c"size=4m").expect("ours");
    let region = bench.region("a", 2048);
    assert!(matches!(region.allocate(region.all_pages()), Err(RamError::NoSpace { .. })));
    // Pages that were not allocated, and no memory for them: an error, not a signal.
    let (mut left, right) = UnixStream::pair().expect("a pair");
    let sending = std::thread::spawn(move || {
        let chunk = vec![7u8; 1 << 20];
        while left.write_all(&chunk).is_ok() {}
    });
    let received = region.receive(right.as_fd(), region.all_pages()).expect_err("no memory");
    assert_eq!(received.kind(), std::io::ErrorKind::StorageFull, "{received}");
    let written = region.copy_in(0, &vec![1; 8 << 20]);
    assert!(matches!(written, Err(RamError::NoSpace { .. })), "{written:?}");
    right.shutdown(Shutdown::Both).expect("connected");
    sending.join().expect("ends");
}

#[test]
fn unwritten_pages_are_not_data() {
    let Some(bench) = without_huge_pages() else { return };
    let region = bench.region("a", PAGES);
    region.allocate(PageRange::new(0, 200)).expect("allocates");
    let mut data = Vec::new();
    region.data_ranges(region.all_pages(), &mut data).expect("looks");
    assert_eq!(data, [], "allocated is not written");
    let written = [PageRange::new(10, 3), PageRange::new(100, 1), PageRange::new(PAGES - 2, 2)];
    for range in written {
        fill(&region, range);
    }
    region.data_ranges(region.all_pages(), &mut data).expect("looks");
    assert_eq!(data, written);
    let mut part = vec![PageRange::new(9, 1)];
    region.data_ranges(PageRange::new(11, 100), &mut part).expect("looks");
    assert_eq!(part[1..], [PageRange::new(11, 2), PageRange::new(100, 1)]);
}

#[test]
fn zeroing_allocates_nothing() {
    for bench in [Bench::new(), without_huge_pages()] {
        let Some(bench) = bench else { return };
        let region = bench.region("a", PAGES);
        fill(&region, PageRange::new(20, 5));
        fill(&region, PageRange::new(700, 100));
        let before = allocated_bytes(&region);
        region.zero(PageRange::new(22, 750)).expect("zeroes");
        assert_eq!(allocated_bytes(&region), before);
        let mut left = Vec::new();
        region.nonzero_ranges(region.all_pages(), &mut left).expect("reads");
        assert_eq!(left, [PageRange::new(20, 2), PageRange::new(772, 28)]);
        assert!(
            region.is_range_zero(PageRange::new(22, 3))
                && !region.is_range_zero(PageRange::new(20, 4))
        );
        assert_eq!(content(&region, 772), pattern(772));
        assert_eq!(content(&region, 771), vec![0; 4096]);
    }
}

#[test]
fn a_copy_of_a_hole_leaves_it_a_hole() {
    let Some(bench) = Bench::new() else { return };
    let region = bench.region("a", PAGES);
    assert_eq!(content(&region, 77), vec![0; 4096]);
    assert_eq!(allocated_bytes(&region), 0);
}

#[test]
fn pages_travel_over_a_socket() {
    let Some(bench) = Bench::new() else { return };
    let (from, to) = (bench.region("from", PAGES), bench.region("to", PAGES));
    fill(&from, from.all_pages());
    to.allocate(to.all_pages()).expect("allocates");
    let (mut left, mut right) = UnixStream::pair().expect("a pair");
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut bytes = vec![0; usize::try_from(from.size_bytes()).expect("small")];
            from.copy_data_out(0, &mut bytes).expect("in bounds");
            for (number, page) in (0..PAGES).zip(bytes.chunks(4096)) {
                left.write_all(&number.to_le_bytes()).expect("sends");
                left.write_all(page).expect("sends");
            }
            left.write_all(&bytes).expect("sends");
            left.shutdown(Shutdown::Write).expect("connected");
        });
        for _ in 0..PAGES {
            let mut header = [0; 8];
            right.read_exact(&mut header).expect("a header");
            let run = PageRange::new(u64::from_le_bytes(header), 1);
            to.receive(right.as_fd(), run).expect("a page");
        }
        assert!((0..PAGES).all(|page| content(&to, page) == pattern(page)));
        to.zero(to.all_pages()).expect("zeroes");
        to.receive(right.as_fd(), to.all_pages()).expect("all pages at once");
        assert!((0..PAGES).all(|page| content(&to, page) == pattern(page)));
        let ended = to.receive(right.as_fd(), PageRange::new(0, 1)).expect_err("the end");
        assert_eq!(ended.kind(), std::io::ErrorKind::UnexpectedEof);
    });
}

#[test]
fn any_pattern_of_zero_and_data_is_found() {
    let Some(bench) = without_huge_pages() else { return };
    let number = std::cell::Cell::new(0);
    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig::with_cases(40));
    let list = prop::collection::vec((0..300u64, 0..20u64, any::<bool>()), 0..12);
    runner
        .run(&list, |writes| {
            number.set(number.get() + 1);
            let region = bench.region(&format!("r{}", number.get()), 320);
            let mut model = vec![None; 320];
            for (first, count, zero) in writes {
                let bytes = [u8::from(!zero); 4096];
                for page in first..first + count {
                    region.copy_in(page * PAGE_SIZE, &bytes).expect("writes");
                    model[usize::try_from(page).expect("small")] = Some(zero);
                }
            }
            let (mut data, mut nonzero) = (Vec::new(), Vec::new());
            region.data_ranges(region.all_pages(), &mut data).expect("looks");
            region.nonzero_ranges(region.all_pages(), &mut nonzero).expect("looks");
            let holes = gaps(region.all_pages(), &data);
            for (page, state) in (0..).zip(&model) {
                prop_assert_eq!(data.iter().any(|run| run.contains(page)), state.is_some());
                prop_assert_eq!(holes.iter().any(|run| run.contains(page)), state.is_none());
                prop_assert_eq!(
                    nonzero.iter().any(|run| run.contains(page)),
                    *state == Some(false)
                );
            }
            std::fs::remove_file(region.path()).expect("ours");
            Ok(())
        })
        .expect("holds");
}

/// Checks the kernel's flags of this process's mapping of a file (proc_pid_smaps(5)): `dd`, left
/// out of core dumps; `dc`, left out of children.
#[test]
fn guest_memory_is_in_no_core_and_in_no_child() {
    let Some(bench) = Bench::new() else { return };
    let region = bench.region("block", PAGES);
    let smaps = std::fs::read_to_string("/proc/self/smaps").expect("reads");
    let path = region.path().canonicalize().expect("is there");
    // Each mapping's other fields come before its flags; the next mapping's come after them.
    let pieces: Vec<&str> = smaps.split("VmFlags:").collect();
    let ours = pieces.windows(2).filter(|pair| pair[0].contains(&*path.to_string_lossy()));
    let flags: Vec<&str> = ours.filter_map(|pair| pair[1].lines().next()).collect();
    let [flags] = flags[..] else { panic!("mapped {} times:\n{smaps}", flags.len()) };
    for flag in ["dd", "dc"] {
        assert!(flags.split_whitespace().any(|found| found == flag), "{flag} not in {flags}");
    }
}
