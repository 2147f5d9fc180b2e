//! Where QEMU maps a RAM file: /proc/PID/maps read, and turned into what a scan needs.
//!
//! A guest that broke out of QEMU decides how often QEMU maps what. So the file is read line by
//! line in one pass for all RAM blocks, reading stops at bounds, and what is kept has a bound as
//! well: [`MOST_PLACES`] mappings a block.

use std::io::{self, BufRead, Read};

use crate::pages::{PAGE_SIZE, PageRange};

/// Most places of its address space at which QEMU may map one RAM block. A stock QEMU maps each
/// block once; the kernel's pieces of one mapping count as one. All segments of a block then have
/// at most `2 * MOST_PLACES * MOST_PLACES` addresses: 1 MiB.
pub(crate) const MOST_PLACES: usize = 256;
/// Most lines of /proc/PID/maps that are read: 16 times what vm.max_map_count allows a process by
/// default.
pub(crate) const MOST_LINES: usize = 1 << 20;
/// Longest line of /proc/PID/maps: a path of 4,096 bytes, in which a line feed takes four.
const LONGEST_LINE_BYTES: u64 = 20 << 10;

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
    pub(crate) mappings: Vec<Mapping>,
    /// Segments by page.
    pub(crate) segments: Vec<Segment>,
}

/// A RAM file whose mappings are wanted.
#[derive(Clone, Copy, Debug)]
pub(super) struct WantedFile {
    /// Device and inode number.
    pub(super) id: (u64, u64),
    /// The file's own pages: mappings are cut to them.
    pub(super) pages: PageRange,
}

/// Error in reading the mappings.
#[derive(Debug)]
pub(super) enum MapsError {
    /// The file is empty: a zombie has no address space.
    Empty,
    /// Reading failed.
    Io(io::Error),
    /// The wanted file of this index is mapped at more than [`MOST_PLACES`] places.
    TooManyPlaces(usize),
    /// There are more than [`MOST_LINES`] lines, or one is longer than any that the kernel writes.
    TooLong,
}

/// Reads the mappings of each wanted file. Passes over lines that it does not understand
/// (proc_pid_maps(5)). Reads no further once a bound is passed.
pub(super) fn read_mappings(
    mut maps: impl BufRead,
    wanted: &[WantedFile],
) -> Result<Vec<FileMappings>, MapsError> {
    let mut found = vec![FileMappings::default(); wanted.len()];
    let mut text = Vec::new();
    for number in 0.. {
        text.clear();
        let length = maps
            .by_ref()
            .take(LONGEST_LINE_BYTES)
            .read_until(b'\n', &mut text)
            .map_err(MapsError::Io)?;
        if length == 0 {
            return if number == 0 { Err(MapsError::Empty) } else { Ok(found) };
        }
        if number == MOST_LINES || length as u64 == LONGEST_LINE_BYTES {
            break;
        }
        // Bytes that are no text can only be in a path.
        let Some(line) = parse_line(&String::from_utf8_lossy(&text)) else { continue };
        if let Some(index) = wanted.iter().position(|file| file.id == line.file_id) {
            found[index].add(&line, wanted[index].pages);
            if found[index].shared.len() > MOST_PLACES {
                return Err(MapsError::TooManyPlaces(index));
            }
        }
    }
    Err(MapsError::TooLong)
}

impl FileMappings {
    /// Adds what a line shows of the file's pages.
    fn add(&mut self, line: &Line, pages: PageRange) {
        if !line.shared {
            self.private += 1;
            return;
        }
        let mapping = Mapping {
            address: line.start,
            first: line.offset / PAGE_SIZE,
            count: (line.end - line.start) / PAGE_SIZE,
        };
        let shown = mapping.pages().intersect(pages);
        if !shown.is_empty() {
            self.show(Mapping {
                address: mapping.address_of(shown.first),
                first: shown.first,
                count: shown.count,
            });
        }
    }

    /// Adds one, to the last where it goes on with it: the kernel cuts a mapping in pieces where
    /// parts of it are governed by a userfaultfd, and to the process they are one.
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
    let device = rustix::fs::makedev(
        u32::from_str_radix(major, 16).ok()?,
        u32::from_str_radix(minor, 16).ok()?,
    );
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

/// Cuts a block at each start and end of a mapping. The segments ascend; pages that are mapped
/// nowhere are in none, as they cannot be written.
///
/// Goes through the cuts in order and keeps the mappings that show the pages at hand: its cost is
/// that of sorting and of what it returns.
pub(super) fn segments_of(mappings: &[Mapping]) -> Vec<Segment> {
    let mut begins: Vec<usize> = (0..mappings.len()).collect();
    begins.sort_by_key(|&index| mappings[index].first);
    let mut cuts: Vec<u64> =
        mappings.iter().flat_map(|mapping| [mapping.first, mapping.pages().end()]).collect();
    cuts.sort_unstable();
    cuts.dedup();
    let mut begins = begins.into_iter().peekable();
    // Those that show the pages at hand, in the order that they were given in.
    let mut open: Vec<usize> = Vec::new();
    let mut segments = Vec::new();
    for pair in cuts.windows(2) {
        let pages = PageRange::between(pair[0], pair[1]);
        open.retain(|&index| mappings[index].pages().end() > pages.first);
        while let Some(index) = begins.next_if(|&index| mappings[index].first == pages.first) {
            let place = open.partition_point(|&other| other < index);
            open.insert(place, index);
        }
        if !open.is_empty() {
            let addresses =
                open.iter().map(|&index| mappings[index].address_of(pages.first)).collect();
            segments.push(Segment { pages, addresses });
        }
    }
    segments
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn mappings_of(maps: &str, id: (u64, u64), pages: PageRange) -> FileMappings {
        read_mappings(maps.as_bytes(), &[WantedFile { id, pages }]).unwrap().remove(0)
    }

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
    fn private_and_absent_mappings_are_distinguished() {
        let device = rustix::fs::makedev(0, 0x2a);
        let private = mappings_of(MAPS, (device, 1235), PageRange::new(0, 1));
        assert_eq!((private.shared.len(), private.private), (0, 1));
        let absent = mappings_of(MAPS, (device, 9), PageRange::new(0, 1));
        assert_eq!(absent, FileMappings::default());
    }

    #[test]
    fn pieces_of_a_mapping_are_merged() {
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

    /// Lines of a file that shows one page of the RAM at each second page of the address space.
    struct ScatteredMaps {
        lines: std::ops::Range<u64>,
        line: io::Cursor<String>,
        read: std::rc::Rc<std::cell::Cell<u64>>,
    }

    impl Read for ScatteredMaps {
        fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
            if self.line.position() == self.line.get_ref().len() as u64
                && let Some(number) = self.lines.next()
            {
                let start = 0x7f00_0000_0000 + 2 * number * PAGE_SIZE;
                let (end, offset) = (start + PAGE_SIZE, 2 * number * PAGE_SIZE);
                self.line = io::Cursor::new(format!(
                    "{start:x}-{end:x} rw-s {offset:08x} 00:2a 1234      /ram\n"
                ));
                self.read.set(number + 1);
            }
            self.line.read(into)
        }
    }

    fn scattered(lines: u64, inode: u64) -> (Result<Vec<FileMappings>, MapsError>, u64) {
        let read = std::rc::Rc::default();
        let maps = ScatteredMaps {
            lines: 0..lines,
            line: io::Cursor::default(),
            read: std::rc::Rc::clone(&read),
        };
        let id = (rustix::fs::makedev(0, 0x2a), inode);
        let wanted = [WantedFile { id, pages: PageRange::new(0, u64::MAX / PAGE_SIZE) }];
        (read_mappings(io::BufReader::new(maps), &wanted), read.get())
    }

    #[test]
    fn reading_stops_at_the_first_mapping_beyond_the_bound() {
        let (found, read) = scattered(12_000, 1234);
        assert!(matches!(found, Err(MapsError::TooManyPlaces(0))), "{found:?}");
        assert_eq!(read, MOST_PLACES as u64 + 1);
        let (found, _) = scattered(MOST_PLACES as u64, 1234);
        assert_eq!(found.unwrap()[0].shared.len(), MOST_PLACES);
    }

    #[test]
    fn a_file_without_end_is_read_up_to_the_bound() {
        // Of another file: no line of it is kept.
        let (found, read) = scattered(u64::MAX, 99);
        assert!(matches!(found, Err(MapsError::TooLong)), "{found:?}");
        assert!(read <= MOST_LINES as u64 + 1, "{read} lines were read");
        let found = read_mappings(io::BufReader::new(io::repeat(b'7')), &[]);
        assert!(matches!(found, Err(MapsError::TooLong)), "{found:?}");
        assert!(matches!(read_mappings(io::empty(), &[]), Err(MapsError::Empty)));
    }

    #[test]
    fn as_many_mappings_as_are_allowed_have_few_addresses() {
        let most = MOST_PLACES as u64;
        // The worst: each begins and ends within all that were before.
        let mappings: Vec<Mapping> = (0..most)
            .map(|at| Mapping { address: at << 40, first: at, count: 2 * (most - at) })
            .collect();
        let addresses: usize =
            segments_of(&mappings).iter().map(|segment| segment.addresses.len()).sum();
        assert!(addresses <= 2 * MOST_PLACES * MOST_PLACES, "{addresses}");
    }

    proptest! {
        #[test]
        fn each_mapped_page_is_in_one_segment_with_all_its_addresses(
            parts in prop::collection::vec((0..60u64, 1..40u64), 0..6)
        ) {
            let mappings: Vec<Mapping> = (1..)
                .zip(parts)
                .map(|(index, (first, count))| Mapping { address: index << 32, first, count })
                .collect();
            let segments = segments_of(&mappings);
            prop_assert!(
                segments.windows(2).all(|pair| pair[0].pages.end() <= pair[1].pages.first)
            );
            for page in 0..100 {
                let expected: Vec<u64> = mappings
                    .iter()
                    .filter(|mapping| mapping.pages().contains(page))
                    .map(|mapping| mapping.address_of(page))
                    .collect();
                let found: Vec<u64> = segments
                    .iter()
                    .filter(|segment| segment.pages.contains(page))
                    .flat_map(|segment| {
                        segment
                            .addresses
                            .iter()
                            .map(move |address| address + (page - segment.pages.first) * PAGE_SIZE)
                    })
                    .collect();
                prop_assert_eq!(found, expected);
            }
        }
    }
}
