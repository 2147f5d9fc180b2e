//! The store of desired state: text keys, JSON values, and a revision that grows with every change.
//! One manager leads and writes; the others read and watch.
//!
//! [`SqliteStore`] is a single file for a single manager. [`EtcdStore`] is for several managers.
//! [`MemoryStore`] is for tests and the simulator, with injected faults. All behave alike, and one
//! test suite (`tests/contract`) defines that behaviour. A store handles keys and text only.
//! [`records`] adds typed records; only their owner knows what they mean.
//!
//! **Why a manager that lost its leadership cannot write.** Each leadership has an epoch, and no
//! number is used twice. Each transaction carries the epoch of the leadership under which it was
//! made. The store compares it with the present epoch in the same step as the write. So it does not
//! matter what a manager believes, or how long it was suspended: its transaction fails.

mod error;
#[cfg(feature = "etcd")]
mod etcd;
mod history;
mod leadership;
mod memory;
pub mod records;
mod sqlite;
mod transaction;

use async_trait::async_trait;

pub use error::{StoreError, Written};
#[cfg(feature = "etcd")]
pub use etcd::{EtcdSettings, EtcdStore, EtcdTls};
pub use history::{Change, Changes, Watch};
pub use leadership::{Candidate, Leader, Leadership, Loss};
pub use memory::MemoryStore;
pub use sqlite::SqliteStore;
pub use transaction::{Item, KeyState, Page, Revision, Snapshot, Transaction};

/// Most keys that one transaction may check, and most that it may write. etcd allows 128
/// operations; the leadership is one.
pub const MOST_KEYS: usize = 120;
/// Most bytes of keys and values that one transaction may write. etcd accepts requests of 1.5 MiB;
/// the rest is for the encoding.
pub const MOST_TRANSACTION_BYTES: usize = 1 << 20;
/// Most bytes of a value. Others fit into the transaction beside it, and a whole page of such
/// values can still be read.
pub const MOST_VALUE_BYTES: usize = 768 << 10;
pub const MOST_KEY_BYTES: usize = 512;
/// Most items of a page.
pub const MOST_PAGE_ITEMS: usize = 256;

/// A store, as one manager uses it. Object-safe, because the manager's configuration selects the
/// implementation.
///
/// Every call may be dropped while it runs. A dropped commit may have been written or not.
#[async_trait]
pub trait Store: Send + Sync + 'static {
    /// Returns all items whose keys start with `prefix`, in key order, at one revision.
    ///
    /// # Errors
    /// [`StoreError::Unavailable`] when the store cannot be reached.
    async fn read(&self, prefix: &str) -> Result<Snapshot, StoreError>;

    /// Returns the first `limit` items ([`MOST_PAGE_ITEMS`] at most) whose keys start with `prefix`
    /// and come after `after`. Each page is read at one revision; a change between two pages shows
    /// in the second.
    ///
    /// # Errors
    /// [`StoreError::Unavailable`] when the store cannot be reached.
    async fn read_page(
        &self,
        prefix: &str,
        after: Option<&str>,
        limit: usize,
    ) -> Result<Page, StoreError>;

    /// Carries out a transaction, completely or not at all, if the leadership holds and every key
    /// is as expected. Once this returns a revision, the change survives a crash of the store. An
    /// empty transaction checks whether the leadership holds.
    ///
    /// The revision is new if anything changed. Deleting an absent key changes nothing.
    ///
    /// # Errors
    /// Nothing was written after [`StoreError::Conflict`], [`StoreError::LeadershipLost`] and all
    /// others except [`StoreError::Unavailable`], which states whether something may have been.
    async fn commit(
        &self,
        leadership: &Leadership,
        transaction: Transaction,
    ) -> Result<Revision, StoreError>;

    /// Waits until this manager leads. Keeps waiting while the store is unavailable.
    ///
    /// # Errors
    /// A fault that waiting does not cure: the store rejects this manager.
    async fn lead(&self, candidate: &Candidate) -> Result<Leadership, StoreError>;

    /// Returns the leader; `None` if there is none at the moment.
    ///
    /// # Errors
    /// [`StoreError::Unavailable`] when the store cannot be reached.
    async fn leader(&self) -> Result<Option<Leader>, StoreError>;

    /// Watches every change of keys that start with `prefix`, after the revision `since`, in order.
    ///
    /// # Errors
    /// [`StoreError::Unavailable`] when the store cannot be reached. The watch has its own errors.
    async fn watch(&self, prefix: &str, since: Revision) -> Result<Watch, StoreError>;
}
