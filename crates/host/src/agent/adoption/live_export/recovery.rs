//! Live exports that an agent left unfinished: the next one completes or undoes them.
//!
//! A guest that is libvirt's never runs here again: its memory is older than its disks. So its
//! process ends first, which needs no disk and no libvirt, and no operation begins before.

use std::sync::Arc;
use std::time::Duration;

use godwit_api::ApiError;

use super::domain::Domain;
use super::{EXPORTED, Note};
use crate::agent::{Agent, Begun};
use crate::failure::host_failed;
use crate::references::References;
use crate::state_stream::undo_hand_over;
use crate::store::{Desired, Role, SavedVm};
use crate::vm::{Condition, Operation, Vm};

/// First and longest wait before another try.
const AGAIN: Duration = Duration::from_secs(1);
const AGAIN_MOST: Duration = Duration::from_secs(300);

impl Agent {
    /// Before VMs are recovered: records that libvirt has their guests, and ends their processes.
    pub(in crate::agent) async fn settle_live_exports(&self) -> Vec<Note> {
        let notes = self.store.live_exports::<Note>();
        for note in notes.iter().filter(|note| note.committed) {
            let living = self.places.vm(&note.vm).living_process();
            if living.is_some_and(|process| process != note.process()) {
                continue;
            }
            let of_it = |record: &SavedVm| record.spec.uuid == note.uuid;
            let Some(record) = self.record(&note.vm).filter(of_it) else { continue };
            let settled = async {
                self.save(&record.spec, Role::Owner, Desired::Stopped, record.ownership())?;
                self.end_stray(&note.vm).await
            };
            if let Err(error) = settled.await {
                // What was not settled is held, and tried again.
                let why = "cannot end the QEMU of a VM that libvirt runs";
                tracing::error!(vm = note.vm.as_str(), %error, "{why}");
            }
        }
        notes
    }

    /// After VMs were recovered: lets libvirt run what it was given, and ends its copies of the
    /// others. Holds VMs whose guests libvirt has before it returns.
    pub(in crate::agent) fn end_live_exports(self: &Arc<Self>, notes: Vec<Note>) {
        for note in notes {
            let held = if note.committed { self.hold_exported(&note) } else { None };
            tokio::spawn(self.clone().end_live_export(note, held));
        }
    }

    /// Keeps every operation from a VM whose guest libvirt has, and whose process lives.
    fn hold_exported(&self, note: &Note) -> Option<Begun> {
        if self.places.vm(&note.vm).living_process() != Some(note.process()) {
            return None;
        }
        let held = self.begin(&note.vm, &Operation::Stop { force: true });
        held.inspect_err(|error| {
            let vm = note.vm.as_str();
            tracing::error!(vm, %error, "cannot hold a VM whose guest libvirt has");
        })
        .ok()
    }

    async fn end_live_export(self: Arc<Self>, note: Note, mut held: Option<Begun>) {
        let mut wait = AGAIN;
        loop {
            let ended = match note.committed {
                true => self.end_exported(&note, &mut held).await,
                false => self.end_undone(&note).await,
            };
            let Err(error) = ended else { break };
            let vm = note.vm.as_str();
            let why = "cannot finish or undo an interrupted live export; retrying";
            tracing::error!(vm, %error, "{why}");
            tokio::time::sleep(wait).await;
            wait = (wait * 2).min(AGAIN_MOST);
        }
        self.drop_live_export(&note);
    }

    /// Ends the process of a VM whose guest libvirt has, and lets libvirt run it.
    async fn end_exported(&self, note: &Note, held: &mut Option<Begun>) -> Result<(), ApiError> {
        godwit_qemu::end_process(note.pid, note.start_time).await.map_err(|error| {
            host_failed("cannot end the QEMU of a VM that libvirt runs", &error)
        })?;
        if let Some(begun) = held.as_ref() {
            self.save(&begun.spec, Role::Owner, Desired::Stopped, begun.ownership)?;
            self.places.vm(&note.vm).remove_runtime();
            if let Some(vm) = &begun.vm {
                References::withdraw(vm);
            }
            self.settle(&note.vm, Condition::Stopped, None, Some(EXPORTED.to_owned()));
        }
        *held = None;
        let libvirt = &self.config.libvirt;
        let known = Domain::known(libvirt, note.uuid, note.id).await?;
        let Some(domain) = known else { return Ok(()) };
        if domain.waits(libvirt).await? {
            domain.resume(libvirt).await?;
        }
        Ok(())
    }

    /// Ends libvirt's copy of a guest that never ran there, and lets it run here if its process is
    /// the same. Nothing else works on the VM meanwhile.
    async fn end_undone(self: &Arc<Self>, note: &Note) -> Result<(), ApiError> {
        let is_its = |vm: &Arc<Vm>| (vm.process.pid, vm.process.start_time) == note.process();
        if !self.is_noted(note) {
            return Ok(());
        }
        let begun = match self.vm(&note.vm).ok().flatten().is_some_and(|vm| is_its(&vm)) {
            true => Some(self.begin(&note.vm, &Operation::Plug)?),
            false => None,
        };
        let libvirt = &self.config.libvirt;
        let undone = async {
            if let Some(domain) = Domain::known(libvirt, note.uuid, note.id).await? {
                domain.end_copy(libvirt).await?;
            }
            match begun.as_ref().and_then(|begun| begun.vm.as_ref()).filter(|vm| is_its(vm)) {
                Some(vm) => undo_hand_over(vm, true).await,
                None => Ok(()),
            }
        };
        let undone = undone.await;
        if let Some(begun) = &begun {
            self.end_plug(begun).await;
        }
        undone
    }
}
