//! Where QEMU maps a RAM file: /proc/PID/maps read, and turned into what a scan needs.

use std::collections::BTreeSet;

use crate::pages::{PAGE_SIZE, PageRange};

/// A mapping of (a part of) a RAM file in QEMU's address space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mapping {
    /// Where it starts in QEMU.
    pub(crate) address: u64,
    /// The first page of the file that it shows.
    pub(crate) first: u64,
    /// How many pages it shows.
    pub(crate) count: u64,
}

impl Mapping {
    /// The file's pages that it shows.
    pub(crate) fn pages(&self) -> PageRange {
        PageRange::new(self.first, self.count)
    }

    /// Where QEMU has the page, which must be one of those shown.
    pub(crate) fn address_of(&self, page: u64) -> u64 {
        self.address + (page - self.first) * PAGE_SIZE
    }
}

/// All mappings of one file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct FileMappings {
    /// Those whose writes reach the file.
    pub(super) shared: Vec<Mapping>,
    /// How many there are whose writes stay in QEMU.
    pub(super) private: usize,
}

/// Where QEMU maps a RAM block, and how that cuts it.
#[derive(Clone, Debug)]
pub(crate) struct BlockMappings {
    /// Each mapping.
    pub(crate) mappings: Vec<Mapping>,
    /// The same, by page.
    pub(crate) segments: Vec<Segment>,
}

/// The mappings of the file with this device and inode number, cut to `pages`, the file's own. Lines that are not
/// understood are passed over (proc_pid_maps(5)).
pub(super) fn mappings_of(maps: &str, file_id: (u64, u64), pages: PageRange) -> FileMappings {
    let mut found = FileMappings::default();
    for line in maps.lines().filter_map(parse_line) {
        if line.file_id != file_id {
            continue;
        }
        if !line.shared {
            found.private += 1;
            continue;
        }
        let mapping = Mapping {
            address: line.start,
            first: line.offset / PAGE_SIZE,
            count: (line.end - line.start) / PAGE_SIZE,
        };
        let shown = mapping.pages().intersect(pages);
        if !shown.is_empty() {
            found.show(Mapping {
                address: mapping.address_of(shown.first),
                first: shown.first,
                count: shown.count,
            });
        }
    }
    found
}

impl FileMappings {
    /// Adds one, to the last where it goes on with it: the kernel cuts a mapping in pieces where parts of it are governed
    /// by a userfaultfd, and to the process they are one.
    fn show(&mut self, mapping: Mapping) {
        match self.shared.last_mut() {
            Some(last)
                if last.pages().end() == mapping.first
                    && last.address + last.count * PAGE_SIZE == mapping.address =>
            {
                last.count += mapping.count;
            }
            _ => self.shared.push(mapping),
        }
    }
}

struct Line {
    start: u64,
    end: u64,
    shared: bool,
    offset: u64,
    file_id: (u64, u64),
}

/// `7f0000000000-7f0040000000 rw-s 00000000 00:2a 1234  /run/godwit/ram/vm.0`
fn parse_line(line: &str) -> Option<Line> {
    let hex = |text: &str| u64::from_str_radix(text, 16).ok();
    let mut fields = line.split_ascii_whitespace();
    let (start, end) = fields.next()?.split_once('-')?;
    let shared = fields.next()?.as_bytes().get(3) == Some(&b's');
    let offset = hex(fields.next()?)?;
    let (major, minor) = fields.next()?.split_once(':')?;
    let device =
        rustix::fs::makedev(u32::from_str_radix(major, 16).ok()?, u32::from_str_radix(minor, 16).ok()?);
    let inode = fields.next()?.parse().ok()?;
    let (start, end) = (hex(start)?, hex(end)?);
    (end > start).then_some(Line { start, end, shared, offset, file_id: (device, inode) })
}

/// Pages of a block that are mapped alike: at each of `addresses`, which has the first of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Segment {
    /// The pages.
    pub(crate) pages: PageRange,
    /// Where QEMU has them; never empty.
    pub(crate) addresses: Vec<u64>,
}

impl Segment {
    /// Where QEMU has the first of `pages`, which lie in the segment: in each of its mappings.
    pub(crate) fn addresses_of(&self, pages: PageRange) -> impl Iterator<Item = u64> {
        let offset_bytes = (pages.first - self.pages.first) * PAGE_SIZE;
        self.addresses.iter().map(move |address| address + offset_bytes)
    }
}

/// Cuts a block at each start and end of a mapping. The segments ascend; pages that are mapped nowhere are in none, as
/// they cannot be written.
pub(super) fn segments_of(mappings: &[Mapping]) -> Vec<Segment> {
    let cuts: BTreeSet<u64> =
        mappings.iter().flat_map(|mapping| [mapping.first, mapping.pages().end()]).collect();
    cuts.iter()
        .zip(cuts.iter().skip(1))
        .filter_map(|(&first, &end)| {
            let addresses: Vec<u64> = mappings
                .iter()
                .filter(|mapping| mapping.pages().contains(first))
                .map(|mapping| mapping.address_of(first))
                .collect();
            let pages = PageRange::between(first, end);
            (!addresses.is_empty()).then_some(Segment { pages, addresses })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MAPS: &str = "\
55d0a0000000-55d0a0400000 r-xp 00000000 08:01 77        /usr/bin/qemu-system-x86_64
7f1000000000-7f1000800000 rw-s 00000000 00:2a 1234      /run/ram/vm with space.0
7f2000000000-7f2000003000 rw-s 00002000 00:2a 1234      /run/ram/vm with space.0
7f3000000000-7f3000001000 rw-p 00000000 00:2a 1235      /run/ram/vm.1
7f4000000000-7f4000001000 rw-s 00000000 00:2b 1234      /other
7ffc00000000-7ffc00021000 rw-p 00000000 00:00 0         [stack]
nonsense
";

    #[test]
    fn finds_all_mappings_of_a_file() {
        let id = (rustix::fs::makedev(0, 0x2a), 1234);
        let found = mappings_of(MAPS, id, PageRange::new(0, 4));
        let expected = [
            Mapping { address: 0x7f10_0000_0000, first: 0, count: 4 },
            Mapping { address: 0x7f20_0000_0000, first: 2, count: 2 },
        ];
        assert_eq!((found.shared.as_slice(), found.private), (&expected[..], 0));
        let segments = segments_of(&found.shared);
        assert_eq!(segments.len(), 2);
        assert_eq!(segments[0].addresses, [0x7f10_0000_0000]);
        assert_eq!(segments[1].addresses, [0x7f10_0000_2000, 0x7f20_0000_0000]);
    }

    #[test]
    fn tells_private_from_absent() {
        let device = rustix::fs::makedev(0, 0x2a);
        let private = mappings_of(MAPS, (device, 1235), PageRange::new(0, 1));
        assert_eq!((private.shared.len(), private.private), (0, 1));
        let absent = mappings_of(MAPS, (device, 9), PageRange::new(0, 1));
        assert_eq!(absent, FileMappings::default());
    }

    #[test]
    fn pieces_of_a_mapping_are_one() {
        let maps = "\
7f1000000000-7f1000002000 rw-s 00000000 00:2a 1234      /ram
7f1000002000-7f1000003000 rw-s 00002000 00:2a 1234      /ram
7f1000003000-7f1000005000 rw-s 00003000 00:2a 1234      /ram
7f1000005000-7f1000006000 rw-s 00000000 00:2a 1234      /ram
7f1000007000-7f1000008000 rw-s 00001000 00:2a 1234      /ram
";
        let found = mappings_of(maps, (rustix::fs::makedev(0, 0x2a), 1234), PageRange::new(0, 5));
        let expected = [
            Mapping { address: 0x7f10_0000_0000, first: 0, count: 5 },
            Mapping { address: 0x7f10_0000_5000, first: 0, count: 1 },
            Mapping { address: 0x7f10_0000_7000, first: 1, count: 1 },
        ];
        assert_eq!(found.shared, expected);
    }

    proptest! {
        #[test]
        fn each_mapped_page_is_in_one_segment_with_all_its_addresses(
            parts in prop::collection::vec((0..60u64, 1..40u64), 0..6)
        ) {
            let mappings: Vec<Mapping> = (1..).zip(parts)
                .map(|(index, (first, count))| Mapping { address: index << 32, first, count }).collect();
            let segments = segments_of(&mappings);
            prop_assert!(segments.windows(2).all(|pair| pair[0].pages.end() <= pair[1].pages.first));
            for page in 0..100 {
                let expected: Vec<u64> = mappings.iter().filter(|mapping| mapping.pages().contains(page))
                    .map(|mapping| mapping.address_of(page)).collect();
                let found: Vec<u64> = segments.iter().filter(|segment| segment.pages.contains(page))
                    .flat_map(|segment| segment.addresses.iter()
                        .map(move |address| address + (page - segment.pages.first) * PAGE_SIZE)).collect();
                prop_assert_eq!(found, expected);
            }
        }
    }
}
