//! A store that measures the time of its answers.

use std::sync::Arc;
use std::time::Instant;

use async_trait::async_trait;
use godwit_store::{
    Candidate, Leader, Leadership, Page, Revision, Snapshot, Store, StoreError, Transaction, Watch,
};

use crate::metrics::METRICS;

/// A store with measured answers.
pub(crate) struct MeasuredStore(pub(crate) Arc<dyn Store>);

async fn timed<T>(
    operation: &'static str,
    asked: impl Future<Output = Result<T, StoreError>> + Send,
) -> Result<T, StoreError> {
    let began = Instant::now();
    let answer = asked.await;
    METRICS.store(operation, answer.is_ok(), began.elapsed());
    answer
}

#[async_trait]
impl Store for MeasuredStore {
    async fn read(&self, prefix: &str) -> Result<Snapshot, StoreError> {
        timed("read", self.0.read(prefix)).await
    }

    async fn read_page(
        &self,
        prefix: &str,
        after: Option<&str>,
        limit: usize,
    ) -> Result<Page, StoreError> {
        timed("read", self.0.read_page(prefix, after, limit)).await
    }

    async fn commit(
        &self,
        leadership: &Leadership,
        transaction: Transaction,
    ) -> Result<Revision, StoreError> {
        timed("commit", self.0.commit(leadership, transaction)).await
    }

    /// Waiting to become the leader is not measured.
    async fn lead(&self, candidate: &Candidate) -> Result<Leadership, StoreError> {
        self.0.lead(candidate).await
    }

    async fn leader(&self) -> Result<Option<Leader>, StoreError> {
        timed("read", self.0.leader()).await
    }

    async fn watch(&self, prefix: &str, since: Revision) -> Result<Watch, StoreError> {
        self.0.watch(prefix, since).await
    }
}
