//! Sets of ranges of disks: what is left to send. Pure.

use godwit_api::ArrivingDisk;
use godwit_migration::disks::DiskRange;

/// Ranges of all disks that are kept apart. Beyond that, neighbours become one range, with what is
/// between them.
const MOST_RANGES: usize = 1 << 18;
/// Gap between two ranges that become one, at first.
const FIRST_GAP_BYTES: u64 = 256 << 10;

/// Returns the bytes of ranges that do not overlap.
pub(super) fn bytes_of(ranges: &[DiskRange]) -> u64 {
    ranges.iter().map(|range| range.bytes).sum()
}

/// Adds a range behind others; it extends the last one if it follows that.
pub(super) fn push(ranges: &mut Vec<DiskRange>, range: DiskRange) {
    match ranges.last_mut() {
        Some(last) if last.disk == range.disk && end_of(last) == range.offset => {
            last.bytes = last.bytes.saturating_add(range.bytes);
        }
        _ => ranges.push(range),
    }
    // A list of a huge disk must not grow without a bound.
    if ranges.len() > 4 * MOST_RANGES {
        *ranges = merged(std::mem::take(ranges));
    }
}

/// Sorts ranges and joins those that touch or overlap.
pub(super) fn merged(ranges: Vec<DiskRange>) -> Vec<DiskRange> {
    bounded(ranges, MOST_RANGES)
}

fn bounded(ranges: Vec<DiskRange>, most: usize) -> Vec<DiskRange> {
    let (mut ranges, mut gap) = (joined(ranges, 0), FIRST_GAP_BYTES);
    while ranges.len() > most {
        ranges = joined(ranges, gap);
        gap = gap.saturating_mul(2);
    }
    ranges
}

/// Sorts ranges and joins those that are at most `gap` bytes apart.
fn joined(mut ranges: Vec<DiskRange>, gap: u64) -> Vec<DiskRange> {
    ranges.retain(|range| range.bytes > 0);
    ranges.sort_by_key(|range| (range.disk, range.offset));
    let mut all: Vec<DiskRange> = Vec::with_capacity(ranges.len());
    for range in ranges {
        match all.last_mut() {
            Some(last)
                if last.disk == range.disk && range.offset <= end_of(last).saturating_add(gap) =>
            {
                last.bytes = end_of(last).max(end_of(&range)) - last.offset;
            }
            _ => all.push(range),
        }
    }
    all
}

/// Adds all of the disks that are sent wholly: a block device at the destination may hold anything
/// where the disk has nothing.
pub(super) fn with_whole(mut ranges: Vec<DiskRange>, disks: &[ArrivingDisk]) -> Vec<DiskRange> {
    let numbered = disks.iter().enumerate();
    let whole = numbered.filter(|(_, asked)| asked.onto.is_some());
    ranges.extend(whole.map(|(disk, asked)| DiskRange {
        disk,
        offset: 0,
        bytes: asked.virtual_bytes,
    }));
    merged(ranges)
}

fn end_of(range: &DiskRange) -> u64 {
    range.offset.saturating_add(range.bytes)
}

/// Returns what of `ranges` is in none of the runs of its disk. `present`: for each disk ascending
/// runs of offset and length.
pub(super) fn without(ranges: Vec<DiskRange>, present: &[Vec<(u64, u64)>]) -> Vec<DiskRange> {
    let mut left = Vec::new();
    for range in merged(ranges) {
        let DiskRange { disk, mut offset, .. } = range;
        let end = end_of(&range);
        let runs = present.get(disk).map_or(&[][..], Vec::as_slice);
        let first = runs.partition_point(|(at, bytes)| at.saturating_add(*bytes) <= offset);
        for &(at, bytes) in &runs[first..] {
            if at >= end {
                break;
            }
            if at > offset {
                left.push(DiskRange { disk, offset, bytes: at - offset });
            }
            offset = offset.max(at.saturating_add(bytes));
        }
        if offset < end {
            left.push(DiskRange { disk, offset, bytes: end - offset });
        }
    }
    left
}

/// Whether runs of a disk of `bytes` bytes are ascending, apart and within it.
pub(super) fn are_valid_runs(runs: &[(u64, u64)], bytes: u64) -> bool {
    let mut from = 0;
    runs.iter().all(|&(at, length)| {
        let is_valid = at >= from && length > 0;
        match at.checked_add(length).filter(|end| is_valid && *end <= bytes) {
            Some(end) => {
                from = end;
                true
            }
            None => false,
        }
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use godwit_api::OntoDevice;
    use godwit_qemu::DiskFormat;
    use proptest::prelude::*;

    use super::*;

    fn range(disk: usize, offset: u64, bytes: u64) -> DiskRange {
        DiskRange { disk, offset, bytes }
    }

    #[test]
    fn ranges_that_touch_are_one_and_disks_stay_apart() {
        let ranges = vec![range(1, 0, 4), range(0, 8, 4), range(0, 0, 8), range(0, 20, 0)];
        assert_eq!(merged(ranges), [range(0, 0, 12), range(1, 0, 4)]);
        assert_eq!(bytes_of(&[range(0, 0, 12), range(1, 0, 4)]), 16);
        let mut pushed = Vec::new();
        for one in [range(0, 0, 4), range(0, 4, 4), range(1, 8, 4), range(1, 13, 4)] {
            push(&mut pushed, one);
        }
        assert_eq!(pushed, [range(0, 0, 8), range(1, 8, 4), range(1, 13, 4)]);
    }

    #[test]
    fn a_disk_that_goes_onto_a_device_is_sent_wholly() {
        let disk = |onto: Option<OntoDevice>| ArrivingDisk {
            path: "/srv/web.raw".into(),
            format: DiskFormat::Raw,
            virtual_bytes: 100,
            used_bytes: 0,
            base: Vec::new(),
            onto,
        };
        let disks = [disk(None), disk(Some(OntoDevice { overwrite: false, source: None }))];
        let allocated = vec![range(0, 8, 4), range(1, 8, 4), range(1, 90, 10)];
        assert_eq!(with_whole(allocated, &disks), [range(0, 8, 4), range(1, 0, 100)]);
        assert_eq!(with_whole(Vec::new(), &disks[..1]), []);
    }

    #[test]
    fn too_many_ranges_become_fewer_that_cover_them() {
        let step = 3 * FIRST_GAP_BYTES;
        let ranges: Vec<_> = (0..100).map(|number| range(0, number * step, 1)).collect();
        let few = bounded(ranges.clone(), 10);
        assert!(few.len() <= 10);
        assert_eq!(without(ranges, &[few.iter().map(|run| (run.offset, run.bytes)).collect()]), []);
    }

    #[test]
    fn runs_of_a_liar_are_refused() {
        assert!(are_valid_runs(&[(0, 4), (4, 4), (12, 4)], 16));
        assert!(are_valid_runs(&[], 0));
        for runs in [
            &[(0, 0)][..],
            &[(4, 4), (0, 4)],
            &[(0, 8), (4, 8)],
            &[(12, 5)],
            &[(u64::MAX, 1)],
            &[(8, u64::MAX)],
        ] {
            assert!(!are_valid_runs(runs, 16), "{runs:?}");
        }
    }

    proptest! {
        #[test]
        fn what_is_left_is_the_difference_of_the_sets(
            ranges in proptest::collection::vec((0usize..2, 0u64..60, 0u64..20), 0..12),
            runs in proptest::collection::vec((1u64..6, 1u64..6), 0..8),
        ) {
            let mut from = 0;
            let present: Vec<(u64, u64)> = runs
                .iter()
                .map(|(gap, bytes)| {
                    let run = (from + gap, *bytes);
                    from = run.0 + run.1;
                    run
                })
                .collect();
            prop_assert!(are_valid_runs(&present, from));
            let set = |ranges: &[DiskRange]| -> BTreeSet<(usize, u64)> {
                let bytes = |range: &DiskRange| {
                    let (disk, from, to) = (range.disk, range.offset, range.offset + range.bytes);
                    (from..to).map(move |at| (disk, at))
                };
                ranges.iter().flat_map(bytes).collect()
            };
            let ranges: Vec<_> =
                ranges.iter().map(|&(disk, at, bytes)| range(disk, at, bytes)).collect();
            let mut expected = set(&ranges);
            let left = without(ranges, std::slice::from_ref(&present));
            for (from, bytes) in present {
                for at in from..from + bytes {
                    expected.remove(&(0, at));
                }
            }
            prop_assert_eq!(set(&left), expected);
            prop_assert_eq!(bytes_of(&left), set(&left).len() as u64);
        }
    }
}
