//! Heartbeat blocks: what an agent writes to a file of its host on a shared datastore, and what
//! readers on other hosts make of it.

use crc_fast::crc32_iscsi;
use thiserror::Error;

use crate::term::{Mark, Term};

/// Length of a block, written in one piece.
pub const BLOCK_BYTES: usize = 512;
const MAGIC: [u8; 8] = *b"GWHEART1";
/// Length of the fields before the checksum.
const FIELDS_BYTES: usize = 72;

/// The place of a heartbeat: one file on one datastore. All are uuids.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Slot {
    pub cluster: [u8; 16],
    pub host: [u8; 16],
    pub datastore: [u8; 16],
}

/// Contents of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Block {
    pub slot: Slot,
    /// The term of the host; the sequence number is 0 in the block with which a reader opens it.
    pub mark: Mark,
}

/// Why a block is not a heartbeat that counts. None of these is a silence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum BadBlock {
    #[error("the block has {0} bytes instead of 512")]
    Length(usize),
    #[error("the block is not a heartbeat")]
    Magic,
    #[error("the block is damaged: its checksum differs")]
    Checksum,
    #[error("the block has data after its checksum")]
    Trailing,
    #[error("the block is of another cluster")]
    OtherCluster,
    #[error("the block is of another host")]
    OtherHost,
    #[error("the block is of another datastore")]
    OtherDatastore,
    #[error("the block is of another term")]
    OtherTerm,
    #[error("the block has marks that this version does not know")]
    Flags,
}

impl Block {
    /// Returns the block with which a reader opens a term on a datastore.
    #[must_use]
    pub fn opening(slot: Slot, term: Term) -> Self {
        Block { slot, mark: Mark { term, sequence: 0 } }
    }

    /// Returns the block that a host may write over `found`. Only a block of its own slot and term
    /// shows that readers see the same datastore.
    ///
    /// # Errors
    /// The block that was found is another one, or there is none (`Magic`).
    pub fn next(found: Option<Block>, slot: Slot, term: Term) -> Result<Self, BadBlock> {
        let found = found.ok_or(BadBlock::Magic)?;
        let mark = found.mark_of(slot)?;
        if mark.term != term {
            return Err(BadBlock::OtherTerm);
        }
        let sequence = mark.sequence.saturating_add(1);
        Ok(Block { slot, mark: Mark { term, sequence } })
    }

    /// Returns the mark of a block that belongs to a slot.
    ///
    /// # Errors
    /// It belongs to another cluster, host or datastore.
    pub fn mark_of(&self, slot: Slot) -> Result<Mark, BadBlock> {
        if self.slot.cluster != slot.cluster {
            return Err(BadBlock::OtherCluster);
        }
        if self.slot.host != slot.host {
            return Err(BadBlock::OtherHost);
        }
        if self.slot.datastore != slot.datastore {
            return Err(BadBlock::OtherDatastore);
        }
        Ok(self.mark)
    }

    /// Returns the bytes to write.
    #[must_use]
    pub fn encode(&self) -> [u8; BLOCK_BYTES] {
        sealed(&[&MAGIC[..], &self.fields()].concat())
    }

    /// Returns slot, term and sequence number as bytes.
    pub(crate) fn fields(&self) -> Vec<u8> {
        let Slot { cluster, host, datastore } = self.slot;
        let Mark { term, sequence } = self.mark;
        let place = [cluster, host, datastore].concat();
        [&place[..], &term.0.to_le_bytes(), &sequence.to_le_bytes()].concat()
    }

    /// Takes slot, term and sequence number from the beginning of `rest`.
    pub(crate) fn of_fields(rest: &mut &[u8]) -> Result<Self, BadBlock> {
        let (cluster, host) = (take(rest)?, take(rest)?);
        let slot = Slot { cluster, host, datastore: take(rest)? };
        let term = Term(u64::from_le_bytes(take(rest)?));
        let sequence = u64::from_le_bytes(take(rest)?);
        Ok(Block { slot, mark: Mark { term, sequence } })
    }

    /// Reads a block; `None` is one that was never written.
    ///
    /// # Errors
    /// The bytes are no block, or a damaged one.
    pub fn decode(bytes: &[u8]) -> Result<Option<Self>, BadBlock> {
        let Some(mut fields) = opened(bytes, &MAGIC, FIELDS_BYTES)? else { return Ok(None) };
        Ok(Some(Block::of_fields(&mut fields)?))
    }
}

/// Returns a block of these fields: their checksum (CRC-32C) follows, then zeros.
pub(crate) fn sealed(fields: &[u8]) -> [u8; BLOCK_BYTES] {
    let mut block = [0; BLOCK_BYTES];
    let sum = crc32_iscsi(fields).to_le_bytes();
    for (to, from) in block.iter_mut().zip(fields.iter().chain(&sum)) {
        *to = *from;
    }
    block
}

/// Returns the fields of a block after its magic number; `None`: it was never written.
pub(crate) fn opened<'a>(
    bytes: &'a [u8],
    magic: &[u8; 8],
    fields_bytes: usize,
) -> Result<Option<&'a [u8]>, BadBlock> {
    let block: &[u8; BLOCK_BYTES] = bytes.try_into().map_err(|_| BadBlock::Length(bytes.len()))?;
    if block.iter().all(|byte| *byte == 0) {
        return Ok(None);
    }
    let (fields, mut rest) = block.split_at(fields_bytes);
    let after_magic = fields.strip_prefix(magic).ok_or(BadBlock::Magic)?;
    if u32::from_le_bytes(take(&mut rest)?) != crc32_iscsi(fields) {
        return Err(BadBlock::Checksum);
    }
    if rest.iter().any(|byte| *byte != 0) {
        return Err(BadBlock::Trailing);
    }
    Ok(Some(after_magic))
}

pub(crate) fn take<const N: usize>(rest: &mut &[u8]) -> Result<[u8; N], BadBlock> {
    let (first, others) = rest.split_first_chunk().ok_or(BadBlock::Length(rest.len()))?;
    *rest = others;
    Ok(*first)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// End of the checksum.
    const SUM_END: usize = FIELDS_BYTES + 4;
    const SLOT: Slot = Slot { cluster: [1; 16], host: [2; 16], datastore: [3; 16] };

    #[test]
    fn a_block_has_a_fixed_form() {
        let block = Block { slot: SLOT, mark: Mark { term: Term(5), sequence: 6 } };
        let bytes = block.encode();
        let fields = [&b"GWHEART1"[..], &[1; 16], &[2; 16], &[3; 16]].concat();
        assert_eq!(bytes[..56], fields);
        assert_eq!(bytes[56..72], [5, 0, 0, 0, 0, 0, 0, 0, 6, 0, 0, 0, 0, 0, 0, 0]);
        assert!(bytes[SUM_END..].iter().all(|byte| *byte == 0));
        assert_eq!(Block::decode(&bytes), Ok(Some(block)));
        assert_eq!(Block::decode(&[0; BLOCK_BYTES]), Ok(None));
    }

    #[test]
    fn any_changed_byte_and_any_other_length_is_refused() {
        let bytes = Block::opening(SLOT, Term(1)).encode();
        for at in 0..BLOCK_BYTES {
            let mut changed = bytes;
            changed[at] ^= 1;
            let expected = match at {
                0..8 => BadBlock::Magic,
                8..SUM_END => BadBlock::Checksum,
                _ => BadBlock::Trailing,
            };
            assert_eq!(Block::decode(&changed), Err(expected), "byte {at}");
            assert_eq!(Block::decode(&bytes[..at]), Err(BadBlock::Length(at)));
        }
        let longer = [&bytes[..], &[0]].concat();
        assert_eq!(Block::decode(&longer), Err(BadBlock::Length(513)));
    }

    #[test]
    fn a_host_writes_only_over_a_block_of_its_own_slot_and_term() {
        let opening = Block::opening(SLOT, Term(4));
        let first = Block::next(Some(opening), SLOT, Term(4)).unwrap();
        assert_eq!(first.mark, Mark { term: Term(4), sequence: 1 });
        let second = Block::next(Some(first), SLOT, Term(4)).unwrap();
        assert_eq!(second.mark.sequence, 2);
        assert_eq!(Block::next(None, SLOT, Term(4)), Err(BadBlock::Magic));
        assert_eq!(Block::next(Some(opening), SLOT, Term(5)), Err(BadBlock::OtherTerm));
        for (slot, bad) in [
            (Slot { cluster: [9; 16], ..SLOT }, BadBlock::OtherCluster),
            (Slot { host: [9; 16], ..SLOT }, BadBlock::OtherHost),
            (Slot { datastore: [9; 16], ..SLOT }, BadBlock::OtherDatastore),
        ] {
            assert_eq!(Block::next(Some(opening), slot, Term(4)), Err(bad));
            assert_eq!(opening.mark_of(slot), Err(bad));
        }
    }

    proptest! {
        #[test]
        fn blocks_are_read_as_they_were_written(
            cluster in any::<[u8; 16]>(),
            host in any::<[u8; 16]>(),
            datastore in any::<[u8; 16]>(),
            term in any::<u64>(),
            sequence in any::<u64>(),
        ) {
            let mark = Mark { term: Term(term), sequence };
            let block = Block { slot: Slot { cluster, host, datastore }, mark };
            prop_assert_eq!(Block::decode(&block.encode()), Ok(Some(block)));
        }

        #[test]
        fn no_bytes_do_harm(bytes in prop::collection::vec(any::<u8>(), 0..600)) {
            prop_assert!(Block::decode(&bytes).is_err() || bytes.iter().all(|byte| *byte == 0));
        }
    }
}
