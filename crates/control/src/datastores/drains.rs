//! Drains of datastores, which move all disks off one, and their undoing. One task owns all of
//! them. `plan.rs` finds the facts and `godwit_planner::disk_drain` the targets, `state.rs` knows
//! which moves may begin, `steps.rs` asks the hosts for them; this module saves each step.
//!
//! A disk is moved by the agent of the host that runs its VM (`godwit disk move`), which undoes
//! what fails. So a drain whose manager ends is continued by the next leader: a move that is not in
//! the record is found by where the VM's disk is.

pub(crate) mod http;
mod plan;
pub(crate) mod record;
mod state;
mod steps;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use godwit_api::control::{
    CreateDatastoreDrain, DatastoreDrain, DrainState, JournalKind, Problem, ProblemCode,
};
use godwit_api::json_name;
use parking_lot::{RwLock, RwLockReadGuard};
use tokio::sync::{mpsc, oneshot};
use tokio::time::{MissedTickBehavior, interval};

use crate::agents::AgentClients;
use crate::clock::now_unix_ms;
use crate::cluster::inventory::DatastorePlan;
use crate::cluster::state::State;
use crate::journal::entries::NewEntry;
use crate::moves::fresh_id;
use crate::storage::keeper::{Keeper, Writes};
use record::{DATASTORE_DRAINS, PARTS, SavedDisks, SavedStoreDrain, drain_of, part_id};
use state::{Load, StoreDrain};

/// Poll interval for the next steps of all drains.
const LOOK_INTERVAL: Duration = Duration::from_millis(500);
/// Most drains that are over; the oldest are removed first.
const MOST_OVER: usize = 200;
/// Capacity of the order channel. Further senders wait.
const WAITING_ORDERS: usize = 64;

/// Order to the task that owns the drains.
enum Order {
    Create(Box<StoreDrain>, Answer),
    Cancel(String, Answer),
    Undo(String, Answer),
}

type Answer = oneshot::Sender<Result<DatastoreDrain, Problem>>;

/// Services that drains of datastores use.
#[derive(Clone)]
pub(crate) struct Means {
    pub(crate) keeper: Arc<Keeper>,
    pub(crate) state: Arc<State>,
    pub(crate) agents: Arc<AgentClients>,
}

/// Handle to the drains of datastores.
pub(crate) struct DatastoreDrains {
    means: Means,
    shown: Arc<RwLock<BTreeMap<String, DatastoreDrain>>>,
    orders: mpsc::Sender<Order>,
}

impl DatastoreDrains {
    /// Loads the drains from the store and continues them.
    pub(crate) async fn begin(means: Means) -> Result<DatastoreDrains, Problem> {
        let drains = read(&means.keeper).await?;
        let (orders, incoming) = mpsc::channel(WAITING_ORDERS);
        let shown = drains.iter().map(|(id, drain)| (id.clone(), drain.summary(id)));
        let shown = Arc::new(RwLock::new(shown.collect::<BTreeMap<_, _>>()));
        // An earlier manager may have ended between the parts of a record.
        let unsure = drains.keys().cloned().collect();
        let task = DrainTask { means: means.clone(), shown: Arc::clone(&shown), drains, unsure };
        tokio::spawn(task.run(incoming));
        Ok(DatastoreDrains { means, shown, orders })
    }

    /// Returns all drains, by ID.
    pub(crate) fn all(&self) -> RwLockReadGuard<'_, BTreeMap<String, DatastoreDrain>> {
        self.shown.read()
    }

    /// Returns the open drain of a datastore.
    pub(crate) fn of_datastore(&self, id: &str) -> Option<DatastoreDrain> {
        let is_open = |one: &&DatastoreDrain| {
            matches!(one.state, DrainState::Running | DrainState::Undoing) && one.datastore == id
        };
        self.all().values().find(is_open).cloned()
    }

    /// Plans the drain of a datastore and, unless only the plan is wanted, begins it: the datastore
    /// is in maintenance from then on. Returns the existing drain if one is running.
    pub(crate) async fn create(
        &self,
        named: &str,
        request: CreateDatastoreDrain,
        asked_by: &str,
    ) -> Result<DatastoreDrain, Problem> {
        let CreateDatastoreDrain { plan_only, to, flatten, bandwidth_limit } = request;
        let (datastore, to) = {
            let inventory = self.means.state.inventory();
            let ids = to.iter().map(|to| inventory.find_datastore(to).map(|found| found.id));
            let ids = ids.collect::<Result<BTreeSet<String>, Problem>>()?;
            (inventory.find_datastore(named)?, ids)
        };
        if let Some(open) = self.of_datastore(&datastore.id) {
            if open.state == DrainState::Undoing {
                let detail = format!("drain {} of datastore {named} is being undone", open.id);
                let remedy = "try again when the undoing is finished";
                return Err(Problem::new(ProblemCode::WrongState, detail, remedy));
            }
            return Ok(open);
        }
        let disks = plan::planned(&self.means.agents, &datastore.id, &to, flatten).await;
        let drain = StoreDrain {
            datastore: datastore.id,
            name: datastore.name,
            asked_by: asked_by.to_owned(),
            asked_unix_ms: now_unix_ms(),
            flatten,
            bandwidth_limit,
            state: if plan_only { DrainState::Planned } else { DrainState::Running },
            was_in_maintenance: datastore.maintenance,
            ended_unix_ms: None,
            disks,
        };
        if plan_only {
            return Ok(drain.summary(""));
        }
        self.order(|answer| Order::Create(Box::new(drain), answer)).await
    }

    /// Cancels a drain. Waiting disks stay, moves in progress are cancelled, and the maintenance is
    /// as before the drain.
    pub(crate) async fn cancel(&self, id: &str) -> Result<DatastoreDrain, Problem> {
        self.order(|answer| Order::Cancel(id.to_owned(), answer)).await
    }

    /// Ends the maintenance of a drain's datastore, and moves its disks back.
    pub(crate) async fn undo(&self, id: &str) -> Result<DatastoreDrain, Problem> {
        self.order(|answer| Order::Undo(id.to_owned(), answer)).await
    }

    async fn order(&self, order: impl FnOnce(Answer) -> Order) -> Result<DatastoreDrain, Problem> {
        let (answer, answered) = oneshot::channel();
        let gone = || {
            let remedy = "send the request to the manager that leads now";
            Problem::new(ProblemCode::NoLeader, "this manager no longer leads", remedy)
        };
        self.orders.send(order(answer)).await.map_err(|_| gone())?;
        answered.await.map_err(|_| gone())?
    }
}

/// State of the task that owns all drains of datastores.
struct DrainTask {
    means: Means,
    shown: Arc<RwLock<BTreeMap<String, DatastoreDrain>>>,
    drains: BTreeMap<String, StoreDrain>,
    /// Drains whose stored parts may differ from `drains`, because a write may have failed.
    unsure: BTreeSet<String>,
}

impl DrainTask {
    async fn run(mut self, mut orders: mpsc::Receiver<Order>) {
        let mut ticks = interval(LOOK_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                order = orders.recv() => match order {
                    Some(Order::Create(drain, answer)) => {
                        let _ = answer.send(self.create(*drain).await);
                    }
                    Some(Order::Cancel(id, answer)) => {
                        let _ = answer.send(self.cancel(&id).await);
                    }
                    Some(Order::Undo(id, answer)) => {
                        let _ = answer.send(self.undo(&id).await);
                    }
                    None => return,
                },
                _ = ticks.tick() => {
                    let open = self.drains.iter().filter(|(_, drain)| !drain.is_over());
                    let ids: Vec<String> = open.map(|(id, _)| id.clone()).collect();
                    for id in ids {
                        if let Err(problem) = self.go_on(&id).await {
                            tracing::warn!(drain = id, %problem, "cannot continue a drain");
                        }
                    }
                }
            }
        }
    }

    async fn create(&mut self, drain: StoreDrain) -> Result<DatastoreDrain, Problem> {
        let is_same = |(_, other): &(&String, &StoreDrain)| {
            other.datastore == drain.datastore && !other.is_over()
        };
        if let Some((id, other)) = self.drains.iter().find(is_same) {
            return Ok(other.summary(id));
        }
        let id = fresh_id('s', now_unix_ms())?;
        self.set_maintenance(&drain.datastore, true).await?;
        self.save(&id, drain).await?;
        self.forget_oldest().await;
        self.go_on(&id).await?;
        self.shown_drain(&id)
    }

    async fn cancel(&mut self, id: &str) -> Result<DatastoreDrain, Problem> {
        let drain = self.in_state(id, &[DrainState::Running, DrainState::Undoing])?.clone();
        let drain = self.stopped(drain).await;
        self.set_maintenance(&drain.datastore, drain.was_in_maintenance).await?;
        self.save(id, drain).await?;
        self.shown_drain(id)
    }

    async fn undo(&mut self, id: &str) -> Result<DatastoreDrain, Problem> {
        let may = [DrainState::Running, DrainState::Done, DrainState::Cancelled];
        let drain = self.in_state(id, &may)?.clone();
        let mut others = self.drains.iter().filter(|(other, _)| *other != id);
        let other = others.find(|(_, of)| of.datastore == drain.datastore && !of.is_over());
        if let Some((other, _)) = other {
            let detail = format!("datastore {} is being drained by drain {other}", drain.name);
            return Err(Problem::new(ProblemCode::WrongState, detail, "cancel that drain first"));
        }
        let is_running = drain.state == DrainState::Running;
        let mut drain = if is_running { self.stopped(drain).await } else { drain };
        drain.turn_back();
        self.set_maintenance(&drain.datastore, false).await?;
        self.save(id, drain).await?;
        self.go_on(id).await?;
        self.shown_drain(id)
    }

    /// Ends the moves of a drain: those that wait, and those in progress at their hosts.
    async fn stopped(&self, mut drain: StoreDrain) -> StoreDrain {
        drain.stop_waiting("the drain was cancelled");
        steps::cancel_moving(&self.means.agents, &mut drain).await;
        drain.state = DrainState::Cancelled;
        drain.ended_unix_ms = Some(now_unix_ms());
        drain
    }

    /// Returns a drain if it is in one of these states.
    fn in_state(&self, id: &str, states: &[DrainState]) -> Result<&StoreDrain, Problem> {
        let drain = self.drains.get(id).ok_or_else(|| no_drain(id))?;
        if states.contains(&drain.state) {
            return Ok(drain);
        }
        let detail = format!("drain {id} is {}", json_name(&drain.state));
        Err(Problem::new(ProblemCode::WrongState, detail, "see `godwit datastore drains`"))
    }

    /// Executes the next steps of a drain.
    async fn go_on(&mut self, id: &str) -> Result<(), Problem> {
        let Some(before) = self.drains.get(id) else { return Ok(()) };
        let mut drain = before.clone();
        let others = self.drains.iter().filter(|(other, _)| *other != id);
        let mut load = Load::of(others.map(|(_, drain)| drain));
        steps::look(&self.means.agents, &mut drain).await;
        load.join(&drain);
        steps::start(&self.means.agents, &mut drain, &mut load).await;
        if !drain.has_open_moves() {
            let was_undone = drain.state == DrainState::Undoing;
            drain.state = if was_undone { DrainState::Undone } else { DrainState::Done };
            drain.ended_unix_ms = Some(now_unix_ms());
        }
        if self.drains.get(id) == Some(&drain) && !self.unsure.contains(id) {
            return Ok(());
        }
        self.save(id, drain).await
    }

    /// Sets or ends the maintenance of a datastore.
    async fn set_maintenance(&self, id: &str, maintenance: bool) -> Result<(), Problem> {
        let Means { keeper, state, .. } = &self.means;
        let _turn = state.planning().await;
        let before = state.inventory().datastore_plans().get(id).cloned().unwrap_or_default();
        if before.maintenance == maintenance {
            return Ok(());
        }
        let plan = DatastorePlan { maintenance, ..before };
        super::save(keeper, id, &plan, Writes::default()).await?;
        super::know(state, id, plan);
        Ok(())
    }

    /// Takes in a drain, shows it, and writes what of it has changed.
    async fn save(&mut self, id: &str, drain: StoreDrain) -> Result<(), Problem> {
        let keeper = Arc::clone(&self.means.keeper);
        let (head, parts) = SavedStoreDrain::of(&drain);
        // Until the whole record is written.
        let is_sure = self.unsure.insert(id.to_owned());
        let before = self.drains.get(id).filter(|_| is_sure).map(SavedStoreDrain::of);
        let (head_before, parts_before) =
            before.map(|(head, parts)| (Some(head), parts)).unwrap_or_default();
        let state_before = self.drains.get(id).map(|drain| drain.state);
        let entry = noted(id, state_before, &drain);
        self.shown.write().insert(id.to_owned(), drain.summary(id));
        self.drains.insert(id.to_owned(), drain);
        for (number, part) in parts.iter().enumerate() {
            let part_id = part_id(id, number);
            if parts_before.get(number) != Some(part) || !keeper.has(PARTS, &part_id) {
                let writes = keeper.put(Writes::default(), PARTS, &part_id, part).await?;
                keeper.write(writes).await?;
            }
        }
        if head_before.as_ref() != Some(&head) {
            let writes = entry.map(|entry| keeper.noting(entry)).transpose()?.unwrap_or_default();
            let writes = keeper.put(writes, DATASTORE_DRAINS, id, &head).await?;
            keeper.write(writes).await?;
        }
        self.unsure.remove(id);
        Ok(())
    }

    async fn forget_oldest(&mut self) {
        let over = self.drains.iter().filter(|(_, drain)| drain.is_over());
        let mut over: Vec<(u64, String)> =
            over.map(|(id, drain)| (drain.asked_unix_ms, id.clone())).collect();
        over.sort();
        for (_, id) in over.iter().take(over.len().saturating_sub(MOST_OVER)) {
            let removed = match self.means.keeper.remove(DATASTORE_DRAINS, id).await {
                Ok(()) => remove_parts(&self.means.keeper, id).await,
                failed => failed,
            };
            if let Err(problem) = removed {
                tracing::warn!(drain = id, %problem, "cannot remove an old drain");
                return;
            }
            self.drains.remove(id);
            self.shown.write().remove(id);
        }
    }

    fn shown_drain(&self, id: &str) -> Result<DatastoreDrain, Problem> {
        self.shown.read().get(id).cloned().ok_or_else(|| no_drain(id))
    }
}

/// Returns the entry of the journal about a drain whose state changes.
fn noted(id: &str, before: Option<DrainState>, drain: &StoreDrain) -> Option<NewEntry> {
    use JournalKind::{DatastoreDrainEnded, DatastoreDrainStarted};
    let StoreDrain { name, state, .. } = drain;
    if before == Some(*state) {
        return None;
    }
    let (kind, text) = match state {
        DrainState::Planned => return None,
        DrainState::Running => (DatastoreDrainStarted, "is being drained"),
        DrainState::Undoing => (DatastoreDrainStarted, "gets the disks of its drain back"),
        DrainState::Done => (DatastoreDrainEnded, "is drained"),
        DrainState::Cancelled => (DatastoreDrainEnded, "is no longer drained: it was cancelled"),
        DrainState::Undone => (DatastoreDrainEnded, "has the disks of its drain back"),
    };
    let entry = NewEntry::info(kind, format!("datastore {name} {text}"));
    let entry = entry.about("datastore", name).about("drain", id);
    // Another user may have cancelled it.
    Some(if *state == DrainState::Cancelled { entry } else { entry.by(&drain.asked_by) })
}

pub(crate) fn no_drain(id: &str) -> Problem {
    let detail = format!("unknown drain \"{id}\"");
    Problem::new(ProblemCode::NotFound, detail, "see `godwit datastore drains`")
}

/// Reads all drains. Parts without a drain, which an interrupted write left behind, are removed.
async fn read(keeper: &Keeper) -> Result<BTreeMap<String, StoreDrain>, Problem> {
    let mut parts = BTreeMap::<String, Vec<SavedDisks>>::new();
    for (id, part) in keeper.read_all(PARTS).await? {
        parts.entry(drain_of(&id).to_owned()).or_default().push(part);
    }
    let saved = keeper.read_all(DATASTORE_DRAINS).await?.into_iter();
    let drains: BTreeMap<String, StoreDrain> = saved
        .map(|(id, saved)| {
            let parts = parts.remove(&id).unwrap_or_default();
            (id, saved.with(parts))
        })
        .collect();
    for id in parts.keys() {
        remove_parts(keeper, id).await?;
    }
    Ok(drains)
}

async fn remove_parts(keeper: &Keeper, id: &str) -> Result<(), Problem> {
    for part_id in (0..).map(|number| part_id(id, number)) {
        if !keeper.has(PARTS, &part_id) {
            return Ok(());
        }
        keeper.remove(PARTS, &part_id).await?;
    }
    Ok(())
}
