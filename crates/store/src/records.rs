//! Typed records: the manager's hosts, VMs, rules, jobs and tokens, each kind under its own prefix.
//!
//! The saved form is `{"kind": KIND, "version": N, "record": {...}}`. A saved type is a promise to
//! later versions, and separate from the types that the manager works with. It should refuse
//! unknown fields (`#[serde(deny_unknown_fields)]`), because the next write would lose them. A
//! later version is refused: guessing at it would lose data.

use std::marker::PhantomData;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::error::StoreError;
use super::revision::{KeyState, Revision};
use super::transaction::{Item, Transaction};
use super::{MOST_PAGE_ITEMS, Store};

/// A saved type.
pub trait Record: Serialize + DeserializeOwned + Send + Sync {
    /// The kind of record, in one word: "vm".
    const KIND: &'static str;
    /// Prefix of its keys, with a slash at the end: "vms/".
    const PREFIX: &'static str;
    /// The version that this program writes.
    const VERSION: u32;

    /// Converts a record of `version`, which is below [`Record::VERSION`], to the next version.
    /// `None` if this program no longer knows `version`. Called as often as needed.
    fn upgrade(version: u32, record: Value) -> Option<Value> {
        let _ = (version, record);
        None
    }
}

/// Why a record can't be read or written.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// The store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A later version of the manager wrote it.
    #[error("{key} is a {kind} of version {found}, this manager knows {known} at most")]
    Later {
        /// The key of the record.
        key: String,
        kind: &'static str,
        /// The version of the record.
        found: u32,
        /// The newest version that this manager knows.
        known: u32,
    },
    /// The record is too old.
    #[error("{key} is a {kind} of version {found}, which this manager no longer knows")]
    Earlier {
        /// The key of the record.
        key: String,
        kind: &'static str,
        /// The version of the record.
        found: u32,
    },
    /// The item is not such a record.
    #[error("cannot read {key} as a {kind}: {why}")]
    Unreadable {
        /// The key of the item.
        key: String,
        /// The expected kind.
        kind: &'static str,
        /// What is wrong.
        why: String,
    },
    /// The record cannot be converted to JSON.
    #[error("cannot write {key} as a {kind}: {why}")]
    Unwritable {
        /// The key of the record.
        key: String,
        kind: &'static str,
        /// What is wrong.
        why: String,
    },
}

impl RecordError {
    /// Returns what to do about it; empty if the message says it all.
    #[must_use]
    pub fn remedy(&self) -> String {
        match self {
            RecordError::Store(error) => error.remedy(),
            RecordError::Later { .. } => {
                "start the later manager again, or restore the backup from before the upgrade"
                    .to_owned()
            }
            RecordError::Earlier { .. } => {
                "start a manager of a version in between first: it converts records".to_owned()
            }
            RecordError::Unreadable { .. } => {
                "restore it from a backup, or remove the key".to_owned()
            }
            RecordError::Unwritable { .. } => String::new(),
        }
    }
}

/// A record as it was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kept<T> {
    /// The key without the prefix.
    pub id: String,
    /// The saved record.
    pub record: T,
    /// The revision of its last change, which a transaction that changes it expects.
    pub revision: Revision,
}

/// All records of a kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct All<T> {
    /// The records in the order of their IDs.
    pub records: Vec<Kept<T>>,
    /// The revision at which they were read.
    pub revision: Revision,
}

/// A page of records of a kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordPage<T> {
    /// The records in the order of their IDs.
    pub records: Vec<Kept<T>>,
    /// The ID after which the next page begins; `None` for the last page.
    pub next: Option<String>,
}

/// The saved form around a record.
#[derive(Serialize)]
struct Written<'a, T> {
    kind: &'static str,
    version: u32,
    record: &'a T,
}

/// The saved form at reading, before its record is parsed.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Read {
    kind: String,
    version: u32,
    record: Value,
}

/// All records of one kind in a store. The table has no state but its type.
#[derive(Debug)]
pub struct Table<T>(PhantomData<fn() -> T>);

impl<T> Clone for Table<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Table<T> {}

impl<T: Record> Default for Table<T> {
    fn default() -> Table<T> {
        Table::new()
    }
}

impl<T: Record> Table<T> {
    /// Creates the table.
    #[must_use]
    pub const fn new() -> Table<T> {
        Table(PhantomData)
    }

    /// Returns the key of the record with this ID.
    #[must_use]
    pub fn key(&self, id: &str) -> String {
        format!("{}{id}", T::PREFIX)
    }

    /// Adds the creation of a record to a transaction. The transaction is refused if the record
    /// exists.
    ///
    /// # Errors
    /// [`RecordError::Unwritable`].
    pub fn insert(
        &self,
        transaction: Transaction,
        id: &str,
        record: &T,
    ) -> Result<Transaction, RecordError> {
        self.write(transaction.expect(self.key(id), KeyState::Absent), id, record)
    }

    /// Adds the replacement of a record that was read. The transaction is refused if it has changed
    /// since.
    ///
    /// # Errors
    /// [`RecordError::Unwritable`].
    pub fn replace(
        &self,
        transaction: Transaction,
        id: &str,
        was: Revision,
        record: &T,
    ) -> Result<Transaction, RecordError> {
        self.write(transaction.expect(self.key(id), KeyState::At(was)), id, record)
    }

    /// Adds a record to a transaction, in place of the one with this ID if there is one.
    ///
    /// # Errors
    /// [`RecordError::Unwritable`].
    pub fn put(
        &self,
        transaction: Transaction,
        id: &str,
        record: &T,
    ) -> Result<Transaction, RecordError> {
        self.write(transaction, id, record)
    }

    /// Adds the removal of a record that was read. The transaction is refused if it has changed
    /// since.
    #[must_use]
    pub fn remove(&self, transaction: Transaction, id: &str, was: Revision) -> Transaction {
        let key = self.key(id);
        transaction.expect(key.clone(), KeyState::At(was)).delete(key)
    }

    fn write(
        &self,
        transaction: Transaction,
        id: &str,
        record: &T,
    ) -> Result<Transaction, RecordError> {
        let key = self.key(id);
        let text = self.encode(&key, record)?;
        Ok(transaction.put(key, text))
    }

    /// Returns the saved text of a record.
    ///
    /// # Errors
    /// [`RecordError::Unwritable`]: the record cannot be converted to JSON.
    pub fn encode(&self, key: &str, record: &T) -> Result<String, RecordError> {
        let written = Written { kind: T::KIND, version: T::VERSION, record };
        serde_json::to_string(&written).map_err(|error| RecordError::Unwritable {
            key: key.to_owned(),
            kind: T::KIND,
            why: error.to_string(),
        })
    }

    /// Reads an item as a record of this kind, and converts one of an earlier version.
    ///
    /// # Errors
    /// [`RecordError::Later`], [`RecordError::Earlier`], [`RecordError::Unreadable`].
    pub fn decode(&self, item: &Item) -> Result<Kept<T>, RecordError> {
        let record = self.decode_text(&item.key, &item.value)?;
        let id = item.key.strip_prefix(T::PREFIX).unwrap_or(&item.key).to_owned();
        Ok(Kept { id, record, revision: item.revision })
    }

    /// Reads the saved text under a key.
    ///
    /// # Errors
    /// As for [`Table::decode`].
    pub fn decode_text(&self, key: &str, text: &str) -> Result<T, RecordError> {
        let key = || key.to_owned();
        let unreadable = |why: String| RecordError::Unreadable { key: key(), kind: T::KIND, why };
        let read: Read =
            serde_json::from_str(text).map_err(|error| unreadable(error.to_string()))?;
        if read.kind != T::KIND {
            return Err(unreadable(format!("its kind is {}", read.kind)));
        }
        let found = read.version;
        if found > T::VERSION {
            return Err(RecordError::Later { key: key(), kind: T::KIND, found, known: T::VERSION });
        }
        let mut record = read.record;
        for version in found..T::VERSION {
            let earlier = || RecordError::Earlier { key: key(), kind: T::KIND, found };
            record = T::upgrade(version, record).ok_or_else(earlier)?;
        }
        serde_json::from_value(record).map_err(|error| unreadable(error.to_string()))
    }

    /// Reads all records at one revision. One unreadable record fails the call: a manager that
    /// continued without it would decide wrongly.
    ///
    /// # Errors
    /// Those of the store and of [`Table::decode`].
    pub async fn read_all(&self, store: &dyn Store) -> Result<All<T>, RecordError> {
        let snapshot = store.read(T::PREFIX).await?;
        let records: Result<_, _> = snapshot.items.iter().map(|item| self.decode(item)).collect();
        Ok(All { records: records?, revision: snapshot.revision })
    }

    /// Reads up to `limit` records ([`MOST_PAGE_ITEMS`] at most) after that ID.
    ///
    /// # Errors
    /// Those of the store and of [`Table::decode`].
    pub async fn read_page(
        &self,
        store: &dyn Store,
        after: Option<&str>,
        limit: usize,
    ) -> Result<RecordPage<T>, RecordError> {
        let after = after.map(|id| self.key(id));
        let limit = limit.clamp(1, MOST_PAGE_ITEMS);
        let page = store.read_page(T::PREFIX, after.as_deref(), limit).await?;
        let records: Result<Vec<_>, _> = page.items.iter().map(|item| self.decode(item)).collect();
        let records = records?;
        let next = records.last().filter(|_| page.more).map(|last: &Kept<T>| last.id.clone());
        Ok(RecordPage { records, next })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Candidate, MemoryStore};
    use proptest::prelude::*;

    #[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Host {
        name: String,
        weight: u64,
    }

    impl Record for Host {
        const KIND: &'static str = "host";
        const PREFIX: &'static str = "hosts/";
        const VERSION: u32 = 3;

        fn upgrade(version: u32, mut record: Value) -> Option<Value> {
            match version {
                // Hosts of version 2 had no weight.
                2 => record.as_object_mut()?.insert("weight".to_owned(), 1.into()),
                _ => return None,
            };
            Some(record)
        }
    }

    const HOSTS: Table<Host> = Table::new();

    fn host(name: &str) -> Host {
        Host { name: name.to_owned(), weight: 5 }
    }

    #[test]
    fn a_saved_record_states_its_kind_and_version() {
        let text = HOSTS.encode("hosts/a", &host("a")).unwrap();
        assert_eq!(text, r#"{"kind":"host","version":3,"record":{"name":"a","weight":5}}"#);
    }

    #[test]
    fn a_known_earlier_version_is_upgraded() {
        let earlier = r#"{"kind":"host","version":2,"record":{"name":"a"}}"#;
        assert_eq!(HOSTS.decode_text("hosts/a", earlier).unwrap().weight, 1);
        let too_early = r#"{"kind":"host","version":1,"record":{"name":"a"}}"#;
        let error = HOSTS.decode_text("hosts/a", too_early).unwrap_err();
        assert!(matches!(error, RecordError::Earlier { found: 1, .. }), "{error}");
    }

    #[test]
    fn a_later_version_is_refused_with_a_remedy() {
        let later = r#"{"kind":"host","version":4,"record":{"name":"a","weight":5}}"#;
        let error = HOSTS.decode_text("hosts/a", later).unwrap_err();
        assert!(matches!(error, RecordError::Later { found: 4, known: 3, .. }));
        assert!(
            error.to_string().contains("hosts/a") && error.remedy().contains("backup"),
            "{error}"
        );
    }

    #[test]
    fn other_kinds_and_unknown_fields_are_refused() {
        for text in [
            "",
            "{}",
            "null",
            r#"{"kind":"vm","version":3,"record":{"name":"a","weight":5}}"#,
            r#"{"kind":"host","version":-1,"record":{"name":"a","weight":5}}"#,
            r#"{"kind":"host","version":3,"record":{"name":"a","weight":5,"rack":2}}"#,
            r#"{"kind":"host","version":3,"record":{"name":"a","weight":5},"more":1}"#,
            r#"{"kind":"host","version":3,"record":{"name":"a"}}"#,
        ] {
            let error = HOSTS.decode_text("hosts/a", text).unwrap_err();
            assert!(matches!(error, RecordError::Unreadable { .. }), "{text}: {error}");
        }
    }

    #[tokio::test]
    async fn records_are_written_read_changed_and_removed() {
        let store = MemoryStore::new();
        let candidate = Candidate { name: "m".to_owned(), address: "m:7".to_owned() };
        let leads = store.lead(&candidate).await.unwrap();
        for name in ["a", "b", "c"] {
            let adds = HOSTS.insert(Transaction::new(), name, &host(name)).unwrap();
            store.commit(&leads, adds.clone()).await.unwrap();
            assert!(matches!(store.commit(&leads, adds).await, Err(StoreError::Conflict { .. })));
        }
        let all = HOSTS.read_all(&store).await.unwrap();
        let names: Vec<_> = all.records.iter().map(|kept| kept.id.as_str()).collect();
        assert_eq!(names, ["a", "b", "c"]);
        let heavy = Host { weight: 9, ..host("b") };
        let changes =
            HOSTS.replace(Transaction::new(), "b", all.records[1].revision, &heavy).unwrap();
        store.commit(&leads, changes.clone()).await.unwrap();
        assert!(matches!(store.commit(&leads, changes).await, Err(StoreError::Conflict { .. })));
        let removes = HOSTS.remove(Transaction::new(), "a", all.records[0].revision);
        store.commit(&leads, removes).await.unwrap();
        let page = HOSTS.read_page(&store, None, 1).await.unwrap();
        assert_eq!((&page.records[0].record, page.next.as_deref()), (&heavy, Some("b")));
        let page = HOSTS.read_page(&store, page.next.as_deref(), 1).await.unwrap();
        assert_eq!((&page.records[0].record, page.next), (&host("c"), None));
    }

    #[tokio::test]
    async fn an_unreadable_record_is_named() {
        let store = MemoryStore::new();
        let candidate = Candidate { name: "m".to_owned(), address: "m:7".to_owned() };
        let leads = store.lead(&candidate).await.unwrap();
        store.commit(&leads, Transaction::new().put("hosts/broken", "{}")).await.unwrap();
        let error = HOSTS.read_all(&store).await.unwrap_err();
        assert!(error.to_string().contains("hosts/broken"), "{error}");
    }

    proptest! {
        #[test]
        fn a_record_reads_back_as_written(name in ".*", weight: u64) {
            let host = Host { name, weight };
            let text = HOSTS.encode("hosts/a", &host).unwrap();
            prop_assert_eq!(HOSTS.decode_text("hosts/a", &text).unwrap(), host);
        }

        #[test]
        fn reading_any_text_does_not_panic(text in ".*", cut in 0_usize..60) {
            let _ = HOSTS.decode_text("hosts/a", &text);
            let whole = HOSTS.encode("hosts/a", &host("a")).unwrap();
            if cut < whole.len() {
                prop_assert!(HOSTS.decode_text("hosts/a", &whole[..cut]).is_err());
            }
        }
    }
}
