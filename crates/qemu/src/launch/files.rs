//! The host's files of a VM, opened before QEMU starts: it inherits them open, and opens nothing of the host by its path.
//!
//! So its user needs no right to any directory, nobody's ownership changes while a VM runs (on storage that two hosts share, where
//! a user has another number on each), and what a path means is decided once. Disk images go into QEMU's descriptor sets: QEMU's
//! locks are those of the open file, which its duplicates share (`F_OFD_SETLK`; QEMU 7.2 to 10.0). An image made on top of another
//! brings that one along, as its header names it: see [`super::qcow2`].

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags};

use super::qcow2::{self, ImageError};
use crate::spec::{Disk, DiskFormat, ResolvedSpec};

/// Longest kernel, initrd or library that is copied into memory, as QEMU's user may not read the file.
pub const MOST_COPIED_BYTES: u64 = 256 << 20;
/// Most images one on top of another that a disk may be made of. More are a loop.
const MOST_LAYERS: usize = 32;

/// The bit of a mode that lets others read.
const READ_BY_ALL: u32 = 0o004;

/// A file of the host, open.
#[derive(Debug)]
pub struct OpenFile {
    /// What it is to the VM: `kernel`, `initrd`, `disk`, `backing file`.
    pub role: &'static str,
    /// As it was named.
    pub path: PathBuf,
    /// Whether QEMU may write to it.
    pub writable: bool,
    file: OwnedFd,
}

/// An image of a disk.
#[derive(Debug)]
pub struct OpenLayer {
    /// The image.
    pub file: OpenFile,
    /// Its format.
    pub format: DiskFormat,
}

/// All files of the host that a VM's specification names.
#[derive(Debug, Default)]
pub struct OpenFiles {
    /// The kernel.
    pub kernel: Option<OpenFile>,
    /// Its initial RAM disk.
    pub initrd: Option<OpenFile>,
    /// Of each disk its image, and what that is made on top of, the last being whole.
    pub disks: Vec<Vec<OpenLayer>>,
}

/// Why a file of a VM can't be used.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// It can't be opened.
    #[error("the {role} {} can't be opened: {why}", path.display())]
    Open {
        /// What it is to the VM.
        role: &'static str,
        /// The file.
        path: PathBuf,
        /// Why.
        why: io::Error,
    },
    /// The image's header can't be used.
    #[error("the {role} {} can't be used: {why}", path.display())]
    Image {
        /// What it is to the VM.
        role: &'static str,
        /// The file.
        path: PathBuf,
        /// What is wrong.
        why: ImageError,
    },
    /// Images one on top of another without an end.
    #[error("the disk {} is made of more than {MOST_LAYERS} images on top of each other", path.display())]
    TooDeep {
        /// The disk.
        path: PathBuf,
    },
}

impl FileError {
    /// What the operator can do about it.
    #[must_use]
    pub fn mend(&self) -> String {
        match self {
            FileError::Open { .. } => "every host that runs the VM must see it at that path".to_owned(),
            FileError::Image { why, .. } => why.mend().to_owned(),
            FileError::TooDeep { .. } => {
                "see `qemu-img info --backing-chain`; `qemu-img convert` makes one whole image of it"
                    .to_owned()
            }
        }
    }
}

impl OpenFile {
    fn open(role: &'static str, path: &Path, writable: bool) -> Result<OpenFile, FileError> {
        let access = if writable { OFlags::RDWR } else { OFlags::RDONLY };
        // NONBLOCK: a pipe at that path holds nobody up; nothing else heeds it.
        let opened = rustix::fs::open(path, access | OFlags::CLOEXEC | OFlags::NONBLOCK, Mode::empty());
        let checked = opened.and_then(|file| {
            match rustix::fs::FileType::from_raw_mode(rustix::fs::fstat(&file)?.st_mode) {
                rustix::fs::FileType::RegularFile | rustix::fs::FileType::BlockDevice => Ok(file),
                rustix::fs::FileType::Directory => Err(rustix::io::Errno::ISDIR),
                _ => Err(rustix::io::Errno::INVAL),
            }
        });
        match checked {
            Ok(file) => Ok(OpenFile { role, path: path.to_owned(), writable, file }),
            Err(why) => Err(FileError::Open { role, path: path.to_owned(), why: why.into() }),
        }
    }

    /// What [`OpenFile::readable_by_all`] would copy of it; 0: others may read it.
    fn copied_bytes(&self) -> u64 {
        let data = rustix::fs::fstat(&self.file);
        data.map_or(0, |data| if data.st_mode & READ_BY_ALL == 0 { data.st_size.unsigned_abs() } else { 0 })
    }

    /// Where it really is, every link followed.
    ///
    /// # Errors
    /// What the system says; `/proc` is not mounted.
    pub fn real_path(&self) -> io::Result<PathBuf> {
        std::fs::read_link(format!("/proc/self/fd/{}", self.file.as_raw_fd()))
    }

    /// It or, where others have no right to read the file, a copy of it in memory that they have: what a program opens once more by
    /// the path of its own descriptor takes the right to do so.
    pub(super) fn readable_by_all(self) -> io::Result<OwnedFd> {
        readable_by_all(self.file.into(), self.role)
    }
}

/// See [`OpenFile::readable_by_all`]. Its length is counted as it is copied: it need not be what it was.
pub(super) fn readable_by_all(file: File, name: &str) -> io::Result<OwnedFd> {
    let metadata = file.metadata()?;
    if metadata.mode() & READ_BY_ALL != 0 {
        return Ok(file.into());
    }
    let too_long = || {
        let most = MOST_COPIED_BYTES >> 20;
        let why =
            format!("others may not read it, and it has more than the {most} MiB that are copied for them");
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
    /// Opens all of them, each for what QEMU does with it. Nothing is locked: that is QEMU's to do.
    ///
    /// # Errors
    /// The first that can't be had.
    pub fn open(spec: &ResolvedSpec) -> Result<OpenFiles, FileError> {
        let boot = |role, path: &Option<PathBuf>| {
            path.as_ref().map(|path| OpenFile::open(role, path, false)).transpose()
        };
        Ok(OpenFiles {
            kernel: boot("kernel", &spec.kernel)?,
            initrd: boot("initrd", &spec.initrd)?,
            disks: spec.disks.iter().map(open_disk).collect::<Result<_, _>>()?,
        })
    }

    /// Memory that copies of them take while QEMU runs, of those that its user may not read.
    #[must_use]
    pub fn copied_bytes(&self) -> u64 {
        self.kernel.iter().chain(&self.initrd).map(OpenFile::copied_bytes).sum()
    }

    /// Each of them.
    pub fn all(&self) -> impl Iterator<Item = &OpenFile> {
        let layers = self.disks.iter().flatten().map(|layer| &layer.file);
        self.kernel.iter().chain(&self.initrd).chain(layers)
    }
}

fn open_disk(disk: &Disk) -> Result<Vec<OpenLayer>, FileError> {
    let mut layers = Vec::new();
    let mut next = Some((disk.path.clone(), disk.format));
    while let Some((path, format)) = next {
        if layers.len() == MOST_LAYERS {
            return Err(FileError::TooDeep { path: disk.path.clone() });
        }
        let is_first = layers.is_empty();
        let role = if is_first { "disk" } else { "backing file" };
        let file = OpenFile::open(role, &path, is_first && !disk.readonly)?;
        next = match format {
            DiskFormat::Raw => None,
            DiskFormat::Qcow2 => backing(&file)
                .map_err(|why| FileError::Image { role, path: path.clone(), why })?
                .map(|backing| (qcow2::resolve(&path, &backing.file), backing.format)),
        };
        layers.push(OpenLayer { file, format });
    }
    Ok(layers)
}

fn backing(file: &OpenFile) -> Result<Option<qcow2::Backing>, ImageError> {
    let mut head = Vec::new();
    // Another open file would be another's lock; reading at the start moves nothing that QEMU looks at.
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

    #[test]
    fn what_others_may_not_read_they_get_a_copy_of() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("kernel");
        std::fs::write(&path, "a kernel").unwrap();
        for (mode, is_copy) in [(0o644, false), (0o600, true), (0o640, true)] {
            std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
            let opened = OpenFile::open("kernel", &path, false).unwrap();
            assert_eq!(opened.real_path().unwrap(), path.canonicalize().unwrap());
            let handed = opened.readable_by_all().unwrap();
            let name = format!("/proc/self/fd/{}", handed.as_raw_fd());
            assert_eq!(std::fs::read(&name).unwrap(), b"a kernel");
            assert_eq!(std::fs::read_link(&name).unwrap() != path.canonicalize().unwrap(), is_copy);
            assert!(std::fs::metadata(&name).unwrap().mode() & 0o004 != 0);
            assert!(!is_copy || std::fs::write(&name, "x").is_err(), "the copy can be changed");
        }
    }

    #[test]
    fn no_more_is_copied_than_is_said() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("initrd");
        File::create(&path).unwrap().set_len(MOST_COPIED_BYTES + 1).unwrap();
        for (mode, is_copied) in [(0o600, true), (0o644, false)] {
            std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
            let opened = OpenFile::open("initrd", &path, false).unwrap();
            assert_eq!(opened.copied_bytes(), if is_copied { MOST_COPIED_BYTES + 1 } else { 0 });
            match opened.readable_by_all() {
                Ok(_) => assert!(!is_copied),
                Err(error) => {
                    assert!(is_copied && error.kind() == io::ErrorKind::FileTooLarge, "{error}");
                    let error = StartError::prepare("copy", &path, &error);
                    assert!(error.to_string().contains("more than the 256 MiB"), "{error}");
                    assert!(error.mend().contains("let others read"), "{}", error.mend());
                }
            }
        }
    }

    #[test]
    fn what_is_no_file_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("pipe");
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, Mode::RUSR, 0).unwrap();
        for path in [folder.path(), &pipe, Path::new("/dev/null"), &folder.path().join("missing")] {
            let error = OpenFile::open("disk", path, false).unwrap_err();
            assert!(error.to_string().contains(&path.display().to_string()), "{error}");
            assert!(!error.mend().is_empty());
        }
    }
}
