//! The receiving half of a lane.

use std::time::Instant;

use godwit_ram::{PAGE_SIZE, PageRange, Region};
use godwit_wire::{
    Codec, Delta, Encoding, FrameHeader, HEADER_LEN, Kind, MAX_DEVICE_STATE_CHUNK, Message, PageRun,
    PagesHeader,
};

use crate::LaneError;
use crate::codec::{MAX_PIECE_BYTES, Unpacker};
use crate::link::Link;

/// Room for the largest payload that is read whole (device state, compressed pages), and for many small pages in one call.
const BUFFER_BYTES: usize = MAX_DEVICE_STATE_CHUNK as usize + HEADER_LEN;
const _: () = assert!(MAX_PIECE_BYTES <= BUFFER_BYTES);

/// What is taken in one go where pages can't be received straight: it stays in the CPU's cache until it is copied.
const COPY_BYTES: u64 = 128 * 1024;

/// With more than this to come, pages are received straight into guest memory.
const DIRECT_BYTES: u64 = 64 * 1024;

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
                self.skip(header.length as usize)?;
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

    /// Takes announced pages into guest memory.
    ///
    /// # Errors
    /// [`LaneError::OutOfBounds`] where the block does not have them; [`LaneError::Garbled`] where they can't be unpacked;
    /// else as [`StreamReceiver::receive`].
    pub fn pages(&mut self, region: &Region, header: PagesHeader) -> Result<(), LaneError> {
        let run = header.run;
        let range = PageRange { first: run.first, count: u64::from(run.count) };
        if run.first.saturating_add(range.count) > region.pages() {
            return Err(LaneError::OutOfBounds { block: run.block, first: run.first, count: range.count });
        }
        match header.encoding {
            Encoding::Raw => self.raw_pages(region, range),
            Encoding::Compressed { codec, bytes } => self.compressed_pages(region, run, codec, bytes),
        }
    }

    fn compressed_pages(
        &mut self,
        region: &Region,
        run: PageRun,
        codec: Codec,
        bytes: u32,
    ) -> Result<(), LaneError> {
        let (count, packed_bytes) = (u64::from(run.count), bytes as usize);
        self.fill(packed_bytes)?;
        let packed = &self.buffer[self.start..self.start + packed_bytes];
        let raw_bytes = usize::try_from(count * PAGE_SIZE).unwrap_or(usize::MAX);
        let garbled = LaneError::Garbled { block: run.block, first: run.first, count };
        let pages = self.unpacker.unpack(codec, packed, raw_bytes).ok_or(garbled)?;
        region.copy_in(run.first * PAGE_SIZE, pages).map_err(|error| LaneError::Memory(error.to_string()))?;
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

    fn raw_pages(&mut self, region: &Region, range: PageRange) -> Result<(), LaneError> {
        let mut offset = range.first * PAGE_SIZE;
        let end = offset + range.count * PAGE_SIZE;
        self.direct = end - offset > DIRECT_BYTES && self.link.plain().is_some();
        // What has been read already is copied; where much is left it goes straight into memory from the next page on.
        while offset < end {
            let left = end - offset;
            let direct = left > DIRECT_BYTES && self.link.plain().is_some();
            if self.start == self.end
                && direct
                && offset.is_multiple_of(PAGE_SIZE)
                && let Some(socket) = self.link.plain()
            {
                region.receive(socket, PageRange { first: offset / PAGE_SIZE, count: left / PAGE_SIZE })?;
                self.received_bytes += left;
                return Ok(());
            }
            let wanted = if direct { PAGE_SIZE - offset % PAGE_SIZE } else { left.min(COPY_BYTES) };
            let wanted = usize::try_from(wanted).unwrap_or(usize::MAX);
            let missing = wanted.saturating_sub(self.end - self.start);
            self.fill_up_to(if direct { 1 } else { wanted }, missing)?;
            let length = (self.end - self.start).min(usize::try_from(left).unwrap_or(usize::MAX));
            region
                .copy_in(offset, &self.buffer[self.start..self.start + length])
                .map_err(|error| LaneError::Memory(error.to_string()))?;
            self.start += length;
            offset += length as u64;
        }
        Ok(())
    }

    fn take<const N: usize>(&mut self) -> Result<&[u8; N], LaneError> {
        self.fill(N)?;
        let start = self.start;
        self.start += N;
        self.buffer[start..].first_chunk().ok_or(LaneError::Closed)
    }

    fn skip(&mut self, mut length: usize) -> Result<(), LaneError> {
        while length > 0 {
            self.fill(1)?;
            let taken = length.min(self.end - self.start);
            self.start += taken;
            length -= taken;
        }
        Ok(())
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
