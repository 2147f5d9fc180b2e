//! Pages sent by reference: what content a destination holds, and which of it a page of the guest
//! has.

use crate::cursor::Cursor;
use crate::{MAX_BLOCKS, MAX_DIGESTS, MAX_REFERENCES, WireError};

/// BLAKE3 hash of a whole page.
pub type PageHash = [u8; 32];

/// Returns the first bytes of a page's hash, which serve as its search key. 0 marks a page that is
/// not announced.
#[must_use]
pub fn prefix(hash: &PageHash) -> u64 {
    hash.first_chunk().map_or(0, |first| u64::from_le_bytes(*first))
}

/// Location of a page's content at the destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Place {
    /// The memory: 0 is that of the arriving guest itself; the destination numbers others.
    pub content: u16,
    /// The RAM block's number.
    pub block: u16,
    /// The page's number in the block.
    pub page: u64,
}

/// Pages whose content the destination is expected to hold, consecutive in both places.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct References {
    /// The round that the pages belong to.
    pub round: u32,
    /// The RAM block's number.
    pub block: u16,
    /// The first page's number in the block.
    pub first: u64,
    /// Location of the first page's content.
    pub place: Place,
    /// Hash of each page, 1 to [`MAX_REFERENCES`] of them. Content found there with another hash is
    /// not used.
    pub hashes: Vec<PageHash>,
}

impl References {
    /// Returns the number of pages named.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.hashes.len() as u64
    }

    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.round.to_le_bytes());
        out.extend_from_slice(&self.block.to_le_bytes());
        out.extend_from_slice(&self.place.content.to_le_bytes());
        out.extend_from_slice(&self.first.to_le_bytes());
        out.extend_from_slice(&self.place.page.to_le_bytes());
        out.extend_from_slice(&self.place.block.to_le_bytes());
        out.extend_from_slice(&[0; 2]);
        let count = u32::try_from(self.hashes.len()).unwrap_or(u32::MAX);
        out.extend_from_slice(&count.to_le_bytes());
        self.hashes.iter().for_each(|hash| out.extend_from_slice(hash));
    }

    pub(crate) fn decode(cursor: &mut Cursor<'_>) -> Result<References, WireError> {
        let round = cursor.u32("the references' round")?;
        let block = cursor.u16("the references' block")?;
        let content = cursor.u16("the references' content")?;
        let first = cursor.u64("the references' first page")?;
        let page = cursor.u64("the content's first page")?;
        let content_block = cursor.u16("the content's block")?;
        let reserved = cursor.u16("the references' reserved bytes")?;
        let count = cursor.u32("the references' count")?;
        if block >= MAX_BLOCKS || content_block >= MAX_BLOCKS || reserved != 0 {
            return Err(WireError::BadValue { what: "the references' block" });
        }
        let ends = |first: u64| first.checked_add(u64::from(count)).is_some();
        if !(1..=MAX_REFERENCES).contains(&count) || !ends(first) || !ends(page) {
            return Err(WireError::BadValue { what: "the references' count" });
        }
        let hashes = (0..count).map(|_| cursor.array("a page's hash")).collect::<Result<_, _>>()?;
        Ok(References {
            round,
            block,
            first,
            place: Place { content, block: content_block, page },
            hashes,
        })
    }
}

/// Content that a destination holds in consecutive pages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Digests {
    /// Location of the first page.
    pub place: Place,
    /// The [`prefix`] of each page from there on, 1 to [`MAX_DIGESTS`] of them; 0 for a page that
    /// is not announced.
    pub prefixes: Vec<u64>,
}

impl Digests {
    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.place.content.to_le_bytes());
        out.extend_from_slice(&self.place.block.to_le_bytes());
        out.extend_from_slice(&[0; 4]);
        out.extend_from_slice(&self.place.page.to_le_bytes());
        self.prefixes.iter().for_each(|prefix| out.extend_from_slice(&prefix.to_le_bytes()));
    }

    pub(crate) fn decode(cursor: &mut Cursor<'_>) -> Result<Digests, WireError> {
        let content = cursor.u16("the digests' content")?;
        let block = cursor.u16("the digests' block")?;
        let reserved = cursor.u32("the digests' reserved bytes")?;
        let page = cursor.u64("the digests' first page")?;
        if block >= MAX_BLOCKS
            || reserved != 0
            || page.checked_add(u64::from(MAX_DIGESTS)).is_none()
        {
            return Err(WireError::BadValue { what: "the digests' block" });
        }
        let mut prefixes = Vec::new();
        while !cursor.is_empty() {
            prefixes.push(cursor.u64("a digest")?);
        }
        Ok(Digests { place: Place { content, block, page }, prefixes })
    }
}
