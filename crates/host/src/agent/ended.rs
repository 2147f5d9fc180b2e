//! The end of a QEMU that no operation has ended: the VM becomes `stopped` if its guest shut itself
//! down, else `failed`. [`super::crashes`] decides whether it is restarted.
//!
//! The agent saves the end before it shows it. If the write fails, the VM is shown as in the old
//! record, and the agent retries until the end is saved.

use std::sync::Arc;
use std::time::Duration;

use godwit_api::{ApiError, CrashCause};
use godwit_migration::Failure;
use godwit_qemu::{CrashSign, Ended};
use godwit_types::{FailureCode, Outcome, Report};

use crate::agent::Agent;
use crate::hold::hold;
use crate::references::References;
use crate::store::{Desired, Role, SavedVm};
use crate::vm::{Condition, Operation, Vm};

/// Retry interval for saving an end whose write failed.
const SAVE_AGAIN: Duration = Duration::from_secs(1);
/// Time for a QEMU to report whether its guest has shut down, and to end if it has.
const SHUT_DOWN_LIMIT: Duration = Duration::from_secs(20);

/// Reason of a VM that is stopped because its guest powered itself off.
pub(crate) const SHUT_ITSELF_DOWN: &str = "the guest shut itself down";

/// State of a VM after the end of its process.
#[derive(Clone, Debug)]
struct End {
    condition: Condition,
    desired: Desired,
    reason: String,
    /// `None`: the guest shut itself down.
    crash: Option<CrashCause>,
}

impl End {
    fn of(vm: &Vm, ended: Ended) -> End {
        let (how, reason) = match ended.crash {
            // QEMU calls this a shutdown by the guest, too.
            Some(CrashSign::Panic) => (CrashCause::Panic, "the guest panicked".to_owned()),
            Some(CrashSign::Watchdog) => {
                (CrashCause::Watchdog, "the guest's watchdog ran out and ended QEMU".to_owned())
            }
            None if ended.guest_shut_down => {
                let (condition, desired) = (Condition::Stopped, Desired::Stopped);
                let reason = SHUT_ITSELF_DOWN.to_owned();
                return End { condition, desired, reason, crash: None };
            }
            None => {
                let words = vm.files.last_words();
                let words = words.unwrap_or_else(|| "its log has no message".to_owned());
                let pid = vm.process.pid;
                let reason =
                    format!("QEMU (process {pid}) ended by itself with {}: {words}", ended.exit);
                (CrashCause::QemuEnded, reason)
            }
        };
        let (condition, desired) = (Condition::Failed, Desired::Running);
        End { condition, desired, reason, crash: Some(how) }
    }
}

impl Agent {
    /// Saves and shows the end of a process. Does nothing if an operation has ended the process, or
    /// if a migration owns the VM: the migration settles it.
    pub(super) async fn process_ended(self: &Arc<Self>, vm: &Arc<Vm>, ended: Ended) {
        let end = self.end_of(vm, ended);
        if self.begin_end(vm, &end, false) {
            self.carry_end_out(vm, end);
        }
    }

    /// Ends a migration whose guest stays at its source and whose process has ended. A guest that
    /// was offered gets a new epoch.
    pub(super) async fn end_migration_of_ended(self: &Arc<Self>, vm: &Arc<Vm>) {
        let end = self.end_of(vm, vm.process.ended().await);
        if !self.begin_end(vm, &end, true) {
            return;
        }
        hold("end-migration");
        // An unreadable record may belong to a guest that was offered: no epoch is used twice.
        if self.record(&vm.name).is_none_or(|record| record.role == Role::HandingOver) {
            self.new_epoch(vm, vm.ownership().taken_back().epoch);
        }
        self.carry_end_out(vm, end);
        hold("migration-ended");
    }

    /// A VM that was ended because this host lost its term has failed, and did not crash: the
    /// manager, or the agents, say where it runs next.
    fn end_of(&self, vm: &Vm, ended: Ended) -> End {
        let spec = vm.spec();
        let guard = self.guard_of(&spec).ok().flatten();
        let guard = guard.unwrap_or_else(|| Arc::clone(self.ha()));
        let is_unexplained = ended.crash.is_none() && !ended.guest_shut_down;
        let by_watchdog = || {
            let may_be = is_unexplained && (spec.protect.is_some() || spec.protect_by_agents);
            if may_be { guard.cause_of_kill() } else { None }
        };
        match guard.cause_of_end(vm.process.pid, vm.process.start_time).or_else(by_watchdog) {
            Some(reason) => {
                End { condition: Condition::Failed, desired: Desired::Running, reason, crash: None }
            }
            None => End::of(vm, ended),
        }
    }

    /// Reserves the VM for saving its end: no other operation begins meanwhile. `of_migration`: the
    /// migration that owned the VM is over.
    fn begin_end(&self, vm: &Arc<Vm>, end: &End, of_migration: bool) -> bool {
        let mut table = self.table();
        let Some(slot) = table.get_mut(&vm.name) else { return false };
        let ours = slot.vm.as_ref().is_some_and(|known| Arc::ptr_eq(known, vm));
        if !ours || slot.condition.expects_exit() {
            return false;
        }
        let (name, reason) = (&vm.name, &end.reason);
        match &slot.condition {
            // The migration learns it from QMP and discards the shadow.
            Condition::MigratingIn { .. } => {
                tracing::warn!(vm = name.as_str(), reason, "QEMU of a shadow ended");
            }
            // The destination may already own the guest: the migration decides and settles it.
            Condition::MigratingOut { .. } => {
                tracing::error!(vm = name.as_str(), reason, "QEMU ended during a migration");
            }
            Condition::InDoubt { .. } | Condition::KeepsPages { .. } => {
                tracing::error!(vm = name.as_str(), reason, "QEMU ended");
                // The process has ended, but the doubt remains: the record stays.
                slot.vm = None;
                slot.condition = Condition::InDoubt { keeps_pages_for: None };
                slot.reason = Some(format!("another host may run it; on this host, {reason}"));
                return false;
            }
            _ => tracing::error!(vm = name.as_str(), reason, "QEMU ended"),
        }
        match slot.condition.admit(name, &Operation::NoteEnd { of_migration }) {
            Ok(next) => slot.condition = next,
            Err(_) => return false,
        }
        true
    }

    /// Saves a reserved end, then shows it. If the write fails, a task retries.
    fn carry_end_out(self: &Arc<Self>, vm: &Arc<Vm>, end: End) {
        hold("end-of-process");
        let saved = self.save_end(vm, &end);
        vm.files.remove_runtime();
        References::withdraw(vm);
        let Err(error) = saved else { return self.show_end(vm, end) };
        tracing::error!(vm = vm.name.as_str(), %error, "cannot save the VM's end; retrying");
        let reason =
            format!("{}; this could not be saved, retrying: {}", end.reason, error.message);
        self.settle(&vm.name, Condition::Failed, None, Some(reason));
        tokio::spawn(self.clone().save_end_later(vm.clone(), end));
    }

    /// Shows an end that is saved. What follows a crash is decided after that.
    fn show_end(self: &Arc<Self>, vm: &Vm, end: End) {
        self.settle(&vm.name, end.condition, None, Some(end.reason));
        if let Some(how) = end.crash {
            self.crashed(&vm.name, how);
        }
    }

    /// Saves the record of a VM that this host owns and that has ended.
    fn save_end(&self, vm: &Vm, end: &End) -> Result<(), ApiError> {
        let owner =
            SavedVm::new(vm.spec().as_ref().clone(), Role::Owner, end.desired, vm.ownership());
        let known = self.record(&vm.name);
        // Another host may have a shadow of the VM, which must still be removed.
        let other = known
            .as_ref()
            .filter(|known| known.role == Role::Owner && known.ownership() == owner.ownership())
            .and_then(|known| known.other.clone());
        let record = SavedVm { other, ..owner };
        if known.as_ref() == Some(&record) {
            return Ok(());
        }
        Ok(tokio::task::block_in_place(|| self.store.save(&record))?)
    }

    /// Saves an end whose write failed, as soon as the disk accepts it. Stops if another operation
    /// on the VM has begun: that one saves its own outcome.
    async fn save_end_later(self: Arc<Self>, vm: Arc<Vm>, end: End) {
        let Some((identity, shown)) = self.failed_without_process(&vm.name) else { return };
        let mut every = tokio::time::interval(SAVE_AGAIN);
        loop {
            every.tick().await;
            {
                let mut table = self.table();
                let slot = table.get_mut(&vm.name).filter(|slot| {
                    Arc::ptr_eq(&slot.identity, &identity)
                        && slot.vm.is_none()
                        && slot.reason == shown
                });
                let Some(slot) = slot else { return };
                match slot.condition.admit(&vm.name, &Operation::NoteEnd { of_migration: false }) {
                    Ok(next) => slot.condition = next,
                    Err(_) => return,
                }
            }
            if self.save_end(&vm, &end).is_ok() {
                tracing::info!(vm = vm.name.as_str(), "end of the VM saved");
                return self.show_end(&vm, end);
            }
            if let Some(slot) = self.table().get_mut(&vm.name) {
                slot.condition = Condition::Failed;
            }
        }
    }

    /// Returns the identity and the shown reason of a failed VM.
    fn failed_without_process(&self, name: &str) -> Option<(Arc<()>, Option<String>)> {
        let table = self.table();
        let slot = table
            .get(name)
            .filter(|slot| slot.condition == Condition::Failed && slot.vm.is_none())?;
        Some((slot.identity.clone(), slot.reason.clone()))
    }
}

/// Replaces the error of a migration that failed because its guest shut itself down. Returns after
/// the end of that QEMU.
pub(crate) async fn explain_shut_down(vm: &Vm, report: Report) -> Report {
    if report.outcome != Outcome::Failed {
        return report;
    }
    // QEMU's answer, or the end of its monitor, follows its earlier events.
    let _ = tokio::time::timeout(SHUT_DOWN_LIMIT, vm.is_running()).await;
    if !vm.process.qmp.guest_has_shut_down() {
        return report;
    }
    if tokio::time::timeout(SHUT_DOWN_LIMIT, vm.process.ended()).await.is_err() {
        tracing::warn!(
            vm = vm.name.as_str(),
            "the guest shut itself down, but its QEMU does not end"
        );
    }
    tracing::info!(vm = vm.name.as_str(), error = ?report.error, "the guest shut itself down");
    let failure = match vm.process.qmp.crash() {
        Some(CrashSign::Panic) => {
            let name = &vm.name;
            let detail = format!("the guest panicked: VM \"{name}\" has failed at its source");
            Failure::new(FailureCode::GuestShutDown, detail)
        }
        _ => shut_down(&vm.name),
    };
    Report { error: Some(failure.to_fault()), ..report }
}

/// Failure of a migration whose guest shut itself down before its hand-over.
pub(crate) fn shut_down(vm: &str) -> Failure {
    let detail =
        format!("{SHUT_ITSELF_DOWN}: VM \"{vm}\" is stopped at its source, and nothing was moved");
    Failure::new(FailureCode::GuestShutDown, detail)
}
