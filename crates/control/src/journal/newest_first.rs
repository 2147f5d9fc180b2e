//! Tables that are read newest first: the audit log and the journal. Entries are added, never
//! changed, and removed when they are too old or too many.
//!
//! Keys count time backwards, so the newest entry comes first and reading the newest page costs one
//! page: for the other order, etcd would sort all entries. After the time, the key has the epoch of
//! the manager that wrote the entry and a number, so keys are unique. An entry is written in the
//! transaction of the change it describes, so both exist or neither does.

use std::marker::PhantomData;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use godwit_store::records::{Record, RecordError, Table};
use godwit_store::{Leadership, MOST_KEYS, MOST_PAGE_ITEMS, Revision, Store, Transaction};

/// Last millisecond that a key can hold, some 8,900 years from now.
const LAST_MS: u64 = (1 << 48) - 1;

/// Writer of entries of one kind during one leadership.
#[derive(Debug)]
pub struct Log<T> {
    epoch: Revision,
    written: AtomicU64,
    kind: PhantomData<fn() -> T>,
}

impl<T: Record> Log<T> {
    /// Creates a writer that is valid as long as this leadership.
    #[must_use]
    pub fn new(leadership: &Leadership) -> Log<T> {
        Log { epoch: leadership.epoch(), written: AtomicU64::new(0), kind: PhantomData }
    }

    /// Returns the ID of a new entry of this time, milliseconds since 1970.
    #[must_use]
    pub fn next_id(&self, at_unix_ms: u64) -> String {
        id(at_unix_ms, self.epoch, self.written.fetch_add(1, Ordering::Relaxed))
    }

    /// Adds an entry of this time to the transaction of the change that it describes.
    ///
    /// # Errors
    /// [`RecordError::Unwritable`].
    pub fn add(
        &self,
        transaction: Transaction,
        at_unix_ms: u64,
        entry: &T,
    ) -> Result<Transaction, RecordError> {
        Table::new().insert(transaction, &self.next_id(at_unix_ms), entry)
    }
}

/// Retention of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Retention {
    /// Most entries; the newest stay.
    pub most_entries: usize,
    /// Greatest age of an entry.
    pub longest: Duration,
}

impl Default for Retention {
    fn default() -> Retention {
        Retention { most_entries: 100_000, longest: Duration::from_secs(400 * 24 * 3600) }
    }
}

/// Returns the indexes of expired entries. `ages` are the ages of consecutive entries, newest
/// first; `before` counts the newer entries before them. An entry from the future has age zero.
#[must_use]
pub fn expired(
    before: usize,
    ages: impl IntoIterator<Item = Duration>,
    retention: Retention,
) -> Vec<usize> {
    let gone = |(index, age): &(usize, Duration)| {
        before + *index >= retention.most_entries || *age > retention.longest
    };
    ages.into_iter().enumerate().filter(gone).map(|(index, _)| index).collect()
}

/// Removes entries beyond the retention. Returns their number.
///
/// # Errors
/// Errors of the store. Entries removed before the error stay removed.
pub async fn prune<T: Record>(
    store: &dyn Store,
    leadership: &Leadership,
    retention: Retention,
    now: SystemTime,
) -> Result<usize, RecordError> {
    let now_ms = unix_ms(now);
    let (mut read, mut removed) = (0, 0);
    let mut after: Option<String> = None;
    // Reads page by page, because the whole table is too large for a manager's memory.
    loop {
        let page = store.read_page(T::PREFIX, after.as_deref(), MOST_PAGE_ITEMS).await?;
        let keys: Vec<String> = page.items.into_iter().map(|item| item.key).collect();
        // A key without a readable time does not belong to the table; it counts as the oldest.
        let time_of = |key: &String| time_of(key.strip_prefix(T::PREFIX)?);
        let age =
            |key: &String| Duration::from_millis(now_ms.saturating_sub(time_of(key).unwrap_or(0)));
        let gone = expired(read, keys.iter().map(age), retention);
        for some in gone.chunks(MOST_KEYS) {
            let removes = some
                .iter()
                .fold(Transaction::new(), |all, index| all.delete(keys[*index].as_str()));
            store.commit(leadership, removes).await?;
        }
        read += keys.len();
        removed += gone.len();
        after = keys.into_iter().last();
        if !page.more || after.is_none() {
            return Ok(removed);
        }
    }
}

/// Returns milliseconds since 1970.
#[must_use]
pub fn unix_ms(time: SystemTime) -> u64 {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default().as_millis();
    u64::try_from(since).unwrap_or(LAST_MS).min(LAST_MS)
}

/// Returns an entry's ID, which is greater for an older entry.
fn id(at_unix_ms: u64, epoch: Revision, number: u64) -> String {
    let back = LAST_MS - at_unix_ms.min(LAST_MS);
    format!("{back:012x}-{:016x}-{:016x}", u64::MAX - epoch.0, u64::MAX - number)
}

/// Returns the time of the entry with this ID, in milliseconds since 1970.
#[must_use]
pub fn time_of(id: &str) -> Option<u64> {
    let (back, _) = id.split_once('-')?;
    LAST_MS.checked_sub(u64::from_str_radix(back, 16).ok()?)
}

/// Returns the cursor behind all entries later than this time, milliseconds since 1970.
#[must_use]
pub fn behind_later_than(unix_ms: u64) -> String {
    // Shorter than any ID of that millisecond, so it sorts before them.
    format!("{:012x}", LAST_MS - unix_ms.min(LAST_MS))
}

#[cfg(test)]
mod tests {
    use godwit_store::{Candidate, MemoryStore};
    use proptest::prelude::*;

    use super::*;
    use crate::journal::audit::{AUDIT, AuditEntry};

    fn entry(at_unix_ms: u64, about: &str) -> AuditEntry {
        AuditEntry {
            at_unix_ms,
            who: "ada".to_owned(),
            what: "vm.move".to_owned(),
            about: about.to_owned(),
            outcome: "done".to_owned(),
            detail: serde_json::Value::Null,
        }
    }

    async fn leads(store: &MemoryStore) -> Leadership {
        store.lead(&Candidate { name: "m".to_owned(), address: "m:7".to_owned() }).await.unwrap()
    }

    async fn abouts(store: &MemoryStore) -> Vec<String> {
        let all = AUDIT.read_all(store).await.unwrap();
        all.records.into_iter().map(|kept| kept.record.about).collect()
    }

    #[tokio::test]
    async fn pages_are_newest_first_even_within_a_millisecond_and_after_a_takeover() {
        let store = MemoryStore::new();
        let first = leads(&store).await;
        let log = Log::new(&first);
        for (at, about) in [(1000, "a"), (2000, "b"), (2000, "c")] {
            let adds = log.add(Transaction::new(), at, &entry(at, about)).unwrap();
            store.commit(&first, adds).await.unwrap();
        }
        first.resign().await.unwrap();
        let second = leads(&store).await;
        let log = Log::new(&second);
        let adds = log.add(Transaction::new(), 2000, &entry(2000, "d")).unwrap();
        store.commit(&second, adds).await.unwrap();
        let page = AUDIT.read_page(&store, None, 3).await.unwrap();
        let seen: Vec<_> = page.records.iter().map(|kept| kept.record.about.as_str()).collect();
        assert_eq!(seen, ["d", "c", "b"]);
        let page = AUDIT.read_page(&store, page.next.as_deref(), 3).await.unwrap();
        assert_eq!((page.records[0].record.about.as_str(), page.next), ("a", None));
    }

    #[tokio::test]
    async fn entries_too_old_or_too_many_are_removed() {
        let store = MemoryStore::new();
        let leads = leads(&store).await;
        let log = Log::new(&leads);
        for n in 0..300_u64 {
            let adds =
                log.add(Transaction::new(), 1000 * n, &entry(1000 * n, &n.to_string())).unwrap();
            store.commit(&leads, adds).await.unwrap();
        }
        let now = UNIX_EPOCH + Duration::from_secs(300);
        let by_age = Retention { most_entries: 1000, longest: Duration::from_secs(20) };
        assert_eq!(prune::<AuditEntry>(&store, &leads, by_age, now).await.unwrap(), 280);
        let by_count = Retention { most_entries: 2, longest: Duration::from_secs(1000) };
        assert_eq!(prune::<AuditEntry>(&store, &leads, by_count, now).await.unwrap(), 18);
        assert_eq!(abouts(&store).await, ["299", "298"]);
        assert_eq!(prune::<AuditEntry>(&store, &leads, by_count, now).await.unwrap(), 0);
    }

    #[tokio::test]
    async fn entries_are_counted_across_pages() {
        let store = MemoryStore::new();
        let leads = leads(&store).await;
        let log = Log::new(&leads);
        let all = 2 * MOST_PAGE_ITEMS as u64 + 10;
        for n in 0..all {
            let adds = log.add(Transaction::new(), n, &entry(n, &n.to_string())).unwrap();
            store.commit(&leads, adds).await.unwrap();
        }
        let retention =
            Retention { most_entries: MOST_PAGE_ITEMS + 5, longest: Duration::from_secs(1000) };
        let removed =
            prune::<AuditEntry>(&store, &leads, retention, UNIX_EPOCH + Duration::from_secs(100))
                .await
                .unwrap();
        assert_eq!(removed, MOST_PAGE_ITEMS + 5);
        let (kept, newest) = (abouts(&store).await, (all - 1).to_string());
        assert_eq!((kept.len(), &kept[0]), (MOST_PAGE_ITEMS + 5, &newest));
    }

    proptest! {
        #[test]
        fn ids_sort_newest_first(
            one in (0..LAST_MS, 0..u64::MAX, 0..u64::MAX),
            other in (0..LAST_MS, 0..u64::MAX, 0..u64::MAX),
        ) {
            let make = |(at, epoch, number)| id(at, Revision(epoch), number);
            prop_assert_eq!(one.cmp(&other), make(other).cmp(&make(one)));
            prop_assert_eq!(time_of(&make(one)), Some(one.0));
        }

        #[test]
        fn a_time_leads_to_the_entries_of_its_millisecond(
            at in 0..LAST_MS - 1, epoch in 0..u64::MAX, number in 0..u64::MAX,
        ) {
            let cursor = behind_later_than(at);
            prop_assert!(cursor < id(at, Revision(epoch), number));
            prop_assert!(cursor > id(at + 1, Revision(epoch), number));
        }

        #[test]
        fn the_newest_entries_stay_and_none_is_too_old(
            mut seconds in proptest::collection::vec(0_u64..100, 0..60),
            most_entries in 0_usize..60,
            longest in 0_u64..100,
        ) {
            seconds.sort_unstable();
            let retention = Retention { most_entries, longest: Duration::from_secs(longest) };
            let gone = expired(0, seconds.iter().map(|age| Duration::from_secs(*age)), retention);
            let stays: Vec<_> = (0..seconds.len()).filter(|index| !gone.contains(index)).collect();
            let young = seconds.iter().filter(|age| **age <= longest).count();
            prop_assert_eq!(stays, (0..young.min(most_entries)).collect::<Vec<_>>());
        }
    }
}
