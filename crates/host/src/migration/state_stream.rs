//! QEMU's own migration reduced to the device state: all RAM that we move ourselves is left out of its stream.

use godwit_migration::Failure;
use godwit_qemu::{
    EVENTS, LATE_BLOCK_ACTIVATE, PAUSE_BEFORE_SWITCHOVER, Qmp, QmpError, X_IGNORE_SHARED,
};
use godwit_types::FailureCode;
use serde_json::json;

/// The name under which QEMU gets its end of the stream.
pub(super) const STREAM: &str = "godwit-state";

/// No limit that matters: the stream is small and its pace is the lane's.
pub(super) const UNLIMITED_BYTES_PER_S: u64 = 1 << 40;

/// What other engines may have switched on, and this stream must not have.
const FOREIGN: [&str; 3] = ["multifd", "postcopy-ram", "auto-converge"];

/// Prepares one side's QEMU. The same on both sides, as QEMU requires.
pub(super) async fn set_up(qmp: &Qmp, source: bool) -> Result<(), QmpError> {
    let mut capabilities =
        vec![(EVENTS, true), (X_IGNORE_SHARED, true), (PAUSE_BEFORE_SWITCHOVER, source)];
    // The shadow takes the disks' locks when it is told to run, which is after the commit, and not when it has loaded.
    capabilities.push((LATE_BLOCK_ACTIVATE, !source));
    capabilities.extend(FOREIGN.map(|name| (name, false)));
    qmp.migrate_set_capabilities(&capabilities).await?;
    qmp.migrate_set_parameters(json!({ "max-bandwidth": UNLIMITED_BYTES_PER_S })).await
}

/// Takes back what [`set_up`] set.
pub(super) async fn reset(qmp: &Qmp) -> Result<(), QmpError> {
    let ours = [X_IGNORE_SHARED, PAUSE_BEFORE_SWITCHOVER, LATE_BLOCK_ACTIVATE];
    qmp.migrate_set_capabilities(&ours.map(|name| (name, false))).await
}

/// A QMP error as the migration tells it; `host` is where it happened.
pub(super) fn qemu_failure(host: &str, what: &str, error: &QmpError) -> Failure {
    Failure::new(
        FailureCode::HypervisorFailed,
        format!("QEMU on host {host} would not {what}: {error}"),
    )
}
