//! Pages that a destination could not make of what it was sent: what the source still owes.

use godwit_ram::PageRange;
use godwit_wire::BlockRun;

use super::PageBits;

/// A destination said pages to be missing that can't be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the destination misses pages that were not told by their content (block {block}, {count} pages from {first})"
)]
pub struct Unowed {
    block: u16,
    first: u64,
    count: u64,
}

/// What is owed, and what may still come to be.
#[derive(Debug)]
pub struct Owed {
    waiting: PageBits,
    /// Pages that were missing once: they are sent as they are from then on.
    ever: PageBits,
    /// Pages that are on their way in a form that may fail.
    at_risk: u64,
    /// All that were told to be missing.
    told: u64,
}

impl Owed {
    /// Nothing, of a guest with blocks of these sizes.
    #[must_use]
    pub fn new(block_pages: &[u64]) -> Owed {
        Owed { waiting: PageBits::new(block_pages), ever: PageBits::new(block_pages), at_risk: 0, told: 0 }
    }

    /// The same, where some pages are owed from before.
    #[must_use]
    pub(crate) fn since(block_pages: &[u64], waiting: PageBits) -> Owed {
        Owed { waiting, ..Owed::new(block_pages) }
    }

    /// Pages are to be sent, whatever was sent of them.
    pub(crate) fn owe(&mut self, block: u16, pages: &[PageRange]) {
        for page in pages.iter().flat_map(|run| run.first..run.end()) {
            self.waiting.insert(block, page);
        }
    }

    /// What is owed.
    pub(crate) fn pages(&self) -> &PageBits {
        &self.waiting
    }

    /// So many pages are about to be sent in a form that may fail.
    pub fn risk(&mut self, pages: u64) {
        self.at_risk += pages;
    }

    /// The destination has applied all that was sent: what it did not say to be missing is there.
    pub fn settled(&mut self) {
        self.at_risk = 0;
    }

    /// The destination misses pages.
    ///
    /// # Errors
    /// They were not sent in such a form, or the guest has not got them.
    pub fn missing(&mut self, runs: &[BlockRun]) -> Result<(), Unowed> {
        for &BlockRun { block, first, count } in runs {
            let unowed = Unowed { block, first, count };
            let Some(end) = first.checked_add(count).filter(|_| count <= self.at_risk) else {
                return Err(unowed);
            };
            self.at_risk -= count;
            self.told += count;
            for page in first..end {
                if !self.waiting.insert(block, page) || !self.ever.insert(block, page) {
                    return Err(unowed);
                }
            }
        }
        Ok(())
    }

    /// Takes what is owed within a range, to be sent: runs of pages, ascending.
    pub fn take(&mut self, block: u16, within: PageRange, out: &mut Vec<PageRange>) {
        self.waiting.take(block, within, out);
    }

    /// How many pages are owed.
    #[must_use]
    pub fn waiting(&self) -> u64 {
        self.waiting.count()
    }

    /// Whether a page was missing once.
    #[must_use]
    pub fn was_missing(&self, block: u16, page: u64) -> bool {
        self.ever.contains(block, page)
    }

    /// How many pages were told to be missing so far.
    #[must_use]
    pub fn told(&self) -> u64 {
        self.told
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(block: u16, first: u64, count: u64) -> BlockRun {
        BlockRun { block, first, count }
    }

    #[test]
    fn what_is_missing_is_sent_once_and_remembered() {
        let mut owed = Owed::new(&[100, 20]);
        owed.risk(10);
        owed.missing(&[run(0, 5, 3), run(1, 19, 1)]).unwrap();
        assert_eq!((owed.waiting(), owed.told()), (4, 4));
        let mut out = Vec::new();
        owed.take(0, PageRange::new(0, 7), &mut out);
        owed.take(0, PageRange::new(0, 100), &mut out);
        assert_eq!(out, [PageRange::new(5, 2), PageRange::new(7, 1)]);
        assert_eq!(owed.waiting(), 1);
        assert!(owed.was_missing(0, 6) && owed.was_missing(1, 19) && !owed.was_missing(1, 6));
    }

    #[test]
    fn a_destination_can_not_miss_what_was_sent_as_it_is() {
        let mut owed = Owed::new(&[100]);
        assert!(owed.missing(&[run(0, 5, 1)]).is_err());
        owed.risk(4);
        assert!(owed.missing(&[run(0, 5, 5)]).is_err());
        assert!(owed.missing(&[run(0, 99, 2)]).is_err(), "there is no such page");
        let mut owed = Owed::new(&[100]);
        owed.risk(1000);
        assert!(owed.missing(&[run(0, u64::MAX, 9)]).is_err() && owed.missing(&[run(1, 0, 1)]).is_err());
        owed.settled();
        assert!(owed.missing(&[run(0, 5, 1)]).is_err());
    }
}
