//! QEMU's own migration reduced to the device state: its stream omits all RAM that Godwit moves
//! itself.

use godwit_migration::Failure;
use godwit_qemu::{
    EVENTS, LATE_BLOCK_ACTIVATE, PAUSE_BEFORE_SWITCHOVER, Qmp, QmpError, X_IGNORE_SHARED,
};
use godwit_types::FailureCode;
use serde_json::json;

/// Name of QEMU's end of the stream.
pub(super) const STREAM: &str = "godwit-state";

/// Effectively no limit: the stream is small, and the lane sets its pace.
pub(super) const UNLIMITED_BYTES_PER_S: u64 = 1 << 40;

/// Capabilities that other engines may have enabled and that this stream must not have.
const FOREIGN: [&str; 3] = ["multifd", "postcopy-ram", "auto-converge"];

/// Prepares one side's QEMU. Both sides get the same settings, as QEMU requires.
pub(super) async fn set_up(qmp: &Qmp, source: bool) -> Result<(), QmpError> {
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
pub(super) async fn reset(qmp: &Qmp) -> Result<(), QmpError> {
    let ours = [X_IGNORE_SHARED, PAUSE_BEFORE_SWITCHOVER, LATE_BLOCK_ACTIVATE];
    qmp.migrate_set_capabilities(&ours.map(|name| (name, false))).await
}

/// Converts a QMP error into a failure: QEMU on `host` could not `what` (a verb phrase).
pub(super) fn qemu_failure(host: &str, what: &str, error: &QmpError) -> Failure {
    Failure::new(
        FailureCode::HypervisorFailed,
        format!("cannot {what} on host {host}: QEMU: {error}"),
    )
}
