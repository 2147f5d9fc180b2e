//! Ranges of bytes of disks.

/// Most bytes that a stream takes at a time. Chunks begin at multiples of it.
pub const CHUNK_BYTES: u64 = 1 << 20;

/// Bytes of a disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DiskRange {
    /// Number of the disk in the transfer.
    pub disk: usize,
    /// Offset of the first byte.
    pub offset: u64,
    /// Number of bytes.
    pub bytes: u64,
}

impl DiskRange {
    /// Returns the offset behind the last byte.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.offset.saturating_add(self.bytes)
    }

    /// Splits the range where the next chunk begins. The second part may be empty.
    pub(super) fn split_at_chunk(self) -> (DiskRange, DiskRange) {
        let bytes = self.bytes.min(CHUNK_BYTES - self.offset % CHUNK_BYTES);
        let rest = DiskRange {
            offset: self.offset.saturating_add(bytes),
            bytes: self.bytes - bytes,
            ..self
        };
        (DiskRange { bytes, ..self }, rest)
    }
}

/// Adds a range to a list. It extends the last one if it follows it.
pub(super) fn push_merged(ranges: &mut Vec<DiskRange>, range: DiskRange) {
    match ranges.last_mut() {
        Some(last) if last.disk == range.disk && last.end() == range.offset => {
            last.bytes = last.bytes.saturating_add(range.bytes);
        }
        _ => ranges.push(range),
    }
}

/// Takes a part out of the range that has all of it.
pub(super) fn take_out(ranges: &mut Vec<DiskRange>, part: DiskRange) {
    let has = |range: &DiskRange| {
        range.disk == part.disk && range.offset <= part.offset && part.end() <= range.end()
    };
    let Some(at) = ranges.iter().position(has) else { return };
    let range = ranges[at];
    let before = DiskRange { bytes: part.offset - range.offset, ..range };
    let after = DiskRange { offset: part.end(), bytes: range.end() - part.end(), ..range };
    ranges.splice(at..=at, [before, after].into_iter().filter(|left| left.bytes > 0));
}

/// Returns the ranges in ascending order, those that follow each other as one.
pub(super) fn merged(mut ranges: Vec<DiskRange>) -> Vec<DiskRange> {
    ranges.sort_unstable_by_key(|range| (range.disk, range.offset));
    let mut merged = Vec::new();
    ranges.into_iter().for_each(|range| push_merged(&mut merged, range));
    merged
}

/// Returns the number of bytes of all ranges.
pub(super) fn total_bytes(ranges: &[DiskRange]) -> u64 {
    ranges.iter().fold(0, |sum, range| sum.saturating_add(range.bytes))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn chunks_make_up_the_range(offset in 0..1u64 << 40, bytes in 1..9 * CHUNK_BYTES) {
            let range = DiskRange { disk: 1, offset, bytes };
            let (mut rest, mut chunks) = (range, Vec::new());
            while rest.bytes > 0 {
                let (chunk, after) = rest.split_at_chunk();
                prop_assert!((1..=CHUNK_BYTES).contains(&chunk.bytes));
                prop_assert_eq!(chunk.offset / CHUNK_BYTES, (chunk.end() - 1) / CHUNK_BYTES);
                chunks.push(chunk);
                rest = after;
            }
            prop_assert_eq!(total_bytes(&chunks), bytes);
            chunks.reverse();
            prop_assert_eq!(merged(chunks), vec![range]);
        }
    }

    #[test]
    fn a_part_is_taken_out_of_the_range_that_has_it() {
        let range = |disk, offset, bytes| DiskRange { disk, offset, bytes };
        let mut ranges = vec![range(0, 0, 4), range(1, 0, 9)];
        take_out(&mut ranges, range(1, 3, 2));
        assert_eq!(ranges, [range(0, 0, 4), range(1, 0, 3), range(1, 5, 4)]);
        take_out(&mut ranges, range(0, 0, 4));
        take_out(&mut ranges, range(1, 2, 4));
        assert_eq!(ranges, [range(1, 0, 3), range(1, 5, 4)]);
    }

    #[test]
    fn ranges_of_two_disks_stay_apart() {
        let range = |disk, offset, bytes| DiskRange { disk, offset, bytes };
        let ranges = vec![range(1, 8, 2), range(0, 4, 4), range(0, 0, 4), range(1, 0, 8)];
        assert_eq!(merged(ranges), [range(0, 0, 8), range(1, 0, 10)]);
        assert_eq!(merged(vec![range(0, 0, 8), range(1, 8, 1)]).len(), 2);
    }
}
