//! Complete stream of frames through the receiving half of a lane, into memory.

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::sync::OnceLock;

use godwit_lanes::{Incoming, LaneError, StreamReceiver, fuzzing};
use godwit_ram::{PAGE_SIZE, PageRange, Region};
use godwit_wire::{
    Codec, Encoding, FrameHeader, Kind, MAX_PAGES_PER_FRAME, Message, PageRun, PagesHeader,
    checksum,
};

const PAGES: u64 = 100;
/// Capacity of a socket that nobody reads, in bytes.
const SOCKET_BYTES: usize = 64 << 10;
/// Longest stream that is built, in bytes.
const MOST_BYTES: usize = 600 << 10;

pub fn run(data: &[u8]) {
    let bytes = frames(data);
    let (near, far) = UnixStream::pair().expect("a pair");
    let mut receiver = fuzzing::receiver(far.into());
    if bytes.len() <= SOCKET_BYTES {
        send(&near, &bytes);
        drop(near);
        return receive(&mut receiver);
    }
    let sending = std::thread::spawn(move || send(&near, &bytes));
    receive(&mut receiver);
    drop(receiver);
    // Waits for the thread itself and not only for its work, as a scope would: memory held until
    // then is not a leak.
    sending.join().expect("the sender does not panic");
}

fn send(mut near: &UnixStream, bytes: &[u8]) {
    // A receiver that found an error reads no further.
    let _ = near.write_all(bytes);
}

/// Returns the memory for pages, shared by all runs.
fn region() -> &'static Region {
    static REGION: OnceLock<Region> = OnceLock::new();
    REGION.get_or_init(|| {
        let folder = tempfile::tempdir().expect("a folder");
        let region =
            Region::create(&folder.path().join("memory"), PAGES * PAGE_SIZE, None).expect("a file");
        region.allocate(PageRange { first: 0, count: PAGES }).expect("memory");
        region
    })
}

fn receive(receiver: &mut StreamReceiver) {
    let region = region();
    let mut one = || -> Result<(), LaneError> {
        match receiver.receive()? {
            Incoming::Pages(header) => {
                let end = header.run.first.saturating_add(u64::from(header.run.count));
                let taken = receiver.pages(region, header);
                assert!(taken.is_err() || end <= PAGES, "pages outside memory were taken");
                taken
            }
            Incoming::Message(Message::Delta(delta)) => {
                let bytes = receiver.differences(&delta)?.len() as u64;
                assert_eq!(bytes, delta.count() * PAGE_SIZE);
                Ok(())
            }
            Incoming::Message(Message::DiskBlocks(blocks)) => {
                let bytes = receiver.blocks(&blocks)?.len();
                assert_eq!(bytes, blocks.header.raw_bytes as usize);
                Ok(())
            }
            Incoming::Message(_) => Ok(()),
        }
    };
    while one().is_ok() {}
}

/// Builds frames from the data, mostly with correct checksums and an error elsewhere.
fn frames(data: &[u8]) -> Vec<u8> {
    let (mut data, mut bytes) = (Input(data), Vec::new());
    while let Some(code) = data.u8() {
        let start = bytes.len();
        match Kind::from_code(code & 0x3f) {
            Some(kind @ (Kind::Pages | Kind::CompressedPages)) => {
                put_pages(kind, &mut data, &mut bytes)
            }
            Some(kind) => {
                let payload = data.some();
                let length = u32::try_from(payload.len()).unwrap_or(u32::MAX);
                bytes.extend(FrameHeader { kind, length, sum: checksum(payload) }.to_bytes());
                bytes.extend(payload);
            }
            // Unchanged.
            None => bytes.extend(data.some()),
        }
        // A byte changes, or the frame ends early.
        let length = bytes.len() - start;
        let at = usize::from(data.u16()) % length.max(1);
        match code >> 6 {
            1 if length > 0 => bytes[start + at] ^= data.u8().unwrap_or(1),
            2 => bytes.truncate(start + at),
            _ => {}
        }
        if bytes.len() >= MOST_BYTES {
            break;
        }
    }
    bytes
}

fn put_pages(kind: Kind, data: &mut Input<'_>, bytes: &mut Vec<u8>) {
    let [first, count, block, codec] = [(); 4].map(|()| data.u8().unwrap_or(0));
    let count = u32::from(count) % (MAX_PAGES_PER_FRAME + 2);
    let run = PageRun { block: u16::from(block), first: u64::from(first), count };
    let some = data.some();
    let (encoding, content) = if kind == Kind::Pages {
        let length = (u64::from(count) * PAGE_SIZE) as usize;
        (Encoding::Raw, filled(some, length))
    } else {
        let codec = if codec % 2 == 0 { Codec::Lz4 } else { Codec::Zstd };
        let length = u32::try_from(some.len()).unwrap_or(u32::MAX);
        (Encoding::Compressed { codec, bytes: length }, some.to_vec())
    };
    bytes.extend(PagesHeader { round: 0, run, encoding, sum: checksum(&content) }.to_bytes());
    bytes.extend(content);
}

/// Returns `length` bytes that repeat `some` and others.
fn filled(some: &[u8], length: usize) -> Vec<u8> {
    let mut bytes = [some, &[7]].concat();
    while bytes.len() < length {
        bytes.extend_from_within(..(length - bytes.len()).min(bytes.len()));
    }
    bytes.truncate(length);
    bytes
}

/// Reader of the instructions.
struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    fn u8(&mut self) -> Option<u8> {
        let (first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*first)
    }

    fn u16(&mut self) -> u16 {
        u16::from_le_bytes([self.u8().unwrap_or(0), self.u8().unwrap_or(0)])
    }

    /// Returns as many bytes as its next two bytes specify.
    fn some(&mut self) -> &'a [u8] {
        let length = usize::from(self.u16()).min(self.0.len());
        let (some, rest) = self.0.split_at(length);
        self.0 = rest;
        some
    }
}
