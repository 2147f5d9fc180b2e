//! Execution of drains, which move all VMs off a host, and of their undoing. One task owns all
//! drains. `next.rs` decides the next step, [`godwit_planner::drain`] the targets, and the queue
//! the order of the moves; this module executes and saves the steps.

pub(crate) mod http;
mod next;
mod noted;
mod record;
mod state;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use godwit_api::control::{
    Change, CreateDrain, CreateMove, Drain, DrainState, HostState, Move, MoveState, Problem,
    ProblemCode,
};
use godwit_api::json_name;
use godwit_planner::drain::{
    DrainRequest, DrainVm, Moved, PlannedMove, UnderWay, UndoRequest, plan, undo,
};
use godwit_planner::placement::{self, Rule};
use godwit_planner::queue::{Limits, RunningMove};
use godwit_planner::words::millis;
use godwit_types::Intent;
use next::{Cancellation, Next, next};
use parking_lot::{RwLock, RwLockReadGuard};
use record::{DRAINS, PARTS, SavedDrain, SavedPart, drain_of, part_id};
use state::{HostDrain, Legs, Way};
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, MissedTickBehavior, interval};

use crate::agents::record::{HOSTS, SavedHost};
use crate::clock::now_unix_ms;
use crate::cluster::inventory::{HostPlan, Inventory};
use crate::cluster::planner_input::{
    Arriving, begun_at_agents, datastores, estimate_ms, placement_hosts, reference_group,
};
use crate::cluster::state::State;
use crate::moves::{Moves, Wanted, fresh_id, job_of};
use crate::preflight::travelling;
use crate::problems::no_host;
use crate::storage::keeper::{Keeper, Writes};

/// Poll interval for the next steps of all drains.
const LOOK_INTERVAL: Duration = Duration::from_millis(500);
/// Largest number of finished drains; the oldest are removed first.
const MOST_OVER: usize = 1_000;
/// Largest number of VMs in finished drains.
const MOST_VMS_OVER: usize = 500_000;
/// Shortest interval between two publications of a drain's progress, for each of its VMs.
const SHOW_INTERVAL_OF_VM: Duration = Duration::from_millis(1);
/// Largest number of steps of one drain per poll. Each step differs from the one before, or there
/// is nothing left to do.
const MOST_STEPS: usize = 4;

/// Capacity of the order channel. Further senders wait.
const WAITING_ORDERS: usize = 64;

/// Order to the task that owns the drains.
enum Order {
    Create(String, CreateDrain, String, Answer),
    Cancel(String, Answer),
    Undo(String, Answer),
}

type Answer = oneshot::Sender<Result<Drain, Problem>>;

/// Handle to the drains of the cluster.
#[derive(Debug)]
pub(crate) struct Drains {
    shown: Arc<RwLock<BTreeMap<String, Drain>>>,
    orders: mpsc::Sender<Order>,
}

/// Services that drains use.
#[derive(Clone)]
pub(crate) struct Means {
    pub(crate) keeper: Arc<Keeper>,
    pub(crate) state: Arc<State>,
    pub(crate) moves: Arc<Moves>,
}

impl Drains {
    /// Loads the drains from the store and continues them.
    pub(crate) async fn begin(means: Means) -> Result<Drains, Problem> {
        let drains = read(&means.keeper).await?;
        let (orders, incoming) = mpsc::channel(WAITING_ORDERS);
        let shown = Arc::<RwLock<BTreeMap<String, Drain>>>::default();
        // An earlier manager may have ended between the parts of a record.
        let (shown_at, unsure) = (BTreeMap::new(), drains.keys().cloned().collect());
        let mut task = DrainTask { means, shown: Arc::clone(&shown), drains, shown_at, unsure };
        let ids: Vec<String> = task.drains.keys().cloned().collect();
        for id in ids {
            task.show(&id);
        }
        tokio::spawn(task.run(incoming));
        Ok(Drains { shown, orders })
    }

    /// Returns all drains, by ID.
    pub(crate) fn all(&self) -> RwLockReadGuard<'_, BTreeMap<String, Drain>> {
        self.shown.read()
    }

    /// Returns the open drain of a host.
    pub(crate) fn of_host(&self, host: &str) -> Option<(String, DrainState)> {
        let all = self.all();
        let is_open = |one: &&Drain| {
            matches!(one.state, DrainState::Running | DrainState::Undoing) && one.host == host
        };
        all.values().find(is_open).map(|one| (one.id.clone(), one.state))
    }

    /// Sets a host into maintenance and plans its drain. Returns the existing drain if one is
    /// running.
    pub(crate) async fn create(
        &self,
        host: &str,
        request: CreateDrain,
        asked_by: &str,
    ) -> Result<Drain, Problem> {
        self.order(|answer| Order::Create(host.to_owned(), request, asked_by.to_owned(), answer))
            .await
    }

    /// Cancels a drain. Waiting moves are cancelled, running moves continue, and the host's
    /// maintenance is as before the drain.
    pub(crate) async fn cancel(&self, id: &str) -> Result<Drain, Problem> {
        self.order(|answer| Order::Cancel(id.to_owned(), answer)).await
    }

    /// Moves the VMs of a drain back.
    pub(crate) async fn undo(&self, id: &str) -> Result<Drain, Problem> {
        self.order(|answer| Order::Undo(id.to_owned(), answer)).await
    }

    async fn order(&self, order: impl FnOnce(Answer) -> Order) -> Result<Drain, Problem> {
        let (answer, answered) = oneshot::channel();
        let gone = || {
            let remedy = "send the request to the manager that leads now";
            Problem::new(ProblemCode::NoLeader, "this manager no longer leads", remedy)
        };
        self.orders.send(order(answer)).await.map_err(|_| gone())?;
        answered.await.map_err(|_| gone())?
    }
}

/// State of the task that owns all drains.
struct DrainTask {
    means: Means,
    shown: Arc<RwLock<BTreeMap<String, Drain>>>,
    drains: BTreeMap<String, HostDrain>,
    /// Time at which the progress of each open drain was last published.
    shown_at: BTreeMap<String, Instant>,
    /// Drains whose stored parts may differ from `drains`, because a write may have failed.
    unsure: BTreeSet<String>,
}

impl DrainTask {
    async fn run(mut self, mut orders: mpsc::Receiver<Order>) {
        self.end_cancelled().await;
        let mut ticks = interval(LOOK_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                order = orders.recv() => match order {
                    Some(Order::Create(host, request, asked_by, answer)) => {
                        let _ = answer.send(self.create(&host, request, asked_by).await);
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

    async fn create(
        &mut self,
        host: &str,
        request: CreateDrain,
        asked_by: String,
    ) -> Result<Drain, Problem> {
        let open = self.drains.iter().find(|(_, drain)| drain.host == host && !drain.is_over());
        if let Some((id, drain)) = open {
            if drain.state == DrainState::Undoing {
                let detail = format!("drain {id} of host {host} is being undone");
                let remedy = "try again when the undoing is finished";
                return Err(Problem::new(ProblemCode::WrongState, detail, remedy));
            }
            return self.shown_drain(id);
        }
        let was_in_maintenance = {
            let inventory = self.means.state.inventory();
            let was = inventory.host_plan(host).ok_or_else(|| no_host(host))?.maintenance;
            if inventory.seen_host(host).is_some_and(|seen| seen.state == HostState::Away) {
                let detail = format!("cannot drain host {host}: its agent is unreachable");
                let remedy = "start its agent; if the host is dead, see docs/recover.md";
                return Err(Problem::new(ProblemCode::HostAway, detail, remedy));
            }
            was
        };
        let now_ms = now_unix_ms();
        let mut drain = HostDrain {
            host: host.to_owned(),
            asked_by,
            asked_unix_ms: now_ms,
            priority: request.priority,
            engine: request.engine,
            qemu: request.qemu,
            disks: request.disks,
            state: if request.plan_only { DrainState::Planned } else { DrainState::Running },
            was_in_maintenance,
            plan: Way::default(),
            placed_unix_ms: now_ms,
            back: None,
            passed_over: BTreeMap::new(),
            ended_unix_ms: None,
            outcome: Vec::new(),
        };
        let unplaced =
            next::unplaced(&drain, &Legs::default(), &self.means.state.inventory(), now_ms);
        drain.plan = self.planned(host, &unplaced, now_ms);
        if request.plan_only {
            return Ok(drain.summary("", &Legs::default(), now_ms));
        }
        let id = fresh_id('d', now_ms)?;
        let planned = drain.plan.moves.clone();
        self.write(&id, drain, Some(true), &planned).await?;
        self.show(&id);
        self.forget_oldest().await;
        self.shown_drain(&id)
    }

    async fn cancel(&mut self, id: &str) -> Result<Drain, Problem> {
        let mut drain = self.open(id, &[DrainState::Running, DrainState::Undoing])?.clone();
        // Saves the drain first, so that a manager that takes over plans no moves for a cancelled
        // drain.
        drain.state = DrainState::Cancelled;
        self.end(id, &mut drain);
        let was_in_maintenance = drain.was_in_maintenance;
        self.write(id, drain, Some(was_in_maintenance), &[]).await?;
        self.cancel_waiting(id).await?;
        self.show(id);
        self.shown_drain(id)
    }

    /// Cancels waiting moves that an earlier manager left behind when it ended during a
    /// cancellation.
    async fn end_cancelled(&mut self) {
        let cancelled =
            self.drains.iter().filter(|(_, drain)| drain.state == DrainState::Cancelled);
        let ids: Vec<String> = cancelled.map(|(id, _)| id.clone()).collect();
        for id in ids {
            if let Err(problem) = self.cancel_waiting(&id).await {
                tracing::warn!(drain = id, %problem, "cannot cancel moves of a cancelled drain");
            }
            self.show(&id);
        }
    }

    /// Cancels the moves of a cancelled drain that have not started.
    async fn cancel_waiting(&mut self, id: &str) -> Result<(), Problem> {
        let Some(drain) = self.drains.get(id).cloned() else { return Ok(()) };
        let waiting: Vec<String> = {
            let moves = self.means.moves.all();
            let legs = Legs::of(id, &drain.host, &moves);
            let waiting = legs.live().filter(|one| one.state == MoveState::Waiting);
            waiting.map(|one| one.id.clone()).collect()
        };
        if waiting.is_empty() {
            return Ok(());
        }
        for one in waiting {
            self.cancel_move(&one).await;
        }
        let outcome = self.outcome(id, &drain);
        self.save(id, HostDrain { outcome, ..drain }).await
    }

    async fn undo(&mut self, id: &str) -> Result<Drain, Problem> {
        let may = [DrainState::Running, DrainState::Done, DrainState::Cancelled];
        let drain = self.open(id, &may)?.clone();
        self.means.state.inventory().host_plan(&drain.host).ok_or_else(|| no_host(&drain.host))?;
        let other = self
            .drains
            .iter()
            .find(|(other, of)| other.as_str() != id && of.host == drain.host && !of.is_over());
        if let Some((other, _)) = other {
            let detail = format!("host {} is being drained by drain {other}", drain.host);
            return Err(Problem::new(ProblemCode::WrongState, detail, "cancel that drain first"));
        }
        let drain =
            HostDrain { state: DrainState::Undoing, ended_unix_ms: None, back: None, ..drain };
        self.write(id, drain, Some(false), &[]).await?;
        self.go_on(id).await?;
        self.shown_drain(id)
    }

    /// Returns a drain if it is in one of these states.
    fn open(&self, id: &str, states: &[DrainState]) -> Result<&HostDrain, Problem> {
        let drain = self.drains.get(id).ok_or_else(|| no_drain(id))?;
        if states.contains(&drain.state) {
            return Ok(drain);
        }
        let detail = format!("drain {id} is {}", json_name(&drain.state));
        Err(Problem::new(ProblemCode::WrongState, detail, "see `godwit host drains`"))
    }

    /// Executes the next steps of a drain.
    async fn go_on(&mut self, id: &str) -> Result<(), Problem> {
        for step in 0..MOST_STEPS {
            let now_ms = now_unix_ms();
            let what = {
                let Some(drain) = self.drains.get(id) else { return Ok(()) };
                let moves = self.means.moves.all();
                let legs = Legs::of(id, &drain.host, &moves);
                next(drain, &legs, &self.means.state.inventory(), now_ms)
            };
            if what == Next::Wait && step == 0 {
                self.show_progress(id);
                return Ok(());
            }
            let Some(mut drain) = self.drains.get(id).cloned() else { return Ok(()) };
            match what {
                Next::Wait => break,
                Next::Close => self.write(id, drain, Some(true), &[]).await?,
                Next::Place(unplaced) => {
                    let planned = self.planned(&drain.host, &unplaced, now_ms);
                    drain.plan.update(&planned);
                    drain.placed_unix_ms = now_ms;
                    self.write(id, drain, None, &planned.moves).await?;
                }
                Next::Submit(planned) => self.write(id, drain, None, &planned).await?,
                Next::Cancel(all) => self.cancel_all(id, drain, all).await?,
                Next::BringBack(moved) => {
                    let back = self.way_back(&drain.host, &moved, now_ms);
                    let planned = back.moves.clone();
                    drain.back = Some(back);
                    self.write(id, drain, None, &planned).await?;
                }
                Next::End(state) => {
                    drain.state = state;
                    self.end(id, &mut drain);
                    self.save(id, drain).await?;
                }
            }
        }
        self.show(id);
        Ok(())
    }

    async fn cancel_all(
        &mut self,
        id: &str,
        mut drain: HostDrain,
        all: Vec<Cancellation>,
    ) -> Result<(), Problem> {
        for Cancellation { vm, passed_over, .. } in &all {
            drain.passed_over.entry(vm.clone()).or_default().extend(passed_over.clone());
        }
        self.save(id, drain).await?;
        for one in &all {
            self.cancel_move(&one.id).await;
        }
        Ok(())
    }

    async fn cancel_move(&self, id: &str) {
        // The move may have ended by now.
        if let Err(problem) = self.means.moves.cancel(id).await {
            tracing::debug!(job = id, %problem, "cannot cancel a drain's move");
        }
    }

    /// Plans targets for VMs of a host.
    fn planned(&self, host: &str, vms: &[DrainVm], now_ms: u64) -> Way {
        let (arriving, running) = self.under_way();
        let (hosts, limits) = self.hosts(&arriving);
        let (limits, rules) = (&limits, self.rules());
        let request = DrainRequest {
            now_ms,
            host,
            vms,
            hosts: &hosts,
            rules: &rules,
            limits,
            running: &running,
        };
        let plan = plan(&request);
        Way::of(now_ms, plan.moves, plan.stays)
    }

    fn way_back(&self, host: &str, moved: &[Moved], now_ms: u64) -> Way {
        let (arriving, running) = self.under_way();
        let (hosts, limits) = self.hosts(&arriving);
        let (limits, rules) = (&limits, self.rules());
        let request = UndoRequest {
            now_ms,
            host,
            moved,
            hosts: &hosts,
            rules: &rules,
            limits,
            running: &running,
        };
        let back = undo(&request);
        Way::of(now_ms, back.moves, back.stays)
    }

    fn hosts(&self, arriving: &Arriving) -> (Vec<placement::Host>, Limits) {
        let inventory = self.means.state.inventory();
        let limits = inventory.limits();
        (placement_hosts(arriving, &limits, &inventory), limits)
    }

    /// Returns the placement rules.
    fn rules(&self) -> Vec<Rule> {
        self.means.state.inventory().rules()
    }

    /// Returns the VMs on their way to each host, and the running migrations.
    fn under_way(&self) -> (Arriving, Vec<UnderWay>) {
        let (moves, inventory) = (self.means.moves.all(), self.means.state.inventory());
        let mut arriving = Arriving::new();
        let mut running = Vec::new();
        for one in moves.open() {
            let Some(to) = &one.to else { continue };
            arriving.entry(to.clone()).or_default().insert(one.vm.clone());
            if one.state != MoveState::Waiting {
                running.push(under_way(one, to, &inventory));
            }
        }
        let is_own = |migration: &str| job_of(migration).is_some_and(|id| moves.get(id).is_some());
        let at_agents = begun_at_agents(is_own, &inventory).into_iter().map(|running| UnderWay {
            memory_bytes: inventory.vm_info(&running.vm).map_or(0, |info| info.memory_bytes),
            remaining_ms: inventory
                .vm_info(&running.vm)
                .map_or(0, |info| estimate_ms(info.memory_bytes, &running.source, &inventory)),
            running,
        });
        running.extend(at_agents);
        (arriving, running)
    }

    /// Writes a drain, the maintenance of its host and planned moves, together as far as one
    /// transaction can hold them. Moves that do not fit or are refused are planned again at the
    /// next poll.
    async fn write(
        &mut self,
        id: &str,
        drain: HostDrain,
        maintenance: Option<bool>,
        planned: &[PlannedMove],
    ) -> Result<(), Problem> {
        let Means { keeper, state, moves } = self.means.clone();
        let _turn = state.planning().await;
        let host = drain.host.clone();
        let before = state.inventory().host_plan(&host).cloned();
        let changed =
            before.zip(maintenance).filter(|(before, wanted)| before.maintenance != *wanted);
        let changed = changed.map(|(before, maintenance)| HostPlan { maintenance, ..before });
        let saved = self.write_parts(id, &drain).await?;
        let mut writes = keeper.put(self.noting(id, &drain)?, DRAINS, id, &saved).await?;
        if let Some(plan) = &changed {
            writes = keeper.put(writes, HOSTS, &host, &SavedHost::from(plan)).await?;
        }
        let wanted = {
            let inventory = state.inventory();
            planned.iter().map(|planned| wanted(id, &drain, planned, &inventory)).collect()
        };
        let refused = moves.submit_all(wanted, writes).await?;
        self.written(id, drain);
        if let Some(plan) = changed {
            state.change(|inventory| Some(inventory.plan_host(&host, plan)));
        }
        for (vm, problem) in refused {
            tracing::warn!(drain = id, vm, %problem, "a drain's move was refused");
        }
        Ok(())
    }

    fn end(&self, id: &str, drain: &mut HostDrain) {
        drain.outcome = self.outcome(id, drain);
        drain.ended_unix_ms = Some(now_unix_ms());
    }

    fn outcome(&self, id: &str, drain: &HostDrain) -> Vec<godwit_api::control::DrainVm> {
        let moves = self.means.moves.all();
        drain.vms(&Legs::of(id, &drain.host, &moves), now_unix_ms())
    }

    async fn save(&mut self, id: &str, drain: HostDrain) -> Result<(), Problem> {
        let saved = self.write_parts(id, &drain).await?;
        let writes = self.noting(id, &drain)?;
        self.means.keeper.replace_with(writes, DRAINS, id, &saved).await?;
        self.written(id, drain);
        Ok(())
    }

    /// Returns the writes of a drain's entry of the journal, if its state changes.
    fn noting(&self, id: &str, drain: &HostDrain) -> Result<Writes, Problem> {
        let before = self.drains.get(id).map(|before| before.state);
        let entry = noted::of(id, before, drain);
        Ok(entry.map(|entry| self.means.keeper.noting(entry)).transpose()?.unwrap_or_default())
    }

    /// Writes the changed parts of a drain's record, and returns the record, which is to be written
    /// after them. If it is not, a manager that takes over finds plans without moves, and requests
    /// these moves.
    async fn write_parts(&mut self, id: &str, drain: &HostDrain) -> Result<SavedDrain, Problem> {
        let keeper = Arc::clone(&self.means.keeper);
        let (saved, parts) = SavedDrain::of(drain);
        // Until the whole record is written.
        let is_sure = self.unsure.insert(id.to_owned());
        let before = self.drains.get(id).filter(|_| is_sure);
        let before = before.map(|before| SavedDrain::of(before).1).unwrap_or_default();
        for (number, part) in parts.iter().enumerate() {
            let part_id = part_id(id, number);
            if before.get(number) != Some(part) || !keeper.has(PARTS, &part_id) {
                let writes = keeper.put(Writes::default(), PARTS, &part_id, part).await?;
                keeper.write(writes).await?;
            }
        }
        Ok(saved)
    }

    /// Takes in a drain that is in the store.
    fn written(&mut self, id: &str, drain: HostDrain) {
        self.unsure.remove(id);
        self.drains.insert(id.to_owned(), drain);
    }

    async fn forget_oldest(&mut self) {
        let over = self.drains.iter().filter(|(_, drain)| drain.is_over());
        let mut over: Vec<(u64, String, usize)> = over
            .map(|(id, drain)| (drain.asked_unix_ms, id.clone(), drain.outcome.len()))
            .collect();
        over.sort();
        let mut vms: usize = over.iter().map(|(_, _, vms)| vms).sum();
        let mut left = over.len();
        for (_, id, vms_of) in &over {
            if left <= MOST_OVER && vms <= MOST_VMS_OVER {
                return;
            }
            (left, vms) = (left - 1, vms - vms_of);
            let removed = match self.means.keeper.remove(DRAINS, id).await {
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

    /// Publishes the progress of an open drain. A large drain is published less often, because each
    /// publication has all its VMs.
    fn show_progress(&mut self, id: &str) {
        let vms = self.drains.get(id).map_or(0, |drain| drain.plan.moves.len());
        let interval = SHOW_INTERVAL_OF_VM * u32::try_from(vms).unwrap_or(u32::MAX);
        if self.shown_at.get(id).is_none_or(|at| at.elapsed() >= interval) {
            self.show(id);
        }
    }

    /// Publishes a drain if it has changed.
    fn show(&mut self, id: &str) {
        let Some(drain) = self.drains.get(id) else { return };
        if drain.is_over() {
            self.shown_at.remove(id);
        } else {
            self.shown_at.insert(id.to_owned(), Instant::now());
        }
        let now = {
            let moves = self.means.moves.all();
            drain.summary(id, &Legs::of(id, &drain.host, &moves), now_unix_ms())
        };
        {
            let mut shown = self.shown.write();
            if shown.get(id) == Some(&now) {
                return;
            }
            shown.insert(id.to_owned(), now.clone());
        }
        self.means.state.change(|_| Some(Change::Drain(Box::new(now))));
    }

    fn shown_drain(&self, id: &str) -> Result<Drain, Problem> {
        self.shown.read().get(id).cloned().ok_or_else(|| no_drain(id))
    }
}

/// Reads all drains. Parts without a drain, which an interrupted write left behind, are removed.
async fn read(keeper: &Keeper) -> Result<BTreeMap<String, HostDrain>, Problem> {
    let mut parts = BTreeMap::<String, Vec<SavedPart>>::new();
    for (id, part) in keeper.read_all(PARTS).await? {
        parts.entry(drain_of(&id).to_owned()).or_default().push(part);
    }
    let saved = keeper.read_all(DRAINS).await?.into_iter();
    let drains = saved.map(|(id, saved)| {
        let parts = parts.remove(&id).unwrap_or_default();
        (id, saved.with(parts))
    });
    let drains = drains.collect();
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

fn under_way(one: &Move, to: &str, inventory: &Inventory) -> UnderWay {
    let memory_bytes = inventory.vm_info(&one.vm).map_or(0, |info| info.memory_bytes);
    let eta_ms = one.progress.as_ref().and_then(|progress| progress.eta_ms);
    let remaining_ms =
        eta_ms.map_or_else(|| estimate_ms(memory_bytes, &one.from, inventory), millis);
    UnderWay {
        running: RunningMove {
            migration: one.migration.clone().unwrap_or_default(),
            vm: one.vm.clone(),
            source: one.from.clone(),
            target: to.to_owned(),
            group: one.drain.clone().or_else(|| Some(one.asked_by.clone())),
            datastores: datastores(&one.vm, inventory),
            reference_group: inventory.vm_info(&one.vm).and_then(|info| reference_group(info)),
        },
        memory_bytes,
        remaining_ms,
    }
}

/// Returns the request for a drain's move.
fn wanted(id: &str, drain: &HostDrain, planned: &PlannedMove, inventory: &Inventory) -> Wanted {
    let info = inventory.vm_info(&planned.vm);
    let disks =
        info.and_then(|info| travelling(inventory, info, &planned.target, drain.disks.as_ref()));
    let request = CreateMove {
        to: Some(planned.target.clone()),
        priority: drain.priority,
        engine: drain.engine,
        qemu: drain.qemu.clone(),
        disks,
        policy: Intent::FastEvacuation,
        ..CreateMove::default()
    };
    Wanted {
        vm: planned.vm.clone(),
        from: planned.source.clone(),
        asked_by: drain.asked_by.clone(),
        request,
        to_reason: Some(planned.why.clone()),
        drain: Some(id.to_owned()),
    }
}

fn no_drain(id: &str) -> Problem {
    Problem::new(ProblemCode::NotFound, format!("unknown drain {id}"), "see `godwit host drains`")
}
