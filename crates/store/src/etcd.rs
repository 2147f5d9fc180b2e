//! The store of several managers: etcd 3.4 or newer.
//!
//! Items are under `PREFIX/items/`. `PREFIX/leader` is the leadership: the manager whose lease
//! holds that key leads. Its epoch is the revision at which the key was created, and each
//! transaction compares it.
//!
//! A manager renews its lease five times per lease length. It counts its leadership from the moment
//! it sent the last renewal that was answered, for four fifths of the lease length. So it stops
//! before another manager can begin.

mod connection;
mod follow;
mod settings;
mod tenure;

use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use etcd_client::{
    Client, Compare, CompareOp, GetOptions, GetResponse, KeyValue, PutOptions, Txn, TxnOp,
    TxnOpResponse, TxnResponse,
};

use self::connection::{Connection, Failure};
use self::follow::Follower;
pub use self::settings::{EtcdSettings, EtcdTls};
use self::tenure::{EtcdTenure, Lease, holds_until};
use super::error::{StoreError, Written};
use super::history::{ChangeSource, Watch};
use super::leadership::{Candidate, Leader, Leadership, Standing};
use super::revision::{KeyState, Revision};
use super::transaction::{Item, Page, Snapshot, Transaction, range};
use super::{MOST_PAGE_ITEMS, MOST_VALUE_BYTES, Store};

/// Longest read at one member before another one is asked.
const READ: Duration = Duration::from_secs(3);
/// Longest transaction. etcd itself gives up after 7 s.
const COMMIT: Duration = Duration::from_secs(5);
/// Poll interval of a candidate, in case the watch reports nothing.
const POLL_INTERVAL: Duration = Duration::from_secs(2);
/// Pause before the next attempt to reach an unavailable etcd.
const RETRY_PAUSE: Duration = Duration::from_millis(500);
/// Longest response: a page of the largest values, with a margin.
const MOST_ANSWER_BYTES: usize = (MOST_PAGE_ITEMS + 64) * MOST_VALUE_BYTES;
/// Most attempts of a read. Compaction that overtakes more of them means that etcd's settings are
/// wrong.
const MOST_READS: usize = 5;

pub struct EtcdStore {
    connection: Arc<Connection>,
    layout: Layout,
    lease: Duration,
}

/// The layout of keys in etcd.
#[derive(Clone, Debug)]
struct Layout {
    items: String,
    leader: String,
}

impl Layout {
    fn key(&self, key: &str) -> String {
        format!("{}{key}", self.items)
    }

    /// Returns the range, in etcd's names, of the keys with this prefix that come after `after`.
    fn range(&self, prefix: &str, after: Option<&str>) -> (String, String) {
        let (from, to) = range(prefix, after);
        (self.key(&from), self.key(&to))
    }

    /// Returns the key without etcd's prefix.
    fn strip(&self, key: &[u8]) -> String {
        let key = String::from_utf8_lossy(key);
        key.strip_prefix(&self.items).unwrap_or(&key).to_owned()
    }
}

impl EtcdStore {
    /// Reads the certificates and prepares the client. The first call connects to etcd.
    ///
    /// # Errors
    /// [`StoreError::Settings`], [`StoreError::File`].
    pub fn new(settings: &EtcdSettings) -> Result<EtcdStore, StoreError> {
        let options = settings.check_and_load()?;
        let root = settings.prefix.trim_end_matches('/');
        Ok(EtcdStore {
            layout: Layout { items: format!("{root}/items/"), leader: format!("{root}/leader") },
            connection: Arc::new(Connection::new(
                settings.endpoints.clone(),
                options,
                format!("{root}/leader"),
            )),
            lease: settings.lease,
        })
    }

    /// Reads one page at the given revision, or at the present one if that is 0.
    async fn page(
        &self,
        prefix: &str,
        after: Option<&str>,
        limit: usize,
        at: i64,
    ) -> Result<GetResponse, Failure> {
        let (from, to) = self.layout.range(prefix, after);
        let options = GetOptions::new()
            .with_range(to)
            .with_limit(i64::try_from(limit).unwrap_or(i64::MAX))
            .with_revision(at);
        let get = |client: Client| {
            let (from, options) = (from.clone(), options.clone());
            async move { reader(&client).get(from, Some(options)).await }
        };
        self.connection.ask(READ, get).await
    }

    /// Reads all items of a prefix; `None` if etcd compacted the revision meanwhile.
    async fn read_at_once(&self, prefix: &str) -> Result<Option<Snapshot>, Failure> {
        let (mut items, mut at, mut after) = (Vec::<Item>::new(), 0, None::<String>);
        loop {
            let mut page = match self.page(prefix, after.as_deref(), MOST_PAGE_ITEMS, at).await {
                Err(Failure::Compacted) => return Ok(None),
                other => other?,
            };
            if at == 0 {
                at = page.header().map_or(0, etcd_client::ResponseHeader::revision);
            }
            let more = page.more();
            for item in page.take_kvs() {
                items.push(self.item(item)?);
            }
            after = items.last().map(|item| item.key.clone());
            if !more || after.is_none() {
                return Ok(Some(Snapshot { items, revision: revision(at) }));
            }
        }
    }

    fn item(&self, item: KeyValue) -> Result<Item, Failure> {
        let revision = revision(item.mod_revision());
        let (key, value) = item.into_key_value();
        let key = self.layout.strip(&key);
        let value = String::from_utf8(value).map_err(|_| Failure::Refused {
            why: format!("{key} holds a value that no manager wrote"),
            remedy: "remove the key, and give the manager its own prefix",
        })?;
        Ok(Item { key, value, revision })
    }

    /// Returns the leader, and the revision of that observation.
    async fn observe_leader(&self) -> Result<(Option<Leader>, i64), Failure> {
        let key = &self.layout.leader;
        let get = |client: Client| {
            let key = key.clone();
            async move { client.kv_client().get(key, None).await }
        };
        let answer = self.connection.ask(READ, get).await?;
        let at = answer.header().map_or(0, etcd_client::ResponseHeader::revision);
        let leader = answer.kvs().first().map(|item| {
            // Whatever the value is, the key is taken.
            let unknown = || Candidate { name: "unknown".to_owned(), address: String::new() };
            let candidate = serde_json::from_slice(item.value()).unwrap_or_else(|_| unknown());
            Leader { candidate, epoch: revision(item.create_revision()) }
        });
        Ok((leader, at))
    }

    /// Takes the leadership if it is free; otherwise waits until that may have changed.
    async fn lead_or_wait(&self, candidate: &Candidate) -> Result<Option<Leadership>, StoreError> {
        let (leader, at) =
            self.observe_leader().await.map_err(|failure| self.unchanged(failure))?;
        if leader.is_none() {
            return self.try_lead(candidate).await;
        }
        let key = self.layout.leader.clone();
        let mut watch = Follower::of_key(Arc::clone(&self.connection), key, at);
        // The next attempt finds its errors again.
        let _ = tokio::time::timeout(POLL_INTERVAL, watch.next()).await;
        Ok(None)
    }

    async fn try_lead(&self, candidate: &Candidate) -> Result<Option<Leadership>, StoreError> {
        let value = serde_json::to_vec(candidate)
            .map_err(|error| StoreError::Settings { why: format!("{candidate:?}: {error}") })?;
        let seconds = i64::try_from(self.lease.as_secs()).unwrap_or(i64::MAX);
        let sent = Instant::now();
        let grant =
            |client: Client| async move { client.lease_client().grant(seconds, None).await };
        let granted =
            self.connection.ask(READ, grant).await.map_err(|failure| self.unchanged(failure))?;
        // etcd extends the lease where its own elections take longer.
        let ttl = Duration::from_secs(granted.ttl().cast_unsigned());
        let lease = Lease { id: granted.id(), ttl };
        let key = &self.layout.leader;
        let take = Txn::new()
            .when([Compare::create_revision(key.as_str(), CompareOp::Equal, 0)])
            .and_then([TxnOp::put(
                key.as_str(),
                value,
                Some(PutOptions::new().with_lease(lease.id)),
            )]);
        let taken = self
            .connection
            .ask_once(COMMIT, |client| async move { client.kv_client().txn(take).await });
        let answer = match taken.await {
            Ok(answer) if answer.succeeded() => answer,
            other => {
                // Another candidate was faster, or the result is unknown: the key goes with the
                // lease.
                let _ = tenure::revoke(&self.connection, lease.id).await;
                return other.map(|_| None).map_err(|failure| self.unchanged(failure));
            }
        };
        let epoch = answer.header().map_or(0, etcd_client::ResponseHeader::revision);
        let standing = Standing::new(Some(holds_until(sent, ttl)));
        let tenure = EtcdTenure::begin(
            Arc::clone(&self.connection),
            lease,
            (key.clone(), epoch),
            Arc::clone(&standing),
            sent,
        );
        Ok(Some(Leadership::new(revision(epoch), standing, Box::new(tenure))))
    }

    /// Converts the failure of a request that changed nothing.
    fn unchanged(&self, failure: Failure) -> StoreError {
        failure.into_error(self.connection.name(), Written::No)
    }

    /// Builds etcd's transaction. If etcd refuses it, the response holds the state of everything
    /// that it compares.
    fn compose(&self, epoch: Revision, transaction: &Transaction) -> Txn {
        let leader = self.layout.leader.as_str();
        let mut compares =
            vec![Compare::create_revision(leader, CompareOp::Equal, epoch.0.cast_signed())];
        let mut looks = vec![TxnOp::get(leader, Some(GetOptions::new().with_keys_only()))];
        for (key, expected) in transaction.expectations() {
            let key = self.layout.key(key);
            // An absent key has revision 0.
            let at = match expected {
                KeyState::Absent => 0,
                KeyState::At(revision) => revision.0.cast_signed(),
            };
            compares.push(Compare::mod_revision(key.as_str(), CompareOp::Equal, at));
            looks.push(TxnOp::get(key, Some(GetOptions::new().with_keys_only())));
        }
        let write = |(key, value): &(String, Option<String>)| match value {
            Some(value) => TxnOp::put(self.layout.key(key), value.as_str(), None),
            None => TxnOp::delete(self.layout.key(key), None),
        };
        let writes: Vec<_> = transaction.writes().iter().map(write).collect();
        Txn::new().when(compares).and_then(writes).or_else(looks)
    }

    /// Returns why etcd refused a transaction.
    fn refusal(
        &self,
        leadership: &Leadership,
        transaction: &Transaction,
        answer: &TxnResponse,
    ) -> StoreError {
        let looks = answer.op_responses();
        let mut looks = looks.iter().map(|look| match look {
            TxnOpResponse::Get(found) => found.kvs().first(),
            _ => None,
        });
        let leads = |key: &KeyValue| revision(key.create_revision()) == leadership.epoch();
        if !looks.next().flatten().is_some_and(leads) {
            return leadership.ended();
        }
        let state = |_: &str| {
            let found = looks.next().flatten();
            Ok::<_, StoreError>(
                found.map_or(KeyState::Absent, |key| KeyState::At(revision(key.mod_revision()))),
            )
        };
        match transaction.first_conflict(state) {
            Ok(Some(conflict)) | Err(conflict) => conflict,
            Ok(None) => {
                self.unchanged(Failure::Lost("it refused a transaction for no reason".to_owned()))
            }
        }
    }
}

#[async_trait]
impl Store for EtcdStore {
    async fn read(&self, prefix: &str) -> Result<Snapshot, StoreError> {
        for _ in 0..MOST_READS {
            let snapshot =
                self.read_at_once(prefix).await.map_err(|failure| self.unchanged(failure))?;
            if let Some(snapshot) = snapshot {
                return Ok(snapshot);
            }
        }
        Err(self.unchanged(Failure::Compacted))
    }

    async fn read_page(
        &self,
        prefix: &str,
        after: Option<&str>,
        limit: usize,
    ) -> Result<Page, StoreError> {
        let limit = limit.clamp(1, MOST_PAGE_ITEMS);
        let mut page =
            self.page(prefix, after, limit, 0).await.map_err(|failure| self.unchanged(failure))?;
        let at = page.header().map_or(0, etcd_client::ResponseHeader::revision);
        let more = page.more();
        let items: Result<Vec<_>, _> =
            page.take_kvs().into_iter().map(|item| self.item(item)).collect();
        let items = items.map_err(|failure| self.unchanged(failure))?;
        Ok(Page { items, revision: revision(at), more })
    }

    async fn commit(
        &self,
        leadership: &Leadership,
        transaction: Transaction,
    ) -> Result<Revision, StoreError> {
        transaction.check()?;
        leadership.check()?;
        // Nothing is sent until here. From here on the failure may be a lost response.
        self.connection.reach().await.map_err(|failure| self.unchanged(failure))?;
        leadership.check()?;
        let txn = self.compose(leadership.epoch(), &transaction);
        let send = |client: Client| async move { client.kv_client().txn(txn).await };
        let answer = self.connection.ask_once(COMMIT, send).await;
        let answer = answer
            .map_err(|failure| failure.into_error(self.connection.name(), Written::Unknown))?;
        if answer.succeeded() {
            Ok(revision(answer.header().map_or(0, etcd_client::ResponseHeader::revision)))
        } else {
            Err(self.refusal(leadership, &transaction, &answer))
        }
    }

    async fn lead(&self, candidate: &Candidate) -> Result<Leadership, StoreError> {
        let mut warned = false;
        loop {
            match self.lead_or_wait(candidate).await {
                Ok(Some(leadership)) => return Ok(leadership),
                Ok(None) => warned = false,
                Err(error @ StoreError::Unavailable { .. }) => {
                    if !std::mem::replace(&mut warned, true) {
                        tracing::warn!(%error, "waiting to lead");
                    }
                    tokio::time::sleep(RETRY_PAUSE).await;
                }
                Err(error) => return Err(error),
            }
        }
    }

    async fn leader(&self) -> Result<Option<Leader>, StoreError> {
        self.observe_leader()
            .await
            .map(|(leader, _)| leader)
            .map_err(|failure| self.unchanged(failure))
    }

    async fn watch(&self, prefix: &str, since: Revision) -> Result<Watch, StoreError> {
        self.connection.reach().await.map_err(|failure| self.unchanged(failure))?;
        let range = self.layout.range(prefix, None);
        Ok(Watch::new(Follower::new(
            Arc::clone(&self.connection),
            self.layout.clone(),
            range,
            since.0.cast_signed(),
        )))
    }
}

fn revision(number: i64) -> Revision {
    Revision(number.cast_unsigned())
}

/// Returns a client that accepts whole pages.
fn reader(client: &Client) -> etcd_client::KvClient {
    client.kv_client().max_decoding_message_size(MOST_ANSWER_BYTES)
}

impl std::fmt::Debug for EtcdStore {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // The options of etcd's client contain the password.
        out.debug_struct("EtcdStore")
            .field("endpoints", &self.connection.name())
            .finish_non_exhaustive()
    }
}
