//! Kind of the file system that contains a directory.

use std::fs;
use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::fs::{FsWord, fstatfs, major, minor};

/// Types of file systems, as Linux names them (linux/magic.h and the file systems' own headers).
const KINDS: [(FsWord, &str); 14] = [
    (0x6969, "nfs"),
    (0xff53_4d42, "cifs"),
    (0xfe53_4d42, "cifs"),
    (0x517b, "cifs"),
    (0x6573_5546, "fuse"),
    (0x00c3_6400, "ceph"),
    (0x5846_5342, "xfs"),
    (0x9123_683e, "btrfs"),
    (0x2fc1_2fc1, "zfs"),
    (0xef53, "ext4"),
    (0x0102_1994, "tmpfs"),
    (0x794c_7630, "overlay"),
    (0x0116_1970, "gfs2"),
    (0x7461_636f, "ocfs2"),
];
/// Kind of other file systems.
const OTHER: &str = "directory";
const LVM_THIN: &str = "lvm-thin";
/// How the name of an LVM thin pool's own device ends.
const POOL_ENDING: &str = "-tpool";
/// Most devices that a device consists of.
const MOST_PARTS: usize = 64;

/// Returns the kind of the file system of an open directory on this device.
pub(super) fn kind_of(dir: &OwnedFd, device: u64) -> String {
    let known = fstatfs(dir).ok().and_then(|found| {
        KINDS.iter().find(|(magic, _)| *magic == found.f_type).map(|(_, kind)| *kind)
    });
    let parts = format!("/sys/dev/block/{}:{}/slaves", major(device), minor(device));
    let kind = if is_thin(Path::new(&parts)) { LVM_THIN } else { known.unwrap_or(OTHER) };
    kind.to_owned()
}

/// Returns whether one of the devices that a device consists of is an LVM thin pool.
fn is_thin(parts: &Path) -> bool {
    let Ok(entries) = fs::read_dir(parts) else { return false };
    entries.flatten().take(MOST_PARTS).any(|entry| {
        let name = fs::read_to_string(entry.path().join("dm/name"));
        name.is_ok_and(|name| name.trim_end().ends_with(POOL_ENDING))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_volume_in_a_thin_pool_is_recognised() {
        let parts = tempfile::tempdir().unwrap();
        let name = |device: &str, name: &str| {
            let dir = parts.path().join(device).join("dm");
            fs::create_dir_all(&dir).unwrap();
            fs::write(dir.join("name"), name).unwrap();
        };
        assert!(!is_thin(&parts.path().join("missing")));
        name("dm-1", "vg-data\n");
        assert!(!is_thin(parts.path()));
        name("dm-2", "vg-pool-tpool\n");
        assert!(is_thin(parts.path()));
    }
}
