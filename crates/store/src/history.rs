//! The latest changes, kept in memory for watchers of the stores that have no history of their own.

use std::collections::VecDeque;
use std::sync::Arc;

use async_trait::async_trait;
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::watch;

use super::error::StoreError;
use super::revision::Revision;

/// Most bytes of keys and values in the history. A watcher that falls further behind reads
/// everything again.
const MOST_REMEMBERED_BYTES: usize = 16 << 20;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    pub key: String,
    /// The new value as JSON text; `None` if the key was deleted.
    pub value: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Changes {
    /// The revision of the transaction.
    pub revision: Revision,
    /// The changes, each key once.
    pub changes: Vec<Change>,
}

/// A stream of changes.
pub struct Watch {
    source: Box<dyn ChangeSource>,
}

impl Watch {
    pub(crate) fn new(source: impl ChangeSource + 'static) -> Watch {
        Watch { source: Box::new(source) }
    }

    /// Waits for the next transaction that changed a watched key. Cancel-safe: a call may be
    /// dropped and repeated without losing a change.
    ///
    /// # Errors
    /// [`StoreError::Unavailable`]: the next call continues from the same position.
    /// [`StoreError::HistoryGone`]: the watch has ended; read everything again and watch from
    /// there.
    pub async fn next(&mut self) -> Result<Changes, StoreError> {
        self.source.next().await
    }
}

/// The source of a watch's changes.
#[async_trait]
pub(crate) trait ChangeSource: Send {
    /// Waits for the next changes. Cancel-safe.
    async fn next(&mut self) -> Result<Changes, StoreError>;
}

/// The latest changes and a notification of new ones.
#[derive(Debug)]
pub(crate) struct History {
    recent: Mutex<Recent>,
    newest: watch::Sender<Revision>,
    most_bytes: usize,
}

#[derive(Debug)]
struct Recent {
    /// Everything after this revision is in `changes`.
    since: Revision,
    changes: VecDeque<Arc<Changes>>,
    bytes: usize,
}

impl History {
    /// Creates a history that begins after this revision.
    pub(crate) fn new(since: Revision) -> Arc<History> {
        History::bounded(since, MOST_REMEMBERED_BYTES)
    }

    fn bounded(since: Revision, most_bytes: usize) -> Arc<History> {
        let recent = Recent { since, changes: VecDeque::new(), bytes: 0 };
        Arc::new(History {
            recent: Mutex::new(recent),
            newest: watch::Sender::new(since),
            most_bytes,
        })
    }

    /// Adds the changes of a transaction. Call in the order of revisions.
    pub(crate) fn push(&self, changes: Changes) {
        let revision = changes.revision;
        {
            let mut recent = self.recent();
            recent.bytes += size(&changes);
            recent.changes.push_back(Arc::new(changes));
            while recent.bytes > self.most_bytes
                && let Some(oldest) = recent.changes.pop_front()
            {
                recent.bytes -= size(&oldest);
                recent.since = oldest.revision;
            }
        }
        self.newest.send_replace(revision);
    }

    /// Watches keys with this prefix after that revision.
    pub(crate) fn watch(self: &Arc<Self>, prefix: &str, since: Revision) -> Watch {
        Watch::new(Follower {
            history: Arc::clone(self),
            newest: self.newest.subscribe(),
            prefix: prefix.to_owned(),
            since,
        })
    }

    fn recent(&self) -> MutexGuard<'_, Recent> {
        self.recent.lock()
    }

    /// Returns the first transaction after `since`; `None` if there is none yet.
    fn after(&self, since: Revision) -> Result<Option<Arc<Changes>>, StoreError> {
        let recent = self.recent();
        if since < recent.since {
            return Err(StoreError::HistoryGone { since });
        }
        let index = recent.changes.partition_point(|changes| changes.revision <= since);
        Ok(recent.changes.get(index).cloned())
    }
}

/// Approximate overhead in bytes of one change in the history.
const CHANGE_BYTES: usize = 64;

fn size(changes: &Changes) -> usize {
    let texts = |change: &Change| change.key.len() + change.value.as_ref().map_or(0, String::len);
    changes.changes.iter().map(|change| texts(change) + CHANGE_BYTES).sum()
}

/// A watcher of the history.
struct Follower {
    history: Arc<History>,
    newest: watch::Receiver<Revision>,
    prefix: String,
    since: Revision,
}

#[async_trait]
impl ChangeSource for Follower {
    async fn next(&mut self) -> Result<Changes, StoreError> {
        loop {
            self.newest.borrow_and_update();
            while let Some(all) = self.history.after(self.since)? {
                self.since = all.revision;
                let mine = all.changes.iter().filter(|change| change.key.starts_with(&self.prefix));
                let changes: Vec<_> = mine.cloned().collect();
                if !changes.is_empty() {
                    return Ok(Changes { revision: all.revision, changes });
                }
            }
            // This cannot fail: `self` holds the history, and with it the sender.
            let _ = self.newest.changed().await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn changes(revision: u64, key: &str) -> Changes {
        let change = Change { key: key.to_owned(), value: Some("0".repeat(10)) };
        Changes { revision: Revision(revision), changes: vec![change] }
    }

    #[tokio::test]
    async fn a_watch_returns_its_keys_in_order_whenever_it_is_polled() {
        let history = History::new(Revision(4));
        let mut watch = history.watch("vms/", Revision(5));
        history.push(changes(5, "vms/early"));
        history.push(changes(7, "vms/a"));
        history.push(changes(8, "hosts/a"));
        let task = tokio::spawn(async move {
            let first = watch.next().await.unwrap().revision;
            (first, watch.next().await.unwrap().revision)
        });
        history.push(changes(9, "vms/b"));
        assert_eq!(task.await.unwrap(), (Revision(7), Revision(9)));
    }

    #[tokio::test]
    async fn a_watch_that_falls_behind_the_history_gets_an_error() {
        let history = History::bounded(Revision(1), 200);
        let mut watch = history.watch("", Revision(1));
        for revision in 2..10 {
            history.push(changes(revision, "vms/a"));
        }
        assert!(matches!(watch.next().await, Err(StoreError::HistoryGone { .. })));
        let mut late = history.watch("", Revision(8));
        assert_eq!(late.next().await.unwrap().revision, Revision(9));
        assert!(matches!(
            history.watch("", Revision(0)).next().await,
            Err(StoreError::HistoryGone { since: Revision(0) })
        ));
    }
}
