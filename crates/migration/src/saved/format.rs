//! Bytes of a saved guest's index and footer. Numbers are little-endian.

use godwit_lanes::MAX_PIECE_BYTES;
use godwit_ram::{PAGE_SIZE, PageRange};
use godwit_wire::Codec;

use crate::saved::SavedError;

/// Begins the footer. The last byte is the version of the format.
const MAGIC: [u8; 8] = *b"GWGUEST\x01";
/// Bytes of a piece in the index.
pub(super) const PIECE_BYTES: usize = 48;
/// Bytes of the footer.
pub(super) const FOOTER_BYTES: usize = 8 + 3 * PART_BYTES + 8 + CHECKSUM_BYTES;
/// Most pages of a piece.
pub(super) const MOST_PIECE_PAGES: u64 = MAX_PIECE_BYTES as u64 / PAGE_SIZE;
/// Longest caption.
pub(super) const MOST_CAPTION_BYTES: u64 = 1 << 20;

const CHECKSUM_BYTES: usize = 16;
const PART_BYTES: usize = 16 + CHECKSUM_BYTES;

/// First half of a BLAKE3 hash: finds every accidental change.
pub(super) type Checksum = [u8; CHECKSUM_BYTES];

pub(super) fn checksum(bytes: &[u8]) -> Checksum {
    let mut sum = [0; CHECKSUM_BYTES];
    sum.copy_from_slice(&blake3::hash(bytes).as_bytes()[..CHECKSUM_BYTES]);
    sum
}

/// Form of a piece's bytes in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    Raw,
    Packed(Codec),
}

impl Form {
    fn to_byte(self) -> u8 {
        match self {
            Form::Raw => 0,
            Form::Packed(Codec::Lz4) => 1,
            Form::Packed(Codec::Zstd) => 2,
        }
    }

    fn from_byte(byte: u8) -> Option<Form> {
        [Form::Raw, Form::Packed(Codec::Lz4), Form::Packed(Codec::Zstd)]
            .into_iter()
            .find(|form| form.to_byte() == byte)
    }
}

/// A run of pages of one memory block, and where its bytes are in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    pub block: u32,
    /// 1 to [`MOST_PIECE_PAGES`] pages.
    pub pages: PageRange,
    pub form: Form,
    /// From the file's beginning, in bytes.
    pub offset_bytes: u64,
    pub stored_bytes: u32,
    pub checksum: Checksum,
}

impl Piece {
    pub(super) fn encode(&self, into: &mut Vec<u8>) {
        into.extend(self.pages.first.to_le_bytes());
        into.extend(self.offset_bytes.to_le_bytes());
        into.extend(self.block.to_le_bytes());
        into.extend(self.stored_bytes.to_le_bytes());
        into.extend(u32::try_from(self.pages.count).unwrap_or(u32::MAX).to_le_bytes());
        into.extend([self.form.to_byte(), 0, 0, 0]);
        into.extend(self.checksum);
    }

    /// Reads a piece and checks it against the guest's blocks (`block_pages`: pages of each) and
    /// the bytes of the file that hold pieces.
    pub(super) fn decode(
        bytes: &[u8],
        block_pages: &[u64],
        data_bytes: u64,
    ) -> Result<Piece, SavedError> {
        let mut fields = Fields(bytes);
        let (first, offset_bytes) = (fields.u64()?, fields.u64()?);
        let (block, stored_bytes, count) = (fields.u32()?, fields.u32()?, fields.u32()?);
        let [form, ..] = fields.bytes::<4>()?;
        let form = Form::from_byte(form).ok_or(SavedError::Damaged("a piece has no known form"))?;
        let checksum = fields.bytes()?;
        let pages = PageRange::new(first, count.into());
        let of_block = block_pages.get(block as usize).copied().unwrap_or(0);
        if pages.is_empty() || pages.count > MOST_PIECE_PAGES || pages.end() > of_block {
            return Err(SavedError::Damaged("a piece is outside the guest's memory"));
        }
        let most = match form {
            Form::Raw => pages.count * PAGE_SIZE,
            Form::Packed(_) => MAX_PIECE_BYTES as u64,
        };
        let end_bytes = offset_bytes.checked_add(stored_bytes.into());
        if u64::from(stored_bytes) > most || end_bytes.is_none_or(|end| end > data_bytes) {
            return Err(SavedError::Damaged("a piece is outside the file"));
        }
        Ok(Piece { block, pages, form, offset_bytes, stored_bytes, checksum })
    }
}

/// A part of the file with its checksum.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Part {
    pub offset_bytes: u64,
    pub len_bytes: u64,
    pub checksum: Checksum,
}

/// The last bytes of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Footer {
    pub device_state: Part,
    pub index: Part,
    pub caption: Part,
    /// Bytes of the pages in the pieces.
    pub content_bytes: u64,
}

impl Footer {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(FOOTER_BYTES);
        bytes.extend(MAGIC);
        for part in [&self.device_state, &self.index, &self.caption] {
            bytes.extend(part.offset_bytes.to_le_bytes());
            bytes.extend(part.len_bytes.to_le_bytes());
            bytes.extend(part.checksum);
        }
        bytes.extend(self.content_bytes.to_le_bytes());
        let sum = checksum(&bytes);
        bytes.extend(sum);
        bytes
    }

    /// Reads the footer of a file of `file_bytes`, and checks that its parts lie within the file.
    pub(super) fn decode(bytes: &[u8], file_bytes: u64) -> Result<Footer, SavedError> {
        let (body, sum) = bytes.split_at(bytes.len().saturating_sub(CHECKSUM_BYTES));
        let mut fields = Fields(body);
        if fields.bytes::<8>()? != MAGIC {
            return Err(SavedError::Damaged("it is no saved guest of this version"));
        }
        if checksum(body) != *sum {
            return Err(SavedError::Damaged("its footer has another checksum"));
        }
        let mut part = || {
            let (offset_bytes, len_bytes) = (fields.u64()?, fields.u64()?);
            let end = offset_bytes.checked_add(len_bytes);
            if end.is_none_or(|end| end > file_bytes) {
                return Err(SavedError::Damaged("a part is outside the file"));
            }
            Ok(Part { offset_bytes, len_bytes, checksum: fields.bytes()? })
        };
        let (device_state, index, caption) = (part()?, part()?, part()?);
        Ok(Footer { device_state, index, caption, content_bytes: fields.u64()? })
    }
}

/// Fields of a structure, taken from its front.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn bytes<const N: usize>(&mut self) -> Result<[u8; N], SavedError> {
        let (field, rest) =
            self.0.split_first_chunk().ok_or(SavedError::Damaged("it is too short"))?;
        self.0 = rest;
        Ok(*field)
    }

    fn u32(&mut self) -> Result<u32, SavedError> {
        self.bytes().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, SavedError> {
        self.bytes().map(u64::from_le_bytes)
    }
}
