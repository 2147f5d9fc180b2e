//! An open export: reads, writes, extents.
//!
//! One request at a time: who wants more of a server opens more connections. After an error,
//! nothing more is read or written over this one.

use std::io::{self, Read, Write};

use crate::error::NbdError;
use crate::handshake::{Agreed, negotiate};
use crate::words::{content_of, u16_of, u32_of, u64_of};

pub(crate) const REQUEST: u32 = 0x2560_9513;
pub(crate) const SIMPLE_REPLY: u32 = 0x6744_6698;
pub(crate) const CHUNK: u32 = 0x668e_33ef;
/// Commands.
const READ: u16 = 0;
const WRITE: u16 = 1;
const FLUSH: u16 = 3;
const WRITE_ZEROES: u16 = 6;
const BLOCK_STATUS: u16 = 7;
/// Flags of an export.
pub(crate) const READ_ONLY: u16 = 1 << 1;
pub(crate) const SENDS_FLUSH: u16 = 1 << 2;
pub(crate) const SENDS_ZEROES: u16 = 1 << 6;
/// Flag of the last chunk of a reply.
pub(crate) const LAST: u16 = 1;
/// Kinds of chunks.
pub(crate) const NONE: u16 = 0;
pub(crate) const OFFSET_DATA: u16 = 1;
pub(crate) const OFFSET_HOLE: u16 = 2;
pub(crate) const STATUS: u16 = 5;
pub(crate) const IS_ERROR: u16 = 1 << 15;
/// Longest chunk with an error: number, message, offset.
const MOST_ERROR_BYTES: u32 = 8 << 10;
/// Longest chunk with extents. QEMU sends 131,072 of them at most, 8 bytes each.
const MOST_STATUS_BYTES: u32 = 2 << 20;
/// Most bytes of one read or write. QEMU refuses more than 32 MiB.
const MOST_PART_BYTES: usize = 16 << 20;
/// Most bytes that one request makes zeros.
const MOST_ZEROED_BYTES: u64 = 1 << 30;
/// Most bytes whose extents one request lists: 32 bits, in whole clusters of any image.
const MOST_LISTED_BYTES: u64 = (1 << 32) - (2 << 20);
/// Most extents that are read for one list. A part of 16 GiB has no more with blocks of 4 KiB.
pub const MOST_EXTENTS: usize = 4 << 20;

/// Flag of an extent of `base:allocation`: it takes no space.
pub const HOLE: u32 = 1;
/// Flag of an extent of `base:allocation`: it reads as zeros.
pub const ZERO: u32 = 2;
/// Flag of an extent of `qemu:dirty-bitmap:NAME`: it was written.
pub const DIRTY: u32 = 1;
/// Value of an extent of `qemu:allocation-depth`: the image itself has it, not a backing file.
pub const TOP_LAYER: u32 = 1;

/// Part of a disk whose blocks are alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    pub offset: u64,
    pub bytes: u64,
    /// Flags, or a value, of its context.
    pub flags: u32,
}

/// An export whose disk is read or written.
#[derive(Debug)]
pub struct NbdExport<S> {
    stream: S,
    agreed: Agreed,
    cookie: u64,
}

/// Begin of a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reply {
    /// What was asked for is done; the data of a read follows.
    Done,
    /// A chunk, whose content follows.
    Chunk { is_last: bool, kind: u16, length: u32 },
}

impl<S: Read + Write> NbdExport<S> {
    /// Opens an export over a connected stream.
    ///
    /// # Errors
    /// The server refuses, or speaks another protocol.
    pub fn open(mut stream: S, name: &str) -> Result<NbdExport<S>, NbdError> {
        let agreed = negotiate(&mut stream, name, None)?;
        Ok(NbdExport { stream, agreed, cookie: 0 })
    }

    /// Opens an export with replies in chunks, so that holes are not transferred, and with
    /// metadata contexts (`base:allocation`, `qemu:allocation-depth`, `qemu:dirty-bitmap:NAME`).
    ///
    /// # Errors
    /// As [`NbdExport::open`]; also if the server lacks one of the contexts.
    pub fn open_with(
        mut stream: S,
        name: &str,
        contexts: &[&str],
    ) -> Result<NbdExport<S>, NbdError> {
        let agreed = negotiate(&mut stream, name, Some(contexts))?;
        Ok(NbdExport { stream, agreed, cookie: 0 })
    }

    /// Returns the size of the disk.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.agreed.bytes
    }

    /// Returns the stream, for its limits.
    pub fn stream_mut(&mut self) -> &mut S {
        &mut self.stream
    }

    /// Reads bytes of the disk.
    ///
    /// # Errors
    /// The server does not give them.
    pub fn read_at(&mut self, at: u64, buffer: &mut [u8]) -> Result<(), NbdError> {
        let mut at = at;
        for part in buffer.chunks_mut(MOST_PART_BYTES) {
            let length = u32::try_from(part.len()).map_err(io::Error::other)?;
            self.ask(READ, at, length)?;
            self.stream.flush()?;
            if self.agreed.is_structured {
                self.read_chunks(at, part)?;
            } else {
                self.end()?;
                self.stream.read_exact(part)?;
            }
            at = at.saturating_add(u64::from(length));
        }
        Ok(())
    }

    /// Writes bytes of the disk.
    ///
    /// # Errors
    /// The server does not write them, for example because its file system is full; or the export
    /// is read-only.
    pub fn write_at(&mut self, at: u64, bytes: &[u8]) -> Result<(), NbdError> {
        self.check_writable()?;
        let mut at = at;
        for part in bytes.chunks(MOST_PART_BYTES) {
            let length = u32::try_from(part.len()).map_err(io::Error::other)?;
            self.ask(WRITE, at, length)?;
            self.stream.write_all(part)?;
            self.stream.flush()?;
            self.end()?;
            at = at.saturating_add(u64::from(length));
        }
        Ok(())
    }

    /// Makes a part of the disk zeros. The server may make it a hole.
    ///
    /// # Errors
    /// As [`NbdExport::write_at`]; also if the server has no such command.
    pub fn write_zeroes(&mut self, at: u64, bytes: u64) -> Result<(), NbdError> {
        self.check_writable()?;
        if self.agreed.flags & SENDS_ZEROES == 0 {
            return Err(NbdError::Unsupported("write zeros"));
        }
        let (mut at, end) = (at, at.saturating_add(bytes));
        while at < end {
            let length =
                self.ask_range(WRITE_ZEROES, at, end.min(at.saturating_add(MOST_ZEROED_BYTES)))?;
            self.end()?;
            at = at.saturating_add(u64::from(length));
        }
        Ok(())
    }

    /// Waits until all that was written is on the server's disk.
    ///
    /// # Errors
    /// The server cannot write it, or has no such command.
    pub fn flush(&mut self) -> Result<(), NbdError> {
        if self.agreed.flags & SENDS_FLUSH == 0 {
            return Err(NbdError::Unsupported("flush"));
        }
        self.ask(FLUSH, 0, 0)?;
        self.stream.flush()?;
        self.end()
    }

    /// Returns all extents of a context in `[at, at + bytes)`, ascending, without gaps, those that
    /// are alike as one. `context`: its position in the names given to [`NbdExport::open_with`].
    /// It asks as often as it takes.
    ///
    /// # Errors
    /// The server does not give them; or there are more than [`MOST_EXTENTS`], which does not
    /// happen in a part of 16 GiB whose blocks have 4 KiB or more.
    pub fn extents(
        &mut self,
        context: usize,
        at: u64,
        bytes: u64,
    ) -> Result<Vec<Extent>, NbdError> {
        let number = self.agreed.contexts.get(context).copied();
        let number = number.ok_or(NbdError::Unsupported("list extents of that context"))?;
        let (mut at, end) = (at, at.saturating_add(bytes));
        let (mut found, mut read) = (Vec::<Extent>::new(), 0);
        while at < end {
            let listed = end.min(at.saturating_add(MOST_LISTED_BYTES));
            let length = self.ask_range(BLOCK_STATUS, at, listed)?;
            let limit = at + u64::from(length);
            let descriptors = self.descriptors(number)?;
            read += descriptors.len();
            if read > MOST_EXTENTS {
                return Err(NbdError::TooManyExtents);
            }
            for (length, flags) in descriptors {
                if length == 0 {
                    return Err(NbdError::Protocol("an extent is empty"));
                }
                if at >= limit {
                    return Err(NbdError::Protocol("its extents reach beyond the request"));
                }
                // The last one may reach beyond it.
                let bytes = u64::from(length).min(limit - at);
                match found.last_mut().filter(|last| last.flags == flags) {
                    Some(last) => last.bytes += bytes,
                    None => found.push(Extent { offset: at, bytes, flags }),
                }
                at += bytes;
            }
        }
        Ok(found)
    }

    fn check_writable(&self) -> Result<(), NbdError> {
        match self.agreed.flags & READ_ONLY {
            0 => Ok(()),
            _ => Err(NbdError::Unsupported("be written: it is read-only")),
        }
    }

    /// Sends the head of a request.
    fn ask(&mut self, command: u16, at: u64, length: u32) -> io::Result<()> {
        self.cookie += 1;
        let mut request = REQUEST.to_be_bytes().to_vec();
        request.extend([0; 2]);
        request.extend(command.to_be_bytes());
        request.extend(self.cookie.to_be_bytes());
        request.extend(at.to_be_bytes());
        request.extend(length.to_be_bytes());
        self.stream.write_all(&request)
    }

    /// Sends a request without data for `[at, end)`; returns its length.
    fn ask_range(&mut self, command: u16, at: u64, end: u64) -> io::Result<u32> {
        let length = u32::try_from(end.saturating_sub(at)).map_err(io::Error::other)?;
        self.ask(command, at, length)?;
        self.stream.flush()?;
        Ok(length)
    }

    /// Reads the begin of a reply.
    fn reply(&mut self) -> Result<Reply, NbdError> {
        let other = NbdError::Protocol("it replies to another request");
        match u32_of(&mut self.stream)? {
            SIMPLE_REPLY => {
                let error = u32_of(&mut self.stream)?;
                if u64_of(&mut self.stream)? != self.cookie {
                    return Err(other);
                }
                if error == 0 { Ok(Reply::Done) } else { Err(NbdError::Server(error)) }
            }
            CHUNK if self.agreed.is_structured => {
                let (flags, kind) = (u16_of(&mut self.stream)?, u16_of(&mut self.stream)?);
                if u64_of(&mut self.stream)? != self.cookie {
                    return Err(other);
                }
                let length = u32_of(&mut self.stream)?;
                if kind & IS_ERROR != 0 {
                    return Err(self.error(length));
                }
                Ok(Reply::Chunk { is_last: flags & LAST != 0, kind, length })
            }
            _ => Err(NbdError::Protocol("unexpected reply")),
        }
    }

    /// Reads a chunk with an error.
    fn error(&mut self, length: u32) -> NbdError {
        if !(4..=MOST_ERROR_BYTES).contains(&length) {
            return NbdError::Protocol("the length of an error is wrong");
        }
        match content_of(&mut self.stream, length) {
            Ok(content) => match content.first_chunk() {
                Some(number) => NbdError::Server(u32::from_be_bytes(*number)),
                None => NbdError::Protocol("an error is cut"),
            },
            Err(error) => NbdError::Io(error),
        }
    }

    /// Reads a reply without data.
    fn end(&mut self) -> Result<(), NbdError> {
        match self.reply()? {
            Reply::Done | Reply::Chunk { is_last: true, kind: NONE, length: 0 } => Ok(()),
            Reply::Chunk { .. } => Err(NbdError::Protocol("unexpected reply")),
        }
    }

    /// Reads the chunks of a read. They must follow each other, as those of QEMU do.
    fn read_chunks(&mut self, at: u64, buffer: &mut [u8]) -> Result<(), NbdError> {
        let mut filled = 0;
        loop {
            let Reply::Chunk { is_last, kind, length } = self.reply()? else {
                return Err(NbdError::Protocol("unexpected reply"));
            };
            if (kind, is_last, length) != (NONE, true, 0) {
                let next = at.saturating_add(filled as u64);
                filled += self.read_chunk((kind, length), next, &mut buffer[filled..])?;
            }
            if is_last {
                break;
            }
        }
        if filled < buffer.len() {
            return Err(NbdError::Protocol("its answer is too short"));
        }
        Ok(())
    }

    /// Reads a chunk with data or a hole, which must begin at `next`; returns how much of the disk
    /// it is.
    fn read_chunk(
        &mut self,
        (kind, length): (u16, u32),
        next: u64,
        rest: &mut [u8],
    ) -> Result<usize, NbdError> {
        if !matches!((kind, length), (OFFSET_DATA, _) | (OFFSET_HOLE, 12)) {
            return Err(NbdError::Protocol("unexpected reply"));
        }
        let at = u64_of(&mut self.stream)?;
        let bytes = match kind {
            OFFSET_HOLE => u32_of(&mut self.stream)?,
            _ => length.saturating_sub(8),
        } as usize;
        match rest.get_mut(..bytes) {
            Some(part) if at == next && bytes > 0 => match kind {
                OFFSET_HOLE => part.fill(0),
                _ => self.stream.read_exact(part)?,
            },
            _ => return Err(NbdError::Protocol("its answer is not that of the request")),
        }
        Ok(bytes)
    }

    /// Reads the reply to a request for extents: lengths and flags of the context with that number.
    fn descriptors(&mut self, number: u32) -> Result<Vec<(u32, u32)>, NbdError> {
        let mut found = None;
        // A chunk for each context, and one without content.
        for _ in 0..=self.agreed.contexts.len() {
            let Reply::Chunk { is_last, kind, length } = self.reply()? else {
                return Err(NbdError::Protocol("unexpected reply"));
            };
            match kind {
                STATUS if length > MOST_STATUS_BYTES => {
                    return Err(NbdError::Protocol("its answer is too long"));
                }
                STATUS if length >= 12 && length % 8 == 4 => {
                    let context = u32_of(&mut self.stream)?;
                    let content = content_of(&mut self.stream, length - 4)?;
                    if context == number && found.replace(content).is_some() {
                        return Err(NbdError::Protocol("it answers twice"));
                    }
                }
                NONE if is_last && length == 0 => {}
                _ => return Err(NbdError::Protocol("unexpected reply")),
            }
            if is_last {
                let found = found.ok_or(NbdError::Protocol("it does not list a context"))?;
                return Ok(found.chunks_exact(8).map(descriptor).collect());
            }
        }
        Err(NbdError::Protocol("its answer does not end"))
    }
}

/// Returns length and flags.
fn descriptor(bytes: &[u8]) -> (u32, u32) {
    let word = |at: usize| {
        let word = bytes.get(at..at + 4).and_then(|word| word.try_into().ok());
        word.map_or(0, u32::from_be_bytes)
    };
    (word(0), word(4))
}
