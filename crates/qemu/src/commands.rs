//! Typed QMP commands that Godwit uses. Names and fields as in QEMU 7.2 to 10.x. A field that a
//! version lacks is `None` or zero.

use std::fmt;
use std::os::fd::BorrowedFd;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::qmp::{Qmp, QmpError, QmpEvent};

/// Capability: leaves shared file-backed RAM out of QEMU's stream. From QEMU 4.1; both sides must
/// set it.
pub const X_IGNORE_SHARED: &str = "x-ignore-shared";
/// Capability: with the vCPUs stopped, QEMU waits for [`Qmp::migrate_continue`] before the device
/// state. Source only.
///
/// It costs 1 ms of every switchover: before QEMU reports that it waits, it waits 1 ms for a
/// semaphore (7.2 `migration_maybe_pause`), after [`STOP`]. Without the capability the state
/// follows the stop at once. A relay of the stream can also hold the state back, and the source
/// takes guest and disks back by [`Qmp::resume`].
pub const PAUSE_BEFORE_SWITCHOVER: &str = "pause-before-switchover";
/// Capability: an incoming VM activates its disks (and takes their locks) when its vCPUs start, not
/// when it is loaded. Until then the source can resume. Destination only.
pub const LATE_BLOCK_ACTIVATE: &str = "late-block-activate";
/// Capability: [`MIGRATION`] events.
pub const EVENTS: &str = "events";

/// Event: a migration's status changed.
pub const MIGRATION: &str = "MIGRATION";
/// Event: the vCPUs stopped. Disk requests in flight may still write guest memory until the
/// migration's status is past `active` (7.2 `do_vm_stop` sends this event before it drains them).
pub const STOP: &str = "STOP";
/// Event: the vCPUs run.
pub const RESUME: &str = "RESUME";

/// State of the guest in QEMU (`query-status`).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RunState {
    /// The vCPUs run.
    Running,
    /// Stopped by `stop`, or started by `-S` and loaded.
    Paused,
    /// Started by `-S`, never run.
    Prelaunch,
    /// Waits for or loads a migration.
    Inmigrate,
    /// Stopped for the end of an outgoing migration.
    FinishMigrate,
    /// Migrated away.
    Postmigrate,
    /// Powered off by the guest.
    Shutdown,
    /// KVM could not continue.
    InternalError,
    /// A disk failed.
    IoError,
    GuestPanicked,
    /// A state that this version of Godwit does not know.
    #[serde(untagged)]
    Other(String),
}

/// Returns QEMU's name of a state.
fn name_of(state: &impl Serialize) -> String {
    match serde_json::to_value(state) {
        Ok(Value::String(name)) => name,
        _ => "unknown".to_owned(),
    }
}

impl RunState {
    #[must_use]
    pub fn name(&self) -> String {
        name_of(self)
    }

    /// Whether the vCPUs run.
    #[must_use]
    pub fn is_running(&self) -> bool {
        *self == RunState::Running
    }

    /// Whether the vCPUs run or have run in this process, judging by the reason of the stop. A
    /// plain pause proves nothing: a shadow with loaded state is paused as well.
    #[must_use]
    pub fn has_run(&self) -> bool {
        use RunState as S;
        match self {
            S::Running | S::IoError | S::InternalError | S::GuestPanicked | S::Shutdown => true,
            S::Other(state) => matches!(&**state, "watchdog" | "suspended" | "debug"),
            _ => false,
        }
    }
}

/// Status of QEMU's own migration.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MigrationStatus {
    /// No migration was begun.
    None,
    /// Connecting.
    Setup,
    Cancelling,
    /// Cancelled; the source runs.
    Cancelled,
    /// Memory is transferred.
    Active,
    /// Post-copy runs.
    PostcopyActive,
    /// Post-copy lost its connection.
    PostcopyPaused,
    /// Post-copy re-establishes its connection.
    PostcopyRecover,
    /// Completed.
    Completed,
    /// Failed; see the error's description.
    Failed,
    /// The vCPUs are stopped; QEMU waits for [`Qmp::migrate_continue`].
    PreSwitchover,
    /// Device state is transferred.
    Device,
    /// Waits until the guest has released a failover device.
    WaitUnplug,
    /// A status that this version of Godwit does not know.
    #[serde(untagged)]
    Other(String),
}

impl MigrationStatus {
    #[must_use]
    pub fn name(&self) -> String {
        name_of(self)
    }

    /// Whether the migration has ended.
    #[must_use]
    pub fn is_over(&self) -> bool {
        use MigrationStatus as S;
        matches!(self, S::Completed | S::Failed | S::Cancelled | S::None)
    }

    /// Returns the status in a [`MIGRATION`] event; `None` for other events.
    #[must_use]
    pub fn of_event(event: &QmpEvent) -> Option<MigrationStatus> {
        if event.name != MIGRATION {
            return None;
        }
        serde_json::from_value(event.data.get("status")?.clone()).ok()
    }
}

impl fmt::Display for MigrationStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.name())
    }
}

/// QEMU's figures of its migration (`query-migrate`). Times in ms.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct MigrateInfo {
    /// `None` before the first migration.
    pub status: Option<MigrationStatus>,
    /// Figures of guest memory.
    pub ram: Option<RamInfo>,
    /// Time since the migration began.
    pub total_time: Option<u64>,
    /// Time for which the vCPUs were stopped.
    pub downtime: Option<u64>,
    /// Downtime if the migration ended now.
    pub expected_downtime: Option<u64>,
    /// Duration of the preparations.
    pub setup_time: Option<u64>,
    /// Share of CPU time, in percent, that auto-converge takes from the vCPUs.
    pub cpu_throttle_percentage: Option<u64>,
    /// Why the migration failed.
    pub error_desc: Option<String>,
    /// Why the VM cannot migrate now.
    pub blocked_reasons: Option<Vec<String>>,
}

/// QEMU's figures of guest memory in a migration. Sizes in bytes.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct RamInfo {
    /// Bytes sent so far, with headers.
    pub transferred: u64,
    /// Bytes still to send.
    pub remaining: u64,
    /// Size of guest memory.
    pub total: u64,
    /// Zero pages sent so far.
    pub duplicate: u64,
    /// Full pages sent so far.
    pub normal: u64,
    /// Bytes of those pages.
    pub normal_bytes: u64,
    /// Pages dirtied per second in the last round.
    pub dirty_pages_rate: u64,
    /// Rounds so far.
    pub dirty_sync_count: u64,
    /// Throughput in Mbit/s.
    pub mbps: f64,
    /// Pages requested in post-copy.
    pub postcopy_requests: u64,
    pub multifd_bytes: u64,
    /// Pages sent per second.
    pub pages_per_second: u64,
    /// Bytes sent while the guest ran at the source.
    pub precopy_bytes: u64,
    /// Bytes sent while the guest was stopped.
    pub downtime_bytes: u64,
    /// Bytes sent while the guest ran at the destination.
    pub postcopy_bytes: u64,
}

/// Timing of the announcements of the guest's addresses by the destination (`announce-self`). Times
/// in ms.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct AnnounceParameters {
    /// Delay before the second announcement. The first is sent at once.
    pub initial: u32,
    /// Longest interval.
    pub max: u32,
    /// Number of announcements.
    pub rounds: u32,
    /// Increase of the interval after each announcement.
    pub step: u32,
}

impl Default for AnnounceParameters {
    /// QEMU's own defaults (7.2).
    fn default() -> AnnounceParameters {
        AnnounceParameters { initial: 50, max: 550, rounds: 5, step: 100 }
    }
}

impl Qmp {
    async fn query<T: DeserializeOwned>(&self, command: &str) -> Result<T, QmpError> {
        let answer = self.execute(command, Value::Null).await?;
        serde_json::from_value(answer)
            .map_err(|why| QmpError::Protocol { why: format!("the response to {command}: {why}") })
    }

    /// Returns the state of the guest.
    ///
    /// # Errors
    /// Those of [`Qmp::execute`].
    pub async fn status(&self) -> Result<RunState, QmpError> {
        #[derive(Deserialize)]
        struct Status {
            status: RunState,
        }
        Ok(self.query::<Status>("query-status").await?.status)
    }

    /// Returns the IDs of the vCPU threads. Under single-threaded TCG there is one for all vCPUs.
    ///
    /// # Errors
    /// Those of [`Qmp::execute`].
    pub async fn vcpu_threads(&self) -> Result<Vec<u32>, QmpError> {
        #[derive(Deserialize)]
        #[serde(rename_all = "kebab-case")]
        struct Cpu {
            thread_id: u32,
        }
        let cpus: Vec<Cpu> = self.query("query-cpus-fast").await?;
        let mut threads: Vec<u32> = cpus.into_iter().map(|cpu| cpu.thread_id).collect();
        threads.sort_unstable();
        threads.dedup();
        Ok(threads)
    }

    /// Stops the vCPUs. They are stopped when this returns.
    ///
    /// # Errors
    /// Those of [`Qmp::execute`].
    pub async fn stop(&self) -> Result<(), QmpError> {
        self.execute("stop", Value::Null).await.map(drop)
    }

    /// Ends QEMU without asking the guest.
    ///
    /// # Errors
    /// Those of [`Qmp::execute`].
    pub async fn quit(&self) -> Result<(), QmpError> {
        self.execute("quit", Value::Null).await.map(drop)
    }

    /// Presses the guest's power button.
    ///
    /// # Errors
    /// Those of [`Qmp::execute`].
    pub async fn system_powerdown(&self) -> Result<(), QmpError> {
        self.execute("system_powerdown", Value::Null).await.map(drop)
    }

    /// Sets the link of a NIC, as plugging its cable does.
    ///
    /// # Errors
    /// QEMU refuses it or does not respond.
    pub async fn set_link(&self, nic: &str, up: bool) -> Result<(), QmpError> {
        self.execute("set_link", json!({ "name": nic, "up": up })).await.map(drop)
    }

    /// Resets the guest, as its reset button does.
    ///
    /// # Errors
    /// Those of [`Qmp::execute`].
    pub async fn system_reset(&self) -> Result<(), QmpError> {
        self.execute("system_reset", Value::Null).await.map(drop)
    }

    /// Announces the hardware address of every network interface (RARP). Guests that support it
    /// also announce their own.
    ///
    /// # Errors
    /// Those of [`Qmp::execute`].
    pub async fn announce_self(&self, parameters: AnnounceParameters) -> Result<(), QmpError> {
        self.execute("announce-self", json!(parameters)).await.map(drop)
    }

    /// Passes a descriptor to QEMU under a name, for the address `fd:NAME`. Closes a descriptor
    /// passed earlier under that name.
    ///
    /// # Errors
    /// Those of [`Qmp::execute`].
    pub async fn getfd(&self, name: &str, fd: BorrowedFd<'_>) -> Result<(), QmpError> {
        self.execute_with_fd("getfd", json!({"fdname": name}), fd).await.map(drop)
    }

    /// Closes a descriptor from [`Qmp::getfd`] that no command has taken.
    ///
    /// # Errors
    /// Those of [`Qmp::execute`]; also if no descriptor has that name.
    pub async fn closefd(&self, name: &str) -> Result<(), QmpError> {
        self.execute("closefd", json!({"fdname": name})).await.map(drop)
    }

    /// Passes a descriptor to QEMU in a set of its own; returns the number of the set.
    ///
    /// # Errors
    /// Those of [`Qmp::execute`].
    pub(crate) async fn add_set(&self, owner: &str, fd: BorrowedFd<'_>) -> Result<i64, QmpError> {
        self.add_descriptor(owner, fd, "fdset-id").await
    }

    /// Passes a descriptor to QEMU in a set of its own; returns the number in the answer that is
    /// called `wanted`: `fdset-id` is that of the set, `fd` that of the descriptor.
    ///
    /// # Errors
    /// Those of [`Qmp::execute`].
    pub(crate) async fn add_descriptor(
        &self,
        owner: &str,
        fd: BorrowedFd<'_>,
        wanted: &str,
    ) -> Result<i64, QmpError> {
        let added = self.execute_with_fd("add-fd", json!({"opaque": owner}), fd).await?;
        added[wanted].as_i64().ok_or_else(|| QmpError::Protocol {
            why: format!("the response to add-fd has no {wanted}"),
        })
    }

    /// Begins an outgoing migration; returns once it has begun.
    ///
    /// # Errors
    /// Those of [`Qmp::execute`].
    pub async fn migrate(&self, uri: &str) -> Result<(), QmpError> {
        self.execute("migrate", json!({"uri": uri})).await.map(drop)
    }

    /// Sets the source address of an incoming migration, on a QEMU started with `-incoming defer`.
    ///
    /// # Errors
    /// Those of [`Qmp::execute`].
    pub async fn migrate_incoming(&self, uri: &str) -> Result<(), QmpError> {
        self.execute("migrate-incoming", json!({"uri": uri})).await.map(drop)
    }

    /// Continues a migration that waits in `state`, which is [`MigrationStatus::PreSwitchover`].
    ///
    /// # Errors
    /// Those of [`Qmp::execute`].
    pub async fn migrate_continue(&self, state: &MigrationStatus) -> Result<(), QmpError> {
        self.execute("migrate-continue", json!({"state": state})).await.map(drop)
    }

    /// Begins to cancel a migration. A [`MIGRATION`] event reports the end.
    ///
    /// # Errors
    /// Those of [`Qmp::execute`].
    pub async fn migrate_cancel(&self) -> Result<(), QmpError> {
        self.execute("migrate_cancel", Value::Null).await.map(drop)
    }

    /// Switches a running migration to post-copy.
    ///
    /// # Errors
    /// Those of [`Qmp::execute`].
    pub async fn migrate_start_postcopy(&self) -> Result<(), QmpError> {
        self.execute("migrate-start-postcopy", Value::Null).await.map(drop)
    }

    /// Sets capabilities. Others are left unchanged.
    ///
    /// # Errors
    /// Those of [`Qmp::execute`]; also for a capability that this QEMU lacks.
    pub async fn migrate_set_capabilities(
        &self,
        capabilities: &[(&str, bool)],
    ) -> Result<(), QmpError> {
        let list: Vec<Value> = capabilities
            .iter()
            .map(|(name, state)| json!({"capability": name, "state": state}))
            .collect();
        self.execute("migrate-set-capabilities", json!({"capabilities": list})).await.map(drop)
    }

    /// Sets parameters, given as an object of `migrate-set-parameters`. Others are left unchanged.
    ///
    /// # Errors
    /// Those of [`Qmp::execute`]; also for a parameter that this QEMU lacks.
    pub async fn migrate_set_parameters(&self, parameters: Value) -> Result<(), QmpError> {
        self.execute("migrate-set-parameters", parameters).await.map(drop)
    }

    /// Returns the state of the last or running migration.
    ///
    /// # Errors
    /// Those of [`Qmp::execute`].
    pub async fn query_migrate(&self) -> Result<MigrateInfo, QmpError> {
        self.query("query-migrate").await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_states_of_later_versions_are_kept() {
        let state = |name: &str| serde_json::from_value::<RunState>(name.into()).unwrap();
        assert_eq!(state("finish-migrate"), RunState::FinishMigrate);
        assert_eq!(state("levitating"), RunState::Other("levitating".into()));
        let status = |name: &str| serde_json::from_value::<MigrationStatus>(name.into()).unwrap();
        for name in ["none", "setup", "pre-switchover", "postcopy-recover-setup"] {
            assert_eq!(status(name).name(), name);
        }
        assert_eq!(status("pre-switchover"), MigrationStatus::PreSwitchover);
    }

    #[test]
    fn figures_of_every_version_are_read() {
        let answer = json!({
            "status": "active", "total-time": 5, "ram": {"total": 7, "mbps": 1.5, "skipped": 0},
            "expected-downtime": 300, "socket-address": []});
        let info: MigrateInfo = serde_json::from_value(answer).unwrap();
        assert_eq!(info.status, Some(MigrationStatus::Active));
        assert_eq!(info.ram.unwrap().total, 7);
        let empty: MigrateInfo = serde_json::from_value(json!({})).unwrap();
        assert_eq!(empty, MigrateInfo::default());
    }
}
