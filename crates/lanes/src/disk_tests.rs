//! Parts of disks over loopback.

use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use godwit_types::{Lane, RateLimit};
use godwit_wire::{Codec, DiskBlocks, DiskBlocksHeader, DiskZeros, Message};

use crate::pacing::Pacing;
use crate::{DiskPart, Incoming, LaneError, Packing, Stream, UnitSent, accept, connect, listen};

const LIMIT: Duration = Duration::from_secs(60);
const OFFSET: u64 = 7 << 20;

fn streams() -> (Stream, Stream) {
    let listener = listen((Ipv4Addr::LOCALHOST, 0).into()).unwrap();
    let lane = Lane { from: None, to: listener.local_addr().unwrap() };
    (connect(lane, LIMIT).unwrap(), accept(&[listener], LIMIT).unwrap().unwrap())
}

/// Sends bytes of a disk and 1 MiB of zeros behind them. Returns what was sent, the fields of the
/// frames with bytes, and the bytes as they arrive.
fn sent(near: Stream, far: &Stream, bytes: &[u8], packing: Packing) -> (UnitSent, Arrived) {
    let zeros = OFFSET + bytes.len() as u64;
    let parts = [
        DiskPart::Blocks { offset: OFFSET, bytes },
        DiskPart::Zeros { offset: zeros, bytes: 1 << 20 },
    ];
    std::thread::scope(|scope| {
        let sending = scope.spawn(move || {
            let sent = near.sender().disk_parts(3, &parts, packing).unwrap();
            near.finish_sending();
            sent
        });
        let mut receiver = far.receiver();
        let (mut headers, mut all) = (Vec::new(), Vec::new());
        while let Ok(Incoming::Message(message)) = receiver.receive() {
            match message {
                Message::DiskBlocks(blocks) => {
                    assert_eq!(blocks.header.offset, OFFSET + all.len() as u64);
                    headers.push(blocks.header);
                    all.extend_from_slice(receiver.blocks(&blocks).unwrap());
                }
                message => {
                    let expected = DiskZeros { disk: 3, offset: zeros, bytes: 1 << 20 };
                    assert_eq!(message, Message::DiskZeros(expected));
                }
            }
        }
        (sending.join().unwrap(), (headers, all))
    })
}

type Arrived = (Vec<DiskBlocksHeader>, Vec<u8>);

/// Returns 256 KiB that compress, and more bytes that do not.
fn bytes() -> Vec<u8> {
    let mut state = 1_u64;
    let noise = std::iter::repeat_with(|| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 56) as u8
    });
    (0..256 << 10).map(|at: u32| (at >> 12).to_le_bytes()[0]).chain(noise.take(300_000)).collect()
}

#[test]
fn bytes_of_a_disk_arrive_compressed_where_that_pays() {
    for codec in [None, Some(Codec::Lz4), Some(Codec::Zstd)] {
        let (near, far) = streams();
        let packing = Packing { codec, ..Packing::default() };
        let (sent, (headers, arrived)) = sent(near, &far, &bytes(), packing);
        assert!(arrived == bytes(), "{codec:?}");
        let fields: Vec<_> = headers.iter().map(|one| (one.disk, one.raw_bytes)).collect();
        assert_eq!(fields, [(3, 256 << 10), (3, 256 << 10), (3, 300_000 - (256 << 10))]);
        let codecs: Vec<_> = headers.iter().map(|one| one.codec).collect();
        assert_eq!(codecs, [codec, None, None]);
        let pages = [sent.zero, sent.raw, sent.lz4, sent.zstd].map(|tally| tally.pages);
        let packed = if codec.is_some() { 64 } else { 0 };
        assert_eq!(pages.iter().sum::<u64>(), 256 + 64 + 74);
        assert_eq!((pages[0], pages[2] + pages[3]), (256, packed));
        let frames = [sent.zero, sent.raw, sent.lz4, sent.zstd].map(|tally| tally.wire_bytes);
        assert_eq!(sent.wire_bytes, frames.iter().sum::<u64>());
    }
}

#[test]
fn a_codec_is_tried_on_the_first_bytes() {
    let (near, far) = streams();
    let packing = Packing { probe: Some(Codec::Zstd), ..Packing::default() };
    let half = vec![1; 512 << 10];
    let (sent, (headers, arrived)) = sent(near, &far, &half, packing);
    assert!(arrived == half);
    let codecs: Vec<_> = headers.iter().map(|one| one.codec).collect();
    assert_eq!(codecs, [Some(Codec::Zstd), None]);
    assert_eq!(sent.zstd_effort.raw_bytes, 256 << 10);
}

#[test]
fn frames_of_a_disk_are_as_small_as_the_limit_asks_for() {
    let (near, far) = streams();
    let limit = "80mbit".parse::<RateLimit>().unwrap();
    let pace = Pacing::default().migration(limit).stream(IpAddr::from(Ipv4Addr::LOCALHOST));
    let (_, (headers, arrived)) =
        sent(near.paced(pace), &far, &bytes()[..100_000], Packing::default());
    assert!(arrived == bytes()[..100_000]);
    assert!(headers.iter().all(|one| one.raw_bytes <= 32 << 10), "{headers:?}");
}

#[test]
fn compressed_bytes_of_a_disk_that_are_not_what_they_claim_are_refused() {
    let (_near, far) = streams();
    let mut receiver = far.receiver();
    let raw = [7; 8192];
    let packed = [
        (Codec::Lz4, lz4_flex::block::compress(&raw)),
        (Codec::Zstd, zstd::bulk::compress(&raw, 1).unwrap()),
    ];
    for (codec, content) in packed {
        let header =
            DiskBlocksHeader { disk: 0, codec: Some(codec), raw_bytes: 8192, offset: 4096 };
        let blocks = DiskBlocks { header, content };
        assert_eq!(receiver.blocks(&blocks).unwrap(), raw);
        for raw_bytes in [8191, 8193, 262_144] {
            let header = DiskBlocksHeader { raw_bytes, ..header };
            let refused = DiskBlocks { header, content: blocks.content.clone() };
            let refused = receiver.blocks(&refused).map(<[u8]>::len);
            assert!(matches!(refused, Err(LaneError::GarbledBlocks { .. })), "{refused:?}");
        }
    }
}
