//! From addresses of the tracked process to pages of its blocks.

use crate::pages::PAGE_SIZE;
use crate::tracking::block::Block;
use crate::tracking::maps::Mapping;

/// All mappings, ordered by address. They do not overlap.
#[derive(Debug)]
pub(super) struct Places(Vec<(usize, Mapping)>);

impl Places {
    pub(super) fn new(blocks: &[Block]) -> Places {
        let of_block = |(number, block): (usize, &Block)| -> Vec<_> {
            block.mappings.iter().map(|mapping| (number, *mapping)).collect()
        };
        let mut places: Vec<_> = blocks.iter().enumerate().flat_map(of_block).collect();
        places.sort_by_key(|(_, mapping)| mapping.address);
        Places(places)
    }

    /// Returns the block and its mapping that contain the address.
    pub(super) fn find(&self, address: u64) -> Option<(usize, &Mapping)> {
        let after = self.0.partition_point(|(_, mapping)| mapping.address <= address);
        let (block, mapping) = self.0.get(after.checked_sub(1)?)?;
        (address < mapping.address + mapping.count * PAGE_SIZE).then_some((*block, mapping))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_belongs_to_the_mapping_that_contains_it() {
        let mapping = |address, first, count| Mapping { address, first, count };
        let places = Places(vec![(1, mapping(0x10_000, 7, 2)), (0, mapping(0x20_000, 0, 4))]);
        let block_at =
            |address| places.find(address).map(|(block, mapping)| (block, mapping.first));
        assert_eq!(block_at(0xf_fff), None);
        assert_eq!(block_at(0x10_000), Some((1, 7)));
        assert_eq!(block_at(0x11_fff), Some((1, 7)));
        assert_eq!(block_at(0x12_000), None);
        assert_eq!(block_at(0x23_fff), Some((0, 0)));
        assert_eq!(block_at(0x24_000), None);
    }
}
