//! The store of one manager: an SQLite file in WAL mode, with every commit synced.
//!
//! One thread writes. It combines the waiting transactions into one SQLite transaction, because the
//! sync is the expensive part. Each of them is checked and written by itself. All are answered once
//! the group is on the disk.

mod file;
mod writer;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;

use async_trait::async_trait;
use parking_lot::Mutex;
use rusqlite::{Connection, OptionalExtension};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot};

use self::file::OpenFile;
use self::writer::{Request, Writer};
use super::error::{StoreError, Written};
use super::history::{History, Watch};
use super::leadership::{Candidate, Leader, Leadership, Standing, Tenure};
use super::revision::Revision;
use super::transaction::{Item, Page, Snapshot, Transaction, range};
use super::{MOST_PAGE_ITEMS, Store};

/// Most transactions that may wait. Further callers wait for a place.
const MOST_WAITING: usize = 256;

/// A store in a file that this process alone uses.
#[derive(Debug)]
pub struct SqliteStore {
    path: PathBuf,
    reader: Arc<Mutex<Connection>>,
    history: Arc<History>,
    seat: Arc<Seat>,
    /// `None` while the store is being dropped.
    queue: Option<mpsc::Sender<Request>>,
    writer: Option<JoinHandle<()>>,
    /// Must stay the last field: fields are dropped in order, so the next process to take the lock
    /// finds the file closed.
    _lock: file::FileLock,
}

/// The current leader and the queue of candidates.
#[derive(Debug)]
struct Seat {
    free: Arc<Semaphore>,
    leader: Mutex<Option<(Leader, Arc<Standing>)>>,
}

impl SqliteStore {
    /// Opens the store in this file, or creates it; checks it, and converts it to this version's
    /// format. Blocks meanwhile.
    ///
    /// # Errors
    /// [`StoreError::InUse`], [`StoreError::Damaged`], [`StoreError::Foreign`],
    /// [`StoreError::Later`], [`StoreError::File`].
    pub fn open(path: &Path) -> Result<SqliteStore, StoreError> {
        let OpenFile { lock, reader, writer, revision } = file::open(path)?;
        let history = History::new(revision);
        let seat = Arc::new(Seat { free: Arc::new(Semaphore::new(1)), leader: Mutex::default() });
        let (queue, requests) = mpsc::channel(MOST_WAITING);
        let writer = Writer::new(path.to_owned(), writer, Arc::clone(&history), {
            let seat = Arc::clone(&seat);
            move |why| seat.fail(why)
        });
        let writer = std::thread::Builder::new()
            .name("store-writer".to_owned())
            .spawn(move || writer.run(requests))
            .map_err(super::error::file_error(path, "start a thread that writes"))?;
        Ok(SqliteStore {
            path: path.to_owned(),
            reader: Arc::new(Mutex::new(reader)),
            history,
            seat,
            queue: Some(queue),
            writer: Some(writer),
            _lock: lock,
        })
    }

    /// Writes a copy of a whole store, at one revision, into a new file. A process that has the
    /// store open is not interrupted. Blocks.
    ///
    /// # Errors
    /// [`StoreError::File`]: there is no store, the new file exists already, or it cannot be
    /// written; [`StoreError::Damaged`].
    pub fn back_up(from: &Path, to: &Path) -> Result<(), StoreError> {
        file::back_up(from, to)
    }

    async fn ask<T>(
        &self,
        request: impl FnOnce(oneshot::Sender<Result<T, StoreError>>) -> Request,
    ) -> Result<T, StoreError> {
        let (answer, answered) = oneshot::channel();
        let ended =
            |written| unavailable(&self.path, "its writing thread has ended".to_owned(), written);
        let queue = self.queue.as_ref().ok_or_else(|| ended(Written::No))?;
        queue.send(request(answer)).await.map_err(|_| ended(Written::No))?;
        answered.await.unwrap_or_else(|_| Err(ended(Written::Unknown)))
    }

    /// Uses the reading connection, on a thread that may block.
    async fn reading<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Connection) -> rusqlite::Result<T> + Send + 'static,
    ) -> Result<T, StoreError> {
        let (reader, path) = (Arc::clone(&self.reader), self.path.clone());
        blocking(&self.path, move || {
            let reader = reader.lock();
            work(&reader).map_err(|error| unavailable(&path, error.to_string(), Written::No))
        })
        .await
    }
}

impl Drop for SqliteStore {
    fn drop(&mut self) {
        self.queue = None;
        // The queue is still written: that costs a few syncs.
        if let Some(writer) = self.writer.take() {
            let _ = writer.join();
        }
    }
}

#[async_trait]
impl Store for SqliteStore {
    async fn read(&self, prefix: &str) -> Result<Snapshot, StoreError> {
        let (from, to) = range(prefix, None);
        self.reading(move |reader| {
            let at_once = reader.unchecked_transaction()?;
            let items = items(&at_once, &from, &to, i64::MAX)?;
            Ok(Snapshot { items, revision: file::revision(&at_once)? })
        })
        .await
    }

    async fn read_page(
        &self,
        prefix: &str,
        after: Option<&str>,
        limit: usize,
    ) -> Result<Page, StoreError> {
        let (from, to) = range(prefix, after);
        let limit = limit.clamp(1, MOST_PAGE_ITEMS);
        self.reading(move |reader| {
            let at_once = reader.unchecked_transaction()?;
            let most = i64::try_from(limit + 1).unwrap_or(i64::MAX);
            let mut items = items(&at_once, &from, &to, most)?;
            let more = items.len() > limit;
            items.truncate(limit);
            Ok(Page { items, revision: file::revision(&at_once)?, more })
        })
        .await
    }

    async fn commit(
        &self,
        leadership: &Leadership,
        transaction: Transaction,
    ) -> Result<Revision, StoreError> {
        transaction.check()?;
        leadership.check()?;
        let epoch = leadership.epoch();
        let done = self.ask(|answer| Request::Commit { epoch, transaction, answer }).await?;
        done.ok_or_else(|| leadership.ended())
    }

    async fn lead(&self, candidate: &Candidate) -> Result<Leadership, StoreError> {
        // The semaphore is never closed.
        let permit = Arc::clone(&self.seat.free)
            .acquire_owned()
            .await
            .map_err(|error| unavailable(&self.path, error.to_string(), Written::No))?;
        let epoch = self.ask(|answer| Request::NextEpoch { answer }).await?;
        let standing = Standing::new(None);
        let leader = Leader { candidate: candidate.clone(), epoch };
        *self.seat.leader() = Some((leader, Arc::clone(&standing)));
        let tenure = SqliteTenure { seat: Arc::clone(&self.seat), _permit: permit };
        Ok(Leadership::new(epoch, standing, Box::new(tenure)))
    }

    async fn leader(&self) -> Result<Option<Leader>, StoreError> {
        Ok(self.seat.leader().as_ref().map(|(leader, _)| leader.clone()))
    }

    /// Changes from before this manager's start are not kept: all watchers of a single-file store
    /// run in the manager's own process.
    async fn watch(&self, prefix: &str, since: Revision) -> Result<Watch, StoreError> {
        Ok(self.history.watch(prefix, since))
    }
}

/// Returns items with keys from `from` up to (without) `to`, `most` of them at most.
fn items(reader: &Connection, from: &str, to: &str, most: i64) -> rusqlite::Result<Vec<Item>> {
    let mut select = reader.prepare_cached(
        "SELECT key, value, revision FROM items WHERE key >= ?1 AND key < ?2 ORDER BY key LIMIT ?3",
    )?;
    let rows = select.query_map((from, to, most), |row| {
        Ok(Item {
            key: row.get(0)?,
            value: row.get(1)?,
            revision: Revision(row.get::<_, i64>(2)?.cast_unsigned()),
        })
    })?;
    rows.collect()
}

/// Returns the revision of a key's last change; `None` if the key is absent.
fn revision_of(connection: &Connection, key: &str) -> rusqlite::Result<Option<Revision>> {
    let mut select = connection.prepare_cached("SELECT revision FROM items WHERE key = ?1")?;
    let revision = select.query_row([key], |row| row.get::<_, i64>(0)).optional()?;
    Ok(revision.map(|revision| Revision(revision.cast_unsigned())))
}

fn unavailable(path: &Path, why: String, written: Written) -> StoreError {
    StoreError::Unavailable { store: path.display().to_string(), why, written }
}

async fn blocking<T: Send + 'static>(
    path: &Path,
    work: impl FnOnce() -> Result<T, StoreError> + Send + 'static,
) -> Result<T, StoreError> {
    let ended = |error: tokio::task::JoinError| unavailable(path, error.to_string(), Written::No);
    tokio::task::spawn_blocking(work).await.map_err(ended)?
}

impl Seat {
    fn leader(&self) -> parking_lot::MutexGuard<'_, Option<(Leader, Arc<Standing>)>> {
        self.leader.lock()
    }

    /// Ends the leadership because the file can no longer be written.
    fn fail(&self, why: String) {
        if let Some((_, standing)) = &*self.leader() {
            standing.lose(super::Loss::StoreFailed(why));
        }
    }
}

/// A leadership held by this process.
struct SqliteTenure {
    seat: Arc<Seat>,
    /// Released after the drop's own work, so that the next candidate finds the seat empty.
    _permit: OwnedSemaphorePermit,
}

impl Drop for SqliteTenure {
    fn drop(&mut self) {
        *self.seat.leader() = None;
    }
}

#[async_trait]
impl Tenure for SqliteTenure {
    async fn resign(self: Box<Self>) -> Result<(), StoreError> {
        Ok(())
    }
}
