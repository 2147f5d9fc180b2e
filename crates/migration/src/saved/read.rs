//! Loads a guest from a file.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use godwit_lanes::{MAX_PIECE_BYTES, Unpacker};
use godwit_ram::{PAGE_SIZE, PageRange, Region};

use crate::destination::MOST_DEVICE_STATE_BYTES;
use crate::saved::format::{
    FOOTER_BYTES, Footer, Form, MOST_CAPTION_BYTES, PIECE_BYTES, Part, Piece, checksum,
};
use crate::saved::{Progress, SavedError, in_threads};

/// Pieces that a thread takes at a time: at most 16 MiB of pages.
const TAKEN_PIECES: usize = 64;

/// A saved guest whose footer, caption and device state have been checked. The pieces are checked
/// when they are loaded.
#[derive(Debug)]
pub struct SavedGuest {
    file: File,
    footer: Footer,
    caption: Vec<u8>,
    device_state: Vec<u8>,
}

impl SavedGuest {
    /// Opens a file that [`GuestWriter::finish`](crate::saved::GuestWriter::finish) completed.
    ///
    /// # Errors
    /// The file cannot be read, is not complete, or is damaged.
    pub fn open(file: File) -> Result<SavedGuest, SavedError> {
        let file_bytes = file.metadata().map_err(SavedError::io("read"))?.len();
        let begin = file_bytes
            .checked_sub(FOOTER_BYTES as u64)
            .ok_or(SavedError::Damaged("it is too short"))?;
        let mut bytes = vec![0; FOOTER_BYTES];
        file.read_exact_at(&mut bytes, begin).map_err(SavedError::io("read"))?;
        let footer = Footer::decode(&bytes, file_bytes)?;
        let caption = read_part(&file, &footer.caption, MOST_CAPTION_BYTES)?;
        let device_state = read_part(&file, &footer.device_state, MOST_DEVICE_STATE_BYTES)?;
        Ok(SavedGuest { file, footer, caption, device_state })
    }

    /// Returns what the writer noted.
    #[must_use]
    pub fn caption(&self) -> &[u8] {
        &self.caption
    }

    /// Returns the device state.
    #[must_use]
    pub fn device_state(&self) -> &[u8] {
        &self.device_state
    }

    /// Returns the bytes of the pages that are not all zero.
    #[must_use]
    pub fn content_bytes(&self) -> u64 {
        self.footer.content_bytes
    }

    /// Restores the memory in `threads` threads. The regions must be new: pages that the file does
    /// not have stay as they are.
    ///
    /// # Errors
    /// The file is damaged or of a guest with other memory, the host has not enough memory, or
    /// `progress` was cancelled. The regions then hold a part of the memory.
    pub fn load_memory(
        &self,
        regions: &[Arc<Region>],
        threads: usize,
        progress: &Progress,
    ) -> Result<(), SavedError> {
        let pages: Vec<u64> = regions.iter().map(|region| region.pages()).collect();
        // No page is stored twice, so there are no more pieces than pages.
        let most = pages.iter().fold(0u64, |sum, pages| sum.saturating_add(*pages));
        let index = read_part(&self.file, &self.footer.index, most * PIECE_BYTES as u64)?;
        let pieces: Vec<Piece> = index
            .chunks(PIECE_BYTES)
            .map(|bytes| Piece::decode(bytes, &pages, self.footer.device_state.offset_bytes))
            .collect::<Result<_, _>>()?;
        drop(index);
        if pieces.iter().map(|piece| piece.pages.len_bytes()).sum::<u64>()
            != self.footer.content_bytes
        {
            return Err(SavedError::Damaged("its index is not complete"));
        }
        let next = AtomicUsize::new(0);
        in_threads(threads, || {
            let mut reader = PieceReader::default();
            loop {
                let begin = next.fetch_add(TAKEN_PIECES, Ordering::Relaxed);
                let Some(rest) = pieces.get(begin..).filter(|rest| !rest.is_empty()) else {
                    return Ok(());
                };
                for piece in rest.iter().take(TAKEN_PIECES) {
                    let region =
                        regions.get(piece.block as usize).ok_or(SavedError::OtherMemory)?;
                    reader.load(&self.file, piece, region)?;
                    progress.add(piece.pages.len_bytes())?;
                }
            }
        })
        .map(drop)
    }
}

fn read_part(file: &File, part: &Part, most_bytes: u64) -> Result<Vec<u8>, SavedError> {
    if part.len_bytes > most_bytes {
        return Err(SavedError::Damaged("a part is too long"));
    }
    let len = usize::try_from(part.len_bytes).map_err(|_| SavedError::OtherMemory)?;
    let mut bytes = vec![0; len];
    file.read_exact_at(&mut bytes, part.offset_bytes).map_err(SavedError::io("read"))?;
    match checksum(&bytes) == part.checksum {
        true => Ok(bytes),
        false => Err(SavedError::Damaged("a part has another checksum")),
    }
}

/// Loads pieces, in one thread.
#[derive(Default)]
struct PieceReader {
    stored: Vec<u8>,
    unpacker: Unpacker,
}

impl PieceReader {
    fn load(&mut self, file: &File, piece: &Piece, region: &Region) -> Result<(), SavedError> {
        self.stored.resize(MAX_PIECE_BYTES, 0);
        let stored = self
            .stored
            .get_mut(..piece.stored_bytes as usize)
            .ok_or(SavedError::Damaged("a piece is too long"))?;
        file.read_exact_at(stored, piece.offset_bytes).map_err(SavedError::io("read"))?;
        if checksum(stored) != piece.checksum {
            return Err(SavedError::Damaged("a piece has another checksum"));
        }
        let PageRange { count, .. } = piece.pages;
        let raw_bytes = usize::try_from(count * PAGE_SIZE).unwrap_or(usize::MAX);
        let pages = match piece.form {
            Form::Raw => (stored.len() == raw_bytes).then_some(&*stored),
            Form::Packed(codec) => self.unpacker.unpack(codec, stored, raw_bytes),
        };
        let pages = pages.ok_or(SavedError::Damaged("a piece has another length"))?;
        region.copy_in(piece.pages.offset_bytes(), pages)?;
        Ok(())
    }
}
