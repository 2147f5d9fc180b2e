//! A byte altered in transit is detected wherever it is, before its frame takes effect.

use std::io::Read;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::time::Duration;

use godwit_ram::{PAGE_SIZE, PageRange, Region};
use godwit_wire::{
    BlockRun, Codec, Delta, FrameHeader, HEADER_LEN, Kind, Message, PagesHeader, Place, References,
    WireError,
};
use proptest::prelude::*;
use proptest::test_runner::TestRunner;

use crate::{DiskPart, Incoming, LaneError, Packing, Stream, UnitPages, accept, connect, listen};
use godwit_types::Lane;

const LIMIT: Duration = Duration::from_secs(60);
const PAGES: u64 = 200;
/// Pages that leave in one frame and arrive directly in guest memory.
const LONG: PageRange = PageRange { first: 20, count: 40 };

fn region(folder: &tempfile::TempDir, name: &str) -> Region {
    Region::create(&folder.path().join(name), PAGES * PAGE_SIZE, None).unwrap()
}

fn page(region: &Region, page: u64) -> Vec<u8> {
    let mut bytes = vec![0; 4096];
    region.copy_out(page * PAGE_SIZE, &mut bytes).unwrap();
    bytes
}

/// Returns the bytes of a stream with frames of all shapes.
fn carried(from: &Region) -> Vec<u8> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let near = connect(Lane { from: None, to: listener.local_addr().unwrap() }, LIMIT).unwrap();
    let (mut far, _) = listener.accept().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| send_all_shapes(&near, from));
        let mut bytes = Vec::new();
        far.read_to_end(&mut bytes).unwrap();
        bytes
    })
}

fn send_all_shapes(near: &Stream, from: &Region) {
    let mut sender = near.sender();
    let runs = |runs: &[(u64, u64)]| -> Vec<PageRange> {
        runs.iter().map(|&(first, count)| PageRange { first, count }).collect()
    };
    let mut unit = |round, pages: &[PageRange], packing| {
        let zeros = runs(&[(199, 1)]);
        let unit = UnitPages { round, block: 0, region: from, pages, zeros: &zeros };
        sender.unit(&unit, packing, None).unwrap();
    };
    unit(0, &runs(&[(0, 1), (2, 3), (LONG.first, LONG.count)]), Packing::default());
    unit(1, &runs(&[(70, 16)]), Packing { codec: Some(Codec::Lz4), ..Packing::default() });
    unit(2, &runs(&[(90, 64)]), Packing { codec: Some(Codec::Zstd), ..Packing::default() });
    let parts = [
        DiskPart::Blocks { offset: 4096, bytes: &[5; 5000] },
        DiskPart::Zeros { offset: 65_536, bytes: 65_536 },
    ];
    for codec in [None, Some(Codec::Lz4)] {
        sender.disk_parts(1, &parts, Packing { codec, ..Packing::default() }).unwrap();
    }
    let place = Place { content: 1, block: 0, page: 7 };
    let references = References { round: 3, block: 0, first: 160, place, hashes: vec![[9; 32]; 3] };
    let delta = Delta { round: 3, block: 0, first: 170, bases: vec![5, 6], packed: vec![7; 900] };
    let missing = Message::Missing { runs: vec![BlockRun { block: 0, first: 3, count: 100 }] };
    let others = [
        Message::References(references),
        Message::Delta(delta),
        missing,
        Message::Padding { bytes: 9000 },
    ];
    others.iter().for_each(|message| sender.send(message).unwrap());
    sender.send(&Message::Commit { epoch: 7, incarnation: 0 }).unwrap();
    near.finish_sending();
}

/// Receives everything. Returns the messages and the announcements of pages before the end, and the
/// error that ended it.
fn taken(far: &Stream, to: &Region) -> (Vec<Incoming>, LaneError) {
    let mut receiver = far.receiver();
    let mut all = Vec::new();
    loop {
        match receiver.receive() {
            Ok(Incoming::Pages(header)) => {
                if let Err(error) = receiver.pages(to, header) {
                    return (all, error);
                }
                all.push(Incoming::Pages(header));
            }
            Ok(message) => all.push(message),
            Err(error) => return (all, error),
        }
    }
}

/// Returns what a receiver makes of these bytes.
fn received(bytes: &[u8], to: &Region) -> (Vec<Incoming>, LaneError) {
    let listener = listen((Ipv4Addr::LOCALHOST, 0).into()).unwrap();
    let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let far = accept(&[listener], LIMIT).unwrap().unwrap();
    let near = Stream::new(near).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // A receiver that detected an error reads no further.
            let _ = std::io::Write::write_all(&mut near.socket(), bytes);
            near.finish_sending();
        });
        let came = taken(&far, to);
        far.close();
        came
    })
}

/// Returns the offsets at which frames begin.
fn frames(bytes: &[u8]) -> Vec<usize> {
    let (mut starts, mut at) = (Vec::new(), 0);
    while at < bytes.len() {
        starts.push(at);
        let header = FrameHeader::parse(bytes[at..][..HEADER_LEN].try_into().unwrap()).unwrap();
        at += HEADER_LEN + header.length as usize;
    }
    starts
}

#[test]
fn a_changed_byte_is_noticed_and_has_no_effect() {
    let folder = tempfile::tempdir().unwrap();
    let from = region(&folder, "from");
    for number in 0..PAGES {
        from.copy_in(number * PAGE_SIZE, &(number + 1).to_le_bytes().repeat(512)).unwrap();
    }
    let bytes = carried(&from);
    let whole = region(&folder, "whole");
    let (expected, end) = received(&bytes, &whole);
    assert!(matches!(end, LaneError::Closed), "{end}");
    let kinds = [
        Kind::Pages,
        Kind::CompressedPages,
        Kind::Zeros,
        Kind::References,
        Kind::Delta,
        Kind::Padding,
        Kind::DiskBlocks,
        Kind::DiskZeros,
    ];
    let starts = frames(&bytes);
    assert!(kinds.iter().all(|kind| starts.iter().any(|at| bytes[*at] == *kind as u8)));
    let to = region(&folder, "to");
    // A frame, and an offset in it: as often in its first bytes as anywhere else.
    let place = (any::<prop::sample::Index>(), any::<bool>(), any::<prop::sample::Index>(), 1u8..);
    let mut runner = TestRunner::new(ProptestConfig::with_cases(300));
    runner
        .run(&place, |(frame, early, within, bits)| {
            to.zero(to.all_pages()).unwrap();
            let number = frame.index(starts.len());
            let ends = starts.get(number + 1).copied().unwrap_or(bytes.len());
            let length = ends - starts[number];
            let at = within.index(if early { length.min(PagesHeader::LEN) } else { length });
            let mut changed = bytes.clone();
            changed[starts[number] + at] ^= bits;
            let (came, end) = received(&changed, &to);
            prop_assert!(matches!(end, LaneError::Wire(WireError::Corrupted { .. })), "{end}");
            prop_assert_eq!(&came[..], &expected[..number], "frame {}, byte {}", number, at);
            // Pages that arrive directly in memory are verified there: only that frame's pages may
            // differ.
            let own = match expected[number] {
                Incoming::Pages(header) if at >= PagesHeader::LEN => {
                    header.run.first..header.run.first + u64::from(header.run.count)
                }
                _ => 0..0,
            };
            let straight = LONG.first..LONG.end();
            for number in
                (0..PAGES).filter(|number| !(own.contains(number) && straight.contains(number)))
            {
                let bytes = page(&to, number);
                prop_assert!(
                    bytes == page(&whole, number) || bytes == [0; 4096],
                    "page {}",
                    number
                );
            }
            Ok(())
        })
        .unwrap();
}
