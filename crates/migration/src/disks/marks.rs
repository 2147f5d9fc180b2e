//! Account of one stream: what was sent since the last mark, and which marks the destination has
//! not answered.

use std::collections::VecDeque;

use godwit_wire::{DISK_UNIT_BYTES, DiskMissing};

use super::range::{DiskRange, push_merged, take_out, total_bytes};

/// Bytes after which a stream sends a mark.
const MARK_BYTES: u64 = 4 << 20;
/// Chunks after which it sends one, however few bytes they have.
const MARK_CHUNKS: usize = 1024;
/// Marks that may be unanswered.
const MOST_OPEN_MARKS: usize = 2;

/// Most ranges that a destination accepts before a mark. The parts of a chunk are one range.
pub(super) const MOST_UNMARKED_RANGES: usize = 4096;
const _: () = assert!(MARK_CHUNKS < MOST_UNMARKED_RANGES);

/// Marks of one stream.
#[derive(Debug, Default)]
pub(super) struct Marks {
    /// Number of the last mark that was sent; the first one is 1.
    last: u64,
    /// What each mark covers that is not answered, in the order of the marks.
    open: VecDeque<Covered>,
    /// What was sent since the last mark.
    fresh: Covered,
    fresh_bytes: u64,
    fresh_chunks: usize,
}

/// What was sent between two marks.
#[derive(Debug, Default)]
struct Covered {
    ranges: Vec<DiskRange>,
    /// What each frame of references names, until the destination has said what it misses of it.
    referred: Vec<DiskRange>,
}

impl Marks {
    /// Notes a chunk that is being sent.
    pub(super) fn sends(&mut self, chunk: DiskRange) {
        push_merged(&mut self.fresh.ranges, chunk);
        self.fresh_bytes += chunk.bytes;
        self.fresh_chunks += 1;
    }

    /// Notes that a part of that chunk is sent by references, in one frame.
    pub(super) fn refers(&mut self, part: DiskRange) {
        self.fresh.referred.push(part);
    }

    /// Notes what the destination misses of a frame of references, before the next answer. Returns
    /// it; no mark covers it any more. `None`: no such references are covered by the next mark.
    pub(super) fn missing(&mut self, missing: DiskMissing) -> Option<Vec<DiskRange>> {
        let next = self.open.front_mut()?;
        let (disk, from) = (usize::from(missing.disk), missing.offset);
        let is_it = |part: &DiskRange| part.disk == disk && part.offset == from;
        let named = next.referred.iter().position(is_it)?;
        let named = next.referred.swap_remove(named);
        let bytes = u64::from(DISK_UNIT_BYTES);
        let mut lacking = Vec::new();
        for position in missing.positions() {
            let unit = DiskRange { disk, offset: from + u64::from(position) * bytes, bytes };
            if unit.end() > named.end() {
                return None;
            }
            push_merged(&mut lacking, unit);
        }
        lacking.iter().for_each(|part| take_out(&mut next.ranges, *part));
        Some(lacking)
    }

    /// Returns whether a mark is due. In the last round, whose end confirms everything, only the
    /// number of chunks counts: each mark costs time in the pause.
    pub(super) fn is_due(&self, is_last: bool) -> bool {
        (self.fresh_bytes >= MARK_BYTES && !is_last) || self.fresh_chunks >= MARK_CHUNKS
    }

    /// Returns whether something was sent since the last mark.
    pub(super) fn has_fresh(&self) -> bool {
        self.fresh_chunks > 0
    }

    /// Returns the number of the next mark, which is being sent.
    pub(super) fn next_mark(&mut self) -> u64 {
        self.last += 1;
        self.open.push_back(std::mem::take(&mut self.fresh));
        (self.fresh_bytes, self.fresh_chunks) = (0, 0);
        self.last
    }

    /// Returns the number of the last mark.
    pub(super) fn last_mark(&self) -> u64 {
        self.last
    }

    /// Returns whether marks are unanswered.
    pub(super) fn is_open(&self) -> bool {
        !self.open.is_empty()
    }

    /// Returns whether so many marks are unanswered that the stream waits.
    pub(super) fn is_full(&self) -> bool {
        self.open.len() >= MOST_OPEN_MARKS
    }

    /// Notes an answer. Returns the bytes that it confirms, or `None` if another mark is the next
    /// one.
    pub(super) fn answered(&mut self, mark: u64) -> Option<u64> {
        let next = self.last.checked_sub(self.open.len() as u64)?.checked_add(1)?;
        if mark != next {
            return None;
        }
        self.open.pop_front().map(|covered| total_bytes(&covered.ranges))
    }

    /// Takes everything that is not confirmed.
    pub(super) fn take_unmarked(&mut self) -> Vec<DiskRange> {
        (self.fresh_bytes, self.fresh_chunks) = (0, 0);
        let fresh = std::mem::take(&mut self.fresh);
        self.open.drain(..).chain([fresh]).flat_map(|covered| covered.ranges).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chunk(offset: u64, bytes: u64) -> DiskRange {
        DiskRange { disk: 0, offset, bytes }
    }

    #[test]
    fn answers_come_in_order() {
        let mut marks = Marks::default();
        marks.sends(chunk(0, MARK_BYTES));
        assert!(marks.is_due(false) && !marks.is_due(true));
        assert!(marks.has_fresh() && !marks.is_open());
        assert_eq!(marks.next_mark(), 1);
        marks.sends(chunk(MARK_BYTES, 512));
        assert!(!marks.is_due(false));
        assert_eq!(marks.next_mark(), 2);
        assert!(marks.is_full());
        for wrong in [0, 2, 3, u64::MAX] {
            assert_eq!(marks.answered(wrong), None);
        }
        assert_eq!(marks.answered(1), Some(MARK_BYTES));
        assert_eq!(marks.answered(1), None);
        assert_eq!(marks.answered(2), Some(512));
        assert_eq!(marks.answered(3), None);
        assert!(!marks.is_open());
    }

    #[test]
    fn a_break_takes_back_what_is_not_confirmed() {
        let mut marks = Marks::default();
        for at in 0..3 {
            marks.sends(chunk(at * 512, 512));
            if at < 2 {
                marks.next_mark();
            }
        }
        assert_eq!(marks.answered(1), Some(512));
        assert_eq!(marks.take_unmarked(), [chunk(512, 512), chunk(1024, 512)]);
        assert!(!marks.has_fresh() && !marks.is_open() && marks.take_unmarked().is_empty());
    }

    #[test]
    fn many_small_chunks_are_marked_as_well() {
        let mut marks = Marks::default();
        (0..MARK_CHUNKS as u64).for_each(|at| marks.sends(chunk(at * 8192, 512)));
        assert!(marks.is_due(true));
    }

    #[test]
    fn what_is_missing_is_covered_by_no_mark_and_named_once() {
        let unit = u64::from(DISK_UNIT_BYTES);
        let missing = |units, offset| DiskMissing { disk: 0, units, offset };
        let mut marks = Marks::default();
        marks.sends(chunk(0, 8 * unit));
        marks.refers(chunk(2 * unit, 3 * unit));
        assert_eq!(marks.missing(missing(1, 2 * unit)), None, "before the mark");
        assert_eq!(marks.next_mark(), 1);
        for wrong in [missing(1, 0), missing(1, 3 * unit)] {
            assert_eq!(marks.missing(wrong), None);
        }
        let lacking = marks.missing(missing(0b101, 2 * unit)).unwrap();
        assert_eq!(lacking, [chunk(2 * unit, unit), chunk(4 * unit, unit)]);
        assert_eq!(marks.missing(missing(1, 2 * unit)), None, "once");
        assert_eq!(marks.answered(1), Some(6 * unit));
        marks.sends(chunk(0, 8 * unit));
        marks.refers(chunk(0, 2 * unit));
        marks.next_mark();
        assert_eq!(marks.missing(missing(0b100, 0)), None, "not named");
        // A stream that breaks gives back what is left.
        marks.sends(chunk(8 * unit, 2 * unit));
        marks.refers(chunk(8 * unit, 2 * unit));
        assert_eq!(marks.answered(2), Some(8 * unit));
        marks.next_mark();
        marks.missing(missing(1, 8 * unit)).unwrap();
        assert_eq!(marks.take_unmarked(), [chunk(9 * unit, unit)]);
    }
}
