use godwit_lanes::hash_page;

use super::*;

#[test]
fn digests_are_those_of_the_pages_and_zero_pages_have_none() {
    let folder = tempfile::tempdir().unwrap();
    let region = |name: &str, pages: u64| {
        Arc::new(Region::create(&folder.path().join(name), pages * PAGE_SIZE, None).unwrap())
    };
    let regions = [region("a", 1300), region("b", 3)];
    for page in [0, 5, 700, 1299] {
        regions[0]
            .copy_in(page * PAGE_SIZE, &[u8::try_from(page % 251).unwrap() + 1; 4096])
            .unwrap();
    }
    let content = Content::of(&regions).unwrap();
    let pieces: Vec<_> = content.pieces().collect();
    assert_eq!((pieces.len(), content.pages(), content.digest_bytes()), (4, 1303, 1303 * 8));
    let mut nonzero = Vec::new();
    for (block, piece) in pieces {
        let digests = content.digests(block, piece).unwrap();
        assert_eq!(digests, content.digests(block, piece).unwrap());
        nonzero.extend((piece.first..).zip(digests).filter(|(_, digest)| *digest != 0));
    }
    let digest = |byte| prefix(&hash_page(&[byte; 4096]));
    assert_eq!(nonzero, [(0, digest(1)), (5, digest(6)), (700, digest(199)), (1299, digest(45))]);
    let mut page = [0; 4096];
    content.copy_out(Place { content: 1, block: 0, page: 5 }, &mut page).unwrap();
    assert_eq!(page, [6; 4096]);
    assert!(content.copy_out(Place { content: 1, block: 2, page: 0 }, &mut page).is_err());
    assert!(content.copy_out(Place { content: 1, block: 1, page: 3 }, &mut page).is_err());
    drop(regions);
    content.empty(1 << 20).unwrap();
    assert!(
        content.taken_bytes() == 0
            && content.copy_out(Place { content: 1, block: 0, page: 5 }, &mut page).is_err()
    );
}

fn filled(folder: &tempfile::TempDir, name: &str, pages: u64) -> Arc<Region> {
    let region = Region::create(&folder.path().join(name), pages * PAGE_SIZE, None).unwrap();
    let whole = usize::try_from(pages * PAGE_SIZE).unwrap();
    region.copy_in(0, &vec![7; whole]).unwrap();
    Arc::new(region)
}

fn departed(regions: &[Arc<Region>], hot: &[BlockRun]) -> Content {
    let content = Content::of(regions).unwrap();
    content.mark_departed(hot).unwrap();
    content
}

fn held(content: &Content) -> Vec<(u16, u64)> {
    content.pieces().map(|(block, pages)| (block, pages.first / DIGEST_PAGES)).collect()
}

#[test]
fn hot_memory_is_given_up_first_and_then_the_end() {
    let folder = tempfile::tempdir().unwrap();
    let regions = [filled(&folder, "a", 4 * DIGEST_PAGES), filled(&folder, "b", 100)];
    // From the end of the first piece into the second, beyond the block, and in no block.
    let run = |block, first, count| BlockRun { block, first, count };
    let hot = [run(0, 511, 2), run(1, 90, u64::MAX), run(0, u64::MAX, 9), run(7, 0, 1)];
    let content = departed(&regions, &hot);
    let all = content.taken_bytes();
    let piece_bytes = DIGEST_PAGES * PAGE_SIZE;
    content.shrink(all).unwrap();
    assert_eq!((held(&content).len(), content.taken_bytes()), (5, all));
    content.shrink(all - 1).unwrap();
    assert_eq!(held(&content), [(0, 0), (0, 1), (0, 2), (0, 3)]);
    content.shrink(all - 100 * PAGE_SIZE - 1).unwrap();
    assert_eq!(held(&content), [(0, 0), (0, 2), (0, 3)]);
    content.shrink(5 * piece_bytes / 2).unwrap();
    assert_eq!(held(&content), [(0, 2), (0, 3)]);
    content.drop_piece(0, PageRange::new(2 * DIGEST_PAGES, DIGEST_PAGES)).unwrap();
    assert_eq!(held(&content), [(0, 3)]);
    content.shrink(0).unwrap();
    assert_eq!((content.pages(), content.digest_bytes(), content.taken_bytes()), (0, 0, 0));
}

#[test]
fn the_limit_of_digests_gives_memory_up_as_well() {
    let folder = tempfile::tempdir().unwrap();
    let content = departed(&[filled(&folder, "a", 2 * DIGEST_PAGES + 1)], &[]);
    content.shrink_digests(8 * (2 * DIGEST_PAGES + 1));
    assert_eq!(held(&content).len(), 3);
    content.shrink_digests(8 * 2 * DIGEST_PAGES - 1);
    assert_eq!((held(&content), content.digest_bytes()), (vec![(0, 0)], 8 * DIGEST_PAGES));
    // What was given up is given back, whatever the limit is.
    content.shrink(u64::MAX).unwrap();
    assert!(content.taken_bytes() < 2 * DIGEST_PAGES * PAGE_SIZE);
}

#[test]
fn holes_take_nothing_and_are_not_known() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a");
    let region = Arc::new(Region::create(&path, 40 * DIGEST_PAGES * PAGE_SIZE, None).unwrap());
    for piece in [3, 4, 39] {
        region.copy_in((piece * DIGEST_PAGES + 9) * PAGE_SIZE, &[7; 4096]).unwrap();
    }
    let content = departed(&[region], &[]);
    assert_eq!((held(&content), content.pages()), (vec![(0, 3), (0, 4), (0, 39)], 3 * 512));
    let hole = Place { content: 1, block: 0, page: 5 };
    assert!(content.copy_out(hole, &mut [0; 4096]).is_err());
}

proptest::proptest! {
    #![proptest_config(proptest::prelude::ProptestConfig::with_cases(24))]

    /// Checks that what remains is as it was, and that nothing is known of the rest.
    #[test]
    fn dropped_memory_is_never_taken_for_zeros(
        steps in proptest::collection::vec((0_u64..6, 0_u64..4), 1..12),
        hot in proptest::collection::vec((0_u64..1300, 1_u64..700), 0..3),
    ) {
        const PAGES: u64 = 1300;
        let folder = tempfile::tempdir().unwrap();
        let region = filled(&folder, "a", PAGES);
        let byte = |page: u64| u8::try_from(page % 250).unwrap() + 1;
        for page in 0..PAGES {
            // Among the pages is a zero page in each piece.
            let byte = if page % 500 == 0 { 0 } else { byte(page) };
            region.copy_in(page * PAGE_SIZE, &[byte; 4096]).unwrap();
        }
        let hot: Vec<_> = hot
            .into_iter()
            .map(|(first, count)| BlockRun { block: 0, first, count })
            .collect();
        let content = departed(&[region], &hot);
        for (kind, piece) in steps {
            let pages = content.blocks[0].pages_of(piece);
            match kind {
                0 => content.shrink(content.taken_bytes().saturating_sub(1)).unwrap(),
                1 => content.shrink_digests(content.digest_bytes().saturating_sub(1)),
                2 => content.drop_piece(0, pages).unwrap(),
                3 => content.note(0, pages.first + 1, 5),
                _ => drop(content.digests(0, pages).unwrap()),
            }
            let held = held(&content);
            proptest::prop_assert!(content.worked_out() <= content.pages());
            for number in 0..3 {
                let is_held = held.contains(&(0, number));
                let pages = content.blocks[0].pages_of(number);
                let mut copy = vec![9; usize::try_from(pages.len_bytes()).unwrap()];
                let place = Place { content: 1, block: 0, page: pages.first };
                proptest::prop_assert_eq!(content.copy_out(place, &mut copy).is_ok(), is_held);
                let digests = content.digests(0, pages).unwrap();
                proptest::prop_assert_eq!(digests.is_empty(), !is_held);
                if !is_held {
                    proptest::prop_assert!(content.is_worked_out(0, pages));
                    continue;
                }
                for (page, bytes) in (pages.first..).zip(copy.chunks_exact(4096)) {
                    let byte = if page % 500 == 0 { 0 } else { byte(page) };
                    proptest::prop_assert!(bytes.iter().all(|found| *found == byte));
                }
            }
        }
        content.shrink(u64::MAX).unwrap();
        let held_bytes = content.pages() * PAGE_SIZE;
        proptest::prop_assert!(content.taken_bytes() <= held_bytes, "limit in what is held");
    }
}

#[test]
fn known_pages_are_not_hashed_again() {
    let folder = tempfile::tempdir().unwrap();
    let content = Content::of(&[filled(&folder, "a", 3 * DIGEST_PAGES - 1)]).unwrap();
    let computed = prefix(&hash_page(&[7; 4096]));
    for page in 0..content.pages() {
        content.note(0, page, 5);
    }
    // Within the first piece, more than is read in one call.
    content.forget(0, PageRange::new(100, READ_PAGES + 6));
    // From the first piece into the last, and beyond the block.
    content.forget(0, PageRange::new(DIGEST_PAGES - 1, DIGEST_PAGES + 2));
    content.forget(0, PageRange::new(3 * DIGEST_PAGES - 2, u64::MAX));
    content.forget(1, PageRange::new(0, 1));
    let digests: Vec<u64> =
        content.pieces().flat_map(|(_, piece)| content.digests(0, piece).unwrap()).collect();
    let forgotten = |page: u64| {
        (100..106 + READ_PAGES).contains(&page)
            || (511..1025).contains(&page)
            || page == 3 * DIGEST_PAGES - 2
    };
    assert_eq!(digests.len() as u64, content.pages());
    for (page, digest) in (0..).zip(digests) {
        assert_eq!(digest, if forgotten(page) { computed } else { 5 }, "{page}");
    }
}

#[test]
fn known_pages_are_not_read_unless_few_are_between_unknown_ones() {
    let folder = tempfile::tempdir().unwrap();
    let content = Content::of(&[filled(&folder, "a", DIGEST_PAGES)]).unwrap();
    let mut known = [5; _];
    known[3] = 0;
    known[10] = 0;
    known[100..200].fill(0);
    let mut reading = Reading::default();
    let piece = PageRange::new(0, DIGEST_PAGES);
    let digests = content.blocks[0].work_out(piece, &known, &mut reading).unwrap();
    assert_eq!(reading.bytes, (8 + 100) * PAGE_SIZE);
    let is_new = |at| [3, 10].contains(&at) || (100..200).contains(&at);
    let computed = prefix(&hash_page(&[7; 4096]));
    let expected: Prefixes = std::array::from_fn(|at| if is_new(at) { computed } else { 0 });
    assert_eq!(digests, expected);
}

#[test]
fn copies_of_known_notifications_are_ignored() {
    let folder = tempfile::tempdir().unwrap();
    let regions =
        [Arc::new(Region::create(&folder.path().join("a"), 8 * PAGE_SIZE, None).unwrap())];
    let (original, copy) = (Content::of(&regions).unwrap(), Content::of(&regions).unwrap());
    let original = Arc::new(original);
    let origin = copy.origin(&original);
    assert_eq!((origin, copy.origin(&original)), (1, 1));
    for page in 1..6 {
        copy.note(0, page, 10 + page);
    }
    for page in [1, 3, 5] {
        copy.note_copy(0, page, 10 + page, origin);
    }
    let news = |is_announced: bool| {
        let piece = PageRange::new(0, 8);
        copy.note_arrival(0, 0, true);
        copy.news(0, piece, |content| is_announced && Arc::ptr_eq(content, &original)).unwrap()
    };
    assert_eq!(news(true), Some((2, vec![12, 0, 14])));
    assert_eq!(news(false), Some((1, vec![11, 12, 13, 14, 15])));
    // A page written since is no longer a copy.
    copy.note(0, 5, 7);
    assert_eq!(news(true), Some((2, vec![12, 0, 14, 7])));
    [2, 4, 5].into_iter().for_each(|page| copy.note(0, page, 0));
    assert_eq!(news(true), None);
    drop(original);
    assert_eq!(copy.news(0, PageRange::new(0, 8), |_| true).unwrap(), Some((1, vec![11, 0, 13])));
}
