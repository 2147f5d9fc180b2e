//! Blocks of a VM that agents restart among themselves: one file per term, which its holder writes
//! as a heartbeat and other agents read.
//!
//! The holder has a [`crate::Guard`] of its own for the VM, and each reader a [`crate::Judge`],
//! with this one datastore and without renewals. Instead of a manager, the block says what a judge
//! must know.

use crate::heartbeat::{BLOCK_BYTES, BadBlock, Block, Slot, opened, sealed, take};
use crate::term::Term;

const MAGIC: [u8; 8] = *b"GWOWNVM1";
/// Length of the fields before the checksum.
const FIELDS_BYTES: usize = 80;

/// Whether a term goes on, or how it ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum End {
    /// The VM may run in it.
    None,
    /// It is over: a user has stopped the VM. Nobody starts it by itself.
    Stopped,
    /// It is over: the VM could not start, or its host lost the term. Another host may start it.
    Failed,
    /// The VM may run without a term. Nobody starts it until an operator says that it does not.
    Resting,
}

/// Contents of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct OwnBlock {
    /// Place and position, with the VM in the place of the cluster.
    pub block: Block,
    /// Whether a watchdog of the kernel or the hardware guards the term.
    pub watchdog: bool,
    pub end: End,
}

impl OwnBlock {
    /// Returns the block with which a host claims a term.
    #[must_use]
    pub fn claim(slot: Slot, term: Term, watchdog: bool) -> Self {
        OwnBlock { block: Block::opening(slot, term), watchdog, end: End::None }
    }

    /// Returns the block that the holder may write over `found`, with a larger number than the one
    /// there and than `least`.
    ///
    /// # Errors
    /// The block that was found is another one, its term has ended, or its number is the last one
    /// (`OtherTerm`).
    pub fn next(
        found: Option<OwnBlock>,
        (slot, term): (Slot, Term),
        least: u64,
        (watchdog, end): (bool, End),
    ) -> Result<Self, BadBlock> {
        let found = found.ok_or(BadBlock::Magic)?;
        if found.end != End::None {
            return Err(BadBlock::OtherTerm);
        }
        let before = found.block.mark.sequence;
        let mut block = found.block;
        block.mark.sequence = before.max(least);
        let block = Block::next(Some(block), slot, term)?;
        if block.mark.sequence <= before {
            return Err(BadBlock::OtherTerm);
        }
        Ok(OwnBlock { block, watchdog, end })
    }

    /// Returns the bytes to write.
    #[must_use]
    pub fn encode(&self) -> [u8; BLOCK_BYTES] {
        let end = match self.end {
            End::None => 0,
            End::Stopped => 1,
            End::Failed => 2,
            End::Resting => 3,
        };
        let marks = [u8::from(self.watchdog), end, 0, 0, 0, 0, 0, 0];
        sealed(&[&MAGIC[..], &self.block.fields(), &marks].concat())
    }

    /// Reads a block; `None` is one that was never written.
    ///
    /// # Errors
    /// The bytes are no block, or a damaged one.
    pub fn decode(bytes: &[u8]) -> Result<Option<Self>, BadBlock> {
        let Some(mut rest) = opened(bytes, &MAGIC, FIELDS_BYTES)? else { return Ok(None) };
        let block = Block::of_fields(&mut rest)?;
        let marks: [u8; 8] = take(&mut rest)?;
        let [watchdog @ (0 | 1), end, 0, 0, 0, 0, 0, 0] = marks else {
            return Err(BadBlock::Flags);
        };
        let end = match end {
            0 => End::None,
            1 => End::Stopped,
            2 => End::Failed,
            3 => End::Resting,
            _ => return Err(BadBlock::Flags),
        };
        Ok(Some(OwnBlock { block, watchdog: watchdog == 1, end }))
    }
}

#[cfg(test)]
mod tests {
    use crc_fast::crc32_iscsi;
    use proptest::prelude::*;

    use super::*;
    use crate::term::Mark;

    /// End of the checksum.
    const SUM_END: usize = FIELDS_BYTES + 4;
    const SLOT: Slot = Slot { cluster: [1; 16], host: [2; 16], datastore: [3; 16] };
    const ENDS: [End; 4] = [End::None, End::Stopped, End::Failed, End::Resting];

    #[test]
    fn any_changed_byte_is_refused_and_a_heartbeat_is_none() {
        let bytes = OwnBlock::claim(SLOT, Term(1), true).encode();
        for at in 0..BLOCK_BYTES {
            let mut changed = bytes;
            changed[at] ^= 1;
            let expected = match at {
                0..8 => BadBlock::Magic,
                8..SUM_END => BadBlock::Checksum,
                _ => BadBlock::Trailing,
            };
            assert_eq!(OwnBlock::decode(&changed), Err(expected), "byte {at}");
            assert_eq!(OwnBlock::decode(&bytes[..at]), Err(BadBlock::Length(at)));
        }
        assert_eq!(OwnBlock::decode(&[0; BLOCK_BYTES]), Ok(None));
        let heartbeat = Block::opening(SLOT, Term(1)).encode();
        assert_eq!(OwnBlock::decode(&heartbeat), Err(BadBlock::Magic));
        assert_eq!(Block::decode(&bytes), Err(BadBlock::Magic));
    }

    #[test]
    fn unknown_marks_are_refused() {
        let known = OwnBlock::claim(SLOT, Term(1), false).encode();
        for (at, value) in [(72, 2), (73, 4), (74, 1), (79, 255)] {
            let mut bytes = known;
            bytes[at] = value;
            let sum = crc32_iscsi(&bytes[..FIELDS_BYTES]).to_le_bytes();
            bytes[FIELDS_BYTES..SUM_END].copy_from_slice(&sum);
            assert_eq!(OwnBlock::decode(&bytes), Err(BadBlock::Flags), "byte {at}");
        }
    }

    #[test]
    fn numbers_grow_and_a_term_that_has_ended_is_not_written_again() {
        let term = Term(4);
        let claim = OwnBlock::claim(SLOT, term, true);
        let next =
            |found, least, end| OwnBlock::next(Some(found), (SLOT, term), least, (true, end));
        let first = next(claim, 0, End::None).unwrap();
        assert_eq!(first.block.mark.sequence, 1);
        let later = next(first, 70, End::None).unwrap();
        assert_eq!(later.block.mark.sequence, 71);
        for end in [End::Stopped, End::Failed, End::Resting] {
            let ended = next(later, 0, end).unwrap();
            assert_eq!(next(ended, 0, End::None), Err(BadBlock::OtherTerm));
        }
        assert_eq!(next(later, u64::MAX, End::None).unwrap().block.mark.sequence, u64::MAX);
        let last = next(later, u64::MAX, End::None).unwrap();
        assert_eq!(next(last, 0, End::None), Err(BadBlock::OtherTerm));
        let other = Slot { host: [9; 16], ..SLOT };
        let of_other = OwnBlock::next(Some(claim), (other, term), 0, (true, End::None));
        assert_eq!(of_other, Err(BadBlock::OtherHost));
    }

    proptest! {
        #[test]
        fn blocks_are_read_as_they_were_written(
            cluster in any::<[u8; 16]>(),
            host in any::<[u8; 16]>(),
            datastore in any::<[u8; 16]>(),
            term in any::<u64>(),
            sequence in any::<u64>(),
            watchdog in any::<bool>(),
            end in 0_usize..4,
        ) {
            let mark = Mark { term: Term(term), sequence };
            let block = Block { slot: Slot { cluster, host, datastore }, mark };
            let own = OwnBlock { block, watchdog, end: ENDS[end] };
            prop_assert_eq!(OwnBlock::decode(&own.encode()), Ok(Some(own)));
        }

        #[test]
        fn no_bytes_do_harm(bytes in prop::collection::vec(any::<u8>(), 0..600)) {
            prop_assert!(
                OwnBlock::decode(&bytes).is_err() || bytes.iter().all(|byte| *byte == 0)
            );
        }
    }
}
