//! A source's knowledge of its destination's content: the location of a page by the prefix of its
//! hash.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};

use godwit_wire::{Digests, MAX_BLOCKS, Place};
use parking_lot::{Mutex, MutexGuard};

/// Number of parts with a lock each: enough for data streams to look up pages concurrently without
/// waiting for each other.
const SHARDS: usize = 64;
/// Bytes of an entry in a full table: key, value and a byte of the table's own, with 7 of 8 slots
/// in use.
const SLOT_BYTES: usize = 17;
/// Bits of a page's number in an entry; 64 blocks take 6 more, and the content's number the rest.
const PAGE_BITS: u32 = 42;
const BLOCK_BITS: u32 = 6;
const _: () = assert!(1 << BLOCK_BITS == MAX_BLOCKS && PAGE_BITS + BLOCK_BITS + 16 == 64);

/// Locations by content, as many as fit into the memory allowed; the first ones stay.
#[derive(Debug)]
pub struct ContentIndex {
    shards: Vec<Mutex<HashMap<u64, u64>>>,
    most_a_shard: usize,
    /// Entries of content that is not the guest's own.
    foreign: AtomicU64,
}

impl ContentIndex {
    /// Creates empty knowledge that takes at most so many bytes of memory.
    #[must_use]
    pub fn new(most_bytes: u64) -> ContentIndex {
        let slots = usize::try_from(most_bytes).unwrap_or(usize::MAX) / SHARDS / SLOT_BYTES;
        // Tables have a power of two of slots.
        let slots = if slots.is_power_of_two() { slots } else { slots.next_power_of_two() / 2 };
        ContentIndex {
            shards: (0..SHARDS).map(|_| Mutex::default()).collect(),
            most_a_shard: slots / 8 * 7,
            foreign: AtomicU64::new(0),
        }
    }

    fn shard(&self, prefix: u64) -> MutexGuard<'_, HashMap<u64, u64>> {
        let shard = &self.shards[usize::try_from(prefix >> 58).unwrap_or(0) % SHARDS];
        shard.lock()
    }

    /// Notes where content with a prefix is. The guest's own pages give way to other content, which
    /// stays, and to later pages of its own.
    pub fn insert(&self, prefix: u64, place: Place) {
        let Some(packed) = pack(place).filter(|_| prefix != 0) else { return };
        let is_own = |packed: u64| packed >> (PAGE_BITS + BLOCK_BITS) == 0;
        let mut shard = self.shard(prefix);
        let room = shard.len() < self.most_a_shard;
        match shard.get_mut(&prefix) {
            Some(known) if is_own(*known) => *known = packed,
            Some(_) => return,
            None if room => drop(shard.insert(prefix, packed)),
            None => return,
        }
        if !is_own(packed) {
            self.foreign.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Takes in a destination's digests.
    pub fn add(&self, digests: &Digests) {
        let Place { page: first, .. } = digests.place;
        for (page, &prefix) in (first..).zip(&digests.prefixes) {
            self.insert(prefix, Place { page, ..digests.place });
        }
    }

    /// Returns where content with a prefix probably is.
    #[must_use]
    pub fn find(&self, prefix: u64) -> Option<Place> {
        self.shard(prefix).get(&prefix).copied().map(unpack)
    }

    /// Returns the number of pages of which locations fit.
    #[cfg(test)]
    pub(crate) fn most(&self) -> u64 {
        (SHARDS * self.most_a_shard) as u64
    }

    /// Returns the number of known pages of content that is not the guest's own.
    #[must_use]
    pub fn foreign(&self) -> u64 {
        self.foreign.load(Ordering::Relaxed)
    }
}

/// Encodes a location. Returns `None` if no VM has such a page.
fn pack(place: Place) -> Option<u64> {
    let Place { content, block, page } = place;
    (page < 1 << PAGE_BITS && block < MAX_BLOCKS).then_some(
        u64::from(content) << (PAGE_BITS + BLOCK_BITS)
            | u64::from(block) << PAGE_BITS
            | (page & ((1 << PAGE_BITS) - 1)),
    )
}

#[allow(clippy::cast_possible_truncation)] // fields of 16, 6 and 42 bits
fn unpack(packed: u64) -> Place {
    Place {
        content: (packed >> (PAGE_BITS + BLOCK_BITS)) as u16,
        block: (packed >> PAGE_BITS) as u16 % MAX_BLOCKS,
        page: packed & ((1 << PAGE_BITS) - 1),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn places_survive(
            content in any::<u16>(),
            block in 0..MAX_BLOCKS,
            page in 0..1u64 << PAGE_BITS,
        ) {
            let place = Place { content, block, page };
            prop_assert_eq!(pack(place).map(unpack), Some(place));
        }

        #[test]
        fn any_notifications_stay_within_the_memory_limit(
            prefixes in prop::collection::vec(any::<u64>(), 0..4000),
            page in any::<u64>(),
            most_bytes in 0u64..200_000,
        ) {
            let known = ContentIndex::new(most_bytes);
            known.add(&Digests {
                place: Place { content: 1, block: 70, page },
                prefixes: prefixes.clone(),
            });
            prop_assert_eq!(known.foreign(), 0);
            let page = page % (1 << 41);
            known.add(&Digests { place: Place { content: 1, block: 0, page }, prefixes });
            prop_assert!(known.foreign() * SLOT_BYTES as u64 <= most_bytes);
        }
    }

    #[test]
    fn own_pages_give_way() {
        let known = ContentIndex::new(1 << 20);
        let at = |content, page| Place { content, block: 2, page };
        for place in [at(0, 1), at(0, 2)] {
            known.insert(7, place);
            assert_eq!(known.find(7), Some(place));
        }
        known.insert(7, at(3, 9));
        known.insert(7, at(0, 4));
        known.insert(7, at(5, 4));
        assert_eq!((known.find(7), known.foreign()), (Some(at(3, 9)), 1));
        known.insert(0, at(3, 9));
        assert_eq!((known.find(0), known.find(8)), (None, None));
    }
}
