//! What follows a crash of a VM: a note of it, and a restart if the VM's policy says so.
//!
//! A VM is restarted only where its record says that this host owns it and shall run it, and while
//! nothing of a migration, an adoption, a suspension or a doubt is open: its condition is then
//! `Failed`, and [`Operation::RestartCrashed`] is admitted in no other. What was planned is saved
//! before it is done, so that an agent that ends in between neither forgets nor repeats it. A crash
//! that no agent has seen is followed by questions to the other hosts, as a start with the host is.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use godwit_api::{ApiError, CrashCause};
use godwit_qemu::VmName;
use godwit_types::Ownership;

use crate::agent::autostart::{Verdict, boot_id};
use crate::agent::recovery::of_owner;
use crate::agent::{Agent, Slot};
use crate::crashes::{Crashes, Next};
use crate::hold::hold;
use crate::store::{Desired, Role, SavedVm};
use crate::vm::{Condition, Operation, Vm};
use crate::whole::whole;

/// Interval between two looks at a VM that may not be restarted yet.
const LOOK_AGAIN: Duration = Duration::from_secs(5);

/// A restart that is to come.
#[derive(Clone, Debug)]
struct Restart {
    name: VmName,
    /// Distinguishes the VM from a later one of its name.
    identity: Arc<()>,
    /// Why the VM is down.
    cause: String,
    /// The reason that it shows meanwhile. Another one shows that someone else has used the VM.
    shown: String,
    /// Whether the VM ended while no agent watched it.
    is_found: bool,
    /// Number of its plan: a later crash has another one.
    plan: u64,
}

/// Whether a restart may begin.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Gate {
    Open,
    Later(String),
    Closed(String),
}

impl Gate {
    /// Judges a VM's record; `ownership`: what the agent knows of the VM.
    fn of_record(record: Option<&SavedVm>, ownership: Ownership) -> Gate {
        let Some(record) = record else { return Gate::Closed("it has no record".to_owned()) };
        if record.role != Role::Owner || record.ownership() != ownership {
            return Gate::Closed("another host may have it".to_owned());
        }
        if record.desired != Desired::Running {
            return Gate::Closed("it shall not run".to_owned());
        }
        match &record.other {
            Some(other) => Gate::Later(format!("a copy of it may be at host {}", other.name)),
            None => Gate::Open,
        }
    }
}

impl Agent {
    /// Notes a crash of a VM, whose end is saved and shown, and restarts the VM if its policy says
    /// so.
    pub(super) fn crashed(self: &Arc<Self>, name: &VmName, how: CrashCause) {
        hold("crashed");
        self.follow_crash(name, how, false);
    }

    fn follow_crash(self: &Arc<Self>, name: &VmName, how: CrashCause, is_found: bool) {
        let Some((identity, cause)) = self.down(name) else { return };
        self.note_crash(name, how);
        let shown = cause.clone();
        let restart = Restart { name: name.clone(), identity, cause, shown, is_found, plan: 0 };
        if let Some((restart, after)) = self.plan_restart(restart) {
            tokio::spawn(self.clone().restart_later(restart, after));
        }
    }

    /// Notes that a guest's watchdog ran out, and that QEMU did something else than end.
    pub(super) fn watchdog_ran_out(&self, vm: &Arc<Vm>) {
        let now = now_unix_ms();
        let is_new = self.table().get(&vm.name).is_some_and(|slot| {
            let ours = slot.vm.as_ref().is_some_and(|known| Arc::ptr_eq(known, vm));
            // A guest can let it run out as often as it likes.
            let just_noted = |crashes: &Crashes| crashes.was_just_noted(CrashCause::Watchdog, now);
            ours && !slot.crashes.as_ref().is_some_and(just_noted)
        });
        if is_new {
            tracing::warn!(vm = vm.name.as_str(), "the guest's watchdog ran out");
            self.note_crash(&vm.name, CrashCause::Watchdog);
        }
    }

    /// At the agent's start, with all VMs in the table: continues the restarts that an earlier
    /// agent had planned, and restarts VMs that have ended since.
    pub(super) fn restart_found(self: &Arc<Self>) {
        let boot_id = boot_id();
        let all = |(name, slot): (&VmName, &Slot)| (name.clone(), slot.identity.clone());
        let vms: Vec<(VmName, Arc<()>)> = self.table().iter().map(all).collect();
        for (name, identity) in vms {
            let Some((_, cause)) = self.down(&name) else {
                self.end_wait(&name, &identity);
                continue;
            };
            let known =
                self.table().get(&name).map(|slot| (awaited(slot, &boot_id), slot.ended_unseen));
            match known {
                Some((Some((Next::Restart { after, number }, plan)), _)) => {
                    let shown = waiting(&cause, after, number);
                    self.show(&name, &cause, &shown);
                    let restart = Restart { name, identity, cause, shown, is_found: true, plan };
                    tokio::spawn(self.clone().restart_later(restart, after));
                }
                Some((_, true)) => self.follow_crash(&name, CrashCause::QemuEnded, true),
                // The host has started since: `autostart` says which VMs run.
                _ => self.end_wait(&name, &identity),
            }
        }
    }

    /// Continues the restart that is planned for a VM which has got another name.
    pub(super) fn continue_restart(self: &Arc<Self>, name: &VmName) {
        let Some((identity, shown)) = self.down(name) else { return };
        let boot_id = boot_id();
        let awaited = self.table().get(name).and_then(|slot| awaited(slot, &boot_id));
        let Some((Next::Restart { after, .. }, plan)) = awaited else { return };
        let (name, cause) = (name.clone(), shown.clone());
        let restart = Restart { name, identity, cause, shown, is_found: true, plan };
        tokio::spawn(self.clone().restart_later(restart, after));
    }

    /// Plans what follows a crash, or a restart that failed, and shows it. Returns the restart and
    /// the wait before it, if there is one.
    fn plan_restart(&self, restart: Restart) -> Option<(Restart, Duration)> {
        let (name, cause) = (&restart.name, &restart.cause);
        let policy = self.table().get(name)?.spec.on_crash;
        let (next, plan) = self.change_crashes(name, |crashes| {
            let next = crashes.plan(policy, &boot_id(), now_unix_ms());
            (next, crashes.plan_number())
        })?;
        let saved = self.save_crashes(name);
        let (after, number) = match next {
            Next::Restart { after, number } if saved => (after, number),
            Next::Restart { .. } => {
                self.end_plan(&Restart { plan, ..restart.clone() });
                let why = "that could not be noted; see the agent's log";
                self.show(name, &restart.shown, &format!("{cause}; it is not restarted: {why}"));
                return None;
            }
            Next::Limit(most) => {
                let shown = format!(
                    "{cause}; it is not restarted again: its policy allows {most} restarts within \
                     an hour, and it has had them; start it with `godwit vm start {name}`"
                );
                tracing::error!(vm = name.as_str(), most, "the limit of restarts is reached");
                self.show(name, &restart.shown, &shown);
                return None;
            }
            Next::NoPolicy => return None,
        };
        let shown = waiting(cause, after, number);
        let Some(identity) = self.show(name, &restart.shown, &shown) else {
            self.end_plan(&Restart { plan, ..restart });
            return None;
        };
        tracing::warn!(vm = name.as_str(), ?after, number, "restarting the VM after a crash");
        Some((Restart { shown, identity, plan, ..restart }, after))
    }

    async fn restart_later(self: Arc<Self>, mut restart: Restart, mut after: Duration) {
        // The guest may have died in a migration, whose shadow is at another host. At its start the
        // agent has seen to that already.
        if !restart.is_found
            && let Some(to) = self.record(&restart.name).as_ref().and_then(of_owner)
        {
            self.undo_migration(&restart.name, to);
        }
        loop {
            tokio::time::sleep(after).await;
            match self.gate(&restart).await {
                Gate::Open => {}
                Gate::Later(why) => {
                    after = LOOK_AGAIN;
                    let shown = format!("{}; it is not restarted yet: {why}", restart.cause);
                    if shown != restart.shown
                        && self.show(&restart.name, &restart.shown, &shown).is_some()
                    {
                        tracing::warn!(vm = restart.name.as_str(), why, "not restarted yet");
                        restart.shown = shown;
                    }
                    continue;
                }
                Gate::Closed(why) => {
                    tracing::info!(vm = restart.name.as_str(), why, "not restarted");
                    // Unless someone else has used it: then it shows something else.
                    let shown = format!("{}; it is not restarted: {why}", restart.cause);
                    self.show(&restart.name, &restart.shown, &shown);
                    return self.end_plan(&restart);
                }
            }
            hold("restart-crashed");
            let (agent, name) = (self.clone(), restart.name.clone());
            let started =
                whole(async move { agent.start_as(&name, &Operation::RestartCrashed).await });
            let Err(error) = started.await else {
                tracing::info!(vm = restart.name.as_str(), "restarted after a crash");
                return self.end_plan(&restart);
            };
            tracing::error!(vm = restart.name.as_str(), %error, "cannot restart the VM");
            restart.cause = format!("its restart failed: {error}");
            match self.plan_restart_again(restart) {
                Some((next, wait)) => (restart, after) = (next, wait),
                None => return,
            }
        }
    }

    /// Plans another restart after one that failed, unless the VM is no longer down by its crash.
    fn plan_restart_again(&self, restart: Restart) -> Option<(Restart, Duration)> {
        let is_same = self.down(&restart.name).is_some_and(|(identity, shown)| {
            Arc::ptr_eq(&identity, &restart.identity) && shown == restart.shown
        });
        if !is_same {
            self.end_plan(&restart);
            return None;
        }
        self.plan_restart(restart)
    }

    /// Whether a restart may begin now.
    async fn gate(&self, restart: &Restart) -> Gate {
        let here = self.gate_here(restart);
        if here != Gate::Open || !restart.is_found {
            return here;
        }
        let name = &restart.name;
        let uuid = self.table().get(name).map(|slot| slot.spec.uuid);
        let Some(uuid) = uuid else { return Gate::Closed("it is gone".to_owned()) };
        match Verdict::of(&self.answers_of_peers(name, uuid).await) {
            // The answers took time.
            Verdict::Start => self.gate_here(restart),
            Verdict::Later(why) => Gate::Later(why),
            Verdict::Never(why) => Gate::Closed(why),
        }
    }

    /// Whether a restart may begin now, as far as this host knows.
    fn gate_here(&self, restart: &Restart) -> Gate {
        let name = &restart.name;
        let found = self.table().get(name).map(|slot| {
            let gate = match (gate_of_slot(slot, restart), self.check_restart(&slot.spec)) {
                (Gate::Open, Err(without)) => Gate::Later(without.message),
                (gate, _) => gate,
            };
            (gate, slot.ownership)
        });
        match found {
            None => Gate::Closed("it is gone".to_owned()),
            Some((Gate::Open, ownership)) => self
                .gate_of_record(name, ownership)
                .unwrap_or_else(|error| Gate::Later(error.message)),
            Some((gate, _)) => gate,
        }
    }

    /// Judges what this host has saved about a VM and what is open.
    fn gate_of_record(&self, name: &VmName, ownership: Ownership) -> Result<Gate, ApiError> {
        let gate = Gate::of_record(self.read_record(name)?.as_ref(), ownership);
        if gate != Gate::Open {
            return Ok(gate);
        }
        let later = |why: &str| Ok(Gate::Later(why.to_owned()));
        if self.store.is_shared_with_other_program(name) {
            return later("its adoption, or its export, has not ended");
        }
        if self.page_ins.state(name).is_some() {
            return later("another host still has pages for it");
        }
        if tokio::task::block_in_place(|| self.store.disk_move(name))?.is_some() {
            return later("the move of a disk has not ended");
        }
        Ok(Gate::Open)
    }

    /// Returns the identity of a VM that is down by a crash, and why.
    fn down(&self, name: &VmName) -> Option<(Arc<()>, String)> {
        let table = self.table();
        let slot = table.get(name).filter(|slot| is_down(slot))?;
        Some((slot.identity.clone(), slot.reason.clone().unwrap_or_default()))
    }

    /// Shows another reason of a VM that is down, if it still shows the old one.
    fn show(&self, name: &VmName, old: &str, new: &str) -> Option<Arc<()>> {
        let mut table = self.table();
        let slot = table.get_mut(name).filter(|slot| is_down(slot))?;
        (slot.reason.as_deref().unwrap_or_default() == old).then(|| {
            slot.reason = Some(new.to_owned());
            slot.identity.clone()
        })
    }

    /// Notes that no restart of a VM is to come.
    fn end_wait(&self, name: &VmName, identity: &Arc<()>) {
        self.end_waits(name, identity, Crashes::end_wait);
    }

    /// Notes that a restart is not to come. One that a later crash has planned stays.
    fn end_plan(&self, Restart { name, identity, plan, .. }: &Restart) {
        self.end_waits(name, identity, |crashes| crashes.end_plan(*plan));
    }

    fn end_waits(&self, name: &VmName, identity: &Arc<()>, end: impl FnOnce(&mut Crashes) -> bool) {
        let is_awaited = self.table().get_mut(name).is_some_and(|slot| {
            let is_same = Arc::ptr_eq(&slot.identity, identity);
            is_same && slot.crashes.as_mut().is_some_and(end)
        });
        if is_awaited {
            self.save_crashes(name);
        }
    }

    /// Changes what is known of a VM's crashes.
    fn change_crashes<T>(
        &self,
        name: &VmName,
        change: impl FnOnce(&mut Crashes) -> T,
    ) -> Option<T> {
        let mut table = self.table();
        let slot = table.get_mut(name)?;
        let of_vm = || Crashes::default().of(slot.spec.uuid, slot.ownership.incarnation);
        Some(change(slot.crashes.get_or_insert_with(of_vm)))
    }

    /// Notes a crash. It is saved before it is shown: what was seen, the next agent knows as well.
    fn note_crash(&self, name: &VmName, how: CrashCause) {
        let at = now_unix_ms();
        let Some(mut noted) = self.change_crashes(name, |crashes| crashes.clone()) else { return };
        noted.note(how, at);
        self.write_crashes(name, &noted);
        self.change_crashes(name, |crashes| crashes.note(how, at));
    }

    /// Saves what is known of a VM's crashes; returns whether that worked.
    fn save_crashes(&self, name: &VmName) -> bool {
        let crashes = self.table().get(name).and_then(|slot| slot.crashes.clone());
        crashes.is_some_and(|crashes| self.write_crashes(name, &crashes))
    }

    fn write_crashes(&self, name: &VmName, crashes: &Crashes) -> bool {
        let saved = tokio::task::block_in_place(|| self.store.save_crashes(name, crashes));
        saved
            .inspect_err(|error| {
                tracing::error!(vm = name.as_str(), %error, "cannot note the VM's crashes");
            })
            .is_ok()
    }

    /// Reads what is known of a VM's crashes.
    pub(super) fn known_crashes(&self, slot: &Slot) -> Crashes {
        let noted = self.store.crashes(&slot.spec.name).unwrap_or_default();
        noted.of(slot.spec.uuid, slot.ownership.incarnation)
    }
}

/// Whether a VM of this host has no process and is shown as failed.
fn is_down(slot: &Slot) -> bool {
    slot.condition == Condition::Failed && slot.vm.is_none()
}

/// Returns the restart that an earlier agent of this boot has planned for a VM, and the plan's
/// number.
fn awaited(slot: &Slot, boot_id: &str) -> Option<(Next, u64)> {
    let crashes = slot.crashes.as_ref()?;
    Some((crashes.awaited(boot_id)?, crashes.plan_number()))
}

/// Judges a VM in the table.
fn gate_of_slot(slot: &Slot, restart: &Restart) -> Gate {
    let closed = |why: &str| Gate::Closed(why.to_owned());
    if !Arc::ptr_eq(&slot.identity, &restart.identity) {
        return closed("it is another VM of that name");
    }
    if slot.spec.on_crash.is_never() {
        return closed("its policy was changed");
    }
    match &slot.condition {
        Condition::Failed if slot.vm.is_some() => closed("it has a process"),
        Condition::Failed if slot.reason.as_deref() == Some(restart.shown.as_str()) => Gate::Open,
        // An operation that may leave it as it was.
        Condition::Starting
        | Condition::Stopping
        | Condition::Deleting
        | Condition::Changing
        | Condition::Copying(_) => Gate::Later("another operation is in progress".to_owned()),
        _ => closed("someone else has used it"),
    }
}

/// Reason of a VM that waits for its restart.
fn waiting(cause: &str, after: Duration, number: u32) -> String {
    let seconds = after.as_secs();
    format!("{cause}; it is restarted in {seconds} s, restart {number} within an hour")
}

fn now_unix_ms() -> u64 {
    let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since_1970.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use godwit_qemu::{OnCrash, ResolvedSpec};
    use godwit_types::Incarnation;

    use super::*;
    use crate::store::OtherHost;

    const OWN: Ownership = Ownership { incarnation: Incarnation::new(7), epoch: 3 };

    fn spec() -> ResolvedSpec {
        serde_json::from_value(serde_json::json!({
            "name": "web", "memory": [{"size": "64MiB"}], "vcpus": 1, "cpu_model": "Westmere-v1",
            "machine": "pc-q35-7.2", "accel": "tcg", "kernel": "/k", "on_crash": { "times": 3 },
        }))
        .unwrap()
    }

    fn slot(condition: Condition) -> (Slot, Restart) {
        let mut slot = Slot::new(spec(), OWN, condition);
        slot.reason = Some("it waits".to_owned());
        let restart = Restart {
            name: slot.spec.name.clone(),
            identity: slot.identity.clone(),
            cause: "QEMU ended".to_owned(),
            shown: "it waits".to_owned(),
            is_found: false,
            plan: 0,
        };
        (slot, restart)
    }

    #[test]
    fn only_an_owner_that_shall_run_the_vm_restarts_it() {
        let record = |role, desired, ownership| SavedVm::new(spec(), role, desired, ownership);
        let own = record(Role::Owner, Desired::Running, OWN);
        assert_eq!(Gate::of_record(Some(&own), OWN), Gate::Open);
        assert!(matches!(Gate::of_record(None, OWN), Gate::Closed(_)));
        for role in [Role::Shadow, Role::TakingOver, Role::HandingOver, Role::Stranded] {
            let other = record(role, Desired::Running, OWN);
            assert!(matches!(Gate::of_record(Some(&other), OWN), Gate::Closed(_)), "{role:?}");
        }
        for desired in [Desired::Stopped, Desired::Suspended, Desired::Template] {
            let off = record(Role::Owner, desired, OWN);
            assert!(matches!(Gate::of_record(Some(&off), OWN), Gate::Closed(_)), "{desired:?}");
        }
        for other in
            [Ownership { epoch: 4, ..OWN }, Ownership { incarnation: Incarnation::new(8), ..OWN }]
        {
            let newer = record(Role::Owner, Desired::Running, other);
            assert!(matches!(Gate::of_record(Some(&newer), OWN), Gate::Closed(_)));
        }
        let there = OtherHost { name: "b".to_owned(), needs_pages: false, runs: true };
        let gate = Gate::of_record(Some(&own.with(there)), OWN);
        assert!(matches!(gate, Gate::Later(why) if why.contains("host b")));
    }

    #[test]
    fn a_vm_that_someone_else_has_used_is_left_alone() {
        let (failed, restart) = slot(Condition::Failed);
        assert_eq!(gate_of_slot(&failed, &restart), Gate::Open);
        let (other, _) = slot(Condition::Failed);
        assert!(matches!(gate_of_slot(&other, &restart), Gate::Closed(_)), "another VM");
        let used = Restart { shown: "it waited".to_owned(), ..restart };
        assert!(matches!(gate_of_slot(&failed, &used), Gate::Closed(_)));
        let (mut never, restart) = slot(Condition::Failed);
        let policy = ResolvedSpec { on_crash: OnCrash::Never, ..spec() };
        never.spec = Arc::new(policy);
        assert!(matches!(gate_of_slot(&never, &restart), Gate::Closed(_)));
        let (busy, restart) = slot(Condition::Copying(Box::new(Condition::Failed)));
        assert!(matches!(gate_of_slot(&busy, &restart), Gate::Later(_)));
        for condition in [
            Condition::Stopped,
            Condition::Running,
            Condition::Paused,
            Condition::Suspended,
            Condition::InDoubt { keeps_pages_for: None },
            Condition::MigratingIn { from: "b".to_owned() },
            Condition::KeepsPages { to: "b".to_owned() },
        ] {
            let (slot, restart) = slot(condition);
            assert!(matches!(gate_of_slot(&slot, &restart), Gate::Closed(_)), "{slot:?}");
        }
    }
}
