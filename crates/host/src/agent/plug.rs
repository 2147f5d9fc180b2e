//! Changes of a VM that runs, or of a stopped one by the same request. A running VM's definition is
//! saved first when something is added, and last when something is removed: after a crash in
//! between it names at most too much.

use std::sync::Arc;

use godwit_api::{ApiError, ChangeVm, ErrorCode, VmInfo};
use godwit_qemu::{PlugError, ResolvedSpec, SpecPatch, VmName, VmSpec};

use crate::agent::vm_files::FileRule;
use crate::agent::{Agent, Begun};
use crate::store::SavedVm;
use crate::vm::{Condition, Vm};

/// What is added to a running VM.
pub(super) struct Added<'a> {
    /// For messages: "the disk or CD".
    pub(super) what: &'static str,
    pub(super) old: &'a ResolvedSpec,
    pub(super) new: ResolvedSpec,
    /// The definition after a failure of QEMU.
    pub(super) failed: &'a ResolvedSpec,
}

/// Refuses to change the hardware of an adopted VM: its guest knows the devices that it had, at
/// their addresses, and a change would give it others.
pub(super) fn refuse_adopted(spec: &ResolvedSpec) -> Result<(), ApiError> {
    if spec.topology.is_none() {
        return Ok(());
    }
    let message = format!(
        "cannot change the hardware of VM \"{}\": it was adopted and has the devices that it had \
         before",
        spec.name
    );
    let remedy = "stop it and give it Godwit's devices: `godwit vm set VM --unset topology`; its \
                  guest then finds them at other addresses (docs/adopt.md)";
    Err(ApiError::new(ErrorCode::WrongState, message, remedy))
}

impl Agent {
    /// Changes the definition of a stopped VM. `refused`: why it is not changed as a running one.
    pub(super) async fn change_stopped(
        self: &Arc<Self>,
        name: &VmName,
        refused: ApiError,
        vm_dirs_only: bool,
        change: impl FnOnce(&mut VmSpec) -> Result<(), ApiError>,
    ) -> Result<VmInfo, ApiError> {
        let old = {
            let table = self.table();
            let slot = table.get(name).ok_or_else(|| self.no_vm(name))?;
            if !matches!(slot.condition, Condition::Stopped | Condition::Failed) {
                return Err(refused);
            }
            slot.spec.to_vm_spec()
        };
        let mut spec = old.clone();
        change(&mut spec)?;
        let patch = SpecPatch::of(&spec).map_err(|error| {
            let message = format!("cannot change VM \"{name}\": {error}");
            ApiError::new(ErrorCode::InvalidRequest, message, "use paths in UTF-8")
        })?;
        let change = ChangeVm {
            spec: patch,
            replace: true,
            // As `change` compares it.
            expected: Some(Box::new(old.without_secrets())),
            vm_dirs_only,
        };
        self.change(name, change).await
    }

    /// Returns a VM to its condition after a change while it ran, and notices what its process did
    /// meanwhile.
    pub(super) async fn end_plug(self: &Arc<Self>, begun: &Begun) {
        if let Some(slot) = self.table().get_mut(&begun.spec.name)
            && let Condition::Plugging(before) = &slot.condition
        {
            slot.condition = before.as_ref().clone();
        }
        if let Some(vm) = &begun.vm {
            self.notice_process(vm).await;
        }
    }

    /// Saves a definition with something new, then adds it to the running VM.
    pub(super) async fn add_plugged(
        self: &Arc<Self>,
        vm: &Vm,
        added: Added<'_>,
        add: impl AsyncFnOnce() -> Result<(), PlugError>,
    ) -> Result<(), ApiError> {
        let Added { what, old, new, failed } = added;
        let checked = tokio::task::block_in_place(|| self.insert_plugged(vm, &new));
        if let Err(error) = checked.and_then(|()| self.save_plugged(vm, new)) {
            self.set_spec(&vm.name, Arc::new(old.clone()));
            vm.set_spec(Arc::new(old.clone()));
            return Err(error);
        }
        let Err(error) = add().await else { return Ok(()) };
        if error.is_unknown() {
            let ApiError { code, remedy, .. } = plug_failed("add", what, &vm.name, &error);
            let message = format!(
                "cannot find out whether VM \"{}\" has {what}, which its definition keeps: {error}",
                vm.name
            );
            let remedy = format!("{remedy}; detach or eject it if the guest does not have it");
            return Err(ApiError::new(code, message, remedy));
        }
        // A locked tray still has the old medium.
        let left = if error == PlugError::TrayLocked { old } else { failed };
        if let Err(unsaved) = self.save_plugged(vm, left.clone()) {
            tracing::error!(vm = vm.name.as_str(), %unsaved, "the definition names too much");
        }
        Err(plug_failed("add", what, &vm.name, &error))
    }

    /// Puts a definition with something new into the table, and checks it.
    fn insert_plugged(&self, vm: &Vm, new: &ResolvedSpec) -> Result<(), ApiError> {
        // Of two VMs that get one image or address at the same time, at most one passes. The same
        // holds for a VM and a deletion: that claims the image, then looks for VMs that use it.
        self.set_spec(&vm.name, Arc::new(new.clone()));
        let files = self.open_files_of_running(new, FileRule::Operator)?;
        self.check_conflicts(new, &files)
    }

    /// Saves what a change made of the definition of a running VM.
    pub(super) fn save_plugged(&self, vm: &Vm, spec: ResolvedSpec) -> Result<(), ApiError> {
        loop {
            let record = self.read_record(&vm.name)?.ok_or_else(|| self.no_vm(&vm.name))?;
            let new = SavedVm { spec: spec.clone(), ..record.clone() };
            // The end of its process may be saved meanwhile.
            if tokio::task::block_in_place(|| self.store.save_over(&record, &new))? {
                break;
            }
        }
        let spec = Arc::new(spec);
        vm.set_spec(spec.clone());
        self.set_spec(&vm.name, spec);
        Ok(())
    }
}

/// Describes a failure of QEMU. `verb` and `what`: what was to be done, as in "add" "the disk".
pub(super) fn plug_failed(verb: &str, what: &str, vm: &str, error: &PlugError) -> ApiError {
    let code = match error {
        PlugError::Qmp(_) => ErrorCode::HypervisorFailed,
        PlugError::Larger { .. } => ErrorCode::InvalidRequest,
        _ => ErrorCode::WrongState,
    };
    ApiError::new(code, format!("cannot {verb} {what} of VM \"{vm}\": {error}"), error.remedy())
}
