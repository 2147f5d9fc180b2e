//! Pages sent by reference to their content. The migration knows what the destination holds
//! ([`Knowledge`]). This module hashes a piece of pages and splits it into pages sent by reference
//! and pages sent with their content. The pages are a copy, because the guest writes while its
//! memory is read.

use godwit_wire::{PageHash, PageRun, Place, References};

use crate::hashing::{hash_pages, pages_of};

/// Knowledge of what the destination holds. It may be wrong: the destination verifies the content
/// before use.
pub trait Knowledge {
    /// Returns where the content with this hash probably is.
    fn find(&self, hash: &PageHash, block: u16, page: u64) -> Option<Place>;

    /// Notes that a page with this content is being sent in another way.
    fn sent(&self, hash: &PageHash, block: u16, page: u64);

    /// Copies the version of a page that was sent last into `old`. Returns false if that version is
    /// unknown or unusable as a base.
    fn sent_before(&self, block: u16, page: u64, old: &mut [u8]) -> bool;

    /// Notes that a page with this content is being sent.
    fn sends(&self, block: u16, page: u64, bytes: &[u8]);
}

/// Piece of pages, each looked up by its hash.
#[derive(Debug)]
pub(crate) struct Lookup {
    run: PageRun,
    pages: Vec<(PageHash, Option<Place>)>,
}

impl Lookup {
    /// Looks up the pages of a run; `copy` is their content.
    pub(crate) fn of(knowledge: &dyn Knowledge, run: PageRun, copy: &[u8]) -> Lookup {
        let find = |(page, hash): (u64, PageHash)| {
            let place = knowledge.find(&hash, run.block, page);
            if place.is_none() {
                // Noted at once: a later page may have the same content, and it arrives after this
                // one.
                knowledge.sent(&hash, run.block, page);
            }
            (hash, place)
        };
        let pages = (run.first..).zip(hash_pages(pages_of(copy))).map(find).collect();
        Lookup { run, pages }
    }

    /// Returns how many pages the destination holds.
    pub(crate) fn found(&self) -> u64 {
        self.pages.iter().filter(|(_, place)| place.is_some()).count() as u64
    }

    /// Splits the run where its pages are not consecutive at the destination. Each piece has the
    /// location of its first page; `None`: the piece must be sent.
    pub(crate) fn runs(&self) -> Vec<(PageRun, Option<Place>)> {
        let mut runs: Vec<(PageRun, Option<Place>)> = Vec::new();
        for (page, (_, place)) in (self.run.first..).zip(&self.pages) {
            match runs.last_mut() {
                Some((run, first)) if continues(*first, u64::from(run.count), *place) => {
                    run.count += 1;
                }
                _ => runs.push((PageRun { first: page, count: 1, ..self.run }, *place)),
            }
        }
        runs
    }

    /// Returns the references frame for one of [`Lookup::runs`].
    pub(crate) fn references(&self, round: u32, run: PageRun, place: Place) -> References {
        let from = usize::try_from(run.first - self.run.first).unwrap_or(usize::MAX);
        let hashes =
            self.pages.iter().skip(from).take(run.count as usize).map(|(hash, _)| *hash).collect();
        References { round, block: run.block, first: run.first, place, hashes }
    }
}

/// Returns whether `next` is the location that follows `count` pages from `first` on.
fn continues(first: Option<Place>, count: u64, next: Option<Place>) -> bool {
    match (first, next) {
        (None, None) => true,
        (Some(first), Some(next)) => next == Place { page: first.page + count, ..first },
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::collections::HashMap;

    use super::*;
    use crate::hash_page;

    #[derive(Default)]
    struct Fake {
        known: HashMap<PageHash, Place>,
        sent: RefCell<Vec<u64>>,
    }

    impl Knowledge for Fake {
        fn find(&self, hash: &PageHash, _block: u16, _page: u64) -> Option<Place> {
            self.known.get(hash).copied()
        }

        fn sent(&self, _hash: &PageHash, _block: u16, page: u64) {
            self.sent.borrow_mut().push(page);
        }

        fn sent_before(&self, _: u16, _: u64, _: &mut [u8]) -> bool {
            false
        }

        fn sends(&self, _: u16, _: u64, _: &[u8]) {}
    }

    #[test]
    fn a_piece_is_split_into_references_and_content() {
        let pages: Vec<[u8; 4096]> = (0..8u8).map(|page| [page + 1; 4096]).collect();
        let mut fake = Fake::default();
        for (page, content, at) in [(0, 1, 70), (1, 1, 71), (2, 2, 72), (5, 1, 9), (7, 1, 11)] {
            let place = Place { content, block: 3, page: at };
            fake.known.insert(hash_page(&pages[page]), place);
        }
        let run = PageRun { block: 4, first: 100, count: 8 };
        let lookup = Lookup::of(&fake, run, &pages.concat());
        let cut: Vec<_> = lookup
            .runs()
            .into_iter()
            .map(|(run, place)| {
                (run.first, run.count, place.map(|place| (place.content, place.page)))
            })
            .collect();
        let expected = [
            (100, 2, Some((1, 70))),
            (102, 1, Some((2, 72))),
            (103, 2, None),
            (105, 1, Some((1, 9))),
        ];
        assert_eq!(cut[..4], expected);
        assert_eq!(cut[4..], [(106, 1, None), (107, 1, Some((1, 11)))]);
        assert_eq!((lookup.found(), fake.sent.into_inner()), (5, vec![103, 104, 106]));
        let place = Place { content: 1, block: 3, page: 70 };
        let refs = lookup.references(6, PageRun { block: 4, first: 100, count: 2 }, place);
        assert_eq!((refs.round, refs.block, refs.first, refs.place), (6, 4, 100, place));
        assert_eq!(refs.hashes, [hash_page(&pages[0]), hash_page(&pages[1])]);
    }
}
