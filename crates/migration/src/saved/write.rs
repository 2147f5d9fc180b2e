//! Saves a guest to a file.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use godwit_lanes::{Compressor, MAX_PIECE_BYTES};
use godwit_ram::{PAGE_SIZE, PageRange, Region};
use godwit_wire::Codec;

use crate::saved::format::{Footer, Form, MOST_PIECE_PAGES, PIECE_BYTES, Part, Piece, checksum};
use crate::saved::{Progress, STRIDE_PAGES, SavedError, in_threads};

/// Bytes that a thread collects before it writes them.
const BUFFER_BYTES: usize = 1 << 20;
/// Codec of the pieces. A saved guest waits on a disk, which is slower than zstd on the cores of a
/// host, and it stays there longer than it is written.
const CODEC: Codec = Codec::Zstd;

/// Writes the memory of a guest that does not run, then its device state.
#[derive(Debug)]
pub struct GuestWriter {
    file: File,
    index: Vec<u8>,
    data_bytes: u64,
    content_bytes: u64,
}

/// Sizes of a saved guest, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WrittenGuest {
    /// Pages that are not all zero.
    pub content_bytes: u64,
    /// The whole file.
    pub file_bytes: u64,
}

/// What one thread has written.
#[derive(Default)]
struct Share {
    index: Vec<u8>,
    content_bytes: u64,
}

impl GuestWriter {
    /// Writes all pages of `regions` that are not all zero to the empty `file`, in `threads`
    /// threads. The guest must not run.
    ///
    /// # Errors
    /// The file takes no more, the memory cannot be read, or `progress` was cancelled. The file is
    /// then of no use.
    pub fn save_memory(
        file: File,
        regions: &[Arc<Region>],
        threads: usize,
        progress: &Progress,
    ) -> Result<GuestWriter, SavedError> {
        let strides: Vec<(u32, PageRange)> = (0..)
            .zip(regions)
            .flat_map(|(block, region)| {
                region.all_pages().chunks(STRIDE_PAGES).map(move |stride| (block, stride))
            })
            .collect();
        let (next, end_bytes) = (AtomicU64::new(0), AtomicU64::new(0));
        let shares = in_threads(threads, || {
            let mut writer = PieceWriter::new(&file, &end_bytes);
            loop {
                let taken = next.fetch_add(1, Ordering::Relaxed);
                let taken = usize::try_from(taken).unwrap_or(usize::MAX);
                let Some((block, stride)) = strides.get(taken) else { return writer.finish() };
                let region = regions.get(*block as usize).ok_or(SavedError::OtherMemory)?;
                writer.write_stride(region, *block, *stride)?;
                progress.add(stride.len_bytes())?;
            }
        })?;
        let content_bytes = shares.iter().map(|share| share.content_bytes).sum();
        let index = shares.into_iter().map(|share| share.index).collect::<Vec<_>>().concat();
        Ok(GuestWriter { file, index, data_bytes: end_bytes.into_inner(), content_bytes })
    }

    /// Completes the file and waits until it is on the disk. `caption` is for the reader; see
    /// [`SavedGuest::caption`](crate::saved::SavedGuest::caption).
    ///
    /// # Errors
    /// The file takes no more.
    pub fn finish(self, device_state: &[u8], caption: &[u8]) -> Result<WrittenGuest, SavedError> {
        let mut end_bytes = self.data_bytes;
        let mut append = |bytes: &[u8]| {
            let part = Part {
                offset_bytes: end_bytes,
                len_bytes: bytes.len() as u64,
                checksum: checksum(bytes),
            };
            self.file.write_all_at(bytes, end_bytes).map_err(SavedError::io("write"))?;
            end_bytes += bytes.len() as u64;
            Ok::<_, SavedError>(part)
        };
        let footer = Footer {
            device_state: append(device_state)?,
            index: append(&self.index)?,
            caption: append(caption)?,
            content_bytes: self.content_bytes,
        };
        append(&footer.encode())?;
        self.file.sync_all().map_err(SavedError::io("flush"))?;
        Ok(WrittenGuest { content_bytes: self.content_bytes, file_bytes: end_bytes })
    }
}

/// Writes pieces, in one thread.
struct PieceWriter<'a> {
    file: &'a File,
    /// End of what all threads have reserved in the file.
    end_bytes: &'a AtomicU64,
    compressor: Compressor,
    pages: Vec<u8>,
    runs: Vec<PageRange>,
    buffer: Vec<u8>,
    /// Pieces in the buffer; their offsets are within it.
    buffered: Vec<Piece>,
    share: Share,
}

impl<'a> PieceWriter<'a> {
    fn new(file: &'a File, end_bytes: &'a AtomicU64) -> Self {
        PieceWriter {
            file,
            end_bytes,
            compressor: Compressor::default(),
            pages: vec![0; MAX_PIECE_BYTES],
            runs: Vec::new(),
            buffer: Vec::with_capacity(BUFFER_BYTES + MAX_PIECE_BYTES),
            buffered: Vec::new(),
            share: Share::default(),
        }
    }

    fn write_stride(
        &mut self,
        region: &Region,
        block: u32,
        stride: PageRange,
    ) -> Result<(), SavedError> {
        let mut runs = std::mem::take(&mut self.runs);
        runs.clear();
        region.nonzero_ranges(stride, &mut runs)?;
        for pages in runs.iter().flat_map(|run| run.chunks(MOST_PIECE_PAGES)) {
            self.write_piece(region, block, pages)?;
        }
        self.runs = runs;
        Ok(())
    }

    fn write_piece(
        &mut self,
        region: &Region,
        block: u32,
        pages: PageRange,
    ) -> Result<(), SavedError> {
        let raw_bytes = usize::try_from(pages.count * PAGE_SIZE).unwrap_or(usize::MAX);
        let raw = self.pages.get_mut(..raw_bytes).ok_or(SavedError::OtherMemory)?;
        region.copy_data_out(pages.offset_bytes(), raw)?;
        let (form, stored) = match self.compressor.pack(CODEC, raw) {
            Some(packed) => (Form::Packed(CODEC), packed),
            None => (Form::Raw, &*raw),
        };
        self.buffered.push(Piece {
            block,
            pages,
            form,
            offset_bytes: self.buffer.len() as u64,
            stored_bytes: u32::try_from(stored.len()).unwrap_or(u32::MAX),
            checksum: checksum(stored),
        });
        self.buffer.extend_from_slice(stored);
        self.share.content_bytes += raw_bytes as u64;
        if self.buffer.len() >= BUFFER_BYTES { self.flush() } else { Ok(()) }
    }

    fn flush(&mut self) -> Result<(), SavedError> {
        let offset_bytes = self.end_bytes.fetch_add(self.buffer.len() as u64, Ordering::Relaxed);
        self.file.write_all_at(&self.buffer, offset_bytes).map_err(SavedError::io("write"))?;
        self.buffer.clear();
        self.share.index.reserve(self.buffered.len() * PIECE_BYTES);
        for mut piece in self.buffered.drain(..) {
            piece.offset_bytes += offset_bytes;
            piece.encode(&mut self.share.index);
        }
        Ok(())
    }

    fn finish(mut self) -> Result<Share, SavedError> {
        self.flush()?;
        Ok(self.share)
    }
}
