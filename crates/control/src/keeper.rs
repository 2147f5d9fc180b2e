//! What the manager writes: under its leadership, over what it read or wrote last. A change that somebody else has made meanwhile is refused.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use godwit_api::control::{AuditEntry, AuditOutcome, Problem, ProblemCode};
use tokio::sync::mpsc;

use crate::store::audit::{self, AUDIT, AuditLog};
use crate::store::records::{Kept, Record, RecordError, Table};
use crate::store::{
    Candidate, KeyState, Leadership, MOST_KEYS, MOST_PAGE_ITEMS, Revision, Store, StoreError, Transaction,
};

/// Entries of the audit log that wait to be written; who asks faster than a disk writes waits no longer for it.
const WAITING_ENTRIES: usize = 10_000;

/// Records that are written together or not at all.
#[derive(Debug, Default)]
pub(crate) struct Writes {
    transaction: Transaction,
    /// Keys of those of which it is known from then on when they were written.
    keys: Vec<String>,
}

impl From<Transaction> for Writes {
    /// Beside writes of which nothing is known.
    fn from(transaction: Transaction) -> Writes {
        Writes { transaction, keys: Vec::new() }
    }
}

impl Writes {
    /// Others as well.
    pub(crate) fn add(&mut self, others: Writes) {
        self.keys.extend(others.keys);
        self.transaction = std::mem::take(&mut self.transaction).and(others.transaction);
    }

    /// Whether one transaction holds others as well.
    pub(crate) fn has_room_for(&self, others: &Writes) -> bool {
        self.transaction.has_room_for(&others.transaction)
    }
}

/// The store, as the leading manager has it.
pub(crate) struct Keeper {
    store: Arc<dyn Store>,
    leadership: Arc<Leadership>,
    candidate: Candidate,
    /// When each key was read or written last.
    revisions: Mutex<BTreeMap<String, Revision>>,
    entries: mpsc::Sender<AuditEntry>,
}

impl Keeper {
    /// Keeps what this leadership allows.
    pub(crate) fn new(store: Arc<dyn Store>, leadership: Arc<Leadership>, candidate: Candidate) -> Keeper {
        let (entries, waiting) = mpsc::channel(WAITING_ENTRIES);
        tokio::spawn(write_entries(Arc::clone(&store), Arc::clone(&leadership), waiting));
        Keeper { store, leadership, candidate, revisions: Mutex::default(), entries }
    }

    /// The manager that leads: this one.
    pub(crate) fn candidate(&self) -> &Candidate {
        &self.candidate
    }

    /// Where it is kept.
    #[cfg(test)]
    pub(crate) fn store(&self) -> &Arc<dyn Store> {
        &self.store
    }

    /// All records of a kind, by id.
    pub(crate) async fn read_all<T: Record>(&self, table: Table<T>) -> Result<Vec<(String, T)>, Problem> {
        let all = table.read_all(&*self.store).await.map_err(|error| problem(&error))?;
        let mut revisions = self.revisions.lock().unwrap_or_else(PoisonError::into_inner);
        let records = all.records.into_iter().map(|kept| {
            revisions.insert(table.key(&kept.id), kept.revision);
            (kept.id, kept.record)
        });
        Ok(records.collect())
    }

    /// Writes a new record.
    pub(crate) async fn insert<T: Record>(
        &self,
        table: Table<T>,
        id: &str,
        record: &T,
    ) -> Result<(), Problem> {
        let write = table.insert(Transaction::new(), id, record).map_err(|error| problem(&error))?;
        self.commit(table.key(id), write, true).await.map_err(|refused| match refused {
            StoreError::Conflict { found: KeyState::At(_), .. } => {
                let detail = format!("there is a {} \"{id}\" already", T::KIND);
                Problem::new(ProblemCode::AlreadyExists, detail, "take another name, or change that one")
            }
            error => problem(&error.into()),
        })
    }

    /// Writes a record in the place of the one that is known.
    pub(crate) async fn replace<T: Record>(
        &self,
        table: Table<T>,
        id: &str,
        record: &T,
    ) -> Result<(), Problem> {
        let was = self.known(&table.key(id))?;
        let write = table.replace(Transaction::new(), id, was, record).map_err(|error| problem(&error))?;
        self.commit(table.key(id), write, true).await.map_err(|error| problem(&error.into()))
    }

    /// Removes the record that is known.
    pub(crate) async fn remove<T: Record>(&self, table: Table<T>, id: &str) -> Result<(), Problem> {
        let was = self.known(&table.key(id))?;
        let write = table.remove(Transaction::new(), id, was);
        self.commit(table.key(id), write, false).await.map_err(|error| problem(&error.into()))
    }

    /// One record and when it changed last, as the store has it now; none: there is none.
    pub(crate) async fn find<T: Record>(
        &self,
        table: Table<T>,
        id: &str,
    ) -> Result<Option<Kept<T>>, Problem> {
        let key = table.key(id);
        let found = self.store.read(&key).await.map_err(|error| problem(&error.into()))?;
        let found = found.items.iter().find(|item| item.key == key);
        found.map(|item| table.decode(item)).transpose().map_err(|error| problem(&error))
    }

    /// Adds that a record is written in the place of the one that is known, or as a new one.
    pub(crate) fn put<T: Record>(
        &self,
        Writes { transaction, mut keys }: Writes,
        table: Table<T>,
        id: &str,
        record: &T,
    ) -> Result<Writes, Problem> {
        let key = table.key(id);
        let transaction = match self.known(&key) {
            Ok(was) => table.replace(transaction, id, was, record),
            Err(_) => table.insert(transaction, id, record),
        };
        keys.push(key);
        Ok(Writes { transaction: transaction.map_err(|error| problem(&error))?, keys })
    }

    /// Writes all of them, or nothing.
    pub(crate) async fn write(&self, Writes { transaction, keys }: Writes) -> Result<(), Problem> {
        let written = self.store.commit(&self.leadership, transaction).await;
        let revision = written.map_err(|error| problem(&error.into()))?;
        let mut revisions = self.revisions.lock().unwrap_or_else(PoisonError::into_inner);
        revisions.extend(keys.into_iter().map(|key| (key, revision)));
        Ok(())
    }

    /// Carries out all of a transaction, or nothing, that writes nothing of what is known.
    pub(crate) async fn write_unknown(&self, transaction: Transaction) -> Result<Revision, Problem> {
        let written = self.store.commit(&self.leadership, transaction).await;
        written.map_err(|error| problem(&error.into()))
    }

    /// The records whose ids begin like this, by id.
    pub(crate) async fn read_below<T: Record>(
        &self,
        table: Table<T>,
        beginning: &str,
    ) -> Result<Vec<(String, T)>, Problem> {
        let prefix = table.key(beginning);
        let (mut records, mut behind) = (Vec::new(), None::<String>);
        loop {
            let page = self.store.read_page(&prefix, behind.as_deref(), MOST_PAGE_ITEMS).await;
            let page = page.map_err(|error| problem(&error.into()))?;
            for item in &page.items {
                let kept = table.decode(item).map_err(|error| problem(&error))?;
                records.push((kept.id, kept.record));
            }
            behind = page.items.last().filter(|_| page.more).map(|last| last.key.clone());
            if behind.is_none() {
                return Ok(records);
            }
        }
    }

    /// Removes the records that are stale, unless they change meanwhile; their ids.
    pub(crate) async fn prune<T: Record>(
        &self,
        table: Table<T>,
        is_stale: impl Fn(&T) -> bool + Send,
    ) -> Result<Vec<String>, Problem> {
        let mut stale = Vec::new();
        let mut behind: Option<String> = None;
        loop {
            let page = table.read_page(&*self.store, behind.as_deref(), MOST_PAGE_ITEMS).await;
            let page = page.map_err(|error| problem(&error))?;
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
        let mut revisions = self.revisions.lock().unwrap_or_else(PoisonError::into_inner);
        let ids = stale.into_iter().map(|kept| {
            revisions.remove(&table.key(&kept.id));
            kept.id
        });
        Ok(ids.collect())
    }

    async fn commit(&self, key: String, write: Transaction, stays: bool) -> Result<(), StoreError> {
        let revision = self.store.commit(&self.leadership, write).await?;
        let mut revisions = self.revisions.lock().unwrap_or_else(PoisonError::into_inner);
        if stays {
            revisions.insert(key, revision);
        } else {
            revisions.remove(&key);
        }
        Ok(())
    }

    /// Whether a record is known: read or written, and not removed since.
    pub(crate) fn has<T: Record>(&self, table: Table<T>, id: &str) -> bool {
        self.known(&table.key(id)).is_ok()
    }

    fn known(&self, key: &str) -> Result<Revision, Problem> {
        let known = self.revisions.lock().unwrap_or_else(PoisonError::into_inner).get(key).copied();
        known.ok_or_else(|| {
            let detail = format!("{key} has gone meanwhile");
            Problem::new(ProblemCode::Conflict, detail, "look at it again and decide anew")
        })
    }

    /// Notes who did what. Nobody waits for it; where the log can't be written it stands in the manager's own.
    pub(crate) fn audit(&self, entry: AuditEntry) {
        if self.entries.try_send(entry).is_err() {
            tracing::error!(
                "the audit log can't be written as fast as it is asked for: an entry stands above alone"
            );
        }
    }

    /// A page of the audit log, the newest first, and what the next is asked for by.
    pub(crate) async fn audit_page(
        &self,
        behind: Option<&str>,
        limit: usize,
    ) -> Result<(Vec<AuditEntry>, Option<String>), Problem> {
        let page = AUDIT.read_page(&*self.store, behind, limit).await.map_err(|error| problem(&error))?;
        Ok((page.records.into_iter().filter_map(|kept| told(kept.record)).collect(), page.next))
    }
}

/// What is told of a saved entry; none: it is of another kind than requests.
fn told(saved: audit::AuditEntry) -> Option<AuditEntry> {
    serde_json::from_value(saved.detail).ok()
}

async fn write_entries(
    store: Arc<dyn Store>,
    leadership: Arc<Leadership>,
    mut waiting: mpsc::Receiver<AuditEntry>,
) {
    let mut log = AuditLog::new(&leadership);
    let mut entries = Vec::new();
    while waiting.recv_many(&mut entries, MOST_KEYS).await > 0 {
        let written = write_some(&*store, &leadership, &mut log, &entries).await;
        if let Err(error) = written {
            tracing::error!(%error, entries = entries.len(), "the audit log can't be written");
        }
        entries.clear();
    }
}

async fn write_some(
    store: &dyn Store,
    leadership: &Leadership,
    log: &mut AuditLog,
    entries: &[AuditEntry],
) -> Result<(), RecordError> {
    let mut transaction = Transaction::new();
    for entry in entries {
        let saved = audit::AuditEntry {
            at_unix_ms: entry.unix_ms,
            who: entry.who.clone(),
            what: entry.what.clone(),
            about: String::new(),
            outcome: if entry.outcome == AuditOutcome::Done { "done" } else { "refused" }.to_owned(),
            detail: serde_json::to_value(entry).unwrap_or_default(),
        };
        transaction = log.add(transaction, &saved)?;
    }
    store.commit(leadership, transaction).await?;
    Ok(())
}

/// What helps where the store does not answer.
const STORE_AWAY: &str =
    "ask again in a moment; if it stays so, see whether the store runs, and docs/store.md";

/// What a store's trouble is to who asked.
fn problem(error: &RecordError) -> Problem {
    let code = match error {
        RecordError::Store(StoreError::Conflict { .. }) => ProblemCode::Conflict,
        RecordError::Store(StoreError::LeadershipLost { .. }) => ProblemCode::NoLeader,
        RecordError::Store(StoreError::Unavailable { .. }) => ProblemCode::StoreAway,
        RecordError::Store(StoreError::TooBig { .. }) => ProblemCode::InvalidRequest,
        _ => ProblemCode::ManagerFailed,
    };
    let text = error.to_string();
    // The store's errors have their mends in brackets at their ends.
    let (detail, mend) = match text.strip_suffix(')').and_then(|text| text.rsplit_once(" (")) {
        Some((detail, mend)) => (detail, mend),
        None if code == ProblemCode::StoreAway => (text.as_str(), STORE_AWAY),
        None => (text.as_str(), "see what the manager has logged, and docs/store.md"),
    };
    Problem::new(code, detail, mend)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::Written;

    #[test]
    fn whatever_the_store_says_has_a_mend() {
        let unavailable =
            StoreError::Unavailable { store: "s".into(), why: "no answer".into(), written: Written::No };
        let refused = StoreError::Refused { store: "s".into(), why: "no space".into(), mend: "compact it" };
        for (error, detail, mend) in [
            (StoreError::TooBig { what: "keys", is: 2, most: 1 }, "at once", "ask for less"),
            (unavailable, "no answer", "ask again"),
            (refused, "no space", "compact it"),
            (StoreError::Settings { why: "none".into() }, "none", "docs/store.md"),
        ] {
            let problem = problem(&error.into());
            assert!(problem.detail.contains(detail) && !problem.detail.ends_with(')'), "{problem:?}");
            assert!(problem.mend.contains(mend) && !problem.mend.ends_with(')'), "{problem:?}");
        }
    }
}
