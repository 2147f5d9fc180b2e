//! Decides which files of this host a VM may use, by who named them. An image's header names
//! backing files, so these always obey one strict rule. [`godwit_qemu::OpenFiles`] opens the files.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use godwit_api::{ApiError, ErrorCode};
use godwit_qemu::{
    CephAccess, FileError, FoundFile, MOST_COPIED_BYTES, NewDrive, OpenFiles, OpenLayer, RbdImage,
    ResolvedSpec,
};

use crate::agent::Agent;
use crate::block_devices::is_device_path;
use crate::ceph::access_to;
use crate::failure::file_unusable;
use crate::references::Image;
use crate::vm::Begin;

/// Rule for the files that a VM may use, by who requests the VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FileRule {
    /// An operator of this host may name any file; backing files must be for VMs.
    Operator,
    /// A manager's operator below the role admin may name only files below `vm_dirs`; backing files
    /// must be there too.
    VmDirs,
    /// Another host may name only files that are for VMs; backing files must be, too.
    OtherHost,
}

impl FileRule {
    /// Returns the rule for a VM's start.
    pub(super) fn of(begin: Begin) -> FileRule {
        match begin {
            Begin::Boot | Begin::Saved => FileRule::Operator,
            Begin::Incoming | Begin::IncomingRuns => FileRule::OtherHost,
        }
    }

    pub(super) fn allows(self, file: &FoundFile, vm_dirs: &[PathBuf]) -> bool {
        match self {
            FileRule::Operator if file.role != "backing file" => true,
            FileRule::Operator | FileRule::OtherHost => is_below(file, vm_dirs) || is_for_all(file),
            FileRule::VmDirs => is_below(file, vm_dirs),
        }
    }
}

impl Agent {
    /// Opens the files of this host that a VM names, and their recorded backing chains.
    ///
    /// # Errors
    /// A file is missing, the rule does not allow it, or a backing chain differs from the recorded
    /// one. A refused file was not opened.
    pub(super) fn open_files(
        &self,
        spec: &ResolvedSpec,
        rule: FileRule,
    ) -> Result<OpenFiles, ApiError> {
        let files = self.open_files_of_running(spec, rule)?;
        // QEMU gets a copy of each file that other users may not read. The copy takes memory beside
        // the guest's. A file too long to copy is refused there.
        match files.copied_bytes() {
            0 => {}
            copied => drop(self.check_memory(spec, copied.min(2 * MOST_COPIED_BYTES))?),
        }
        Ok(files)
    }

    /// Whether a VM may use a file by a rule.
    pub(super) fn may_open(&self, rule: FileRule, file: &FoundFile) -> bool {
        rule.allows(file, &self.config.vm_dirs) || self.is_device_for_vms(file)
    }

    /// Opens the files of a VM whose memory, and that of its copied files, is already taken.
    ///
    /// # Errors
    /// As [`Agent::open_files`].
    pub(super) fn open_files_of_running(
        &self,
        spec: &ResolvedSpec,
        rule: FileRule,
    ) -> Result<OpenFiles, ApiError> {
        let files = OpenFiles::open(spec, &|file| self.may_open(rule, file));
        let files = files.and_then(|mut files| {
            files.add_rbd(spec, &|image| self.ceph_access(image))?;
            Ok(files)
        });
        files.map_err(|error| match error {
            FileError::NotAllowed { role, path } => {
                self.file_refused(&spec.name, rule, role, &path)
            }
            FileError::ChainChanged { .. } | FileError::Rbd { .. } => {
                let message = format!("VM \"{}\": {error}", spec.name);
                ApiError::new(ErrorCode::Preflight, message, error.remedy())
            }
            _ => file_unusable(&spec.name, &error),
        })
    }

    /// Opens the images of a VM's disks, and their backing files, for reading. Returns none if the
    /// rule for its start does not allow one, or if they have changed.
    ///
    /// QEMU's locks belong to the open file, and duplicates share it. So these are opened again,
    /// and hold no lock.
    pub(crate) fn images_to_read(&self, spec: &ResolvedSpec, begin: Begin) -> Vec<Image> {
        let files = match self.open_files_of_running(spec, FileRule::of(begin)) {
            Ok(files) => files,
            Err(error) => {
                tracing::debug!(vm = %spec.name, %error, "the VM's images are not looked into");
                return Vec::new();
            }
        };
        // Of an image in a pool, what is open here is not the image.
        let layers = files.disks.iter().flatten().filter(|layer| layer.rbd.is_none());
        let open = layers.filter_map(|layer| layer.file.open_to_read().ok());
        open.map(|(file, path)| Image { file, path }).collect()
    }

    /// Returns this host's access to an image in a pool of Ceph. Pools of the configuration are for
    /// VMs: everybody may name an image in them.
    pub(super) fn ceph_access(&self, image: &RbdImage) -> Result<CephAccess, FileError> {
        access_to(&self.config.ceph, &self.config.name, image)
    }

    /// Opens a new disk if its image is in a pool of Ceph.
    pub(super) fn open_in_pool(
        &self,
        drive: &NewDrive<'_>,
    ) -> Option<Result<Vec<OpenLayer>, FileError>> {
        let NewDrive::Disk(disk) = drive else { return None };
        let image = RbdImage::of(&disk.path)?;
        let opened = self.ceph_access(&image);
        let opened = opened.and_then(|access| OpenLayer::in_pool(disk, &image, &access));
        Some(opened.map(|layer| vec![layer]))
    }

    pub(super) fn file_refused(
        &self,
        vm: &str,
        rule: FileRule,
        role: &str,
        path: &Path,
    ) -> ApiError {
        if is_device_path(path) {
            return self.device_refused(vm, role, path);
        }
        let (host, path) = (&self.config.name, path.display());
        let dirs = self.config.vm_dirs.iter().map(|dir| dir.display().to_string());
        let dirs = dirs.collect::<Vec<_>>().join(", ");
        let (message, remedy) = match rule {
            FileRule::OtherHost => (
                format!(
                    "cannot open {role} {path} of VM \"{vm}\": host {host} does not open it for a \
                     guest of another host"
                ),
                format!(
                    "add its directory to vm_dirs in that host's configuration, or move it below \
                     {dirs}"
                ),
            ),
            FileRule::VmDirs => (
                format!(
                    "cannot open {role} {path} of VM \"{vm}\": with links followed, it is not \
                     below vm_dirs of host {host}"
                ),
                format!("move it below {dirs}, or have an admin define the VM"),
            ),
            FileRule::Operator => (
                format!(
                    "cannot open {role} {path} of VM \"{vm}\": an image names it, and it is not \
                     below vm_dirs of host {host}"
                ),
                format!(
                    "if it is for VMs, add its directory to vm_dirs in that host's configuration \
                     or move it below {dirs}; `qemu-img convert` makes a single image without \
                     backing files"
                ),
            ),
        };
        ApiError::new(ErrorCode::Preflight, message, remedy)
    }

    fn device_refused(&self, vm: &str, role: &str, path: &Path) -> ApiError {
        let (host, path) = (&self.config.name, path.display());
        let message = format!(
            "cannot open {role} {path} of VM \"{vm}\": host {host} uses it itself, or does not \
             let VMs use it as a disk"
        );
        let remedy = "unmount it there, or add it to block_devices in that host's configuration";
        ApiError::new(ErrorCode::Preflight, message, remedy)
    }
}

/// Whether a file, with links followed, is below the directories for VMs.
fn is_below(file: &FoundFile, vm_dirs: &[PathBuf]) -> bool {
    // Its path has no links, and so neither has that of the directory. The storage of the other
    // directories may hang.
    if vm_dirs.iter().any(|dir| file.real.starts_with(dir)) {
        return true;
    }
    vm_dirs.iter().any(|dir| dir.canonicalize().is_ok_and(|dir| file.real.starts_with(dir)))
}

/// Whether a file is only read, and every user of this host can read it. A block device never
/// qualifies: its content changes with its medium.
fn is_for_all(file: &FoundFile) -> bool {
    let enters =
        |dir: &Path| std::fs::symlink_metadata(dir).is_ok_and(|data| data.mode() & 0o001 != 0);
    let is_readable = file.read_by_all && file.real.ancestors().skip(1).all(enters);
    !file.writable && !file.is_device && is_readable
}
