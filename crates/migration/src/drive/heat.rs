//! Order in which a sweep visits memory: memory that is written again and again comes last. If it
//! were sent early in a round, it would be dirty again at the end and would have to be sent in the
//! next round as well.
//!
//! The unit is the throttle's chunk, which must be taken whole
//! ([`DirtyTracker::take_dirty`](godwit_ram::DirtyTracker)).

use std::sync::Arc;

use godwit_ram::{PageRange, Region, throttle_chunk_pages};
use godwit_wire::BlockRun;

/// A chunk in which so many consecutive sweeps have found dirty pages is hot.
const HOT_SWEEPS: u8 = 2;

/// Pages of one block that a sweep visits together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stretch {
    pub(crate) block: u16,
    pub(crate) pages: PageRange,
}

/// Number of consecutive sweeps that found dirty pages, for each chunk.
#[derive(Debug)]
pub(crate) struct Heat {
    blocks: Vec<Block>,
}

#[derive(Debug)]
struct Block {
    pages: u64,
    chunk_pages: u64,
    /// Sweep counts by chunk number.
    sweeps: Vec<u8>,
    /// Whether the current sweep has found dirty pages, by chunk number.
    found: Vec<bool>,
}

impl Heat {
    pub(crate) fn new(regions: &[Arc<Region>]) -> Heat {
        Heat::of_blocks(regions.iter().map(|region| region.pages()))
    }

    fn of_blocks(pages: impl ExactSizeIterator<Item = u64>) -> Heat {
        let blocks = pages.len();
        let block = |pages: u64| {
            let chunk_pages = throttle_chunk_pages(pages, blocks);
            let chunks = usize::try_from(pages.div_ceil(chunk_pages)).unwrap_or_default();
            Block { pages, chunk_pages, sweeps: vec![0; chunks], found: vec![false; chunks] }
        };
        Heat { blocks: pages.map(block).collect() }
    }

    /// Notes dirty pages, found in the current sweep.
    pub(crate) fn found(&mut self, block: u16, pages: &[PageRange]) {
        let Some(block) = self.blocks.get_mut(usize::from(block)) else { return };
        for run in pages.iter().filter(|run| !run.is_empty()) {
            for chunk in run.first / block.chunk_pages..=(run.end() - 1) / block.chunk_pages {
                let found =
                    usize::try_from(chunk).ok().and_then(|chunk| block.found.get_mut(chunk));
                found.into_iter().for_each(|found| *found = true);
            }
        }
    }

    /// Ends a sweep that has visited all memory.
    pub(crate) fn swept(&mut self) {
        for block in &mut self.blocks {
            for (sweeps, found) in block.sweeps.iter_mut().zip(&mut block.found) {
                *sweeps = if std::mem::take(found) { sweeps.saturating_add(1) } else { 0 };
            }
        }
    }

    /// Returns all memory: first the stretches that are not hot, then the hot ones, each in
    /// ascending order.
    pub(crate) fn order(&self) -> (Vec<Stretch>, Vec<Stretch>) {
        let (mut cold, mut hot) = (Vec::new(), Vec::new());
        for (number, block) in (0..).zip(&self.blocks) {
            let mut first = 0;
            for run in block.sweeps.chunk_by(|a, b| (*a >= HOT_SWEEPS) == (*b >= HOT_SWEEPS)) {
                let end = (first + run.len() as u64 * block.chunk_pages).min(block.pages);
                let stretch = Stretch { block: number, pages: PageRange::between(first, end) };
                let come_with = if run[0] >= HOT_SWEEPS { &mut hot } else { &mut cold };
                come_with.push(stretch);
                first = end;
            }
        }
        (cold, hot)
    }

    /// Returns the memory that is hot.
    pub(crate) fn hot(&self) -> Vec<BlockRun> {
        let (_, hot) = self.order();
        let run =
            |Stretch { block, pages: PageRange { first, count } }| BlockRun { block, first, count };
        hot.into_iter().map(run).collect()
    }
}

/// Returns all memory in ascending order.
pub(crate) fn all(regions: &[Arc<Region>]) -> Vec<Stretch> {
    let stretches = (0..).zip(regions);
    stretches.map(|(block, region)| Stretch { block, pages: region.all_pages() }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stretch(block: u16, first: u64, end: u64) -> Stretch {
        Stretch { block, pages: PageRange::between(first, end) }
    }

    #[test]
    fn pages_found_by_two_sweeps_in_a_row_come_last() {
        let mut heat = Heat::of_blocks([5200, 2048].into_iter());
        assert_eq!(heat.order(), (vec![stretch(0, 0, 5200), stretch(1, 0, 2048)], vec![]));
        // From the second chunk into the third, which is not a whole one.
        let (first, second) = ([PageRange::new(4000, 400)], [PageRange::new(2080, 1)]);
        heat.found(0, &first);
        heat.found(1, &[PageRange::new(3, 1)]);
        heat.swept();
        assert_eq!(heat.order().1, []);
        heat.found(0, &second);
        heat.found(1, &[PageRange::new(2047, 1)]);
        heat.swept();
        let cold = vec![stretch(0, 0, 2048), stretch(0, 4096, 5200)];
        assert_eq!(heat.order(), (cold, vec![stretch(0, 2048, 4096), stretch(1, 0, 2048)]));
        let hot = [(0, 2048, 2048), (1, 0, 2048)];
        assert_eq!(heat.hot(), hot.map(|(block, first, count)| BlockRun { block, first, count }));
        heat.found(0, &first);
        heat.swept();
        assert_eq!(heat.order().1, [stretch(0, 2048, 4096)], "what was not found once is not hot");
    }

    proptest::proptest! {
        #[test]
        fn each_page_comes_once_and_no_chunk_of_the_throttle_is_cut(
            pages in 1_u64..20_000_000,
            found in proptest::collection::vec((0_u64..20_000_000, 1_u64..5000), 0..20),
        ) {
            let mut heat = Heat::of_blocks([pages].into_iter());
            let all = PageRange::new(0, pages);
            let found: Vec<_> = found
                .into_iter()
                .map(|(first, count)| PageRange::new(first, count).intersect(all))
                .collect();
            for _ in 0..2 {
                heat.found(0, &found);
                heat.swept();
            }
            let (cold, hot) = heat.order();
            let hot_page = |page| hot.iter().any(|stretch| stretch.pages.contains(page));
            proptest::prop_assert!(found.iter().all(|run| run.is_empty() || hot_page(run.first)));
            let mut stretches: Vec<_> =
                cold.into_iter().chain(hot).map(|stretch| stretch.pages).collect();
            stretches.sort_by_key(|run| run.first);
            let chunk_pages = throttle_chunk_pages(pages, 1);
            let mut end = 0;
            for run in stretches {
                proptest::prop_assert_eq!((run.first, run.first % chunk_pages), (end, 0));
                end = run.end();
            }
            proptest::prop_assert_eq!(end, pages);
        }
    }
}
