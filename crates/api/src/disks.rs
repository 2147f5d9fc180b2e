//! Disk images at a host: what its directories for VMs hold.

use std::path::PathBuf;

use godwit_qemu::{ByteSize, Disk, DiskBus, DiskFormat, VmSpec};
use godwit_types::RateLimit;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A disk image at a host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(example = json!({
    "path": "/srv/web.qcow2", "format": "qcow2", "virtual_bytes": 21_474_836_480_u64,
    "used_bytes": 1_073_741_824_u64, "backing": "/srv/debian-12.qcow2", "vms": ["web"]
}))]
pub struct DiskInfo {
    /// Absolute path, or the name of an image in a pool of Ceph: `rbd:POOL/IMAGE` or
    /// `rbd:POOL/NAMESPACE/IMAGE`.
    #[schema(value_type = String)]
    pub path: PathBuf,
    /// Format by its header; absent: its header is damaged, or of a format that VMs cannot use. A
    /// guest can write any header into its raw image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub format: Option<DiskFormat>,
    /// Size of the disk that a guest sees.
    pub virtual_bytes: u64,
    /// Space that the file takes; 0 of an image in a pool of Ceph, which `rbd du` tells.
    pub used_bytes: u64,
    /// Backing file that its header names.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backing: Option<String>,
    /// VMs of this host that use it, also as a backing file or a CD.
    #[serde(default)]
    pub vms: Vec<String>,
    /// Why a new image is in this directory, if its request named none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub placed: Option<String>,
}

/// The disk images in a host's directories for VMs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(example = json!({
    "disks": [{
        "path": "/srv/web.qcow2", "format": "qcow2", "virtual_bytes": 21_474_836_480_u64,
        "used_bytes": 1_073_741_824_u64, "vms": ["web"]
    }]
}))]
pub struct DiskList {
    /// By path.
    pub disks: Vec<DiskInfo>,
    /// Whether there are more files than are listed.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_cut: bool,
}

/// A new disk image, below one of the host's directories for VMs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({ "path": "/srv/web.qcow2", "size": "20GiB" }))]
pub struct CreateDisk {
    /// Absolute path. The file must not exist. Only a file name: the datastore of the host that is
    /// best by space and latency is chosen, and the answer says why. Or the name of an image in a
    /// pool of Ceph.
    #[schema(value_type = String)]
    pub path: PathBuf,
    /// Size of the disk. Default: that of its base.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub size: Option<ByteSize>,
    /// Format. Default: qcow2, of an image in a pool of Ceph raw.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub format: Option<DiskFormat>,
    /// Image that the disk begins with: its backing file, unless `full_copy` is set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub base: Option<PathBuf>,
    /// Format of the base. Default: qcow2 if its name ends with `.qcow2`, otherwise raw.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base_format: Option<DiskFormat>,
    /// Whether to copy the base, so that the disk does not need it afterwards.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub full_copy: bool,
}

/// A disk of a new VM whose image is created with the VM: `VM.qcow2` in a datastore of its host,
/// `VM-1.qcow2` for a second one, and so on. It is removed if the creation fails.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({ "size": "20GiB", "base": "/srv/debian-12.qcow2" }))]
pub struct NewDisk {
    /// See [`CreateDisk::size`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub size: Option<ByteSize>,
    /// See [`CreateDisk::format`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub format: Option<DiskFormat>,
    /// See [`CreateDisk::base`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub base: Option<PathBuf>,
    /// See [`CreateDisk::base_format`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base_format: Option<DiskFormat>,
    /// See [`CreateDisk::full_copy`].
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub full_copy: bool,
    /// Bus that the guest finds it on.
    #[serde(default)]
    pub bus: DiskBus,
    /// Datastore: a directory of the host, or a pool of Ceph as `rbd:POOL` or
    /// `rbd:POOL/NAMESPACE`; at a manager also a datastore's name or ID. Absent or `auto`: the best
    /// directory by space and latency.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub datastore: Option<String>,
}

/// Returns a specification with stand-ins for its new disks, to check it before their images exist.
#[must_use]
pub fn with_new_disks(spec: &VmSpec, new: &[NewDisk]) -> VmSpec {
    let stand_in = |disk: &NewDisk| {
        let format = disk.format.unwrap_or(DiskFormat::Qcow2);
        Disk { bus: disk.bus, ..Disk::new("/new", format) }
    };
    let mut spec = spec.clone();
    spec.disks.extend(new.iter().map(stand_in));
    spec
}

/// A new size of a disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({ "path": "/srv/web.qcow2", "size": "40GiB" }))]
pub struct ResizeDisk {
    /// Absolute path of the image.
    #[schema(value_type = String)]
    pub path: PathBuf,
    /// Size of the disk, not smaller than now.
    #[schema(value_type = String)]
    pub size: ByteSize,
}

/// A move of a VM's disk to another datastore or format of its host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({ "disk": "/srv/web.raw", "to": "/ssd", "format": "qcow2" }))]
pub struct MoveDisk {
    /// Absolute path of the disk's image.
    #[schema(value_type = String)]
    pub disk: PathBuf,
    /// Directory of the new image, which gets a name that no file there has: one of the host's
    /// directories for VMs, or one below. Or a pool of Ceph, as `rbd:POOL` or
    /// `rbd:POOL/NAMESPACE`.
    #[schema(value_type = String)]
    pub to: PathBuf,
    /// Format of the new image. Default: that of the disk; in a pool of Ceph raw.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub format: Option<DiskFormat>,
    /// Whether the new image gets what the backing files have, too, and needs none. Otherwise a
    /// layer becomes a layer on the same base.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub flatten: bool,
    /// Limit of the copy while the guest runs. What the guest writes is not limited.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub bandwidth_limit: Option<RateLimit>,
    /// Whether to delete the old image afterwards, unless something needs it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub delete_source: bool,
}

impl MoveDisk {
    /// Returns a move with the default of every option.
    #[must_use]
    pub fn new(disk: impl Into<PathBuf>, to: impl Into<PathBuf>) -> MoveDisk {
        MoveDisk {
            disk: disk.into(),
            to: to.into(),
            format: None,
            flatten: false,
            bandwidth_limit: None,
            delete_source: false,
        }
    }
}
