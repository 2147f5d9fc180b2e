//! Pages sent as their difference from the version sent before. The migration knows that version
//! ([`Knowledge`]). This module cuts a piece of pages into pages that were sent before and pages
//! that were not.
//!
//! Whether deltas pay for a page is known only once its earlier content has been kept. So the
//! content of a fixed part of the pages, the same in every round, is always kept: the sample.

use godwit_ram::{PageRange, push_merged};
use godwit_wire::{PAGE_SIZE, PageRun, prefix};

use crate::hashing::hash_page;
use crate::reference::Knowledge;

/// One group of pages out of this many consecutive pages is sampled: 64 KiB of each 2 MiB, 3 % of
/// the pages.
const SAMPLED_OF: u64 = 512;
const SAMPLE_PAGES: u64 = 16;
/// Index of the sampled group: neither the first nor the last, where allocators keep their own
/// data.
const SAMPLE: u64 = 7;

/// Returns whether a page belongs to the sample.
#[must_use]
pub fn is_sampled(page: u64) -> bool {
    page % SAMPLED_OF / SAMPLE_PAGES == SAMPLE
}

/// Splits ascending runs into those of the sample and the others.
pub(crate) fn split_sample(runs: &[PageRange]) -> (Vec<PageRange>, Vec<PageRange>) {
    let (mut sampled, mut others) = (Vec::new(), Vec::with_capacity(runs.len()));
    for run in runs {
        let mut rest = *run;
        while !rest.is_empty() {
            let (group, after) = rest.split(SAMPLE_PAGES - rest.first % SAMPLE_PAGES);
            push_merged(if is_sampled(group.first) { &mut sampled } else { &mut others }, 0, group);
            rest = after;
        }
    }
    (sampled, others)
}

/// Computes XOR in place: of two pages' bytes it makes the difference, and of a page and a
/// difference the other page.
pub fn xor(bytes: &mut [u8], with: &[u8]) {
    bytes.iter_mut().zip(with).for_each(|(byte, with)| *byte ^= with);
}

/// Piece of pages, some of which were sent before.
#[derive(Debug)]
pub(crate) struct Compared {
    run: PageRun,
    bases: Vec<Option<u64>>,
}

impl Compared {
    /// Compares the pages of a run with the versions sent before. `pages` is their content, which
    /// is sent now. `differences` receives old pages XOR new pages, for pages that have an old
    /// version.
    pub(crate) fn of(
        knowledge: &dyn Knowledge,
        run: PageRun,
        pages: &[u8],
        differences: &mut Vec<u8>,
    ) -> Compared {
        differences.resize(pages.len(), 0);
        let page_bytes = PAGE_SIZE as usize;
        let each = pages.chunks_exact(page_bytes).zip(differences.chunks_exact_mut(page_bytes));
        let compare = |(page, (new, old)): (u64, (&[u8], &mut [u8]))| {
            let base = knowledge.sent_before(run.block, page, old).then(|| prefix(&hash_page(old)));
            if base.is_some() {
                xor(old, new);
            }
            knowledge.sends(run.block, page, new);
            base
        };
        let bases = (run.first..).zip(each).map(compare).collect();
        Compared { run, bases }
    }

    /// Splits the run into pages that were sent before, each with its base, and pages that were
    /// not.
    pub(crate) fn runs(&self) -> Vec<(PageRun, Option<Vec<u64>>)> {
        let mut runs: Vec<(PageRun, Option<Vec<u64>>)> = Vec::new();
        for (page, base) in (self.run.first..).zip(&self.bases) {
            match (runs.last_mut(), base) {
                (Some((run, Some(bases))), Some(base)) => {
                    run.count += 1;
                    bases.push(*base);
                }
                (Some((run, None)), None) => run.count += 1,
                _ => runs.push((
                    PageRun { first: page, count: 1, ..self.run },
                    base.map(|base| vec![base]),
                )),
            }
        }
        runs
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::collections::HashMap;

    use godwit_wire::{PageHash, Place};
    use proptest::prelude::*;

    use super::*;

    #[derive(Default)]
    struct Fake {
        pages: RefCell<HashMap<u64, Vec<u8>>>,
    }

    impl Knowledge for Fake {
        fn find(&self, _: &PageHash, _: u16, _: u64) -> Option<Place> {
            None
        }

        fn sent(&self, _: &PageHash, _: u16, _: u64) {}

        fn sent_before(&self, _: u16, page: u64, old: &mut [u8]) -> bool {
            self.pages.borrow().get(&page).map(|bytes| old.copy_from_slice(bytes)).is_some()
        }

        fn sends(&self, _: u16, page: u64, bytes: &[u8]) {
            self.pages.borrow_mut().insert(page, bytes.to_vec());
        }
    }

    #[test]
    fn a_piece_is_cut_into_what_was_sent_before_and_what_was_not() {
        let old: Vec<[u8; 4096]> = (0..6u8).map(|page| [page + 1; 4096]).collect();
        let fake = Fake::default();
        for page in [100, 101, 104] {
            fake.sends(0, page, &old[usize::try_from(page - 100).unwrap_or(0)]);
        }
        let mut new = old.concat();
        new[7] ^= 0x55;
        let (run, mut differences) = (PageRun { block: 4, first: 100, count: 6 }, Vec::new());
        let base = |page: usize| prefix(&hash_page(&old[page]));
        let cut = Compared::of(&fake, run, &new, &mut differences).runs();
        let cut: Vec<_> =
            cut.into_iter().map(|(run, bases)| (run.first, run.count, bases)).collect();
        let expected = [
            (100, 2, Some(vec![base(0), base(1)])),
            (102, 2, None),
            (104, 1, Some(vec![base(4)])),
            (105, 1, None),
        ];
        assert_eq!(cut, expected);
        let set: Vec<_> = (0..2 * 4096).filter(|at| differences[*at] != 0).collect();
        assert_eq!((set, differences[7]), (vec![7], 0x55));
        // The version sent now is the base of the next one.
        let again = Compared::of(&fake, run, &new, &mut differences).runs();
        assert_eq!((again.len(), again[0].0.count), (1, 6));
        assert!(differences.iter().all(|byte| *byte == 0));
    }

    proptest! {
        #[test]
        fn each_page_is_in_the_sample_or_not(
            runs in prop::collection::vec((1u64..700, 1u64..600), 1..8),
        ) {
            let mut at = 0;
            let runs: Vec<_> = runs
                .into_iter()
                .map(|(gap, count)| {
                    let run = PageRange { first: at + gap, count };
                    at = run.end();
                    run
                })
                .collect();
            let (sampled, others) = split_sample(&runs);
            let pages = |runs: &[PageRange]| -> Vec<u64> {
                runs.iter().flat_map(|run| run.first..run.end()).collect()
            };
            let (in_it, not) =
                pages(&runs).into_iter().partition::<Vec<_>, _>(|page| is_sampled(*page));
            prop_assert_eq!(pages(&sampled), in_it);
            prop_assert_eq!(pages(&others), not);
        }
    }
}
