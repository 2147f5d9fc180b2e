//! Memory blocks of a VM.

use serde::{Deserialize, Deserializer, Serialize};

use crate::size::ByteSize;
use crate::spec::error::SpecError;

/// Bytes in a page, the unit of memory blocks.
const PAGE_BYTES: u64 = 4096;
/// QEMU rounds a machine's memory up to a multiple of this (7.2 `set_memory_options`) and then
/// refuses a backend of another size.
const TOTAL_MEMORY_UNIT_BYTES: u64 = 8192;
/// Most memory blocks (NUMA nodes) a VM may have.
const MAX_MEMORY_BLOCKS: usize = 64;
/// Slots for memory modules of a VM with a maximum of memory. Part of the machine: never change.
pub(crate) const DIMM_SLOTS: usize = 16;
/// Unit in which Linux on x86 takes memory while it runs (`SECTION_SIZE_BITS`, Linux 6).
pub(super) const DIMM_UNIT_BYTES: u64 = 128 << 20;
/// Least memory with which a PC starts.
const MIN_MEMORY_BYTES: u64 = 1 << 20;

/// One block of guest memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct MemoryBlock {
    /// A multiple of 4 KiB.
    pub size: ByteSize,
    /// Where the pages are stored.
    #[serde(default)]
    pub backing: Backing,
    /// Address of a memory module in the guest, which it got while it ran; absent: memory from the
    /// start. Modules follow the other blocks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<u64>,
}

impl MemoryBlock {
    /// Creates a block in a file that the agent maps too, which the external engine can move.
    #[must_use]
    pub fn shared(size: ByteSize) -> MemoryBlock {
        MemoryBlock { size, backing: Backing::Shared, address: None }
    }

    pub(super) fn is_private(&self) -> bool {
        self.backing == Backing::Private
    }
}

/// Where the pages of a memory block are stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub enum Backing {
    /// In a file of the host's RAM directory, mapped by QEMU and by the agent.
    #[default]
    Shared,
    /// In QEMU's own anonymous memory: only QEMU's own migration can move it.
    Private,
}

/// Returns the memory of a VM whose specification names none.
pub(super) fn default_memory() -> Vec<MemoryBlock> {
    vec![MemoryBlock::shared(ByteSize::from_mib(1024))]
}

/// Accepts `"1GiB"`, `1073741824`, one block or a list of blocks.
pub(super) fn memory_blocks<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Vec<MemoryBlock>, D::Error> {
    #[derive(Deserialize)]
    #[serde(
        untagged,
        expecting = "expected a size like \"1GiB\" or a list of blocks { size, backing }"
    )]
    enum Memory {
        Size(ByteSize),
        Block(MemoryBlock),
        Blocks(Vec<MemoryBlock>),
    }
    Ok(match Memory::deserialize(deserializer)? {
        Memory::Size(size) => vec![MemoryBlock::shared(size)],
        Memory::Block(block) => vec![block],
        Memory::Blocks(blocks) => blocks,
    })
}

/// Checks the blocks of one VM.
///
/// # Errors
/// QEMU would refuse them.
pub(super) fn check_memory(blocks: &[MemoryBlock]) -> Result<(), SpecError> {
    let error = |why: String| Err(SpecError::Memory { why });
    if blocks.is_empty() {
        return error("it has no block".to_owned());
    }
    if blocks.len() > MAX_MEMORY_BLOCKS {
        return error(format!("{} blocks are more than {MAX_MEMORY_BLOCKS}", blocks.len()));
    }
    let mut total_bytes: u64 = 0;
    check_dimms(blocks)?;
    for (index, block) in blocks.iter().enumerate() {
        let bytes = block.size.bytes();
        if bytes == 0 || !bytes.is_multiple_of(PAGE_BYTES) {
            return error(format!(
                "block {index} of {} is not a whole number of 4 KiB pages",
                block.size
            ));
        }
        total_bytes = match total_bytes.checked_add(bytes) {
            Some(total) => total,
            None => return error("it is larger than any machine".to_owned()),
        };
    }
    if total_bytes < MIN_MEMORY_BYTES {
        return error(format!("{} in all is less than 1 MiB", ByteSize::from_bytes(total_bytes)));
    }
    if !total_bytes.is_multiple_of(TOTAL_MEMORY_UNIT_BYTES) {
        return error(format!("{total_bytes} bytes in all is not a multiple of 8 KiB"));
    }
    Ok(())
}

/// Checks that memory modules follow the other blocks and each other.
fn check_dimms(blocks: &[MemoryBlock]) -> Result<(), SpecError> {
    let error = |why: String| Err(SpecError::Memory { why });
    let base = blocks.iter().take_while(|block| block.address.is_none()).count();
    let (base, dimms) = blocks.split_at(base);
    if base.is_empty() {
        return error("it begins with a memory module".to_owned());
    }
    if dimms.len() > DIMM_SLOTS {
        return error(format!("{} memory modules are more than {DIMM_SLOTS}", dimms.len()));
    }
    let mut free_from = 0;
    for block in dimms {
        let bytes = block.size.bytes();
        if bytes == 0 || !bytes.is_multiple_of(DIMM_UNIT_BYTES) {
            return error(format!("a memory module of {} is not whole 128 MiB", block.size));
        }
        let end = block.address.and_then(|at| at.checked_add(bytes).filter(|_| at >= free_from));
        let Some(end) = end else {
            return error("memory modules are not in the order of their addresses".to_owned());
        };
        free_from = end;
    }
    Ok(())
}
