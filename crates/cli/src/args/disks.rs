//! Command line of disk images.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use godwit_qemu::{ByteSize, DiskFormat};
use godwit_types::RateLimit;

#[derive(Debug, Subcommand)]
pub(crate) enum DiskCommand {
    /// Create a disk image in one of the host's directories for VMs (vm_dirs)
    #[command(after_help = "Examples:
  godwit disk create /srv/web.qcow2 --size 20GiB --host a
  godwit disk create web.qcow2 --size 20GiB --datastore auto --host a
  godwit disk create /srv/web.qcow2 --base /srv/debian-12.qcow2 --host a
  godwit disk create /srv/db.raw --format raw --base /srv/debian-12.qcow2 --full-copy --host a")]
    Create(CreateDiskArgs),
    /// List the disk images in the host's directories for VMs
    #[command(after_help = "Example:
  godwit disk list --host a")]
    List,
    /// Show a disk image
    #[command(after_help = "Example:
  godwit disk info /srv/web.qcow2 --host a")]
    Info {
        /// Path of the image
        path: PathBuf,
    },
    /// Make a disk larger; the guest of a running VM notices
    #[command(after_help = "Example:
  godwit disk resize /srv/web.qcow2 --size 40GiB --host a")]
    Resize {
        /// Path of the image
        path: PathBuf,
        /// New size, not smaller than now
        #[arg(long, value_name = "SIZE")]
        size: ByteSize,
    },
    /// Move a disk of a VM to another datastore or format of its host, also while the guest runs
    #[command(after_help = "Examples:
  godwit disk move web /srv/web.raw --to /ssd
  godwit disk move web /srv/web.raw --to /ssd --format qcow2 --bandwidth-limit 2gbit
  godwit disk move web /srv/web.raw --format qcow2 --delete-source

Ctrl-C cancels the move: the VM keeps its image, and nothing of the new one remains.")]
    Move(MoveDiskArgs),
    /// List the images that stay after their disks have moved to another host; remove or keep one
    #[command(after_help = "Examples:
  godwit disk kept --host a
  godwit disk kept remove /srv/web.qcow2 --host a
  godwit disk kept keep /srv/web.qcow2 --host a")]
    Kept {
        #[command(subcommand)]
        command: Option<KeptCommand>,
    },
    /// Delete a disk image that no VM uses
    #[command(after_help = "Example:
  godwit disk delete /srv/web.qcow2 --host a")]
    Delete {
        /// Path of the image
        path: PathBuf,
    },
}

#[derive(Clone, Debug, Subcommand)]
pub(crate) enum KeptCommand {
    /// Remove an image now, if the VM has its new disks
    #[command(after_help = "Example:
  godwit disk kept remove /srv/web.qcow2 --host a")]
    Remove {
        /// Path of the image
        path: PathBuf,
    },
    /// Keep an image until it is removed by request
    #[command(after_help = "Example:
  godwit disk kept keep /srv/web.qcow2 --host a")]
    Keep {
        /// Path of the image
        path: PathBuf,
    },
}

#[derive(Clone, Debug, Args)]
pub(crate) struct CreateDiskArgs {
    /// Path of the new image, rbd:POOL/IMAGE in a pool of Ceph, or only its name: then its
    /// datastore is chosen
    pub(crate) path: PathBuf,
    /// Datastore of an image of which only the name is given: a directory of the host or a pool of
    /// Ceph as rbd:POOL, with a manager also a name or an ID [default: auto, the best directory by
    /// space and latency]
    #[arg(long, value_name = "DATASTORE")]
    pub(crate) datastore: Option<String>,
    /// Size of the disk [default: that of the base]
    #[arg(long, value_name = "SIZE", required_unless_present = "base")]
    pub(crate) size: Option<ByteSize>,
    /// Format [default: qcow2; in a pool of Ceph raw]
    #[arg(long)]
    pub(crate) format: Option<FormatArg>,
    /// Image that the disk begins with; it becomes the backing file
    #[arg(long, value_name = "FILE")]
    pub(crate) base: Option<PathBuf>,
    /// Format of the base [default: qcow2 if its name ends with .qcow2, otherwise raw]
    #[arg(long, requires = "base")]
    pub(crate) base_format: Option<FormatArg>,
    /// Copy the base, so that the disk does not need it afterwards
    #[arg(long, requires = "base")]
    pub(crate) full_copy: bool,
}

#[derive(Clone, Debug, Args)]
pub(crate) struct MoveDiskArgs {
    /// Name of the VM
    pub(crate) vm: String,
    /// Path of the disk's image
    #[arg(value_name = "IMAGE")]
    pub(crate) disk: PathBuf,
    /// Directory of the new image, in one of the host's directories for VMs (vm_dirs), or a pool of
    /// Ceph as rbd:POOL [default: that of the image]
    #[arg(long, value_name = "DIR", required_unless_present_any = ["format", "flatten"])]
    pub(crate) to: Option<PathBuf>,
    /// Format of the new image [default: that of the disk]
    #[arg(long)]
    pub(crate) format: Option<FormatArg>,
    /// Copy what the backing files have, too; otherwise a layer stays a layer on the same base
    #[arg(long)]
    pub(crate) flatten: bool,
    /// Bandwidth limit of the copy while the guest runs: at least 1mbit, or none [default: none]
    #[arg(long, value_name = "RATE|none")]
    pub(crate) bandwidth_limit: Option<RateLimit>,
    /// Delete the old image when the disk has moved [default: it stays, and no VM uses it]
    #[arg(long)]
    pub(crate) delete_source: bool,
}

/// Format of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum FormatArg {
    Qcow2,
    Raw,
}

impl From<FormatArg> for DiskFormat {
    fn from(format: FormatArg) -> DiskFormat {
        match format {
            FormatArg::Qcow2 => DiskFormat::Qcow2,
            FormatArg::Raw => DiskFormat::Raw,
        }
    }
}
