//! Changes of a VM that exists: its specification, a restart, a reset.

use std::path::Path;
use std::sync::Arc;

use godwit_api::{ApiError, ChangeVm, ErrorCode, StopVm, VmInfo};
use godwit_qemu::{ResolvedDisk, ResolvedSpec, VmName, VmSpec};

use crate::agent::plug::refuse_adopted;
use crate::agent::vm_files::FileRule;
use crate::agent::{Agent, Begun};
use crate::failure::{file_unusable, spec_refused};
use crate::store::SavedVm;
use crate::vm::{Begin, Operation};
use crate::whole::whole;

impl Agent {
    /// Changes the specification of a VM: all of it while it is stopped, and what can change at
    /// once while it runs. If it is refused, the VM stays as it was.
    pub async fn change(
        self: &Arc<Self>,
        name: &VmName,
        request: ChangeVm,
    ) -> Result<VmInfo, ApiError> {
        let (agent, name) = (self.clone(), name.clone());
        whole(async move {
            let begun = match agent.begin(&name, &Operation::Change) {
                Ok(begun) => begun,
                Err(refused) => {
                    if let Ok(begun) = agent.begin(&name, &Operation::Settings) {
                        let changed = agent.change_settings(&begun, &request, refused).await;
                        agent.settle(&name, begun.before, begun.vm, begun.reason);
                        changed?;
                        return agent.vm_info(&name);
                    }
                    let Ok(begun) = agent.begin(&name, &Operation::Plug) else {
                        return Err(refused);
                    };
                    let changed = agent.change_running(&begun, &request).await;
                    agent.end_plug(&begun).await;
                    changed?;
                    return agent.vm_info(&name);
                }
            };
            let saved = agent.save_change(&begun, &request).await;
            if saved.is_err() {
                agent.set_spec(&name, begun.spec);
            }
            agent.settle(&name, begun.before, begun.vm, begun.reason);
            saved?;
            agent.vm_info(&name)
        })
        .await
    }

    /// Changes the settings of a suspended VM or a template. `refused`: the answer to any other
    /// change.
    async fn change_settings(
        &self,
        begun: &Begun,
        request: &ChangeVm,
        refused: ApiError,
    ) -> Result<(), ApiError> {
        let wanted = self.wanted(&begun.spec, request)?;
        if !wanted.differs_in_settings_alone(&begun.spec.to_vm_spec()) {
            return Err(refused);
        }
        tokio::task::block_in_place(|| self.check_stays(&begun.spec, &wanted))?;
        self.admit_own_end(&begun.spec, &wanted).await?;
        let ending = self.admit_unprotection(begun, &wanted).await?;
        self.save_settings(begun, &wanted)?;
        if let Some(ending) = ending {
            ending.ended();
        }
        Ok(())
    }

    /// Checks that changed settings of a VM can be saved: its record, which is written again, takes
    /// as much room as theirs.
    ///
    /// # Errors
    /// They are refused, or the disk is full.
    pub(super) fn could_save_settings(
        &self,
        old: &ResolvedSpec,
        wanted: &VmSpec,
    ) -> Result<(), ApiError> {
        self.check_order_of_start(&old.with_settings_of(wanted))?;
        let record = self.read_record(&old.name)?.ok_or_else(|| self.no_vm(&old.name))?;
        // The end of its process may be saved meanwhile.
        self.save_over(Some(&record), &record)
    }

    /// Saves a VM's settings, and puts them into the table.
    pub(super) fn save_settings(&self, begun: &Begun, wanted: &VmSpec) -> Result<(), ApiError> {
        wanted.validate().map_err(|error| spec_refused(&error))?;
        let spec = begun.spec.with_settings_of(wanted);
        self.check_order_of_start(&spec)?;
        let record = self.read_record(&spec.name)?.ok_or_else(|| self.no_vm(&spec.name))?;
        self.save_record(&SavedVm { spec: spec.clone(), ..record })?;
        let spec = Arc::new(spec);
        if let Some(vm) = &begun.vm {
            vm.set_spec(spec.clone());
        }
        self.set_spec(&spec.name, spec.clone());
        tracing::info!(vm = spec.name.as_str(), "settings changed");
        Ok(())
    }

    /// Returns the specification that a VM gets by a change.
    pub(super) fn wanted(
        &self,
        old: &ResolvedSpec,
        request: &ChangeVm,
    ) -> Result<VmSpec, ApiError> {
        let current = old.to_vm_spec();
        let shown = current.clone().without_secrets();
        if request.expected.as_ref().is_some_and(|expected| **expected != shown) {
            let message = format!("cannot change VM \"{}\": it has just been changed", old.name);
            return Err(ApiError::new(ErrorCode::Busy, message, "see the VM, then try again"));
        }
        let wanted = request.spec.apply_or_replace(&current, request.replace);
        let wanted = wanted.map_err(|why| {
            ApiError::new(
                ErrorCode::InvalidRequest,
                format!("cannot change VM \"{}\": {why}", old.name),
                "docs/cli.md shows a specification; `godwit vm show --json` prints the VM's",
            )
        })?;
        Ok(wanted.with_secrets_of(&current))
    }

    /// Changes a stopped VM.
    async fn save_change(
        self: &Arc<Self>,
        begun: &Begun,
        request: &ChangeVm,
    ) -> Result<(), ApiError> {
        self.refuse_second_process(&begun.spec.name, &begun.before)?;
        let wanted = self.wanted(&begun.spec, request)?;
        tokio::task::block_in_place(|| self.check_stays(&begun.spec, &wanted))?;
        self.admit_own_end(&begun.spec, &wanted).await?;
        let ending = self.admit_unprotection(begun, &wanted).await?;
        self.save_wanted(begun, wanted, request.vm_dirs_only).await?;
        if let Some(ending) = ending {
            ending.ended();
        }
        Ok(())
    }

    /// Checks a change as strictly as a creation, puts it into the table and saves it.
    async fn save_wanted(
        self: &Arc<Self>,
        begun: &Begun,
        wanted: VmSpec,
        vm_dirs_only: bool,
    ) -> Result<(), ApiError> {
        let old = &begun.spec;
        if wanted.differs_in_settings_alone(&old.to_vm_spec()) {
            return self.save_settings(begun, &wanted);
        }
        if wanted.topology.is_some() {
            refuse_adopted(old)?;
        }
        let mut spec = self.resolve_choices(wanted).await?;
        // An image's header may name another backing file by now, because the guest can write it.
        for disk in &mut spec.disks {
            let known = same_disk(old, disk);
            disk.cluster = known.and_then(|known| known.cluster);
            disk.backing = known.and_then(|known| known.backing.clone());
        }
        let rule = match vm_dirs_only && names_new_files(old, &spec) {
            true => FileRule::VmDirs,
            false => FileRule::Operator,
        };
        let files = self.check_fits(&spec, rule).await?.files;
        let is_new = |disk: &ResolvedDisk| same_disk(old, disk).is_none();
        files
            .check_raw(spec.disks.iter().map(is_new))
            .map_err(|error| file_unusable(&spec.name, &error))?;
        self.check_pools(&spec.name, &files).await?;
        files.record_chains(&mut spec);
        // Of two VMs that get one image or address at the same time, at most one passes.
        self.set_spec(&spec.name, Arc::new(spec.clone()));
        tokio::task::block_in_place(|| self.check_conflicts(&spec, &files))?;
        self.check_order_of_start(&spec)?;
        let record = self.read_record(&spec.name)?.ok_or_else(|| self.no_vm(&spec.name))?;
        self.save_record(&SavedVm { spec: spec.clone(), ..record })?;
        tracing::info!(vm = spec.name.as_str(), "specification changed");
        Ok(())
    }

    pub(super) fn set_spec(&self, name: &VmName, spec: Arc<ResolvedSpec>) {
        if let Some(slot) = self.table().get_mut(name) {
            slot.spec = spec;
        }
    }

    /// Stops a running VM as [`Agent::stop`] does, and starts it again.
    pub async fn restart(
        self: &Arc<Self>,
        name: &VmName,
        request: StopVm,
    ) -> Result<VmInfo, ApiError> {
        let (agent, name) = (self.clone(), name.clone());
        whole(async move {
            let running = agent.begin(&name, &Operation::Restart)?;
            agent.check_can_start(&running.spec).await?;
            agent.stop_now(&name, request).await?;
            agent.start_now(&name).await.map_err(|error| ApiError {
                message: format!(
                    "VM \"{name}\" was stopped and did not start again: {}",
                    error.message
                ),
                ..error
            })?;
            agent.vm_info(&name)
        })
        .await
    }

    /// Checks whether a running VM could start again here. Its memory is taken already.
    async fn check_can_start(&self, spec: &ResolvedSpec) -> Result<(), ApiError> {
        drop(self.open_files_of_running(spec, FileRule::Operator)?);
        drop(tokio::task::block_in_place(|| self.open_firmware(spec, Begin::Boot))?);
        self.tpm_site(spec)?;
        self.check_networks(spec).await.map(drop)
    }

    /// Resets a guest, as its reset button does. The guest is not asked.
    pub async fn reset(self: &Arc<Self>, name: &VmName) -> Result<VmInfo, ApiError> {
        let (agent, name) = (self.clone(), name.clone());
        whole(async move {
            let begun = agent.begin(&name, &Operation::Reset)?;
            let reset = match &begun.vm {
                Some(vm) => vm.reset().await,
                None => Ok(()),
            };
            agent.end_plug(&begun).await;
            reset?;
            tracing::info!(vm = name.as_str(), "reset");
            agent.vm_info(&name)
        })
        .await
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
    let known_images: Vec<&Path> = old.images().collect();
    let mut media = new.cdroms.iter().filter_map(|drive| drive.image.as_deref());
    (&old.kernel, &old.initrd) != (&new.kernel, &new.initrd)
        || !new.disks.iter().all(is_known)
        || !media.all(|image| known_images.contains(&image))
}

/// Whether a revert names files, beside the disks that the VM writes, that the VM did not name
/// before. Disks that it writes are below `vm_dirs`, or it would have no snapshot.
pub(super) fn reads_new_files(old: &ResolvedSpec, new: &ResolvedSpec) -> bool {
    let read = |spec: &ResolvedSpec| {
        let disks = spec.disks.iter().filter(|disk| disk.readonly).cloned().collect();
        ResolvedSpec { disks, ..spec.clone() }
    };
    names_new_files(&read(old), &read(new))
}

#[cfg(test)]
mod tests {
    use godwit_qemu::{AccelProbe, Disk, DiskFormat, MachineType, QemuInfo};

    use super::*;

    fn spec(kernel: &str, disks: &[(&str, DiskFormat, bool)]) -> ResolvedSpec {
        let machine =
            MachineType { name: "pc-q35-7.2".into(), alias: Some("q35".into()), is_default: true };
        let cpu_models = vec!["Westmere-v1".into()];
        let (path, machines) = ("/q".into(), vec![machine]);
        let qemu = QemuInfo { path, version: (7, 2, 22), machines, cpu_models };
        let disk = |&(path, format, readonly): &(&str, DiskFormat, bool)| Disk {
            readonly,
            ..Disk::new(path, format)
        };
        let disks = disks.iter().map(disk).collect();
        let spec = VmSpec { kernel: Some(kernel.into()), disks, ..VmSpec::new("web") };
        spec.resolve(&qemu, &AccelProbe { kvm: false, reason: String::new() }).unwrap()
    }

    #[test]
    fn a_file_is_new_unless_the_vm_named_it_with_no_fewer_rights() {
        use DiskFormat::{Qcow2, Raw};
        let old = spec("/k", &[("/a", Raw, false), ("/b", Qcow2, true)]);
        for (kernel, disks, is_new) in [
            ("/k", &[("/b", Qcow2, true), ("/a", Raw, false)][..], false),
            ("/k", &[("/a", Raw, true)], false),
            ("/k", &[], false),
            ("/other", &[], true),
            ("/k", &[("/b", Qcow2, false)], true),
            // The guest may have written any header into its raw image.
            ("/k", &[("/a", Qcow2, false)], true),
            ("/k", &[("/c", Raw, true)], true),
        ] {
            let new = spec(kernel, disks);
            assert_eq!(names_new_files(&old, &new), is_new, "{kernel} {disks:?}");
        }
    }

    #[test]
    fn a_revert_names_new_files_unless_the_vm_reads_them_now() {
        use DiskFormat::{Qcow2, Raw};
        let now = spec("/k", &[("/layer", Qcow2, false), ("/iso", Raw, true)]);
        for (kernel, disks, is_new) in [
            ("/k", &[("/web", Qcow2, false), ("/iso", Raw, true)][..], false),
            ("/k", &[("/web", Raw, false)], false),
            ("/k", &[("/web", Qcow2, false), ("/etc/shadow", Raw, true)], true),
            ("/other", &[("/web", Qcow2, false)], true),
        ] {
            assert_eq!(reads_new_files(&now, &spec(kernel, disks)), is_new, "{kernel} {disks:?}");
        }
    }
}
