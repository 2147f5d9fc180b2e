//! Records of one kind: what the manager keeps of hosts, VMs, rules, jobs and tokens, under a prefix each.
//!
//! What is saved is `{"kind": KIND, "version": N, "record": {...}}`. A type that is saved is a promise to later versions and apart from what
//! the manager works with; it should refuse fields that it does not know (`#[serde(deny_unknown_fields)]`), as they would be lost when it is
//! written again. A later version is refused: to guess at it would be to lose what it says.

use std::marker::PhantomData;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::error::StoreError;
use super::transaction::{Item, KeyState, Revision, Transaction};
use super::{MOST_PAGE_ITEMS, Store};

/// A saved type.
pub trait Record: Serialize + DeserializeOwned + Send + Sync {
    /// What it is, in one word: "vm".
    const KIND: &'static str;
    /// What its keys begin with, with a slash at the end: "vms/".
    const PREFIX: &'static str;
    /// The version that is written.
    const VERSION: u32;

    /// Makes a record of the version after `version` from one of `version`, which is below [`Record::VERSION`]; none: this version of the
    /// program does not know it any more. It is done as often as needed.
    fn upgrade(version: u32, record: Value) -> Option<Value> {
        let _ = (version, record);
        None
    }
}

/// Why a record can't be read or written.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// The store says why.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A later version of the manager wrote it.
    #[error("{key} is a {kind} of version {found}, this manager knows {known} at most")]
    Later {
        /// Where it is.
        key: String,
        kind: &'static str,
        /// Its version.
        found: u32,
        /// The newest one that is known.
        known: u32,
    },
    /// It is too old.
    #[error("{key} is a {kind} of version {found}, which this manager knows no more")]
    Earlier {
        /// Where it is.
        key: String,
        kind: &'static str,
        /// Its version.
        found: u32,
    },
    /// It is no such record.
    #[error("{key} is no {kind}: {why}")]
    Unreadable {
        /// Where it is.
        key: String,
        /// What it should be.
        kind: &'static str,
        /// What is wrong.
        why: String,
    },
    /// It can't be made JSON.
    #[error("{key} can't be written as a {kind}: {why}")]
    Unwritable {
        /// Where it should be.
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
                "start a manager between the two first: it brings records forward".to_owned()
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
    /// Its key without the prefix.
    pub id: String,
    /// What is saved.
    pub record: T,
    /// The revision of its last change: what a transaction that changes it expects.
    pub revision: Revision,
}

/// All records of a kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct All<T> {
    /// In the order of their ids.
    pub records: Vec<Kept<T>>,
    /// When they were like this.
    pub revision: Revision,
}

/// Some records of a kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordPage<T> {
    /// In the order of their ids.
    pub records: Vec<Kept<T>>,
    /// Further ones follow: ask for those after this id.
    pub next: Option<String>,
}

/// What is saved, around a record.
#[derive(Serialize)]
struct Written<'a, T> {
    kind: &'static str,
    version: u32,
    record: &'a T,
}

/// The same as it is read, before the record's own type is known to fit.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Read {
    kind: String,
    version: u32,
    record: Value,
}

/// All records of one kind in a store. It is no more than its type.
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
    /// The table of that kind.
    #[must_use]
    pub const fn new() -> Table<T> {
        Table(PhantomData)
    }

    /// The key of the record with this id.
    #[must_use]
    pub fn key(&self, id: &str) -> String {
        format!("{}{id}", T::PREFIX)
    }

    /// Adds to a transaction that a new record is written: it is refused where there is one already.
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

    /// Adds that a record is written in the place of the one that was read: it is refused if that has changed since.
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

    /// Adds that a record is removed, if it is still the one that was read.
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

    /// The text that is saved of a record.
    ///
    /// # Errors
    /// [`RecordError::Unwritable`]: it can't be made JSON.
    pub fn encode(&self, key: &str, record: &T) -> Result<String, RecordError> {
        let written = Written { kind: T::KIND, version: T::VERSION, record };
        serde_json::to_string(&written).map_err(|error| RecordError::Unwritable {
            key: key.to_owned(),
            kind: T::KIND,
            why: error.to_string(),
        })
    }

    /// Reads an item as a record of this kind, and brings one of an earlier version forward.
    ///
    /// # Errors
    /// [`RecordError::Later`], [`RecordError::Earlier`], [`RecordError::Unreadable`].
    pub fn decode(&self, item: &Item) -> Result<Kept<T>, RecordError> {
        let record = self.decode_text(&item.key, &item.value)?;
        let id = item.key.strip_prefix(T::PREFIX).unwrap_or(&item.key).to_owned();
        Ok(Kept { id, record, revision: item.revision })
    }

    /// Reads what is saved under a key.
    ///
    /// # Errors
    /// As [`Table::decode`].
    pub fn decode_text(&self, key: &str, text: &str) -> Result<T, RecordError> {
        let key = || key.to_owned();
        let unreadable = |why: String| RecordError::Unreadable { key: key(), kind: T::KIND, why };
        let read: Read =
            serde_json::from_str(text).map_err(|error| unreadable(error.to_string()))?;
        if read.kind != T::KIND {
            return Err(unreadable(format!("it says that it is a {}", read.kind)));
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

    /// All records, as of one revision. One that can't be read fails all: a manager that went on without it would decide wrongly.
    ///
    /// # Errors
    /// The store's, and those of [`Table::decode`].
    pub async fn read_all(&self, store: &dyn Store) -> Result<All<T>, RecordError> {
        let snapshot = store.read(T::PREFIX).await?;
        let records: Result<_, _> = snapshot.items.iter().map(|item| self.decode(item)).collect();
        Ok(All { records: records?, revision: snapshot.revision })
    }

    /// Up to `limit` records ([`MOST_PAGE_ITEMS`] at most) after that id.
    ///
    /// # Errors
    /// The store's, and those of [`Table::decode`].
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
    fn what_is_saved_says_what_it_is() {
        let text = HOSTS.encode("hosts/a", &host("a")).unwrap();
        assert_eq!(text, r#"{"kind":"host","version":3,"record":{"name":"a","weight":5}}"#);
    }

    #[test]
    fn an_earlier_version_is_brought_forward_as_long_as_it_is_known() {
        let earlier = r#"{"kind":"host","version":2,"record":{"name":"a"}}"#;
        assert_eq!(HOSTS.decode_text("hosts/a", earlier).unwrap().weight, 1);
        let too_early = r#"{"kind":"host","version":1,"record":{"name":"a"}}"#;
        let error = HOSTS.decode_text("hosts/a", too_early).unwrap_err();
        assert!(matches!(error, RecordError::Earlier { found: 1, .. }), "{error}");
    }

    #[test]
    fn a_later_version_is_refused_with_what_to_do() {
        let later = r#"{"kind":"host","version":4,"record":{"name":"a","weight":5}}"#;
        let error = HOSTS.decode_text("hosts/a", later).unwrap_err();
        assert!(matches!(error, RecordError::Later { found: 4, known: 3, .. }));
        assert!(
            error.to_string().contains("hosts/a") && error.remedy().contains("backup"),
            "{error}"
        );
    }

    #[test]
    fn what_is_something_else_or_has_more_than_is_known_is_refused() {
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
    async fn one_that_cant_be_read_is_named() {
        let store = MemoryStore::new();
        let candidate = Candidate { name: "m".to_owned(), address: "m:7".to_owned() };
        let leads = store.lead(&candidate).await.unwrap();
        store.commit(&leads, Transaction::new().put("hosts/broken", "{}")).await.unwrap();
        let error = HOSTS.read_all(&store).await.unwrap_err();
        assert!(error.to_string().contains("hosts/broken"), "{error}");
    }

    proptest! {
        #[test]
        fn a_record_comes_back_as_it_was_written(name in ".*", weight: u64) {
            let host = Host { name, weight };
            let text = HOSTS.encode("hosts/a", &host).unwrap();
            prop_assert_eq!(HOSTS.decode_text("hosts/a", &text).unwrap(), host);
        }

        #[test]
        fn no_text_is_taken_for_a_record_by_a_crash(text in ".*", cut in 0_usize..60) {
            let _ = HOSTS.decode_text("hosts/a", &text);
            let whole = HOSTS.encode("hosts/a", &host("a")).unwrap();
            if cut < whole.len() {
                prop_assert!(HOSTS.decode_text("hosts/a", &whole[..cut]).is_err());
            }
        }
    }
}
