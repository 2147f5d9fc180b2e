//! Content of lies: well-formed frames with correct checksums, filled from a seed.

use godwit_wire::{
    Begin, BlockRun, Codec, DISK_UNIT_BYTES, Delta, Digests, DiskBlocks, DiskBlocksHeader,
    DiskMissing, DiskReferences, DiskZeros, Encoding, FrameHeader, HEADER_LEN, Kind,
    MAX_PAGES_PER_FRAME, Message, MigrationId, PAGE_SIZE, PageRun, PagedIn, PagesEnd, PagesHeader,
    Place, References, Running, SUPPORTED, WAIT_CLASSES, Zeros, checksum,
};

use crate::random::Random;

/// Number of message kinds that are drawn.
const KINDS: usize = 35;
/// Largest frame of random bytes, where its kind allows so few.
const MOST_FUZZ_BYTES: u32 = 8192;

/// Returns the bytes of a frame: a message of any kind with small or arbitrary numbers, or random
/// bytes as a frame of any kind. `Refused` and `Abort` are left out, because they would be no lie.
pub(super) fn anything(random: &mut Random) -> Vec<u8> {
    match random.below(KINDS + 8) {
        kind if kind < KINDS => message(kind, random),
        drawn if drawn < KINDS + 4 => pages(random),
        _ => fuzz(random),
    }
}

/// Returns a message of any kind except pages.
fn message(kind: usize, random: &mut Random) -> Vec<u8> {
    let stream = u16::try_from(random.number() % 1100).unwrap_or(0);
    let message = match kind {
        0 => Message::Welcome { version: stream },
        1 => Message::Begin(Begin {
            epoch: random.number(),
            incarnation: u128::from(random.number() % 2),
            run: true,
            block_pages: vec![random.number()],
        }),
        2 => Message::Ready,
        3 => Message::Zeros(Zeros { round: stream.into(), runs: runs(random) }),
        4 => Message::UnitEnd,
        5 => Message::UnitsApplied { stream, units: random.number() },
        6 => Message::CloseStream { stream },
        7 => Message::StreamClosed { stream, units: random.number() },
        8 => Message::PagesEnd(PagesEnd {
            pages: random.number(),
            units: vec![random.number(); random.below(4)],
        }),
        9 => Message::Ping { sent_ns: random.number() },
        10 => Message::Pong { sent_ns: random.number(), answered_ns: random.number() },
        11 => Message::DeviceState(bytes(random, 1000)),
        12 => Message::DeviceStateEnd { bytes: random.number() },
        13 => Message::Commit { epoch: 2, incarnation: 0 },
        14 => Message::Running(Running {
            commit_ns: 1,
            loaded_ns: random.number(),
            running_ns: random.number(),
        }),
        15 => Message::Padding { bytes: 1 + u32::from(stream) },
        16 => Message::Missing { runs: runs(random) },
        17 => Message::PreparePageIn,
        18 => Message::PageInReady { able: random.below(2) == 0 },
        19 => Message::Remaining { runs: runs(random) },
        20 => Message::RemainingEnd { pages: random.number() },
        21 | 22 => Message::Fetch { runs: runs(random) },
        23 => Message::References(references(random)),
        24 => Message::Delta(delta(random)),
        25 => Message::Digests(Digests {
            place: place(random),
            prefixes: (0..1 + random.below(64)).map(|_| random.number()).collect(),
        }),
        26 => Message::PagedIn(Box::new(paged_in(random))),
        27 => Message::DiskBlocks(disk_blocks(random)),
        28 => Message::DiskZeros(DiskZeros {
            disk: stream % 3,
            offset: random.number() / 2,
            bytes: 1 + random.number() / 2,
        }),
        29 => Message::DiskMark { mark: random.number() },
        30 => Message::DiskMarked { mark: random.number() },
        31 => Message::DiskEnd { streams: 1 + stream % 4, mark: random.number() },
        32 => Message::DiskReferences(disk_references(random)),
        33 => Message::DiskMissing(DiskMissing {
            disk: stream % 3,
            units: 1 + stream,
            offset: unit_offset(random),
        }),
        _ => Message::Hello { versions: SUPPORTED, migration: MigrationId([0x5a; 16]), stream },
    };
    let mut frame = Vec::new();
    message.encode(&mut frame);
    frame
}

fn runs(random: &mut Random) -> Vec<BlockRun> {
    let run = |random: &mut Random| BlockRun {
        block: block(random),
        first: random.number(),
        count: random.number().max(1),
    };
    (0..1 + random.below(5)).map(|_| run(random)).collect()
}

/// Returns a block number. The guest has one block.
fn block(random: &mut Random) -> u16 {
    u16::from(random.below(4) == 0)
}

fn round(random: &mut Random) -> u32 {
    u32::try_from(random.number()).unwrap_or(u32::MAX)
}

fn bytes(random: &mut Random, most: usize) -> Vec<u8> {
    let count = 1 + random.below(most);
    random.bytes(count)
}

fn place(random: &mut Random) -> Place {
    Place {
        content: u16::try_from(random.below(3)).unwrap_or(0),
        block: block(random),
        page: random.number(),
    }
}

fn references(random: &mut Random) -> References {
    let (round, block, first) = (round(random), block(random), random.number());
    let place = place(random);
    let hashes = (0..1 + random.below(4))
        .map(|_| std::array::from_fn(|_| u8::try_from(random.below(256)).unwrap_or(0)))
        .collect();
    References { round, block, first, place, hashes }
}

fn delta(random: &mut Random) -> Delta {
    let (round, block, first) = (round(random), block(random), random.number());
    let bases: Vec<u64> = (0..1 + random.below(4)).map(|_| random.number()).collect();
    let packed = bytes(random, Delta::most_packed_bytes(bases.len()));
    Delta { round, block, first, bases, packed }
}

fn disk_blocks(random: &mut Random) -> DiskBlocks {
    let content = bytes(random, 1000);
    let raw_bytes = u32::try_from(content.len()).unwrap_or(1);
    let offset = random.number() / 2;
    DiskBlocks { header: DiskBlocksHeader { disk: 0, codec: None, raw_bytes, offset }, content }
}

fn disk_references(random: &mut Random) -> DiskReferences {
    let hashes = vec![[7; 32]; 1 + random.below(4)];
    DiskReferences { disk: 0, offset: unit_offset(random), hashes }
}

/// Returns the offset of a unit of a disk.
fn unit_offset(random: &mut Random) -> u64 {
    random.number() / 2 / u64::from(DISK_UNIT_BYTES) * u64::from(DISK_UNIT_BYTES)
}

fn paged_in(random: &mut Random) -> PagedIn {
    let mut waits = [0; WAIT_CLASSES];
    waits.iter_mut().for_each(|wait| *wait = random.number());
    PagedIn { pages: random.number(), demanded: random.number(), waits, ..PagedIn::default() }
}

/// Returns a frame of pages, raw or marked as compressed. Its checksums match its random bytes.
fn pages(random: &mut Random) -> Vec<u8> {
    // From one page to the limit of a frame.
    let most = if random.below(8) == 0 { MAX_PAGES_PER_FRAME } else { 4 };
    let count = 1 + u32::try_from(random.next() % u64::from(most)).unwrap_or(0);
    let raw_bytes = count * PAGE_SIZE;
    let (encoding, content_bytes) = match random.below(3) {
        0 => (Encoding::Raw, raw_bytes),
        number => {
            let bytes = 1 + u32::try_from(random.next() % u64::from(raw_bytes - 1)).unwrap_or(0);
            (Encoding::Compressed { codec: Codec::ALL[number - 1], bytes }, bytes)
        }
    };
    let content = random.bytes(content_bytes as usize);
    let run = PageRun { block: block(random), first: random.number(), count };
    let header = PagesHeader { round: round(random), run, encoding, sum: checksum(&content) };
    [&header.to_bytes()[..], &content].concat()
}

/// Returns random bytes as a frame's payload, of a length that its kind allows.
fn fuzz(random: &mut Random) -> Vec<u8> {
    let kinds: Vec<Kind> = Kind::ALL
        .iter()
        .copied()
        .filter(|kind| !matches!(kind, Kind::Refused | Kind::Abort))
        .collect();
    let kind = kinds[random.below(kinds.len())];
    let (least, most) = kind.bounds();
    let most = most.min(MOST_FUZZ_BYTES.max(least));
    let length = least + u32::try_from(random.next() % u64::from(most - least + 1)).unwrap_or(0);
    let mut payload = random.bytes(length as usize);
    let mut summed = payload.len();
    if matches!(kind, Kind::Pages | Kind::CompressedPages) {
        // The checksum covers the fields. The last field is the checksum of the content after them.
        summed = PagesHeader::LEN - HEADER_LEN;
        let sum = checksum(&payload[summed..]).to_le_bytes();
        payload[summed - sum.len()..summed].copy_from_slice(&sum);
    }
    let header = FrameHeader { kind, length, sum: checksum(&payload[..summed]) };
    [&header.to_bytes()[..], &payload].concat()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_lie_is_a_frame_whose_checksums_are_right() {
        let mut random = Random::new(7);
        let mut kinds = BTreeSet::new();
        for _ in 0..4000 {
            let frame = anything(&mut random);
            let head: [u8; HEADER_LEN] = frame[..HEADER_LEN].try_into().unwrap();
            let header = FrameHeader::parse(&head).unwrap();
            assert_eq!(frame.len(), HEADER_LEN + header.length as usize, "{header:?}");
            let is_pages = matches!(header.kind, Kind::Pages | Kind::CompressedPages);
            let summed = if is_pages { PagesHeader::LEN } else { frame.len() };
            assert_eq!(checksum(&frame[HEADER_LEN..summed]), header.sum, "{header:?}");
            if is_pages {
                let sum = u32::from_le_bytes(frame[summed - 4..summed].try_into().unwrap());
                assert_eq!(checksum(&frame[summed..]), sum, "{header:?}");
            }
            kinds.insert(header.kind as u8);
        }
        assert_eq!(kinds.len(), Kind::ALL.len() - 2, "all but Refused and Abort: {kinds:?}");
    }
}
