//! A dry run: all the checks of a migration, at both hosts, a look at the guest, what the lanes carry, and what would come of it.
//! Nothing is made at the destination, and nothing is left.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use godwit_api::{ApiError, ErrorCode, IncomingChecked, MigrationRequest};
use godwit_migration::drive::Tracking;
use godwit_migration::predict::{Prediction, predict};
use godwit_migration::{Policy, millis};
use godwit_qemu::VmName;
use godwit_types::{DryRun, Fault, GuestFigures, Lane, LanesFigures};

use super::foresight::{GuestSeen, Looking, survey};
use super::outgoing::{Outgoing, Tracker, report_of_client};
use crate::agent::Agent;
use crate::failure::host_failed;
use crate::lanes_seen::LanesCarry;
use crate::network;
use crate::probe;

/// What a guest is held to for a moment, to see whether it could be: a limit that faults can follow.
const PREPARED_PAGES_PER_S: f64 = 1000.0;
/// When the guest's writes are counted, since all of its memory was protected.
const LOOKS: [Duration; 6] = [
    Duration::from_millis(5),
    Duration::from_millis(20),
    Duration::from_millis(100),
    Duration::from_millis(300),
    Duration::from_millis(1000),
    Duration::from_millis(3000),
];

/// Why a dry run says nothing of the migration.
enum Ended {
    /// The migration would be refused: so its report would say.
    Refused(Fault),
    /// It is the dry run that can't be.
    Failed(ApiError),
}

impl From<Fault> for Ended {
    fn from(refused: Fault) -> Ended {
        Ended::Refused(refused)
    }
}

impl From<ApiError> for Ended {
    fn from(failed: ApiError) -> Ended {
        Ended::Failed(failed)
    }
}

/// What is foretold, and of what.
struct Foretold {
    prediction: Prediction,
    why: String,
    guest: GuestFigures,
    lanes: LanesFigures,
}

/// Foretells a migration of a VM that could begin now; see [`Agent::dry_run`].
pub(crate) async fn dry_run(
    agent: &Arc<Agent>,
    name: &VmName,
    request: MigrationRequest,
) -> Result<DryRun, ApiError> {
    let begun = Instant::now();
    let vm = agent.could_migrate(name)?;
    let Some(turn) = vm.tracking.try_take() else {
        let message = format!("another dry run looks at VM \"{name}\"");
        return Err(ApiError::new(ErrorCode::Busy, message, "wait until it is over: some seconds"));
    };
    // A migration that has begun meanwhile waits for this turn.
    agent.could_migrate(name)?;
    let peer = agent.peer(&request.to)?;
    let outgoing = Outgoing { agent: Arc::clone(agent), vm, request, peer, begun };
    let foretold = outgoing.foretell().await;
    drop(turn);
    let (foretold, error) = match foretold {
        Ok(foretold) => (Some(foretold), None),
        Err(Ended::Refused(error)) => (None, Some(error)),
        Err(Ended::Failed(error)) => return Err(error),
    };
    let Outgoing { vm, request, .. } = outgoing;
    let (mut blackout_ms, mut predicted) = (None, None);
    if let Some(Foretold { prediction, .. }) = &foretold {
        blackout_ms = Some(millis(prediction.blackout()));
        predicted = Some(prediction.to_report());
    }
    let (why, guest, lanes) = match foretold {
        Some(Foretold { why, guest, lanes, .. }) => (Some(why), Some(guest), Some(lanes)),
        None => (None, None, None),
    };
    tracing::info!(vm = vm.name.as_str(), to = request.to, ?predicted, ?error, "a dry run is over");
    Ok(DryRun {
        vm: vm.name.to_string(),
        from: agent.config().name.clone(),
        to: request.to,
        policy: request.policy,
        switchover_budget_ms: request.switchover_budget_ms,
        guest_bytes: vm.spec.memory_bytes(),
        predicted,
        blackout_ms,
        why,
        guest,
        lanes,
        error,
        dry_run_time_ms: millis(begun.elapsed()),
    })
}

impl Outgoing {
    async fn foretell(&self) -> Result<Foretold, Ended> {
        let qemu = self.agent.qemu(self.vm.spec.qemu.as_deref()).await.map_err(Fault::from)?;
        self.check(&qemu)?;
        let tracker = self.attach().await?;
        let preflight = self.begun.elapsed();
        let lanes = self.check_at_destination(&qemu).await?;
        let (seen, may_throttle) = self.look(tracker).await?;
        let carry = self.lanes_carry().await?;
        let policy = self.policy();
        let policy = Policy { may_throttle: policy.may_throttle && may_throttle, ..policy };
        let conditions = self.conditions(seen, carry, &lanes, policy, preflight);
        let prediction = predict(&conditions);
        let pace = self.agent.limits().migration(self.request.bandwidth_limit);
        lanes.iter().filter_map(|lane| lane.from).for_each(|from| pace.uses(from));
        let lanes = LanesFigures {
            bytes_per_s: carry.bytes_per_s,
            round_trip_ms: millis(carry.round_trip),
            bandwidth_limit: pace.holding(),
            known_by: carry.known_by,
        };
        let why = prediction.why(&conditions);
        Ok(Foretold { prediction, why, guest: conditions.guest_figures(), lanes })
    }

    /// What the destination would refuse is refused; else the lanes that the migration would use.
    async fn check_at_destination(&self, qemu: &godwit_qemu::QemuInfo) -> Result<Vec<Lane>, Fault> {
        let checked: IncomingChecked = self
            .peer
            .post("/v1/incoming/checks", &self.incoming_request(qemu))
            .await
            .map_err(|error| report_of_client(&self.request.to, error))?;
        let ours = network::near(&self.agent.config().migration_addresses).await;
        let theirs: Vec<_> =
            checked.addresses.into_iter().map(|ip| SocketAddr::new(ip, 0)).collect();
        let lanes = godwit_lanes::pair(&ours, &theirs);
        self.check_streams(lanes.len()).map_err(|failure| failure.to_fault())?;
        Ok(lanes)
    }

    /// What the guest writes and holds, and whether it could be slowed. The tracking ends with this.
    async fn look(&self, tracker: Tracker) -> Result<(GuestSeen, bool), Ended> {
        let regions = self.vm.regions.clone();
        let surveyed = tokio::task::spawn_blocking(move || survey(&regions));
        let mut looking = Looking::new(tracker, &self.vm.regions);
        tokio::task::block_in_place(|| looking.begin()).map_err(|why| self.not_trackable(&why))?;
        for at in LOOKS {
            tokio::select! {
                () = tokio::time::sleep_until((looking.begun() + at).into()) => {}
                () = self.vm.tracking.wanted() => return Err(self.moves_now().into()),
            }
            tokio::task::block_in_place(|| looking.count())
                .map_err(|why| self.not_trackable(&why))?;
        }
        let all = surveyed.await.map_err(|error| host_failed("looking at guest memory", &error))?;
        let all = all.map_err(|why| self.not_trackable(&why))?;
        tokio::task::block_in_place(|| {
            let seen = looking.seen(all).map_err(|why| self.not_trackable(&why))?;
            let mut tracker = looking.tracker;
            // Prepared and left alone: no memory comes under it.
            let may_throttle =
                tracker.throttle(Some(PREPARED_PAGES_PER_S)).and_then(|()| tracker.throttle(None));
            let may_throttle = may_throttle.inspect_err(|error| {
                tracing::warn!(vm = self.vm.name.as_str(), %error, "the guest's writers can't be slowed");
            });
            Ok((seen, may_throttle.is_ok()))
        })
    }

    /// By a short probe; by what was carried lately, where none can be made now.
    async fn lanes_carry(&self) -> Result<LanesCarry, Ended> {
        let seen = self.agent.lanes_seen();
        let probe = tokio::select! {
            probe = probe::brief(&self.agent, &self.request.to, self.request.streams) => probe,
            () = self.vm.tracking.wanted() => return Err(self.moves_now().into()),
        };
        let why = match probe {
            Ok(probe) => match seen.by_probe(&probe) {
                Some(carry) => return Ok(carry),
                None => {
                    let failure = probe.lanes.into_iter().find_map(|lane| lane.failure);
                    failure.map_or_else(
                        || "no lane carries full-size packets".to_owned(),
                        |failure| failure.message,
                    )
                }
            },
            Err(error) => match seen.to(&self.request.to) {
                Some(carry) => return Ok(carry),
                None => return Err(error.into()),
            },
        };
        seen.to(&self.request.to).ok_or_else(|| {
            let to = &self.request.to;
            let message = format!("what the lanes to host {to} carry can't be measured: {why}");
            ApiError::new(ErrorCode::PeerUnreachable, message, format!("see `godwit probe {to}`"))
                .into()
        })
    }

    fn moves_now(&self) -> ApiError {
        let message = format!("VM \"{}\" has begun to move: the dry run gave way", self.vm.name);
        ApiError::new(ErrorCode::Busy, message, "see `godwit migration list`")
    }
}
