//! Runs of pages, and arithmetic on lists of them.
//!
//! A list is a `Vec<PageRange>`. It is *normal* if its ranges are not empty, ascend, and neither
//! overlap nor touch. This module deals with numbers only, not with memory.

/// Unit of tracking and transfer, in bytes: the page size of x86-64, and of other machines' kernels
/// that [`crate::check_kernel`] accepts.
pub const PAGE_SIZE: u64 = 4096;

/// Run of pages inside one RAM block, counted in pages of [`PAGE_SIZE`] from the block's start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PageRange {
    /// The first page.
    pub first: u64,
    /// Number of pages.
    pub count: u64,
}

impl PageRange {
    /// Creates the run of `count` pages from `first` on.
    pub const fn new(first: u64, count: u64) -> PageRange {
        PageRange { first, count }
    }

    /// Creates the run from `first` to `end`, which is excluded. The run is empty if `end` is not
    /// greater than `first`.
    pub const fn between(first: u64, end: u64) -> PageRange {
        PageRange { first, count: end.saturating_sub(first) }
    }

    /// Returns the page after the last. It saturates, so that a count from a peer cannot wrap.
    pub const fn end(self) -> u64 {
        self.first.saturating_add(self.count)
    }

    /// Returns whether the run has no page.
    pub const fn is_empty(self) -> bool {
        self.count == 0
    }

    /// Returns whether the run contains `page`.
    pub const fn contains(self, page: u64) -> bool {
        page >= self.first && page < self.end()
    }

    /// Returns the run's offset in the block, in bytes. It saturates.
    pub const fn offset_bytes(self) -> u64 {
        self.first.saturating_mul(PAGE_SIZE)
    }

    /// Returns the run's length, in bytes. It saturates.
    pub const fn len_bytes(self) -> u64 {
        self.count.saturating_mul(PAGE_SIZE)
    }

    /// Returns the pages in both runs; empty if there are none.
    pub fn intersect(self, other: PageRange) -> PageRange {
        PageRange::between(self.first.max(other.first), self.end().min(other.end()))
    }

    /// Splits the run after `count` pages, or at its end if it is shorter.
    pub fn split(self, count: u64) -> (PageRange, PageRange) {
        let count = count.min(self.count);
        (PageRange::new(self.first, count), PageRange::between(self.first + count, self.end()))
    }

    /// Cuts the run into pieces of at most `max_pages` (at least one page each).
    pub fn chunks(self, max_pages: u64) -> impl Iterator<Item = PageRange> {
        let mut rest = self;
        std::iter::from_fn(move || {
            let (piece, after) = rest.split(max_pages.max(1));
            rest = after;
            (!piece.is_empty()).then_some(piece)
        })
    }
}

/// Returns the number of pages in a list of disjoint ranges.
pub fn page_count(ranges: &[PageRange]) -> u64 {
    ranges.iter().map(|range| range.count).sum()
}

/// Sorts a list and merges ranges that overlap or touch.
pub fn normalise(ranges: &mut Vec<PageRange>) {
    ranges.retain(|range| !range.is_empty());
    ranges.sort_unstable();
    ranges.dedup_by(|next, kept| {
        let touches = next.first <= kept.end();
        if touches {
            *kept = PageRange::between(kept.first, kept.end().max(next.end()));
        }
        touches
    });
}

/// Appends `range` to a list that ends before it, and extends the last entry if they touch. Entries
/// before index `floor` stay unchanged, as they may belong to another block.
pub fn push_merged(ranges: &mut Vec<PageRange>, floor: usize, range: PageRange) {
    if range.is_empty() {
        return;
    }
    match ranges.get_mut(floor..).and_then(<[PageRange]>::last_mut) {
        Some(last) if last.end() == range.first => last.count += range.count,
        _ => ranges.push(range),
    }
}

/// Returns the pages of `within` that are in none of `ranges`, a normal list. If `ranges` holds the
/// data, the result holds the zero pages.
pub fn gaps(within: PageRange, ranges: &[PageRange]) -> Vec<PageRange> {
    let mut gaps = Vec::new();
    let mut at = within.first;
    for range in ranges.iter().map(|range| range.intersect(within)) {
        if range.is_empty() {
            continue;
        }
        push_merged(&mut gaps, 0, PageRange::between(at, range.first));
        at = at.max(range.end());
    }
    push_merged(&mut gaps, 0, PageRange::between(at, within.end()));
    gaps
}

/// Returns the pages that are in both of two normal lists, as a normal list.
pub fn intersection(left: &[PageRange], right: &[PageRange]) -> Vec<PageRange> {
    let mut both = Vec::new();
    let (mut left, mut right) = (left.iter().peekable(), right.iter().peekable());
    while let (Some(&&a), Some(&&b)) = (left.peek(), right.peek()) {
        push_merged(&mut both, 0, a.intersect(b));
        if a.end() <= b.end() {
            left.next();
        } else {
            right.next();
        }
    }
    both
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    const LIMIT: u64 = 200;

    fn range() -> impl Strategy<Value = PageRange> {
        (0..LIMIT, 0..24u64).prop_map(|(first, count)| PageRange::new(first, count))
    }

    fn list() -> impl Strategy<Value = Vec<PageRange>> {
        prop::collection::vec(range(), 0..20)
    }

    fn normal_list() -> impl Strategy<Value = Vec<PageRange>> {
        list().prop_map(|mut ranges| {
            normalise(&mut ranges);
            ranges
        })
    }

    fn pages(ranges: &[PageRange]) -> BTreeSet<u64> {
        ranges.iter().flat_map(|range| range.first..range.end()).collect()
    }

    fn is_normal(ranges: &[PageRange]) -> bool {
        ranges.iter().all(|range| !range.is_empty())
            && ranges.windows(2).all(|pair| pair[0].end() < pair[1].first)
    }

    proptest! {
        #[test]
        fn normalising_keeps_the_pages(ranges in list()) {
            let mut normal = ranges.clone();
            normalise(&mut normal);
            prop_assert!(is_normal(&normal));
            prop_assert_eq!(pages(&normal), pages(&ranges));
            prop_assert_eq!(page_count(&normal), pages(&ranges).len() as u64);
        }

        #[test]
        fn gaps_are_the_complement(within in range(), ranges in normal_list()) {
            let gaps = gaps(within, &ranges);
            prop_assert!(is_normal(&gaps));
            let expected: BTreeSet<u64> =
                pages(&[within]).difference(&pages(&ranges)).copied().collect();
            prop_assert_eq!(pages(&gaps), expected);
        }

        #[test]
        fn an_intersection_holds_what_both_hold(left in normal_list(), right in normal_list()) {
            let both = intersection(&left, &right);
            let expected: BTreeSet<u64> =
                pages(&left).intersection(&pages(&right)).copied().collect();
            prop_assert_eq!(pages(&both), expected);
        }

        #[test]
        fn chunks_and_splits_cover_exactly(range in range(), size in 0..30u64) {
            let chunks: Vec<_> = range.chunks(size).collect();
            prop_assert!(chunks.iter().all(|chunk| chunk.count <= size.max(1)));
            prop_assert_eq!(page_count(&chunks), range.count);
            prop_assert_eq!(pages(&chunks), pages(&[range]));
            let (head, tail) = range.split(size);
            prop_assert_eq!(
                (head.first, head.end(), tail.end()),
                (range.first, tail.first, range.end())
            );
        }

        #[test]
        fn pushing_in_order_keeps_a_list_normal(ranges in normal_list(), size in 1..6u64) {
            let mut pushed = vec![PageRange::new(7, 3)];
            for chunk in ranges.iter().flat_map(|range| range.chunks(size)) {
                push_merged(&mut pushed, 1, chunk);
            }
            prop_assert_eq!(&pushed[1..], &ranges[..]);
        }
    }

    #[test]
    fn numbers_of_a_peer_do_not_wrap() {
        let range = PageRange::new(u64::MAX - 1, 7);
        assert_eq!(range.end(), u64::MAX);
        assert_eq!(range.offset_bytes(), u64::MAX);
        assert!(range.intersect(PageRange::new(0, 100)).is_empty());
        assert_eq!(PageRange::between(5, 3).count, 0);
    }
}
