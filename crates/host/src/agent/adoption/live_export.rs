//! Live export: a running VM that was adopted goes back to the libvirt of its host without a stop.
//!
//! libvirt starts the domain with a QEMU that waits for a guest (`-incoming defer`), and paused.
//! If that one has the devices that the guest has, the VM's QEMU migrates to it, through the agent.
//! Who may run the guest:
//!
//! | step | may run | after a crash of the agent |
//! |---|---|---|
//! | note saved, libvirt's QEMU started | the VM's QEMU | libvirt's copy is ended |
//! | memory and device state sent | the VM's QEMU, paused at the end | ended, and resumed here |
//! | **note `committed` saved: the commit point** | libvirt's QEMU | libvirt's copy is resumed |
//! | `virsh resume`, record `stopped` saved | libvirt's QEMU | the VM's QEMU is ended |
//! | the VM's QEMU ended, note removed | libvirt's QEMU | – |
//!
//! Until then libvirt's QEMU has never run the guest, and has no locks of its disks.

mod domain;
mod recovery;

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use godwit_api::{ApiError, ErrorCode, ExportFormat, ForeignPlace, ImportFinding, JobStatus};
use godwit_qemu::{
    EVENTS, LATE_BLOCK_ACTIVATE, MigrateInfo, MigrationStatus, PAUSE_BEFORE_SWITCHOVER, QmpError,
    RunState, Uuid, VmName, X_IGNORE_SHARED, is_rbd,
};
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::agent::adoption::findings::pause;
use crate::agent::adoption::monitor::Monitor;
use crate::agent::adoption::transfer::{LOAD_LIMIT, POLL_INTERVAL, Relay, cancelled_here, relay};
use crate::agent::snapshots::refuse_any;
use crate::agent::{Agent, Begun};
use crate::failure::host_failed;
use crate::hold::hold;
use crate::jobs::{Job, JobRequest};
use crate::libvirt::is_unanswered;
use crate::references::References;
use crate::state_stream::{UNLIMITED_BYTES_PER_S, undo_hand_over};
use crate::store::{Desired, Role};
use crate::vm::{Condition, Operation, Vm};

use domain::Domain;

/// Name of the VM's end of the stream.
const STREAM: &str = "godwit-live-export";
/// Longest pause that its QEMU may plan.
const DOWNTIME_MS: u64 = 100;
/// Reason of a VM that is stopped because libvirt runs its guest.
const EXPORTED: &str = "libvirt runs its guest";

/// What survives the agent of a live export.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(in crate::agent) struct Note {
    /// Tells this attempt from others, also in the environment of libvirt's QEMU.
    id: Uuid,
    vm: VmName,
    /// UUID of the VM and of libvirt's domain.
    uuid: Uuid,
    /// Process of the VM: a later one of the same VM has nothing to do with this.
    pid: i32,
    start_time: u64,
    /// Whether libvirt's QEMU may run the guest, and the VM's never will again.
    committed: bool,
}

impl Note {
    fn of(vm: &Vm) -> Note {
        let (pid, start_time) = (vm.process.pid, vm.process.start_time);
        let uuid = vm.spec().uuid;
        let id = Uuid::new_v4();
        Note { id, vm: vm.name.clone(), uuid, pid, start_time, committed: false }
    }

    fn process(&self) -> (i32, u64) {
        (self.pid, self.start_time)
    }
}

impl Agent {
    /// Begins to give a running VM to libvirt.
    pub(in crate::agent) fn begin_live_export(
        self: &Arc<Self>,
        name: &VmName,
        format: ExportFormat,
    ) -> Result<JobStatus, ApiError> {
        if format != ExportFormat::Libvirt {
            let message = format!("cannot export VM \"{name}\" as an OVA: it runs");
            let remedy = format!("stop it first, or use `godwit vm export {name} --live`");
            return Err(ApiError::new(ErrorCode::InvalidRequest, message, remedy));
        }
        let begun = self.begin(name, &Operation::LiveExport)?;
        if let Err(refused) = Agent::refuse_own("give to libvirt", &begun.spec) {
            self.settle(name, begun.before, begun.vm, begun.reason);
            return Err(refused);
        }
        if begun.spec.protect.is_some() {
            // No guard ends what libvirt runs.
            self.settle(name, begun.before, begun.vm, begun.reason);
            let message = format!("cannot give VM \"{name}\" to libvirt: it is protected");
            let remedy = format!("end that first: `godwit vm set {name} --unset protect`");
            return Err(ApiError::new(ErrorCode::WrongState, message, remedy));
        }
        let settled = (begun.before.clone(), begun.vm.clone(), begun.reason.clone());
        let vm = name.clone();
        let job = self.begin_job(JobRequest::live_export(name), |agent, job| async move {
            agent.run_live_export(&job, &vm, begun).await
        });
        if job.is_err() {
            let (before, vm, reason) = settled;
            self.settle(name, before, vm, reason);
        }
        job
    }

    async fn run_live_export(
        self: &Arc<Self>,
        job: &Job,
        name: &VmName,
        mut begun: Begun,
    ) -> Result<(), ApiError> {
        let exported = match &begun.vm {
            Some(vm) => self.export_live(job, vm).await.map(|exported| (vm.clone(), exported)),
            None => Err(self.no_vm(name)),
        };
        match exported {
            Ok((vm, (note, findings))) => {
                let saved = self.save(&vm.spec(), Role::Owner, Desired::Stopped, vm.ownership());
                hold("live-export-resumed");
                vm.end(None).await;
                vm.files.remove_runtime();
                References::withdraw(&vm);
                match saved {
                    Ok(()) => self.drop_live_export(&note),
                    // The next agent saves it: the note says that the VM is stopped.
                    Err(error) => tracing::error!(vm = name.as_str(), %error, "cannot save a stop"),
                }
                self.settle(name, Condition::Stopped, None, Some(EXPORTED.to_owned()));
                tracing::info!(vm = name.as_str(), "libvirt runs its guest now");
                job.set(|status| status.findings = findings);
                Ok(())
            }
            Err(error) => {
                begun.lose_what_ended();
                match &begun.vm {
                    Some(vm) => {
                        let vm = vm.clone();
                        self.settle(name, begun.before, begun.vm, begun.reason);
                        self.notice_process(&vm).await;
                    }
                    None => {
                        let reason = format!("QEMU ended during a live export: {error}");
                        self.settle(name, Condition::Failed, None, Some(reason));
                    }
                }
                Err(error)
            }
        }
    }

    /// Moves the guest. On failure it runs on here, if its process lives.
    async fn export_live(
        &self,
        job: &Job,
        vm: &Arc<Vm>,
    ) -> Result<(Note, Vec<ImportFinding>), ApiError> {
        self.check_live_export(vm)?;
        let note = Note::of(vm);
        let domain = Domain::of(&self.config.libvirt, vm, note.id).await?;
        self.save_live_export(&note)?;
        self.thaw_before_move(vm).await;
        let handed = match self.hand_to_libvirt(job, vm, &domain, &note).await {
            Ok(handed) => handed,
            Err(error) => return Err(self.undo_live_export(vm, &domain, &note, error).await),
        };
        let pause_ms = handed.pause.as_secs_f64() * 1e3;
        let why = format!("libvirt has it, and it was paused for {pause_ms:.0} ms");
        let stays = format!(
            "the VM is stopped and still defined here: do not start it; `godwit vm delete {}` \
             removes its definition; do not add --delete-disks: libvirt's guest has these disks",
            vm.name
        );
        let mut notes = vec![("guest", why), (vm.name.as_str(), stays)];
        if let Some(error) = handed.not_resumed {
            let why = format!("run `virsh resume {}`: {}", domain.name, error.message);
            notes.push(("libvirt", why));
        }
        let finding = |(what, why): (&str, String)| ImportFinding {
            what: what.to_owned(),
            why,
            refuses: false,
        };
        let findings = notes.into_iter().map(finding).collect();
        Ok((note, findings))
    }

    /// Refuses a VM that libvirt cannot take as it is.
    fn check_live_export(&self, vm: &Vm) -> Result<(), ApiError> {
        let spec = vm.spec();
        let refuse = |why: &str, remedy: &str| {
            let message = format!("cannot give VM \"{}\" to libvirt: {why}", vm.name);
            Err(ApiError::new(ErrorCode::Preflight, message, remedy))
        };
        if spec.topology.is_none() {
            let why = "its devices have addresses of Godwit's choice, which libvirt does not use: \
                       only a guest that was adopted can go back while it runs";
            let remedy = format!(
                "stop it, then use `godwit vm export {} --to DIR --format libvirt`",
                vm.name
            );
            return refuse(why, &remedy);
        }
        if spec.autostart.is_some() {
            let remedy = format!("run `godwit vm set {} --unset autostart` first", vm.name);
            return refuse("it starts with its host, and so would a second copy", &remedy);
        }
        if let Some(disk) = spec.disks.iter().find(|disk| is_rbd(&disk.path)) {
            let why = format!("disk {} is in a pool of Ceph", disk.path.display());
            return refuse(&why, "move it to a file first, with `godwit disk move`");
        }
        self.check_whole(&vm.name)?;
        let known = self.table().get(&vm.name).map(|slot| slot.snapshots.clone());
        known.map_or(Ok(()), |known| refuse_any(&vm.name, &known, "given to libvirt"))
    }

    /// Starts libvirt's QEMU, sends it the guest, and lets libvirt run it. On failure the guest has
    /// not run there.
    async fn hand_to_libvirt(
        &self,
        job: &Job,
        vm: &Arc<Vm>,
        domain: &Domain,
        note: &Note,
    ) -> Result<HandedOver, ApiError> {
        let libvirt = &self.config.libvirt;
        domain.start_waiting(libvirt).await?;
        let from = ForeignPlace::Libvirt(domain.name.clone());
        let monitor = Monitor::open(libvirt, &from, Some(note.uuid)).await?;
        self.compare_devices(vm, &monitor).await?;
        let sent = Sending { job, vm, monitor: &monitor }.run().await?;
        hold("live-export-loaded");
        if !is_waiting(&monitor.run_state().await?) {
            let why = "libvirt's copy ended before the hand-over";
            let message = format!("cannot give VM \"{}\" to libvirt: {why}", vm.name);
            let remedy = "the guest runs on here; see the domain's log in /var/log/libvirt/qemu";
            return Err(ApiError::new(ErrorCode::MigrationFailed, message, remedy));
        }
        if !job.commit("libvirt has the guest, and runs it") {
            return Err(cancelled_here());
        }
        // The commit point: from here on libvirt's QEMU may run the guest.
        self.save_live_export(&Note { committed: true, ..note.clone() })?;
        hold("live-export-committed");
        let mut not_resumed = monitor.resume().await.err();
        // A request without an answer may still be carried out.
        let mut is_certain = !not_resumed.as_ref().is_some_and(is_unanswered);
        if let Some(error) = &not_resumed {
            tracing::warn!(vm = vm.name.as_str(), %error, "asking another virsh");
            not_resumed = domain.resume(libvirt).await.err();
            is_certain &= !not_resumed.as_ref().is_some_and(is_unanswered);
        }
        if let Some(error) = &not_resumed
            && is_certain
            && never_ran(error, &monitor).await
            // While the note says otherwise, the next agent would end the VM's QEMU.
            && self.save_live_export(note).is_ok()
        {
            return Err(error.clone());
        }
        let stopped = Duration::from_millis(sent.downtime_ms.unwrap_or_default());
        Ok(HandedOver { pause: stopped + sent.completed.elapsed(), not_resumed })
    }

    /// Ends libvirt's copy, which has not run, and lets the guest run here. Returns the error, with
    /// what could not be undone.
    async fn undo_live_export(
        &self,
        vm: &Vm,
        domain: &Domain,
        note: &Note,
        error: ApiError,
    ) -> ApiError {
        let undone = async {
            domain.end_copy(&self.config.libvirt).await?;
            undo_hand_over(vm, true).await
        };
        match undone.await {
            // libvirt may still start its copy: the next agent ends that one.
            Ok(()) if is_unanswered(&error) => error,
            Ok(()) => {
                self.drop_live_export(note);
                error
            }
            Err(_) if vm.process.exit().is_some() => error,
            Err(undo) => {
                let message = format!("{}; not undone: {}", error.message, undo.message);
                let remedy = format!(
                    "end libvirt's copy if it does not run (`virsh destroy {}`), then `godwit vm \
                     start {}`",
                    domain.name, vm.name
                );
                ApiError::new(ErrorCode::HypervisorFailed, message, remedy)
            }
        }
    }

    fn save_live_export(&self, note: &Note) -> Result<(), ApiError> {
        Ok(tokio::task::block_in_place(|| self.store.save_live_export(&note.vm, note))?)
    }

    /// Whether the note of an attempt is there, and not that of another one.
    fn is_noted(&self, note: &Note) -> bool {
        self.store.live_exports::<Note>().iter().any(|known| known.id == note.id)
    }

    /// Removes the note of an attempt, if it is that one's.
    fn drop_live_export(&self, note: &Note) {
        if !self.is_noted(note) {
            return;
        }
        let vm = &note.vm;
        if let Err(error) = tokio::task::block_in_place(|| self.store.remove_live_export(vm)) {
            // It names a process, and has no effect on another one.
            tracing::warn!(vm = vm.as_str(), %error, "cannot remove the note of a live export");
        }
    }
}

/// A guest that is libvirt's.
struct HandedOver {
    pause: Duration,
    /// Why it is not known whether libvirt runs it.
    not_resumed: Option<ApiError>,
}

/// Whether a state of libvirt's QEMU is one in which the guest has not run there.
fn is_waiting(state: &str) -> bool {
    matches!(state, "paused" | "inmigrate" | "prelaunch")
}

/// Whether libvirt certainly did not run the guest, although it was asked to.
async fn never_ran(error: &ApiError, monitor: &Monitor) -> bool {
    error.message.contains("domain is not running")
        || monitor.run_state().await.is_ok_and(|state| is_waiting(&state))
}

/// A guest on its way from the VM's QEMU to libvirt's.
struct Sending<'a> {
    job: &'a Job,
    vm: &'a Arc<Vm>,
    monitor: &'a Monitor,
}

/// A guest that libvirt's QEMU has whole.
struct Sent {
    /// Time for which the VM's QEMU says that the guest stood still.
    downtime_ms: Option<u64>,
    /// When that QEMU had sent everything.
    completed: Instant,
}

impl Sending<'_> {
    async fn run(&self) -> Result<Sent, ApiError> {
        let mut events = self.vm.process.qmp.events();
        let _relay = self.connect().await?;
        let mut poll = tokio::time::interval(POLL_INTERVAL);
        let info = loop {
            tokio::select! {
                _ = events.recv() => {}
                _ = poll.tick() => {}
            }
            if self.job.is_cancelled() {
                return Err(cancelled_here());
            }
            let info = self.vm.process.qmp.query_migrate().await;
            let info = info.map_err(|error| self.vm.hypervisor_failed("send the guest", &error))?;
            self.show(&info);
            match &info.status {
                Some(MigrationStatus::Completed) => break info,
                Some(MigrationStatus::Failed | MigrationStatus::Cancelled) => {
                    let why = info.error_desc.as_deref();
                    return Err(self.failed(why.unwrap_or("no reason given")));
                }
                _ => {}
            }
        };
        let completed = Instant::now();
        self.expect_loaded().await?;
        // A guest that shut itself down meanwhile is not handed over.
        match self.vm.process.qmp.status().await {
            Ok(RunState::Postmigrate) => Ok(Sent { downtime_ms: info.downtime, completed }),
            Ok(state) => Err(self.failed(&format!("it is in state {} afterwards", state.name()))),
            Err(error) => Err(self.vm.hypervisor_failed("send the guest", &error)),
        }
    }

    fn show(&self, info: &MigrateInfo) {
        let Some(ram) = &info.ram else { return };
        self.job.set(|status| {
            status.total_bytes = ram.total;
            status.done_bytes = ram.total.saturating_sub(ram.remaining);
        });
    }

    /// Connects the two QEMUs through the agent.
    async fn connect(&self) -> Result<Relay, ApiError> {
        let qmp = &self.vm.process.qmp;
        let failed = |error: QmpError| self.vm.hypervisor_failed("send the guest", &error);
        let pair =
            || UnixStream::pair().map_err(|error| host_failed("cannot make a socket", &error));
        let ((ours, from), (to, theirs)) = (pair()?, pair()?);
        self.monitor.receive_from(OwnedFd::from(theirs)).await?;
        qmp.migrate_set_capabilities(&[
            (EVENTS, true),
            (X_IGNORE_SHARED, false),
            (PAUSE_BEFORE_SWITCHOVER, false),
            (LATE_BLOCK_ACTIVATE, false),
            ("multifd", false),
            ("postcopy-ram", false),
            ("auto-converge", false),
        ])
        .await
        .map_err(failed)?;
        let limits = json!({"max-bandwidth": UNLIMITED_BYTES_PER_S, "downtime-limit": DOWNTIME_MS});
        qmp.migrate_set_parameters(limits).await.map_err(failed)?;
        qmp.getfd(STREAM, ours.as_fd()).await.map_err(failed)?;
        drop(ours);
        let relay =
            relay(from, to).map_err(|error| host_failed("cannot pass a stream on", &error))?;
        qmp.migrate(&format!("fd:{STREAM}")).await.map_err(failed)?;
        Ok(relay)
    }

    /// Waits until libvirt's QEMU has loaded everything, and has the guest paused.
    async fn expect_loaded(&self) -> Result<(), ApiError> {
        let limit = Instant::now() + LOAD_LIMIT;
        loop {
            let sent = self.monitor.sent().await?;
            match sent.status.as_str() {
                "completed" => break,
                "failed" => return Err(self.failed("libvirt's QEMU could not load it")),
                _ if Instant::now() > limit => {
                    return Err(self.failed("libvirt's QEMU did not load it"));
                }
                _ => pause().await,
            }
        }
        match self.monitor.run_state().await?.as_str() {
            "paused" => Ok(()),
            state => Err(self.failed(&format!("libvirt's QEMU has it in state {state}"))),
        }
    }

    fn failed(&self, why: &str) -> ApiError {
        let message = format!("cannot send VM \"{}\" to libvirt: {why}", self.vm.name);
        let remedy = "the guest runs on here; see `godwit vm logs --qemu`, and the domain's log in \
                      /var/log/libvirt/qemu";
        ApiError::new(ErrorCode::MigrationFailed, message, remedy)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_that_waits_has_not_run() {
        assert!(is_waiting("paused") && !is_waiting("running") && !is_waiting("io-error"));
    }
}
