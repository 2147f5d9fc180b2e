//! A leadership in etcd: its lease and the renewal of it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use etcd_client::{Client, GetOptions};
use tokio::task::JoinHandle;

use super::connection::{Connection, Failure};
use crate::error::{StoreError, Written};
use crate::leadership::{Standing, Tenure};
use crate::loss::Loss;

/// Renewals per lease length.
const RENEWALS: u32 = 5;
/// Longest wait for a response that only frees the leadership earlier.
const REVOKE: Duration = Duration::from_secs(2);

#[derive(Clone, Copy, Debug)]
pub(super) struct Lease {
    pub(super) id: i64,
    pub(super) ttl: Duration,
}

/// Returns until when a manager relies on a lease that it requested at `sent`. etcd counts from
/// later, when the request arrived. The fifth that is left out allows for clocks of different
/// speeds and for the time to react.
pub(super) fn holds_until(sent: Instant, ttl: Duration) -> Instant {
    sent + ttl - ttl / 5
}

/// A leadership that is renewed until it is dropped.
pub(super) struct EtcdTenure {
    connection: Arc<Connection>,
    lease: Lease,
    keeper: JoinHandle<()>,
}

impl EtcdTenure {
    /// Begins to renew. `key` is the leadership's key with the revision of its creation; `sent` is
    /// when the lease was requested.
    pub(super) fn begin(
        connection: Arc<Connection>,
        lease: Lease,
        key: (String, i64),
        standing: Arc<Standing>,
        sent: Instant,
    ) -> EtcdTenure {
        let keeper = Keeper { connection: Arc::clone(&connection), lease, key, standing };
        EtcdTenure { connection, lease, keeper: tokio::spawn(keeper.keep(sent)) }
    }
}

impl Drop for EtcdTenure {
    fn drop(&mut self) {
        self.keeper.abort();
    }
}

#[async_trait]
impl Tenure for EtcdTenure {
    async fn resign(self: Box<Self>) -> Result<(), StoreError> {
        self.keeper.abort();
        let revoked = revoke(&self.connection, self.lease.id).await;
        revoked.map_err(|failure| failure.into_error(self.connection.name(), Written::Unknown))
    }
}

/// Ends a lease, and the keys attached to it.
pub(super) async fn revoke(connection: &Connection, lease: i64) -> Result<(), Failure> {
    let revoke = |client: Client| async move { client.lease_client().revoke(lease).await };
    connection.ask(REVOKE, revoke).await.map(drop)
}

/// Renews a lease.
struct Keeper {
    connection: Arc<Connection>,
    lease: Lease,
    key: (String, i64),
    standing: Arc<Standing>,
}

impl Keeper {
    async fn keep(self, sent: Instant) {
        let mut until = holds_until(sent, self.lease.ttl);
        let mut next = sent + self.lease.ttl / RENEWALS;
        loop {
            tokio::time::sleep_until(next.min(until).into()).await;
            let sent = Instant::now();
            let renewed = tokio::time::timeout_at(until.into(), self.renew()).await;
            match renewed {
                Ok(Ok(true)) => {
                    until = holds_until(sent, self.lease.ttl);
                    self.standing.holds_until(until);
                    next = sent + self.lease.ttl / RENEWALS;
                }
                Ok(Ok(false)) => return self.standing.lose(Loss::Ended),
                Ok(Err(failure)) => {
                    tracing::warn!(?failure, "cannot renew the leadership");
                    next = Instant::now() + self.lease.ttl / (RENEWALS * 4);
                }
                // A response would come too late.
                Err(_) => return self.standing.lose(Loss::RanOut),
            }
        }
    }

    /// Renews the lease, and checks that the leadership is still this one: someone may have removed
    /// the key by hand.
    async fn renew(&self) -> Result<bool, Failure> {
        let (limit, lease) = (self.lease.ttl / 4, self.lease.id);
        let renew = |client: Client| async move { client.lease_client().keep_alive(lease).await };
        let renewed = self.connection.ask_once(limit, renew).await;
        let look = |client: Client| async move {
            let no_value = GetOptions::new().with_keys_only();
            client.kv_client().get(self.key.0.as_str(), Some(no_value)).await
        };
        let found = self.connection.ask_once(limit, look).await?;
        let mine = found.kvs().first().is_some_and(|key| key.create_revision() == self.key.1);
        if mine { renewed.map(|_| true) } else { Ok(false) }
    }
}
