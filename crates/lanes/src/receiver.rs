//! The receiving half of a stream.

use std::time::Instant;

use godwit_ram::{PAGE_SIZE, PageRange, RamError, Region};
use godwit_wire::{
    Checksum, Codec, Delta, DiskBlocks, DiskBlocksHeader, Encoding, FrameHeader, HEADER_LEN, Kind,
    MAX_DEVICE_STATE_CHUNK, MAX_DISK_BLOCKS, Message, PagesHeader, WireError, checksum,
};

use crate::LaneError;
use crate::codec::{MAX_PIECE_BYTES, Unpacker};
use crate::link::Link;

/// Room for what is read together with pages and precedes them: the end of the last unit, and the
/// frame's header. Without it, all pages that were read with it would move to the buffer's start.
const BEFORE_PAGES_BYTES: usize = 4096;
/// Room for the largest frame of pages, for the largest one that is read whole (device state,
/// blocks of a disk), and for many small pages in one call.
const BUFFER_BYTES: usize = BEFORE_PAGES_BYTES + MAX_PIECE_BYTES;
const _: () = assert!(HEADER_LEN + PagesHeader::LEN <= BEFORE_PAGES_BYTES);
const _: () = assert!(MAX_DISK_BLOCKS as usize + DiskBlocksHeader::LEN <= BUFFER_BYTES);
const _: () = assert!(MAX_DEVICE_STATE_CHUNK as usize + HEADER_LEN <= BUFFER_BYTES);

/// [`PAGE_SIZE`] as a `usize`, for offsets in buffers.
const PAGE_BYTES: usize = godwit_wire::PAGE_SIZE as usize;

/// If more than this many bytes are still to come, pages are received directly into guest memory.
const DIRECT_BYTES: u64 = 64 * 1024;
/// Pages received directly in one call; they are then checksummed from the CPU's cache.
const DIRECT_PAGES: u64 = DIRECT_BYTES / PAGE_SIZE;
/// Bytes of those pages that are checksummed at a time.
const SUM_BYTES: usize = 16 * 1024;

/// Error when received pages differ from those sent.
const CORRUPTED: WireError = WireError::Corrupted { what: "pages" };

/// Next item on a stream.
#[derive(Debug, PartialEq, Eq)]
pub enum Incoming {
    Message(Message),
    /// Pages that are still on the stream. [`StreamReceiver::pages`] must take them before anything
    /// else is read.
    Pages(PagesHeader),
}

/// The receiving half of a stream.
#[derive(Debug)]
pub struct StreamReceiver {
    link: Link,
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
    received_bytes: u64,
    unpacker: Unpacker,
    /// Buffer for checksumming pages that arrived directly in guest memory.
    scratch: Vec<u8>,
    /// Whether the last pages arrived directly in guest memory. The next ones probably will, and
    /// must not be read together with their header.
    direct: bool,
    /// Time after which nothing more is read.
    deadline: Option<Instant>,
}

impl StreamReceiver {
    pub(crate) fn new(link: Link) -> Self {
        StreamReceiver {
            link,
            buffer: vec![0; BUFFER_BYTES].into(),
            start: 0,
            end: 0,
            received_bytes: 0,
            unpacker: Unpacker::default(),
            scratch: Vec::new(),
            direct: false,
            deadline: None,
        }
    }

    /// Sets a deadline after which nothing more is read. A limit on silence alone gives a peer that
    /// sends byte by byte unlimited time.
    pub fn limit_time(&mut self, deadline: Option<Instant>) {
        self.deadline = deadline;
    }

    /// Returns the bytes read from the kernel so far.
    #[must_use]
    pub fn received_bytes(&self) -> u64 {
        self.received_bytes
    }

    /// Returns the next message, or the announcement of pages.
    ///
    /// # Errors
    /// [`LaneError`]: the stream is unusable afterwards.
    pub fn receive(&mut self) -> Result<Incoming, LaneError> {
        let at_most = if self.direct { PagesHeader::LEN } else { usize::MAX };
        self.fill_up_to(HEADER_LEN, at_most)?;
        let header = FrameHeader::parse(self.take::<HEADER_LEN>()?)?;
        self.direct &= header.kind != Kind::CompressedPages;
        match header.kind {
            Kind::Pages | Kind::CompressedPages => {
                let fields = *self.take::<{ PagesHeader::LEN - HEADER_LEN }>()?;
                match Message::decode(header, &fields)? {
                    Message::Pages(pages) => Ok(Incoming::Pages(pages)),
                    other => Ok(Incoming::Message(other)),
                }
            }
            Kind::Padding => {
                self.skip(header)?;
                Ok(Incoming::Message(Message::Padding { bytes: header.length }))
            }
            _ => {
                let length = header.length as usize;
                self.fill(length)?;
                let message =
                    Message::decode(header, &self.buffer[self.start..self.start + length])?;
                self.start += length;
                Ok(Incoming::Message(message))
            }
        }
    }

    /// Returns whether everything received has been taken: the next [`StreamReceiver::receive`]
    /// would block.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.start == self.end && self.link.is_idle()
    }

    /// Receives announced pages into guest memory. After an error the content of the pages is
    /// undefined: the old bytes, the new bytes, or parts of both.
    ///
    /// # Errors
    /// [`LaneError::OutOfBounds`] if the block does not have these pages, [`WireError::Corrupted`]
    /// if they differ from what was sent, [`LaneError::Garbled`] if they cannot be unpacked;
    /// otherwise as [`StreamReceiver::receive`].
    pub fn pages(&mut self, region: &Region, header: PagesHeader) -> Result<(), LaneError> {
        let run = header.run;
        let range = PageRange { first: run.first, count: u64::from(run.count) };
        if run.first.saturating_add(range.count) > region.pages() {
            return Err(LaneError::OutOfBounds {
                block: run.block,
                first: run.first,
                count: range.count,
            });
        }
        match header.encoding {
            Encoding::Raw if range.len_bytes() > DIRECT_BYTES && self.link.plain().is_some() => {
                self.pages_straight(region, range, header.sum)
            }
            Encoding::Raw => self.pages_by_buffer(region, range, header.sum),
            Encoding::Compressed { codec, bytes } => {
                self.compressed_pages(region, header, codec, bytes)
            }
        }
    }

    fn compressed_pages(
        &mut self,
        region: &Region,
        PagesHeader { run, sum, .. }: PagesHeader,
        codec: Codec,
        bytes: u32,
    ) -> Result<(), LaneError> {
        let (count, packed_bytes) = (u64::from(run.count), bytes as usize);
        self.fill(packed_bytes)?;
        let packed = &self.buffer[self.start..self.start + packed_bytes];
        if checksum(packed) != sum {
            return Err(CORRUPTED.into());
        }
        let raw_bytes = usize::try_from(count * PAGE_SIZE).unwrap_or(usize::MAX);
        let garbled = LaneError::Garbled { block: run.block, first: run.first, count };
        let pages = self.unpacker.unpack(codec, packed, raw_bytes).ok_or(garbled)?;
        copy_in(region, run.first * PAGE_SIZE, pages)?;
        self.start += packed_bytes;
        Ok(())
    }

    /// Returns the differences of a delta's pages: old pages XOR new pages.
    ///
    /// # Errors
    /// [`LaneError::Garbled`] if they cannot be unpacked.
    pub fn differences(&mut self, delta: &Delta) -> Result<&[u8], LaneError> {
        let &Delta { block, first, .. } = delta;
        let raw_bytes = usize::try_from(delta.count() * PAGE_SIZE).unwrap_or(usize::MAX);
        self.unpacker.unpack(Codec::Lz4, &delta.packed, raw_bytes).ok_or(LaneError::Garbled {
            block,
            first,
            count: delta.count(),
        })
    }

    /// Returns the bytes of a disk that these blocks hold.
    ///
    /// # Errors
    /// [`LaneError::GarbledBlocks`] if they cannot be unpacked.
    pub fn blocks<'a>(&'a mut self, blocks: &'a DiskBlocks) -> Result<&'a [u8], LaneError> {
        let DiskBlocksHeader { disk, codec, raw_bytes, offset } = blocks.header;
        let Some(codec) = codec else { return Ok(&blocks.content) };
        let unpacked = self.unpacker.unpack(codec, &blocks.content, raw_bytes as usize);
        unpacked.ok_or(LaneError::GarbledBlocks { disk, offset, bytes: raw_bytes })
    }

    /// Receives pages through the buffer: altered pages never reach guest memory.
    fn pages_by_buffer(
        &mut self,
        region: &Region,
        range: PageRange,
        sum: u32,
    ) -> Result<(), LaneError> {
        self.direct = false;
        let bytes = usize::try_from(range.len_bytes()).unwrap_or(usize::MAX);
        self.fill(bytes)?;
        let pages = &self.buffer[self.start..self.start + bytes];
        if checksum(pages) != sum {
            return Err(CORRUPTED.into());
        }
        copy_in(region, range.offset_bytes(), pages)?;
        self.start += bytes;
        Ok(())
    }

    /// Copies the part that was read already, receives the rest directly into memory, and verifies
    /// it there.
    fn pages_straight(
        &mut self,
        region: &Region,
        range: PageRange,
        sum: u32,
    ) -> Result<(), LaneError> {
        self.direct = true;
        let mut summed = Checksum::default();
        let read =
            (self.end - self.start).min(usize::try_from(range.len_bytes()).unwrap_or(usize::MAX));
        let ahead = read.next_multiple_of(PAGE_BYTES);
        self.fill_up_to(ahead, ahead - read)?;
        let pages = &self.buffer[self.start..self.start + ahead];
        summed.add(pages);
        copy_in(region, range.offset_bytes(), pages)?;
        self.start += ahead;
        let (_, rest) = range.split(ahead as u64 / PAGE_SIZE);
        self.scratch.resize(SUM_BYTES, 0);
        for piece in rest.chunks(DIRECT_PAGES) {
            let Some(socket) = self.link.plain() else { return Err(LaneError::Closed) };
            region.receive(socket, piece)?;
            self.received_bytes += piece.len_bytes();
            for part in piece.chunks((SUM_BYTES / PAGE_BYTES) as u64) {
                let length = usize::try_from(part.len_bytes()).unwrap_or(SUM_BYTES);
                let pages = self.scratch.get_mut(..length).unwrap_or_default();
                region.copy_data_out(part.offset_bytes(), pages).map_err(memory)?;
                summed.add(pages);
            }
        }
        if summed.value() == sum { Ok(()) } else { Err(CORRUPTED.into()) }
    }

    fn take<const N: usize>(&mut self) -> Result<&[u8; N], LaneError> {
        self.fill(N)?;
        let start = self.start;
        self.start += N;
        self.buffer[start..].first_chunk().ok_or(LaneError::Closed)
    }

    fn skip(&mut self, header: FrameHeader) -> Result<(), LaneError> {
        let (mut length, mut summed) = (header.length as usize, Checksum::default());
        while length > 0 {
            self.fill(1)?;
            let taken = length.min(self.end - self.start);
            summed.add(&self.buffer[self.start..self.start + taken]);
            self.start += taken;
            length -= taken;
        }
        if summed.value() == header.sum {
            Ok(())
        } else {
            Err(WireError::Corrupted { what: "padding" }.into())
        }
    }

    /// Reads until the buffer holds at least `length` bytes; `length` is at most [`BUFFER_BYTES`].
    fn fill(&mut self, length: usize) -> Result<(), LaneError> {
        self.fill_up_to(length, usize::MAX)
    }

    /// Reads until the buffer holds at least `length` bytes. Takes at most `at_most` bytes from the
    /// kernel, in any number of calls.
    fn fill_up_to(&mut self, length: usize, at_most: usize) -> Result<(), LaneError> {
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        } else if self.start + length > self.buffer.len() {
            self.buffer.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        let most_end = self.buffer.len().min(self.end.saturating_add(at_most));
        while self.end - self.start < length {
            if self.deadline.is_some_and(|deadline| Instant::now() > deadline) {
                return Err(std::io::Error::from(std::io::ErrorKind::TimedOut).into());
            }
            let read = match self.link.read(&mut self.buffer[self.end..most_end]) {
                Ok(0) => return Err(LaneError::Closed),
                Ok(read) => read,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error.into()),
            };
            self.end += read;
            self.received_bytes += read as u64;
        }
        Ok(())
    }
}

fn copy_in(region: &Region, offset_bytes: u64, from: &[u8]) -> Result<(), LaneError> {
    region.copy_in(offset_bytes, from).map_err(memory)
}

#[expect(clippy::needless_pass_by_value, reason = "the shape that map_err asks for")]
fn memory(error: RamError) -> LaneError {
    LaneError::Memory(error.to_string())
}
