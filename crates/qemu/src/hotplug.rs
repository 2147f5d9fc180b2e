//! Changes of a running QEMU: disks here, media, NICs, vCPUs and memory in files of their own.
//! The files are opened by the caller and passed as descriptors. What fails is undone, so that
//! nothing half made stays.

mod machine;
mod media;
mod moved;
mod nics;
mod released;

use std::os::fd::AsFd;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::sync::broadcast::error::RecvError;

use crate::drives::{self, DriveParts, PassedLayer};
use crate::launch::OpenLayer;
use crate::qmp::{Qmp, QmpError};
use crate::spec::ResolvedDisk;
use godwit_types::Fault;
pub use moved::{DiskCopy, DiskMove};
pub use released::is_detachable_device;

/// Longest time for a guest to release a device.
const RELEASE_LIMIT: Duration = Duration::from_secs(15);
/// Most descriptors of one disk or medium.
const MOST_SETS: usize = 64;

/// Why a device cannot be changed while the VM runs.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlugError {
    /// QEMU refuses or does not respond.
    #[error(transparent)]
    Qmp(#[from] QmpError),
    /// The guest keeps the device.
    #[error("the guest did not release it within {} s", RELEASE_LIMIT.as_secs())]
    NotReleased,
    /// The guest has locked the tray.
    #[error("the guest has locked the tray")]
    TrayLocked,
    /// QEMU does not have the disk where the definition has it.
    #[error("QEMU does not have the disk as the VM's definition does")]
    OtherDisks,
    /// QEMU has vCPUs that are not the first of those that the machine can have.
    #[error("QEMU does not have the vCPUs as the VM's definition does")]
    OtherVcpus,
    /// The copy of a disk has failed.
    #[error("the copy failed: {0}")]
    Copy(String),
    /// The disk is larger than the wanted size.
    #[error("it has {now} bytes in QEMU, and a smaller disk would lose data")]
    Larger {
        /// Its size.
        now: u64,
    },
}

impl PlugError {
    /// Whether QEMU may have done what was asked, or may still do it: it did not respond.
    #[must_use]
    pub fn is_unknown(&self) -> bool {
        matches!(self, PlugError::Qmp(error) if !is_refusal(error))
    }

    /// What the operator can do about it.
    #[must_use]
    pub fn remedy(&self) -> String {
        match self {
            PlugError::Qmp(error) => error.remedy(),
            PlugError::NotReleased => {
                "end its use in the guest; the VM's definition follows when the guest releases it \
                 later, or detach it again"
                    .to_owned()
            }
            PlugError::TrayLocked => {
                "unmount the CD in the guest, or eject it with --force".to_owned()
            }
            PlugError::OtherDisks | PlugError::OtherVcpus => {
                "stop the VM, then try again".to_owned()
            }
            PlugError::Copy(_) => {
                "check the space of the new image's directory and the VM's log, then try again"
                    .to_owned()
            }
            PlugError::Larger { .. } => "give a larger size".to_owned(),
        }
    }

    /// Combines code, message and remedy.
    #[must_use]
    pub fn fault(&self) -> Fault {
        let code = match self {
            PlugError::Qmp(error) => error.code(),
            PlugError::NotReleased => "device-not-released",
            PlugError::TrayLocked => "tray-locked",
            PlugError::OtherDisks => "other-disks",
            PlugError::OtherVcpus => "other-vcpus",
            PlugError::Copy(_) => "disk-copy-failed",
            PlugError::Larger { .. } => "disk-larger",
        };
        Fault::new(code, self.to_string(), self.remedy())
    }
}

impl Qmp {
    /// Attaches a disk to a controller of the running machine, whose type is `machine`, or in its
    /// slot.
    ///
    /// # Errors
    /// QEMU refuses; nothing of the disk remains. Or it does not respond, and may have the disk.
    pub async fn attach_disk(
        &self,
        machine: &str,
        disk: &ResolvedDisk,
        layers: &[OpenLayer],
    ) -> Result<(), PlugError> {
        let name = drives::unit_name(disk);
        let attach = async {
            let passed = self.add_layers(&name, layers).await?;
            let parts = drives::disk_parts(&name, disk, &passed);
            self.add_parts(&parts).await?;
            let device = drives::disk_device(machine, (&name, &parts.top), disk, None);
            self.execute("device_add", device).await
        };
        if let Err(error) = attach.await {
            if !is_refusal(&error) {
                return Err(error.into());
            }
            // Nodes have the same names with any number of layers.
            let all = layers.iter().map(|layer| PassedLayer::file(0, layer.format));
            let all: Vec<PassedLayer> = all.collect();
            self.remove_parts(&name, &drives::disk_parts(&name, disk, &all)).await;
            return Err(error.into());
        }
        Ok(())
    }

    /// Detaches a disk of a controller and waits until the guest has released it. `layers`: the
    /// number of its images.
    ///
    /// # Errors
    /// QEMU refuses, or the guest does not release the disk in time; it then stays attached. A disk
    /// whose device is gone already is detached.
    pub async fn detach_disk(&self, disk: &ResolvedDisk, layers: usize) -> Result<(), PlugError> {
        let name = drives::unit_name(disk);
        self.remove_device(&drives::disk_device_id(&name, disk)).await?;
        self.remove_disk_parts(disk, layers).await;
        Ok(())
    }

    /// Removes what is left of a disk of this number of images, whose device is gone.
    async fn remove_disk_parts(&self, disk: &ResolvedDisk, layers: usize) {
        let name = drives::unit_name(disk);
        // The format of a backing file does not matter for its names.
        let all = vec![PassedLayer::file(0, disk.format); layers.max(1)];
        let image = drives::image_name(&name, disk);
        self.remove_parts(&image, &drives::disk_parts(&name, disk, &all)).await;
    }

    /// Removes a device and waits until the guest has released it.
    ///
    /// # Errors
    /// QEMU refuses, or the guest does not release it in time. A device that is gone is removed.
    async fn remove_device(&self, device: &str) -> Result<(), PlugError> {
        let mut events = self.events();
        let is_gone = match self.execute("device_del", json!({"id": device})).await {
            // An earlier detach succeeded after its time, or was not recorded.
            Err(QmpError::Command { class, .. }) if class == "DeviceNotFound" => true,
            asked => asked.map(|_| false)?,
        };
        let released = async {
            loop {
                match events.recv().await {
                    Ok(event) if event.data["device"] == device => match &*event.name {
                        "DEVICE_DELETED" => return Ok(()),
                        "DEVICE_UNPLUG_GUEST_ERROR" => return Err(PlugError::NotReleased),
                        _ => {}
                    },
                    Ok(_) | Err(RecvError::Lagged(_)) => {}
                    Err(RecvError::Closed) => {
                        let why = self.closed().await;
                        return Err(PlugError::Qmp(QmpError::Closed { why }));
                    }
                }
            }
        };
        if !is_gone {
            let released = tokio::time::timeout(RELEASE_LIMIT, released).await;
            released.unwrap_or(Err(PlugError::NotReleased))?;
        }
        Ok(())
    }

    /// Makes a disk larger, which the guest notices. `disks`: those of the running machine's
    /// definition. `index`: the position of the disk.
    ///
    /// # Errors
    /// Those of [`Qmp::execute`]; also if QEMU has other disks or a larger disk, or cannot resize
    /// the image.
    pub async fn resize_disk(
        &self,
        disks: &[ResolvedDisk],
        index: usize,
        bytes: u64,
    ) -> Result<(), PlugError> {
        let blocks = self.execute("query-block", Value::Null).await?;
        let found = drives::find_disk(&blocks, disks, index).ok_or(PlugError::OtherDisks)?;
        if bytes < found.bytes {
            return Err(PlugError::Larger { now: found.bytes });
        }
        self.execute("block_resize", json!({"node-name": found.top, "size": bytes})).await?;
        Ok(())
    }

    /// Passes open images to QEMU. `owner`: see [`Qmp::add_set`].
    ///
    /// # Errors
    /// Those of [`Qmp::execute`].
    pub(crate) async fn add_layers(
        &self,
        owner: &str,
        layers: &[OpenLayer],
    ) -> Result<Vec<PassedLayer>, QmpError> {
        let mut passed = Vec::new();
        for layer in layers {
            // librados opens its configuration by the number of the descriptor.
            let wanted = if layer.rbd.is_some() { "fd" } else { "fdset-id" };
            let number = self.add_descriptor(owner, layer.file.as_fd(), wanted).await?;
            let (format, rbd) = (layer.format, layer.rbd.clone());
            passed.push(PassedLayer { number, format, rbd, is_device: layer.is_device() });
        }
        Ok(passed)
    }

    async fn add_parts(&self, parts: &DriveParts) -> Result<(), QmpError> {
        if let Some(limits) = &parts.limits {
            self.execute("object-add", limits.clone()).await?;
        }
        for node in &parts.nodes {
            self.execute("blockdev-add", node.clone()).await?;
        }
        Ok(())
    }

    /// Removes the nodes, limits and descriptors of a disk or a medium, as far as they exist.
    async fn remove_parts(&self, owner: &str, parts: &DriveParts) {
        let remove = async |command: &str, arguments: Value| {
            if let Err(error) = self.execute(command, arguments).await {
                tracing::debug!(owner, command, %error, "not removed from QEMU");
            }
        };
        for node in parts.nodes.iter().rev() {
            remove("blockdev-del", json!({"node-name": node["node-name"]})).await;
        }
        if let Some(limits) = &parts.limits {
            remove("object-del", json!({"id": limits["id"]})).await;
        }
        self.remove_sets(owner).await;
    }

    /// Closes the descriptors that were passed to QEMU for `owner`.
    pub(crate) async fn remove_sets(&self, owner: &str) {
        let Ok(sets) = self.execute("query-fdsets", Value::Null).await else { return };
        for set in sets.as_array().into_iter().flatten() {
            let fds = set["fds"].as_array().into_iter().flatten();
            if fds.take(MOST_SETS).any(|fd| fd["opaque"] == owner) {
                let set = json!({"fdset-id": set["fdset-id"]});
                if let Err(error) = self.execute("remove-fd", set).await {
                    tracing::debug!(owner, %error, "not removed from QEMU");
                }
            }
        }
    }
}

/// Whether QEMU has refused a command, and so has not carried it out.
pub(crate) fn is_refusal(error: &QmpError) -> bool {
    matches!(error, QmpError::Command { .. })
}
