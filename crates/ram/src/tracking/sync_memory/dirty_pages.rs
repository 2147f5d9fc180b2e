//! Pages that were written since they were last taken, as the faults name them. One bit a page, and
//! a count for each chunk of 2 MiB, so that a search reads nothing of chunks without dirty pages.

use crate::pages::{PageRange, push_merged};
use crate::tracking::block::CHUNK_PAGES;

/// Words of a chunk.
const CHUNK_WORDS: usize = 8;
const _: () = assert!(CHUNK_WORDS as u64 * 64 == CHUNK_PAGES);

/// Set of dirty pages of a block.
#[derive(Debug)]
pub(crate) struct DirtyPages {
    all: PageRange,
    words: Vec<[u64; CHUNK_WORDS]>,
    counts: Vec<u16>,
    /// Pages of each chunk that were inserted because pages around them are dirty.
    filled: Vec<u16>,
}

impl DirtyPages {
    /// Creates an empty set for a block.
    pub(crate) fn new(all: PageRange) -> DirtyPages {
        let chunks = usize::try_from(all.end().div_ceil(CHUNK_PAGES)).unwrap_or(usize::MAX);
        DirtyPages {
            all,
            words: vec![[0; CHUNK_WORDS]; chunks],
            counts: vec![0; chunks],
            filled: vec![0; chunks],
        }
    }

    /// Inserts pages.
    pub(crate) fn insert(&mut self, pages: PageRange) {
        for (chunk, piece) in by_chunk(pages.intersect(self.all)) {
            for (word, mask) in masks(piece) {
                let Some(bits) = self.words.get_mut(chunk).map(|words| &mut words[word]) else {
                    continue;
                };
                let added = (mask & !*bits).count_ones();
                *bits |= mask;
                self.counts[chunk] += u16::try_from(added).unwrap_or(0);
            }
        }
    }

    /// Inserts pages of one chunk because others of it are dirty.
    pub(super) fn fill(&mut self, pages: PageRange) {
        let before = self.count_near(pages.first);
        self.insert(pages);
        let added = self.count_near(pages.first) - before;
        let chunk = usize::try_from(pages.first / CHUNK_PAGES).unwrap_or(usize::MAX);
        if let Some(filled) = self.filled.get_mut(chunk) {
            *filled += u16::try_from(added).unwrap_or(0);
        }
    }

    /// Returns the number of pages inserted by [`DirtyPages::fill`], in chunks of which nothing was
    /// removed since.
    pub(super) fn filled_pages(&self) -> u64 {
        self.filled.iter().map(|pages| u64::from(*pages)).sum()
    }

    /// Removes all pages of `within` from the set.
    pub(crate) fn remove(&mut self, within: PageRange) {
        for (chunk, piece) in by_chunk(within.intersect(self.all)) {
            if self.counts.get(chunk).is_none_or(|count| *count == 0) {
                continue;
            }
            self.filled[chunk] = 0;
            for (word, mask) in masks(piece) {
                let bits = &mut self.words[chunk][word];
                let removed = (mask & *bits).count_ones();
                *bits &= !mask;
                self.counts[chunk] -= u16::try_from(removed).unwrap_or(0);
            }
        }
    }

    /// Appends the dirty pages of `within` to `out`, in ascending order, until `out` has `max_runs`
    /// runs. Returns the page to go on from, `within.end()` at the end.
    pub(crate) fn find(&self, within: PageRange, max_runs: usize, out: &mut Vec<PageRange>) -> u64 {
        for (chunk, piece) in by_chunk(within.intersect(self.all)) {
            if self.counts.get(chunk).is_none_or(|count| *count == 0) {
                continue;
            }
            if out.len() >= max_runs {
                return piece.first;
            }
            for (word, mask) in masks(piece) {
                let first = chunk as u64 * CHUNK_PAGES + word as u64 * 64;
                let mut bits = self.words[chunk][word] & mask;
                while bits != 0 {
                    let skipped = bits.trailing_zeros();
                    let count = (bits >> skipped).trailing_ones();
                    let run = PageRange::new(first + u64::from(skipped), u64::from(count));
                    push_merged(out, 0, run);
                    let end = skipped + count;
                    bits = if end < 64 { bits & (u64::MAX << end) } else { 0 };
                }
            }
        }
        within.end()
    }

    /// Returns the number of dirty pages of the 2 MiB that contain `page`.
    pub(super) fn count_near(&self, page: u64) -> u64 {
        let chunk = usize::try_from(page / CHUNK_PAGES).unwrap_or(usize::MAX);
        self.counts.get(chunk).copied().unwrap_or(0).into()
    }

    /// Returns the number of dirty pages in chunks that are not dirty as a whole.
    pub(super) fn scattered_pages(&self) -> u64 {
        let chunks = by_chunk(self.all).zip(&self.counts);
        let counts = chunks.map(|((_, pages), count)| (pages.count, u64::from(*count)));
        counts.filter(|(pages, count)| count < pages).map(|(_, count)| count).sum()
    }

    /// Returns whether all pages of some 2 MiB of `within` are dirty.
    pub(super) fn has_full_chunk(&self, within: PageRange) -> bool {
        by_chunk(within.intersect(self.all)).any(|(chunk, piece)| {
            self.counts.get(chunk).is_some_and(|count| u64::from(*count) == piece.count)
        })
    }
}

/// Cuts pages at the chunks' boundaries: the number of each chunk and the pages in it.
fn by_chunk(pages: PageRange) -> impl Iterator<Item = (usize, PageRange)> {
    let mut rest = pages;
    std::iter::from_fn(move || {
        let (piece, after) = rest.split(CHUNK_PAGES - rest.first % CHUNK_PAGES);
        rest = after;
        let chunk = usize::try_from(piece.first / CHUNK_PAGES).ok()?;
        (!piece.is_empty()).then_some((chunk, piece))
    })
}

/// Returns the words of a chunk that contain some of `pages`, which are in one chunk, and their
/// bits.
fn masks(pages: PageRange) -> impl Iterator<Item = (usize, u64)> {
    let (first, end) = (pages.first % CHUNK_PAGES, pages.first % CHUNK_PAGES + pages.count);
    (0..CHUNK_WORDS).filter_map(move |word| {
        let start = word as u64 * 64;
        let (low, high) = (first.max(start), end.min(start + 64));
        (low < high).then(|| (word, (u64::MAX >> (64 - (high - low))) << (low - start)))
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;
    use crate::pages::page_count;

    const PAGES: u64 = 3 * CHUNK_PAGES + 17;

    fn found(dirty: &DirtyPages, within: PageRange) -> Vec<PageRange> {
        let mut out = Vec::new();
        assert_eq!(dirty.find(within, usize::MAX, &mut out), within.end());
        out
    }

    #[test]
    fn a_chunk_of_which_all_pages_are_dirty_is_full() {
        let mut dirty = DirtyPages::new(PageRange::new(0, PAGES));
        dirty.insert(PageRange::new(CHUNK_PAGES, CHUNK_PAGES));
        assert!(dirty.has_full_chunk(PageRange::new(0, PAGES)));
        dirty.insert(PageRange::new(3, 2));
        dirty.fill(PageRange::new(0, CHUNK_PAGES));
        assert_eq!((dirty.filled_pages(), dirty.count_near(9)), (CHUNK_PAGES - 2, CHUNK_PAGES));
        dirty.remove(PageRange::new(7, 1));
        assert_eq!((dirty.filled_pages(), dirty.count_near(9)), (0, CHUNK_PAGES - 1));
        dirty.remove(PageRange::new(0, CHUNK_PAGES));
        assert!(!dirty.has_full_chunk(PageRange::new(2 * CHUNK_PAGES, CHUNK_PAGES)));
        dirty.remove(PageRange::new(CHUNK_PAGES + 5, 1));
        assert!(!dirty.has_full_chunk(PageRange::new(0, PAGES)));
        assert_eq!(dirty.count_near(CHUNK_PAGES + 5), CHUNK_PAGES - 1);
    }

    proptest! {
        #[test]
        fn it_holds_what_was_inserted_and_not_removed(
            steps in prop::collection::vec(
                (any::<bool>(), 0..PAGES + 40, 1..700_u64), 1..40
            ),
            within in (0..PAGES, 1..PAGES),
        ) {
            let mut dirty = DirtyPages::new(PageRange::new(0, PAGES));
            let mut expected = BTreeSet::new();
            for (insert, first, count) in steps {
                let pages = first..(first + count).min(PAGES);
                if insert {
                    expected.extend(pages);
                    dirty.insert(PageRange::new(first, count));
                } else {
                    pages.for_each(|page| { expected.remove(&page); });
                    dirty.remove(PageRange::new(first, count));
                }
            }
            let within = PageRange::new(within.0, within.1).intersect(PageRange::new(0, PAGES));
            let out = found(&dirty, within);
            let pages: Vec<u64> = out.iter().flat_map(|run| run.first..run.end()).collect();
            let in_range = expected.iter().copied().filter(|page| within.contains(*page));
            prop_assert_eq!(pages, in_range.collect::<Vec<_>>());
            // In parts it finds the same.
            let (mut parts, mut at) = (Vec::new(), within.first);
            while at < within.end() {
                let mut part = Vec::new();
                at = dirty.find(PageRange::between(at, within.end()), 1, &mut part);
                parts.extend(part);
            }
            prop_assert_eq!(page_count(&parts), page_count(&out));
        }
    }
}
