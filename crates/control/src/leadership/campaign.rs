//! A manager's part among several: it follows until nobody leads, leads until that is lost, and follows again.

use std::convert::Infallible;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use godwit_api::control::{Problem, ProblemCode};
use godwit_store::{Candidate, Leadership, Loss, Store, StoreError};

use crate::journal::audit::{self, Retention};
use crate::leadership::standby::Standby;
use crate::manager::Manager;
use crate::storage::keeper::Keeper;

/// Before it is tried again to lead, where the store failed in between.
const PAUSE: Duration = Duration::from_secs(1);
/// Between two looks for entries of the audit log that are to go.
const PRUNE_INTERVAL: Duration = Duration::from_secs(3600);

/// Why a manager neither leads nor follows any more.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CampaignError {
    #[error(transparent)]
    Store(#[from] StoreError),
    /// What the store keeps cannot be read.
    #[error("{0}")]
    State(Problem),
    /// It leads no more, and its store is of no use.
    #[error("{0}")]
    Lost(Loss),
}

/// One manager's part.
pub(crate) struct Campaign {
    manager: Arc<Manager>,
    store: Arc<dyn Store>,
    candidate: Candidate,
    retention: Retention,
    /// While it leads.
    leadership: Mutex<Option<Arc<Leadership>>>,
}

impl Campaign {
    pub(crate) fn new(
        manager: Arc<Manager>,
        store: Arc<dyn Store>,
        candidate: Candidate,
        retention: Retention,
    ) -> Campaign {
        Campaign { manager, store, candidate, retention, leadership: Mutex::default() }
    }

    /// Follows and leads in turn. Returns when this process can't do either any more.
    pub(crate) async fn run(&self) -> Result<Infallible, CampaignError> {
        loop {
            let standby = Standby::begin(&self.manager, &self.store);
            let leadership = Arc::new(self.store.lead(&self.candidate).await?);
            standby.end().await;
            self.hold(Some(Arc::clone(&leadership)));
            let ended = self.lead(&leadership).await;
            self.resign().await;
            match ended? {
                Loss::StoreFailed(why) => return Err(CampaignError::Lost(Loss::StoreFailed(why))),
                loss => tracing::warn!(%loss, "this manager leads no more, and follows"),
            }
            tokio::time::sleep(PAUSE).await;
        }
    }

    /// One leadership, until it is lost.
    async fn lead(&self, leadership: &Arc<Leadership>) -> Result<Loss, CampaignError> {
        let keeper =
            Keeper::new(Arc::clone(&self.store), Arc::clone(leadership), self.candidate.clone());
        let begun = tokio::select! {
            begun = self.manager.lead(keeper) => begun,
            loss = leadership.lost() => return Ok(loss),
        };
        match begun {
            Ok(()) => tracing::info!(epoch = %leadership.epoch(), "this manager leads"),
            Err(problem) if passes(&problem) => {
                tracing::warn!(%problem, "this manager could lead and can't read what is kept");
                return Ok(Loss::Resigned);
            }
            Err(problem) => return Err(CampaignError::State(problem)),
        }
        tokio::select! {
            loss = leadership.lost() => Ok(loss),
            never = self.prune_audit(leadership) => match never {},
        }
    }

    /// Removes what the audit log keeps no longer.
    async fn prune_audit(&self, leadership: &Leadership) -> Infallible {
        let mut interval = tokio::time::interval(PRUNE_INTERVAL);
        loop {
            interval.tick().await;
            match audit::prune(&*self.store, leadership, self.retention, SystemTime::now()).await {
                Ok(0) => {}
                Ok(entries) => tracing::info!(entries, "old entries of the audit log are removed"),
                Err(error) => {
                    tracing::warn!(%error, "old entries of the audit log can't be removed")
                }
            }
        }
    }

    /// Gives the leadership back, if this manager has it: another leads at once.
    pub(crate) async fn resign(&self) {
        self.manager.step_down();
        let leadership = self.leadership.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(leadership) = leadership.filter(|leadership| leadership.holds()) else { return };
        if let Err(error) = leadership.resign().await {
            tracing::warn!(%error, "the leadership is not given back, and ends by itself");
        }
    }

    fn hold(&self, leadership: Option<Arc<Leadership>>) {
        *self.leadership.lock().unwrap_or_else(PoisonError::into_inner) = leadership;
    }
}

/// Whether that may be better in a moment.
fn passes(problem: &Problem) -> bool {
    matches!(problem.code, ProblemCode::StoreAway | ProblemCode::NoLeader | ProblemCode::Conflict)
}
