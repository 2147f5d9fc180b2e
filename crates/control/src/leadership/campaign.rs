//! A manager's role among several: it follows until there is no leader, leads until it loses the
//! leadership, and follows again.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use godwit_api::control::{Problem, ProblemCode};
use godwit_store::records::RecordError;
use godwit_store::{Candidate, Leadership, Loss, Store, StoreError};
use parking_lot::Mutex;

use crate::journal::audit::AuditEntry;
use crate::journal::entries::SavedEntry;
use crate::journal::newest_first::{Retention, prune};
use crate::leadership::standby::Standby;
use crate::manager::Manager;
use crate::storage::keeper::Keeper;

/// Pause before the next attempt to lead after a failure of the store.
const PAUSE: Duration = Duration::from_secs(1);
/// Interval of pruning the audit log and the journal.
const PRUNE_INTERVAL: Duration = Duration::from_secs(3600);

/// Reason why a manager can neither lead nor follow.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CampaignError {
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A record in the store cannot be read.
    #[error("{0}")]
    State(Problem),
    /// The manager lost the leadership, and its store is unusable.
    #[error("{0}")]
    Lost(Loss),
}

/// Retention of each log.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Retentions {
    pub(crate) audit: Retention,
    pub(crate) journal: Retention,
}

/// Role of one manager.
pub(crate) struct Campaign {
    manager: Arc<Manager>,
    store: Arc<dyn Store>,
    candidate: Candidate,
    retention: Retentions,
    /// Present while the manager leads.
    leadership: Mutex<Option<Arc<Leadership>>>,
}

impl Campaign {
    pub(crate) fn new(
        manager: Arc<Manager>,
        store: Arc<dyn Store>,
        candidate: Candidate,
        retention: Retentions,
    ) -> Campaign {
        Campaign { manager, store, candidate, retention, leadership: Mutex::default() }
    }

    /// Follows and leads in turn. Returns when this process can do neither.
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
                loss => tracing::warn!(%loss, "this manager no longer leads; it follows"),
            }
            tokio::time::sleep(PAUSE).await;
        }
    }

    /// Leads until the leadership is lost.
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
                tracing::warn!(%problem, "cannot lead: the store's records are not readable");
                return Ok(Loss::Resigned);
            }
            Err(problem) => return Err(CampaignError::State(problem)),
        }
        tokio::select! {
            loss = leadership.lost() => Ok(loss),
            never = self.prune_logs(leadership) => match never {},
        }
    }

    /// Removes entries of the audit log and of the journal beyond their retention.
    async fn prune_logs(&self, leadership: &Leadership) -> Infallible {
        let Retentions { audit, journal } = self.retention;
        let store = &*self.store;
        let mut interval = tokio::time::interval(PRUNE_INTERVAL);
        loop {
            interval.tick().await;
            let now = SystemTime::now();
            let removed = prune::<AuditEntry>(store, leadership, audit, now).await;
            log_removed("audit log", removed);
            let removed = prune::<SavedEntry>(store, leadership, journal, now).await;
            log_removed("journal", removed);
        }
    }

    /// Gives up the leadership if this manager has it, so that another one leads at once.
    pub(crate) async fn resign(&self) {
        self.manager.step_down();
        let leadership = self.leadership.lock().take();
        let Some(leadership) = leadership.filter(|leadership| leadership.holds()) else { return };
        if let Err(error) = leadership.resign().await {
            tracing::warn!(%error, "cannot give up the leadership; its lease expires by itself");
        }
    }

    fn hold(&self, leadership: Option<Arc<Leadership>>) {
        *self.leadership.lock() = leadership;
    }
}

fn log_removed(log: &str, removed: Result<usize, RecordError>) {
    match removed {
        Ok(0) => {}
        Ok(entries) => tracing::info!(log, entries, "removed old entries"),
        Err(error) => tracing::warn!(log, %error, "cannot remove old entries"),
    }
}

/// Returns whether the problem may pass shortly.
fn passes(problem: &Problem) -> bool {
    matches!(problem.code, ProblemCode::StoreAway | ProblemCode::NoLeader | ProblemCode::Conflict)
}
