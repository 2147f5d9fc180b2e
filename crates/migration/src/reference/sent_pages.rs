//! The versions of pages that were sent last, as bases of deltas: a bounded cache.
//!
//! Rounds go through memory from its beginning to its end. If not all written pages fit, evicting
//! the oldest would evict each one just before it is needed. So an entry stays while its page is
//! sent in each round, and one that was not sent in the last round gives way.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};

use godwit_lanes::is_sampled;
use godwit_wire::PAGE_SIZE;
use parking_lot::{Mutex, MutexGuard};

/// Number of parts with a lock each: enough for data streams to use the cache concurrently without
/// waiting for each other.
const SHARDS: usize = 64;
/// Bytes of an entry: the page, its slot in a table that is half full at worst, and the allocator's
/// overhead.
const ENTRY_BYTES: u64 = PAGE_SIZE as u64 + 112;

/// Versions of pages by block and number.
#[derive(Debug)]
pub struct SentPages {
    shards: Vec<Mutex<Shard>>,
    most_a_shard: usize,
    /// Number of entries outside the sample; evicted entries are not subtracted.
    others: AtomicU64,
}

#[derive(Debug, Default)]
struct Shard {
    pages: HashMap<(u16, u64), Sent>,
    /// Round in which entries that were no longer sent last gave way.
    cleared_in: u32,
}

#[derive(Debug)]
struct Sent {
    round: u32,
    bytes: Box<[u8]>,
}

impl SentPages {
    /// Creates an empty cache that takes at most so many bytes of memory.
    #[must_use]
    pub fn new(most_bytes: u64) -> SentPages {
        SentPages {
            shards: (0..SHARDS).map(|_| Mutex::default()).collect(),
            most_a_shard: usize::try_from(most_bytes / ENTRY_BYTES).unwrap_or(usize::MAX) / SHARDS,
            others: AtomicU64::new(0),
        }
    }

    /// Returns whether there is room for any page.
    #[must_use]
    pub fn is_on(&self) -> bool {
        self.most_a_shard > 0
    }

    /// Returns whether there are pages outside the sample. Once there were, it stays true until the
    /// cache is cleared.
    #[must_use]
    pub fn has_others(&self) -> bool {
        self.others.load(Ordering::Relaxed) > 0
    }

    fn shard(&self, block: u16, page: u64) -> MutexGuard<'_, Shard> {
        // Groups of pages that are sent together share a part; the sample's groups must not all be
        // in the same part.
        let number = page / 8 + page / 512 + u64::from(block);
        let shard = &self.shards[usize::try_from(number).unwrap_or(0) % SHARDS];
        shard.lock()
    }

    /// Copies the version of a page sent last into `old`, which is as long. Returns false if it is
    /// unknown.
    #[must_use]
    pub fn find(&self, block: u16, page: u64, old: &mut [u8]) -> bool {
        let shard = self.shard(block, page);
        let found = shard.pages.get(&(block, page)).filter(|sent| sent.bytes.len() == old.len());
        found.map(|sent| old.copy_from_slice(&sent.bytes)).is_some()
    }

    /// Keeps the version of a page that is being sent, if there is room.
    pub fn keep(&self, round: u32, block: u16, page: u64, bytes: &[u8]) {
        let mut shard = self.shard(block, page);
        if let Some(sent) = shard.pages.get_mut(&(block, page)) {
            sent.round = round;
            sent.bytes.copy_from_slice(bytes);
            return;
        }
        if shard.pages.len() >= self.most_a_shard && shard.cleared_in < round {
            shard.cleared_in = round;
            shard.pages.retain(|_, sent| sent.round + 1 >= round);
        }
        if shard.pages.len() < self.most_a_shard {
            shard.pages.insert((block, page), Sent { round, bytes: bytes.into() });
            if !is_sampled(page) {
                self.others.fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    /// Drops the entry of a page that is sent without being kept.
    pub fn forget(&self, block: u16, page: u64) {
        self.shard(block, page).pages.remove(&(block, page));
    }

    /// Drops all entries: it is unknown what has arrived.
    pub fn clear(&self) {
        for shard in &self.shards {
            shard.lock().pages.clear();
        }
        self.others.store(0, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: usize = PAGE_SIZE as usize;

    fn found(sent: &SentPages, page: u64) -> Option<u8> {
        let mut old = vec![0; PAGE];
        sent.find(1, page, &mut old).then(|| old[PAGE - 1])
    }

    fn pages(sent: &SentPages) -> usize {
        sent.shards.iter().map(|shard| shard.lock().pages.len()).sum()
    }

    #[test]
    fn the_last_sent_page_is_found_until_it_is_forgotten() {
        let sent = SentPages::new(1 << 20);
        assert_eq!((found(&sent, 7), sent.has_others()), (None, false));
        sent.keep(1, 1, 7, &[3; PAGE]);
        sent.keep(2, 1, 7, &[4; PAGE]);
        sent.keep(2, 0, 7, &[9; PAGE]);
        assert_eq!((found(&sent, 7), sent.has_others()), (Some(4), true));
        sent.forget(1, 7);
        assert_eq!((found(&sent, 7), pages(&sent)), (None, 1));
        sent.clear();
        assert_eq!((pages(&sent), sent.has_others()), (0, false));
    }

    #[test]
    fn it_stays_within_its_memory_and_keeps_what_is_sent_each_round() {
        let most_bytes = 4 << 20;
        let sent = SentPages::new(most_bytes);
        for page in 0..5000 {
            sent.keep(1, 1, page, &[1; PAGE]);
        }
        let first = pages(&sent);
        assert!(first > 900 && first as u64 * ENTRY_BYTES <= most_bytes, "{first}");
        let stays: Vec<u64> = (0..5000).filter(|page| found(&sent, *page).is_some()).collect();
        for page in 0..5000 {
            sent.keep(2, 1, page, &[2; PAGE]);
        }
        assert!(stays.iter().all(|page| found(&sent, *page) == Some(2)));
        // Two rounds later, other pages replace those that are no longer sent.
        for page in 10_000..15_000 {
            sent.keep(4, 1, page, &[4; PAGE]);
        }
        assert_eq!(found(&sent, stays[0]), None);
        assert!(pages(&sent) > 900 && pages(&sent) as u64 * ENTRY_BYTES <= most_bytes);
    }

    #[test]
    fn no_memory_keeps_nothing() {
        let sent = SentPages::new(0);
        sent.keep(1, 1, 7, &[3; PAGE]);
        assert_eq!((sent.is_on(), found(&sent, 7)), (false, None));
    }

    #[test]
    fn sample_pages_alone_do_not_count_as_others() {
        let sent = SentPages::new(1 << 20);
        sent.keep(1, 1, 7 * 16, &[3; PAGE]);
        assert!(!sent.has_others() && found(&sent, 7 * 16).is_some());
    }
}
