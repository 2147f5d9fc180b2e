//! Pages that a destination could not reconstruct and that the source still owes.

use godwit_ram::PageRange;
use godwit_wire::BlockRun;

use super::PageBits;

/// Error: a destination reported pages as missing that cannot be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the destination misses pages that were not sent by reference (block {block}, {count} pages \
    from {first})"
)]
pub struct Unowed {
    block: u16,
    first: u64,
    count: u64,
}

/// Pages that are owed, and bookkeeping of those that may become so.
#[derive(Debug)]
pub struct Owed {
    waiting: PageBits,
    /// Pages that were missing once: from then on they are sent with their content.
    ever: PageBits,
    /// Number of pages on their way in a form that may fail.
    at_risk: u64,
    /// Number of pages reported as missing so far.
    reported: u64,
}

impl Owed {
    /// Creates the state with no page owed, for a guest with blocks of these sizes.
    #[must_use]
    pub fn new(block_pages: &[u64]) -> Owed {
        Owed {
            waiting: PageBits::new(block_pages),
            ever: PageBits::new(block_pages),
            at_risk: 0,
            reported: 0,
        }
    }

    /// Creates the state with some pages owed from an earlier part of the migration.
    #[must_use]
    pub(crate) fn since(block_pages: &[u64], waiting: PageBits) -> Owed {
        Owed { waiting, ..Owed::new(block_pages) }
    }

    /// Adds pages to be sent, whatever was sent of them.
    pub(crate) fn owe(&mut self, block: u16, pages: &[PageRange]) {
        for page in pages.iter().flat_map(|run| run.first..run.end()) {
            self.waiting.insert(block, page);
        }
    }

    /// Returns the pages owed.
    pub(crate) fn pages(&self) -> &PageBits {
        &self.waiting
    }

    /// Notes that so many pages are about to be sent in a form that may fail.
    pub fn risk(&mut self, pages: u64) {
        self.at_risk += pages;
    }

    /// Notes that the destination has applied everything sent: pages that it did not report as
    /// missing are there.
    pub fn settled(&mut self) {
        self.at_risk = 0;
    }

    /// Takes in pages that the destination misses.
    ///
    /// # Errors
    /// They were not sent in such a form, or the guest does not have them.
    pub fn missing(&mut self, runs: &[BlockRun]) -> Result<(), Unowed> {
        for &BlockRun { block, first, count } in runs {
            let unowed = Unowed { block, first, count };
            let Some(end) = first.checked_add(count).filter(|_| count <= self.at_risk) else {
                return Err(unowed);
            };
            self.at_risk -= count;
            self.reported += count;
            for page in first..end {
                if !self.waiting.insert(block, page) || !self.ever.insert(block, page) {
                    return Err(unowed);
                }
            }
        }
        Ok(())
    }

    /// Takes the pages owed within a range, to be sent: runs of pages, ascending.
    pub fn take(&mut self, block: u16, within: PageRange, out: &mut Vec<PageRange>) {
        self.waiting.take(block, within, out);
    }

    /// Returns the number of pages owed.
    #[must_use]
    pub fn waiting(&self) -> u64 {
        self.waiting.count()
    }

    /// Returns whether a page was missing once.
    #[must_use]
    pub fn was_missing(&self, block: u16, page: u64) -> bool {
        self.ever.contains(block, page)
    }

    /// Returns how many pages were reported as missing so far.
    #[must_use]
    pub fn reported(&self) -> u64 {
        self.reported
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(block: u16, first: u64, count: u64) -> BlockRun {
        BlockRun { block, first, count }
    }

    #[test]
    fn missing_pages_are_sent_once_and_remembered() {
        let mut owed = Owed::new(&[100, 20]);
        owed.risk(10);
        owed.missing(&[run(0, 5, 3), run(1, 19, 1)]).unwrap();
        assert_eq!((owed.waiting(), owed.reported()), (4, 4));
        let mut out = Vec::new();
        owed.take(0, PageRange::new(0, 7), &mut out);
        owed.take(0, PageRange::new(0, 100), &mut out);
        assert_eq!(out, [PageRange::new(5, 2), PageRange::new(7, 1)]);
        assert_eq!(owed.waiting(), 1);
        assert!(owed.was_missing(0, 6) && owed.was_missing(1, 19) && !owed.was_missing(1, 6));
    }

    #[test]
    fn a_destination_cannot_miss_more_pages_than_were_referenced() {
        let mut owed = Owed::new(&[100]);
        assert!(owed.missing(&[run(0, 5, 1)]).is_err());
        owed.risk(4);
        assert!(owed.missing(&[run(0, 5, 5)]).is_err());
        assert!(owed.missing(&[run(0, 99, 2)]).is_err(), "there is no such page");
        let mut owed = Owed::new(&[100]);
        owed.risk(1000);
        assert!(
            owed.missing(&[run(0, u64::MAX, 9)]).is_err() && owed.missing(&[run(1, 0, 1)]).is_err()
        );
        owed.settled();
        assert!(owed.missing(&[run(0, 5, 1)]).is_err());
    }
}
