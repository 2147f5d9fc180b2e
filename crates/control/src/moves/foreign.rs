//! Migrations that an agent was asked for, without a move of this manager. They are in the history
//! of moves all the same.

use std::time::Duration;

use godwit_api::MigrationStatus;
use godwit_planner::queue::lifecycle::{Ended, JobState};
use tokio::time::timeout;

use super::agents::{self, Agents};
use super::job::{Job, fresh_id};
use crate::clock::now_unix_ms;
use crate::cluster::bounds::check_migration;

/// Age of the oldest migration that is added after a connection to its agent, milliseconds.
const MOST_AGE_MS: u64 = 24 * 3600 * 1000;
/// Most migrations of one host that are added after a connection to its agent, which remembers no
/// more.
const MOST: usize = 256;
/// Longest time for the answer of an agent: others wait for their turn meanwhile.
const LISTING_LIMIT: Duration = Duration::from_secs(30);

/// Asks a host's agent for migrations that ended while it was unreachable, which it does not
/// report by itself. Returns them with the oldest first.
pub(super) async fn ended_at(agents: &dyn Agents, host: &str) -> Vec<MigrationStatus> {
    let oldest_ms = now_unix_ms().saturating_sub(MOST_AGE_MS);
    let Ok(all) = timeout(LISTING_LIMIT, agents.migrations(host)).await else {
        tracing::warn!(host, "a host does not list its migrations");
        return Vec::new();
    };
    let all = all.into_iter().take(MOST);
    let mut ended: Vec<MigrationStatus> = all
        .filter(|one| one.report.is_some() && one.started_unix_ms >= oldest_ms)
        .filter(|one| check_migration(host, one).is_ok())
        .collect();
    ended.sort_by_key(|one| one.started_unix_ms);
    ended
}

/// Returns the finished job of a migration that an agent was asked for. `None`: it is not over.
pub(super) fn job(status: MigrationStatus, now_ms: u64) -> Option<Job> {
    let (migration, target) = (status.id.clone(), status.to.clone());
    let state = match agents::ended(status.report.as_ref()?) {
        Ended::Completed => JobState::Done { migration, target, cancelled_too_late: false },
        Ended::Cancelled => {
            JobState::Cancelled { migration: Some(migration), target: Some(target) }
        }
        Ended::Failed(failure) | Ended::InDoubt(failure) => {
            JobState::Failed { migration, target, failed_attempts: 1, failure }
        }
    };
    Some(Job::reported(fresh_id('v', now_ms).ok()?, status, state, now_ms))
}
