//! A dry run: all checks of a migration at both hosts, an observation of the guest, a measurement
//! of the lanes, and a prediction. Creates nothing at the destination and leaves nothing behind.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use godwit_api::{ApiError, ErrorCode, IncomingChecked, IncomingRequest, MigrationRequest};
use godwit_migration::drive::Tracking;
use godwit_migration::predict::{Prediction, predict};
use godwit_migration::{Policy, millis};
use godwit_qemu::VmName;
use godwit_types::{DryRun, EngineKind, Fault, GuestFigures, Lane, LanesFigures, Predicted};

use super::begin::check_request;
use super::foresight::{GuestSeen, Looking, survey};
use super::outgoing::{Outgoing, Tracker};
use crate::agent::Agent;
use crate::failure::host_failed;
use crate::lanes_seen::LanesCarry;
use crate::migrations::MigrationControl;
use crate::network;
use crate::probe;
use crate::whole::whole;

/// Rate limit that a dry run sets briefly, to test whether the guest could be throttled; page
/// faults can keep up with it.
const PREPARED_PAGES_PER_S: f64 = 1000.0;
/// Times at which the guest's writes are counted, since the protection of all of its memory.
const LOOKS: [Duration; 6] = [
    Duration::from_millis(5),
    Duration::from_millis(20),
    Duration::from_millis(100),
    Duration::from_millis(300),
    Duration::from_millis(1000),
    Duration::from_millis(3000),
];

/// Reason why a dry run has no prediction.
enum Ended {
    /// The migration would be refused with this failure in its report.
    Refused(Fault),
    /// The dry run itself is impossible.
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

/// A prediction and its inputs.
struct Forecast {
    prediction: Prediction,
    /// Time in which its disks travel.
    disks: Duration,
    why: String,
    guest: GuestFigures,
    lanes: LanesFigures,
}

/// Predicts a migration of a VM that runs here. Moves nothing and does not block a migration of the
/// VM.
///
/// # Errors
/// The errors of [`super::migrate`]; a refusal that a migration would meet later is part of the
/// result. Also [`ErrorCode::Busy`]: a migration of the VM has begun, or another dry run examines
/// it.
pub(crate) async fn dry_run(
    agent: &Arc<Agent>,
    name: &VmName,
    request: MigrationRequest,
) -> Result<DryRun, ApiError> {
    check_request(agent, &request)?;
    if request.engine != EngineKind::Godwit {
        let message = "cannot predict a migration by QEMU's own engine";
        let remedy = "leave out engine: qemu";
        return Err(ApiError::new(ErrorCode::InvalidRequest, message, remedy));
    }
    let (agent, name) = (Arc::clone(agent), name.to_owned());
    // It completes within seconds, even if the client disconnects.
    whole(async move { examine(&agent, &name, request).await }).await
}

async fn examine(
    agent: &Arc<Agent>,
    name: &VmName,
    request: MigrationRequest,
) -> Result<DryRun, ApiError> {
    let begun = Instant::now();
    let vm = agent.could_migrate(name)?;
    let Some(turn) = vm.tracking.try_take() else {
        let message = format!("cannot examine VM \"{name}\": another dry run is in progress");
        return Err(ApiError::new(ErrorCode::Busy, message, "wait for its end, a few seconds"));
    };
    // A migration that has begun meanwhile waits for this turn.
    agent.could_migrate(name)?;
    let peer = agent.peer(&request.to)?;
    let outgoing = Outgoing { agent: Arc::clone(agent), vm, request, peer, begun, disks: None };
    let forecast = outgoing.forecast().await;
    drop(turn);
    let (forecast, error) = match forecast {
        Ok(forecast) => (Some(forecast), None),
        Err(Ended::Refused(error)) => (None, Some(error)),
        Err(Ended::Failed(error)) => return Err(error),
    };
    let Outgoing { vm, request, .. } = outgoing;
    let (mut blackout_ms, mut predicted) = (None, None);
    if let Some(Forecast { prediction, disks, .. }) = &forecast {
        blackout_ms = Some(millis(prediction.blackout()));
        let memory = prediction.to_report();
        let migration_time_ms = memory.migration_time_ms + millis(*disks);
        predicted = Some(Predicted { migration_time_ms, ..memory });
    }
    let (why, guest, lanes) = match forecast {
        Some(Forecast { why, guest, lanes, .. }) => (Some(why), Some(guest), Some(lanes)),
        None => (None, None, None),
    };
    let name = vm.name.as_str();
    tracing::info!(vm = name, to = request.to, ?predicted, ?error, "dry run ended");
    Ok(DryRun {
        vm: vm.name.to_string(),
        from: agent.config().name.clone(),
        to: request.to,
        policy: request.policy,
        switchover_budget_ms: request.switchover_budget_ms,
        guest_bytes: vm.spec().memory_bytes(),
        predicted,
        blackout_ms,
        why,
        guest,
        lanes,
        error,
        dry_run_time_ms: millis(begun.elapsed()),
    })
}

/// Returns the time in which lanes of that rate carry so many bytes.
fn time_of(bytes: u64, bytes_per_s: f64) -> Duration {
    let seconds = bytes as f64 / bytes_per_s.max(1.0);
    Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
}

impl Outgoing {
    async fn forecast(&self) -> Result<Forecast, Ended> {
        let qemu = self.agent.qemu(self.vm.spec().qemu.as_deref()).await.map_err(Fault::from)?;
        self.check(&qemu)?;
        let tracker = self.attach().await?;
        let preflight = self.begun.elapsed();
        let disk_bytes = self.foresee_disks().await?;
        let lanes = self.check_at_destination(&qemu, None).await?;
        let (seen, may_throttle) = self.observe(tracker).await?;
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
        let mut why = prediction.why(&conditions);
        let disks = disk_bytes.map_or(Duration::ZERO, |bytes| time_of(bytes, carry.bytes_per_s));
        if let Some(bytes) = disk_bytes {
            let (used, seconds) = (bytes >> 20, disks.as_secs_f64());
            why = format!("{why}; its disks travel first: {used} MiB in about {seconds:.0} s");
        }
        Ok(Forecast { prediction, disks, why, guest: conditions.guest_figures(), lanes })
    }

    /// Asks the destination for its checks; returns the lanes that the migration would use.
    /// `control`: of a migration that has begun.
    pub(super) async fn check_at_destination(
        &self,
        qemu: &godwit_qemu::QemuInfo,
        control: Option<&MigrationControl>,
    ) -> Result<Vec<Lane>, Fault> {
        let firmware = self.agent.outgoing_firmware(&self.vm, false).await?;
        let request = IncomingRequest { firmware, ..self.incoming_request(qemu) };
        let ask = || self.peer.post_incoming("/v1/incoming/checks", &request);
        let checked: IncomingChecked = self.answer(control, ask).await?;
        let ours = network::near(&self.agent.config().migration_addresses).await;
        let theirs: Vec<_> =
            checked.addresses.into_iter().map(|ip| SocketAddr::new(ip, 0)).collect();
        let lanes = godwit_lanes::pair(&ours, &theirs);
        self.check_streams(lanes.len()).map_err(|failure| failure.to_fault())?;
        Ok(lanes)
    }

    /// Observes what the guest writes and holds, and whether it could be throttled. Ends the
    /// tracking.
    async fn observe(&self, tracker: Tracker) -> Result<(GuestSeen, bool), Ended> {
        let regions = self.vm.regions();
        let surveyed = tokio::task::spawn_blocking(move || survey(&regions));
        let mut looking = Looking::new(tracker, &self.vm.regions());
        tokio::task::block_in_place(|| looking.begin()).map_err(|why| self.not_trackable(&why))?;
        for at in LOOKS {
            tokio::select! {
                () = tokio::time::sleep_until((looking.begun() + at).into()) => {}
                () = self.vm.tracking.wanted() => return Err(self.gives_way().into()),
            }
            tokio::task::block_in_place(|| looking.count())
                .map_err(|why| self.not_trackable(&why))?;
        }
        let all =
            surveyed.await.map_err(|error| host_failed("cannot survey guest memory", &error))?;
        let all = all.map_err(|why| self.not_trackable(&why))?;
        tokio::task::block_in_place(|| {
            let seen = looking.seen(all).map_err(|why| self.not_trackable(&why))?;
            let mut tracker = looking.tracker;
            // The throttle is set up and lifted at once, without memory under it.
            let may_throttle =
                tracker.throttle(Some(PREPARED_PAGES_PER_S)).and_then(|()| tracker.throttle(None));
            let may_throttle = may_throttle.inspect_err(|error| {
                tracing::warn!(vm = self.vm.name.as_str(), %error, "cannot throttle the guest");
            });
            Ok((seen, may_throttle.is_ok()))
        })
    }

    /// Measures the lanes with a short probe. If no probe is possible now, uses recent
    /// measurements.
    async fn lanes_carry(&self) -> Result<LanesCarry, Ended> {
        let seen = self.agent.lanes_seen();
        let probe = tokio::select! {
            probe = probe::brief(&self.agent, &self.request.to, self.request.streams) => probe,
            () = self.vm.tracking.wanted() => return Err(self.gives_way().into()),
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
            let message = format!("cannot measure the lanes to host {to}: {why}");
            ApiError::new(ErrorCode::PeerUnreachable, message, format!("see `godwit probe {to}`"))
                .into()
        })
    }

    fn gives_way(&self) -> ApiError {
        let message = format!("the dry run gave way to a migration of VM \"{}\"", self.vm.name);
        ApiError::new(ErrorCode::Busy, message, "see `godwit migration list`")
    }
}
