//! The begin of a migration from this host: checks of the request, the task that carries it out,
//! and the report.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use godwit_api::{
    ApiError, ErrorCode, MAX_STREAMS_A_LANE, MigrationAccepted, MigrationRequest, TravellingDisks,
};
use godwit_migration::{MOST_SWITCHOVER_BUDGET, millis};
use godwit_qemu::{ThinPool, VmName, is_pool};
use godwit_types::{Compression, EngineKind, FailureCode, Fault, Outcome, ReferenceUse, Report};

use super::outgoing::{Outgoing, blank_report};
use crate::agent::Agent;
use crate::agent::ended::explain_shut_down;
use crate::guest_trip::{GuestProber, GuestTarget};
use crate::migrations::MigrationControl;
use crate::network::attach_watcher;
use crate::vm::Vm;

/// Longest downtime limit that QEMU accepts (`downtime-limit`).
const MOST_QEMU_BUDGET: Duration = Duration::from_secs(2000);
/// Longest migration ID that a client may choose, in bytes.
const MAX_ID_BYTES: usize = 64;

/// Begins a migration of a VM that runs here. It continues in its own task;
/// [`Agent::migrations`] reports on it.
pub(crate) fn migrate(
    agent: &Arc<Agent>,
    name: &VmName,
    request: MigrationRequest,
) -> Result<MigrationAccepted, ApiError> {
    check_request(agent, &request)?;
    let id = match &request.id {
        Some(id) if agent.migrations().begun(id, name, &request.to)? => {
            return Ok(MigrationAccepted { id: id.clone() });
        }
        Some(id) => id.clone(),
        None => agent.migrations().fresh_id(),
    };
    agent.check_whole(name)?;
    agent.refuse_snapshots(name, "migrated")?;
    let vm = agent.begin_migration(name, &id)?;
    let bytes = vm.spec().memory_bytes();
    agent.probes().give_way(name);
    let pace = agent.limits().migration(request.bandwidth_limit);
    let control =
        agent.migrations().register(&id, name, &agent.config().name, &request, bytes, pace);
    tokio::spawn(carry_out(Arc::clone(agent), vm, request, control));
    Ok(MigrationAccepted { id })
}

/// Checks what is independent of the VM in a request.
pub(super) fn check_request(agent: &Agent, request: &MigrationRequest) -> Result<(), ApiError> {
    check_budget(request)?;
    check_id(request.id.as_deref())?;
    if let Some(streams) = request.streams
        && !(1..=MAX_STREAMS_A_LANE).contains(&streams)
    {
        let message = format!("cannot use {streams} streams for each lane");
        let remedy = format!("give 1 to {MAX_STREAMS_A_LANE}");
        return Err(ApiError::new(ErrorCode::InvalidRequest, message, remedy));
    }
    if request.engine == EngineKind::Qemu && request.compression != Compression::default() {
        return Err(ApiError::new(
            ErrorCode::InvalidRequest,
            "only Godwit's own engine accepts compression",
            "leave it out; for QEMU's engine set qemu.compression with qemu.multifd_channels",
        ));
    }
    if let Some(disks) = &request.disks {
        check_disks(request.engine, disks)?;
    }
    // A request for no references matches what QEMU's engine does anyway.
    if request.engine == EngineKind::Qemu && request.references == ReferenceUse::Own {
        return Err(ApiError::new(
            ErrorCode::InvalidRequest,
            "only Godwit's own engine accepts references",
            "leave them out",
        ));
    }
    agent.peer(&request.to).map(drop)
}

/// Checks a request for disks that travel with the VM.
fn check_disks(engine: EngineKind, disks: &TravellingDisks) -> Result<(), ApiError> {
    if engine == EngineKind::Qemu {
        return Err(ApiError::new(
            ErrorCode::InvalidRequest,
            "only Godwit's own engine moves disks with a VM",
            "leave out engine: qemu, or put the disks where both hosts have them",
        ));
    }
    match disks.to.as_ref().filter(|to| !is_place(to)) {
        Some(to) => Err(ApiError::new(
            ErrorCode::InvalidRequest,
            format!("cannot move disks to {}: that is no absolute path", to.display()),
            "name a directory for VMs of the destination, a pool of Ceph as rbd:POOL, or a thin \
             pool as lvm:GROUP/POOL",
        )),
        None => Ok(()),
    }
}

/// Whether disks can be in a place, as far as its name tells.
fn is_place(to: &Path) -> bool {
    to.is_absolute() || is_pool(to) || ThinPool::of(to).is_some()
}

async fn carry_out(
    agent: Arc<Agent>,
    vm: Arc<Vm>,
    request: MigrationRequest,
    control: MigrationControl,
) {
    let id = control.id.clone();
    let (engine_began, begun) = (control.engine_began(), Instant::now());
    tracing::info!(
        vm = vm.name.as_str(),
        migration = id,
        to = request.to,
        engine = ?request.engine,
        "migration begins"
    );
    vm.tracking.take().await;
    agent.thaw_before_move(&vm).await;
    let probing = ask_guest(&agent, &vm, &control);
    let run = tokio::spawn(run(Arc::clone(&agent), vm.clone(), request.clone(), control));
    let run = run.await;
    if let Some(probing) = probing {
        probing.end().await;
    }
    // After a panic of the migration's task, the engine's thread may still run; it serves the
    // pages itself.
    let engine_ended = run.is_ok();
    let report = match run {
        Ok(report) => report,
        Err(error) => {
            defect(&agent, &vm, &request, begun, &error, engine_began.load(Ordering::Relaxed))
        }
    };
    let report = explain_shut_down(&vm, report).await;
    match report.outcome {
        // The engine has released the VM.
        Outcome::Completed => {}
        Outcome::Failed | Outcome::Cancelled => {
            agent.end_migration(&vm.name).await;
            let unnoticed =
                [FailureCode::LaneLost, FailureCode::GuestShutDown].map(FailureCode::name);
            let unnoticed =
                report.error.as_ref().is_some_and(|error| unnoticed.contains(&error.code.as_str()));
            // A request that had no answer may have made a shadow, which waits for the link.
            let is_repeated = request.disks.is_some();
            if unnoticed || is_repeated || report.outcome == Outcome::Cancelled {
                // The destination may not know that the migration ended.
                agent.forget_at(&vm, request.to.clone());
            }
        }
        Outcome::InDoubt => {
            agent.hold_in_doubt(&vm.name, &request.to).await;
            if engine_ended {
                agent.settle_doubt(&vm.name);
            }
        }
    }
    agent.lanes_seen().carried(&report);
    // One line with the whole report, for searches in logs.
    let line = serde_json::to_string(&report).unwrap_or_default();
    tracing::info!(
        vm = vm.name.as_str(),
        migration = id,
        outcome = ?report.outcome,
        report = line,
        "migration ends"
    );
    agent.migrations().finish(&id, report);
}

/// Migrates `vm` to `request.to`.
///
/// After [`Outcome::Completed`], the guest runs at the destination and [`Agent::release`] has been
/// called. After [`Outcome::Failed`] or [`Outcome::Cancelled`], the guest continues here. After
/// [`Outcome::InDoubt`], it is paused here.
async fn run(
    agent: Arc<Agent>,
    vm: Arc<Vm>,
    request: MigrationRequest,
    control: MigrationControl,
) -> Report {
    let begun = Instant::now();
    let peer = match agent.peer(&request.to) {
        Ok(peer) => peer,
        Err(error) => {
            let error = Some(Fault::from(error));
            return Report { error, ..blank_report(&agent, &vm, &request, begun, Outcome::Failed) };
        }
    };
    let outgoing = Outgoing { agent, vm, request, peer, begun, disks: None };
    match outgoing.request.engine {
        EngineKind::Godwit => outgoing.run(&control).await,
        EngineKind::Qemu => super::qemu_engine::run(&outgoing, &control).await,
    }
}

/// Measures the guest's response time until the result is dropped; `None` if the guest has no
/// address to probe.
fn ask_guest(agent: &Agent, vm: &Vm, control: &MigrationControl) -> Option<GuestProber> {
    let spec = vm.spec();
    let mut nics = spec.nics.iter();
    let (nic, target) = nics.find_map(|nic| Some((nic.clone(), GuestTarget::by(nic)?)))?;
    let network = agent.config().networks.get(&nic.network)?.clone();
    let (host, vm) = (agent.config().name.clone(), vm.name.to_string());
    let tap = async move {
        let tap = attach_watcher(&host, &vm, &nic, &network).await;
        tap.inspect_err(
            |error| tracing::warn!(vm, %error, "response time of the guest not measured"),
        )
        .ok()
    };
    Some(target.ask(tap, control.trips()))
}

/// Returns the report of a migration whose task panicked. If its engine had begun, the guest's
/// owner is unknown.
fn defect(
    agent: &Agent,
    vm: &Vm,
    request: &MigrationRequest,
    begun: Instant,
    error: &tokio::task::JoinError,
    engine_began: bool,
) -> Report {
    let outcome = if engine_began { Outcome::InDoubt } else { Outcome::Failed };
    let error = Fault {
        code: ErrorCode::HostFailed.to_string(),
        message: format!("the engine failed: {error}"),
        remedy: "this is a defect; see the agent's log, and `godwit vm list` for the host that \
                 runs the guest"
            .into(),
    };
    Report { error: Some(error), ..blank_report(agent, vm, request, begun, outcome) }
}

/// Checks a migration ID that a client chose: it appears in paths and logs.
fn check_id(id: Option<&str>) -> Result<(), ApiError> {
    let is_plain = |id: &str| {
        (1..=MAX_ID_BYTES).contains(&id.len())
            && id.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
    };
    if id.is_none_or(is_plain) {
        return Ok(());
    }
    let remedy = format!("use letters, digits and -, at most {MAX_ID_BYTES}");
    Err(ApiError::new(ErrorCode::InvalidRequest, "that is not a valid migration id", remedy))
}

/// Checks that the engine can keep the switchover budget. Godwit's engine aborts the switchover and
/// resumes a guest that has been stopped for ten seconds.
fn check_budget(request: &MigrationRequest) -> Result<(), ApiError> {
    let most = match request.engine {
        EngineKind::Godwit => MOST_SWITCHOVER_BUDGET,
        EngineKind::Qemu => MOST_QEMU_BUDGET,
    };
    let budget = request.switchover_budget_ms;
    if budget.is_finite() && budget > 0.0 && budget <= millis(most) {
        return Ok(());
    }
    let message = format!("cannot use a switchover budget of {budget} ms");
    let remedy = format!("use a time above zero and at most {} s, such as 20ms", most.as_secs());
    Err(ApiError::new(ErrorCode::InvalidRequest, message, remedy))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_budget_must_be_one_that_the_engine_can_keep() {
        let check = |engine, switchover_budget_ms| {
            check_budget(&MigrationRequest {
                engine,
                switchover_budget_ms,
                ..MigrationRequest::to("b")
            })
        };
        for good in [0.5, 20.0, 8000.0] {
            check(EngineKind::Godwit, good).unwrap();
            check(EngineKind::Qemu, good).unwrap();
        }
        check(EngineKind::Qemu, 2e6).unwrap();
        for bad in [0.0, -1.0, f64::NAN, f64::INFINITY, 2e6 + 1.0] {
            check(EngineKind::Qemu, bad).unwrap_err();
        }
        let error = check(EngineKind::Godwit, 9000.0).unwrap_err();
        assert_eq!(error.code, ErrorCode::InvalidRequest);
        assert!(error.message.contains("9000 ms") && error.remedy.contains("8 s"), "{error:?}");
    }
}
