//! Where desired state is kept: text keys, JSON values, and a revision that grows with every change. One manager leads and writes; others read
//! and follow.
//!
//! [`SqliteStore`] is one file of one manager; [`EtcdStore`] is for several; [`MemoryStore`] is for tests and the simulator, with faults. They
//! behave alike, and one test-suite (`tests/contract`) says what alike means. A store knows keys and text: [`records`] keeps typed
//! records in them, and what a record means its owner alone knows.
//!
//! **Why a manager that lost its leadership can't write.** Each leadership has an epoch, no number twice, and each transaction carries the
//! epoch of the leadership that it was made under. The store compares it with the epoch of the present one in the same step in which it writes.
//! So it does not matter what a manager believes, or how long it stood still: its transaction fails.

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

/// Keys that one transaction may expect something of, and as many that it may write. etcd carries out 128 operations; the leadership is one.
pub const MOST_KEYS: usize = 120;
/// Bytes of the keys and values that one transaction may write. etcd takes requests of 1.5 MiB; the rest is for what surrounds them.
pub const MOST_TRANSACTION_BYTES: usize = 1 << 20;
/// Bytes of a value: it goes with others in one transaction, and a whole page of such values can still be read.
pub const MOST_VALUE_BYTES: usize = 768 << 10;
pub const MOST_KEY_BYTES: usize = 512;
/// Items of a page.
pub const MOST_PAGE_ITEMS: usize = 256;

/// A store, as one manager has it. Object-safe, as which of them it is stands in the manager's configuration.
///
/// Every call may be dropped while it runs. A commit that is dropped may have been written or not.
#[async_trait]
pub trait Store: Send + Sync + 'static {
    /// All items whose keys start with `prefix`, in the order of their keys, as they were at one revision.
    ///
    /// # Errors
    /// [`StoreError::Unavailable`] when the store can't be asked.
    async fn read(&self, prefix: &str) -> Result<Snapshot, StoreError>;

    /// The first items whose keys start with `prefix` and come after `after`, `limit` of them ([`MOST_PAGE_ITEMS`] at most). Each page is as
    /// of one revision; what changes between two pages shows in the second.
    ///
    /// # Errors
    /// [`StoreError::Unavailable`] when the store can't be asked.
    async fn read_page(
        &self,
        prefix: &str,
        after: Option<&str>,
        limit: usize,
    ) -> Result<Page, StoreError>;

    /// Carries out a transaction, all of it or nothing, if the leadership holds and every key is as expected. Once this returns a revision
    /// the change survives a crash of whoever keeps it. An empty one asks whether the leadership holds.
    ///
    /// A revision is new if anything changed; a delete of what was absent changes nothing.
    ///
    /// # Errors
    /// Nothing was written after [`StoreError::Conflict`], [`StoreError::LeadershipLost`] and all others but [`StoreError::Unavailable`],
    /// which says itself whether something may have been.
    async fn commit(
        &self,
        leadership: &Leadership,
        transaction: Transaction,
    ) -> Result<Revision, StoreError>;

    /// Waits until this manager leads. While the store can't be asked it goes on waiting.
    ///
    /// # Errors
    /// A fault that waiting does not cure: the store refuses this manager.
    async fn lead(&self, candidate: &Candidate) -> Result<Leadership, StoreError>;

    /// Who leads; none: nobody does at the moment.
    ///
    /// # Errors
    /// [`StoreError::Unavailable`] when the store can't be asked.
    async fn leader(&self) -> Result<Option<Leader>, StoreError>;

    /// Every change of keys that start with `prefix`, after the revision `since`, in order.
    ///
    /// # Errors
    /// [`StoreError::Unavailable`] when the store can't be asked. The watch has errors of its own.
    async fn watch(&self, prefix: &str, since: Revision) -> Result<Watch, StoreError>;
}
