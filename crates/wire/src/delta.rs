//! Pages sent as their difference from the version that was sent before.

use crate::cursor::Cursor;
use crate::kind::DELTA_HEADER;
use crate::{Codec, MAX_BLOCKS, MAX_PAGES_PER_FRAME, PAGE_SIZE, WireError};

/// Consecutive pages, each given as the bits that differ from the destination's version.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Delta {
    /// The round that the pages belong to.
    pub round: u32,
    pub block: u16,
    /// The first page's number in the block.
    pub first: u64,
    /// The [`prefix`](crate::prefix) of each page's version at the destination, 1 to
    /// [`MAX_PAGES_PER_FRAME`] of them. A page whose version there has another prefix cannot be
    /// reconstructed.
    pub bases: Vec<u64>,
    /// Old pages XOR new pages, compressed in one piece with [`Codec::Lz4`] to at most half of the
    /// pages' size.
    pub packed: Vec<u8>,
}

impl Delta {
    /// Returns the number of pages in the delta.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.bases.len() as u64
    }

    /// Largest size, in bytes, that the differences of `pages` pages may be packed into.
    #[must_use]
    pub fn most_packed_bytes(pages: usize) -> usize {
        pages * PAGE_SIZE as usize / 2
    }

    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.round.to_le_bytes());
        out.extend_from_slice(&self.block.to_le_bytes());
        out.extend_from_slice(&[Codec::Lz4 as u8, 0]);
        out.extend_from_slice(&self.first.to_le_bytes());
        let count = u32::try_from(self.bases.len()).unwrap_or(u32::MAX);
        out.extend_from_slice(&count.to_le_bytes());
        self.bases.iter().for_each(|base| out.extend_from_slice(&base.to_le_bytes()));
        out.extend_from_slice(&self.packed);
    }

    /// Reads a payload of `length` bytes.
    pub(crate) fn decode(cursor: &mut Cursor<'_>, length: u32) -> Result<Delta, WireError> {
        let round = cursor.u32("the delta's round")?;
        let block = cursor.u16("the delta's block")?;
        let codec = cursor.u8("the delta's codec")?;
        let reserved = cursor.u8("the delta's reserved byte")?;
        let first = cursor.u64("the delta's first page")?;
        let count = cursor.u32("the delta's count")?;
        if block >= MAX_BLOCKS || reserved != 0 {
            return Err(WireError::BadValue { what: "the delta's block" });
        }
        if codec != Codec::Lz4 as u8 {
            return Err(WireError::BadValue { what: "the delta's codec" });
        }
        if !(1..=MAX_PAGES_PER_FRAME).contains(&count)
            || first.checked_add(u64::from(count)).is_none()
        {
            return Err(WireError::BadValue { what: "the delta's count" });
        }
        let bases: Vec<u64> =
            (0..count).map(|_| cursor.u64("a page's base")).collect::<Result<_, _>>()?;
        let packed = cursor.rest().to_vec();
        let whole = DELTA_HEADER as usize + 8 * bases.len() + packed.len() == length as usize;
        if !whole || packed.is_empty() || packed.len() > Delta::most_packed_bytes(bases.len()) {
            return Err(WireError::BadValue { what: "the delta's length" });
        }
        Ok(Delta { round, block, first, bases, packed })
    }
}
