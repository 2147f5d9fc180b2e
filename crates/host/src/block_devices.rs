//! Block devices that VMs may use: which ones the configuration allows, and what the kernel says of
//! one. Nothing here writes to a device.

mod elsewhere;
mod identity;

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt};
use std::path::{Component, Path, PathBuf};
use std::time::Duration;

use parking_lot::Mutex;
use rustix::fs::{Mode, OFlags, SeekFrom, major, minor};

pub(crate) use elsewhere::{names_of, other_here};
pub(crate) use identity::{DeviceIdentity, are_apart};

/// Where all device nodes are.
const DEVICES: &str = "/dev";
/// What is there and is a directory of files.
const FILES: [&str; 3] = ["/dev/shm", "/dev/hugepages", "/dev/mqueue"];
/// Bytes at both ends of a device that every file system, partition table, volume group and RAID
/// writes something to.
pub(crate) const END_BYTES: u64 = 1 << 20;

/// Longest time to wait for the end of another look at a device, whose storage may hang.
const LOOK_LIMIT: Duration = Duration::from_secs(2);
/// Most devices that are looked for below one.
const MOST_BELOW: usize = 64;

/// Held during a look at a device.
static LOOKING: Mutex<()> = Mutex::new(());

/// Whether a path is that of a block device, or of a directory of such devices, wherever it leads.
pub(crate) fn is_device_path(path: &Path) -> bool {
    path.starts_with(DEVICES) && !FILES.iter().any(|files| path.starts_with(files))
}

/// Returns the first invalid entry of the configuration: its key, what is wrong, and the remedy.
pub(crate) fn problem_of(entries: &[PathBuf]) -> Option<(String, String, &'static str)> {
    let is_good = |path: &&PathBuf| {
        is_plain(path) && is_device_path(path) && path.as_path() != Path::new(DEVICES)
    };
    let bad = entries.iter().find(|path| !is_good(path))?;
    let why = format!("{} is not a device below /dev, nor a directory of devices", bad.display());
    Some(("block_devices".to_owned(), why, "write a path such as /dev/vg0 or /dev/vg0/web"))
}

/// Whether the configuration allows VMs the device at a path: the device is an entry, or is in a
/// directory that is one.
pub(crate) fn allows(entries: &[PathBuf], path: &Path) -> bool {
    let is_it = |entry: &PathBuf| path == entry || path.parent() == Some(entry.as_path());
    is_plain(path) && is_device_path(path) && entries.iter().any(is_it)
}

fn is_plain(path: &Path) -> bool {
    path.components().all(|part| matches!(part, Component::RootDir | Component::Normal(_)))
}

/// Opens a block device to write it, if nothing on this host uses it: no file system, no swap, no
/// volume group, no RAID, nobody who has it open exclusively. It stays so until the file is closed.
///
/// # Errors
/// [`io::ErrorKind::InvalidInput`]: it is not a block device. [`io::ErrorKind::ResourceBusy`]: the
/// host uses it.
pub(crate) fn open_exclusively(path: &Path) -> io::Result<File> {
    // Opening anything else can have side effects.
    if !fs::metadata(path)?.file_type().is_block_device() {
        return Err(not_a_device());
    }
    let flags = OFlags::RDWR | OFlags::EXCL | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = File::from(rustix::fs::open(path, flags, Mode::empty())?);
    match file.metadata()?.file_type().is_block_device() {
        true => Ok(file),
        false => Err(not_a_device()),
    }
}

fn not_a_device() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, "not a block device")
}

/// Whether nothing on this host uses a device, as [`open_exclusively`] finds out. False also if
/// that is unknown, because a look at a device does not end.
pub(crate) fn is_unused(path: &Path) -> bool {
    // Two looks at the same time would find each other.
    let alone = LOOKING.try_lock_for(LOOK_LIMIT);
    alone.is_some_and(|_alone| open_exclusively(path).is_ok())
}

/// Returns the names of devices that this host has made of a device: logical volumes, RAIDs.
pub(crate) fn holders_of(path: &Path) -> Vec<String> {
    let Ok(data) = fs::metadata(path) else { return Vec::new() };
    let (major, minor) = (major(data.rdev()), minor(data.rdev()));
    let entries = fs::read_dir(format!("/sys/dev/block/{major}:{minor}/holders"));
    let names = entries.into_iter().flatten().flatten();
    names.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

/// Returns the nodes of other devices that have bytes of this one: its partitions, the disk that it
/// is a partition of, and those that it is made of, as a logical volume is of disks. What is made
/// of it is not among them: that has it open exclusively ([`open_exclusively`]).
///
/// # Errors
/// It is no block device, or the kernel does not describe it.
pub(crate) fn overlapping(path: &Path) -> io::Result<Vec<PathBuf>> {
    let node = fs::metadata(path)?;
    if !node.file_type().is_block_device() {
        return Err(not_a_device());
    }
    let (major, minor) = (major(node.rdev()), minor(node.rdev()));
    // A link: the directory of a partition is in that of its disk.
    nodes_beside(&Path::new(&format!("/sys/dev/block/{major}:{minor}")).canonicalize()?)
}

fn nodes_beside(dir: &Path) -> io::Result<Vec<PathBuf>> {
    let mut all = Vec::new();
    if !is_partition(dir) {
        for entry in fs::read_dir(dir)? {
            let part = entry?.path();
            if is_partition(&part) {
                all.extend(node_of(&part));
            }
        }
    }
    all.extend(dirs_below(dir)?.iter().filter_map(|below| node_of(below)));
    Ok(all)
}

/// Returns the directories of the devices that one is made of, at any depth.
fn dirs_below(dir: &Path) -> io::Result<Vec<PathBuf>> {
    let mut all = vec![dir.to_owned()];
    let mut next = 0;
    while let Some(dir) = all.get(next).cloned() {
        next += 1;
        let mut found: Vec<PathBuf> = Vec::new();
        if is_partition(&dir) {
            found.extend(dir.parent().map(Path::to_owned));
        }
        let made_of = fs::read_dir(dir.join("slaves")).into_iter().flatten();
        for link in made_of {
            found.push(link?.path().canonicalize()?);
        }
        found.retain(|below| !all.contains(below));
        all.append(&mut found);
        if all.len() > MOST_BELOW {
            return Err(io::Error::other("it is made of too many devices"));
        }
    }
    all.remove(0);
    Ok(all)
}

fn is_partition(dir: &Path) -> bool {
    dir.join("partition").exists()
}

/// Returns the node of the device that a directory of the kernel describes.
fn node_of(dir: &Path) -> Option<PathBuf> {
    let text = fs::read_to_string(dir.join("uevent")).ok()?;
    let name = text.lines().find_map(|line| line.strip_prefix("DEVNAME="))?;
    Some(Path::new(DEVICES).join(name))
}

/// Whether a device, or a file, begins as a physical volume of LVM does: one of the first four
/// sectors of 512 bytes has its label (LVM2's lib/label/label.h).
pub(crate) fn is_physical_volume(file: &File) -> io::Result<bool> {
    let mut head = [0; 2048];
    file.read_exact_at(&mut head, 0)?;
    Ok(head.chunks(512).any(|sector| sector.starts_with(b"LABELONE")))
}

/// Returns the size of an open device.
pub(crate) fn bytes_of(file: &File) -> io::Result<u64> {
    Ok(rustix::fs::seek(file, SeekFrom::End(0))?)
}

/// Returns the parts of a device of so many bytes in which [`has_content`] looks: offset and
/// length.
pub(crate) fn ends_of(bytes: u64) -> [(u64, u64); 2] {
    let first = bytes.min(END_BYTES);
    let last = (bytes - first).min(END_BYTES);
    [(0, first), (bytes - last, last)]
}

/// Whether one of the two ends of a device, or of a file, has a byte that is not zero.
pub(crate) fn has_content(file: &File, bytes: u64) -> io::Result<bool> {
    for (at, length) in ends_of(bytes) {
        let mut end = vec![0; usize::try_from(length).map_err(io::Error::other)?];
        file.read_exact_at(&mut end, at)?;
        if end.iter().any(|byte| *byte != 0) {
            return Ok(true);
        }
    }
    Ok(false)
}

#[cfg(test)]
pub(crate) mod tests {
    use std::process::Command;

    use super::*;

    /// A loop device over a file, detached when it is dropped.
    pub(crate) struct LoopDevice {
        pub(crate) path: PathBuf,
        _file: tempfile::NamedTempFile,
    }

    impl LoopDevice {
        /// Attaches a device of so many bytes of zeros; `None`, with a printed reason, if the
        /// machine cannot have one.
        pub(crate) fn new(bytes: u64) -> Option<LoopDevice> {
            let file = tempfile::NamedTempFile::new().unwrap();
            file.as_file().set_len(bytes).unwrap();
            let attached =
                Command::new("losetup").args(["--find", "--show"]).arg(file.path()).output();
            let attached = match attached {
                Ok(attached) if attached.status.success() => attached,
                Ok(attached) => {
                    let why = String::from_utf8_lossy(&attached.stderr).into_owned();
                    eprintln!("skipped: no loop device: {}", why.trim());
                    return None;
                }
                Err(error) => {
                    eprintln!("skipped: no losetup: {error}");
                    return None;
                }
            };
            let path = PathBuf::from(String::from_utf8(attached.stdout).unwrap().trim());
            Some(LoopDevice { path, _file: file })
        }

        /// Returns the name of the device.
        pub(crate) fn name(&self) -> String {
            self.path.file_name().unwrap().to_string_lossy().into_owned()
        }
    }

    impl Drop for LoopDevice {
        fn drop(&mut self) {
            let _ = Command::new("losetup").arg("--detach").arg(&self.path).status();
        }
    }

    #[test]
    fn a_device_is_allowed_by_its_path_or_its_directory() {
        let entries = ["/dev/vg0", "/dev/disk/by-partlabel/web"].map(PathBuf::from);
        for good in ["/dev/vg0/web", "/dev/vg0//web", "/dev/disk/by-partlabel/web"] {
            assert!(allows(&entries, Path::new(good)), "{good}");
        }
        for bad in [
            "/dev/vg1/web",
            "/dev/vg0/a/web",
            "/dev/vg0/../sda",
            "/dev/disk/by-partlabel/db",
            "/srv/vg0/web",
            "vg0/web",
            "",
        ] {
            assert!(!allows(&entries, Path::new(bad)), "{bad}");
        }
        assert_eq!(problem_of(&entries), None);
        for bad in ["/dev", "/dev/", "/srv", "/dev/shm", "/dev/shm/x", "dev/vg0", "/dev/../vg0"] {
            let entries = [PathBuf::from("/dev/vg0"), PathBuf::from(bad)];
            assert!(problem_of(&entries).is_some(), "{bad}");
        }
        assert!(is_device_path(Path::new("/dev/vg0")) && !is_device_path(Path::new("/devel")));
    }

    #[test]
    fn both_ends_are_looked_at_and_nothing_else() {
        assert_eq!(ends_of(512), [(0, 512), (512, 0)]);
        assert_eq!(ends_of(END_BYTES + 512), [(0, END_BYTES), (END_BYTES, 512)]);
        assert_eq!(ends_of(8 << 20), [(0, END_BYTES), (7 << 20, END_BYTES)]);
        let file = tempfile::tempfile().unwrap();
        let bytes = 8 << 20;
        file.set_len(bytes).unwrap();
        for (at, found) in [(0, true), (bytes - 1, true), (bytes / 2, false)] {
            file.write_all_at(&[1], at).unwrap();
            assert_eq!(has_content(&file, bytes).unwrap(), found, "{at}");
            file.write_all_at(&[0], at).unwrap();
        }
    }

    #[test]
    fn a_physical_volume_is_known_by_its_label() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(8 << 20).unwrap();
        for (at, found) in [(0, true), (512, true), (1536, true), (100, false), (2048, false)] {
            file.write_all_at(b"LABELONE", at).unwrap();
            assert_eq!(is_physical_volume(&file).unwrap(), found, "{at}");
            file.write_all_at(&[0; 8], at).unwrap();
        }
    }

    #[test]
    fn a_disk_and_its_partitions_overlap_and_two_partitions_do_not() {
        let sys = tempfile::tempdir().unwrap();
        for (dir, name) in [("sda", "sda"), ("sda/sda1", "sda1"), ("sda/sda2", "sda2")] {
            let dir = sys.path().join(dir);
            fs::create_dir_all(&dir).unwrap();
            fs::write(dir.join("uevent"), format!("MAJOR=8\nDEVNAME={name}\n")).unwrap();
            if name != "sda" {
                fs::write(dir.join("partition"), "1\n").unwrap();
            }
        }
        fs::create_dir(sys.path().join("sda/queue")).unwrap();
        let beside = |dir: &str| {
            let mut all = nodes_beside(&sys.path().join(dir).canonicalize().unwrap()).unwrap();
            all.sort();
            all
        };
        assert_eq!(beside("sda"), [Path::new("/dev/sda1"), Path::new("/dev/sda2")]);
        assert_eq!(beside("sda/sda2"), [Path::new("/dev/sda")]);
        // A volume of a volume group on a partition, and one on that.
        for (dir, name, below) in [("dm-0", "dm-0", "sda/sda2"), ("dm-1", "dm-1", "dm-0")] {
            let dir = sys.path().join(dir);
            fs::create_dir_all(dir.join("slaves")).unwrap();
            fs::write(dir.join("uevent"), format!("DEVNAME={name}\n")).unwrap();
            let link = dir.join("slaves").join(Path::new(below).file_name().unwrap());
            std::os::unix::fs::symlink(sys.path().join(below), link).unwrap();
        }
        assert_eq!(beside("dm-0"), [Path::new("/dev/sda"), Path::new("/dev/sda2")]);
        let all = ["/dev/dm-0", "/dev/sda", "/dev/sda2"].map(Path::new);
        assert_eq!(beside("dm-1"), all);
        // The kernel has no such circle.
        let circle = sys.path().join("dm-0/slaves/dm-1");
        std::os::unix::fs::symlink(sys.path().join("dm-1"), circle).unwrap();
        assert_eq!(beside("dm-1"), all);
        let refused = overlapping(Path::new("/dev/null")).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::InvalidInput);
    }

    #[test]
    fn only_a_block_device_is_opened() {
        let file = tempfile::NamedTempFile::new().unwrap();
        for path in [file.path(), Path::new("/dev/null")] {
            let refused = open_exclusively(path).unwrap_err();
            assert_eq!(refused.kind(), io::ErrorKind::InvalidInput);
            assert!(!is_unused(path));
        }
        let missing = open_exclusively(Path::new("/dev/none/none")).unwrap_err();
        assert_eq!(missing.kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn a_device_has_one_user() {
        let Some(device) = LoopDevice::new(1 << 20) else { return };
        assert!(is_unused(&device.path));
        let file = open_exclusively(&device.path).unwrap();
        assert_eq!(bytes_of(&file).unwrap(), 1 << 20);
        let refused = open_exclusively(&device.path).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::ResourceBusy);
        assert!(holders_of(&device.path).is_empty());
        drop(file);
        assert!(is_unused(&device.path));
    }
}
