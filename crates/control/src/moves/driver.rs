//! Task that owns all moves. Each message about a job is an event of its pure lifecycle
//! ([`godwit_planner::queue::lifecycle`]). The task carries out the resulting actions in order, and
//! none after a state that it could not save. Separate tasks query the agents; the answers are
//! events again.

#[cfg(test)]
pub(super) mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use godwit_api::MigrationStatus;
use godwit_api::control::{Change, Move, Problem, ProblemCode, Waits};
use godwit_planner::queue::lifecycle::{Action, JobEvent, JobState, step};
use godwit_planner::queue::retry::RetryPolicy;
use godwit_planner::queue::{Schedule, Served, Situation, Wait, schedule, starts};
use parking_lot::{Mutex, RwLock};
use tokio::sync::{Semaphore, mpsc, oneshot};
use tokio::task::AbortHandle;
use tokio::time::{Instant, MissedTickBehavior, interval};

use super::agents::{self, AgentAnswer, Agents};
use super::job::Job;
use super::jobs::Jobs;
use super::record::MOVES;
use super::samples::Samples;
use super::shown::ShownMoves;
use super::{foreign, noted, reports, situation};
use crate::agents::following::News;
use crate::clock::now_unix_ms;
use crate::cluster::bounds::Misreport;
use crate::cluster::state::State;
use crate::storage::keeper::{Keeper, Writes};
use crate::storage::turns::Turns;

/// Interval of scheduling when no event triggers it.
const SCHEDULE_INTERVAL: Duration = Duration::from_millis(500);
/// Shortest interval between two updates of what moves wait for, for each unfinished move. An
/// update changes and publishes nearly all of them.
const WAITS_INTERVAL_OF_MOVE: Duration = Duration::from_millis(1);
/// Most finished moves that are retained; the oldest are removed first.
const MOST_OVER: usize = 10_000;
/// Most finished moves that are removed after one request, so that it is not delayed.
const MOST_REMOVED: usize = 64;
/// Most hosts whose migrations are listed at once: such an answer is long, and all hosts of a
/// cluster connect at once.
const MOST_LISTINGS: usize = 4;

/// Message to the task that owns the jobs.
pub(super) enum Order {
    Submit(Box<Job>, oneshot::Sender<Result<Move, Problem>>),
    /// Accepts the jobs that are acceptable, and writes something else in the same transaction.
    SubmitAll(Vec<Job>, Writes, oneshot::Sender<Result<Refused, Problem>>),
    /// Cancels a move.
    Cancel(String, oneshot::Sender<Result<Move, Problem>>),
    /// Reports the outcome of an agent's action for a job.
    Answered(String, AgentAnswer),
    /// Reports news of hosts.
    News(News),
    /// Schedules again, because a change may let moves start.
    Schedule,
}

/// VMs whose moves are refused, with the reasons.
pub(crate) type Refused = Vec<(String, Problem)>;

/// Services and views that the task shares with the rest of the manager.
pub(super) struct Shared {
    pub(super) keeper: Arc<Keeper>,
    pub(super) state: Arc<State>,
    pub(super) agents: Arc<dyn Agents>,
    pub(super) orders: mpsc::Sender<Order>,
    pub(super) shown: Arc<RwLock<ShownMoves>>,
    pub(super) samples: Arc<Mutex<Samples>>,
}

/// The task that owns all jobs.
pub(super) struct Driver {
    shared: Shared,
    jobs: Jobs,
    /// Latest query of each job's agent about its migration.
    requests: BTreeMap<String, AbortHandle>,
    /// Events of jobs that could not be saved and will be retried.
    unwritten: BTreeMap<String, Vec<JobEvent>>,
    served: Vec<Served>,
    /// Whether a change since the last scheduling may let moves start.
    is_changed: bool,
    /// Time at which it was last recorded what moves wait for.
    explained_at: Instant,
    /// Moves that leave and reach each host, as last published.
    counted: BTreeMap<String, (u64, u64)>,
    policy: RetryPolicy,
    /// Turns of tasks that list the migrations of a host.
    listings: Arc<Semaphore>,
    /// Hosts that have such a task: one that connects again and again has no second one.
    listed: Turns,
}

impl Driver {
    pub(super) fn new(shared: Shared, jobs: Jobs) -> Driver {
        Driver {
            shared,
            jobs,
            requests: BTreeMap::new(),
            unwritten: BTreeMap::new(),
            served: Vec::new(),
            is_changed: true,
            explained_at: Instant::now(),
            counted: BTreeMap::new(),
            policy: RetryPolicy::default(),
            listings: Arc::new(Semaphore::new(MOST_LISTINGS)),
            listed: Turns::default(),
        }
    }

    /// Publishes all jobs.
    pub(super) fn show_all(&self) {
        self.jobs.ids().for_each(|id| self.show(id));
    }

    pub(super) async fn run(mut self, mut orders: mpsc::Receiver<Order>) {
        let open: Vec<String> = self.jobs.open().map(|job| job.id.clone()).collect();
        for id in open {
            self.happened(&id, JobEvent::Resumed).await;
            self.show(&id);
        }
        let mut tick = interval(SCHEDULE_INTERVAL);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                order = orders.recv() => match order {
                    Some(order) => self.carry_out(order).await,
                    None => return,
                },
                _ = tick.tick() => {
                    self.advance_again().await;
                    let moves = u32::try_from(self.jobs.open_count()).unwrap_or(u32::MAX);
                    if self.explained_at.elapsed() >= WAITS_INTERVAL_OF_MOVE * moves {
                        self.schedule().await;
                    } else {
                        self.start_moves().await;
                    }
                }
            }
            // Orders that wait already are scheduled for together.
            if self.is_changed && orders.is_empty() {
                self.start_moves().await;
            }
        }
    }

    async fn carry_out(&mut self, order: Order) {
        match order {
            Order::Submit(job, answer) => {
                let _ = answer.send(self.submit(*job).await);
            }
            Order::SubmitAll(jobs, beside, answer) => {
                let _ = answer.send(self.submit_all(jobs, beside).await);
            }
            Order::Cancel(id, answer) => {
                let _ = answer.send(self.cancel(&id).await);
            }
            Order::Answered(id, AgentAnswer { event, report }) => {
                // The report of an earlier attempt would be mistaken for this attempt's.
                let of =
                    self.jobs.get_mut(&id).filter(|job| job.state.migration() == event.migration());
                if let (Some(job), Some(report)) = (of, report) {
                    job.report = Some(*report);
                }
                self.happened(&id, event).await;
            }
            Order::News(News::Migration(host, status)) => {
                self.migration_reported(&host, *status).await;
            }
            Order::News(News::Synchronized(host)) => {
                self.is_changed = true;
                self.host_reachable(&host).await;
            }
            Order::Schedule => self.is_changed = true,
        }
    }

    async fn submit(&mut self, job: Job) -> Result<Move, Problem> {
        self.refuse_second(&job.vm)?;
        let keeper = &self.shared.keeper;
        let entry = noted::requested(&job).map(|entry| keeper.noting(entry)).transpose()?;
        keeper.insert_with(entry.unwrap_or_default(), MOVES, &job.id, &job.saved()).await?;
        let id = job.id.clone();
        self.jobs.put(job);
        self.remove_oldest().await;
        self.schedule().await;
        self.show(&id);
        self.shown_move(&id)
    }

    async fn submit_all(&mut self, jobs: Vec<Job>, beside: Writes) -> Result<Refused, Problem> {
        let mut refused = Refused::new();
        let (mut first, mut further) = ((beside, Vec::new()), Vec::<(Writes, Vec<Job>)>::new());
        for job in jobs {
            if let Err(problem) = self.refuse_second(&job.vm) {
                refused.push((job.vm, problem));
                continue;
            }
            let write =
                self.shared.keeper.put(Writes::default(), MOVES, &job.id, &job.saved()).await?;
            let (writes, batch) = further.last_mut().unwrap_or(&mut first);
            if writes.has_room_for(&write) {
                writes.add(write);
                batch.push(job);
            } else {
                further.push((write, vec![job]));
            }
        }
        self.shared.keeper.write(first.0).await?;
        self.add_stored(first.1);
        for (writes, batch) in further {
            match self.shared.keeper.write(writes).await {
                Ok(()) => self.add_stored(batch),
                Err(problem) => {
                    refused.extend(batch.into_iter().map(|job| (job.vm, problem.clone())));
                }
            }
        }
        self.remove_oldest().await;
        self.schedule().await;
        Ok(refused)
    }

    /// Adds jobs that are in the store.
    fn add_stored(&mut self, jobs: Vec<Job>) {
        for job in jobs {
            let id = job.id.clone();
            self.jobs.put(job);
            self.show(&id);
        }
    }

    /// Refuses a second unfinished move of a VM.
    fn refuse_second(&self, vm: &str) -> Result<(), Problem> {
        let Some(other) = self.jobs.open_of_vm(vm) else { return Ok(()) };
        let detail = format!("VM \"{vm}\" already has move {}", other.id);
        let remedy = format!(
            "wait for its end, or cancel it with `godwit control move cancel {}`",
            other.id
        );
        Err(Problem::new(ProblemCode::WrongState, detail, remedy))
    }

    async fn cancel(&mut self, id: &str) -> Result<Move, Problem> {
        let job = self.jobs.get(id).ok_or_else(|| no_move(id))?;
        if job.state.is_over() {
            let detail = format!("move {id} is already over");
            return Err(Problem::new(
                ProblemCode::WrongState,
                detail,
                "see it with `godwit control move show`",
            ));
        }
        // A failed write is an error of the request, which the caller can repeat.
        self.advance(id, JobEvent::Cancel).await?;
        self.shown_move(id)
    }

    fn shown_move(&self, id: &str) -> Result<Move, Problem> {
        let shown = self.shared.shown.read();
        shown.get(id).cloned().ok_or_else(|| no_move(id))
    }

    /// Handles an agent's report about a migration: progress and outcome of a job's own migration.
    async fn migration_reported(&mut self, host: &str, status: MigrationStatus) {
        let Some(job) = self.jobs.of_migration(&status.id) else {
            return self.foreign_reported(host, status).await;
        };
        if job.from != host || job.vm != status.vm {
            let (id, vm, from) = (&status.id, &job.vm, &job.from);
            let contradiction =
                format!("it reports migration {id}, which belongs to VM {vm} on host {from}");
            return self.shared.state.blame(host, &Misreport::new(contradiction));
        }
        self.shared.samples.lock().record(&job.id, &status);
        let (id, migration) = (job.id.clone(), status.id);
        job.progress = Some(status.progress);
        let event = match status.report {
            None => JobEvent::Accepted { migration },
            Some(report) => {
                let how = agents::ended(&report);
                job.report = Some(report);
                JobEvent::Ended { migration, how }
            }
        };
        self.happened(&id, event).await;
        self.show(&id);
    }

    /// Handles a host that is reachable again. Its agent may have restarted, so the end of a
    /// migration in the meantime must be queried.
    async fn host_reachable(&mut self, host: &str) {
        let under_way = |job: &&Job| job.from == host && job.target().is_some();
        let ids: Vec<String> =
            self.jobs.open().filter(under_way).map(|job| job.id.clone()).collect();
        for id in ids {
            self.happened(&id, JobEvent::Resumed).await;
        }
        let Some(only) = self.listed.take(host) else { return };
        let (agents, orders) = (Arc::clone(&self.shared.agents), self.shared.orders.clone());
        let (host, turns) = (host.to_owned(), Arc::clone(&self.listings));
        tokio::spawn(async move {
            let _only = only;
            // This cannot fail: nobody closes the semaphore.
            let Ok(_turn) = turns.acquire().await else { return };
            for status in foreign::ended_at(&*agents, &host).await {
                let news = News::Migration(host.clone(), Box::new(status));
                // The receiver is gone when this manager ends.
                if orders.send(Order::News(news)).await.is_err() {
                    return;
                }
            }
        });
    }

    /// Adds the end of a migration that an agent was asked for to the history of moves and to the
    /// journal. What a host reports too often, or reported before, is ignored.
    async fn foreign_reported(&mut self, host: &str, status: MigrationStatus) {
        if status.from != host || self.jobs.has_ended(host, &status.id) {
            return;
        }
        let Some(mut job) = foreign::job(status, now_unix_ms()) else { return };
        let keeper = Arc::clone(&self.shared.keeper);
        let Some(entry) = noted::reported(&job).and_then(|entry| keeper.admitted(&entry)) else {
            return;
        };
        if let Err(problem) = reports::create_job(&keeper, &job, entry).await {
            tracing::error!(vm = job.vm, host, %problem, "cannot save a migration of an agent");
            return;
        }
        let id = job.id.clone();
        job.report = None;
        self.jobs.put(job);
        self.remove_oldest().await;
        self.show(&id);
    }

    /// Applies an event to a job and carries out its actions. If the state cannot be saved, the
    /// event is kept for a retry, because no source reports it twice.
    async fn happened(&mut self, id: &str, event: JobEvent) {
        if let Err(problem) = self.advance(id, event.clone()).await {
            tracing::error!(job = id, %problem, "cannot save the state of a move; it is retried");
            let events = self.unwritten.entry(id.to_owned()).or_default();
            if !events.contains(&event) {
                events.push(event);
            }
        }
    }

    /// Retries unsaved events while the store accepts writes.
    async fn advance_again(&mut self) {
        let mut unwritten = std::mem::take(&mut self.unwritten);
        while let Some((id, events)) = unwritten.pop_first() {
            for (at, event) in events.iter().enumerate() {
                let Err(problem) = self.advance(&id, event.clone()).await else { continue };
                self.unwritten.insert(id, events[at..].to_vec());
                if problem.code == ProblemCode::StoreAway {
                    // The remaining writes would fail as well.
                    self.unwritten.append(&mut unwritten);
                }
                break;
            }
        }
    }

    /// Applies an event to a job. If the state cannot be saved, the job stays unchanged.
    async fn advance(&mut self, id: &str, event: JobEvent) -> Result<(), Problem> {
        let Some(before) = self.jobs.get(id).cloned() else { return Ok(()) };
        let now_ms = now_unix_ms();
        let taken = step(before.state.clone(), event, &self.policy, now_ms);
        if taken.state != before.state {
            let mut job = before.clone();
            job.enter(taken.state, now_ms);
            self.jobs.put(job);
            self.is_changed = true;
        }
        for action in taken.actions {
            let Some(job) = self.jobs.get(id) else { return Ok(()) };
            match action {
                Action::Save => {
                    let entry = noted::ended(job).filter(|_| !before.state.is_over());
                    if let Err(problem) = reports::save_job(&self.shared.keeper, job, entry).await {
                        // The job is again as the store has it.
                        self.jobs.put(before);
                        return Err(problem);
                    }
                    if let Some(job) = self.jobs.get_mut(id).filter(|job| job.state.is_over()) {
                        // The store has the report.
                        job.report = None;
                    }
                }
                action if action.still_applies(&job.state) => self.carry_out_at_agent(id, action),
                _ => {}
            }
        }
        self.note_served(id);
        self.show(id);
        Ok(())
    }

    /// Carries out an action at an agent, in a task of its own, because an agent may be slow.
    fn carry_out_at_agent(&mut self, id: &str, action: Action) {
        let Some(job) = self.jobs.get(id) else { return };
        let (agents, orders, job) =
            (Arc::clone(&self.shared.agents), self.shared.orders.clone(), job.clone());
        let is_question = matches!(action, Action::Ask { .. });
        let task = tokio::spawn(async move {
            if let Some(answer) = agents.carry_out(&job, action).await {
                // The receiver is gone when this manager ends.
                let _ = orders.send(Order::Answered(job.id, answer)).await;
            }
        });
        if is_question {
            // The answer to the previous question would describe an earlier moment, and an
            // unanswered one would be repeated forever.
            if let Some(before) = self.requests.insert(id.to_owned(), task.abort_handle()) {
                before.abort();
            }
        }
    }

    /// Starts every move that can start.
    async fn start_moves(&mut self) {
        self.decide(false).await;
    }

    /// Starts every move that can start, and records for the others what they wait for.
    async fn schedule(&mut self) {
        // What was served before all jobs of a group were requested does not count.
        let flows: BTreeSet<(&str, &str)> =
            self.jobs.open().map(|job| (job.from.as_str(), job.group())).collect();
        self.served
            .retain(|served| flows.contains(&(served.source.as_str(), served.group.as_str())));
        self.end_forgotten().await;
        self.decide(true).await;
        self.explained_at = Instant::now();
    }

    async fn decide(&mut self, with_waits: bool) {
        self.is_changed = false;
        self.count_moves();
        if !self.jobs.open().any(|job| matches!(job.state, JobState::Waiting { .. })) {
            return;
        }
        let now_ms = now_unix_ms();
        let (input, limits) = {
            let inventory = self.shared.state.inventory();
            (situation::queue_input(&self.jobs, &inventory), inventory.limits())
        };
        let situation = Situation {
            now_ms,
            waiting: &input.waiting,
            running: &input.running,
            hosts: &input.hosts,
            limits: &limits,
            served: &self.served,
        };
        let starts = if with_waits {
            let Schedule { starts, waits } = schedule(&situation);
            for (id, waits) in input.unable {
                self.set_waits(&id, waits);
            }
            for Wait { job, reason, text, .. } in waits {
                self.set_waits(&job, Waits { code: situation::code(&reason), text });
            }
            starts
        } else {
            starts(&situation)
        };
        for start in starts {
            let Some(job) = self.jobs.get(&start.job) else { continue };
            let Some(epoch) =
                situation::epoch(&self.shared.state.inventory(), &job.vm, &start.source)
            else {
                continue;
            };
            let migration = job.next_migration();
            let starts = JobEvent::Start { migration, target: start.target, epoch };
            if let Err(problem) = self.advance(&start.job, starts).await {
                // The next scheduling decides again.
                tracing::error!(job = start.job, %problem, "cannot save a move; it does not start");
                return;
            }
        }
    }

    /// Ends the jobs of removed hosts, because no agent could be asked for their outcome. A
    /// migration to a removed host continues: its source reports on it.
    async fn end_forgotten(&mut self) {
        let forgotten: Vec<(String, String)> = {
            let inventory = self.shared.state.inventory();
            let of = |job: &Job| {
                let waits_for = job.request.to.as_ref().filter(|_| job.target().is_none());
                let mut needed = [Some(&job.from), waits_for].into_iter().flatten();
                needed.find(|host| inventory.host_plan(host).is_none()).cloned()
            };
            self.jobs.open().filter_map(|job| Some((job.id.clone(), of(job)?))).collect()
        };
        for (id, host) in forgotten {
            let Some(job) = self.jobs.get(&id) else { continue };
            let (migration, target) =
                (job.next_migration(), job.request.to.clone().unwrap_or_default());
            self.happened(&id, JobEvent::HostForgotten { host, migration, target }).await;
        }
    }

    fn set_waits(&mut self, id: &str, waits: Waits) {
        let waits = Some(waits);
        if let Some(job) = self.jobs.get_mut(id).filter(|job| job.waits != waits) {
            job.waits = waits;
            self.show(id);
        }
    }

    /// Publishes for each host the number of moves that leave it and arrive there.
    fn count_moves(&mut self) {
        let mut counts = BTreeMap::<&str, (u64, u64)>::new();
        for (from, target) in self.jobs.open().filter_map(|job| Some((&job.from, job.target()?))) {
            counts.entry(from).or_default().0 += 1;
            counts.entry(target).or_default().1 += 1;
        }
        let counted: BTreeMap<String, (u64, u64)> =
            counts.into_iter().map(|(host, counts)| (host.to_owned(), counts)).collect();
        if counted == self.counted {
            return;
        }
        let gone = self.counted.keys().filter(|host| !counted.contains_key(*host));
        let all: Vec<(String, (u64, u64))> =
            gone.map(|host| (host.clone(), (0, 0))).chain(counted.clone()).collect();
        self.counted = counted;
        self.shared.state.change(|inventory| {
            let changes = all
                .iter()
                .filter_map(|(host, (out, arriving))| inventory.count_moves(host, *out, *arriving));
            changes.collect::<Vec<_>>()
        });
    }

    /// Records when each group was served, for fair shares.
    fn note_served(&mut self, id: &str) {
        let Some(job) = self.jobs.get(id) else { return };
        if !matches!(job.state, JobState::Starting(_)) && !job.state.is_over() {
            return;
        }
        let (source, group) = (job.from.clone(), job.group().to_owned());
        self.served.retain(|served| served.source != source || served.group != group);
        self.served.push(Served { source, group, at_ms: now_unix_ms() });
    }

    async fn remove_oldest(&mut self) {
        for id in &self.jobs.oldest_over(MOST_OVER, MOST_REMOVED) {
            let removed = match reports::remove(&self.shared.keeper, id).await {
                Ok(()) => self.shared.keeper.remove(MOVES, id).await,
                refused => refused,
            };
            if let Err(problem) = removed {
                tracing::warn!(job = id, %problem, "cannot remove an old move");
                return;
            }
            self.jobs.remove(id);
            self.requests.remove(id);
            self.shared.shown.write().remove(id);
        }
    }

    /// Publishes a job if it has changed.
    fn show(&self, id: &str) {
        let Some(job) = self.jobs.get(id) else { return };
        let now = job.to_move();
        {
            let mut shown = self.shared.shown.write();
            if shown.get(id) == Some(&now) {
                return;
            }
            shown.put(now.clone());
        }
        // A finished move may be followed by another one of its VM.
        let open = self.jobs.open_of_vm(&job.vm);
        let (planned, target) =
            (open.map(|open| open.id.clone()), open.and_then(|open| open.target().cloned()));
        self.shared.state.change(|inventory| {
            let mut changes = inventory.plan_move(&job.vm, planned, target);
            changes.push(Change::Move(Box::new(now)));
            changes
        });
    }
}

pub(super) fn no_move(id: &str) -> Problem {
    let remedy = "see `godwit control move list --all`";
    Problem::new(ProblemCode::NotFound, format!("no move {id}"), remedy)
}
