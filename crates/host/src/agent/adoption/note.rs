//! What survives the agent of an adoption: which guest of which process becomes which VM. It is
//! durable before anything is made, and removed when only one QEMU has the guest. The VM's record
//! says whose the guest is; the note says where the other QEMU is.

use std::sync::Arc;

use godwit_api::{AdoptGuest, ApiError, ForeignPlace};
use godwit_qemu::{ResolvedSpec, VmName};
use godwit_types::Ownership;
use serde::{Deserialize, Serialize};

use crate::agent::Agent;
use crate::agent::adoption::found::ForeignProcess;
use crate::agent::adoption::monitor::{Monitor, leave_ended};
use crate::store::{Desired, Role, SavedVm};

/// Note of an adoption.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Note {
    pub(super) from: ForeignPlace,
    /// Process of the other QEMU.
    pub(super) pid: i32,
    pub(super) start_time: u64,
    /// Name of the VM at Godwit.
    pub(crate) vm: VmName,
    pub(super) ownership: Ownership,
    pub(super) undefine: bool,
    /// Whether the guest is Godwit's for good: it may move away before the other QEMU has ended.
    #[serde(default)]
    pub(super) committed: bool,
}

impl Note {
    pub(super) fn of(
        request: &AdoptGuest,
        process: &ForeignProcess,
        spec: &ResolvedSpec,
        ownership: Ownership,
    ) -> Note {
        Note {
            from: request.from.clone(),
            pid: process.pid,
            start_time: process.start_time,
            vm: spec.name.clone(),
            ownership,
            undefine: request.undefine,
            committed: false,
        }
    }

    /// Returns the process of the other QEMU.
    fn process(&self) -> ForeignProcess {
        ForeignProcess { pid: self.pid, start_time: self.start_time }
    }

    /// Whether a record is of the VM of this adoption.
    fn is_of(&self, record: &SavedVm) -> bool {
        record.incarnation == self.ownership.incarnation && record.spec.name == self.vm
    }
}

impl Agent {
    pub(super) fn save_note(&self, note: &Note) -> Result<(), ApiError> {
        Ok(tokio::task::block_in_place(|| self.store.save_adoption(&note.vm, note))?)
    }

    /// Notes that the guest is Godwit's, before anything else can happen to the VM.
    pub(super) fn commit_note(&self, note: &Note) {
        if let Err(error) = self.save_note(&Note { committed: true, ..note.clone() }) {
            tracing::error!(vm = note.vm.as_str(), %error, "cannot note the end of an adoption");
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
        let notes = self.store.adoptions::<Note>();
        for note in notes.iter().filter(|note| !note.committed) {
            let Some(record) = self.record(&note.vm).filter(|record| note.is_of(record)) else {
                continue;
            };
            let files = self.places.vm(&note.vm);
            let may_have_run = record.role == Role::TakingOver && !files.is_unrun();
            if may_have_run && files.living_process().is_none() {
                let mine = SavedVm::new(
                    record.spec.clone(),
                    Role::Owner,
                    Desired::Running,
                    record.ownership(),
                );
                if let Err(error) = self.save_over(Some(&record), &mine) {
                    tracing::error!(vm = note.vm.as_str(), %error, "an adoption is undecided");
                }
            }
        }
        notes
    }

    /// After VMs were recovered: ends the other QEMU of a guest that is Godwit's, and lets the
    /// other QEMU of any other guest run it.
    pub(in crate::agent) async fn end_adoptions(self: Arc<Self>, notes: Vec<Note>) {
        for note in notes {
            let owned = self
                .record(&note.vm)
                .is_some_and(|record| note.is_of(&record) && record.role == Role::Owner);
            if owned && !note.committed {
                self.commit_note(&note);
            }
            if owned || note.committed {
                let done = self.finish_adoption(&note).await;
                tracing::info!(vm = note.vm.as_str(), ?done, "adoption completed");
                continue;
            }
            let undone = async {
                match Monitor::of_process(&self.config.libvirt, &note.from, &note.process()).await?
                {
                    Some(monitor) => monitor.take_back().await,
                    None => Ok(()),
                }
            };
            match undone.await {
                Ok(()) => {
                    tracing::warn!(vm = note.vm.as_str(), from = %note.from, "adoption undone");
                    self.drop_note(&note.vm);
                }
                Err(error) => tracing::error!(
                    vm = note.vm.as_str(), from = %note.from, %error,
                    "cannot let a guest run again whose adoption was cut off"
                ),
            }
        }
    }

    /// Ends the other QEMU of a guest that Godwit runs. Returns what was done and what is left.
    pub(super) async fn finish_adoption(&self, note: &Note) -> Vec<String> {
        let libvirt = &self.config.libvirt;
        let ended = async {
            match Monitor::of_process(libvirt, &note.from, &note.process()).await? {
                Some(monitor) => monitor.end(note.undefine).await,
                None => leave_ended(libvirt, &note.from, &note.vm, note.undefine).await,
            }
        };
        match ended.await {
            Ok(notes) => {
                self.drop_note(&note.vm);
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
