//! What changed lately, for those who follow: kept in memory by the stores that have no history of their own.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use tokio::sync::watch;

use super::error::StoreError;
use super::transaction::Revision;

/// Bytes of keys and values that are remembered. Who falls further behind reads everything again.
const MOST_REMEMBERED_BYTES: usize = 16 << 20;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    pub key: String,
    /// Its new value: JSON text; none: it was deleted.
    pub value: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Changes {
    /// The revision that it made.
    pub revision: Revision,
    /// Each key once.
    pub changes: Vec<Change>,
}

/// Changes as they come.
pub struct Watch {
    source: Box<dyn ChangeSource>,
}

impl Watch {
    pub(crate) fn new(source: impl ChangeSource + 'static) -> Watch {
        Watch { source: Box::new(source) }
    }

    /// Waits for the next transaction that changed something here. May be dropped and called again: nothing is left out.
    ///
    /// # Errors
    /// [`StoreError::Unavailable`]: asking again goes on where it stood. [`StoreError::HistoryGone`]: this watch is at its end; read
    /// everything again and watch from there.
    pub async fn next(&mut self) -> Result<Changes, StoreError> {
        self.source.next().await
    }
}

/// Where a watch has its changes from.
#[async_trait]
pub(crate) trait ChangeSource: Send {
    /// The next ones. May be dropped and called again.
    async fn next(&mut self) -> Result<Changes, StoreError>;
}

/// The latest changes.
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
    /// Begins after this revision.
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

    /// Adds what a transaction has changed. In the order of revisions.
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

    /// Changes of keys with this prefix after that revision.
    pub(crate) fn watch(self: &Arc<Self>, prefix: &str, since: Revision) -> Watch {
        Watch::new(Follower {
            history: Arc::clone(self),
            newest: self.newest.subscribe(),
            prefix: prefix.to_owned(),
            since,
        })
    }

    fn recent(&self) -> MutexGuard<'_, Recent> {
        self.recent.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The first transaction after `since`; none: there is none yet.
    fn after(&self, since: Revision) -> Result<Option<Arc<Changes>>, StoreError> {
        let recent = self.recent();
        if since < recent.since {
            return Err(StoreError::HistoryGone { since });
        }
        let index = recent.changes.partition_point(|changes| changes.revision <= since);
        Ok(recent.changes.get(index).cloned())
    }
}

/// What remembering a change costs beside its text, about.
const CHANGE_BYTES: usize = 64;

fn size(changes: &Changes) -> usize {
    let texts = |change: &Change| change.key.len() + change.value.as_ref().map_or(0, String::len);
    changes.changes.iter().map(|change| texts(change) + CHANGE_BYTES).sum()
}

/// One that follows.
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
            // It can't fail: this has the history, and with it the sender.
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
    async fn a_follower_gets_its_keys_in_order_whenever_it_asks() {
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
    async fn who_falls_behind_what_is_remembered_is_told() {
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
