//! References to files: images of disks, and retained pages that were moved to a disk. The guest
//! arrives unchanged, whatever becomes of the files meanwhile.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use godwit_migration::reference::{Content, DIGEST_PAGES, Digested};
use godwit_ram::{PAGE_SIZE, PageFile, Region};
use godwit_types::{ContentKind, EncodingName, ReferencedPages};
use godwit_wire::{BlockRun, Place, prefix};
use proptest::prelude::*;

use crate::references::{ALL, guests_pages, migrate_to, offer, pages_by};
use crate::world::{BLOCKS, Twist, fill, regions};

/// An image with the guest's pages, in another order, and with a hole before them.
struct Image {
    file: File,
    content: Arc<Content>,
}

const HOLE_PAGES: u64 = 2 * DIGEST_PAGES + 7;

impl Image {
    fn of(folder: &tempfile::TempDir, of: &[Arc<Region>]) -> Image {
        let path = folder.path().join("image");
        let file = File::options().read(true).write(true).create(true).truncate(true).open(&path);
        let file = file.unwrap();
        let mut at = HOLE_PAGES;
        let mut page = [0; 4096];
        for region in of.iter().rev() {
            for number in 0..region.pages() {
                region.copy_out(number * PAGE_SIZE, &mut page).unwrap();
                if page != [0; 4096] {
                    file.write_all_at(&page, at * PAGE_SIZE).unwrap();
                    at += 1;
                }
            }
        }
        let pages = PageFile::of_file(File::open(&path).unwrap(), &path, u64::MAX).unwrap();
        let content = Arc::new(Content::of_disk(pages, &Digested::new(at)));
        Image { file, content }
    }

    fn index(&self) {
        for (_, piece) in self.content.pieces() {
            self.content.index(piece).unwrap();
        }
    }
}

fn twist() -> Twist {
    Twist { references: ALL, describes: Some(ContentKind::Disk), ..Twist::default() }
}

fn filled(folder: &tempfile::TempDir) -> Vec<Arc<Region>> {
    let before = regions(folder, "before");
    fill(&before);
    before
}

#[test]
fn pages_of_a_disk_do_not_travel() {
    let folder = tempfile::tempdir().unwrap();
    let image = Image::of(&folder, &filled(&folder));
    image.index();
    for streams in [1, 3] {
        let moved = migrate_to(Twist { streams, ..twist() }, &offer(vec![image.content.clone()]));
        assert_eq!(pages_by(&moved, EncodingName::Reference), guests_pages());
        let disk = moved.result.referenced.disk;
        let referenced = moved.result.referenced;
        assert_eq!(referenced, ReferencedPages { disk, ..ReferencedPages::default() });
        assert_eq!((disk, moved.result.missing_pages), (guests_pages(), 0));
    }
}

#[test]
fn an_image_that_is_not_indexed_delays_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let image = Image::of(&folder, &filled(&folder));
    let moved = migrate_to(twist(), &offer(vec![image.content.clone()]));
    assert_eq!(moved.result.referenced.disk, 0);
    // A thread indexes it meanwhile: what is known by then counts.
    std::thread::scope(|scope| {
        scope.spawn(|| image.index());
        let moved = migrate_to(twist(), &offer(vec![image.content.clone()]));
        assert!(moved.result.referenced.disk <= guests_pages());
    });
}

/// A file that somebody writes to, or truncates, after its digests were announced.
#[test]
fn an_image_that_changes_costs_time_alone() {
    let folder = tempfile::tempdir().unwrap();
    let image = Image::of(&folder, &filled(&folder));
    image.index();
    image.file.write_all_at(&[9; 20 * 4096], (HOLE_PAGES + 10) * PAGE_SIZE).unwrap();
    image.file.write_all_at(&[1], (HOLE_PAGES + 50) * PAGE_SIZE + 17).unwrap();
    for streams in [1, 4] {
        let moved = migrate_to(Twist { streams, ..twist() }, &offer(vec![image.content.clone()]));
        assert_eq!(moved.result.missing_pages, 21);
    }
    image.file.set_len((HOLE_PAGES + 200) * PAGE_SIZE).unwrap();
    let moved = migrate_to(twist(), &offer(vec![image.content.clone()]));
    assert!(moved.result.missing_pages >= guests_pages() - 200);
    image.file.set_len(0).unwrap();
    let moved = migrate_to(twist(), &offer(vec![image.content]));
    assert_eq!(moved.result.missing_pages, guests_pages());
}

/// Digests whose beginnings are those of other pages: of 8 bytes they are in somebody's hand.
#[test]
fn a_page_with_the_same_beginning_of_a_digest_is_not_taken_for_another() {
    let folder = tempfile::tempdir().unwrap();
    let before = filled(&folder);
    let image = Image::of(&folder, &before);
    image.index();
    let mut page = [0; 4096];
    let holds_data = |number: &u64| !number.is_multiple_of(3);
    for number in (0..BLOCKS[0]).filter(holds_data).take(30) {
        before[0].copy_out(number * PAGE_SIZE, &mut page).unwrap();
        // The first pages of the image are those of the last block.
        image.content.note(0, HOLE_PAGES + number, prefix(&godwit_lanes::hash_page(&page)));
    }
    let moved = migrate_to(twist(), &offer(vec![image.content]));
    assert!(moved.result.missing_pages > 0, "{:?}", moved.result.referenced);
}

/// Memory of a guest that left, of which all but `most_bytes` has moved to a file.
fn spilled(
    folder: &tempfile::TempDir,
    before: &[Arc<Region>],
    most_bytes: u64,
) -> (Arc<Content>, Arc<Content>, File) {
    let memory = Content::of(before).unwrap();
    memory.mark_departed(&[BlockRun { block: 0, first: 3, count: 1 }]).unwrap();
    let file = tempfile::tempfile_in(folder.path()).unwrap();
    let on_disk = file.try_clone().unwrap();
    let to = Content::for_spilled(&memory, file, folder.path()).unwrap();
    memory.spill(most_bytes, &to, || true).unwrap();
    (Arc::new(memory), Arc::new(to), on_disk)
}

#[test]
fn pages_that_were_moved_to_a_disk_are_found_there() {
    let folder = tempfile::tempdir().unwrap();
    let before = filled(&folder);
    let taken = Content::of(&before).unwrap().taken_bytes();
    let (memory, file, on_disk) = spilled(&folder, &before, taken / 2);
    assert!(memory.taken_bytes() <= taken / 2 && file.pages() > 0);
    memory.pieces().for_each(|(block, piece)| drop(memory.digests(block, piece).unwrap()));
    let twist = Twist { describes: Some(ContentKind::Memory), ..twist() };
    let contents = || offer(vec![Arc::clone(&memory), Arc::clone(&file)]);
    let moved = migrate_to(twist, &contents());
    assert_eq!(pages_by(&moved, EncodingName::Reference), guests_pages());
    assert_eq!(moved.result.missing_pages, 0);
    // Somebody writes to the file, which has no name.
    on_disk.write_all_at(&[9; 50 * 4096], 0).unwrap();
    let moved = migrate_to(twist, &contents());
    assert!(moved.result.missing_pages > 20, "{}", moved.result.missing_pages);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]

    /// Whatever is moved, given up and forgotten, in whatever order: what is announced and can be
    /// read is what the guest had.
    #[test]
    fn moved_pages_are_what_they_were(
        steps in prop::collection::vec((0_u8..4, 1_u64..6), 1..8),
        stops_after in 0_u32..6,
    ) {
        const PAGES: u64 = 5 * DIGEST_PAGES - 30;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ram");
        let region = Arc::new(Region::create(&path, PAGES * PAGE_SIZE, None).unwrap());
        let bytes = |page: u64| {
            let mut bytes = [u8::try_from(page % 7).unwrap(); 4096];
            if !page.is_multiple_of(7) {
                bytes[..8].copy_from_slice(&page.to_le_bytes());
            }
            bytes
        };
        (0..PAGES).for_each(|page| region.copy_in(page * PAGE_SIZE, &bytes(page)).unwrap());
        let memory = Content::of(&[region]).unwrap();
        memory.mark_departed(&[]).unwrap();
        let file = tempfile::tempfile_in(folder.path()).unwrap();
        let to = Content::for_spilled(&memory, file, folder.path()).unwrap();
        let mut given_up = false;
        for (kind, amount) in steps {
            let most = memory.taken_bytes().saturating_sub(amount * DIGEST_PAGES * PAGE_SIZE / 2);
            match kind {
                0 => {
                    let left = std::cell::Cell::new(stops_after);
                    let goes_on = || left.replace(left.get().saturating_sub(1)) > 0;
                    memory.spill(most, &to, goes_on).unwrap();
                }
                1 => memory.spill(most, &to, || true).unwrap(),
                2 => {
                    given_up = true;
                    memory.shrink(most).unwrap();
                }
                _ => memory.pieces().for_each(|(block, piece)| {
                    drop(memory.digests(block, piece).unwrap());
                }),
            }
        }
        let mut found = std::collections::BTreeSet::new();
        for content in [&memory, &to] {
            let pieces: Vec<_> = content.pieces().collect();
            for (block, piece) in pieces {
                let digests = content.digests(block, piece).unwrap();
                for (page, digest) in (piece.first..).zip(digests).filter(|(_, digest)| *digest > 0)
                {
                    let mut copy = [0; 4096];
                    content.copy_out(Place { content: 1, block, page }, &mut copy).unwrap();
                    prop_assert_eq!(prefix(&godwit_lanes::hash_page(&copy)), digest);
                    let number = u64::from_le_bytes(copy[..8].try_into().unwrap());
                    prop_assert_eq!(&copy[..], &bytes(number)[..]);
                    prop_assert!(found.insert(number), "{} is there twice", number);
                }
            }
        }
        let all = (0..PAGES).filter(|page| !page.is_multiple_of(7)).count();
        prop_assert!(given_up || found.len() == all, "{} of {}", found.len(), all);
    }
}
