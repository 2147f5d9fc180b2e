//! The QMP commands that Godwit uses, typed. Names and fields as in QEMU 7.2 to 10.x; what a version lacks is
//! `None` or zero.

use std::fmt;
use std::os::fd::BorrowedFd;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::qmp::{Qmp, QmpError, QmpEvent};

/// Capability: shared file-backed RAM is left out of QEMU's stream. From 4.1; both sides must set it.
pub const X_IGNORE_SHARED: &str = "x-ignore-shared";
/// Capability: with the vCPUs stopped, QEMU waits for [`Qmp::migrate_continue`] before the device state. Source only.
///
/// It costs 1 ms of every switchover: before QEMU tells that it waits, it lets a semaphore run dry by a wait of 1 ms
/// (7.2 `migration_maybe_pause`), after [`STOP`]. Without it the state follows the stop at once; whoever relays the
/// stream can hold it back as well, and the source takes guest and disks back by [`Qmp::resume`].
pub const PAUSE_BEFORE_SWITCHOVER: &str = "pause-before-switchover";
/// Capability: an incoming VM takes its disks (and their locks) when it is let run, not when it is loaded, so that
/// until then the source can go on. Destination only.
pub const LATE_BLOCK_ACTIVATE: &str = "late-block-activate";
/// Capability: [`MIGRATION`] events.
pub const EVENTS: &str = "events";

/// Event: a migration's status changed.
pub const MIGRATION: &str = "MIGRATION";
/// Event: the vCPUs stopped. Disk requests under way may still write guest memory until the migration's status goes
/// past `active` (7.2 `do_vm_stop` tells this before it drains them).
pub const STOP: &str = "STOP";
/// Event: the vCPUs run.
pub const RESUME: &str = "RESUME";
/// Event: QEMU is about to end; `guest` in its data says whether the guest requested that. QEMU's main
/// loop sends it in the turn in which it finds the request: before it answers a later command, and
/// before the completion of a migration whose guest was stopped after the request (7.2
/// `main_loop_should_exit`).
pub const SHUTDOWN: &str = "SHUTDOWN";

/// What QEMU does with the guest (`query-status`).
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
    /// Stopped for the end of its migration away.
    FinishMigrate,
    /// Migrated away.
    Postmigrate,
    /// Powered off by the guest.
    Shutdown,
    /// KVM could not go on.
    InternalError,
    /// A disk failed.
    IoError,
    GuestPanicked,
    /// A state this version of Godwit doesn't know.
    #[serde(untagged)]
    Other(String),
}

impl RunState {
    #[must_use]
    pub fn name(&self) -> String {
        match serde_json::to_value(self) {
            Ok(Value::String(name)) => name,
            _ => "unknown".to_owned(),
        }
    }

    /// Whether the vCPUs run.
    #[must_use]
    pub fn is_running(&self) -> bool {
        *self == RunState::Running
    }

    /// Whether they run or have run in this process, by what they stand still for. A plain pause tells nothing: a shadow whose state is
    /// loaded is paused as well.
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

/// Where a migration of QEMU's is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MigrationStatus {
    /// None was begun.
    None,
    /// Connecting.
    Setup,
    Cancelling,
    /// Cancelled; the source runs.
    Cancelled,
    /// Memory travels.
    Active,
    /// Post-copy runs.
    PostcopyActive,
    /// Post-copy lost its link.
    PostcopyPaused,
    /// Post-copy gets its link back.
    PostcopyRecover,
    /// Done.
    Completed,
    /// Failed; see the error's description.
    Failed,
    /// vCPUs stopped, waits for [`Qmp::migrate_continue`].
    PreSwitchover,
    /// Device state travels.
    Device,
    /// Waits for a device's partner to go.
    WaitUnplug,
    /// A status this version of Godwit doesn't know.
    #[serde(untagged)]
    Other(String),
}

impl MigrationStatus {
    #[must_use]
    pub fn name(&self) -> String {
        match serde_json::to_value(self) {
            Ok(Value::String(name)) => name,
            _ => "unknown".to_owned(),
        }
    }

    /// Whether nothing of this migration goes on any more.
    #[must_use]
    pub fn is_over(&self) -> bool {
        use MigrationStatus as S;
        matches!(self, S::Completed | S::Failed | S::Cancelled | S::None)
    }

    /// The status that a [`MIGRATION`] event tells; `None` for other events.
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

/// What QEMU tells of its migration (`query-migrate`). Times in ms.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct MigrateInfo {
    /// `None` before the first migration.
    pub status: Option<MigrationStatus>,
    /// Figures of guest memory.
    pub ram: Option<RamInfo>,
    /// Since the migration began.
    pub total_time: Option<u64>,
    /// How long the vCPUs stood still.
    pub downtime: Option<u64>,
    /// How long they would if it ended now.
    pub expected_downtime: Option<u64>,
    /// How long the preparations took.
    pub setup_time: Option<u64>,
    /// Share of time that auto-converge takes from the vCPUs.
    pub cpu_throttle_percentage: Option<u64>,
    /// Why it failed.
    pub error_desc: Option<String>,
    /// Why the VM can't migrate now.
    pub blocked_reasons: Option<Vec<String>>,
}

/// QEMU's figures of guest memory in a migration. Sizes in bytes.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct RamInfo {
    /// Sent so far, with headers.
    pub transferred: u64,
    /// Still to send.
    pub remaining: u64,
    /// All of the guest's memory.
    pub total: u64,
    /// Zero pages so far.
    pub duplicate: u64,
    /// Pages sent whole so far.
    pub normal: u64,
    /// Bytes of those pages.
    pub normal_bytes: u64,
    /// Pages dirtied per second in the last round.
    pub dirty_pages_rate: u64,
    /// Rounds so far.
    pub dirty_sync_count: u64,
    /// Throughput in Mbit/s.
    pub mbps: f64,
    /// Pages asked for in post-copy.
    pub postcopy_requests: u64,
    pub multifd_bytes: u64,
    /// Pages sent per second.
    pub pages_per_second: u64,
    /// Bytes sent while the guest ran at the source.
    pub precopy_bytes: u64,
    /// Bytes sent while it stood still.
    pub downtime_bytes: u64,
    /// Bytes sent while it ran at the destination.
    pub postcopy_bytes: u64,
}

/// How the destination announces the guest's addresses (`announce-self`). Times in ms.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct AnnounceParameters {
    /// Before the second announcement; the first goes out at once.
    pub initial: u32,
    /// Longest time between two.
    pub max: u32,
    /// How many.
    pub rounds: u32,
    /// By how much the time between two grows.
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
            .map_err(|why| QmpError::Protocol { why: format!("the answer to {command}: {why}") })
    }

    /// What QEMU does with the guest.
    ///
    /// # Errors
    /// As [`Qmp::execute`]; so for all commands below.
    pub async fn status(&self) -> Result<RunState, QmpError> {
        #[derive(Deserialize)]
        struct Status {
            status: RunState,
        }
        Ok(self.query::<Status>("query-status").await?.status)
    }

    /// The threads that run the guest's processors, by their ids; one for all of them where TCG has them take turns.
    ///
    /// # Errors
    /// As [`Qmp::execute`].
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

    /// Stops the vCPUs; done when it returns.
    ///
    /// # Errors
    /// As [`Qmp::execute`].
    pub async fn stop(&self) -> Result<(), QmpError> {
        self.execute("stop", Value::Null).await.map(drop)
    }

    /// Ends QEMU. The guest is not asked.
    ///
    /// # Errors
    /// As [`Qmp::execute`].
    pub async fn quit(&self) -> Result<(), QmpError> {
        self.execute("quit", Value::Null).await.map(drop)
    }

    /// Presses the guest's power button.
    ///
    /// # Errors
    /// As [`Qmp::execute`].
    pub async fn system_powerdown(&self) -> Result<(), QmpError> {
        self.execute("system_powerdown", Value::Null).await.map(drop)
    }

    /// Has every network interface announce its hardware address (RARP), and guests that can, their own.
    ///
    /// # Errors
    /// As [`Qmp::execute`].
    pub async fn announce_self(&self, parameters: AnnounceParameters) -> Result<(), QmpError> {
        self.execute("announce-self", json!(parameters)).await.map(drop)
    }

    /// Gives QEMU a descriptor under a name, for the address `fd:NAME`. A descriptor given earlier under that name
    /// is closed.
    ///
    /// # Errors
    /// As [`Qmp::execute`].
    pub async fn getfd(&self, name: &str, fd: BorrowedFd<'_>) -> Result<(), QmpError> {
        self.execute_with_fd("getfd", json!({"fdname": name}), fd).await.map(drop)
    }

    /// Closes a descriptor given by [`Qmp::getfd`] that no command has taken.
    ///
    /// # Errors
    /// As [`Qmp::execute`]; also if there is none of that name.
    pub async fn closefd(&self, name: &str) -> Result<(), QmpError> {
        self.execute("closefd", json!({"fdname": name})).await.map(drop)
    }

    /// Begins to migrate away; returns when it has begun.
    ///
    /// # Errors
    /// As [`Qmp::execute`].
    pub async fn migrate(&self, uri: &str) -> Result<(), QmpError> {
        self.execute("migrate", json!({"uri": uri})).await.map(drop)
    }

    /// Says where the migration comes from, on a QEMU started with `-incoming defer`.
    ///
    /// # Errors
    /// As [`Qmp::execute`].
    pub async fn migrate_incoming(&self, uri: &str) -> Result<(), QmpError> {
        self.execute("migrate-incoming", json!({"uri": uri})).await.map(drop)
    }

    /// Lets a migration go on that waits in `state`, which is [`MigrationStatus::PreSwitchover`].
    ///
    /// # Errors
    /// As [`Qmp::execute`].
    pub async fn migrate_continue(&self, state: &MigrationStatus) -> Result<(), QmpError> {
        self.execute("migrate-continue", json!({"state": state})).await.map(drop)
    }

    /// Begins to cancel; the end is told by a [`MIGRATION`] event.
    ///
    /// # Errors
    /// As [`Qmp::execute`].
    pub async fn migrate_cancel(&self) -> Result<(), QmpError> {
        self.execute("migrate_cancel", Value::Null).await.map(drop)
    }

    /// Switches a running migration to post-copy.
    ///
    /// # Errors
    /// As [`Qmp::execute`].
    pub async fn migrate_start_postcopy(&self) -> Result<(), QmpError> {
        self.execute("migrate-start-postcopy", Value::Null).await.map(drop)
    }

    /// Sets capabilities; those not named stay.
    ///
    /// # Errors
    /// As [`Qmp::execute`]; also for one that this QEMU lacks.
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

    /// Sets parameters, an object as `migrate-set-parameters` takes it; those not named stay.
    ///
    /// # Errors
    /// As [`Qmp::execute`]; also for one that this QEMU lacks.
    pub async fn migrate_set_parameters(&self, parameters: Value) -> Result<(), QmpError> {
        self.execute("migrate-set-parameters", parameters).await.map(drop)
    }

    /// How the last or running migration stands.
    ///
    /// # Errors
    /// As [`Qmp::execute`].
    pub async fn query_migrate(&self) -> Result<MigrateInfo, QmpError> {
        self.query("query-migrate").await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_that_later_versions_bring_are_kept() {
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
        let answer = json!({"status": "active", "total-time": 5, "ram": {"total": 7, "mbps": 1.5, "skipped": 0},
            "expected-downtime": 300, "socket-address": []});
        let info: MigrateInfo = serde_json::from_value(answer).unwrap();
        assert_eq!(info.status, Some(MigrationStatus::Active));
        assert_eq!(info.ram.unwrap().total, 7);
        let empty: MigrateInfo = serde_json::from_value(json!({})).unwrap();
        assert_eq!(empty, MigrateInfo::default());
    }
}
