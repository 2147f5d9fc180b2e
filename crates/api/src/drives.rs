//! Changes of the disks and CDs of a VM that exists.

use std::path::PathBuf;

use godwit_qemu::Disk;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A change of a disk or a CD of a VM, running or stopped.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "action", rename_all = "kebab-case", deny_unknown_fields)]
#[schema(example = json!({
    "action": "attach", "disk": { "path": "/srv/data.qcow2", "format": "qcow2", "bus": "scsi" }
}))]
pub enum DriveChange {
    /// Attaches a disk. A running VM takes it on bus scsi only.
    Attach {
        /// The disk.
        disk: Box<Disk>,
    },
    /// Detaches the disk with this image, which is kept.
    Detach {
        /// Absolute path of the image.
        #[schema(value_type = String)]
        path: PathBuf,
    },
    /// Inserts an image into a CD-ROM drive, in place of the one in it.
    Insert {
        /// Absolute path of the image, which every host of the VM has.
        #[schema(value_type = String)]
        image: PathBuf,
        /// Position of the drive, from 0. Default: the only one.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        drive: Option<usize>,
        /// Whether to open a tray that the guest has locked.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        force: bool,
    },
    /// Ejects what is in a CD-ROM drive.
    Eject {
        /// Position of the drive, from 0. Default: the only one.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        drive: Option<usize>,
        /// Whether to open a tray that the guest has locked.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        force: bool,
    },
}

/// Request of `POST /v1/vms/{name}/drives`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ChangeDrive {
    /// The change.
    pub change: DriveChange,
    /// See [`crate::CreateVm::vm_dirs_only`].
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub vm_dirs_only: bool,
}
