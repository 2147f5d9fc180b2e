//! Drains as they are carried out: hosts that are emptied, and filled again where that is undone.
//! One task owns them. What is to be done next is
//! decided in `next.rs`, who goes where in [`godwit_planner::drain`], and who starts when by the
//! queue; here it is only done and written down.

pub(crate) mod http;
mod next;
mod record;
mod saved;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};
use std::time::Duration;

use godwit_api::control::{
    Change, CreateDrain, CreateMove, Drain, DrainState, HostState, Move, MoveState, Problem,
    ProblemCode,
};
use godwit_planner::drain::{
    DrainRequest, DrainVm, Moved, PlannedMove, UnderWay, UndoRequest, plan, undo,
};
use godwit_planner::placement::{self, Rule};
use godwit_planner::queue::{Limits, RunningMove};
use godwit_planner::words::millis;
use godwit_types::Intent;
use next::{Leaving, Next, next};
use record::{HostDrain, Legs, Way};
use saved::{DRAINS, SavedDrain, check_size};
use tokio::sync::{mpsc, oneshot};
use tokio::time::{MissedTickBehavior, interval};

use crate::agents::no_host;
use crate::agents::record::{HOSTS, SavedHost};
use crate::clock::now_unix_ms;
use crate::cluster::inventory::{HostPlan, Inventory};
use crate::cluster::planner_input::{
    Arriving, begun_at_agents, datastores, estimate_ms, placement_hosts, reference_group,
};
use crate::cluster::state::State;
use crate::moves::{Moves, Wanted, fresh_id, job_of};
use crate::storage::keeper::{Keeper, Writes};

/// How often it is looked what is to be done next.
const LOOK_INTERVAL: Duration = Duration::from_millis(500);
/// Drains that are over and remembered; the oldest are forgotten first.
const MOST_OVER: usize = 1_000;
/// Steps that one look takes at most for one drain: each is another than the one before, or nothing
/// is left to do.
const MOST_STEPS: usize = 4;

/// Orders that wait for the task: who gives more waits.
const WAITING_ORDERS: usize = 64;

/// What the one task that owns the drains is told.
enum Order {
    Create(String, CreateDrain, String, Answer),
    Cancel(String, Answer),
    Undo(String, Answer),
}

type Answer = oneshot::Sender<Result<Drain, Problem>>;

/// The drains of the cluster, for everybody but the task that owns them.
#[derive(Debug)]
pub(crate) struct Drains {
    shown: Arc<RwLock<BTreeMap<String, Drain>>>,
    orders: mpsc::Sender<Order>,
}

/// What drains work with.
#[derive(Clone)]
pub(crate) struct Means {
    pub(crate) keeper: Arc<Keeper>,
    pub(crate) state: Arc<State>,
    pub(crate) moves: Arc<Moves>,
}

impl Drains {
    /// Takes up what the store has of drains, and carries them out from here on.
    pub(crate) async fn begin(means: Means) -> Result<Drains, Problem> {
        let saved = means.keeper.read_all(DRAINS).await?;
        let drains = saved.into_iter().map(|(id, saved)| (id, saved.into())).collect();
        let (orders, incoming) = mpsc::channel(WAITING_ORDERS);
        let shown = Arc::<RwLock<BTreeMap<String, Drain>>>::default();
        let mut driver = Driver { means, shown: Arc::clone(&shown), drains };
        let ids: Vec<String> = driver.drains.keys().cloned().collect();
        for id in ids {
            driver.show(&id);
        }
        tokio::spawn(driver.run(incoming));
        Ok(Drains { shown, orders })
    }

    /// Every drain that is remembered, by id.
    pub(crate) fn all(&self) -> RwLockReadGuard<'_, BTreeMap<String, Drain>> {
        self.shown.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// The drain that empties a host, or that fills it again.
    pub(crate) fn of_host(&self, host: &str) -> Option<(String, DrainState)> {
        let all = self.all();
        let is_open = |one: &&Drain| {
            matches!(one.state, DrainState::Running | DrainState::Undoing) && one.host == host
        };
        all.values().find(is_open).map(|one| (one.id.clone(), one.state))
    }

    /// Empties a host: it takes no VMs from here on, and a plan is made. Asked again while it runs,
    /// that drain is told.
    pub(crate) async fn create(
        &self,
        host: &str,
        request: CreateDrain,
        asked_by: &str,
    ) -> Result<Drain, Problem> {
        self.order(|answer| Order::Create(host.to_owned(), request, asked_by.to_owned(), answer))
            .await
    }

    /// Calls a drain off: VMs that wait stay, those on their way arrive, and the host takes VMs as
    /// before.
    pub(crate) async fn cancel(&self, id: &str) -> Result<Drain, Problem> {
        self.order(|answer| Order::Cancel(id.to_owned(), answer)).await
    }

    /// Brings back what a drain has moved.
    pub(crate) async fn undo(&self, id: &str) -> Result<Drain, Problem> {
        self.order(|answer| Order::Undo(id.to_owned(), answer)).await
    }

    async fn order(&self, order: impl FnOnce(Answer) -> Order) -> Result<Drain, Problem> {
        let (answer, answered) = oneshot::channel();
        let gone = || {
            Problem::new(ProblemCode::NoLeader, "this manager ends", "ask the one that leads now")
        };
        self.orders.send(order(answer)).await.map_err(|_| gone())?;
        answered.await.map_err(|_| gone())?
    }
}

/// The one task.
struct Driver {
    means: Means,
    shown: Arc<RwLock<BTreeMap<String, Drain>>>,
    drains: BTreeMap<String, HostDrain>,
}

impl Driver {
    async fn run(mut self, mut orders: mpsc::Receiver<Order>) {
        self.end_cancelled().await;
        let mut look = interval(LOOK_INTERVAL);
        look.set_missed_tick_behavior(MissedTickBehavior::Delay);
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
                _ = look.tick() => {
                    let open = self.drains.iter().filter(|(_, drain)| !drain.is_over());
                    let ids: Vec<String> = open.map(|(id, _)| id.clone()).collect();
                    for id in ids {
                        if let Err(problem) = self.go_on(&id).await {
                            tracing::warn!(drain = id, %problem, "a drain does not go on");
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
                return Err(Problem::new(ProblemCode::WrongState, detail, "ask again when it is"));
            }
            return self.shown_drain(id);
        }
        let was_in_maintenance = {
            let inventory = self.means.state.inventory();
            let was = inventory.host_plan(host).ok_or_else(|| no_host(host))?.maintenance;
            if inventory.seen_host(host).is_some_and(|seen| seen.state == HostState::Away) {
                let detail =
                    format!("host {host} is not heard, and without its agent no VM leaves it");
                let remedy = "start its agent; if the host is dead see docs/recover.md";
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
            state: if request.plan_only { DrainState::Planned } else { DrainState::Running },
            was_in_maintenance,
            plan: Way::default(),
            placed_unix_ms: now_ms,
            back: None,
            passed_over: BTreeMap::new(),
            ended_unix_ms: None,
            outcome: Vec::new(),
        };
        let homeless =
            next::homeless(&drain, &Legs::default(), &self.means.state.inventory(), now_ms);
        drain.plan = self.planned(host, &homeless, now_ms);
        check_size(host, &drain.plan)?;
        if request.plan_only {
            return Ok(drain.told("", &Legs::default(), now_ms));
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
        // The drain first: a manager that takes over plans nothing anew for what is called off.
        drain.state = DrainState::Cancelled;
        self.end(id, &mut drain);
        let was_in_maintenance = drain.was_in_maintenance;
        self.write(id, drain, Some(was_in_maintenance), &[]).await?;
        self.call_off_waiting(id).await?;
        self.show(id);
        self.shown_drain(id)
    }

    /// Calls off what a manager before left waiting that ended while it cancelled a drain.
    async fn end_cancelled(&mut self) {
        let cancelled =
            self.drains.iter().filter(|(_, drain)| drain.state == DrainState::Cancelled);
        let ids: Vec<String> = cancelled.map(|(id, _)| id.clone()).collect();
        for id in ids {
            if let Err(problem) = self.call_off_waiting(&id).await {
                tracing::warn!(drain = id, %problem, "moves of a cancelled drain are not called \
                    off");
            }
            self.show(&id);
        }
    }

    /// Calls off the moves of a cancelled drain that have not begun.
    async fn call_off_waiting(&mut self, id: &str) -> Result<(), Problem> {
        let Some(drain) = self.drains.get(id).cloned() else { return Ok(()) };
        let waiting: Vec<String> = {
            let moves = self.means.moves.all();
            let legs = Legs::of(id, &drain.host, moves.values());
            let waiting = legs.live().filter(|one| one.state == MoveState::Waiting);
            waiting.map(|one| one.id.clone()).collect()
        };
        if waiting.is_empty() {
            return Ok(());
        }
        for one in waiting {
            self.call_off(&one).await;
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
            let detail = format!("drain {other} empties host {} now", drain.host);
            return Err(Problem::new(ProblemCode::WrongState, detail, "cancel that one first"));
        }
        let drain =
            HostDrain { state: DrainState::Undoing, ended_unix_ms: None, back: None, ..drain };
        self.write(id, drain, Some(false), &[]).await?;
        self.go_on(id).await?;
        self.shown_drain(id)
    }

    /// A drain that is in one of these states.
    fn open(&self, id: &str, states: &[DrainState]) -> Result<&HostDrain, Problem> {
        let drain = self.drains.get(id).ok_or_else(|| no_drain(id))?;
        if states.contains(&drain.state) {
            return Ok(drain);
        }
        let state = serde_json::to_value(drain.state).unwrap_or_default();
        let detail = format!("drain {id} is {}", state.as_str().unwrap_or("over"));
        Err(Problem::new(ProblemCode::WrongState, detail, "see `godwit host drains`"))
    }

    /// Does for a drain what is to be done next.
    async fn go_on(&mut self, id: &str) -> Result<(), Problem> {
        for _ in 0..MOST_STEPS {
            let now_ms = now_unix_ms();
            let Some(mut drain) = self.drains.get(id).cloned() else { return Ok(()) };
            let what = {
                let moves = self.means.moves.all();
                let legs = Legs::of(id, &drain.host, moves.values());
                next(&drain, &legs, &self.means.state.inventory(), now_ms)
            };
            match what {
                Next::Wait => break,
                Next::Close => self.write(id, drain, Some(true), &[]).await?,
                Next::Place(homeless) => {
                    let planned = self.planned(&drain.host, &homeless, now_ms);
                    drain.plan.take_in(&planned);
                    drain.placed_unix_ms = now_ms;
                    self.write(id, drain, None, &planned.moves).await?;
                }
                Next::Submit(planned) => self.write(id, drain, None, &planned).await?,
                Next::CallOff(all) => self.call_all_off(id, drain, all).await?,
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

    async fn call_all_off(
        &mut self,
        id: &str,
        mut drain: HostDrain,
        all: Vec<Leaving>,
    ) -> Result<(), Problem> {
        for Leaving { vm, passed_over, .. } in &all {
            drain.passed_over.entry(vm.clone()).or_default().extend(passed_over.clone());
        }
        self.save(id, drain).await?;
        for leaving in &all {
            self.call_off(&leaving.id).await;
        }
        Ok(())
    }

    async fn call_off(&self, id: &str) {
        // It may be over by now.
        if let Err(problem) = self.means.moves.cancel(id).await {
            tracing::debug!(job = id, %problem, "a drain's move is not called off");
        }
    }

    /// Who goes where, and who stays.
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

    /// What operators have asked for.
    fn rules(&self) -> Vec<Rule> {
        self.means.state.inventory().rules()
    }

    /// What goes where already, and what of it runs.
    fn under_way(&self) -> (Arriving, Vec<UnderWay>) {
        let (moves, inventory) = (self.means.moves.all(), self.means.state.inventory());
        let mut arriving = Arriving::new();
        let mut running = Vec::new();
        for one in moves.values().filter(|one| !one.state.is_over()) {
            let Some(to) = &one.to else { continue };
            arriving.entry(to.clone()).or_default().insert(one.vm.clone());
            if one.state != MoveState::Waiting {
                running.push(under_way(one, to, &inventory));
            }
        }
        let is_own = |migration: &str| job_of(migration).is_some_and(|id| moves.contains_key(id));
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

    /// Writes a drain, whether its host takes VMs, and the moves of a plan: together, as far as one
    /// transaction holds them. What does not go
    /// with the rest, or is not taken in, is met again at the next look.
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
        let mut writes = keeper.put(Writes::default(), DRAINS, id, &SavedDrain::of(&drain)).await?;
        if let Some(plan) = &changed {
            writes = keeper.put(writes, HOSTS, &host, &SavedHost::from(plan)).await?;
        }
        let wanted = planned.iter().map(|planned| wanted(id, &drain, planned)).collect();
        let refused = moves.submit_all(wanted, writes).await?;
        self.drains.insert(id.to_owned(), drain);
        if let Some(plan) = changed {
            state.change(|inventory| Some(inventory.plan_host(&host, plan)));
        }
        for (vm, problem) in refused {
            tracing::warn!(drain = id, vm, %problem, "a drain's move is not taken in");
        }
        Ok(())
    }

    fn end(&self, id: &str, drain: &mut HostDrain) {
        drain.outcome = self.outcome(id, drain);
        drain.ended_unix_ms = Some(now_unix_ms());
    }

    fn outcome(&self, id: &str, drain: &HostDrain) -> Vec<godwit_api::control::DrainVm> {
        let moves = self.means.moves.all();
        drain.vms(&Legs::of(id, &drain.host, moves.values()), now_unix_ms())
    }

    async fn save(&mut self, id: &str, drain: HostDrain) -> Result<(), Problem> {
        self.means.keeper.replace(DRAINS, id, &SavedDrain::of(&drain)).await?;
        self.drains.insert(id.to_owned(), drain);
        Ok(())
    }

    async fn forget_oldest(&mut self) {
        let over = self.drains.iter().filter(|(_, drain)| drain.is_over());
        let mut over: Vec<(u64, String)> =
            over.map(|(id, drain)| (drain.asked_unix_ms, id.clone())).collect();
        over.sort();
        for (_, id) in over.iter().take(over.len().saturating_sub(MOST_OVER)) {
            if let Err(problem) = self.means.keeper.remove(DRAINS, id).await {
                tracing::warn!(drain = id, %problem, "an old drain can't be forgotten");
                return;
            }
            self.drains.remove(id);
            self.shown.write().unwrap_or_else(PoisonError::into_inner).remove(id);
        }
    }

    /// Shows a drain to everybody, where it has changed.
    fn show(&mut self, id: &str) {
        let Some(drain) = self.drains.get(id) else { return };
        let now = {
            let moves = self.means.moves.all();
            drain.told(id, &Legs::of(id, &drain.host, moves.values()), now_unix_ms())
        };
        {
            let mut shown = self.shown.write().unwrap_or_else(PoisonError::into_inner);
            if shown.get(id) == Some(&now) {
                return;
            }
            shown.insert(id.to_owned(), now.clone());
        }
        self.means.state.change(|_| Some(Change::Drain(Box::new(now))));
    }

    fn shown_drain(&self, id: &str) -> Result<Drain, Problem> {
        self.shown
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .get(id)
            .cloned()
            .ok_or_else(|| no_drain(id))
    }
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

/// A drain's move, as it is asked for.
fn wanted(id: &str, drain: &HostDrain, planned: &PlannedMove) -> Wanted {
    let request = CreateMove {
        to: Some(planned.target.clone()),
        priority: drain.priority,
        engine: drain.engine,
        qemu: drain.qemu.clone(),
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
    Problem::new(ProblemCode::NotFound, format!("no drain {id}"), "see `godwit host drains`")
}
