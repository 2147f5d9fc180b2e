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

mod bounds;
mod error;
#[cfg(feature = "etcd")]
mod etcd;
mod history;
mod leadership;
mod loss;
mod memory;
pub mod records;
mod revision;
mod sqlite;
mod store;
mod transaction;

pub use bounds::{
    MOST_KEY_BYTES, MOST_KEYS, MOST_PAGE_ITEMS, MOST_TRANSACTION_BYTES, MOST_VALUE_BYTES,
};
pub use error::{StoreError, Written};
#[cfg(feature = "etcd")]
pub use etcd::{EtcdSettings, EtcdStore, EtcdTls};
pub use history::{Change, Changes, Watch};
pub use leadership::{Candidate, Leader, Leadership};
pub use loss::Loss;
pub use memory::MemoryStore;
pub use revision::{KeyState, Revision};
pub use sqlite::SqliteStore;
pub use store::Store;
pub use transaction::{Item, Page, Snapshot, Transaction};
