//! The receiving half of a lane.

use std::time::Instant;

use godwit_ram::{PAGE_SIZE, PageRange, RamError, Region};
use godwit_wire::{
    Checksum, Codec, Delta, Encoding, FrameHeader, HEADER_LEN, Kind, MAX_DEVICE_STATE_CHUNK, Message,
    PagesHeader, WireError, checksum,
};

use crate::LaneError;
use crate::codec::{MAX_PIECE_BYTES, Unpacker};
use crate::link::Link;

/// Room for the largest payload that is read whole (device state, the pages of a frame), and for many small pages in one call.
const BUFFER_BYTES: usize = MAX_DEVICE_STATE_CHUNK as usize + HEADER_LEN;
const _: () = assert!(MAX_PIECE_BYTES <= BUFFER_BYTES);

/// [`PAGE_SIZE`], for places in buffers.
const PAGE_BYTES: usize = godwit_wire::PAGE_SIZE as usize;

/// With more than this to come, pages are received straight into guest memory.
const DIRECT_BYTES: u64 = 64 * 1024;
/// Pages received straight in one call, which are then summed up from the CPU's cache,
const DIRECT_PAGES: u64 = DIRECT_BYTES / PAGE_SIZE;
/// and what of them is summed up in one go.
const SUM_BYTES: usize = 16 * 1024;

/// What came of pages is not what was sent.
const CORRUPTED: WireError = WireError::Corrupted { what: "pages" };

/// What comes next on a lane.
#[derive(Debug, PartialEq, Eq)]
pub enum Incoming {
    /// A message.
    Message(Message),
    /// Pages, still on the lane: [`StreamReceiver::pages`] must take them before anything else is read.
    Pages(PagesHeader),
}

/// The receiving half of a lane.
#[derive(Debug)]
pub struct StreamReceiver {
    link: Link,
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
    received_bytes: u64,
    unpacker: Unpacker,
    /// What pages that came straight into guest memory are summed up in.
    scratch: Vec<u8>,
    /// The last pages came straight into guest memory: the next probably will, and are not to be read with their header.
    direct: bool,
    /// After this nothing more is read.
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

    /// From `deadline` on nothing more is read: a limit on silence alone lets a peer that sends byte by byte take its time.
    pub fn limit_time(&mut self, deadline: Option<Instant>) {
        self.deadline = deadline;
    }

    /// Bytes taken from the kernel so far.
    #[must_use]
    pub fn received_bytes(&self) -> u64 {
        self.received_bytes
    }

    /// The next message, or the announcement of pages.
    ///
    /// # Errors
    /// [`LaneError`]: the lane is unusable afterwards.
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
                let message = Message::decode(header, &self.buffer[self.start..self.start + length])?;
                self.start += length;
                Ok(Incoming::Message(message))
            }
        }
    }

    /// Whether nothing more has come than was taken: the next [`StreamReceiver::receive`] would wait.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.start == self.end && self.link.is_idle()
    }

    /// Takes announced pages into guest memory. After an error the pages hold anything: what they held, what came, or parts of both.
    ///
    /// # Errors
    /// [`LaneError::OutOfBounds`] where the block does not have them, [`WireError::Corrupted`] where they are not what was sent;
    /// [`LaneError::Garbled`] where they can't be unpacked; else as [`StreamReceiver::receive`].
    pub fn pages(&mut self, region: &Region, header: PagesHeader) -> Result<(), LaneError> {
        let run = header.run;
        let range = PageRange { first: run.first, count: u64::from(run.count) };
        if run.first.saturating_add(range.count) > region.pages() {
            return Err(LaneError::OutOfBounds { block: run.block, first: run.first, count: range.count });
        }
        match header.encoding {
            Encoding::Raw if range.len_bytes() > DIRECT_BYTES && self.link.plain().is_some() => {
                self.pages_straight(region, range, header.sum)
            }
            Encoding::Raw => self.pages_by_buffer(region, range, header.sum),
            Encoding::Compressed { codec, bytes } => self.compressed_pages(region, header, codec, bytes),
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

    /// What differs in a delta's pages from what was sent before: old pages XOR new ones.
    ///
    /// # Errors
    /// [`LaneError::Garbled`] where it can't be unpacked.
    pub fn differences(&mut self, delta: &Delta) -> Result<&[u8], LaneError> {
        let &Delta { block, first, .. } = delta;
        let raw_bytes = usize::try_from(delta.count() * PAGE_SIZE).unwrap_or(usize::MAX);
        self.unpacker.unpack(Codec::Lz4, &delta.packed, raw_bytes).ok_or(LaneError::Garbled {
            block,
            first,
            count: delta.count(),
        })
    }

    /// What is not what was sent never gets into guest memory.
    fn pages_by_buffer(&mut self, region: &Region, range: PageRange, sum: u32) -> Result<(), LaneError> {
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

    /// What has been read already is copied; the rest goes straight into memory, and is judged there.
    fn pages_straight(&mut self, region: &Region, range: PageRange, sum: u32) -> Result<(), LaneError> {
        self.direct = true;
        let mut summed = Checksum::default();
        let read = (self.end - self.start).min(usize::try_from(range.len_bytes()).unwrap_or(usize::MAX));
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

    /// Reads until at least `length` bytes are buffered; `length` is bounded by [`BUFFER_BYTES`].
    fn fill(&mut self, length: usize) -> Result<(), LaneError> {
        self.fill_up_to(length, usize::MAX)
    }

    /// The same, with no more than `at_most` bytes taken from the kernel in one call.
    fn fill_up_to(&mut self, length: usize, at_most: usize) -> Result<(), LaneError> {
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        } else if self.start + length > self.buffer.len() {
            self.buffer.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        while self.end - self.start < length {
            if self.deadline.is_some_and(|deadline| Instant::now() > deadline) {
                return Err(std::io::Error::from(std::io::ErrorKind::TimedOut).into());
            }
            let room = self.buffer.len().min(self.end.saturating_add(at_most));
            let read = match self.link.read(&mut self.buffer[self.end..room]) {
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
