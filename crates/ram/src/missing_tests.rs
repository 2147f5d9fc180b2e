//! Missing pages against a model, across threads, and across the death of the process that kept
//! them.

use std::collections::BTreeSet;
use std::os::unix::fs::PermissionsExt;

use proptest::prelude::*;

use super::*;
use crate::pages::page_count;

/// Neither multiples of a word nor all larger than one.
const SIZES: [u64; 4] = [200, 0, 64, 13];

#[derive(Clone, Debug)]
enum Step {
    Insert(usize, PageRange),
    Remove(usize, u64),
    Reopen,
}

fn range() -> impl Strategy<Value = PageRange> {
    (0..220u64, 0..150u64).prop_map(|(first, count)| PageRange::new(first, count))
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        2 => (0..6usize, range()).prop_map(|(block, pages)| Step::Insert(block, pages)),
        8 => (0..6usize, 0..220u64).prop_map(|(block, page)| Step::Remove(block, page)),
        1 => Just(Step::Reopen),
    ]
}

fn inside(block: usize, page: u64) -> bool {
    SIZES.get(block).is_some_and(|pages| page < *pages)
}

proptest! {
    #[test]
    fn it_holds_what_a_set_of_pages_would(
        steps in prop::collection::vec(step(), 0..60), on_file: bool, within in range()
    ) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("missing");
        let mut missing = match on_file {
            true => MissingPages::create(&path, &SIZES).unwrap(),
            false => MissingPages::in_memory(&SIZES),
        };
        let mut model = BTreeSet::new();
        for step in steps {
            match step {
                Step::Insert(block, pages) => {
                    missing.insert(block, pages);
                    model.extend(
                        (pages.first..pages.end())
                            .filter(|page| inside(block, *page))
                            .map(|page| (block, page)),
                    );
                }
                Step::Remove(block, page) => {
                    prop_assert_eq!(missing.remove(block, page), model.remove(&(block, page)));
                }
                Step::Reopen if on_file => missing = MissingPages::open(&path).unwrap(),
                Step::Reopen => {}
            }
            prop_assert_eq!(missing.count(), model.len() as u64);
        }
        prop_assert_eq!(missing.block_pages(), &SIZES);
        for block in 0..6 {
            let runs = missing.runs(block, within);
            prop_assert!(runs.windows(2).all(|pair| pair[0].end() < pair[1].first));
            let found: Vec<u64> = runs.iter().flat_map(|run| run.first..run.end()).collect();
            let expected: Vec<u64> = (within.first..within.end())
                .filter(|page| model.contains(&(block, *page)))
                .collect();
            prop_assert_eq!(missing.count_in(block, within), expected.len() as u64);
            prop_assert_eq!(found, expected);
            for page in 0..220 {
                prop_assert_eq!(missing.contains(block, page), model.contains(&(block, page)));
            }
        }
    }

    #[test]
    fn any_file_is_refused_or_read(at in 0..4160usize, value: u8, cut in 0..5000u64) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("missing");
        drop(MissingPages::create(&path, &SIZES).unwrap());
        let mut bytes = std::fs::read(&path).unwrap();
        let len = bytes.len();
        if let Some(byte) = bytes.get_mut(at) {
            *byte = value;
        }
        std::fs::write(&path, &bytes).unwrap();
        if let Ok(missing) = MissingPages::open(&path) {
            let all = PageRange::new(0, u64::MAX);
            let runs: u64 =
                (0..SIZES.len()).map(|block| page_count(&missing.runs(block, all))).sum();
            prop_assert_eq!(missing.count(), runs);
        }
        if cut != len as u64 {
            File::options().write(true).open(&path).unwrap().set_len(cut).unwrap();
            prop_assert!(MissingPages::open(&path).is_err());
        }
    }
}

#[test]
fn it_outlives_its_creator_and_is_private() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("missing");
    std::fs::write(&path, "a leftover").unwrap();
    let missing = MissingPages::create(&path, &SIZES).unwrap();
    missing.insert(0, PageRange::new(60, 10));
    // Another handle that is open at the same time sees the same.
    let other = MissingPages::open(&path).unwrap();
    assert!(other.remove(0, 63) && !missing.remove(0, 63));
    drop(missing);
    drop(other);
    let again = MissingPages::open(&path).unwrap();
    assert_eq!(again.block_pages(), SIZES);
    assert_eq!((again.count(), again.count_in(0, PageRange::new(0, 64))), (9, 3));
    assert_eq!(
        again.runs(0, PageRange::new(0, u64::MAX)),
        [PageRange::new(60, 3), PageRange::new(64, 6)]
    );
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    let fresh = MissingPages::create(&path, &[5]).unwrap();
    assert_eq!((fresh.count(), fresh.block_pages()), (0, &[5][..]));
}

#[test]
fn an_invalid_file_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("missing");
    let refused = |what: &str| {
        let kind = MissingPages::open(&path).err().map(|error| error.kind());
        assert_eq!(kind, Some(io::ErrorKind::InvalidData), "{what}");
    };
    std::fs::write(&path, "").unwrap();
    refused("an empty file");
    std::fs::write(&path, [0; 8192]).unwrap();
    refused("one that was not finished");
    std::fs::write(&path, header(&[u64::MAX, u64::MAX])).unwrap();
    refused("sizes that no memory holds");
    let mut garbled = header(&[100]);
    garbled.resize(4096, 0);
    garbled.extend([0; 8]);
    garbled.extend((1u64 << 36).to_ne_bytes());
    std::fs::write(&path, &garbled).unwrap();
    refused("a bit past the end of its block");
    std::fs::remove_file(&path).unwrap();
    assert_eq!(MissingPages::open(&path).unwrap_err().kind(), io::ErrorKind::NotFound);
    assert!(MissingPages::create(&path, &[u64::MAX]).is_err() && !path.exists());
    assert!(MissingPages::create(&path, &vec![1; MAX_BLOCKS + 1]).is_err() && !path.exists());
}

#[test]
fn one_of_many_fetches_reports_the_page_as_missing() {
    let missing = MissingPages::in_memory(&[10_000, 300]);
    missing.insert(0, PageRange::new(0, u64::MAX));
    missing.insert(1, PageRange::new(7, 100));
    let fetched: u64 = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4)
            .map(|_| {
                scope.spawn(|| {
                    let pages =
                        (0..10_000).map(|page| (0, page)).chain((0..400).map(|page| (1, page)));
                    pages.filter(|(block, page)| missing.remove(*block, *page)).count() as u64
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).sum()
    });
    assert_eq!((fetched, missing.count()), (10_100, 0));
}
