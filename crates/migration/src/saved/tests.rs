use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use godwit_ram::{PAGE_SIZE, Region};
use proptest::prelude::*;

use super::*;

const BLOCK_PAGES: [u64; 2] = [1200, 3];

fn regions(dir: &Path, name: &str) -> Vec<Arc<Region>> {
    (0..)
        .zip(BLOCK_PAGES)
        .map(|(index, pages)| {
            let path = dir.join(format!("{name}{index}"));
            Arc::new(Region::create(&path, pages * PAGE_SIZE, None).unwrap())
        })
        .collect()
}

fn content(regions: &[Arc<Region>]) -> Vec<Vec<u8>> {
    let read = |region: &Arc<Region>| {
        let mut bytes = vec![0; usize::try_from(region.size_bytes()).unwrap()];
        region.copy_out(0, &mut bytes).unwrap();
        bytes
    };
    regions.iter().map(read).collect()
}

/// Fills a page with bytes that compress well or badly.
fn fill(region: &Region, page: u64, seed: u64) {
    let mut state = seed | 1;
    let mut random = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        state.to_le_bytes()
    };
    let word = random();
    let words =
        (0..PAGE_SIZE / 8).flat_map(|_| if seed.is_multiple_of(2) { word } else { random() });
    region.copy_in(page * PAGE_SIZE, &words.collect::<Vec<u8>>()).unwrap();
}

fn save(dir: &Path, regions: &[Arc<Region>]) -> (File, WrittenGuest) {
    let path = dir.join("saved");
    let file = File::options().create(true).truncate(true).read(true).write(true).open(path);
    let file = file.unwrap();
    let writer =
        GuestWriter::save_memory(file.try_clone().unwrap(), regions, 3, &Progress::default())
            .unwrap();
    let written = writer.finish(b"devices", b"caption").unwrap();
    (file, written)
}

#[test]
fn a_damaged_file_is_refused_wherever_it_is_damaged() {
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let source = regions(dir.path(), "source");
    for (page, seed) in [(0, 1), (1, 2), (700, 3), (1199, 4)] {
        fill(&source[0], page, seed);
    }
    let (file, written) = save(dir.path(), &source);
    assert_eq!(written.content_bytes, 4 * PAGE_SIZE);
    let expected = content(&source);
    let len = usize::try_from(written.file_bytes).unwrap();
    let mut bytes = vec![0; len];
    file.read_exact_at(&mut bytes, 0).unwrap();
    let damaged = dir.path().join("damaged");
    let load = |bytes: &[u8], at: usize| {
        std::fs::write(&damaged, bytes).unwrap();
        let target = regions(dir.path(), &format!("target{at}-"));
        let loaded = SavedGuest::open(File::open(&damaged).unwrap())
            .and_then(|guest| guest.load_memory(&target, 2, &Progress::default()));
        for region in &target {
            std::fs::remove_file(region.path()).unwrap();
        }
        loaded.map(|()| content(&target))
    };
    assert_eq!(load(&bytes, 0).unwrap(), expected);
    for at in (0..len).step_by(61).chain(len - 200..len) {
        bytes[at] ^= 0x40;
        assert!(load(&bytes, at).is_err(), "byte {at} of {len}");
        bytes[at] ^= 0x40;
    }
    for short in [0, 1, len / 2, len - 1] {
        assert!(load(&bytes[..short], short).is_err(), "{short} bytes of {len}");
    }
    let other = [source[0].clone()];
    let guest = SavedGuest::open(file).unwrap();
    fill(&source[1], 0, 9);
    let (file, _) = save(dir.path(), &source);
    assert!(guest.load_memory(&other, 1, &Progress::default()).is_err());
    let guest = SavedGuest::open(file).unwrap();
    assert!(guest.load_memory(&other, 1, &Progress::default()).is_err(), "a block is missing");
}

#[test]
fn a_cancelled_save_ends() {
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let source = regions(dir.path(), "source");
    let file = File::create(dir.path().join("saved")).unwrap();
    let progress = Progress::default();
    progress.cancel();
    let saved = GuestWriter::save_memory(file, &source, 2, &progress);
    assert!(matches!(saved, Err(SavedError::Cancelled)));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn what_was_saved_is_loaded(
        filled in prop::collection::btree_map((0..2_usize, 0..1200_u64), 0..u64::MAX, 0..200),
        threads in 1..4_usize,
    ) {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let source = regions(dir.path(), "source");
        for ((block, page), seed) in &filled {
            fill(&source[*block], page % BLOCK_PAGES[*block], *seed);
        }
        let (file, _) = save(dir.path(), &source);
        let guest = SavedGuest::open(file).unwrap();
        prop_assert_eq!(guest.caption(), b"caption");
        prop_assert_eq!(guest.device_state(), b"devices");
        let target = regions(dir.path(), "target");
        let progress = Progress::default();
        guest.load_memory(&target, threads, &progress).unwrap();
        prop_assert_eq!(progress.done_bytes(), guest.content_bytes());
        prop_assert!(content(&target) == content(&source));
    }
}
