//! Chronicle: writes the journal's entries about what hosts report, and reads the journal for the
//! API.
//!
//! [`known`] turns changes of the cluster into entries, [`search`] filters entries; both are pure.
//! Entries about changes that the manager itself makes are written by the resources, in the
//! transactions of these changes. This module calls the cluster, the journal and the storage.

pub(crate) mod http;
mod known;
mod search;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::Duration;

use godwit_api::control::{Change, ClusterEvent, JournalEntry, JournalKind, Problem};
use tokio::time::{MissedTickBehavior, interval};

use crate::cluster::inventory::Inventory;
use crate::cluster::state::State;
use crate::journal::entries::NewEntry;
use crate::journal::events::{Listener, Next};
use crate::storage::keeper::Keeper;
use crate::storage::term::Term;
use crate::storage::turns::Turns;
use known::Known;
pub(crate) use search::Search;

/// Interval at which the numbers of omitted entries are written.
const OMITTED_INTERVAL: Duration = Duration::from_secs(30);
/// Most entries that one request examines. A filter that few entries match continues behind them
/// with the next page.
const MOST_EXAMINED: usize = 20_000;
/// Entries that are read from the store at once.
const READ_AT_ONCE: usize = 256;

/// Task that writes entries about what hosts report, while this manager leads.
pub(crate) struct Chronicle {
    known: Known,
    listener: Listener,
    keeper: Arc<Keeper>,
    state: Arc<State>,
    /// Users of operations on VMs.
    turns: Turns,
}

impl Chronicle {
    /// Notes the present state, and that this manager leads. Later changes become entries.
    ///
    /// # Errors
    /// The store does not accept the entry.
    pub(crate) async fn begin(
        keeper: Arc<Keeper>,
        state: Arc<State>,
        turns: Turns,
    ) -> Result<Chronicle, Problem> {
        // Listens before it reads, so that no change is lost; one that comes twice changes nothing.
        let listener = state.events().listen(None);
        let mut known = Known::default();
        for change in all(&state.inventory()) {
            known.note(&change);
        }
        let name = &keeper.candidate().name;
        let entry = NewEntry::info(JournalKind::LeaderChanged, format!("manager {name} leads"))
            .about("manager", name)
            .about_object("cluster");
        keeper.write(keeper.noting(entry)?).await?;
        Ok(Chronicle { known, listener, keeper, state, turns })
    }

    /// Writes entries until the manager ends.
    pub(crate) async fn run(mut self) {
        let mut omitted = interval(OMITTED_INTERVAL);
        omitted.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                next = self.listener.next() => match next {
                    Some(next) => self.take_in(next),
                    None => return,
                },
                _ = omitted.tick() => self.keeper.journal_omitted(),
            }
        }
    }

    fn take_in(&mut self, next: Next) {
        let entries: Vec<NewEntry> = match next {
            Next::Events(events) => {
                let Chronicle { known, turns, .. } = self;
                let of = |event: &Arc<ClusterEvent>| {
                    let entries = known.entries(&event.change).into_iter();
                    entries.map(|entry| requested(entry, event.unix_ms, turns)).collect::<Vec<_>>()
                };
                events.iter().flat_map(of).collect()
            }
            // Of the changes in between, only the result is known.
            Next::Missed(_) => {
                let now = all(&self.state.inventory());
                let gone = self.known.gone(&now);
                gone.iter().chain(&now).flat_map(|change| self.known.entries(change)).collect()
            }
        };
        entries.into_iter().for_each(|entry| self.keeper.journal(entry));
    }
}

/// Names the user whose request worked on the VM of an entry at this time, if there was one.
fn requested(entry: NewEntry, unix_ms: u64, turns: &Turns) -> NewEntry {
    use JournalKind::{VmCreated, VmDeleted, VmPaused, VmStarted, VmStopped};
    if !matches!(entry.kind(), VmCreated | VmDeleted | VmPaused | VmStarted | VmStopped) {
        return entry;
    }
    let vm = entry.object().and_then(|object| object.strip_prefix("vm:"));
    match vm.and_then(|vm| turns.user_at(&format!("vm {vm}"), unix_ms)) {
        Some(who) => entry.by(who),
        None => entry,
    }
}

/// Returns all hosts and VMs as changes, hosts first.
fn all(inventory: &Inventory) -> Vec<Change> {
    let hosts = inventory.plans().filter_map(|(name, _)| inventory.host_summary(name));
    let hosts = hosts.map(|host| Change::Host(Box::new(host)));
    let vms = inventory.all_vms().filter_map(|info| inventory.vm(&info.name));
    hosts.chain(vms.map(|vm| Change::Vm(Box::new(vm.summary)))).collect()
}

/// Reader of the journal.
#[derive(Clone, Debug)]
pub(crate) struct Journal {
    keeper: Arc<Term<Keeper>>,
}

impl Journal {
    pub(crate) fn new(keeper: Arc<Term<Keeper>>) -> Journal {
        Journal { keeper }
    }

    /// Returns the newest entries that match, up to `limit`, and the cursor of the next page.
    pub(crate) async fn page(
        &self,
        search: &Search,
        behind: Option<String>,
        limit: usize,
    ) -> Result<(Vec<JournalEntry>, Option<String>), Problem> {
        let keeper = self.keeper.get()?;
        let mut behind = search.begin(behind);
        let (mut found, mut examined) = (Vec::new(), 0);
        loop {
            let (entries, next) = keeper.journal_page(behind.as_deref(), READ_AT_ONCE).await?;
            examined += READ_AT_ONCE;
            for entry in entries {
                if search.is_past(&entry) {
                    return Ok((found, None));
                }
                if !search.lets_through(&entry) {
                    continue;
                }
                if found.len() == limit {
                    let last = found.last().map(|last: &JournalEntry| last.id.clone());
                    return Ok((found, last));
                }
                found.push(entry);
            }
            if next.is_none() || examined >= MOST_EXAMINED {
                return Ok((found, next));
            }
            behind = next;
        }
    }
}
