//! Who did what: entries that are added, never changed, and removed when they are too old or too many.
//!
//! Keys count time backwards, so that the newest entry is the first and a page of the newest costs a page: etcd sorts all that is there when it
//! is asked for the other order. After the time comes the epoch of the manager that wrote the entry, and its number: no key comes twice. An
//! entry goes into the transaction of what it tells, so that both are there or neither is.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use godwit_store::records::{Record, RecordError, Table};
use godwit_store::{Leadership, MOST_KEYS, MOST_PAGE_ITEMS, Revision, Store, Transaction};
use serde::{Deserialize, Serialize};

/// The last millisecond that a key can hold, some 8,900 years from now.
const LAST_MS: u64 = (1 << 48) - 1;

/// One thing that was done, as it is saved.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AuditEntry {
    /// When, in milliseconds since 1970, by the clock of the manager that wrote it.
    pub at_unix_ms: u64,
    /// Who: an operator's or a token's name.
    pub who: String,
    /// What: a method and a path.
    pub what: String,
    /// Nothing by now: the path has it.
    pub about: String,
    /// Whether it was done, and else why not.
    pub outcome: String,
    /// The entry as it is told.
    #[serde(default, skip_serializing_if = "serde_json::Value::is_null")]
    pub detail: serde_json::Value,
}

impl Record for AuditEntry {
    const KIND: &'static str = "audit";
    const PREFIX: &'static str = "audit/";
    const VERSION: u32 = 1;
}

/// The audit log's entries, newest first: what pages of it are read by.
pub const AUDIT: Table<AuditEntry> = Table::new();

/// Adds entries, for one leadership.
#[derive(Debug)]
pub struct AuditLog {
    epoch: Revision,
    written: u64,
}

impl AuditLog {
    /// Adds entries for as long as this leadership holds.
    #[must_use]
    pub fn new(leadership: &Leadership) -> AuditLog {
        AuditLog { epoch: leadership.epoch(), written: 0 }
    }

    /// Adds an entry to the transaction that does what it tells.
    ///
    /// # Errors
    /// [`RecordError::Unwritable`].
    pub fn add(
        &mut self,
        transaction: Transaction,
        entry: &AuditEntry,
    ) -> Result<Transaction, RecordError> {
        let id = id(entry.at_unix_ms, self.epoch, self.written);
        self.written += 1;
        AUDIT.insert(transaction, &id, entry)
    }
}

/// How much of the log is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Retention {
    /// Entries at most; the newest stay.
    pub most_entries: usize,
    /// None that is older.
    pub longest: Duration,
}

impl Default for Retention {
    fn default() -> Retention {
        Retention { most_entries: 100_000, longest: Duration::from_secs(400 * 24 * 3600) }
    }
}

/// Which entries go, by index: of entries newest first, given by their age, of which so many are before them. An entry of the future has none.
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

/// Removes what the retention does not keep; tells how many entries that were.
///
/// # Errors
/// The store's. What was removed until then stays so.
pub async fn prune(
    store: &dyn Store,
    leadership: &Leadership,
    retention: Retention,
    now: SystemTime,
) -> Result<usize, RecordError> {
    let now_ms = unix_ms(now);
    let (mut read, mut removed) = (0, 0);
    let mut after: Option<String> = None;
    // A page at a time: all of the log is more than a manager should have in memory.
    loop {
        let page = store.read_page(AuditEntry::PREFIX, after.as_deref(), MOST_PAGE_ITEMS).await?;
        let keys: Vec<String> = page.items.into_iter().map(|item| item.key).collect();
        // A key that says no time is none of the log's: it is as old as can be.
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

/// Milliseconds since 1970.
#[must_use]
pub fn unix_ms(time: SystemTime) -> u64 {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default().as_millis();
    u64::try_from(since).unwrap_or(LAST_MS).min(LAST_MS)
}

/// An entry's id: greater for an older one.
fn id(at_unix_ms: u64, epoch: Revision, number: u64) -> String {
    let back = LAST_MS - at_unix_ms.min(LAST_MS);
    format!("{back:012x}-{:016x}-{:016x}", u64::MAX - epoch.0, u64::MAX - number)
}

/// When the entry with this key was written, in milliseconds since 1970.
fn time_of(key: &str) -> Option<u64> {
    let id = key.strip_prefix(AuditEntry::PREFIX)?;
    let (back, _) = id.split_once('-')?;
    LAST_MS.checked_sub(u64::from_str_radix(back, 16).ok()?)
}

#[cfg(test)]
mod tests {
    use godwit_store::{Candidate, MemoryStore};
    use proptest::prelude::*;

    use super::*;

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
    async fn pages_have_the_newest_first_also_within_a_millisecond_and_after_a_takeover() {
        let store = MemoryStore::new();
        let first = leads(&store).await;
        let mut log = AuditLog::new(&first);
        for (at, about) in [(1000, "a"), (2000, "b"), (2000, "c")] {
            let adds = log.add(Transaction::new(), &entry(at, about)).unwrap();
            store.commit(&first, adds).await.unwrap();
        }
        first.resign().await.unwrap();
        let second = leads(&store).await;
        let mut log = AuditLog::new(&second);
        let adds = log.add(Transaction::new(), &entry(2000, "d")).unwrap();
        store.commit(&second, adds).await.unwrap();
        let page = AUDIT.read_page(&store, None, 3).await.unwrap();
        let seen: Vec<_> = page.records.iter().map(|kept| kept.record.about.as_str()).collect();
        assert_eq!(seen, ["d", "c", "b"]);
        let page = AUDIT.read_page(&store, page.next.as_deref(), 3).await.unwrap();
        assert_eq!((page.records[0].record.about.as_str(), page.next), ("a", None));
    }

    #[tokio::test]
    async fn what_is_too_old_or_too_many_is_removed() {
        let store = MemoryStore::new();
        let leads = leads(&store).await;
        let mut log = AuditLog::new(&leads);
        for n in 0..300_u64 {
            let adds = log.add(Transaction::new(), &entry(1000 * n, &n.to_string())).unwrap();
            store.commit(&leads, adds).await.unwrap();
        }
        let now = UNIX_EPOCH + Duration::from_secs(300);
        let by_age = Retention { most_entries: 1000, longest: Duration::from_secs(20) };
        assert_eq!(prune(&store, &leads, by_age, now).await.unwrap(), 280);
        let by_count = Retention { most_entries: 2, longest: Duration::from_secs(1000) };
        assert_eq!(prune(&store, &leads, by_count, now).await.unwrap(), 18);
        assert_eq!(abouts(&store).await, ["299", "298"]);
        assert_eq!(prune(&store, &leads, by_count, now).await.unwrap(), 0);
    }

    #[tokio::test]
    async fn entries_are_counted_across_pages() {
        let store = MemoryStore::new();
        let leads = leads(&store).await;
        let mut log = AuditLog::new(&leads);
        let all = 2 * MOST_PAGE_ITEMS as u64 + 10;
        for n in 0..all {
            let adds = log.add(Transaction::new(), &entry(n, &n.to_string())).unwrap();
            store.commit(&leads, adds).await.unwrap();
        }
        let retention =
            Retention { most_entries: MOST_PAGE_ITEMS + 5, longest: Duration::from_secs(1000) };
        let removed =
            prune(&store, &leads, retention, UNIX_EPOCH + Duration::from_secs(100)).await.unwrap();
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
            prop_assert_eq!(time_of(&format!("audit/{}", make(one))), Some(one.0));
        }

        #[test]
        fn what_stays_is_the_newest_and_none_too_old(
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
