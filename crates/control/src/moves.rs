//! Moves: their execution, records, limits and HTTP. One task owns all jobs ([`driver`]); the
//! planner makes the decisions.

mod agents;
mod driver;
pub(crate) mod elsewhere;
mod foreign;
pub(crate) mod http;
mod job;
mod jobs;
pub(crate) mod limits;
mod noted;
pub(crate) mod preflight_http;
mod record;
mod reports;
pub(crate) mod requests;
mod samples;
mod shown;
mod situation;

use std::collections::BTreeSet;
use std::sync::Arc;

use godwit_api::MigrationStatus;
use godwit_api::control::{Move, MoveSamples, MoveState, Problem, ProblemCode};
use godwit_planner::queue::lifecycle::Ended;
use godwit_types::{Fault, Report};
use parking_lot::{Mutex, RwLock, RwLockReadGuard};
use tokio::sync::{mpsc, oneshot};
use tokio::task::AbortHandle;

use crate::agents::following::News;
use crate::clock::now_unix_ms;
use crate::cluster::state::State;
use crate::storage::keeper::{Keeper, Writes};

#[cfg(test)]
pub(crate) use agents::AgentAnswer;
pub(crate) use agents::{Agents, FollowedAgents};
use driver::{Driver, Order, Refused, Shared};
pub(crate) use job::{Job, Wanted, fresh_id, job_of};
use jobs::Jobs;
pub(crate) use record::{MOVES, SavedMove};
use samples::Samples;
pub(crate) use shown::ShownMoves;

/// Returns what is stored of an agent's answer about a migration: the reason for a failure, and the
/// report as JSON.
pub(crate) fn kept_of_answer(status: &MigrationStatus) -> (Option<Fault>, Option<Vec<u8>>) {
    let Some(report) = &status.report else { return (None, None) };
    let failure = match agents::ended(report) {
        Ended::Failed(failure) | Ended::InDoubt(failure) => Some(failure),
        Ended::Completed | Ended::Cancelled => None,
    };
    (failure, reports::kept(report).and_then(|kept| serde_json::to_vec(&kept).ok()))
}

/// Most queued orders. Further senders wait.
const WAITING_ORDERS: usize = 1_024;

/// Moves of the cluster, as seen from outside the task that owns them. Dropping this ends the task.
#[derive(Debug)]
pub(crate) struct Moves {
    keeper: Arc<Keeper>,
    shown: Arc<RwLock<ShownMoves>>,
    samples: Arc<Mutex<Samples>>,
    orders: mpsc::Sender<Order>,
    tasks: [AbortHandle; 2],
}

impl Drop for Moves {
    fn drop(&mut self) {
        // Requests to agents are not withdrawn: the next leader asks for their outcome.
        self.tasks.iter().for_each(AbortHandle::abort);
    }
}

impl Moves {
    /// Loads the moves from the store and carries them out from here on.
    pub(crate) async fn begin(
        keeper: Arc<Keeper>,
        state: Arc<State>,
        agents: Arc<dyn Agents>,
        mut news: mpsc::Receiver<News>,
    ) -> Result<Moves, Problem> {
        let saved = keeper.read_all(MOVES).await?;
        let (orders, incoming) = mpsc::channel(WAITING_ORDERS);
        let shown = Arc::<RwLock<ShownMoves>>::default();
        let samples = Arc::<Mutex<Samples>>::default();
        let mut jobs = Jobs::default();
        saved.into_iter().for_each(|(id, saved)| jobs.put(Job::of(&id, saved)));
        let driver = Driver::new(
            Shared {
                keeper: Arc::clone(&keeper),
                state,
                agents,
                orders: orders.clone(),
                shown: Arc::clone(&shown),
                samples: Arc::clone(&samples),
            },
            jobs,
        );
        // All moves are visible to the caller: a cancelled drain cancels its waiting moves.
        driver.show_all();
        let driver = tokio::spawn(driver.run(incoming)).abort_handle();
        let sender = orders.clone();
        let relay = tokio::spawn(async move {
            while let Some(one) = news.recv().await {
                if sender.send(Order::News(one)).await.is_err() {
                    return;
                }
            }
        });
        Ok(Moves { keeper, shown, samples, orders, tasks: [driver, relay.abort_handle()] })
    }

    /// Returns the report of a finished move. `None`: no manager saw its end.
    pub(crate) async fn report(&self, id: &str) -> Result<Option<Report>, Problem> {
        reports::find(&self.keeper, id).await
    }

    /// Returns the retained moves, without reports.
    pub(crate) fn all(&self) -> RwLockReadGuard<'_, ShownMoves> {
        self.shown.read()
    }

    /// Returns the progress samples of a move's migration.
    pub(crate) fn samples(&self, id: &str) -> MoveSamples {
        self.samples.lock().of(id)
    }

    /// Submits a move. The store holds it when this returns.
    pub(crate) async fn submit(&self, wanted: Wanted) -> Result<Move, Problem> {
        let now_ms = now_unix_ms();
        let job = Job::new(fresh_id('v', now_ms)?, wanted, now_ms);
        self.order(|answer| Order::Submit(Box::new(job), answer)).await
    }

    /// Submits moves and writes something else in the same transaction. Moves beyond the size of
    /// one transaction go into further ones. Returns the moves that were refused. If the first
    /// transaction fails, nothing is written and no move is submitted.
    pub(crate) async fn submit_all(
        &self,
        wanted: Vec<Wanted>,
        beside: Writes,
    ) -> Result<Refused, Problem> {
        let now_ms = now_unix_ms();
        let ids: Result<BTreeSet<String>, Problem> =
            wanted.iter().map(|_| fresh_id('v', now_ms)).collect();
        // Otherwise equal moves run in the order of their IDs, so the IDs follow the requested
        // order.
        let jobs =
            ids?.into_iter().zip(wanted).map(|(id, wanted)| Job::new(id, wanted, now_ms)).collect();
        self.order(|answer| Order::SubmitAll(jobs, beside, answer)).await
    }

    /// Cancels a move. Its state shows whether it is cancelled or completes anyway.
    pub(crate) async fn cancel(&self, id: &str) -> Result<Move, Problem> {
        self.order(|answer| Order::Cancel(id.to_owned(), answer)).await
    }

    /// Schedules moves now.
    pub(crate) fn reschedule(&self) {
        // If the queue is full, the next tick schedules.
        let _ = self.orders.try_send(Order::Schedule);
    }

    /// Returns the numbers of running and waiting moves.
    pub(crate) fn counts(&self) -> (u64, u64) {
        let all = self.all();
        let of = |wanted: &[MoveState]| {
            all.open().filter(|one| wanted.contains(&one.state)).count() as u64
        };
        (of(&[MoveState::Starting, MoveState::Running]), of(&[MoveState::Waiting]))
    }

    async fn order<T>(
        &self,
        order: impl FnOnce(oneshot::Sender<Result<T, Problem>>) -> Order,
    ) -> Result<T, Problem> {
        let (answer, answered) = oneshot::channel();
        let gone = || {
            Problem::new(
                ProblemCode::NoLeader,
                "this manager no longer leads",
                "ask the new leader",
            )
        };
        self.orders.send(order(answer)).await.map_err(|_| gone())?;
        answered.await.map_err(|_| gone())?
    }
}
