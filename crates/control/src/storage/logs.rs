//! Queues of entries for the audit log and the journal. The caller that adds an entry does not wait
//! for the store.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use godwit_api::control::{AuditEntry, AuditOutcome, Change, JournalEntry};
use godwit_store::records::RecordError;
use godwit_store::{Leadership, MOST_KEYS, Store, StoreError, Transaction};
use parking_lot::Mutex;
use tokio::sync::mpsc;
use tokio::time::sleep;

use crate::clock::now_unix_ms;
use crate::journal::audit;
use crate::journal::entries::{JOURNAL, NewEntry, SavedEntry};
use crate::journal::events::Events;
use crate::journal::newest_first::Log;
use crate::journal::throttle::Throttle;
use crate::storage::unsure::Unsure;

/// Most entries of each kind that wait to be written. Beyond that, they are only in the manager's
/// own log.
const WAITING_ENTRIES: usize = 10_000;
/// Most journal entries in one transaction. The longest ones fit.
const MOST_TOGETHER: usize = 60;
/// Pause before an unreachable store gets journal entries again.
const PAUSE: Duration = Duration::from_secs(1);
/// Most attempts to write journal entries to an unreachable store.
const MOST_ATTEMPTS: u32 = 60;

/// Entries that wait to be written during one leadership.
pub(super) struct Logs {
    audit: mpsc::Sender<AuditEntry>,
    journal: mpsc::Sender<JournalEntry>,
    ids: Log<SavedEntry>,
    throttle: Mutex<Throttle>,
    unsure: Mutex<Unsure>,
    published: Published,
}

/// Stream of events to which written journal entries are published, once it is known.
type Published = Arc<OnceLock<Arc<Events>>>;

impl Logs {
    pub(super) fn begin(store: &Arc<dyn Store>, leadership: &Arc<Leadership>) -> Logs {
        let (audit, waiting) = mpsc::channel(WAITING_ENTRIES);
        tokio::spawn(write_audit(Arc::clone(store), Arc::clone(leadership), waiting));
        let (journal, waiting) = mpsc::channel(WAITING_ENTRIES);
        let published = Published::default();
        let writer = JournalWriter {
            store: Arc::clone(store),
            leadership: Arc::clone(leadership),
            published: Arc::clone(&published),
        };
        tokio::spawn(writer.run(waiting));
        let ids = Log::new(leadership);
        let (throttle, unsure) = (Mutex::default(), Mutex::default());
        Logs { audit, journal, ids, throttle, unsure, published }
    }

    /// Publishes entries of the journal to this stream from now on.
    pub(super) fn publish_to(&self, events: Arc<Events>) {
        // A second call would name the same stream.
        let _ = self.published.set(events);
    }

    pub(super) fn audit(&self, entry: AuditEntry) {
        if self.audit.try_send(entry).is_err() {
            tracing::error!(
                "cannot write the audit log fast enough: the previous log line has the entry"
            );
        }
    }

    /// Queues an entry of the journal, unless too many came from its host.
    pub(super) fn journal(&self, entry: NewEntry) {
        let due = self.throttle.lock().note(entry, now_unix_ms());
        self.queue(due);
    }

    /// Returns the entry, unless too many came from its host.
    pub(super) fn admitted(&self, entry: &NewEntry) -> Option<NewEntry> {
        let mut due = self.throttle.lock().note(entry.clone(), now_unix_ms());
        // An admitted entry comes after the numbers of omitted ones.
        let admitted = due.pop_if(|last| last == entry);
        self.queue(due);
        admitted
    }

    /// Queues the numbers of omitted entries that are due.
    pub(super) fn journal_omitted(&self) {
        let due = self.throttle.lock().over(now_unix_ms());
        self.queue(due);
    }

    fn queue(&self, due: Vec<NewEntry>) {
        for entry in due {
            let entry = self.named(entry);
            if let Err(error) = self.journal.try_send(entry) {
                let JournalEntry { text, why, .. } = error.into_inner();
                tracing::error!(text, why, "cannot write the journal fast enough");
            }
        }
    }

    /// Adds an entry of the journal to the transaction of the change that it describes.
    pub(super) fn add(
        &self,
        transaction: Transaction,
        entry: NewEntry,
    ) -> Result<(Transaction, JournalEntry), RecordError> {
        let again = self.unsure.lock().again(&entry, now_unix_ms());
        if let Some(entry) = again {
            let transaction = JOURNAL.put(transaction, &entry.id, &SavedEntry::of(&entry))?;
            return Ok((transaction, entry));
        }
        let entry = self.named(entry);
        Ok((insert(transaction, &entry)?, entry))
    }

    /// Notes the entries of a change whose answer is missing.
    pub(super) fn doubt(&self, entries: Vec<JournalEntry>) {
        self.unsure.lock().note(entries, now_unix_ms());
    }

    fn named(&self, entry: NewEntry) -> JournalEntry {
        let id = self.ids.next_id(entry.at_unix_ms());
        entry.with_id(id)
    }

    /// Publishes the entries of a change that was written.
    pub(super) fn publish(&self, entries: Vec<JournalEntry>) {
        self.unsure.lock().settle(&entries);
        publish(&self.published, entries);
    }
}

fn publish(published: &Published, entries: Vec<JournalEntry>) {
    if let Some(events) = published.get() {
        let changes = entries.into_iter().map(|entry| Change::Journal(Box::new(entry)));
        events.publish(changes, now_unix_ms());
    }
}

fn insert(transaction: Transaction, entry: &JournalEntry) -> Result<Transaction, RecordError> {
    JOURNAL.insert(transaction, &entry.id, &SavedEntry::of(entry))
}

/// Writer of the queued journal entries.
struct JournalWriter {
    store: Arc<dyn Store>,
    leadership: Arc<Leadership>,
    published: Published,
}

impl JournalWriter {
    async fn run(self, mut waiting: mpsc::Receiver<JournalEntry>) {
        let mut entries = Vec::new();
        while waiting.recv_many(&mut entries, MOST_TOGETHER).await > 0 {
            match self.write(&entries).await {
                Ok(()) => publish(&self.published, std::mem::take(&mut entries)),
                Err(error) => {
                    tracing::error!(%error, entries = entries.len(), "cannot write the journal");
                    entries.clear();
                }
            }
        }
    }

    /// Writes entries. An unreachable store gets them again.
    async fn write(&self, entries: &[JournalEntry]) -> Result<(), RecordError> {
        let transaction = entries.iter().try_fold(Transaction::new(), insert)?;
        let mut attempts = 1;
        loop {
            match self.store.commit(&self.leadership, transaction.clone()).await {
                Ok(_) => return Ok(()),
                // An earlier attempt was written, and its answer was lost: the IDs are unique.
                Err(StoreError::Conflict { .. }) if attempts > 1 => return Ok(()),
                Err(StoreError::Unavailable { .. }) if attempts < MOST_ATTEMPTS => {
                    attempts += 1;
                    sleep(PAUSE).await;
                }
                Err(error) => return Err(error.into()),
            }
        }
    }
}

async fn write_audit(
    store: Arc<dyn Store>,
    leadership: Arc<Leadership>,
    mut waiting: mpsc::Receiver<AuditEntry>,
) {
    let log = Log::new(&leadership);
    let mut entries = Vec::new();
    while waiting.recv_many(&mut entries, MOST_KEYS).await > 0 {
        let written = write_some(&*store, &leadership, &log, &entries).await;
        if let Err(RecordError::Store(StoreError::TooBig { .. })) = written {
            // One entry that is too large must not discard its neighbours.
            for entry in entries.drain(..) {
                log_failure(write_some(&*store, &leadership, &log, &[entry]).await, 1);
            }
        } else {
            log_failure(written, entries.len());
            entries.clear();
        }
    }
}

fn log_failure(written: Result<(), RecordError>, entries: usize) {
    if let Err(error) = written {
        tracing::error!(%error, entries, "cannot write the audit log");
    }
}

async fn write_some(
    store: &dyn Store,
    leadership: &Leadership,
    log: &Log<audit::AuditEntry>,
    entries: &[AuditEntry],
) -> Result<(), RecordError> {
    let mut transaction = Transaction::new();
    for entry in entries {
        let saved = audit::AuditEntry {
            at_unix_ms: entry.unix_ms,
            who: entry.who.clone(),
            what: entry.what.clone(),
            about: String::new(),
            outcome: if entry.outcome == AuditOutcome::Done { "done" } else { "refused" }
                .to_owned(),
            detail: serde_json::to_value(entry).unwrap_or_default(),
        };
        transaction = log.add(transaction, saved.at_unix_ms, &saved)?;
    }
    store.commit(leadership, transaction).await?;
    Ok(())
}
