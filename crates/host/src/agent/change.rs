//! Changes of a VM that exists: its specification while it is stopped, a restart, a reset.

use std::sync::Arc;

use godwit_api::{ApiError, ChangeVm, ErrorCode, StopVm, VmInfo};
use godwit_qemu::{ResolvedDisk, ResolvedSpec, VmName};

use crate::agent::lifecycle::whole;
use crate::agent::vm_files::FileRule;
use crate::agent::{Agent, Begun};
use crate::failure::file_unusable;
use crate::store::SavedVm;
use crate::vm::Operation;

impl Agent {
    /// Changes the specification of a stopped VM. If it is refused, the VM stays as it was.
    pub async fn change(
        self: &Arc<Self>,
        name: &VmName,
        request: ChangeVm,
    ) -> Result<VmInfo, ApiError> {
        let (agent, name) = (self.clone(), name.clone());
        whole(async move {
            let begun = agent.begin(&name, &Operation::Change)?;
            let changed = agent.changed(&begun, &request).await;
            if let Ok(spec) = &changed
                && let Some(slot) = agent.table().get_mut(&name)
            {
                slot.spec = Arc::new(spec.clone());
            }
            agent.settle(&name, begun.before, begun.vm, begun.reason);
            changed?;
            agent.vm_info(&name)
        })
        .await
    }

    /// Checks a change as strictly as a creation and saves it.
    async fn changed(
        self: &Arc<Self>,
        begun: &Begun,
        request: &ChangeVm,
    ) -> Result<ResolvedSpec, ApiError> {
        let old = &begun.spec;
        self.refuse_second_process(&old.name, &begun.before)?;
        let wanted = request.spec.apply_or_replace(&old.to_vm_spec(), request.replace);
        let wanted = wanted.map_err(|why| {
            ApiError::new(
                ErrorCode::InvalidRequest,
                format!("cannot change VM \"{}\": {why}", old.name),
                "docs/cli.md shows a specification; `godwit vm show --json` prints the VM's",
            )
        })?;
        let mut spec = self.resolve_choices(wanted).await?;
        // An image's header may name another backing file by now, because the guest can write it.
        for disk in &mut spec.disks {
            disk.backing = same_disk(old, disk).and_then(|known| known.backing.clone());
        }
        let rule = match request.vm_dirs_only && names_new_files(old, &spec) {
            true => FileRule::VmDirs,
            false => FileRule::Operator,
        };
        let files = self.check_fits(&spec, rule).await?.files;
        let is_new = |disk: &ResolvedDisk| same_disk(old, disk).is_none();
        files
            .check_raw(spec.disks.iter().map(is_new))
            .map_err(|error| file_unusable(&spec.name, &error))?;
        files.record_chains(&mut spec);
        tokio::task::block_in_place(|| self.check_conflicts(&spec, &files))?;
        let record = self.read_record(&spec.name)?.ok_or_else(|| self.no_vm(&spec.name))?;
        self.save_record(&SavedVm { spec: spec.clone(), ..record })?;
        tracing::info!(vm = spec.name.as_str(), "specification changed");
        Ok(spec)
    }

    /// Stops a running VM as [`Agent::stop`] does, and starts it again.
    pub async fn restart(
        self: &Arc<Self>,
        name: &VmName,
        request: StopVm,
    ) -> Result<VmInfo, ApiError> {
        let (agent, name) = (self.clone(), name.clone());
        whole(async move {
            agent.stop_now(&name, request).await?;
            agent.start_now(&name).await?;
            agent.vm_info(&name)
        })
        .await
    }

    /// Resets a guest, as its reset button does. The guest is not asked.
    pub async fn reset(self: &Arc<Self>, name: &VmName) -> Result<VmInfo, ApiError> {
        let begun = self.begin(name, &Operation::Reset)?;
        if let Some(vm) = &begun.vm {
            vm.reset().await?;
        }
        tracing::info!(vm = name.as_str(), "reset");
        self.vm_info(name)
    }
}

/// Returns the VM's disk with the same image, if it has one.
fn same_disk<'a>(spec: &'a ResolvedSpec, wanted: &ResolvedDisk) -> Option<&'a ResolvedDisk> {
    spec.disks.iter().find(|disk| (&disk.path, disk.format) == (&wanted.path, wanted.format))
}

/// Whether a change names files that the VM did not name before.
fn names_new_files(old: &ResolvedSpec, new: &ResolvedSpec) -> bool {
    let is_known = |disk: &ResolvedDisk| {
        // To write an image is more than to read it.
        same_disk(old, disk).is_some_and(|known| disk.readonly || !known.readonly)
    };
    (&old.kernel, &old.initrd) != (&new.kernel, &new.initrd) || !new.disks.iter().all(is_known)
}
