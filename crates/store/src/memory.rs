//! A store in memory, for tests and the simulator. Several managers can share one, and tests can
//! make it fail. It reads no clock: a leadership ends when it is resigned or dropped, or when the
//! test ends it.

use std::collections::BTreeMap;
use std::sync::Arc;

use async_trait::async_trait;
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::watch;

use super::error::{StoreError, Written};
use super::history::{Change, Changes, History, Watch};
use super::leadership::{Candidate, Leader, Leadership, Standing, Tenure};
use super::loss::Loss;
use super::revision::{KeyState, Revision};
use super::transaction::{Item, Page, Snapshot, Transaction, range};
use super::{MOST_PAGE_ITEMS, Store};

const NAME: &str = "in memory";

/// One manager's view of a store in memory. A clone belongs to the same manager.
/// [`MemoryStore::peer`] returns another manager's view, with its own faults.
#[derive(Clone, Debug)]
pub struct MemoryStore {
    hub: Arc<Hub>,
    faults: Arc<Mutex<Faults>>,
}

/// State that all managers share.
#[derive(Debug)]
struct Hub {
    state: Mutex<State>,
    history: Arc<History>,
    /// Wakes candidates when the leadership may be free.
    look_again: watch::Sender<()>,
}

#[derive(Debug, Default)]
struct State {
    items: BTreeMap<String, (String, Revision)>,
    revision: Revision,
    last_epoch: u64,
    leader: Option<Leader>,
}

#[derive(Debug, Default)]
struct Faults {
    unavailable: bool,
    answers_to_lose: usize,
    /// The store becomes unavailable with the next lost response.
    goes_away: bool,
    /// This manager's own view of its leadership.
    standing: Option<Arc<Standing>>,
}

impl Default for MemoryStore {
    fn default() -> MemoryStore {
        let hub = Hub {
            state: Mutex::default(),
            history: History::new(Revision(0)),
            look_again: watch::Sender::new(()),
        };
        MemoryStore { hub: Arc::new(hub), faults: Arc::default() }
    }
}

impl MemoryStore {
    /// Creates an empty store.
    #[must_use]
    pub fn new() -> MemoryStore {
        MemoryStore::default()
    }

    /// Returns another manager's view of this store.
    #[must_use]
    pub fn peer(&self) -> MemoryStore {
        MemoryStore { hub: Arc::clone(&self.hub), faults: Arc::default() }
    }

    /// Makes the store unavailable to this manager, or available again.
    pub fn set_unavailable(&self, unavailable: bool) {
        self.faults().unavailable = unavailable;
        self.hub.look_again.send_replace(());
    }

    /// Carries out this manager's next `commits` commits but loses the responses.
    pub fn lose_answers(&self, commits: usize) {
        self.faults().answers_to_lose = commits;
    }

    /// Carries out this manager's next commit, loses the response, and becomes unavailable.
    pub fn lose_answer_and_be_away(&self) {
        let mut faults = self.faults();
        (faults.answers_to_lose, faults.goes_away) = (1, true);
    }

    /// Ends the present leadership, of any manager, without the leader noticing: as if it had been
    /// suspended until its lease expired.
    pub fn end_leadership_silently(&self) {
        self.hub.state().leader = None;
        self.hub.look_again.send_replace(());
    }

    /// Makes this manager give up its leadership, as after too long without a response of the
    /// store. In the store it continues until [`MemoryStore::end_leadership_silently`].
    pub fn give_up_leadership(&self) {
        if let Some(standing) = &self.faults().standing {
            standing.lose(Loss::RanOut);
        }
    }

    fn faults(&self) -> MutexGuard<'_, Faults> {
        self.faults.lock()
    }

    fn reach(&self) -> Result<(), StoreError> {
        if self.faults().unavailable {
            Err(unavailable("the test made it unavailable", Written::No))
        } else {
            Ok(())
        }
    }

    /// Takes the leadership if it is free.
    fn try_lead(&self, candidate: &Candidate) -> Option<Leadership> {
        let mut state = self.hub.state();
        if self.reach().is_err() || state.leader.is_some() {
            return None;
        }
        state.last_epoch += 1;
        let epoch = Revision(state.last_epoch);
        state.leader = Some(Leader { candidate: candidate.clone(), epoch });
        let standing = Standing::new(None);
        self.faults().standing = Some(Arc::clone(&standing));
        Some(Leadership::new(
            epoch,
            standing,
            Box::new(MemoryTenure { store: self.clone(), epoch }),
        ))
    }
}

impl Hub {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Ends the leadership with this epoch, if it still holds.
    fn vacate(&self, epoch: Revision) {
        let mut state = self.state();
        if state.leader.as_ref().is_some_and(|leader| leader.epoch == epoch) {
            state.leader = None;
            self.look_again.send_replace(());
        }
    }
}

impl State {
    fn of(&self, key: &str) -> KeyState {
        self.items.get(key).map_or(KeyState::Absent, |(_, revision)| KeyState::At(*revision))
    }

    /// Writes, and returns the changes.
    fn write(&mut self, writes: Vec<(String, Option<String>)>) -> Vec<Change> {
        let revision = Revision(self.revision.0 + 1);
        let mut changes = Vec::new();
        for (key, value) in writes {
            let changed = match &value {
                Some(value) => {
                    self.items.insert(key.clone(), (value.clone(), revision));
                    true
                }
                None => self.items.remove(&key).is_some(),
            };
            if changed {
                changes.push(Change { key, value });
            }
        }
        if !changes.is_empty() {
            self.revision = revision;
        }
        changes
    }

    fn items<'a>(
        &'a self,
        prefix: &str,
        after: Option<&str>,
    ) -> impl Iterator<Item = Item> + use<'a> {
        let (from, to) = range(prefix, after);
        let item = |(key, (value, revision)): (&String, &(String, Revision))| Item {
            key: key.clone(),
            value: value.clone(),
            revision: *revision,
        };
        // A key after everything with the prefix gives an empty range, which `range` does not
        // accept.
        let range = (from < to).then(|| self.items.range(from..to));
        range.into_iter().flatten().map(item)
    }
}

#[async_trait]
impl Store for MemoryStore {
    async fn read(&self, prefix: &str) -> Result<Snapshot, StoreError> {
        self.reach()?;
        let state = self.hub.state();
        Ok(Snapshot { items: state.items(prefix, None).collect(), revision: state.revision })
    }

    async fn read_page(
        &self,
        prefix: &str,
        after: Option<&str>,
        limit: usize,
    ) -> Result<Page, StoreError> {
        self.reach()?;
        let state = self.hub.state();
        let limit = limit.clamp(1, MOST_PAGE_ITEMS);
        let mut items: Vec<_> = state.items(prefix, after).take(limit + 1).collect();
        let more = items.len() > limit;
        items.truncate(limit);
        Ok(Page { items, revision: state.revision, more })
    }

    async fn commit(
        &self,
        leadership: &Leadership,
        transaction: Transaction,
    ) -> Result<Revision, StoreError> {
        transaction.check()?;
        leadership.check()?;
        self.reach()?;
        let mut state = self.hub.state();
        if state.leader.as_ref().is_none_or(|leader| leader.epoch != leadership.epoch()) {
            return Err(leadership.ended());
        }
        let found = |key: &str| Ok::<_, StoreError>(state.of(key));
        if let Some(conflict) = transaction.first_conflict(found)? {
            return Err(conflict);
        }
        let changes = state.write(transaction.into_writes());
        let revision = state.revision;
        if !changes.is_empty() {
            self.hub.history.push(Changes { revision, changes });
        }
        let mut faults = self.faults();
        if faults.answers_to_lose > 0 {
            faults.answers_to_lose -= 1;
            faults.unavailable |= std::mem::take(&mut faults.goes_away);
            return Err(unavailable("the response was lost", Written::Unknown));
        }
        Ok(revision)
    }

    async fn lead(&self, candidate: &Candidate) -> Result<Leadership, StoreError> {
        let mut look_again = self.hub.look_again.subscribe();
        loop {
            look_again.borrow_and_update();
            if let Some(leadership) = self.try_lead(candidate) {
                return Ok(leadership);
            }
            // This cannot fail: the hub owns the sender.
            let _ = look_again.changed().await;
        }
    }

    async fn leader(&self) -> Result<Option<Leader>, StoreError> {
        self.reach()?;
        Ok(self.hub.state().leader.clone())
    }

    async fn watch(&self, prefix: &str, since: Revision) -> Result<Watch, StoreError> {
        self.reach()?;
        Ok(self.hub.history.watch(prefix, since))
    }
}

fn unavailable(why: &str, written: Written) -> StoreError {
    StoreError::Unavailable { store: NAME.to_owned(), why: why.to_owned(), written }
}

struct MemoryTenure {
    store: MemoryStore,
    epoch: Revision,
}

impl Drop for MemoryTenure {
    fn drop(&mut self) {
        self.store.hub.vacate(self.epoch);
    }
}

#[async_trait]
impl Tenure for MemoryTenure {
    async fn resign(self: Box<Self>) -> Result<(), StoreError> {
        self.store.reach()
    }
}
