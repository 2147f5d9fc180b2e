//! Snapshots of a VM: create, revert, delete.
//!
//! A snapshot freezes the images, and the VM writes to new layers on them. A running VM is
//! suspended for it and resumed: the memory at that instant is the file of the suspension, which
//! the snapshot keeps by a second name. A revert puts new layers on the frozen images; with memory,
//! the VM is suspended after it, and a start continues the guest.
//!
//! The order of the writes: new files, the VM's record, the snapshots' record, then what is no
//! longer needed is removed. A crash in between leaves a file too much.
//!
//! A revert adds everything first. The record that names the reverted disks, and says that the VM
//! is stopped, is its point of no return; only then the VM's variables and memory are replaced, and
//! the record says at last that it is suspended. So memory never meets other disks.

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use godwit_api::{ApiError, CreateSnapshot, ErrorCode, RevertVm, SnapshotInfo, VmInfo};
use godwit_qemu::{ResolvedSpec, Uuid, VmName};

use crate::agent::change::reads_new_files;
use crate::agent::images::NewImages;
use crate::agent::vm_files::FileRule;
use crate::agent::{Agent, Begun, Slot, autostart};
use crate::failure::{host_failed, spec_refused};
use crate::firmware::read_variables;
use crate::hold::hold;
use crate::saved_guest::{Resumable, SavedFile};
use crate::snapshots::{MOST_SNAPSHOTS, Snapshot, Snapshots, images_of};
use crate::store::{Desired, Role, StoreError};
use crate::vm::{Condition, Operation};
use crate::whole::whole;

impl Agent {
    /// Lists the snapshots of a VM, the oldest first.
    pub fn snapshots(&self, name: &VmName) -> Result<Vec<SnapshotInfo>, ApiError> {
        Ok(self.snapshots_of(name)?.all.iter().map(Snapshot::info).collect())
    }

    /// Returns the snapshots of a VM.
    ///
    /// # Errors
    /// There is no such VM, or the file of its snapshots cannot be used.
    pub(super) fn snapshots_of(&self, name: &VmName) -> Result<Arc<Snapshots>, ApiError> {
        let known = self.known_snapshots(name)?;
        known.check_readable(name)?;
        Ok(known)
    }

    /// Returns what is known of a VM's snapshots, also if their file cannot be used.
    pub(super) fn known_snapshots(&self, name: &VmName) -> Result<Arc<Snapshots>, ApiError> {
        let table = self.table();
        Ok(table.get(name).ok_or_else(|| self.no_vm(name))?.snapshots.clone())
    }

    /// Reads the snapshots of a VM that enters the table. If that fails, the VM is there all the
    /// same, and what depends on its snapshots is refused.
    pub(super) fn load_snapshots(&self, name: &VmName) -> Snapshots {
        self.store.snapshots(name).unwrap_or_else(|error| {
            tracing::error!(vm = name.as_str(), %error, "cannot read the VM's snapshots");
            Snapshots::unreadable(match error {
                StoreError::Format { path, why } => format!("{}: {why}", path.display()),
                error => error.to_string(),
            })
        })
    }

    /// Takes a snapshot of a VM. A running guest is paused for as long as it is suspended and
    /// resumed.
    pub async fn create_snapshot(
        self: &Arc<Self>,
        name: &VmName,
        request: CreateSnapshot,
    ) -> Result<SnapshotInfo, ApiError> {
        let (agent, name) = (self.clone(), name.clone());
        whole(async move {
            let snapshot = VmName::new(request.name).map_err(|error| spec_refused(&error))?;
            let condition = agent.table().get(&name).map(|slot| slot.condition.clone());
            let memory = !matches!(condition, Some(Condition::Stopped | Condition::Failed));
            agent.check_new_snapshot(&name, &snapshot, memory)?;
            if condition != Some(Condition::Running) {
                return agent.freeze_images(&name, snapshot).await;
            }
            let boot_id = autostart::boot_id();
            tokio::task::block_in_place(|| agent.store.note_resumption(&name, &boot_id))?;
            agent.set_resumes(&name, true);
            if let Err(error) = agent.suspend(&name).await {
                agent.end_resumption(&name);
                return Err(error);
            }
            hold("snapshot-suspended");
            let made = agent.freeze_images(&name, snapshot).await;
            agent.resume_after_snapshot(&name).await?;
            made
        })
        .await
    }

    /// Resumes a VM that was suspended for a snapshot.
    pub(super) async fn resume_after_snapshot(
        self: &Arc<Self>,
        name: &VmName,
    ) -> Result<(), ApiError> {
        let condition = self.table().get(name).map(|slot| slot.condition.clone());
        let resumed = match condition {
            Some(Condition::Suspended) => self.start_now(name).await,
            // Somebody has resumed or stopped it.
            _ => Ok(()),
        };
        self.end_resumption(name);
        resumed.map_err(|error| {
            let message = format!(
                "VM \"{name}\" was suspended for a snapshot and does not resume: {}",
                error.message
            );
            ApiError { message, ..error }
        })
    }

    /// At the agent's start: resumes the VMs that an agent has suspended for a snapshot before it
    /// ended. All VMs are in the table.
    pub(super) fn resume_all_after_snapshots(self: &Arc<Self>) {
        let resumes = |(name, slot): (&VmName, &Slot)| slot.resumes.then(|| name.clone());
        let names: Vec<VmName> = self.table().iter().filter_map(resumes).collect();
        for name in names {
            let agent = self.clone();
            tokio::spawn(async move {
                let Err(error) = agent.resume_after_snapshot(&name).await else {
                    return tracing::info!(vm = name.as_str(), "resumed after its snapshot");
                };
                tracing::error!(vm = name.as_str(), %error, "the VM stays suspended");
                if let Some(slot) = agent.table().get_mut(&name)
                    && slot.condition == Condition::Suspended
                {
                    slot.reason = Some(error.message);
                }
            });
        }
    }

    pub(super) fn set_resumes(&self, name: &VmName, resumes: bool) {
        if let Some(slot) = self.table().get_mut(name) {
            slot.resumes = resumes;
        }
    }

    fn end_resumption(&self, name: &VmName) {
        tokio::task::block_in_place(|| self.store.forget_resumption(name));
        self.set_resumes(name, false);
    }

    /// Refuses a snapshot that cannot be taken: before a guest is paused for it, and again once no
    /// other operation on the VM can begin. `memory`: the snapshot will have the guest's memory.
    fn check_new_snapshot(
        &self,
        name: &VmName,
        snapshot: &VmName,
        memory: bool,
    ) -> Result<(), ApiError> {
        let known = self.snapshots_of(name)?;
        let refuse = |code, why: String, remedy: &str| {
            let message = format!("cannot take snapshot \"{snapshot}\" of VM \"{name}\": {why}");
            Err(ApiError::new(code, message, remedy))
        };
        if known.find(snapshot).is_some() {
            let why = "the VM has one of that name".to_owned();
            return refuse(ErrorCode::AlreadyExists, why, "give another name");
        }
        if known.all.len() >= MOST_SNAPSHOTS {
            let why = format!("the VM has {MOST_SNAPSHOTS}");
            return refuse(ErrorCode::WrongState, why, "delete one first");
        }
        let spec = self.table().get(name).map(|slot| slot.spec.clone());
        if !memory && spec.as_ref().is_some_and(|spec| spec.tpm) {
            let why = "it has a TPM, whose state is a part of the guest's memory".to_owned();
            let remedy = "start the VM, and take the snapshot while it runs or is suspended";
            return refuse(ErrorCode::WrongState, why, remedy);
        }
        for disk in spec.iter().flat_map(|spec| &spec.disks).filter(|disk| !disk.readonly) {
            let layers = disk.backing.as_ref().map_or(0, Vec::len);
            if layers >= 2 * MOST_SNAPSHOTS - 2 {
                let why = format!("disk {} has {layers} backing files", disk.path.display());
                let remedy = "stop the VM and delete its snapshots, which merges their layers";
                return refuse(ErrorCode::WrongState, why, remedy);
            }
            self.check_layer_place(&disk.path)?;
        }
        Ok(())
    }

    /// Freezes the images of a VM without a process.
    async fn freeze_images(
        self: &Arc<Self>,
        name: &VmName,
        snapshot: VmName,
    ) -> Result<SnapshotInfo, ApiError> {
        let begun = self.begin(name, &Operation::Snapshot)?;
        let made = self.freeze_now(&begun, snapshot).await;
        self.settle(name, begun.before, begun.vm, begun.reason);
        made
    }

    async fn freeze_now(
        self: &Arc<Self>,
        begun: &Begun,
        name: VmName,
    ) -> Result<SnapshotInfo, ApiError> {
        let old = &begun.spec;
        self.refuse_second_process(&old.name, &begun.before)?;
        let memory = begun.before == Condition::Suspended;
        self.check_new_snapshot(&old.name, &name, memory)?;
        let created = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let created_unix_ms = u64::try_from(created.as_millis()).unwrap_or(0);
        let variables = self.has_variables(old)?;
        let spec = ResolvedSpec::clone(old);
        let id = Uuid::new_v4();
        let snapshot = Snapshot { id, name, created_unix_ms, spec, memory, variables };
        let mut images = NewImages::default();
        let spec = self.layered(old, &snapshot.spec, &mut images)?;
        let (desired, info) = (desired_of(&begun.before), snapshot.info());
        let done = tokio::task::block_in_place(|| {
            self.keep_state(&snapshot)?;
            self.save(&spec, Role::Owner, desired, begun.ownership)
        });
        if let Err(error) = done {
            self.remove_state(&snapshot);
            return Err(error);
        }
        self.set_spec(&old.name, Arc::new(spec));
        let mut all = Snapshots::clone(&*self.snapshots_of(&old.name)?);
        all.layers.extend(images.paths());
        images.keep();
        all.all.push(snapshot.clone());
        if let Err(error) = self.save_snapshots(&old.name, all) {
            self.remove_state(&snapshot);
            return Err(error);
        }
        tracing::info!(vm = old.name.as_str(), snapshot = info.name, memory, "snapshot taken");
        Ok(info)
    }

    /// Keeps the memory and the firmware's variables of a VM for a snapshot.
    fn keep_state(&self, snapshot: &Snapshot) -> Result<(), ApiError> {
        let failed = |error: &io::Error| host_failed("cannot keep the guest's state", error);
        if snapshot.memory {
            let file = self.saved_file(&snapshot.spec.name);
            file.link_to(&self.memory_of(snapshot)).map_err(|error| failed(&error))?;
        }
        if !snapshot.variables {
            return Ok(());
        }
        let path = self.store.variables_path(&snapshot.spec);
        let content = read_variables(&path).map_err(|error| failed(&error))?;
        Ok(self.store.save_snapshot_variables(&snapshot.spec.name, snapshot.id, &content)?)
    }

    /// Whether a VM's firmware has variables. That of a VM that never started has none.
    fn has_variables(&self, spec: &ResolvedSpec) -> Result<bool, ApiError> {
        let exists = || self.store.variables_path(spec).try_exists();
        let failed = |error| host_failed("cannot look for the firmware's variables", &error);
        Ok(!spec.firmware.is_bios() && exists().map_err(failed)?)
    }

    fn memory_of(&self, snapshot: &Snapshot) -> SavedFile {
        SavedFile::of_snapshot(&self.config.suspend_dir(), snapshot.id)
    }

    fn remove_state(&self, snapshot: &Snapshot) {
        self.memory_of(snapshot).remove();
        self.store.remove_snapshot_variables(&snapshot.spec.name, snapshot.id);
    }

    fn save_snapshots(&self, name: &VmName, snapshots: Snapshots) -> Result<(), ApiError> {
        tokio::task::block_in_place(|| self.store.save_snapshots(name, &snapshots))?;
        if let Some(slot) = self.table().get_mut(name) {
            slot.snapshots = Arc::new(snapshots);
        }
        Ok(())
    }

    /// Reverts a VM without a process to a snapshot: its specification, disks, firmware variables
    /// and, if the snapshot has it, memory. What the VM has now is lost, except in snapshots.
    pub async fn revert_to_snapshot(
        self: &Arc<Self>,
        name: &VmName,
        request: RevertVm,
    ) -> Result<VmInfo, ApiError> {
        let (agent, name) = (self.clone(), name.clone());
        whole(async move {
            let RevertVm { name: snapshot, vm_dirs_only } = request;
            let found = agent.snapshot(&name, &snapshot)?;
            let begun = agent.begin(&name, &Operation::Snapshot)?;
            let reverted = match agent.snapshot_again(&name, &found) {
                Ok(found) => agent.revert_now(&begun, &found, vm_dirs_only).await,
                Err(error) => Err(error),
            };
            if let Err(error) = reverted {
                let (spec, condition) = agent.as_recorded(&begun);
                agent.set_spec(&name, spec);
                agent.settle(&name, condition, begun.vm, begun.reason);
                return Err(error);
            }
            agent.settle(&name, condition_of(&found), None, None);
            tracing::info!(vm = name.as_str(), snapshot, "reverted");
            agent.remove_unused(&name, &paths_of(&begun.spec));
            agent.vm_info(&name)
        })
        .await
    }

    fn snapshot(&self, name: &VmName, snapshot: &str) -> Result<Snapshot, ApiError> {
        found(name, snapshot, self.snapshots_of(name)?.find(snapshot))
    }

    /// Looks a snapshot up again, once no other operation on the VM can begin.
    fn snapshot_again(&self, name: &VmName, before: &Snapshot) -> Result<Snapshot, ApiError> {
        found(name, &before.name, self.snapshots_of(name)?.find_again(before))
    }

    async fn revert_now(
        self: &Arc<Self>,
        begun: &Begun,
        snapshot: &Snapshot,
        vm_dirs_only: bool,
    ) -> Result<(), ApiError> {
        let name = &begun.spec.name;
        self.refuse_second_process(name, &begun.before)?;
        if snapshot.memory {
            let (file, uuid) = (self.memory_of(snapshot), snapshot.spec.uuid);
            let open = || Resumable::open(&file, name, uuid, begun.ownership);
            drop(tokio::task::block_in_place(open)?);
        }
        let mut images = NewImages::default();
        let spec = self.layered(&begun.spec, &snapshot.spec, &mut images)?;
        // Whether another host may start the VM is no matter of its past.
        let spec = ResolvedSpec {
            protect: begun.spec.protect,
            protect_by_agents: begun.spec.protect_by_agents,
            ..spec
        };
        let rule = match vm_dirs_only && reads_new_files(&begun.spec, &snapshot.spec) {
            true => FileRule::VmDirs,
            false => FileRule::Operator,
        };
        let files = self.check_fits(&spec, rule).await?.files;
        self.set_spec(name, Arc::new(spec.clone()));
        tokio::task::block_in_place(|| self.check_conflicts(&spec, &files))?;
        drop(files);
        let layers = images.paths();
        let done = tokio::task::block_in_place(|| {
            self.stage_state(snapshot)?;
            self.change_layers(name, |all| all.extend(layers.iter().cloned()))?;
            self.save(&spec, Role::Owner, Desired::Stopped, begun.ownership)
        });
        if let Err(error) = done {
            self.drop_staged(name);
            drop(images);
            let forgotten =
                self.change_layers(name, |all| all.retain(|path| !layers.contains(path)));
            if let Err(error) = forgotten {
                tracing::warn!(vm = name.as_str(), %error, "cannot forget layers of a revert");
            }
            return Err(error);
        }
        // From here on the VM has the disks of the snapshot.
        images.keep();
        let finished = tokio::task::block_in_place(|| {
            self.take_staged(&spec, snapshot)?;
            match snapshot.memory {
                true => self.save(&spec, Role::Owner, Desired::Suspended, begun.ownership),
                false => Ok(()),
            }
        });
        finished.map_err(|error| {
            let message = format!(
                "VM \"{name}\" has the disks of snapshot \"{}\", but not all of its state: {}",
                snapshot.name, error.message
            );
            ApiError::new(error.code, message, "remove the cause, then revert again")
        })
    }

    /// Prepares the variables and the memory of a snapshot beside those that the VM has.
    fn stage_state(&self, snapshot: &Snapshot) -> Result<(), ApiError> {
        let name = &snapshot.spec.name;
        self.store.stage_variables(name, snapshot.id, snapshot.variables)?;
        if snapshot.memory {
            let failed = |error: io::Error| host_failed("cannot restore the memory", &error);
            self.memory_of(snapshot).stage_as(&self.saved_file(name)).map_err(failed)?;
        }
        Ok(())
    }

    fn drop_staged(&self, name: &VmName) {
        self.store.drop_staged_variables(name);
        self.saved_file(name).remove_partial();
    }

    /// Gives a VM the prepared state in place of its own.
    fn take_staged(&self, spec: &ResolvedSpec, snapshot: &Snapshot) -> Result<(), ApiError> {
        self.store.take_variables(spec)?;
        let saved = self.saved_file(&spec.name);
        if !snapshot.memory {
            saved.remove();
            return Ok(());
        }
        saved.complete().map_err(|error| host_failed("cannot restore the memory", &error))
    }

    /// Records a change of the layers that belong to a VM.
    fn change_layers(
        &self,
        name: &VmName,
        change: impl FnOnce(&mut BTreeSet<PathBuf>),
    ) -> Result<(), ApiError> {
        let mut all = Snapshots::clone(&*self.snapshots_of(name)?);
        change(&mut all.layers);
        self.save_snapshots(name, all)
    }

    /// Returns what a VM's record says once a revert of it has failed.
    fn as_recorded(&self, begun: &Begun) -> (Arc<ResolvedSpec>, Condition) {
        let (spec, before) = (begun.spec.clone(), begun.before.clone());
        let Some(record) = self.record(&spec.name) else { return (spec, before) };
        let condition = match record.desired {
            Desired::Suspended => Condition::Suspended,
            _ if before == Condition::Suspended || record.spec != *spec => Condition::Stopped,
            _ => before,
        };
        (Arc::new(record.spec), condition)
    }

    /// Deletes a snapshot. Of a VM without a process, layers that no snapshot needs are merged.
    pub async fn delete_snapshot(
        self: &Arc<Self>,
        name: &VmName,
        snapshot: &str,
    ) -> Result<(), ApiError> {
        let (agent, name, snapshot) = (self.clone(), name.clone(), snapshot.to_owned());
        whole(async move {
            let found = agent.snapshot(&name, &snapshot)?;
            if let Ok(begun) = agent.begin(&name, &Operation::Plug) {
                let forgotten = agent.forget_snapshot(&name, &found);
                agent.end_plug(&begun).await;
                return forgotten;
            }
            let begun = agent.begin(&name, &Operation::Snapshot)?;
            let deleted = match agent.forget_snapshot(&name, &found) {
                Ok(()) => agent.merge_layers(&begun).await,
                Err(error) => Err(error),
            };
            agent.settle(&name, begun.before, begun.vm, begun.reason);
            deleted
        })
        .await
    }

    fn forget_snapshot(&self, name: &VmName, found: &Snapshot) -> Result<(), ApiError> {
        let snapshot = &self.snapshot_again(name, found)?;
        let mut all = Snapshots::clone(&*self.snapshots_of(name)?);
        all.all.retain(|known| known.id != snapshot.id);
        self.save_snapshots(name, all)?;
        self.remove_state(snapshot);
        self.remove_unused(name, &paths_of(&snapshot.spec));
        tracing::info!(vm = name.as_str(), snapshot = snapshot.name.as_str(), "snapshot deleted");
        Ok(())
    }

    /// Merges layers into the images below them, as long as no snapshot needs these. A merge that
    /// is cut off changes nothing that the VM reads: the layer covers what was written below it.
    async fn merge_layers(self: &Arc<Self>, begun: &Begun) -> Result<(), ApiError> {
        let name = &begun.spec.name;
        self.refuse_second_process(name, &begun.before)?;
        loop {
            let (spec, all) = {
                let table = self.table();
                let slot = table.get(name).ok_or_else(|| self.no_vm(name))?;
                (slot.spec.clone(), slot.snapshots.clone())
            };
            let Some(index) = all.mergeable(&spec) else { return Ok(()) };
            let Some((disk, _merging)) = self.merge_layer(name, &spec.disks[index]).await? else {
                return Ok(());
            };
            let mut merged = ResolvedSpec::clone(&spec);
            merged.disks[index] = disk;
            self.save(&merged, Role::Owner, desired_of(&begun.before), begun.ownership)?;
            self.set_spec(name, Arc::new(merged));
            self.remove_unused(name, &[spec.disks[index].path.clone()]);
        }
    }

    /// Removes those of the images that an operation has given up that are layers which nothing
    /// needs. Any other layer may be a detached disk. What cannot be removed is logged and kept.
    fn remove_unused(&self, name: &VmName, given_up: &[PathBuf]) {
        let (spec, all) = {
            let table = self.table();
            let Some(slot) = table.get(name) else { return };
            (slot.spec.clone(), slot.snapshots.clone())
        };
        let mut left = Snapshots::clone(&all);
        for path in all.unused(&spec, given_up) {
            match self.remove_layer(&path) {
                Ok(true) => drop(left.layers.remove(&path)),
                Ok(false) => {}
                Err(error) => tracing::warn!(path = %path.display(), %error, "a layer stays"),
            }
        }
        if left != *all
            && let Err(error) = self.save_snapshots(name, left)
        {
            tracing::warn!(vm = name.as_str(), %error, "cannot record that layers are removed");
        }
    }

    /// Refuses an operation on a VM with snapshots, which are files of this host.
    pub(crate) fn refuse_snapshots(&self, name: &VmName, what: &str) -> Result<(), ApiError> {
        let known = self.known_snapshots(name)?;
        refuse_any(name, &known, what)
    }

    /// Removes the memory of a deleted VM's snapshots. Images stay.
    pub(super) fn forget_snapshots(&self, name: &VmName) {
        for snapshot in self.known_snapshots(name).iter().flat_map(|all| &all.all) {
            self.memory_of(snapshot).remove();
        }
    }
}

/// Refuses an operation if the VM has snapshots, or may have some.
pub(super) fn refuse_any(name: &VmName, known: &Snapshots, what: &str) -> Result<(), ApiError> {
    known.check_readable(name)?;
    let count = known.all.len();
    if count == 0 {
        return Ok(());
    }
    let message =
        format!("VM \"{name}\" cannot be {what}: it has snapshots on this host ({count})");
    let remedy =
        format!("delete them first: `godwit vm snapshot list {name}`, `godwit vm snapshot delete`");
    Err(ApiError::new(ErrorCode::WrongState, message, remedy))
}

/// Returns a snapshot of a VM that was looked up by its name.
fn found(name: &VmName, snapshot: &str, found: Option<&Snapshot>) -> Result<Snapshot, ApiError> {
    let mut found = found.cloned().ok_or_else(|| {
        let message = format!("VM \"{name}\" has no snapshot \"{snapshot}\"");
        ApiError::new(ErrorCode::NotFound, message, "see `godwit vm snapshot list`")
    })?;
    // The VM may have been renamed since.
    found.spec.name = name.clone();
    Ok(found)
}

fn paths_of(spec: &ResolvedSpec) -> Vec<PathBuf> {
    images_of(spec).map(Path::to_owned).collect()
}

fn desired_of(condition: &Condition) -> Desired {
    match condition {
        Condition::Suspended => Desired::Suspended,
        _ => Desired::Stopped,
    }
}

fn condition_of(snapshot: &Snapshot) -> Condition {
    if snapshot.memory { Condition::Suspended } else { Condition::Stopped }
}
