//! Writer of the manager's records. It writes under the manager's leadership and over the last
//! revision that it read or wrote; a concurrent change makes the write fail.
//!
//! **Changes in doubt.** The answer to a change can be lost, and the caller can disconnect while
//! the change is in progress. So each change is noted before it is sent. If no answer arrives, the
//! key is read: either it has the new value, which is then known, or it does not. The key is
//! checked again before its next change, because the store may have been unreachable or the change
//! still in progress.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use godwit_api::control::{AuditEntry, JournalEntry, Problem, ProblemCode};
use godwit_store::records::{Kept, Record, RecordError, Table};
use godwit_store::{
    Candidate, KeyState, Leadership, MOST_KEYS, MOST_PAGE_ITEMS, Revision, Store, StoreError,
    Transaction, Written,
};
use parking_lot::{Mutex, MutexGuard};

use super::logs::Logs;
use crate::journal::audit::{self, AUDIT};
use crate::journal::entries::{JOURNAL, NewEntry};
use crate::journal::events::Events;

/// Records that are written together or not at all.
#[derive(Debug, Default)]
pub(crate) struct Writes {
    transaction: Transaction,
    /// Keys whose revision is known after the write.
    keys: Vec<String>,
    /// Entries of the journal that describe the change.
    entries: Vec<JournalEntry>,
}

impl From<Transaction> for Writes {
    /// Converts a transaction whose revisions are not tracked.
    fn from(transaction: Transaction) -> Writes {
        Writes { transaction, ..Writes::default() }
    }
}

impl Writes {
    pub(crate) fn add(&mut self, others: Writes) {
        self.keys.extend(others.keys);
        self.entries.extend(others.entries);
        self.transaction = std::mem::take(&mut self.transaction).and(others.transaction);
    }

    /// Returns whether one transaction holds these writes as well.
    pub(crate) fn has_room_for(&self, others: &Writes) -> bool {
        self.transaction.has_room_for(&others.transaction)
    }
}

/// State of the keys.
#[derive(Debug, Default)]
struct KeyStates {
    /// Revision of each key at its last read or write.
    revisions: BTreeMap<String, Revision>,
    /// Value sent to each key whose change is in doubt; `None` for a removal.
    doubts: BTreeMap<String, Option<String>>,
}

/// The store, as the leading manager uses it.
pub(crate) struct Keeper {
    store: Arc<dyn Store>,
    leadership: Arc<Leadership>,
    candidate: Candidate,
    known: Mutex<KeyStates>,
    logs: Logs,
}

impl fmt::Debug for Keeper {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Keeper").field("candidate", &self.candidate).finish_non_exhaustive()
    }
}

impl Keeper {
    /// Creates a keeper that writes under this leadership.
    pub(crate) fn new(
        store: Arc<dyn Store>,
        leadership: Arc<Leadership>,
        candidate: Candidate,
    ) -> Keeper {
        let logs = Logs::begin(&store, &leadership);
        Keeper { store, leadership, candidate, known: Mutex::default(), logs }
    }

    /// Returns the leading manager, which is this one.
    pub(crate) fn candidate(&self) -> &Candidate {
        &self.candidate
    }

    /// Returns whether this manager may rely on leading.
    pub(crate) fn holds(&self) -> bool {
        self.leadership.holds()
    }

    /// Returns the underlying store.
    #[cfg(test)]
    pub(crate) fn store(&self) -> &Arc<dyn Store> {
        &self.store
    }

    /// Returns all records of a kind, by ID.
    pub(crate) async fn read_all<T: Record>(
        &self,
        table: Table<T>,
    ) -> Result<Vec<(String, T)>, Problem> {
        let all = table.read_all(&*self.store).await.map_err(problem)?;
        let mut known = self.known();
        let records = all.records.into_iter().map(|kept| {
            known.revisions.insert(table.key(&kept.id), kept.revision);
            (kept.id, kept.record)
        });
        Ok(records.collect())
    }

    pub(crate) async fn insert<T: Record>(
        &self,
        table: Table<T>,
        id: &str,
        record: &T,
    ) -> Result<(), Problem> {
        self.insert_with(Writes::default(), table, id, record).await
    }

    /// Creates a record together with other writes.
    pub(crate) async fn insert_with<T: Record>(
        &self,
        beside: Writes,
        table: Table<T>,
        id: &str,
        record: &T,
    ) -> Result<(), Problem> {
        // An earlier request wrote the record without seeing the answer: this one may replace it.
        let key = table.key(id);
        let written = if self.settle(&key).await { self.revision(&key) } else { None };
        let Writes { transaction, mut keys, entries } = beside;
        let transaction = match written {
            Some(was) => table.replace(transaction, id, was, record),
            None => table.insert(transaction, id, record),
        };
        keys.push(key);
        let writes = Writes { transaction: transaction.map_err(problem)?, keys, entries };
        self.commit(writes).await.map_err(|refused| match refused {
            StoreError::Conflict { found: KeyState::At(_), .. } => {
                let detail = format!("{} \"{id}\" already exists", T::KIND);
                Problem::new(
                    ProblemCode::AlreadyExists,
                    detail,
                    "choose another name, or change the existing one",
                )
            }
            error => problem(error),
        })
    }

    /// Replaces the known revision of a record.
    pub(crate) async fn replace<T: Record>(
        &self,
        table: Table<T>,
        id: &str,
        record: &T,
    ) -> Result<(), Problem> {
        self.replace_with(Writes::default(), table, id, record).await
    }

    /// Replaces the known revision of a record together with other writes.
    pub(crate) async fn replace_with<T: Record>(
        &self,
        beside: Writes,
        table: Table<T>,
        id: &str,
        record: &T,
    ) -> Result<(), Problem> {
        let key = table.key(id);
        let was = self.certain(&key).await?;
        let Writes { transaction, mut keys, entries } = beside;
        let transaction = table.replace(transaction, id, was, record).map_err(problem)?;
        keys.push(key);
        self.commit(Writes { transaction, keys, entries }).await.map_err(problem)
    }

    /// Removes the known revision of a record.
    pub(crate) async fn remove<T: Record>(&self, table: Table<T>, id: &str) -> Result<(), Problem> {
        self.remove_with(Writes::default(), table, id).await
    }

    /// Removes the known revision of a record together with other writes.
    pub(crate) async fn remove_with<T: Record>(
        &self,
        beside: Writes,
        table: Table<T>,
        id: &str,
    ) -> Result<(), Problem> {
        let key = table.key(id);
        if self.settle(&key).await && self.revision(&key).is_none() {
            return Ok(());
        }
        let was = self.certain(&key).await?;
        let Writes { transaction, mut keys, entries } = beside;
        let transaction = table.remove(transaction, id, was);
        keys.push(key);
        self.commit(Writes { transaction, keys, entries }).await.map_err(problem)
    }

    /// Returns one record and its revision, as the store has it now.
    pub(crate) async fn find<T: Record>(
        &self,
        table: Table<T>,
        id: &str,
    ) -> Result<Option<Kept<T>>, Problem> {
        let key = table.key(id);
        let found = self.store.read(&key).await.map_err(problem)?;
        let found = found.items.iter().find(|item| item.key == key);
        found.map(|item| table.decode(item)).transpose().map_err(problem)
    }

    /// Adds a write that replaces the known revision of a record or creates it.
    pub(crate) async fn put<T: Record>(
        &self,
        Writes { transaction, mut keys, entries }: Writes,
        table: Table<T>,
        id: &str,
        record: &T,
    ) -> Result<Writes, Problem> {
        let key = table.key(id);
        let transaction = match self.certain(&key).await {
            Ok(was) => table.replace(transaction, id, was, record),
            Err(_) => table.insert(transaction, id, record),
        };
        keys.push(key);
        Ok(Writes { transaction: transaction.map_err(problem)?, keys, entries })
    }

    /// Adds a write that replaces whatever revision the store has. The new revision is not tracked.
    pub(crate) async fn put_over<T: Record>(
        &self,
        writes: Writes,
        table: Table<T>,
        id: &str,
        record: &T,
    ) -> Result<Writes, Problem> {
        let Writes { transaction, keys, entries } = writes;
        let transaction = match self.written(&table.key(id)).await? {
            Some(was) => table.replace(transaction, id, was, record),
            None => table.insert(transaction, id, record),
        };
        Ok(Writes { transaction: transaction.map_err(problem)?, keys, entries })
    }

    /// Removes a record of any revision, if it exists, whether it is readable or not.
    pub(crate) async fn remove_unknown<T: Record>(
        &self,
        table: Table<T>,
        id: &str,
    ) -> Result<(), Problem> {
        if let Some(was) = self.written(&table.key(id)).await? {
            self.write_unknown(table.remove(Transaction::new(), id, was)).await?;
        }
        Ok(())
    }

    /// Returns the revision of a key in the store. `None`: the key does not exist.
    async fn written(&self, key: &str) -> Result<Option<Revision>, Problem> {
        let found = self.store.read(key).await.map_err(problem)?;
        Ok(found.items.iter().find(|item| item.key == key).map(|item| item.revision))
    }

    /// Writes all records or none.
    pub(crate) async fn write(&self, writes: Writes) -> Result<(), Problem> {
        self.commit(writes).await.map_err(problem)
    }

    /// Commits a transaction, all or nothing, that changes no tracked record.
    pub(crate) async fn write_unknown(
        &self,
        transaction: Transaction,
    ) -> Result<Revision, Problem> {
        let written = self.store.commit(&self.leadership, transaction).await;
        written.map_err(problem)
    }

    /// Returns the records whose IDs have this prefix, by ID.
    pub(crate) async fn read_below<T: Record>(
        &self,
        table: Table<T>,
        beginning: &str,
    ) -> Result<Vec<(String, T)>, Problem> {
        let prefix = table.key(beginning);
        let (mut records, mut behind) = (Vec::new(), None::<String>);
        loop {
            let page = self.store.read_page(&prefix, behind.as_deref(), MOST_PAGE_ITEMS).await;
            let page = page.map_err(problem)?;
            for item in &page.items {
                let kept = table.decode(item).map_err(problem)?;
                records.push((kept.id, kept.record));
            }
            behind = page.items.last().filter(|_| page.more).map(|last| last.key.clone());
            if behind.is_none() {
                return Ok(records);
            }
        }
    }

    /// Removes stale records unless they change in the meantime. Returns their IDs.
    pub(crate) async fn prune<T: Record>(
        &self,
        table: Table<T>,
        is_stale: impl Fn(&T) -> bool + Send,
    ) -> Result<Vec<String>, Problem> {
        let mut stale = Vec::new();
        let mut behind: Option<String> = None;
        loop {
            let page = table.read_page(&*self.store, behind.as_deref(), MOST_PAGE_ITEMS).await;
            let page = page.map_err(problem)?;
            stale.extend(page.records.into_iter().filter(|kept| is_stale(&kept.record)));
            behind = page.next;
            if behind.is_none() {
                break;
            }
        }
        for some in stale.chunks(MOST_KEYS) {
            let remove = |all, kept: &Kept<T>| table.remove(all, &kept.id, kept.revision);
            self.write_unknown(some.iter().fold(Transaction::new(), remove)).await?;
        }
        let mut known = self.known();
        let ids = stale.into_iter().map(|kept| {
            known.revisions.remove(&table.key(&kept.id));
            kept.id
        });
        Ok(ids.collect())
    }

    /// Commits writes, and publishes their journal entries.
    async fn commit(&self, writes: Writes) -> Result<(), StoreError> {
        let Writes { transaction, keys, entries } = writes;
        let written = self.commit_known(&keys, transaction).await;
        match &written {
            Ok(()) => self.logs.publish(entries),
            Err(StoreError::Unavailable { written: Written::Unknown, .. }) => {
                self.logs.doubt(entries);
            }
            Err(_) => {}
        }
        written
    }

    async fn commit_known(&self, keys: &[String], write: Transaction) -> Result<(), StoreError> {
        let of_known = |(key, _): &&(String, Option<String>)| keys.contains(key);
        let sent: Vec<(String, Option<String>)> =
            write.writes().iter().filter(of_known).cloned().collect();
        // Before it is sent, because this call may be dropped while it runs.
        let doubts_before = {
            let mut known = self.known();
            let noted = sent
                .iter()
                .cloned()
                .map(|(key, value)| (key.clone(), known.doubts.insert(key, value)));
            noted.collect::<Vec<_>>()
        };
        let error = match self.store.commit(&self.leadership, write).await {
            Ok(revision) => {
                let written = |(key, value): &(String, Option<String>)| {
                    self.note(key, value.is_some().then_some(revision));
                };
                sent.iter().for_each(written);
                return Ok(());
            }
            Err(error) => error,
        };
        let is_unknown = matches!(error, StoreError::Unavailable { written: Written::Unknown, .. });
        if !is_unknown {
            // This change was not written. It may have met an earlier one that was.
            let mut known = self.known();
            for (key, before) in doubts_before {
                match before {
                    Some(before) => known.doubts.insert(key, before),
                    None => known.doubts.remove(&key),
                };
            }
        }
        // Either all of it was written or nothing.
        let mut is_written = false;
        if is_unknown || matches!(error, StoreError::Conflict { .. }) {
            for key in keys {
                is_written |= self.settle(key).await;
            }
        }
        if is_unknown && is_written { Ok(()) } else { Err(error) }
    }

    /// Records the certain revision of a key; `None`: the key is gone.
    fn note(&self, key: &str, revision: Option<Revision>) {
        let mut known = self.known();
        known.doubts.remove(key);
        match revision {
            Some(revision) => known.revisions.insert(key.to_owned(), revision),
            None => known.revisions.remove(key),
        };
    }

    /// Determines the outcome of a change in doubt. Returns true if it was written; its revision is
    /// then known.
    async fn settle(&self, key: &str) -> bool {
        let Some(sent) = self.known().doubts.get(key).cloned() else { return false };
        // A key sorts before all keys of which it is a prefix.
        let Ok(first) = self.store.read_page(key, None, 1).await else { return false };
        let found = first.items.into_iter().find(|item| item.key == key);
        let before = self.revision(key);
        let is_written = match (&sent, &found) {
            (Some(sent), Some(item)) => item.value == *sent && Some(item.revision) != before,
            (None, None) => before.is_some(),
            _ => false,
        };
        if is_written {
            self.note(key, found.map(|item| item.revision));
        }
        is_written
    }

    /// Returns whether a record is known: read or written, and not removed since.
    pub(crate) fn has<T: Record>(&self, table: Table<T>, id: &str) -> bool {
        self.revision(&table.key(id)).is_some()
    }

    fn known(&self) -> MutexGuard<'_, KeyStates> {
        self.known.lock()
    }

    fn revision(&self, key: &str) -> Option<Revision> {
        self.known().revisions.get(key).copied()
    }

    /// Returns the revision of a known key at its last read or write.
    async fn certain(&self, key: &str) -> Result<Revision, Problem> {
        self.settle(key).await;
        self.revision(key).ok_or_else(|| {
            let detail = format!("{key} no longer exists");
            Problem::new(ProblemCode::Conflict, detail, "read it again, then repeat the request")
        })
    }

    /// Queues an audit entry without waiting. If the audit log cannot be written, the manager's own
    /// log has the entry.
    pub(crate) fn audit(&self, entry: AuditEntry) {
        self.logs.audit(entry);
    }

    /// Queues an entry of the journal without waiting. Too many entries from reports of one host
    /// are only counted.
    pub(crate) fn journal(&self, entry: NewEntry) {
        self.logs.journal(entry);
    }

    /// Returns an entry of the journal for a transaction, unless too many came from its host: it is
    /// then counted as omitted.
    pub(crate) fn admitted(&self, entry: &NewEntry) -> Option<NewEntry> {
        self.logs.admitted(entry)
    }

    /// Queues the numbers of omitted journal entries that are due.
    pub(crate) fn journal_omitted(&self) {
        self.logs.journal_omitted();
    }

    /// Publishes entries of the journal to this stream from now on.
    pub(crate) fn publish_to(&self, events: Arc<Events>) {
        self.logs.publish_to(events);
    }

    /// Adds an entry of the journal to the writes of the change that it describes.
    pub(crate) fn note_in(&self, writes: Writes, entry: NewEntry) -> Result<Writes, Problem> {
        let Writes { transaction, keys, mut entries } = writes;
        let (transaction, entry) = self.logs.add(transaction, entry).map_err(problem)?;
        entries.push(entry);
        Ok(Writes { transaction, keys, entries })
    }

    /// Returns writes that begin with an entry of the journal.
    pub(crate) fn noting(&self, entry: NewEntry) -> Result<Writes, Problem> {
        self.note_in(Writes::default(), entry)
    }

    /// Returns a page of the journal, newest first, and the cursor of the next page. Entries of
    /// later versions are left out.
    pub(crate) async fn journal_page(
        &self,
        behind: Option<&str>,
        limit: usize,
    ) -> Result<(Vec<JournalEntry>, Option<String>), Problem> {
        let page = JOURNAL.read_page(&*self.store, behind, limit).await.map_err(problem)?;
        let entries = page.records.into_iter().filter_map(|kept| kept.record.read(&kept.id));
        Ok((entries.collect(), page.next))
    }

    /// Returns a page of the audit log, newest first, and the cursor of the next page.
    pub(crate) async fn audit_page(
        &self,
        behind: Option<&str>,
        limit: usize,
    ) -> Result<(Vec<AuditEntry>, Option<String>), Problem> {
        let page = AUDIT.read_page(&*self.store, behind, limit).await.map_err(problem)?;
        Ok((
            page.records.into_iter().filter_map(|kept| audit_entry(kept.record)).collect(),
            page.next,
        ))
    }
}

/// Returns the public form of a saved entry. `None`: the entry is not about a request.
fn audit_entry(saved: audit::AuditEntry) -> Option<AuditEntry> {
    serde_json::from_value(saved.detail).ok()
}

/// Converts an error of the store to a problem.
pub(crate) fn problem(error: impl Into<RecordError>) -> Problem {
    let error = error.into();
    let code = match error {
        RecordError::Store(StoreError::Conflict { .. }) => ProblemCode::Conflict,
        RecordError::Store(StoreError::LeadershipLost { .. }) => ProblemCode::NoLeader,
        RecordError::Store(StoreError::Unavailable { .. }) => ProblemCode::StoreAway,
        RecordError::Store(StoreError::TooBig { .. }) => ProblemCode::InvalidRequest,
        _ => ProblemCode::ManagerFailed,
    };
    let remedy = match error.remedy() {
        remedy if remedy.is_empty() => "see the manager's log and docs/store.md".into(),
        remedy => remedy,
    };
    Problem::new(code, error.to_string(), remedy)
}

#[cfg(test)]
mod tests {
    use godwit_api::control::JournalKind;
    use godwit_store::MemoryStore;

    use super::*;
    use crate::agents::record::{HOSTS, SavedHost};

    async fn keeper(store: &MemoryStore) -> Keeper {
        let candidate = Candidate { name: "m1".into(), address: "http://m1:7800".into() };
        let leadership = Arc::new(store.lead(&candidate).await.unwrap());
        Keeper::new(Arc::new(store.clone()), leadership, candidate)
    }

    fn host(port: u16) -> SavedHost {
        let plan = crate::cluster::inventory::HostPlan {
            address: format!("http://10.0.0.1:{port}"),
            ..crate::cluster::inventory::HostPlan::default()
        };
        SavedHost::from(&plan)
    }

    #[tokio::test]
    async fn a_change_without_an_answer_is_read_again() {
        let store = MemoryStore::new();
        let keeper = keeper(&store).await;
        store.lose_answers(3);
        keeper.insert(HOSTS, "a", &host(1)).await.unwrap();
        keeper.replace(HOSTS, "a", &host(2)).await.unwrap();
        keeper.remove(HOSTS, "a").await.unwrap();
        assert!(!keeper.has(HOSTS, "a"));
        keeper.insert(HOSTS, "a", &host(3)).await.unwrap();
        assert_eq!(keeper.find(HOSTS, "a").await.unwrap().unwrap().record, host(3));
    }

    #[tokio::test]
    async fn a_record_can_be_changed_after_an_unresolved_change() {
        let store = MemoryStore::new();
        let keeper = keeper(&store).await;
        let away = |outcome: Result<(), Problem>| {
            assert_eq!(outcome.unwrap_err().code, ProblemCode::StoreAway);
            store.set_unavailable(false);
        };
        store.lose_answer_and_be_away();
        away(keeper.insert(HOSTS, "a", &host(1)).await);
        keeper.insert(HOSTS, "a", &host(2)).await.unwrap();
        assert_eq!(
            keeper.insert(HOSTS, "a", &host(2)).await.unwrap_err().code,
            ProblemCode::AlreadyExists
        );
        store.lose_answer_and_be_away();
        away(keeper.replace(HOSTS, "a", &host(3)).await);
        keeper.replace(HOSTS, "a", &host(4)).await.unwrap();
        // A change that was not written.
        store.set_unavailable(true);
        away(keeper.replace(HOSTS, "a", &host(5)).await);
        keeper.replace(HOSTS, "a", &host(6)).await.unwrap();
        store.lose_answer_and_be_away();
        away(keeper.remove(HOSTS, "a").await);
        keeper.remove(HOSTS, "a").await.unwrap();
        assert_eq!(keeper.remove(HOSTS, "a").await.unwrap_err().code, ProblemCode::Conflict);
    }

    /// Saves a record together with an entry of the journal.
    async fn end_term(keeper: &Keeper) -> Result<(), Problem> {
        let entry = NewEntry::warning(JournalKind::TermEnded, "a term of host a has ended");
        let beside = keeper.noting(entry.about("host", "a"))?;
        keeper.write(keeper.put(beside, HOSTS, "a", &host(1)).await?).await
    }

    #[tokio::test]
    async fn a_repeated_change_has_one_entry_in_the_journal() {
        let store = MemoryStore::new();
        let keeper = keeper(&store).await;
        let entries = async || keeper.journal_page(None, 16).await.unwrap().0.len();
        store.lose_answer_and_be_away();
        assert_eq!(end_term(&keeper).await.unwrap_err().code, ProblemCode::StoreAway);
        store.set_unavailable(false);
        assert_eq!(entries().await, 1, "it was written");
        end_term(&keeper).await.unwrap();
        assert_eq!(entries().await, 1);
        // The same again is another change.
        end_term(&keeper).await.unwrap();
        assert_eq!(entries().await, 2);
        // One that was not written gets its entry when it is.
        store.set_unavailable(true);
        end_term(&keeper).await.unwrap_err();
        store.set_unavailable(false);
        end_term(&keeper).await.unwrap();
        assert_eq!(entries().await, 3);
    }

    #[tokio::test]
    async fn a_write_of_another_manager_is_not_mistaken_for_its_own() {
        let store = MemoryStore::new();
        let keeper = keeper(&store).await;
        keeper.insert(HOSTS, "a", &host(1)).await.unwrap();
        let other = of_same_leadership(&keeper);
        other.read_all(HOSTS).await.unwrap();
        other.replace(HOSTS, "a", &host(2)).await.unwrap();
        for _ in 0..2 {
            let refused = keeper.replace(HOSTS, "a", &host(3)).await.unwrap_err();
            assert_eq!(refused.code, ProblemCode::Conflict);
        }
    }

    fn of_same_leadership(keeper: &Keeper) -> Keeper {
        Keeper::new(
            Arc::clone(&keeper.store),
            Arc::clone(&keeper.leadership),
            keeper.candidate.clone(),
        )
    }

    #[test]
    fn every_error_of_the_store_has_a_remedy() {
        let unavailable = StoreError::Unavailable {
            store: "s".into(),
            why: "no answer".into(),
            written: Written::No,
        };
        let refused =
            StoreError::Refused { store: "s".into(), why: "no space".into(), remedy: "compact it" };
        for (error, detail, remedy) in [
            (StoreError::TooBig { what: "keys", is: 2, most: 1 }, "the limit is 1", "request less"),
            (unavailable, "no answer", "try again"),
            (refused, "no space", "compact it"),
            (StoreError::Settings { why: "none".into() }, "none", "docs/store.md"),
        ] {
            let problem = problem(error);
            assert!(
                problem.detail.contains(detail) && !problem.detail.ends_with(')'),
                "{problem:?}"
            );
            assert!(
                problem.remedy.contains(remedy) && !problem.remedy.ends_with(')'),
                "{problem:?}"
            );
        }
    }
}
