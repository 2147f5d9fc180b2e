//! What survives the agent of an adoption: which guest of which process becomes which VM. It is
//! durable before anything is made, and removed when only one QEMU has the guest. The VM's record
//! says whose the guest is; the note says where the other QEMU is.

use std::sync::Arc;
use std::time::Duration;

use godwit_api::{AdoptGuest, ApiError, ErrorCode, ForeignPlace};
use godwit_migration::handover::{Known, Standing};
use godwit_qemu::{ResolvedSpec, Uuid, VmName};
use godwit_types::{Incarnation, Ownership};
use serde::{Deserialize, Serialize};

use crate::agent::Agent;
use crate::agent::adoption::found::ForeignProcess;
use crate::agent::adoption::monitor::{Monitor, leave_ended};
use crate::claims::{Claim, Process};
use crate::config::LibvirtConfig;
use crate::store::{Desired, Role, SavedVm};

/// Tries to note that a guest is Godwit's, and the time between two.
const COMMIT_TRIES: u32 = 10;
const COMMIT_AGAIN: Duration = Duration::from_secs(1);
/// First and longest wait before an undecided adoption is looked at again.
const DECIDE_AGAIN: Duration = Duration::from_secs(1);
const DECIDE_AGAIN_MOST: Duration = Duration::from_secs(300);

/// Note of an adoption.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Note {
    pub(super) from: ForeignPlace,
    /// UUID of libvirt's domain: its name may be another's later, or be taken for an ID.
    #[serde(default)]
    pub(super) uuid: Option<Uuid>,
    /// Process of the other QEMU.
    pub(super) pid: i32,
    pub(super) start_time: u64,
    /// Name of the VM at Godwit.
    pub(crate) vm: VmName,
    pub(super) ownership: Ownership,
    pub(super) undefine: bool,
    /// Whether the adoption is final: the guest may move away before the other QEMU has ended.
    #[serde(default)]
    pub(super) committed: bool,
    /// Whether the new QEMU never ran the guest and never will: the record may be gone already.
    #[serde(default)]
    pub(super) unrun: bool,
    /// The other host that the guest goes to, if it does. Then this host has no record of the VM.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) onto: Option<Destination>,
}

/// The host that an adopted guest goes to.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Destination {
    pub(super) host: String,
    /// UUID of the VM.
    pub(super) uuid: Uuid,
    /// Whether that host may run the guest: it may have been asked to.
    #[serde(default)]
    pub(super) offered: bool,
}

/// Whose a guest is whose adoption was cut off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Whose {
    Godwits,
    /// The new QEMU never ran it.
    OtherPrograms,
    /// Godwit's QEMU may have run it, and that is not decided.
    Open,
}

impl Whose {
    /// Decides by the role of the record of the VM, if there is one.
    fn of(note: &Note, role: Option<Role>) -> Whose {
        let may_be_shadow = matches!(role, None | Some(Role::Shadow | Role::TakingOver));
        match (note.committed || !may_be_shadow, note.unrun) {
            (true, _) => Whose::Godwits,
            (false, true) => Whose::OtherPrograms,
            (false, false) => Whose::Open,
        }
    }
}

impl Note {
    pub(super) fn of(
        request: &AdoptGuest,
        uuid: Option<Uuid>,
        process: &ForeignProcess,
        spec: &ResolvedSpec,
        ownership: Ownership,
    ) -> Note {
        Note {
            from: request.from.clone(),
            uuid,
            pid: process.pid,
            start_time: process.start_time,
            vm: spec.name.clone(),
            ownership,
            undefine: request.undefine,
            committed: false,
            unrun: false,
            onto: request.to.clone().map(|host| Destination {
                host,
                uuid: spec.uuid,
                offered: false,
            }),
        }
    }

    /// Opens the monitor of the other QEMU, if that very process still runs the guest.
    pub(super) async fn monitor(
        &self,
        libvirt: &LibvirtConfig,
    ) -> Result<Option<Monitor>, ApiError> {
        let process = ForeignProcess { pid: self.pid, start_time: self.start_time };
        Monitor::of_process(libvirt, &self.from, self.uuid, &process).await
    }

    /// Whether another guest's adoption of that VM's name must not replace this note yet.
    fn is_needed(&self) -> bool {
        let undecided = self.onto.as_ref().is_some_and(|to| to.offered) && !self.committed;
        let process = ForeignProcess { pid: self.pid, start_time: self.start_time };
        undecided || process.lives()
    }

    /// Whether the guest is the other program's, and only its undoing is left, if that.
    fn is_undone(&self) -> bool {
        let never_ran = self.onto.as_ref().map_or(self.unrun, |to| !to.offered);
        never_ran && !self.committed
    }

    fn process(&self) -> Process {
        (self.pid, self.start_time)
    }

    /// Whether a record is of the VM of this adoption.
    fn is_of(&self, record: &SavedVm) -> bool {
        record.incarnation == self.ownership.incarnation && record.spec.name == self.vm
    }
}

impl Agent {
    /// Refuses an adoption while an earlier one of that guest is undecided, or while the note of
    /// another guest has the VM's name. Drops the note of an earlier one that was undone: by hand,
    /// if the agent could not, because the guest runs.
    pub(super) fn check_notes(&self, note: &Note) -> Result<(), ApiError> {
        for other in self.store.adoptions::<Note>() {
            let is_same = other.process() == note.process();
            let blocks = match is_same {
                true => !other.is_undone(),
                false => other.vm == note.vm && other.is_needed(),
            };
            if blocks {
                let message = format!(
                    "cannot adopt {} as VM \"{}\": the adoption of {} as VM \"{}\" has not ended",
                    note.from, note.vm, other.from, other.vm
                );
                return Err(ApiError::new(ErrorCode::Busy, message, "see the agent's log"));
            }
            if is_same {
                self.drop_note(&other.vm);
            }
        }
        Ok(())
    }

    /// Returns what this host says, to a host that asks, of a guest that it gives to that host.
    pub(in crate::agent) fn known_of_adoption(
        &self,
        uuid: Uuid,
        incarnation: Incarnation,
    ) -> Option<Known> {
        let notes = self.store.adoptions::<Note>();
        let of_life = |note: &Note| Some((note.ownership, note.onto.clone()?));
        let (ownership, _) = notes.iter().filter_map(of_life).find(|(ownership, to)| {
            to.uuid == uuid && ownership.incarnation == incarnation && to.offered
        })?;
        Some(Known::Has(Standing { role: Role::HandingOver, ownership }))
    }

    pub(super) fn save_note(&self, note: &Note) -> Result<(), ApiError> {
        Ok(tokio::task::block_in_place(|| self.store.save_adoption(&note.vm, note))?)
    }

    /// Notes that the guest is Godwit's, before anything else can happen to the VM. Retries for a
    /// while: the disk may be full.
    pub(super) async fn commit_note(&self, note: &Note) -> Result<(), ApiError> {
        let committed = Note { committed: true, ..note.clone() };
        let mut tries = COMMIT_TRIES;
        loop {
            tries -= 1;
            match self.save_note(&committed) {
                Err(error) if tries > 0 => {
                    let vm = note.vm.as_str();
                    tracing::error!(vm, %error, "cannot note the end of an adoption; retrying");
                    tokio::time::sleep(COMMIT_AGAIN).await;
                }
                saved => return saved,
            }
        }
    }

    /// Notes that the new QEMU never ran the guest, before the record goes.
    pub(super) fn note_undone(&self, note: &Note) {
        if let Err(error) = self.save_note(&Note { unrun: true, ..note.clone() }) {
            tracing::error!(vm = note.vm.as_str(), %error, "cannot note that a guest has not run");
        }
    }

    pub(super) fn drop_note(&self, vm: &VmName) {
        if let Err(error) = tokio::task::block_in_place(|| self.store.remove_adoption(vm)) {
            // The next agent finds the guest as it is, and removes it.
            tracing::warn!(vm = vm.as_str(), %error, "cannot remove the note of an adoption");
        }
    }

    /// Before VMs are recovered: decides about a guest that may have run in a QEMU which is gone.
    /// No other host can be asked: both QEMUs were this host's. If the other one still has its
    /// paused copy, that one is older than the disks; so the VM is Godwit's, and it has ended.
    pub(in crate::agent) fn settle_adoptions(&self) -> Vec<Note> {
        let mut notes = self.store.adoptions::<Note>();
        for note in &mut notes {
            // Of a later epoch it would be a shadow of another host's.
            let Some(record) = self
                .record(&note.vm)
                .filter(|record| note.is_of(record) && record.ownership() == note.ownership)
            else {
                continue;
            };
            let files = self.places.vm(&note.vm);
            let may_have_run = record.role == Role::TakingOver && !files.is_unrun();
            // Recovery removes what says so.
            let is_shadow = matches!(record.role, Role::Shadow | Role::TakingOver);
            if is_shadow && !may_have_run && !note.committed {
                self.note_undone(note);
                note.unrun = true;
            }
            if may_have_run && files.living_process().is_none() {
                let mine = SavedVm::new(
                    record.spec.clone(),
                    Role::Owner,
                    Desired::Running,
                    record.ownership(),
                );
                if let Err(error) = self.save_over(Some(&record), &mine) {
                    // The VM is in doubt until `own_ended` has saved it.
                    tracing::error!(vm = note.vm.as_str(), %error, "an adoption is undecided");
                }
            }
        }
        notes
    }

    /// After VMs were recovered: ends the other QEMU of a guest that is Godwit's, and lets the
    /// other QEMU of a guest run it that never ran here. Waits for any other to be decided.
    pub(in crate::agent) fn end_adoptions(self: &Arc<Self>, notes: Vec<Note>) {
        for note in notes {
            // Before a request can adopt the guest again.
            let claim = self.claims.take(&note.vm, note.process()).ok();
            tokio::spawn(Arc::clone(self).end_adoption(note, claim));
        }
    }

    /// Decides an adoption that was cut off, and carries that out. Waits for the claim, if it has
    /// none yet.
    pub(super) async fn end_adoption(self: Arc<Self>, mut note: Note, mut claim: Option<Claim>) {
        while claim.is_none() {
            tokio::time::sleep(DECIDE_AGAIN).await;
            claim = self.claims.take(&note.vm, note.process()).ok();
        }
        if note.onto.is_some() {
            return self.end_adoption_onto_host(note).await;
        }
        let mut wait = DECIDE_AGAIN;
        loop {
            // Recovery may have written it since. What could not be saved holds all the same.
            match self.saved_note(note.ownership) {
                Some(saved) => note = Note { unrun: saved.unrun || note.unrun, ..saved },
                None => return,
            }
            let vm = note.vm.as_str();
            let record = self.record(&note.vm).filter(|record| note.is_of(record));
            // Only a record of the adoption's epoch can be its shadow.
            let role = record.as_ref().map(|record| match record.ownership() == note.ownership {
                true => record.role,
                false => Role::Owner,
            });
            let whose = Whose::of(&note, role);
            if whose == Whose::Open
                && let Some(record) = record
                && self.own_ended(record).await
            {
                continue;
            }
            match whose {
                Whose::Godwits => {
                    let committed = match note.committed {
                        true => Ok(()),
                        false => self.commit_note(&note).await,
                    };
                    let done = self.finish_adoption(&note).await;
                    return tracing::info!(vm, ?committed, ?done, "adoption completed");
                }
                Whose::OtherPrograms => return self.undo_adoption(&note).await,
                Whose::Open if role.is_none() && self.is_elsewhere(&note).await => {
                    tracing::warn!(vm, from = %note.from, "adoption undone");
                    return self.drop_note_if_same(&note);
                }
                Whose::Open => tracing::error!(
                    vm, from = %note.from,
                    "an adoption is undecided: the guest may have run at Godwit, so its copy there \
                     stays paused. Once the VM is Godwit's, that copy is ended. If the VM is gone, \
                     end the copy, or resume it if Godwit never ran it. If the VM is in doubt, \
                     make room in the agent's state_dir"
                ),
            }
            tokio::time::sleep(wait).await;
            wait = (wait * 2).min(DECIDE_AGAIN_MOST);
        }
    }

    /// Saves that a guest is Godwit's that may have run in a QEMU which is gone. The agent's start
    /// could not: its disk may have been full. Returns whether it is saved now.
    async fn own_ended(self: &Arc<Self>, record: SavedVm) -> bool {
        let files = self.places.vm(&record.spec.name);
        let may_have_run = record.role == Role::TakingOver && !files.is_unrun();
        if !may_have_run || files.living_process().is_some() {
            return false;
        }
        let name = record.spec.name.clone();
        let owned = self.own_what_is_gone(&name, record).await;
        if let Err(error) = &owned {
            tracing::error!(vm = name.as_str(), %error, "cannot save whose an adopted guest is");
        }
        owned.is_ok()
    }

    /// Lets the other QEMU run a guest that never ran here.
    async fn undo_adoption(&self, note: &Note) {
        let undone = async {
            match note.monitor(&self.config.libvirt).await? {
                Some(monitor) => monitor.take_back().await,
                None => Ok(()),
            }
        };
        match undone.await {
            Ok(()) => {
                tracing::warn!(vm = note.vm.as_str(), from = %note.from, "adoption undone");
                self.drop_note_if_same(note);
            }
            Err(error) => tracing::error!(
                vm = note.vm.as_str(), from = %note.from, %error,
                "cannot resume the guest of an interrupted adoption"
            ),
        }
    }

    /// Whether nothing is left to decide about a guest without a record: its other QEMU runs it,
    /// or has ended.
    async fn is_elsewhere(&self, note: &Note) -> bool {
        let asked = async {
            match note.monitor(&self.config.libvirt).await? {
                Some(monitor) => monitor.runs_untouched().await,
                None => Ok(true),
            }
        };
        asked.await.unwrap_or_else(|error: ApiError| {
            tracing::error!(vm = note.vm.as_str(), %error, "cannot ask the other QEMU of a guest");
            false
        })
    }

    /// Returns the note of an adoption: another one may have its name by now.
    pub(super) fn saved_note(&self, ownership: Ownership) -> Option<Note> {
        self.store.adoptions::<Note>().into_iter().find(|note| note.ownership == ownership)
    }

    /// Recovery found that the new QEMU of an arriving guest never ran it, and ends it.
    pub(in crate::agent) fn note_never_ran(&self, record: &SavedVm) {
        if let Some(note) = self.saved_note(record.ownership()).filter(|note| !note.committed) {
            self.note_undone(&note);
        }
    }

    pub(super) fn drop_note_if_same(&self, note: &Note) {
        if self.saved_note(note.ownership).is_some() {
            self.drop_note(&note.vm);
        }
    }

    /// Ends the other QEMU of a guest that Godwit runs. Returns what was done and what is left.
    pub(super) async fn finish_adoption(&self, note: &Note) -> Vec<String> {
        let libvirt = &self.config.libvirt;
        let ended = async {
            match note.monitor(libvirt).await? {
                Some(monitor) => monitor.end(note.undefine).await,
                None => leave_ended(libvirt, &note.from, note.uuid, &note.vm, note.undefine).await,
            }
        };
        match ended.await {
            Ok(notes) => {
                self.drop_note_if_same(note);
                notes
            }
            Err(error) => {
                tracing::error!(vm = note.vm.as_str(), %error, "cannot end the other QEMU");
                vec![format!(
                    "{} could not be ended: {}; its copy of the guest is paused and must not run: \
                     end it",
                    note.from, error.message
                )]
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn note(committed: bool, unrun: bool) -> Note {
        Note {
            from: ForeignPlace::Qmp("/qmp".to_owned()),
            uuid: None,
            pid: 1,
            start_time: 1,
            vm: VmName::new("web").unwrap(),
            ownership: Ownership { incarnation: Incarnation::new(1), epoch: 1 },
            undefine: false,
            committed,
            unrun,
            onto: None,
        }
    }

    #[test]
    fn a_guest_is_adopted_again_only_if_nothing_is_left_to_decide() {
        let onto_host = |offered: bool, committed: bool| {
            let to = Destination { host: "b".to_owned(), uuid: Uuid::from_u128(7), offered };
            Note { onto: Some(to), ..note(committed, false) }
        };
        for undone in [note(false, true), onto_host(false, false)] {
            assert!(undone.is_undone(), "{undone:?}");
        }
        for open in
            [note(false, false), note(true, false), onto_host(true, false), onto_host(true, true)]
        {
            assert!(!open.is_undone(), "{open:?}");
        }
    }

    #[test]
    fn a_guest_is_the_other_programs_only_if_it_never_ran_here() {
        let whose = |committed, unrun, role| Whose::of(&note(committed, unrun), role);
        for role in [None, Some(Role::Shadow), Some(Role::TakingOver)] {
            assert_eq!(whose(false, false, role), Whose::Open);
            assert_eq!(whose(false, true, role), Whose::OtherPrograms);
            assert_eq!(whose(true, false, role), Whose::Godwits);
        }
        assert_eq!(whose(false, true, Some(Role::Owner)), Whose::Godwits);
        assert_eq!(whose(false, false, Some(Role::HandingOver)), Whose::Godwits);
    }
}
