//! Runs of pages as varints: block, gap to the run before, length. A run of zero pages takes about
//! three bytes or a few more.

use crate::cursor::{Cursor, put_varint};
use crate::{MAX_BLOCKS, MAX_RUNS_PAYLOAD, WireError};

/// Maximum bytes of one run: block (2), gap and length (10 each).
const MAX_RUN_BYTES: usize = 22;

/// A run of pages in one RAM block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockRun {
    /// The block's number, in the order of [`Begin::block_pages`](crate::Begin::block_pages).
    pub block: u16,
    /// The first page's number in the block.
    pub first: u64,
    /// How many pages, at least one.
    pub count: u64,
}

/// Appends runs until they end or the frame is full. Returns the number of runs appended.
pub(crate) fn encode(runs: &[BlockRun], out: &mut Vec<u8>) -> usize {
    let start = out.len();
    let (mut block, mut end) = (0u16, 0u64);
    for (taken, run) in runs.iter().enumerate() {
        if out.len() - start + MAX_RUN_BYTES > MAX_RUNS_PAYLOAD as usize {
            return taken;
        }
        if run.block != block {
            (block, end) = (run.block, 0);
        }
        put_varint(out, u64::from(run.block));
        put_varint(out, run.first.wrapping_sub(end));
        put_varint(out, run.count);
        end = run.first.wrapping_add(run.count);
    }
    runs.len()
}

/// Reads runs until the payload ends. Gaps wrap around, so runs may come in any order.
pub(crate) fn decode(cursor: &mut Cursor<'_>) -> Result<Vec<BlockRun>, WireError> {
    let mut runs = Vec::new();
    let (mut block, mut end) = (0u16, 0u64);
    while !cursor.is_empty() {
        let number = cursor.varint("a run's block")?;
        let number = u16::try_from(number)
            .ok()
            .filter(|n| *n < MAX_BLOCKS)
            .ok_or(WireError::BadValue { what: "a run's block" })?;
        if number != block {
            (block, end) = (number, 0);
        }
        let first = end.wrapping_add(cursor.varint("a run's first page")?);
        let count = cursor.varint("a run's length")?;
        let bad = WireError::BadValue { what: "a run's length" };
        if count == 0 {
            return Err(bad);
        }
        end = first.checked_add(count).ok_or(bad)?;
        runs.push(BlockRun { block, first, count });
    }
    Ok(runs)
}
