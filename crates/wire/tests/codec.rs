//! Every message survives encoding and decoding, and no bytes from a peer do harm.

#![allow(clippy::unwrap_used)] // a helper of tests may fail the test

use godwit_wire::{
    Begin, BlockRun, Checksum, Codec, DISK_UNIT_BYTES, Delta, Digests, DiskBlocks,
    DiskBlocksHeader, DiskMissing, DiskReferences, DiskZeros, Encoding, FrameHeader, HEADER_LEN,
    Kind, MAX_BLOCKS, MAX_DISK_BLOCKS, MAX_DISK_REFERENCES, MAX_DISKS, MAX_PAGES_PER_FRAME,
    MAX_REFERENCES, MAX_STREAMS, Message, MigrationId, PAGE_SIZE, PageRun, PagedIn, PagesEnd,
    PagesHeader, Place, Reason, References, Running, VersionRange, WAIT_CLASSES, WireError, Zeros,
    checksum,
};
use proptest::prelude::*;

fn header_of(frame: &[u8]) -> Result<FrameHeader, WireError> {
    FrameHeader::parse(frame[..HEADER_LEN].try_into().unwrap())
}

fn decode(frame: &[u8]) -> Result<Message, WireError> {
    Message::decode(header_of(frame)?, &frame[HEADER_LEN..])
}

/// Decodes a frame that its sender altered: the checksums are correct.
fn decode_sealed(frame: &[u8]) -> Result<Message, WireError> {
    let payload = &frame[HEADER_LEN..];
    Message::decode(FrameHeader { sum: checksum(payload), ..header_of(frame)? }, payload)
}

fn runs() -> impl Strategy<Value = Vec<BlockRun>> {
    let run = (0..MAX_BLOCKS, 0..1u64 << 40, 1..1u64 << 40);
    prop::collection::vec(
        run.prop_map(|(block, first, count)| BlockRun { block, first, count }),
        1..200,
    )
}

fn reason() -> impl Strategy<Value = Reason> {
    (any::<u16>(), "[ -~äöü]{0,200}").prop_map(|(code, detail)| Reason { code, detail })
}

fn compressed_pages() -> impl Strategy<Value = PagesHeader> {
    let run = (0..MAX_BLOCKS, 0..1u64 << 50, 1..=MAX_PAGES_PER_FRAME);
    (any::<u32>(), run, prop::sample::select(Codec::ALL.to_vec()), 0.0..1.0f64, any::<u32>())
        .prop_map(|(round, (block, first, count), codec, part, sum)| {
            #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // below 2^18
            let bytes = 1 + (part * f64::from(count * PAGE_SIZE - 1)) as u32;
            let encoding = Encoding::Compressed { codec, bytes };
            PagesHeader { round, run: PageRun { block, first, count }, encoding, sum }
        })
}

fn place() -> impl Strategy<Value = Place> {
    (any::<u16>(), 0..MAX_BLOCKS, 0..1u64 << 50).prop_map(|(content, block, page)| Place {
        content,
        block,
        page,
    })
}

fn references() -> impl Strategy<Value = References> {
    let hashes = prop::collection::vec(any::<[u8; 32]>(), 1..=MAX_REFERENCES as usize);
    (any::<u32>(), 0..MAX_BLOCKS, 0..1u64 << 50, place(), hashes).prop_map(
        |(round, block, first, place, hashes)| References { round, block, first, place, hashes },
    )
}

fn delta() -> impl Strategy<Value = Delta> {
    let bases = prop::collection::vec(any::<u64>(), 1..=MAX_PAGES_PER_FRAME as usize);
    let packed = prop::collection::vec(any::<u8>(), 1..2000);
    (any::<u32>(), 0..MAX_BLOCKS, 0..1u64 << 50, bases, packed).prop_map(
        |(round, block, first, bases, packed)| Delta { round, block, first, bases, packed },
    )
}

fn paged_in() -> impl Strategy<Value = PagedIn> {
    (any::<[u64; 7]>(), any::<[u64; WAIT_CLASSES]>()).prop_map(|(numbers, waits)| {
        let [pages, demanded, cuts, median_ns, p90_ns, p99_ns, most_ns] = numbers;
        PagedIn { pages, demanded, cuts, median_ns, p90_ns, p99_ns, most_ns, waits }
    })
}

fn disk_blocks() -> impl Strategy<Value = DiskBlocks> {
    let content = prop::collection::vec(any::<u8>(), 1..2000);
    let codec = prop::option::of(prop::sample::select(Codec::ALL.to_vec()));
    (0..MAX_DISKS, codec, 0..1u64 << 50, 1..MAX_DISK_BLOCKS - 2000, content).prop_map(
        |(disk, codec, offset, more, content)| {
            let bytes = u32::try_from(content.len()).unwrap();
            let raw_bytes = if codec.is_some() { bytes + more } else { bytes };
            DiskBlocks { header: DiskBlocksHeader { disk, codec, raw_bytes, offset }, content }
        },
    )
}

fn incarnation() -> impl Strategy<Value = u128> {
    prop_oneof![Just(0), any::<u128>()]
}

fn message() -> impl Strategy<Value = Message> {
    prop_oneof![
        (any::<u16>(), any::<u16>(), any::<[u8; 16]>(), any::<u16>()).prop_map(
            |(oldest, newest, id, stream)| {
                Message::Hello {
                    versions: VersionRange { oldest, newest },
                    migration: MigrationId(id),
                    stream,
                }
            }
        ),
        any::<u16>().prop_map(|version| Message::Welcome { version }),
        (
            any::<u64>(),
            incarnation(),
            any::<bool>(),
            prop::collection::vec(any::<u64>(), 1..usize::from(MAX_BLOCKS))
        )
            .prop_map(|(epoch, incarnation, run, block_pages)| Message::Begin(Begin {
                epoch,
                incarnation,
                run,
                block_pages
            })),
        Just(Message::Ready),
        (any::<u32>(), 0..MAX_BLOCKS, 0..1u64 << 50, 1..=MAX_PAGES_PER_FRAME, any::<u32>())
            .prop_map(|(round, block, first, count, sum)| Message::Pages(PagesHeader {
                round,
                run: PageRun { block, first, count },
                encoding: Encoding::Raw,
                sum
            })),
        compressed_pages().prop_map(Message::Pages),
        (any::<u32>(), runs()).prop_map(|(round, runs)| Message::Zeros(Zeros { round, runs })),
        Just(Message::UnitEnd),
        (any::<u16>(), any::<u64>())
            .prop_map(|(stream, units)| Message::UnitsApplied { stream, units }),
        any::<u16>().prop_map(|stream| Message::CloseStream { stream }),
        (any::<u16>(), any::<u64>())
            .prop_map(|(stream, units)| Message::StreamClosed { stream, units }),
        (any::<u64>(), prop::collection::vec(any::<u64>(), 0..usize::from(MAX_STREAMS)))
            .prop_map(|(pages, units)| Message::PagesEnd(PagesEnd { pages, units })),
        any::<u64>().prop_map(|sent_ns| Message::Ping { sent_ns }),
        (any::<u64>(), any::<u64>())
            .prop_map(|(sent_ns, answered_ns)| Message::Pong { sent_ns, answered_ns }),
        prop::collection::vec(any::<u8>(), 1..2000).prop_map(Message::DeviceState),
        any::<u64>().prop_map(|bytes| Message::DeviceStateEnd { bytes }),
        (any::<u64>(), incarnation())
            .prop_map(|(epoch, incarnation)| Message::Commit { epoch, incarnation }),
        (any::<u64>(), any::<u64>(), any::<u64>()).prop_map(
            |(commit_ns, loaded_ns, running_ns)| {
                Message::Running(Running { commit_ns, loaded_ns, running_ns })
            }
        ),
        reason().prop_map(Message::Refused),
        reason().prop_map(Message::Abort),
        (1..5000u32).prop_map(|bytes| Message::Padding { bytes }),
        references().prop_map(Message::References),
        runs().prop_map(|runs| Message::Missing { runs }),
        (place(), prop::collection::vec(any::<u64>(), 1..500))
            .prop_map(|(place, prefixes)| Message::Digests(Digests { place, prefixes })),
        delta().prop_map(Message::Delta),
        Just(Message::PreparePageIn),
        any::<bool>().prop_map(|able| Message::PageInReady { able }),
        runs().prop_map(|runs| Message::Remaining { runs }),
        any::<u64>().prop_map(|pages| Message::RemainingEnd { pages }),
        runs().prop_map(|runs| Message::Fetch { runs }),
        paged_in().prop_map(|figures| Message::PagedIn(Box::new(figures))),
        of_disks(),
    ]
}

fn of_disks() -> impl Strategy<Value = Message> {
    prop_oneof![
        disk_blocks().prop_map(Message::DiskBlocks),
        (0..MAX_DISKS, 0..1u64 << 60, 1..1u64 << 60).prop_map(|(disk, offset, bytes)| {
            Message::DiskZeros(DiskZeros { disk, offset, bytes })
        }),
        any::<u64>().prop_map(|mark| Message::DiskMark { mark }),
        any::<u64>().prop_map(|mark| Message::DiskMarked { mark }),
        (1..=MAX_STREAMS, any::<u64>())
            .prop_map(|(streams, mark)| Message::DiskEnd { streams, mark }),
        disk_references().prop_map(Message::DiskReferences),
        (0..MAX_DISKS, 1..=u16::MAX, 0..1u64 << 40).prop_map(|(disk, units, unit)| {
            let offset = unit * u64::from(DISK_UNIT_BYTES);
            Message::DiskMissing(DiskMissing { disk, units, offset })
        }),
    ]
}

fn disk_references() -> impl Strategy<Value = DiskReferences> {
    let hashes = prop::collection::vec(any::<[u8; 32]>(), 1..=MAX_DISK_REFERENCES as usize);
    (0..MAX_DISKS, 0..1u64 << 40, hashes).prop_map(|(disk, unit, hashes)| {
        let offset = unit * u64::from(DISK_UNIT_BYTES);
        DiskReferences { disk, offset, hashes }
    })
}

proptest! {
    #[test]
    fn every_message_survives(message in message()) {
        let mut frame = Vec::new();
        message.encode(&mut frame);
        prop_assert_eq!(decode(&frame)?, message);
    }

    #[test]
    fn arbitrary_payloads_never_panic(
        code in 0u8..45,
        payload in prop::collection::vec(any::<u8>(), 0..300),
    ) {
        if let Some(kind) = Kind::from_code(code) {
            let length = u32::try_from(payload.len()).unwrap();
            let header = FrameHeader { kind, length, sum: checksum(&payload) };
            if let Ok(header) = FrameHeader::parse(&header.to_bytes()) {
                let _ = Message::decode(header, &payload);
            }
        }
    }

    #[test]
    fn a_changed_byte_is_noticed(
        message in message(),
        at in any::<prop::sample::Index>(),
        bits in 1u8..,
    ) {
        let mut frame = Vec::new();
        message.encode(&mut frame);
        let at = at.index(frame.len());
        frame[at] ^= bits;
        let decoded = decode(&frame);
        prop_assert!(matches!(decoded, Err(WireError::Corrupted { .. })), "byte {at}: {decoded:?}");
        // The header is judged alone: its length field is valid before the payload has arrived.
        prop_assert_eq!(header_of(&frame).is_err(), at < HEADER_LEN);
    }

    #[test]
    fn the_checksum_is_that_of_the_standard(
        bytes in prop::collection::vec(any::<u8>(), 0..3000),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..4),
    ) {
        prop_assert_eq!(checksum(&bytes), by_the_standard(&bytes));
        let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut.index(bytes.len() + 1)).collect();
        cuts.sort_unstable();
        let (mut summed, mut from) = (Checksum::default(), 0);
        for to in cuts.into_iter().chain([bytes.len()]) {
            summed.add(&bytes[from..to]);
            from = to;
        }
        prop_assert_eq!(summed.value(), checksum(&bytes));
    }

    #[test]
    fn a_cut_or_lengthened_payload_is_an_error(message in message(), cut in 1usize..8) {
        let mut frame = Vec::new();
        message.encode(&mut frame);
        let header = header_of(&frame)?;
        // Byte strings end where the frame ends, so a shorter one is another valid one.
        let open_ended = matches!(
            header.kind,
            Kind::DeviceState
                | Kind::Refused
                | Kind::Abort
                | Kind::Padding
                | Kind::Zeros
                | Kind::Missing
                | Kind::Ready
                | Kind::UnitEnd
                | Kind::PreparePageIn
                | Kind::Remaining
                | Kind::Fetch
        ) || matches!(&message, Message::DiskBlocks(blocks) if blocks.header.codec.is_some());
        if !open_ended {
            let payload = &frame[HEADER_LEN..];
            let decode = |payload: &[u8]| {
                Message::decode(FrameHeader { sum: checksum(payload), ..header }, payload)
            };
            prop_assert!(decode(&payload[..payload.len().saturating_sub(cut)]).is_err());
            let longer = [payload, &[0u8; 1]].concat();
            prop_assert!(decode(&longer).is_err());
        }
    }
}

/// Computes CRC-32C bit by bit, least significant first (RFC 3720, appendix B.4).
fn by_the_standard(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0, |sum, byte| {
        (0..8).fold(sum ^ u32::from(*byte), |sum, _| {
            (sum >> 1) ^ (0x82f6_3b78 & 0u32.wrapping_sub(sum & 1))
        })
    })
}

#[test]
fn the_checksum_is_that_of_the_standards_examples() {
    // RFC 3720, appendix B.4.
    assert_eq!(checksum(&[0; 32]), 0x8a91_36aa);
    assert_eq!(checksum(&[0xff; 32]), 0x62a8_ab43);
    assert_eq!(checksum(&Vec::from_iter(0..32)), 0x46dd_794e);
    // Long inputs use other code paths of the processor.
    let long: Vec<u8> =
        (0..75_000_u32).flat_map(|i| i.wrapping_mul(2_654_435_761).to_le_bytes()).collect();
    for length in [4096, 65_535, 65_536, 262_144, 300_000] {
        assert_eq!(checksum(&long[..length]), by_the_standard(&long[..length]), "{length} bytes");
    }
}

#[test]
fn lengths_out_of_bounds_are_refused_before_anything_is_read() {
    for &kind in Kind::ALL {
        let (least, most) = kind.bounds();
        for length in
            [least.checked_sub(1), most.checked_add(1), Some(u32::MAX)].into_iter().flatten()
        {
            let bytes = FrameHeader { kind, length, sum: 0 }.to_bytes();
            assert!(
                matches!(FrameHeader::parse(&bytes), Err(WireError::BadLength { .. })),
                "{kind:?} {length}"
            );
        }
    }
}

#[test]
fn compressed_pages_that_can_not_be_are_refused() {
    let header = |count, bytes| PagesHeader {
        round: 1,
        run: PageRun { block: 0, first: 7, count },
        encoding: Encoding::Compressed { codec: Codec::Zstd, bytes },
        sum: 0,
    };
    assert!(decode(&header(1, PAGE_SIZE - 1).to_bytes()).is_ok());
    assert!(decode(&header(MAX_PAGES_PER_FRAME, 5).to_bytes()).is_ok());
    // Not smaller than the pages; no pages; too many pages; no content.
    for (count, bytes) in [
        (1, PAGE_SIZE),
        (2, 3 * PAGE_SIZE),
        (0, 1),
        (MAX_PAGES_PER_FRAME + 1, 9),
        (u32::MAX, 9),
        (1, 0),
    ] {
        assert!(
            decode(&header(count, bytes).to_bytes()).is_err(),
            "{count} pages in {bytes} bytes"
        );
    }
    let known = header(4, 100).to_bytes();
    // The codec and the reserved byte get invalid values.
    for (place, values) in [(6, [0, 3].as_slice()), (7, [1].as_slice())] {
        for &value in values {
            let mut frame = known;
            frame[HEADER_LEN + place] = value;
            assert!(
                matches!(decode_sealed(&frame), Err(WireError::BadValue { .. })),
                "byte {place} = {value}"
            );
        }
    }
    let mut last = known;
    last[HEADER_LEN + 8..][..8].copy_from_slice(&u64::MAX.to_le_bytes());
    assert!(decode_sealed(&last).is_err());
    // A raw frame names no codec.
    let mut raw = PagesHeader { encoding: Encoding::Raw, ..header(1, 0) }.to_bytes();
    assert!(decode(&raw).is_ok());
    raw[HEADER_LEN + 6] = 1;
    assert!(decode_sealed(&raw).is_err());
}

#[test]
fn references_that_can_not_be_are_refused() {
    let place = Place { content: 3, block: 1, page: 9 };
    let good = References { round: 1, block: 0, first: 7, place, hashes: vec![[5; 32]; 3] };
    let frame = |references: &References| {
        let mut frame = Vec::new();
        Message::References(references.clone()).encode(&mut frame);
        frame
    };
    assert!(decode(&frame(&good)).is_ok());
    let bad = [
        References { block: MAX_BLOCKS, ..good.clone() },
        References { place: Place { block: MAX_BLOCKS, ..place }, ..good.clone() },
        References { first: u64::MAX - 1, ..good.clone() },
        References { place: Place { page: u64::MAX - 1, ..place }, ..good.clone() },
    ];
    for references in bad {
        assert!(
            matches!(decode(&frame(&references)), Err(WireError::BadValue { .. })),
            "{references:?}"
        );
    }
    // A count that differs from the number of hashes.
    let mut frame = frame(&good);
    frame[HEADER_LEN + 28] = 2;
    assert!(matches!(decode_sealed(&frame), Err(WireError::Unread { .. })));
}

#[test]
fn deltas_that_can_not_be_are_refused() {
    let good = Delta {
        round: 1,
        block: 0,
        first: 7,
        bases: vec![5; 2],
        packed: vec![9; PAGE_SIZE as usize],
    };
    let frame = |delta: &Delta| {
        let mut frame = Vec::new();
        Message::Delta(delta.clone()).encode(&mut frame);
        frame
    };
    assert!(decode(&frame(&good)).is_ok());
    let bad = [
        Delta { block: MAX_BLOCKS, ..good.clone() },
        Delta { first: u64::MAX - 1, ..good.clone() },
        // More than half of the pages' bytes.
        Delta { packed: vec![9; PAGE_SIZE as usize + 1], ..good.clone() },
    ];
    for delta in bad {
        assert!(matches!(decode(&frame(&delta)), Err(WireError::BadValue { .. })), "{delta:?}");
    }
    for (at, value) in [(6, 2), (7, 1), (16, 0), (16, 65)] {
        let mut frame = frame(&good);
        frame[HEADER_LEN + at] = value;
        assert!(matches!(decode_sealed(&frame), Err(WireError::BadValue { .. })), "{at}");
    }
}

#[test]
fn parts_of_disks_that_can_not_be_are_refused() {
    let header = DiskBlocksHeader { disk: 1, codec: None, raw_bytes: 512, offset: 4096 };
    let frame = |header: DiskBlocksHeader, content: usize| {
        let mut frame = Vec::new();
        Message::DiskBlocks(DiskBlocks { header, content: vec![7; content] }).encode(&mut frame);
        frame
    };
    let whole = frame(header, 512);
    assert_eq!(whole[..DiskBlocksHeader::LEN], header.to_bytes(&[7; 512]));
    assert!(decode(&whole).is_ok());
    let lz4 = DiskBlocksHeader { codec: Some(Codec::Lz4), ..header };
    assert!(decode(&frame(lz4, 511)).is_ok());
    let most = DiskBlocksHeader { raw_bytes: MAX_DISK_BLOCKS, ..header };
    assert!(decode(&frame(most, MAX_DISK_BLOCKS as usize)).is_ok());
    // Another length; no smaller than the blocks; no blocks; too many; no content; no such disk;
    // beyond any disk's end.
    for (header, content) in [
        (header, 511),
        (header, 513),
        (lz4, 512),
        (DiskBlocksHeader { raw_bytes: 0, ..lz4 }, 1),
        (DiskBlocksHeader { raw_bytes: MAX_DISK_BLOCKS + 1, ..lz4 }, 1),
        (DiskBlocksHeader { raw_bytes: u32::MAX, ..lz4 }, 1),
        (lz4, 0),
        (DiskBlocksHeader { disk: MAX_DISKS, ..header }, 512),
        (DiskBlocksHeader { offset: u64::MAX - 511, ..header }, 512),
    ] {
        assert!(decode(&frame(header, content)).is_err(), "{header:?}, {content} bytes");
    }
    // The codec and the reserved byte get invalid values.
    for (place, value) in [(2, 3), (3, 1)] {
        let mut frame = whole.clone();
        frame[HEADER_LEN + place] = value;
        assert!(matches!(decode_sealed(&frame), Err(WireError::BadValue { .. })), "byte {place}");
    }
    let zeros = DiskZeros { disk: 0, offset: 0, bytes: 1 };
    for message in [
        Message::DiskZeros(DiskZeros { disk: MAX_DISKS, ..zeros }),
        Message::DiskZeros(DiskZeros { bytes: 0, ..zeros }),
        Message::DiskZeros(DiskZeros { offset: u64::MAX, ..zeros }),
        Message::DiskEnd { streams: 0, mark: 1 },
        Message::DiskEnd { streams: MAX_STREAMS + 1, mark: 1 },
    ] {
        let mut frame = Vec::new();
        message.encode(&mut frame);
        assert!(matches!(decode(&frame), Err(WireError::BadValue { .. })), "{message:?}");
    }
}

#[test]
fn references_to_parts_that_no_disk_has_are_refused() {
    let unit = u64::from(DISK_UNIT_BYTES);
    let frame = |message: Message| {
        let mut frame = Vec::new();
        message.encode(&mut frame);
        frame
    };
    let references = DiskReferences { disk: 1, offset: 3 * unit, hashes: vec![[7; 32]; 2] };
    let missing = DiskMissing { disk: 1, units: 0b10_0001, offset: 3 * unit };
    assert_eq!(references.bytes(), 2 * unit);
    assert_eq!(missing.positions().collect::<Vec<_>>(), [0, 5]);
    let named = |change: &dyn Fn(&mut DiskReferences)| {
        let mut references = references.clone();
        change(&mut references);
        frame(Message::DiskReferences(references))
    };
    let most = MAX_DISK_REFERENCES as usize;
    assert!(decode(&named(&|all| all.hashes = vec![[7; 32]; most])).is_ok());
    assert!(decode(&frame(Message::DiskMissing(missing))).is_ok());
    // No hash, or too many; no such disk; not where a unit begins; beyond any disk's end.
    for bad in [
        named(&|none| none.hashes.clear()),
        named(&|many| many.hashes = vec![[7; 32]; most + 1]),
        named(&|other| other.disk = MAX_DISKS),
        named(&|apart| apart.offset += 512),
        named(&|far| far.offset = u64::MAX - unit + 1),
        frame(Message::DiskMissing(DiskMissing { units: 0, ..missing })),
        frame(Message::DiskMissing(DiskMissing { disk: MAX_DISKS, ..missing })),
        frame(Message::DiskMissing(DiskMissing { offset: 1, ..missing })),
        frame(Message::DiskMissing(DiskMissing { offset: u64::MAX - unit + 1, ..missing })),
    ] {
        assert!(decode(&bad).is_err(), "{bad:?}");
    }
    // A part of a hash is none.
    let mut cut = named(&|_| {});
    cut.pop();
    let payload = u32::try_from(cut.len() - HEADER_LEN).unwrap();
    let header = FrameHeader {
        kind: Kind::DiskReferences,
        length: payload,
        sum: checksum(&cut[HEADER_LEN..]),
    };
    assert!(Message::decode(header, &cut[HEADER_LEN..]).is_err());
}

#[test]
fn an_absent_incarnation_takes_no_bytes() {
    let frame = |incarnation| {
        let mut frame = Vec::new();
        Message::Commit { epoch: 2, incarnation }.encode(&mut frame);
        frame
    };
    assert_eq!(frame(0).len(), HEADER_LEN + 8, "as older releases expect it");
    assert_eq!(frame(7).len(), HEADER_LEN + 24);
    let mut zero = frame(7);
    zero[HEADER_LEN + 8] = 0;
    assert!(matches!(decode_sealed(&zero), Err(WireError::BadValue { .. })));
}

#[test]
fn a_run_of_zero_pages_costs_a_few_bytes() {
    let mut frame = Vec::new();
    let run = BlockRun { block: 0, first: 12_345, count: 250_000 };
    Message::Zeros(Zeros { round: 0, runs: vec![run] }).encode(&mut frame);
    assert!(frame.len() <= HEADER_LEN + 4 + 6, "{} bytes", frame.len());
}

#[test]
fn more_runs_than_a_frame_holds_are_split() {
    let all: Vec<_> =
        (0..50_000).map(|i| BlockRun { block: 1, first: i * 3_000_000, count: 1 }).collect();
    let (mut rest, mut seen) = (all.as_slice(), Vec::new());
    while !rest.is_empty() {
        let mut frame = Vec::new();
        let taken = Message::Zeros(Zeros { round: 7, runs: rest.to_vec() }).encode(&mut frame);
        assert!(taken > 0);
        let Message::Zeros(zeros) = decode(&frame).unwrap() else { panic!("not zeros") };
        assert_eq!(zeros.runs.len(), taken);
        seen.extend(zeros.runs);
        rest = &rest[taken..];
    }
    assert_eq!(seen, all);
}

#[test]
fn another_protocol_is_recognized() {
    let mut frame = Vec::new();
    let versions = VersionRange { oldest: 1, newest: 1 };
    Message::Hello { versions, migration: MigrationId([7; 16]), stream: 0 }.encode(&mut frame);
    frame[HEADER_LEN] = b'X';
    assert_eq!(decode_sealed(&frame), Err(WireError::NotOurs));
}

#[test]
fn migration_ids_survive_text() {
    let id = MigrationId(*b"0123456789abcdef");
    assert_eq!(id.to_string().parse(), Ok(id));
    for bad in ["", "0", "zz", &"g".repeat(32), &"ä".repeat(16)] {
        assert!(bad.parse::<MigrationId>().is_err());
    }
}

#[test]
fn a_peers_text_holds_no_control_characters() {
    let mut frame = Vec::new();
    Message::Abort(Reason { code: 1, detail: "a\x1b[31mb\nc".into() }).encode(&mut frame);
    let Message::Abort(reason) = decode(&frame).unwrap() else { panic!("not an abort") };
    assert_eq!(reason.detail, "a [31mb c");
}
