//! The source after a cut of the link in pre-copy: it asks its destination for another lane until
//! there is one or the time limit has passed.

use std::time::{Duration, Instant};

use godwit_api::{ClientError, ErrorCode, IncomingAccepted, IncomingResume};
use godwit_lanes::Stream;
use godwit_migration::{Failure, millis};
use godwit_types::{CutReport, FailureCode, LaneReport, Ownership};
use godwit_wire::MigrationId;

use super::outgoing::Outgoing;
use crate::migrations::MigrationControl;
use crate::paths::Paths;

/// Interval between two attempts to reach the destination.
const AGAIN_INTERVAL: Duration = Duration::from_millis(300);
/// Time limit for an answer: over a cut link it never arrives.
const ANSWER_LIMIT: Duration = Duration::from_secs(2);

/// A new lane after a cut.
pub(super) struct Again {
    pub(super) stream: Stream,
    pub(super) paths: Paths,
    pub(super) left_out: Vec<LaneReport>,
    /// ID in the lane's hello.
    pub(super) migration: MigrationId,
    pub(super) cut: CutReport,
}

/// The first lane of a migration.
pub(super) struct FirstLane {
    pub(super) stream: Stream,
    pub(super) paths: Paths,
    pub(super) left_out: Vec<LaneReport>,
    /// ID in the lane's hello.
    pub(super) migration: MigrationId,
    /// The cut that was waited for.
    pub(super) cuts: Vec<CutReport>,
}

impl Outgoing {
    /// Connects to a destination that awaits the guest. Once disks travel, a cut is waited for.
    ///
    /// # Errors
    /// No lane can be connected; the errors of [`Outgoing::reconnect`].
    pub(super) async fn first_lane(
        &self,
        control: &MigrationControl,
        accepted: &IncomingAccepted,
        migration: MigrationId,
    ) -> Result<FirstLane, Failure> {
        let connected = self.connect_unless_cancelled(control, &accepted.addresses).await;
        let waits = self.disks.is_some() && self.request.cut_limit_ms > 0;
        match connected {
            Ok((stream, paths, left_out)) => {
                Ok(FirstLane { stream, paths, left_out, migration, cuts: Vec::new() })
            }
            Err(why) if waits && why.code == FailureCode::LaneLost => {
                let pages = self.vm.regions().iter().map(|region| region.pages()).sum();
                let again = self.reconnect(control, &accepted.id, &why, pages).await?;
                let Again { stream, paths, left_out, migration, cut } = again;
                Ok(FirstLane { stream, paths, left_out, migration, cuts: vec![cut] })
            }
            Err(failure) => Err(failure),
        }
    }

    /// Reaches the destination of a migration whose lane was cut.
    ///
    /// # Errors
    /// The time limit has passed, the migration is cancelled, the guest's QEMU has ended, or the
    /// destination has dropped its shadow.
    pub(super) async fn reconnect(
        &self,
        control: &MigrationControl,
        id: &str,
        why: &Failure,
        unsent_pages: u64,
    ) -> Result<Again, Failure> {
        let (cut_at, noticed) = (Instant::now(), self.begun.elapsed());
        let limit = Duration::from_millis(self.request.cut_limit_ms);
        let vm = self.vm.name.as_str();
        tracing::warn!(vm, to = self.request.to, %why, unsent_pages, "link cut: waiting for it");
        let mut every = tokio::time::interval(AGAIN_INTERVAL);
        every.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                _ = every.tick() => {}
                () = control.cancelled() => {
                    let detail = "cancelled while the link was cut";
                    return Err(Failure::new(FailureCode::Cancelled, detail));
                }
                _ = self.vm.process.exited() => {
                    let detail = "QEMU ended while the link was cut";
                    return Err(Failure::new(FailureCode::HypervisorFailed, detail));
                }
            }
            if cut_at.elapsed() >= limit {
                let detail = format!(
                    "{}; the link was not restored within {} s",
                    why.detail,
                    limit.as_secs()
                );
                return Err(Failure::new(FailureCode::LaneLost, detail));
            }
            control.reconnects(millis(self.begun.elapsed()));
            let Some(accepted) = self.ask_for_lane(id, why).await? else { continue };
            let migration = accepted.id.parse().map_err(|_| {
                Failure::new(
                    FailureCode::ProtocolBroken,
                    "the destination returned an invalid migration ID",
                )
            })?;
            match self.connect_unless_cancelled(control, &accepted.addresses).await {
                Ok((stream, paths, left_out)) => {
                    let cut = CutReport {
                        at_ms: millis(noticed),
                        lasted_ms: millis(cut_at.elapsed()),
                        unsent_pages,
                        why: why.detail.clone(),
                    };
                    tracing::info!(vm, lasted_ms = cut.lasted_ms, "link restored");
                    return Ok(Again { stream, paths, left_out, migration, cut });
                }
                Err(failure) if failure.code == FailureCode::Cancelled => return Err(failure),
                Err(failure) => {
                    tracing::debug!(vm, %failure, "no lane yet");
                }
            }
        }
    }

    /// Asks the destination for another lane. Returns `None` if it does not give one yet.
    async fn ask_for_lane(
        &self,
        id: &str,
        why: &Failure,
    ) -> Result<Option<IncomingAccepted>, Failure> {
        let path = format!("/v1/incoming/{id}/resume");
        let Ownership { incarnation, epoch } = self.vm.ownership().offered();
        let request = IncomingResume { incarnation, epoch };
        match tokio::time::timeout(ANSWER_LIMIT, self.peer.post(&path, &request)).await {
            Ok(Ok(accepted)) => Ok(Some(accepted)),
            Ok(Err(ClientError::Refused(error)))
                if matches!(error.code, ErrorCode::NotFound | ErrorCode::WrongState) =>
            {
                let detail = format!(
                    "{}; the destination has dropped its shadow: its agent has restarted \
                     meanwhile, or has ended it ({})",
                    why.detail, error.message
                );
                Err(Failure::new(FailureCode::LaneLost, detail))
            }
            Ok(Err(error)) => {
                let vm = self.vm.name.as_str();
                tracing::debug!(vm, %error, "no lane from the destination yet");
                Ok(None)
            }
            Err(_) => Ok(None),
        }
    }
}
