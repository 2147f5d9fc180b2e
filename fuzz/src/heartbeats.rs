//! Heartbeat blocks on shared datastores, and those of VMs that agents restart, which anyone with
//! access to a datastore can write.

use godwit_ha::heartbeat::{Block, Slot};
use godwit_ha::own::{End, OwnBlock};

pub fn run(data: &[u8]) {
    run_own(data);
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

fn run_own(data: &[u8]) {
    let Ok(Some(own)) = OwnBlock::decode(data) else { return };
    assert_eq!(own.encode(), data, "a block has one form");
    assert!(Block::decode(data).is_err(), "a block is of one kind");
    let (slot, mark) = (own.block.slot, own.block.mark);
    let next = |slot| OwnBlock::next(Some(own), (slot, mark.term), 0, (true, End::Stopped));
    let other = Slot { host: slot.host.map(|byte| !byte), ..slot };
    assert!(next(other).is_err());
    match next(slot) {
        Ok(next) => {
            assert!(own.end == End::None && next.block.mark.sequence > mark.sequence);
            assert_eq!(OwnBlock::decode(&next.encode()), Ok(Some(next)));
        }
        Err(_) => assert!(own.end != End::None || mark.sequence == u64::MAX),
    }
}
