//! Heartbeat blocks on shared datastores, which anyone with access to a datastore can write.

use godwit_ha::heartbeat::{Block, Slot};

pub fn run(data: &[u8]) {
    let Ok(Some(block)) = Block::decode(data) else { return };
    assert_eq!(block.encode(), data, "a block has one form");
    assert_eq!(block.mark_of(block.slot), Ok(block.mark));
    let other = Slot { cluster: block.slot.cluster.map(|byte| !byte), ..block.slot };
    assert!(
        block.mark_of(other).is_err() && Block::next(Some(block), other, block.mark.term).is_err()
    );
    let next = Block::next(Some(block), block.slot, block.mark.term).expect("its own block");
    assert_eq!(Block::decode(&next.encode()), Ok(Some(next)));
}
