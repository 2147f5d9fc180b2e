//! Images of a transfer, open to be filled: a raw file itself, a qcow2 file and an image in a pool
//! of Ceph as the export of a QEMU without a guest.

use std::fs::File;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;

use godwit_api::ApiError;
use godwit_qemu::{DiskFormat, ImageTool};

/// An image.
pub(crate) struct OpenedImage {
    pub(crate) path: PathBuf,
    pub(crate) content: OpenedContent,
    /// The image's file, if a QEMU writes it: its page cache is dropped through this.
    pub(crate) cached: Option<File>,
    /// Returns why the image should not grow: only the space reserved for VMs is left.
    pub(crate) check_growth: Box<dyn Fn() -> Result<(), ApiError> + Send + Sync>,
}

/// How an image is written, or read.
pub(crate) enum OpenedContent {
    /// The file itself. If it is to be written, its lock keeps QEMUs from opening it to write.
    Raw(File),
    /// The connection to the export of a QEMU.
    Exported(UnixStream, Box<ImageTool>),
}

/// An image of this host that a disk which arrives is probably like.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct AlikeImage {
    pub(crate) path: PathBuf,
    pub(crate) format: DiskFormat,
}
