//! The writer thread.

use std::path::PathBuf;
use std::sync::Arc;

use rusqlite::{Connection, ErrorCode, TransactionBehavior};
use tokio::sync::{mpsc, oneshot};

use super::{file, revision_of, unavailable};
use crate::error::{StoreError, Written};
use crate::history::{Change, Changes, History};
use crate::revision::{KeyState, Revision};
use crate::transaction::Transaction;

/// Most requests that share one sync.
const MOST_TOGETHER: usize = 64;

/// A request to the writer thread.
pub(super) enum Request {
    /// Carries out a transaction. The response is `None` if that leadership has ended.
    Commit {
        /// The leadership under which the transaction was made.
        epoch: Revision,
        /// The transaction.
        transaction: Transaction,
        answer: oneshot::Sender<Result<Option<Revision>, StoreError>>,
    },
    /// Begins a leadership.
    NextEpoch {
        /// Receives the number of the leadership.
        answer: oneshot::Sender<Result<Revision, StoreError>>,
    },
}

/// Result of a request, sent once it is on the disk.
enum Outcome {
    Committed(Option<Changes>, Revision),
    Ended,
    Refused(StoreError),
    Epoch(Revision),
}

pub(super) struct Writer {
    path: PathBuf,
    connection: Connection,
    history: Arc<History>,
    on_failure: Box<dyn Fn(String) + Send>,
    /// Why nothing can be written any more; `None` while the file works.
    broken: Option<String>,
}

impl Writer {
    pub(super) fn new(
        path: PathBuf,
        connection: Connection,
        history: Arc<History>,
        on_failure: impl Fn(String) + Send + 'static,
    ) -> Writer {
        Writer { path, connection, history, on_failure: Box::new(on_failure), broken: None }
    }

    /// Carries out requests until all senders are dropped.
    pub(super) fn run(mut self, mut requests: mpsc::Receiver<Request>) {
        while let Some(first) = requests.blocking_recv() {
            let mut together = vec![first];
            while together.len() < MOST_TOGETHER
                && let Ok(next) = requests.try_recv()
            {
                together.push(next);
            }
            self.carry_out(together);
        }
    }

    fn carry_out(&mut self, requests: Vec<Request>) {
        if let Some(why) = &self.broken {
            let failed = || unavailable(&self.path, why.clone(), Written::No);
            requests.into_iter().for_each(|request| request.fail(failed()));
            return;
        }
        match write_all(&mut self.connection, &requests) {
            Ok(outcomes) => {
                for (request, outcome) in requests.into_iter().zip(outcomes) {
                    // Watchers get the change first: a client that has the response finds the
                    // change there.
                    if let Outcome::Committed(changes, _) = &outcome {
                        changes.iter().cloned().for_each(|changes| self.history.push(changes));
                    }
                    request.answer(outcome);
                }
            }
            Err(failure) => self.fail(requests, &failure),
        }
    }

    fn fail(&mut self, requests: Vec<Request>, failure: &Failure) {
        let why = failure.error.to_string();
        let written = if failure.in_doubt() { Written::Unknown } else { Written::No };
        tracing::error!(store = %self.path.display(), %why, "cannot write the store");
        if failure.in_doubt() {
            // After a failed sync it is unknown what the disk holds, and another sync may succeed
            // without that data.
            let why =
                format!("a sync failed: {why} (check the disk, then start the manager again)");
            (self.on_failure)(why.clone());
            self.broken = Some(why);
        }
        for request in requests {
            request.fail(unavailable(&self.path, why.clone(), written));
        }
    }
}

impl Request {
    fn answer(self, outcome: Outcome) {
        // The caller may be gone.
        match (self, outcome) {
            (Request::Commit { answer, .. }, Outcome::Committed(_, revision)) => {
                let _ = answer.send(Ok(Some(revision)));
            }
            (Request::Commit { answer, .. }, Outcome::Refused(error)) => {
                let _ = answer.send(Err(error));
            }
            (Request::NextEpoch { answer }, Outcome::Epoch(epoch)) => {
                let _ = answer.send(Ok(epoch));
            }
            (Request::Commit { answer, .. }, _) => {
                let _ = answer.send(Ok(None));
            }
            // Dropping the sender makes the caller receive an error.
            (Request::NextEpoch { .. }, _) => {}
        }
    }

    fn fail(self, error: StoreError) {
        match self {
            Request::Commit { answer, .. } => drop(answer.send(Err(error))),
            Request::NextEpoch { answer } => drop(answer.send(Err(error))),
        }
    }
}

/// Reason why nothing of a group was written, if it is known.
struct Failure {
    error: rusqlite::Error,
    at_commit: bool,
}

impl Failure {
    /// Whether the group may have been written. A full disk is noticed before a commit is complete,
    /// and SQLite rolls it back.
    fn in_doubt(&self) -> bool {
        self.at_commit && self.error.sqlite_error_code() != Some(ErrorCode::DiskFull)
    }
}

impl From<rusqlite::Error> for Failure {
    fn from(error: rusqlite::Error) -> Failure {
        Failure { error, at_commit: false }
    }
}

/// Carries out all requests in one SQLite transaction. Each sees what the earlier ones wrote.
fn write_all(connection: &mut Connection, requests: &[Request]) -> Result<Vec<Outcome>, Failure> {
    let together = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    let mut outcomes = Vec::with_capacity(requests.len());
    for request in requests {
        outcomes.push(match request {
            Request::Commit { epoch, transaction, .. } => write(&together, *epoch, transaction)?,
            Request::NextEpoch { .. } => {
                let epoch = Revision(file::epoch(&together)?.0 + 1);
                file::set_epoch(&together, epoch)?;
                Outcome::Epoch(epoch)
            }
        });
    }
    together.commit().map_err(|error| Failure { error, at_commit: true })?;
    Ok(outcomes)
}

/// Checks everything, then writes: a refused transaction has written nothing.
fn write(
    connection: &Connection,
    epoch: Revision,
    transaction: &Transaction,
) -> rusqlite::Result<Outcome> {
    if file::epoch(connection)? != epoch {
        return Ok(Outcome::Ended);
    }
    let state = |key: &str| {
        Ok::<_, rusqlite::Error>(
            revision_of(connection, key)?.map_or(KeyState::Absent, KeyState::At),
        )
    };
    if let Some(conflict) = transaction.first_conflict(state)? {
        return Ok(Outcome::Refused(conflict));
    }
    let now = file::revision(connection)?;
    let next = Revision(now.0 + 1);
    let mut put = connection.prepare_cached(
        "INSERT INTO items (key, value, revision) VALUES (?1, ?2, ?3)
         ON CONFLICT (key) DO UPDATE SET value = excluded.value, revision = excluded.revision",
    )?;
    let mut delete = connection.prepare_cached("DELETE FROM items WHERE key = ?1")?;
    let mut changes = Vec::new();
    for (key, value) in transaction.writes() {
        let changed = match value {
            Some(value) => put.execute((key, value, next.0.cast_signed()))?,
            None => delete.execute([key])?,
        };
        if changed > 0 {
            changes.push(Change { key: key.clone(), value: value.clone() });
        }
    }
    if changes.is_empty() {
        return Ok(Outcome::Committed(None, now));
    }
    file::set_revision(connection, next)?;
    Ok(Outcome::Committed(Some(Changes { revision: next, changes }), next))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use parking_lot::Mutex;

    use super::*;

    /// Returns a writer of a new file, and the messages of its failures.
    fn writer(dir: &Path) -> (Writer, Arc<Mutex<Vec<String>>>) {
        let path = dir.join("manager.db");
        let open = file::open(&path).unwrap();
        let failures = Arc::new(Mutex::new(Vec::new()));
        let writer = Writer::new(path, open.writer, History::new(open.revision), {
            let failures = Arc::clone(&failures);
            move |why| failures.lock().push(why)
        });
        (writer, failures)
    }

    /// Carries these requests out together.
    fn carry_out(
        writer: &mut Writer,
        transactions: Vec<Transaction>,
    ) -> Vec<Result<Option<Revision>, StoreError>> {
        let (requests, answers): (Vec<_>, Vec<_>) = transactions
            .into_iter()
            .map(|transaction| {
                let (answer, answered) = oneshot::channel();
                (Request::Commit { epoch: Revision(0), transaction, answer }, answered)
            })
            .unzip();
        writer.carry_out(requests);
        answers.into_iter().map(|answered| answered.blocking_recv().unwrap()).collect()
    }

    #[test]
    fn transactions_that_share_a_sync_see_each_other_and_fail_separately() {
        let dir = tempfile::tempdir().unwrap();
        let (mut writer, _) = writer(dir.path());
        let first = || Transaction::new().expect("a", KeyState::Absent).put("a", "1");
        let next = Transaction::new().expect("a", KeyState::At(Revision(1))).put("a", "2");
        let answers = carry_out(&mut writer, vec![first(), first(), next]);
        assert_eq!(*answers[0].as_ref().unwrap(), Some(Revision(1)));
        assert!(matches!(answers[1], Err(StoreError::Conflict { .. })));
        assert_eq!(*answers[2].as_ref().unwrap(), Some(Revision(2)));
    }

    #[test]
    fn a_full_disk_fails_only_the_affected_transactions() {
        let dir = tempfile::tempdir().unwrap();
        let (mut writer, failures) = writer(dir.path());
        let pages: i64 =
            writer.connection.query_row("PRAGMA page_count", [], |row| row.get(0)).unwrap();
        let full = format!("PRAGMA max_page_count = {}", pages + 2);
        writer.connection.execute_batch(&full).unwrap();
        let large = Transaction::new().put("large", "7".repeat(100_000));
        let small = Transaction::new().put("small", "7");
        for answer in carry_out(&mut writer, vec![small.clone(), large]) {
            let error = answer.unwrap_err();
            assert!(
                matches!(error, StoreError::Unavailable { written: Written::No, .. }),
                "{error}"
            );
        }
        assert_eq!(*carry_out(&mut writer, vec![small])[0].as_ref().unwrap(), Some(Revision(1)));
        assert!(failures.lock().is_empty());
    }

    #[test]
    fn nothing_is_written_after_a_commit_in_doubt() {
        let dir = tempfile::tempdir().unwrap();
        let (mut writer, failures) = writer(dir.path());
        // A deferred reference is checked after all writes: the commit itself fails.
        writer
            .connection
            .execute_batch(
                "PRAGMA foreign_keys = ON;
                 CREATE TABLE late (key TEXT REFERENCES items (key) DEFERRABLE INITIALLY DEFERRED);
                 CREATE TRIGGER fails AFTER INSERT ON items WHEN new.key = 'fails'
                 BEGIN INSERT INTO late VALUES ('nowhere'); END;",
            )
            .unwrap();
        let fails = Transaction::new().put("fails", "1");
        let error = carry_out(&mut writer, vec![fails]).remove(0).unwrap_err().to_string();
        assert!(error.contains(&Written::Unknown.to_string()), "{error}");
        assert_eq!(failures.lock().len(), 1);
        let works = Transaction::new().put("works", "1");
        let answers = carry_out(&mut writer, vec![works.clone(), works]);
        for answer in answers {
            let error = answer.unwrap_err();
            assert!(
                matches!(error, StoreError::Unavailable { written: Written::No, .. }),
                "{error}"
            );
        }
    }
}
