//! The host's files of a VM. They are opened before QEMU starts, which inherits them open and opens
//! no file of the host by its path.
//!
//! So QEMU's user needs no right to any directory. No file changes its owner while a VM runs (on
//! storage that two hosts share, a user has another number on each), and a path is resolved once.
//! Disk images go into QEMU's descriptor sets: QEMU's locks are those of the open file, which its
//! duplicates share (`F_OFD_SETLK`; QEMU 7.2 to 10.0). An image brings along its backing file, as
//! its header names it: see [`super::qcow2`].
//!
//! A header can name any file of the host, and opening a device can have side effects. So each file
//! is found first ([`FoundFile`]): links are followed once, and nothing is opened. It is opened
//! when the caller allows it and, as a backing file, when it is the recorded one. The opened file
//! is the one that was found.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags};

use super::qcow2::{self, ImageError};
use crate::firmware::OpenFirmware;
use crate::rbd::{CephAccess, RbdAccess, RbdImage};
use crate::spec::{BackingFile, DiskFormat, MOST_BACKING_FILES, ResolvedDisk, ResolvedSpec};

/// Largest kernel, initrd or library that is copied into memory because QEMU's user may not read
/// the file.
pub const MOST_COPIED_BYTES: u64 = 256 << 20;
/// Mode bit that lets others read.
const READ_BY_ALL: u32 = 0o004;

/// A host file that a VM or an image names, not yet open.
#[derive(Debug)]
pub struct FoundFile {
    /// Role in the VM: `kernel`, `initrd`, `disk`, `backing file`.
    pub role: &'static str,
    pub path: PathBuf,
    /// Real path, with every link resolved.
    pub real: PathBuf,
    /// Whether QEMU may write to it.
    pub writable: bool,
    /// Whether it is a block device.
    pub is_device: bool,
    /// Whether the file's own mode lets every user read it. The directories above it may still keep
    /// users out.
    pub read_by_all: bool,
    /// Reference to the file that does not open it (`O_PATH`).
    reference: OwnedFd,
}

/// An open file of the host.
#[derive(Debug)]
pub struct OpenFile {
    /// Role in the VM: `kernel`, `initrd`, `disk`, `backing file`.
    pub role: &'static str,
    pub path: PathBuf,
    /// Real path, with every link resolved.
    pub real: PathBuf,
    file: OwnedFd,
}

/// An image of a disk, or a backing file.
#[derive(Debug)]
pub struct OpenLayer {
    /// The image; of one in a pool of Ceph the configuration by which QEMU opens it.
    pub file: OpenFile,
    pub format: DiskFormat,
    /// The image in a pool of Ceph, if it is one.
    pub rbd: Option<RbdAccess>,
}

/// All host files that a VM's specification names.
#[derive(Debug, Default)]
pub struct OpenFiles {
    pub kernel: Option<OpenFile>,
    /// Initial RAM disk of the kernel.
    pub initrd: Option<OpenFile>,
    /// For each disk its image and backing files. The last one has no backing file.
    pub disks: Vec<Vec<OpenLayer>>,
    /// For each CD-ROM drive the image in it.
    pub cdroms: Vec<Option<OpenFile>>,
    /// Images of a firmware in flash. The specification names no file for them: the host adds
    /// them.
    pub firmware: Option<OpenFirmware>,
}

/// A disk or a medium for a VM that exists.
#[derive(Clone, Copy, Debug)]
pub enum NewDrive<'a> {
    Disk(&'a ResolvedDisk),
    /// Path of a CD image.
    Medium(&'a Path),
}

/// Why a file of a VM cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// The file cannot be opened.
    #[error("cannot open {role} {}: {why}", path.display())]
    Open {
        /// Role of the file in the VM.
        role: &'static str,
        /// The file.
        path: PathBuf,
        why: io::Error,
    },
    /// The image's header cannot be used.
    #[error("cannot use {role} {}: {why}", path.display())]
    Image {
        /// Role of the file in the VM.
        role: &'static str,
        /// The file.
        path: PathBuf,
        /// What is wrong.
        why: ImageError,
    },
    /// The backing chain is too long.
    #[error(
        "cannot open disk {}: it has more than {MOST_BACKING_FILES} backing files",
        path.display()
    )]
    TooDeep {
        /// The disk.
        path: PathBuf,
    },
    /// The headers of the images name another chain than the recorded one.
    #[error(
        "cannot open disk {}: its backing chain changed: recorded {}, found {}",
        disk.display(), chain_text(recorded), chain_text(found)
    )]
    ChainChanged {
        disk: PathBuf,
        recorded: Vec<BackingFile>,
        /// Backing files that the headers name, up to the first that differs: no file behind it is
        /// read.
        found: Vec<BackingFile>,
    },
    /// The image is in a pool of Ceph, and this host has no access to it.
    #[error("cannot open disk {}: {why}", path.display())]
    Rbd {
        /// Name of the image.
        path: PathBuf,
        why: String,
        remedy: String,
    },
    /// The caller does not allow the file.
    #[error("cannot open {role} {}: it may not be opened for this VM", path.display())]
    NotAllowed {
        /// Role of the file in the VM.
        role: &'static str,
        path: PathBuf,
    },
}

impl FileError {
    /// What the operator can do about it.
    #[must_use]
    pub fn remedy(&self) -> String {
        match self {
            FileError::Open { .. } => {
                "make it available at that path on every host of the VM".to_owned()
            }
            FileError::Image { why, .. } => why.remedy().to_owned(),
            FileError::TooDeep { .. } => {
                "see `qemu-img info --backing-chain`; `qemu-img convert` combines it into one image"
                    .to_owned()
            }
            FileError::ChainChanged { .. } => {
                "restore the recorded chain (`qemu-img rebase -u -b FILE -F FORMAT IMAGE`); or, if \
                you made the new one, accept it: delete the VM and create it again, its disks stay"
                    .to_owned()
            }
            FileError::Rbd { remedy, .. } => remedy.clone(),
            FileError::NotAllowed { .. } => "give the VM another file".to_owned(),
        }
    }
}

/// Lists backing files for an error.
fn chain_text(chain: &[BackingFile]) -> String {
    match chain {
        [] => "no backing file".to_owned(),
        files => files.iter().map(BackingFile::to_string).collect::<Vec<_>>().join(", "),
    }
}

impl FoundFile {
    fn find(role: &'static str, path: &Path, writable: bool) -> Result<FoundFile, FileError> {
        let failed = |why: io::Error| FileError::Open { role, path: path.to_owned(), why };
        let found = rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty());
        let found = found.and_then(|reference| Ok((rustix::fs::fstat(&reference)?, reference)));
        let (stat, reference) = found.map_err(|why| failed(why.into()))?;
        let is_device = match rustix::fs::FileType::from_raw_mode(stat.st_mode) {
            rustix::fs::FileType::RegularFile => false,
            rustix::fs::FileType::BlockDevice => true,
            rustix::fs::FileType::Directory => return Err(failed(rustix::io::Errno::ISDIR.into())),
            _ => return Err(failed(rustix::io::Errno::INVAL.into())),
        };
        let real = std::fs::read_link(magic_link(&reference)).map_err(failed)?;
        let (path, read_by_all) = (path.to_owned(), stat.st_mode & READ_BY_ALL != 0);
        Ok(FoundFile { role, path, real, writable, is_device, read_by_all, reference })
    }

    /// Opens the file that was found, whatever its path leads to by now.
    fn open(self) -> Result<OpenFile, FileError> {
        let FoundFile { role, path, real, writable, reference, .. } = self;
        let access = if writable { OFlags::RDWR } else { OFlags::RDONLY };
        let flags = access | OFlags::CLOEXEC | OFlags::NONBLOCK;
        match rustix::fs::open(magic_link(&reference), flags, Mode::empty()) {
            Ok(file) => Ok(OpenFile { role, path, real, file }),
            Err(why) => Err(FileError::Open { role, path, why: why.into() }),
        }
    }

    fn open_if(self, may_open: &dyn Fn(&FoundFile) -> bool) -> Result<OpenFile, FileError> {
        if may_open(&self) {
            return self.open();
        }
        Err(FileError::NotAllowed { role: self.role, path: self.path })
    }
}

/// Returns the link that leads to what a descriptor of this process refers to.
fn magic_link(file: &OwnedFd) -> String {
    format!("/proc/self/fd/{}", file.as_raw_fd())
}

impl OpenFile {
    /// Returns the file once more.
    ///
    /// # Errors
    /// There is no free descriptor.
    pub fn try_clone(&self) -> io::Result<OpenFile> {
        let file = self.file.try_clone()?;
        Ok(OpenFile { role: self.role, path: self.path.clone(), real: self.real.clone(), file })
    }

    /// Opens the file once more, for reading alone and without the locks of this one. Returns it
    /// with its real path.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn open_to_read(&self) -> io::Result<(File, PathBuf)> {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let file = rustix::fs::open(magic_link(&self.file), flags, Mode::empty())?;
        Ok((File::from(file), self.real.clone()))
    }

    /// Bytes that [`OpenFile::readable_by_all`] would copy; 0 if others may read the file.
    fn copied_bytes(&self) -> u64 {
        let data = rustix::fs::fstat(&self.file);
        data.map_or(0, |data| {
            if data.st_mode & READ_BY_ALL == 0 { data.st_size.unsigned_abs() } else { 0 }
        })
    }

    /// Returns the file or, if others may not read it, a copy in memory that they may read. A
    /// program that reopens its own descriptor by path needs that right.
    pub(super) fn readable_by_all(self) -> io::Result<OwnedFd> {
        readable_by_all(self.file.into(), self.role)
    }
}

/// Implements [`OpenFile::readable_by_all`]. Counts the length while copying, because the file may
/// have changed.
pub(super) fn readable_by_all(file: File, name: &str) -> io::Result<OwnedFd> {
    let metadata = file.metadata()?;
    if metadata.mode() & READ_BY_ALL != 0 {
        return Ok(file.into());
    }
    let too_long = || {
        let most = MOST_COPIED_BYTES >> 20;
        let why = format!(
            "others may not read it, and it has more than the {most} MiB that are copied for them"
        );
        io::Error::new(io::ErrorKind::FileTooLarge, why)
    };
    if metadata.len() > MOST_COPIED_BYTES {
        return Err(too_long());
    }
    let copy = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    let mut copy = File::from(copy);
    if io::copy(&mut file.take(MOST_COPIED_BYTES + 1), &mut copy)? > MOST_COPIED_BYTES {
        return Err(too_long());
    }
    let seals = SealFlags::SEAL | SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE;
    rustix::fs::fcntl_add_seals(&copy, seals)?;
    Ok(copy.into())
}

impl From<OpenFile> for OwnedFd {
    fn from(file: OpenFile) -> OwnedFd {
        file.file
    }
}

impl AsFd for OpenFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl OpenFiles {
    /// Opens all files in the mode that QEMU needs. Takes no locks: QEMU does. Calls `may_open` for
    /// each file before it is opened, and for each backing file before its header is read. Leaves
    /// images in pools of Ceph to [`OpenFiles::add_rbd`].
    ///
    /// # Errors
    /// The first file that is unavailable, not allowed, or not the recorded backing file.
    pub fn open(
        spec: &ResolvedSpec,
        may_open: &dyn Fn(&FoundFile) -> bool,
    ) -> Result<OpenFiles, FileError> {
        let boot = |role, path: &Option<PathBuf>| {
            let found = path.as_ref().map(|path| FoundFile::find(role, path, false)).transpose()?;
            found.map(|file| file.open_if(may_open)).transpose()
        };
        Ok(OpenFiles {
            kernel: boot("kernel", &spec.kernel)?,
            initrd: boot("initrd", &spec.initrd)?,
            disks: spec
                .disks
                .iter()
                .map(|disk| match RbdImage::of(&disk.path) {
                    Some(_) => Ok(Vec::new()),
                    None => open_disk(disk, may_open),
                })
                .collect::<Result<_, _>>()?,
            cdroms: spec
                .cdroms
                .iter()
                .map(|drive| boot("CD image", &drive.image))
                .collect::<Result<_, _>>()?,
            firmware: None,
        })
    }

    /// Adds the images in pools of Ceph. `access`: this host's access to the cluster of an image.
    ///
    /// # Errors
    /// Those of `access`; also if the image was recorded as one of another cluster.
    pub fn add_rbd(
        &mut self,
        spec: &ResolvedSpec,
        access: &dyn Fn(&RbdImage) -> Result<CephAccess, FileError>,
    ) -> Result<(), FileError> {
        for (disk, layers) in spec.disks.iter().zip(&mut self.disks) {
            if let Some(image) = RbdImage::of(&disk.path) {
                *layers = vec![OpenLayer::in_pool(disk, &image, &access(&image)?)?];
            }
        }
        Ok(())
    }

    /// Records the backing chains of these open images, and the clusters of those in pools of Ceph,
    /// in the specification that names them.
    pub fn record_chains(&self, spec: &mut ResolvedSpec) {
        for (disk, layers) in spec.disks.iter_mut().zip(&self.disks) {
            disk.record_layers(layers);
        }
    }

    /// Checks that no image named as raw, and no CD image, has the header of another format.
    /// `is_new`: for each disk,
    /// whether an operator names it now; a guest may later write any header into its raw image.
    ///
    /// # Errors
    /// The first image that cannot be read or has such a header.
    pub fn check_raw(&self, is_new: impl Iterator<Item = bool>) -> Result<(), FileError> {
        let new = self.disks.iter().zip(is_new).filter(|(_, is_new)| *is_new);
        let images = new.filter_map(|(layers, _)| layers.first());
        let is_raw_file =
            |layer: &&OpenLayer| layer.format == DiskFormat::Raw && layer.rbd.is_none();
        let raw = images.filter(is_raw_file).map(|layer| &layer.file);
        raw.chain(self.cdroms.iter().flatten()).try_for_each(check_raw)
    }

    /// Opens the files of one more disk of a VM, or of one more medium.
    ///
    /// # Errors
    /// As [`OpenFiles::open`]; also if it is new and named as raw, but has the header of another
    /// format.
    pub fn open_drive(
        drive: &NewDrive<'_>,
        may_open: &dyn Fn(&FoundFile) -> bool,
    ) -> Result<Vec<OpenLayer>, FileError> {
        let layers = match drive {
            NewDrive::Disk(disk) => open_disk(disk, may_open)?,
            NewDrive::Medium(image) => {
                let file = FoundFile::find("CD image", image, false)?.open_if(may_open)?;
                vec![OpenLayer { file, format: DiskFormat::Raw, rbd: None }]
            }
        };
        let top = layers.first().filter(|layer| layer.format == DiskFormat::Raw);
        top.map_or(Ok(()), |layer| check_raw(&layer.file))?;
        Ok(layers)
    }

    /// Opens a disk of any format to read it, without a look at its content.
    ///
    /// # Errors
    /// It is unavailable, or not allowed.
    pub fn open_foreign(
        path: &Path,
        may_open: &dyn Fn(&FoundFile) -> bool,
    ) -> Result<OpenFile, FileError> {
        FoundFile::find("disk", path, false)?.open_if(may_open)
    }

    /// Memory for copies of files that QEMU's user may not read, in use while QEMU runs.
    #[must_use]
    pub fn copied_bytes(&self) -> u64 {
        self.kernel.iter().chain(&self.initrd).map(OpenFile::copied_bytes).sum()
    }
}

impl OpenLayer {
    /// Returns a layer that the caller has opened itself.
    #[must_use]
    pub fn new(file: OwnedFd, path: &Path, format: DiskFormat) -> OpenLayer {
        let (path, real) = (path.to_owned(), path.to_owned());
        OpenLayer { file: OpenFile { role: "disk", path, real, file }, format, rbd: None }
    }

    /// Returns the image of a disk in a pool of Ceph. It is not known yet whether it exists.
    ///
    /// # Errors
    /// It was recorded as an image of another cluster, or the kernel has no memory.
    pub fn in_pool(
        disk: &ResolvedDisk,
        image: &RbdImage,
        access: &CephAccess,
    ) -> Result<OpenLayer, FileError> {
        let path = disk.path.clone();
        if let Some(recorded) = disk.cluster.filter(|recorded| *recorded != access.fsid) {
            return Err(FileError::Rbd {
                path,
                why: format!(
                    "it is in Ceph cluster {recorded}, and pool {} is in cluster {} here",
                    image.place(),
                    access.fsid
                ),
                remedy: "use a host of that cluster, or correct [[ceph]] in this host's \
                         configuration"
                    .to_owned(),
            });
        }
        let file = access.file().map_err(|why| FileError::Open {
            role: "disk",
            path: path.clone(),
            why,
        })?;
        let real = path.clone();
        let file = OpenFile { role: "disk", path, real, file };
        Ok(OpenLayer { file, format: disk.format, rbd: Some(access.to(image)) })
    }

    /// Whether it is a block device.
    #[must_use]
    pub fn is_device(&self) -> bool {
        rustix::fs::fstat(&self.file).is_ok_and(|data| {
            rustix::fs::FileType::from_raw_mode(data.st_mode) == rustix::fs::FileType::BlockDevice
        })
    }

    /// Returns the layer as a recorded backing file.
    #[must_use]
    pub fn as_backing(&self) -> BackingFile {
        BackingFile { path: self.file.real.clone(), format: self.format }
    }
}

impl ResolvedDisk {
    /// Records the backing files among these layers of its image, and the cluster that has it.
    pub fn record_layers(&mut self, layers: &[OpenLayer]) {
        // A raw image has no header that could name a file.
        self.backing = (self.format == DiskFormat::Qcow2)
            .then(|| layers.iter().skip(1).map(OpenLayer::as_backing).collect());
        self.cluster = layers.first().and_then(|top| top.rbd.as_ref()).map(|rbd| rbd.fsid);
    }
}

fn open_disk(
    disk: &ResolvedDisk,
    may_open: &dyn Fn(&FoundFile) -> bool,
) -> Result<Vec<OpenLayer>, FileError> {
    let top = FoundFile::find("disk", &disk.path, !disk.readonly)?.open_if(may_open)?;
    let mut layers = vec![OpenLayer { file: top, format: disk.format, rbd: None }];
    let mut chain: Vec<BackingFile> = Vec::new();
    let changed = |found: &[BackingFile], recorded: &[BackingFile]| FileError::ChainChanged {
        disk: disk.path.clone(),
        recorded: recorded.to_vec(),
        found: found.to_vec(),
    };
    while let Some((path, format)) = layers.last().map_or(Ok(None), named_backing)? {
        if chain.len() == MOST_BACKING_FILES {
            return Err(FileError::TooDeep { path: disk.path.clone() });
        }
        let file = FoundFile::find("backing file", &path, false)?;
        chain.push(BackingFile { path: file.real.clone(), format });
        if let Some(recorded) =
            disk.backing.as_ref().filter(|recorded| !recorded.starts_with(&chain))
        {
            return Err(changed(&chain, recorded));
        }
        layers.push(OpenLayer { file: file.open_if(may_open)?, format, rbd: None });
    }
    match &disk.backing {
        Some(recorded) if *recorded != chain => Err(changed(&chain, recorded)),
        _ => Ok(layers),
    }
}

/// Reads from a layer's header its backing file and the format of that.
fn named_backing(layer: &OpenLayer) -> Result<Option<(PathBuf, DiskFormat)>, FileError> {
    let OpenLayer { file, format: DiskFormat::Qcow2, .. } = layer else { return Ok(None) };
    let found = backing(file).map_err(|why| FileError::Image {
        role: file.role,
        path: file.path.clone(),
        why,
    })?;
    Ok(found.map(|backing| (qcow2::resolve(&file.path, &backing.file), backing.format)))
}

fn check_raw(file: &OpenFile) -> Result<(), FileError> {
    let failed = |why| FileError::Image { role: file.role, path: file.path.clone(), why };
    let mut head = [0; qcow2::MAGIC_BYTES];
    let read = rustix::io::pread(file, &mut head[..], 0);
    let length = read.map_err(|why| failed(ImageError::Read(why.into())))?;
    match qcow2::format_of(&head[..length]) {
        Some(format) => Err(failed(ImageError::NotRaw { format })),
        None => Ok(()),
    }
}

fn backing(file: &OpenFile) -> Result<Option<qcow2::Backing>, ImageError> {
    let mut head = Vec::new();
    // A duplicate of the descriptor: another open file would have its own lock. QEMU does not
    // depend on the file's position.
    let mut file = File::from(file.as_fd().try_clone_to_owned()?);
    io::Seek::rewind(&mut file)?;
    file.take(qcow2::HEAD_BYTES).read_to_end(&mut head)?;
    qcow2::backing(&head)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;
    use crate::launch::StartError;
    use crate::launch::qcow2::tests::head;
    use crate::spec::Disk;

    fn open(role: &'static str, path: &Path) -> Result<OpenFile, FileError> {
        FoundFile::find(role, path, false)?.open()
    }

    /// Returns a disk in `folder` on top of `backing`, which is on top of "base.img" there.
    fn disk_on(folder: &Path, backing: &str) -> ResolvedDisk {
        let path = folder.join("top.qcow2");
        std::fs::write(&path, head(backing, Some("qcow2"))).unwrap();
        std::fs::write(folder.join("middle.qcow2"), head("base.img", Some("raw"))).unwrap();
        std::fs::write(folder.join("base.img"), "a base").unwrap();
        Disk::new(path, DiskFormat::Qcow2).into()
    }

    /// Opens a disk, and lists the files for which it asked `may_open`.
    fn asked_of(disk: &ResolvedDisk) -> (Vec<PathBuf>, Result<Vec<OpenLayer>, FileError>) {
        let asked = std::cell::RefCell::<Vec<PathBuf>>::default();
        let may_open = |file: &FoundFile| {
            asked.borrow_mut().push(file.real.clone());
            true
        };
        let opened = open_disk(disk, &may_open);
        (asked.take(), opened)
    }

    #[test]
    fn a_changed_backing_chain_is_refused_before_its_file_is_opened() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().canonicalize().unwrap().join(name);
        let mut disk = disk_on(folder.path(), "middle.qcow2");
        let chain = |names: &[(&str, DiskFormat)]| -> Vec<BackingFile> {
            names.iter().map(|&(name, format)| BackingFile { path: at(name), format }).collect()
        };
        let (_, opened) = asked_of(&disk);
        let whole = chain(&[("middle.qcow2", DiskFormat::Qcow2), ("base.img", DiskFormat::Raw)]);
        let found: Vec<BackingFile> =
            opened.unwrap().iter().skip(1).map(OpenLayer::as_backing).collect();
        assert_eq!(found, whole);
        disk.backing = Some(whole.clone());
        assert!(asked_of(&disk).1.is_ok());
        std::fs::write(at("secret"), "a secret").unwrap();
        let top =
            |backing: &str, format| std::fs::write(at("top.qcow2"), head(backing, format)).unwrap();
        let refused = |text: &str, most_asked: usize| {
            let (asked, opened) = asked_of(&disk);
            let error = opened.unwrap_err();
            assert!(asked.len() <= most_asked && !asked.contains(&at("secret")), "{asked:?}");
            assert!(error.to_string().contains(text), "{error}");
            assert!(error.to_string().contains("its backing chain changed: recorded "), "{error}");
            assert!(
                error.remedy().contains("delete the VM and create it again"),
                "{}",
                error.remedy()
            );
        };
        top("secret", Some("raw"));
        refused(&format!("found {} (raw)", at("secret").display()), 1);
        top("middle.qcow2", Some("raw"));
        refused("middle.qcow2 (raw)", 1);
        top("", None);
        refused("found no backing file", 1);
        top("middle.qcow2", Some("qcow2"));
        std::fs::write(at("middle.qcow2"), head("secret", Some("raw"))).unwrap();
        refused(&format!("middle.qcow2 (qcow2), {} (raw)", at("secret").display()), 2);
        std::fs::write(at("middle.qcow2"), head("base.img", Some("raw"))).unwrap();
        std::fs::rename(at("base.img"), at("other")).unwrap();
        std::os::unix::fs::symlink(at("secret"), at("base.img")).unwrap();
        refused("secret (raw)", 2);
    }

    #[test]
    fn a_whole_image_that_gets_a_backing_file_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let disk =
            ResolvedDisk { backing: Some(Vec::new()), ..disk_on(folder.path(), "middle.qcow2") };
        let (asked, opened) = asked_of(&disk);
        let error = opened.unwrap_err().to_string();
        assert_eq!(asked.len(), 1);
        assert!(error.contains("recorded no backing file, found "), "{error}");
    }

    #[test]
    fn the_opened_file_is_the_one_that_was_found() {
        let folder = tempfile::tempdir().unwrap();
        let (disk, secret) = (folder.path().join("disk"), folder.path().join("secret"));
        std::fs::write(&disk, "a disk").unwrap();
        std::fs::write(&secret, "a secret").unwrap();
        let found = FoundFile::find("disk", &disk, false).unwrap();
        std::fs::remove_file(&disk).unwrap();
        std::os::unix::fs::symlink(&secret, &disk).unwrap();
        let mut text = String::new();
        File::from(OwnedFd::from(found.open().unwrap())).read_to_string(&mut text).unwrap();
        assert_eq!(text, "a disk");
    }

    #[test]
    fn an_endless_chain_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let disk = disk_on(folder.path(), "top.qcow2");
        assert!(matches!(asked_of(&disk).1.unwrap_err(), FileError::TooDeep { .. }));
    }

    #[test]
    fn an_unreadable_file_is_copied() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("kernel");
        std::fs::write(&path, "a kernel").unwrap();
        for (mode, is_copy) in [(0o644, false), (0o600, true), (0o640, true)] {
            std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
            let opened = open("kernel", &path).unwrap();
            assert_eq!(opened.real, path.canonicalize().unwrap());
            let handed = opened.readable_by_all().unwrap();
            let name = format!("/proc/self/fd/{}", handed.as_raw_fd());
            assert_eq!(std::fs::read(&name).unwrap(), b"a kernel");
            assert_eq!(std::fs::read_link(&name).unwrap() != path.canonicalize().unwrap(), is_copy);
            assert!(std::fs::metadata(&name).unwrap().mode() & 0o004 != 0);
            assert!(!is_copy || std::fs::write(&name, "x").is_err(), "the copy can be changed");
        }
    }

    #[test]
    fn copies_are_limited_in_size() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("initrd");
        File::create(&path).unwrap().set_len(MOST_COPIED_BYTES + 1).unwrap();
        for (mode, is_copied) in [(0o600, true), (0o644, false)] {
            std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
            let opened = open("initrd", &path).unwrap();
            assert_eq!(opened.copied_bytes(), if is_copied { MOST_COPIED_BYTES + 1 } else { 0 });
            match opened.readable_by_all() {
                Ok(_) => assert!(!is_copied),
                Err(error) => {
                    assert!(is_copied && error.kind() == io::ErrorKind::FileTooLarge, "{error}");
                    let error = StartError::prepare("copy", &path, &error);
                    assert!(error.to_string().contains("more than the 256 MiB"), "{error}");
                    assert!(error.remedy().contains("readable for others"), "{}", error.remedy());
                }
            }
        }
    }

    #[test]
    fn a_path_that_is_not_a_file_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("pipe");
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, Mode::RUSR, 0)
            .unwrap();
        for path in [folder.path(), &pipe, Path::new("/dev/null"), &folder.path().join("missing")] {
            let error = open("disk", path).unwrap_err();
            assert!(error.to_string().contains(&path.display().to_string()), "{error}");
            assert!(!error.remedy().is_empty());
        }
    }
}
