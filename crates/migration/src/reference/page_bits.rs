//! A set of pages, one bit each. The guest determines its size, whatever a peer says.

use godwit_ram::{PageRange, push_merged};

/// Set of pages of several blocks.
#[derive(Clone, Debug)]
pub(crate) struct PageBits {
    blocks: Vec<Block>,
    count: u64,
}

#[derive(Clone, Debug)]
struct Block {
    pages: u64,
    /// Allocated when the first page is inserted.
    words: Vec<u64>,
}

impl PageBits {
    /// Creates an empty set for blocks of these sizes.
    pub(crate) fn new(block_pages: &[u64]) -> PageBits {
        let blocks = block_pages.iter().map(|&pages| Block { pages, words: Vec::new() }).collect();
        PageBits { blocks, count: 0 }
    }

    /// Creates the set of all pages.
    pub(crate) fn all(block_pages: &[u64]) -> PageBits {
        let block = |&pages: &u64| {
            let words = usize::try_from(pages.div_ceil(64)).unwrap_or(usize::MAX);
            let mut words = vec![u64::MAX; words];
            if let Some(last) = words.last_mut().filter(|_| pages % 64 > 0) {
                *last = bit_of(pages) - 1;
            }
            Block { pages, words }
        };
        PageBits {
            blocks: block_pages.iter().map(block).collect(),
            count: block_pages.iter().sum(),
        }
    }

    /// Adds all pages of another set, of the same blocks.
    pub(crate) fn add(&mut self, other: &PageBits) {
        for (ours, theirs) in self.blocks.iter_mut().zip(&other.blocks) {
            if ours.words.is_empty() {
                ours.words.clone_from(&theirs.words);
                continue;
            }
            ours.words.iter_mut().zip(&theirs.words).for_each(|(ours, theirs)| *ours |= theirs);
        }
        let ones = |block: &Block| {
            block.words.iter().map(|word| u64::from(word.count_ones())).sum::<u64>()
        };
        self.count = self.blocks.iter().map(ones).sum();
    }

    /// Returns the number of pages in the set.
    pub(crate) fn count(&self) -> u64 {
        self.count
    }

    /// Inserts a page. Returns false if there is no such page.
    pub(crate) fn insert(&mut self, block: u16, page: u64) -> bool {
        let Some(block) =
            self.blocks.get_mut(usize::from(block)).filter(|block| page < block.pages)
        else {
            return false;
        };
        if block.words.is_empty() {
            block.words = vec![0; usize::try_from(block.pages.div_ceil(64)).unwrap_or(usize::MAX)];
        }
        if let Some(word) = word_of(page).and_then(|word| block.words.get_mut(word)) {
            self.count += u64::from(*word & bit_of(page) == 0);
            *word |= bit_of(page);
        }
        true
    }

    /// Returns whether the set contains a page.
    pub(crate) fn contains(&self, block: u16, page: u64) -> bool {
        let words = self.blocks.get(usize::from(block)).map_or(&[][..], |block| &block.words);
        word_of(page).and_then(|word| words.get(word)).is_some_and(|word| word & bit_of(page) != 0)
    }

    /// Removes the pages within a range, and appends them to `out`, a list of the same block from
    /// `floor` on.
    pub(crate) fn take(&mut self, block: u16, within: PageRange, out: &mut Vec<PageRange>) {
        let floor = out.len();
        let Some(block) = self.blocks.get_mut(usize::from(block)).filter(|_| self.count > 0) else {
            return;
        };
        let end = within.end().min(block.pages);
        let mut page = within.first;
        while page < end {
            let Some(word) = word_of(page).and_then(|word| block.words.get_mut(word)) else {
                return;
            };
            if *word & (u64::MAX << (page % 64)) == 0 {
                page = (page / 64 + 1) * 64;
                continue;
            }
            if *word & bit_of(page) != 0 {
                *word &= !bit_of(page);
                self.count -= 1;
                push_merged(out, floor, PageRange::new(page, 1));
            }
            page += 1;
        }
    }
}

fn word_of(page: u64) -> Option<usize> {
    usize::try_from(page / 64).ok()
}

fn bit_of(page: u64) -> u64 {
    1 << (page % 64)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn all_pages_and_those_of_two_sets() {
        let sizes = [130, 64, 0, 3];
        let mut all = PageBits::all(&sizes);
        assert_eq!(all.count(), 197);
        assert!(
            all.contains(0, 129)
                && !all.contains(0, 130)
                && all.contains(1, 63)
                && all.contains(3, 2)
        );
        let mut out = Vec::new();
        all.take(0, PageRange::new(0, 128), &mut out);
        assert_eq!((all.count(), &out[..]), (69, &[PageRange::new(0, 128)][..]));
        let mut other = PageBits::new(&sizes);
        assert!(other.insert(0, 5) && other.insert(0, 129) && other.insert(3, 0));
        other.add(&all);
        assert_eq!(other.count(), 70);
        let mut none = PageBits::new(&sizes);
        none.add(&other);
        assert_eq!(none.count(), 70);
    }

    proptest! {
        #[test]
        fn it_is_a_set(
            pages in prop::collection::vec((0u16..3, 0u64..400), 0..200),
            takes in prop::collection::vec((0u16..3, 0u64..400, 0u64..400), 0..20),
        ) {
            let sizes = [130u64, 333];
            let (mut bits, mut set) = (PageBits::new(&sizes), BTreeSet::new());
            for (block, page) in pages {
                let there = sizes.get(usize::from(block)).is_some_and(|size| page < *size);
                prop_assert_eq!(bits.insert(block, page), there);
                if there {
                    set.insert((block, page));
                }
            }
            for (block, first, count) in takes {
                let mut out = vec![PageRange::new(0, 1)];
                bits.take(block, PageRange::new(first, count), &mut out);
                let taken: BTreeSet<_> = out[1..]
                    .iter()
                    .flat_map(|run| run.first..run.end())
                    .map(|page| (block, page))
                    .collect();
                let expected: BTreeSet<_> =
                    set.range((block, first)..(block, first + count)).copied().collect();
                prop_assert_eq!(&taken, &expected);
                set.retain(|page| !taken.contains(page));
                prop_assert_eq!(bits.count(), set.len() as u64);
                prop_assert!(
                    (0..400).all(|page| bits.contains(block, page) == set.contains(&(block, page)))
                );
            }
        }
    }
}
