//! Disks and media of a VM that exists: attach and detach of a disk, insert and eject of a CD. A
//! running VM gets them at once; in any case its definition records them, so that a later start or
//! a migration builds the same machine.

use std::sync::Arc;

use godwit_api::{ApiError, ChangeDrive, DriveChange, ErrorCode, VmInfo};
use godwit_qemu::{
    DiskBus, FileError, FoundFile, NewDrive, OpenFiles, OpenLayer, ResolvedSpec, VmName, VmSpec,
};

use crate::agent::plug::{Added, plug_failed, refuse_adopted};
use crate::agent::vm_files::FileRule;
use crate::agent::{Agent, Begun};
use crate::failure::{file_unusable, spec_refused};
use crate::vm::Operation;
use crate::whole::whole;

/// What is added, for messages.
const DRIVE: &str = "the disk or CD";

impl Agent {
    /// Changes a disk or a medium of a VM, running or not. If that fails, the VM stays as it was.
    pub async fn change_drive(
        self: &Arc<Self>,
        name: &VmName,
        request: ChangeDrive,
    ) -> Result<VmInfo, ApiError> {
        let (agent, name) = (self.clone(), name.clone());
        let begun = match self.begin(&name, &Operation::Plug) {
            Ok(begun) => begun,
            Err(error) => {
                let change = |spec: &mut VmSpec| change_spec(spec, &request.change);
                return self.change_stopped(&name, error, request.vm_dirs_only, change).await;
            }
        };
        whole(async move {
            let changed = agent.plug(&begun, &request).await;
            agent.end_plug(&begun).await;
            if changed.is_err()
                && let Some(vm) = &begun.vm
            {
                // The guest may have released it since.
                agent.forget_released(vm).await;
            }
            changed?;
            tracing::info!(vm = name.as_str(), "disks or media changed");
            agent.vm_info(&name)
        })
        .await
    }

    /// Changes a running VM.
    async fn plug(self: &Arc<Self>, begun: &Begun, request: &ChangeDrive) -> Result<(), ApiError> {
        let Some(vm) = &begun.vm else { return Err(self.no_vm(&begun.spec.name)) };
        let old = &begun.spec;
        refuse_adopted(old)?;
        check_pluggable(old, &request.change)?;
        let mut wanted = old.to_vm_spec();
        change_spec(&mut wanted, &request.change)?;
        if let DriveChange::Attach { disk } = &request.change
            && disk.bus == DiskBus::Virtio
            && let Some(disk) = wanted.disks.last_mut()
        {
            disk.slot = disk.slot.or_else(|| old.free_slot());
        }
        tokio::task::block_in_place(|| self.check_stays(old, &wanted))?;
        let mut new = old.with_drives(&wanted).map_err(|error| spec_refused(&error))?;
        let rule = if request.vm_dirs_only { FileRule::VmDirs } else { FileRule::Operator };
        let qmp = &vm.process.qmp;
        match &request.change {
            DriveChange::Attach { .. } => {
                let Some(disk) = new.disks.last_mut() else { return Ok(()) };
                let layers = self.open_drive(&vm.name, NewDrive::Disk(disk), rule)?;
                // The guest waits while its QEMU opens an image.
                self.check_pool_image(&vm.name, &layers).await?;
                disk.record_layers(&layers);
                let disk = disk.clone();
                let attach = async || qmp.attach_disk(&old.machine, &disk, &layers).await;
                self.add_plugged(vm, Added { what: DRIVE, old, new, failed: old }, attach).await
            }
            DriveChange::Detach { path } => {
                let Some(disk) = old.disks.iter().find(|disk| disk.path == *path) else {
                    return Ok(());
                };
                let layers = disk.backing.as_ref().map_or(1, |backing| backing.len() + 1);
                let detached = qmp.detach_disk(disk, layers).await;
                detached.map_err(|error| plug_failed("detach", "the disk", &vm.name, &error))?;
                self.save_plugged(vm, new)
            }
            DriveChange::Insert { image, drive, force } => {
                let index = drive_index(&wanted, *drive)?;
                let mut layers = self.open_drive(&vm.name, NewDrive::Medium(image), rule)?;
                let Some(image) = layers.pop() else { return Ok(()) };
                let drive = new.cdroms[index].clone();
                let mut emptied = ResolvedSpec::clone(old);
                emptied.cdroms[index].image = None;
                let insert = async || qmp.insert_medium(&drive, &image, *force).await;
                let added = Added { what: DRIVE, old, new, failed: &emptied };
                self.add_plugged(vm, added, insert).await
            }
            DriveChange::Eject { drive, force } => {
                let drive = &old.cdroms[drive_index(&wanted, *drive)?];
                let ejected = qmp.eject_medium(drive, *force).await;
                ejected.map_err(|error| plug_failed("eject", "the CD", &vm.name, &error))?;
                self.save_plugged(vm, new)
            }
        }
    }

    /// Opens the files of a new disk or medium.
    fn open_drive(
        &self,
        vm: &str,
        drive: NewDrive<'_>,
        rule: FileRule,
    ) -> Result<Vec<OpenLayer>, ApiError> {
        let may_open = |file: &FoundFile| self.may_open(rule, file);
        let opened = match self.open_in_pool(&drive) {
            Some(opened) => opened,
            None => OpenFiles::open_drive(&drive, &may_open),
        };
        opened.map_err(|error| match error {
            FileError::NotAllowed { role, path } => self.file_refused(vm, rule, role, &path),
            error => file_unusable(vm, &error),
        })
    }
}

/// Checks that a running VM can get a change.
fn check_pluggable(spec: &ResolvedSpec, change: &DriveChange) -> Result<(), ApiError> {
    let refuse = |why: String, remedy: &str| {
        let message = format!("cannot change the disks of running VM \"{}\": {why}", spec.name);
        Err(ApiError::new(ErrorCode::WrongState, message, remedy))
    };
    let (bus, is_in_slot) = match change {
        DriveChange::Attach { disk } if disk.bus == DiskBus::Scsi && !spec.scsi_controller => {
            return refuse(
                "it has no SCSI controller".to_owned(),
                "stop it, then give it one with `godwit vm set VM --scsi-controller`",
            );
        }
        DriveChange::Attach { disk } => {
            (disk.bus, disk.bus == DiskBus::Virtio && spec.free_slot().is_some())
        }
        DriveChange::Detach { path } => {
            let known = spec.disks.iter().find(|disk| disk.path == *path);
            known.map_or((DiskBus::Scsi, false), |disk| (disk.bus, disk.slot.is_some()))
        }
        DriveChange::Insert { .. } | DriveChange::Eject { .. } => return Ok(()),
    };
    match bus {
        DiskBus::Scsi => Ok(()),
        DiskBus::Virtio if is_in_slot => Ok(()),
        DiskBus::Virtio if matches!(change, DriveChange::Attach { .. }) => refuse(
            format!(
                "a disk on bus virtio needs a free slot, of which it has {} in all",
                spec.hotplug_slots
            ),
            "use bus scsi, or stop it, then set `--hotplug-slots N` with `godwit vm set`",
        ),
        bus => refuse(
            format!("a disk on bus {} stays while the VM runs", bus.name()),
            "use bus scsi, or stop the VM first",
        ),
    }
}

/// Makes a change in a specification.
fn change_spec(spec: &mut VmSpec, change: &DriveChange) -> Result<(), ApiError> {
    match change {
        DriveChange::Attach { disk } => spec.disks.push(disk.as_ref().clone()),
        DriveChange::Detach { path } => {
            let Some(at) = spec.disks.iter().position(|disk| disk.path == *path) else {
                let message =
                    format!("VM \"{}\" has no disk with image {}", spec.name, path.display());
                return Err(ApiError::new(ErrorCode::NotFound, message, "see `godwit vm show`"));
            };
            spec.disks.remove(at);
        }
        DriveChange::Insert { image, drive, .. } => {
            let index = drive_index(spec, *drive)?;
            spec.cdroms[index].image = Some(image.clone());
        }
        DriveChange::Eject { drive, .. } => {
            let index = drive_index(spec, *drive)?;
            spec.cdroms[index].image = None;
        }
    }
    Ok(())
}

/// Returns the position of the CD-ROM drive that a request means: the named one, or the only one.
fn drive_index(spec: &VmSpec, drive: Option<usize>) -> Result<usize, ApiError> {
    let count = spec.cdroms.len();
    match drive {
        Some(index) if index < count => Ok(index),
        None if count == 1 => Ok(0),
        _ => {
            let which = drive.map_or("of that kind".to_owned(), |index| index.to_string());
            let (why, remedy) = match count {
                0 => (
                    "has no CD-ROM drive".to_owned(),
                    "stop it, then give it one with `godwit vm set VM --cdrom empty`",
                ),
                _ if drive.is_none() => {
                    (format!("has {count} CD-ROM drives"), "name one with --drive, counted from 0")
                }
                _ => (format!("has no CD-ROM drive {which}"), "count the drives from 0"),
            };
            let message = format!("VM \"{}\" {why}", spec.name);
            Err(ApiError::new(ErrorCode::InvalidRequest, message, remedy))
        }
    }
}

#[cfg(test)]
mod tests {
    use godwit_qemu::{Cdrom, Disk, DiskFormat};

    use super::*;

    fn spec() -> VmSpec {
        let disks = vec![Disk::new("/a", DiskFormat::Raw), Disk::new("/b", DiskFormat::Raw)];
        let cdroms = vec![Cdrom { image: Some("/cd.iso".into()), ..Cdrom::default() }];
        VmSpec { disks, cdroms, ..VmSpec::new("web") }
    }

    #[test]
    fn a_change_is_made_in_the_specification() {
        let mut changed = spec();
        change_spec(&mut changed, &DriveChange::Detach { path: "/a".into() }).unwrap();
        let disk = Disk::new("/c", DiskFormat::Qcow2);
        change_spec(&mut changed, &DriveChange::Attach { disk: Box::new(disk) }).unwrap();
        change_spec(&mut changed, &DriveChange::Eject { drive: None, force: false }).unwrap();
        assert_eq!(
            changed.images().collect::<Vec<_>>(),
            [std::path::Path::new("/b"), "/c".as_ref()]
        );
        let insert = DriveChange::Insert { image: "/two.iso".into(), drive: Some(0), force: false };
        change_spec(&mut changed, &insert).unwrap();
        assert_eq!(changed.cdroms[0].image, Some("/two.iso".into()));
    }

    #[test]
    fn an_unknown_disk_or_drive_is_named() {
        let refused = |spec: &mut VmSpec, change| change_spec(spec, &change).unwrap_err().message;
        let missing = DriveChange::Detach { path: "/c".into() };
        assert!(refused(&mut spec(), missing).contains("/c"));
        let eject = |drive| DriveChange::Eject { drive, force: false };
        assert!(refused(&mut spec(), eject(Some(1))).contains("no CD-ROM drive 1"));
        let mut none = VmSpec { cdroms: Vec::new(), ..spec() };
        assert!(refused(&mut none, eject(None)).contains("has no CD-ROM drive"));
        let mut two = VmSpec { cdroms: vec![Cdrom::default(); 2], ..spec() };
        assert!(refused(&mut two, eject(None)).contains("2 CD-ROM drives"));
    }
}
