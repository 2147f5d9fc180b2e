//! The trait that every store implements.

use async_trait::async_trait;

use crate::{
    Candidate, Leader, Leadership, Page, Revision, Snapshot, StoreError, Transaction, Watch,
};

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

    /// Returns the first `limit` items (at most [`MOST_PAGE_ITEMS`](crate::MOST_PAGE_ITEMS)) whose
    /// keys start with `prefix` and come after `after`. Each page is read at one revision; a change
    /// between two pages shows in the second.
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
