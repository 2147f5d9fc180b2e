//! QEMU's own migration reduced to the device state: its stream omits all RAM that Godwit moves
//! itself.

use std::time::{Duration, Instant};

use godwit_api::{ApiError, ErrorCode};
use godwit_migration::Failure;
use godwit_qemu::{
    Accelerator, AnnounceParameters, EVENTS, LATE_BLOCK_ACTIVATE, MigrationStatus,
    PAUSE_BEFORE_SWITCHOVER, Qmp, QmpError, QmpEvent, ResolvedSpec, X_IGNORE_SHARED,
};
use godwit_types::FailureCode;
use serde_json::json;
use tokio::sync::broadcast;

use crate::vm::Vm;

/// Name of QEMU's end of the stream.
pub(crate) const STREAM: &str = "godwit-state";

/// Effectively no limit: the stream is small, and the lane sets its pace.
pub(crate) const UNLIMITED_BYTES_PER_S: u64 = 1 << 40;

/// Time for QEMU to read, or to load, the device state. It normally takes milliseconds, during
/// which the guest is paused.
pub(crate) const LOAD_LIMIT: Duration = Duration::from_secs(10);

/// Time for QEMU to end a cancelled migration.
const CANCEL_LIMIT: Duration = Duration::from_secs(10);
/// Capabilities that other engines may have enabled and that this stream must not have.
const FOREIGN: [&str; 3] = ["multifd", "postcopy-ram", "auto-converge"];

/// Version from which QEMU under TCG is sound. Earlier versions lose writes to guest memory: when
/// QEMU takes its dirty bitmap word by word, it clears the bits but leaves the vCPUs' TLBs assuming
/// that they are set, and writes through those are not recorded again. ("physmem: Fix migration
/// dirty bitmap coherency with TCG memory access", QEMU 9.0.)
const SOUND_UNDER_TCG: (u32, u32, u32) = (9, 0, 0);
/// Memory for one word of QEMU's dirty bitmap: 64 pages. A RAM block whose size is not a multiple
/// of it is taken page by page, which is sound.
const BITMAP_WORD_BYTES: u64 = 64 * 4096;

/// Whether the migration of a QEMU of this version keeps the memory of a VM whole.
pub(crate) fn is_sound(spec: &ResolvedSpec, version: (u32, u32, u32)) -> bool {
    spec.accel != Accelerator::Tcg
        || version >= SOUND_UNDER_TCG
        || spec.memory.iter().all(|block| !block.size.bytes().is_multiple_of(BITMAP_WORD_BYTES))
}

/// Prepares one side's QEMU. Both sides get the same settings, as QEMU requires.
pub(crate) async fn set_up(qmp: &Qmp, source: bool) -> Result<(), QmpError> {
    let mut capabilities =
        vec![(EVENTS, true), (X_IGNORE_SHARED, true), (PAUSE_BEFORE_SWITCHOVER, source)];
    // The shadow locks the disks when the guest may run, after the commit, and not when its state
    // is loaded.
    capabilities.push((LATE_BLOCK_ACTIVATE, !source));
    capabilities.extend(FOREIGN.map(|name| (name, false)));
    qmp.migrate_set_capabilities(&capabilities).await?;
    qmp.migrate_set_parameters(json!({ "max-bandwidth": UNLIMITED_BYTES_PER_S })).await
}

/// Resets what [`set_up`] set.
pub(crate) async fn reset(qmp: &Qmp) -> Result<(), QmpError> {
    let ours = [X_IGNORE_SHARED, PAUSE_BEFORE_SWITCHOVER, LATE_BLOCK_ACTIVATE];
    qmp.migrate_set_capabilities(&ours.map(|name| (name, false))).await
}

/// Ends QEMU's migration in any state, and resumes the guest if it ran.
///
/// # Errors
/// The guest cannot be resumed here, or its QEMU does not answer.
pub(crate) async fn undo_hand_over(vm: &Vm, runs: bool) -> Result<(), ApiError> {
    roll_back(&vm.process.qmp, &vm.name, runs).await
}

pub(crate) async fn roll_back(qmp: &Qmp, vm: &str, runs: bool) -> Result<(), ApiError> {
    let limit = Instant::now() + CANCEL_LIMIT;
    let mut events = qmp.events();
    let failed = |what: &str, why: &dyn std::fmt::Display| {
        let message = format!("cannot {what} of VM \"{vm}\": QEMU: {why}");
        ApiError::new(
            ErrorCode::HypervisorFailed,
            message,
            "see its log with `godwit vm logs --qemu`",
        )
    };
    let mut cancelled = false;
    loop {
        let info = qmp
            .query_migrate()
            .await
            .map_err(|error| failed("read the migration status", &error))?;
        if info.status.as_ref().is_none_or(MigrationStatus::is_over) {
            break;
        }
        if !cancelled {
            qmp.migrate_cancel().await.map_err(|error| failed("cancel the migration", &error))?;
            cancelled = true;
        }
        // Waits for the next event or polls again: an event may have come before the subscription.
        let patience =
            limit.saturating_duration_since(Instant::now()).min(Duration::from_millis(20));
        if limit <= Instant::now() {
            return Err(failed(
                "end the migration",
                &format!("not within {} s", CANCEL_LIMIT.as_secs()),
            ));
        }
        let _ = tokio::time::timeout(patience, events.recv()).await;
    }
    if runs && !qmp.status().await.is_ok_and(|state| state.is_running()) {
        // This also takes back disks that were released for the destination (QEMU's qmp_cont).
        qmp.resume().await.map_err(|error| failed("resume the guest", &error))?;
        // The destination may have announced the addresses. Switches would send its frames there
        // until the guest itself sends one.
        if let Err(error) = qmp.announce_self(AnnounceParameters::default()).await {
            tracing::warn!(vm, %error, "cannot announce the addresses");
        }
    }
    if let Err(error) = reset(qmp).await {
        tracing::warn!(vm, %error, "cannot reset the migration capabilities");
    }
    Ok(())
}

/// Waits until a VM's QEMU has loaded the device state that it was given.
///
/// # Errors
/// What QEMU did instead.
pub(crate) async fn until_loaded(
    vm: &Vm,
    events: &mut broadcast::Receiver<QmpEvent>,
) -> Result<(), &'static str> {
    loop {
        let event = tokio::select! {
            event = events.recv() => event,
            _ = vm.process.exited() => return Err("ended while it loaded the device state"),
        };
        match event.as_ref().map(MigrationStatus::of_event) {
            Ok(Some(MigrationStatus::Completed)) => return Ok(()),
            Ok(Some(MigrationStatus::Failed)) => return Err("could not load the device state"),
            Ok(_) | Err(broadcast::error::RecvError::Lagged(_)) => {}
            Err(broadcast::error::RecvError::Closed) => return Err("closed its monitor"),
        }
    }
}

/// Converts a QMP error into a failure: QEMU on `host` could not `what` (a verb phrase).
pub(crate) fn qemu_failure(host: &str, what: &str, error: &QmpError) -> Failure {
    Failure::new(
        FailureCode::HypervisorFailed,
        format!("cannot {what} on host {host}: QEMU: {error}"),
    )
}
