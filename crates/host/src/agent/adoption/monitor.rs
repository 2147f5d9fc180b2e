//! The monitor of another program's QEMU: by libvirt, which has the only connection to it, or by
//! its QMP socket.

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use godwit_api::{ApiError, ErrorCode, ForeignPlace};
use godwit_qemu::{
    LATE_BLOCK_ACTIVATE, PAUSE_BEFORE_SWITCHOVER, Qmp, QmpError, Uuid, X_IGNORE_SHARED,
};
use godwit_types::Fault;
use serde_json::{Value, json};

use crate::agent::adoption::findings::{pause, refusal};
use crate::agent::adoption::found::{self, ForeignProcess};
use crate::agent::adoption::virsh::Virsh;
use crate::config::LibvirtConfig;
use crate::state_stream::UNLIMITED_BYTES_PER_S;

/// Name of the other QEMU's end of the stream.
const STREAM: &str = "godwit-adoption";
/// Time for the other QEMU to end a cancelled migration, and to run its guest again.
const TAKE_BACK_LIMIT: Duration = Duration::from_secs(20);
/// Time for the other QEMU to end.
const END_LIMIT: Duration = Duration::from_secs(20);
/// Longest pause that its QEMU may plan.
const DOWNTIME_MS: u64 = 100;
/// Capabilities that the stream must not have.
const WITHOUT: [&str; 9] = [
    X_IGNORE_SHARED,
    PAUSE_BEFORE_SWITCHOVER,
    LATE_BLOCK_ACTIVATE,
    "multifd",
    "postcopy-ram",
    "xbzrle",
    "compress",
    "return-path",
    "background-snapshot",
];

/// A connection to the monitor.
#[derive(Debug)]
pub(super) struct Monitor {
    way: Way,
    process: Option<ForeignProcess>,
    /// Capabilities and parameters that it had.
    before: tokio::sync::Mutex<Option<(Value, Value)>>,
    autostart: bool,
}

#[derive(Debug)]
enum Way {
    Libvirt { virsh: Box<Virsh>, name: String },
    Qmp(Qmp),
}

/// State of the other QEMU's migration.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Sent {
    /// QEMU's word for its status; empty before the first migration.
    pub(super) status: String,
    pub(super) remaining_bytes: u64,
    /// Time for which it says that the guest stood still there.
    pub(super) downtime_ms: Option<f64>,
    pub(super) why: Option<String>,
}

impl Sent {
    fn of(info: &Value) -> Sent {
        Sent {
            status: info["status"].as_str().unwrap_or_default().to_owned(),
            remaining_bytes: info["ram"]["remaining"].as_u64().unwrap_or(0),
            downtime_ms: info["downtime"].as_f64(),
            why: info["error-desc"].as_str().map(str::to_owned),
        }
    }

    /// Whether nothing is being sent.
    pub(super) fn is_over(&self) -> bool {
        matches!(self.status.as_str(), "" | "none" | "completed" | "failed" | "cancelled")
    }
}

impl Monitor {
    /// Opens the monitor of a guest, whose UUID at libvirt may be known already.
    pub(super) async fn open(
        libvirt: &LibvirtConfig,
        from: &ForeignPlace,
        known: Option<Uuid>,
    ) -> Result<Monitor, ApiError> {
        match from {
            ForeignPlace::Libvirt(name) => {
                let (virsh, name) = Virsh::open(libvirt, name, known).await?;
                let process = found::of_domain(libvirt, &name, virsh.uuid()).map_err(refusal)?;
                let autostart = starts_with_host(&virsh).await?;
                Ok(Monitor::new(
                    Way::Libvirt { virsh: Box::new(virsh), name },
                    Some(process),
                    autostart,
                ))
            }
            ForeignPlace::Qmp(path) => Monitor::of_socket(Path::new(path)).await,
        }
    }

    async fn of_socket(path: &Path) -> Result<Monitor, ApiError> {
        if !path.is_absolute() {
            let message = format!("{} is not an absolute path", path.display());
            return Err(ApiError::new(ErrorCode::InvalidRequest, message, "name the QMP socket"));
        }
        let (qmp, pid) = Qmp::connect_to_process(path).await.map_err(|error| {
            ApiError::new(ErrorCode::HypervisorFailed, error.to_string(), error.remedy())
        })?;
        Ok(Monitor::new(Way::Qmp(qmp), pid.and_then(ForeignProcess::of), false))
    }

    fn new(way: Way, process: Option<ForeignProcess>, autostart: bool) -> Monitor {
        Monitor { way, process, before: tokio::sync::Mutex::default(), autostart }
    }

    /// Opens the monitor of a guest if that very process still runs it.
    pub(super) async fn of_process(
        libvirt: &LibvirtConfig,
        from: &ForeignPlace,
        known: Option<Uuid>,
        process: &ForeignProcess,
    ) -> Result<Option<Monitor>, ApiError> {
        if !process.lives() {
            return Ok(None);
        }
        let monitor = Monitor::open(libvirt, from, known).await?;
        // Another guest may have that name by now.
        Ok((monitor.process.as_ref() == Some(process)).then_some(monitor))
    }

    /// Returns the UUID that libvirt names the guest by.
    pub(super) fn uuid(&self) -> Option<Uuid> {
        match &self.way {
            Way::Libvirt { virsh, .. } => Some(virsh.uuid()),
            Way::Qmp(_) => None,
        }
    }

    pub(super) fn process(&self) -> Result<ForeignProcess, Fault> {
        self.process.clone().ok_or_else(|| {
            Fault::new(
                "adoption-process",
                "the process of its QEMU cannot be found",
                "the agent must run on the guest's host, as root and outside of a container",
            )
        })
    }

    /// Runs a command.
    pub(super) async fn execute(&self, command: &str, arguments: Value) -> Result<Value, ApiError> {
        match &self.way {
            Way::Libvirt { virsh, .. } => virsh.execute(command, arguments).await,
            Way::Qmp(qmp) => qmp.execute(command, arguments).await.map_err(|error| failed(&error)),
        }
    }

    /// Runs a command without arguments.
    pub(super) async fn ask(&self, command: &str) -> Result<Value, ApiError> {
        self.execute(command, Value::Null).await
    }

    /// Returns what only libvirt knows of the guest.
    pub(super) async fn findings(&self) -> Vec<Fault> {
        let Way::Libvirt { virsh, name } = &self.way else { return Vec::new() };
        let fault = |code: &str, message: String, remedy: &str| Fault::new(code, message, remedy);
        match virsh.run("snapshot-list", &["--name"]).await {
            Ok(names) if names.trim().is_empty() => Vec::new(),
            Ok(_) => vec![fault(
                "adoption-snapshots",
                format!("domain \"{name}\" has snapshots, which libvirt alone knows"),
                "delete them: `virsh snapshot-list`, `virsh snapshot-delete`",
            )],
            Err(error) => vec![fault("adoption-snapshots", error.message, "")],
        }
    }

    /// Begins to send the guest to a stream.
    pub(super) async fn send_to(&self, stream: OwnedFd) -> Result<(), ApiError> {
        let capabilities = self.execute("query-migrate-capabilities", Value::Null).await?;
        let parameters = self.execute("query-migrate-parameters", Value::Null).await?;
        let known = capabilities
            .as_array()
            .into_iter()
            .flatten()
            .filter(|capability| WITHOUT.iter().any(|name| capability["capability"] == *name));
        let off: Vec<Value> = known
            .map(|capability| json!({"capability": capability["capability"], "state": false}))
            .collect();
        let before = json!({
            "max-bandwidth": parameters["max-bandwidth"],
            "downtime-limit": parameters["downtime-limit"],
        });
        *self.before.lock().await = Some((capabilities, before));
        self.execute("migrate-set-capabilities", json!({ "capabilities": off })).await?;
        let ours = json!({"max-bandwidth": UNLIMITED_BYTES_PER_S, "downtime-limit": DOWNTIME_MS});
        self.execute("migrate-set-parameters", ours).await?;
        self.give(stream).await?;
        let uri = json!({ "uri": format!("fd:{STREAM}") });
        let begun = self.execute("migrate", uri).await;
        if begun.is_err() {
            let _ = self.execute("closefd", json!({ "fdname": STREAM })).await;
        }
        begun.map(drop)
    }

    /// Lets a QEMU that waits load a guest from a stream. It takes the locks of its disks when it
    /// runs the guest.
    pub(super) async fn receive_from(&self, stream: OwnedFd) -> Result<(), ApiError> {
        let late = json!({"capability": LATE_BLOCK_ACTIVATE, "state": true});
        self.execute("migrate-set-capabilities", json!({ "capabilities": [late] })).await?;
        self.give(stream).await?;
        let uri = json!({ "uri": format!("fd:{STREAM}") });
        self.execute("migrate-incoming", uri).await.map(drop)
    }

    /// Runs a guest that is paused. libvirt learns of it.
    pub(super) async fn resume(&self) -> Result<(), ApiError> {
        let state = match &self.way {
            Way::Libvirt { virsh, .. } => virsh.resume().await?["status"].clone(),
            Way::Qmp(qmp) => {
                qmp.resume().await.map_err(|error| failed(&error))?;
                return Ok(());
            }
        };
        match state.as_str() {
            Some("running") => Ok(()),
            state => {
                let message = format!("libvirt did not resume it: it is {}", state.unwrap_or("?"));
                Err(ApiError::new(ErrorCode::HypervisorFailed, message, ""))
            }
        }
    }

    async fn give(&self, stream: OwnedFd) -> Result<(), ApiError> {
        match &self.way {
            Way::Libvirt { virsh, .. } => virsh.give(STREAM, stream).await,
            Way::Qmp(qmp) => {
                qmp.getfd(STREAM, stream.as_fd()).await.map_err(|error| failed(&error))
            }
        }
    }

    pub(super) async fn sent(&self) -> Result<Sent, ApiError> {
        self.execute("query-migrate", Value::Null).await.map(|info| Sent::of(&info))
    }

    /// Limits the rate of a migration; `None`: no limit.
    pub(super) async fn limit(&self, bytes_per_s: Option<u64>) -> Result<(), ApiError> {
        let limit = bytes_per_s.unwrap_or(UNLIMITED_BYTES_PER_S);
        self.execute("migrate-set-parameters", json!({ "max-bandwidth": limit })).await.map(drop)
    }

    /// Returns QEMU's word for the state of the guest.
    pub(super) async fn run_state(&self) -> Result<String, ApiError> {
        let status = self.execute("query-status", Value::Null).await?;
        Ok(status["status"].as_str().unwrap_or_default().to_owned())
    }

    pub(super) async fn cancel(&self) -> Result<(), ApiError> {
        self.execute("migrate_cancel", Value::Null).await.map(drop)
    }

    /// Ends a migration in any state, and runs the guest again. The new QEMU must have ended: it
    /// may have the locks of the disks.
    pub(super) async fn take_back(&self) -> Result<(), ApiError> {
        let limit = Instant::now() + TAKE_BACK_LIMIT;
        loop {
            let tried = self.try_take_back().await;
            match tried {
                Ok(true) => break,
                Err(error) if Instant::now() > limit => return Err(error),
                Ok(false) if Instant::now() > limit => {
                    let message = "the guest's QEMU does not resume it";
                    return Err(ApiError::new(ErrorCode::HypervisorFailed, message, ""));
                }
                _ => pause().await,
            }
        }
        let Some((capabilities, parameters)) = self.before.lock().await.take() else {
            return Ok(());
        };
        for (command, arguments) in [
            ("migrate-set-capabilities", json!({ "capabilities": capabilities })),
            ("migrate-set-parameters", parameters),
        ] {
            if let Err(error) = self.execute(command, arguments).await {
                tracing::warn!(%error, "cannot restore the settings of migrations");
            }
        }
        Ok(())
    }

    /// Whether the guest runs and no migration is under way; changes nothing.
    pub(super) async fn runs_untouched(&self) -> Result<bool, ApiError> {
        Ok(self.sent().await?.is_over() && self.run_state().await? == "running")
    }

    /// Returns whether the guest runs and no migration is under way.
    async fn try_take_back(&self) -> Result<bool, ApiError> {
        if !self.sent().await?.is_over() {
            self.cancel().await?;
            return Ok(false);
        }
        match self.run_state().await?.as_str() {
            "running" => Ok(true),
            "postmigrate" | "finish-migrate" => {
                self.execute("cont", Value::Null).await?;
                Ok(false)
            }
            state => {
                let message = format!("the guest's QEMU does not run it: its state is {state}");
                Err(ApiError::new(ErrorCode::HypervisorFailed, message, ""))
            }
        }
    }

    /// Ends the other QEMU, whose guest runs elsewhere. Returns what was done and what is left.
    pub(super) async fn end(&self, undefine: bool) -> Result<Vec<String>, ApiError> {
        match &self.way {
            Way::Qmp(qmp) => {
                // It may close the monitor before it answers: what counts is that it ends.
                let quit = qmp.quit().await;
                let limit = Instant::now() + END_LIMIT;
                while self.process.as_ref().is_none_or(ForeignProcess::lives) {
                    if Instant::now() > limit {
                        quit.map_err(|error| failed(&error))?;
                        let message = "the guest's QEMU does not end";
                        return Err(ApiError::new(ErrorCode::HypervisorFailed, message, ""));
                    }
                    pause().await;
                }
                Ok(Vec::new())
            }
            Way::Libvirt { virsh, name } => {
                virsh.run("destroy", &[]).await?;
                leave(virsh, name, self.autostart, undefine).await
            }
        }
    }
}

async fn starts_with_host(virsh: &Virsh) -> Result<bool, ApiError> {
    let info = virsh.run("dominfo", &[]).await?;
    let is_on =
        |line: &str| line.strip_prefix("Autostart:").is_some_and(|value| value.trim() == "enable");
    Ok(info.lines().any(is_on))
}

/// Keeps libvirt from starting a domain that Godwit has and whose QEMU has ended by itself.
pub(super) async fn leave_ended(
    libvirt: &LibvirtConfig,
    from: &ForeignPlace,
    known: Option<Uuid>,
    vm: &str,
    undefine: bool,
) -> Result<Vec<String>, ApiError> {
    let ForeignPlace::Libvirt(name) = from else { return Ok(Vec::new()) };
    let (virsh, name) = Virsh::open(libvirt, name, known).await?;
    if found::of_domain(libvirt, &name, virsh.uuid()).is_ok() {
        return Ok(vec![format!(
            "libvirt's domain \"{name}\" was started again, and VM \"{vm}\" is the same guest: \
             delete one of the two"
        )]);
    }
    let autostart = starts_with_host(&virsh).await?;
    leave(&virsh, &name, autostart, undefine).await
}

/// Keeps libvirt from starting a domain that Godwit has.
async fn leave(
    virsh: &Virsh,
    name: &str,
    autostart: bool,
    undefine: bool,
) -> Result<Vec<String>, ApiError> {
    let mut notes = Vec::new();
    if undefine {
        // The variables of its firmware and its TPM's state stay: they are files, not a definition.
        match virsh.run("undefine", &["--keep-nvram"]).await {
            Ok(_) => notes.push(format!("libvirt's domain \"{name}\" is undefined")),
            Err(error) => notes.push(format!("cannot undefine \"{name}\": {}", error.message)),
        }
        return Ok(notes);
    }
    if autostart {
        virsh.run("autostart", &["--disable"]).await?;
        notes.push(format!("libvirt's autostart of domain \"{name}\" is switched off"));
    }
    notes.push(format!(
        "libvirt's domain \"{name}\" is off and still defined: do not start it; `virsh undefine \
         --keep-nvram {name}` removes its definition"
    ));
    Ok(notes)
}

fn failed(error: &QmpError) -> ApiError {
    ApiError::new(ErrorCode::HypervisorFailed, error.to_string(), error.remedy())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_state_of_a_migration_is_read() {
        let sent = Sent::of(&json!({"status": "active", "ram": {"remaining": 4096}}));
        assert_eq!((sent.is_over(), sent.remaining_bytes), (false, 4096));
        assert!(Sent::of(&json!({})).is_over());
        let failed = Sent::of(&json!({"status": "failed", "error-desc": "no room"}));
        assert!(failed.is_over() && failed.why.as_deref() == Some("no room"));
        // Odd answers are no reason to panic.
        assert_eq!(Sent::of(&json!([1])), Sent::default());
        assert!(!Sent::of(&json!({"status": "device"})).is_over());
    }
}
