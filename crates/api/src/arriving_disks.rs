//! Requests between two agents for disks that travel with a VM: `/v1/arriving-disks` at the
//! destination.

use std::net::SocketAddr;
use std::path::PathBuf;

use godwit_qemu::{BackingFile, DiskFormat, VmName};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// Request of `POST /v1/arriving-disks`: a source requests images for the disks of a VM. A request
/// with the ID of a transfer that was interrupted continues it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ArrivingDisks {
    /// ID of the transfer, chosen by the source: 32 hexadecimal digits.
    pub transfer: String,
    /// Name of the VM.
    pub vm: VmName,
    /// UUID of the VM.
    pub uuid: Uuid,
    /// Name of the source host.
    pub from: String,
    /// Directory for the images, a pool of Ceph as `rbd:POOL` or `rbd:POOL/NAMESPACE`, or a thin
    /// pool of LVM as `lvm:GROUP/POOL`; absent: the directory of each image at the source.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to: Option<PathBuf>,
    /// The disks, at most [`MOST_TRAVELLING_DISKS`].
    pub disks: Vec<ArrivingDisk>,
}

/// Most disks of a transfer.
pub const MOST_TRAVELLING_DISKS: usize = 32;

/// A disk that is to arrive.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ArrivingDisk {
    /// Its image at the source.
    pub path: PathBuf,
    /// Format of its image at the destination: in a pool and on a block device raw, otherwise that
    /// at the source.
    pub format: DiskFormat,
    /// Size of the disk that the guest sees.
    pub virtual_bytes: u64,
    /// Bytes of it that are in use.
    pub used_bytes: u64,
    /// Backing files that the destination must have, the nearest first; empty: their content
    /// travels, or there are none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub base: Vec<ArrivingBase>,
    /// How it arrives on a block device; absent: as a file, or in a pool. Earlier releases refuse
    /// it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub onto: Option<OntoDevice>,
}

/// How a disk arrives on a block device of the destination. The source sends all of it, also what
/// is zero: the device may hold anything.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OntoDevice {
    /// Whether a device with content is overwritten.
    #[serde(default)]
    pub overwrite: bool,
    /// Name of the source's own block device that no other device has, or nothing if the kernel
    /// knows none; absent: the image at the source is a file. The destination's device must be
    /// another one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<String>,
}

/// A backing file that the destination must have.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ArrivingBase {
    /// Its path at the source. The destination also looks for a file of its name in the directory
    /// for the images.
    pub path: PathBuf,
    /// Its format.
    pub format: DiskFormat,
    /// Length of the file.
    pub file_bytes: u64,
    /// BLAKE3 of the file's bytes, in hexadecimal digits.
    pub blake3: String,
}

/// Response to [`ArrivingDisks`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ArrivingDisksAccepted {
    /// ID that the streams' hello carries.
    pub id: String,
    /// Addresses that accept the streams. Each of them works.
    pub addresses: Vec<SocketAddr>,
    /// The images, in the order of the request.
    pub disks: Vec<ArrivingImage>,
    /// Whether the host has images that the disks are probably like: streams may refer to content
    /// by its hash. Absent from releases without such references.
    #[serde(default)]
    pub references: bool,
}

/// Response of `POST /v1/arriving-disks/checks` with [`ArrivingDisks`]: the disks could arrive.
/// Nothing was created.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ArrivingDisksChecked {
    /// The images that there would be, in the order of the request.
    pub disks: Vec<ArrivingImage>,
}

/// An image for a disk that arrives.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ArrivingImage {
    /// Its path at the destination.
    pub path: PathBuf,
    /// Its backing files at the destination, the nearest first.
    #[serde(default)]
    pub backing: Vec<BackingFile>,
    /// Identity of the cluster of Ceph that has the image; absent: it is a file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cluster: Option<Uuid>,
    /// Parts of the disk that are on the destination's disk from an earlier connection: ascending
    /// runs of offset and length, in bytes.
    #[serde(default)]
    pub present: Vec<(u64, u64)>,
    /// Number and time of birth of the image: an answer with others speaks of another image, in
    /// which nothing has arrived. Absent from checks, and from releases that do not tell.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub identity: Option<(u64, u64)>,
}
