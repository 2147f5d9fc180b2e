//! Identity of a block device. It distinguishes the device from one that has its path later: after
//! the device was removed and created again, another disk was plugged in, or a reboot.

use std::fs::{self, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::{major, minor};
use serde::{Deserialize, Serialize};

/// Where the kernel describes devices, by their numbers.
const BY_NUMBER: &str = "/sys/dev/block";
/// The kernel's name of the present boot.
const BOOT: &str = "/proc/sys/kernel/random/boot_id";
/// Longest name of a device, as it is recorded.
const MOST_NAME_BYTES: usize = 512;
/// Files of a disk with a name that no other disk has: of device mapper (a logical volume, a path
/// to a LUN), of NVMe, of SCSI.
const NAMES: [&str; 3] = ["dm/uuid", "wwid", "device/wwid"];
/// Begin of the name of a logical volume.
const OF_VOLUME: &str = "LVM-";
/// Begin of the name of a device over all paths to a LUN. Each of the paths has another.
const OF_PATHS: &str = "mpath-";
/// How names begin that no other device has. Those that are made of serial numbers (`t10.`,
/// `nvme.`) are not such names, as virtual disks share them, and neither are those of device mapper
/// that an operator chooses (`CRYPT-`).
const UNIQUE: [&str; 5] = [OF_VOLUME, OF_PATHS, "naa.", "eui.", "uuid."];

/// Identity of a block device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct DeviceIdentity {
    /// The boot of this host in which it was read: later ones give the numbers again.
    boot: String,
    /// Number of the device.
    pub(crate) number: u64,
    /// Number that the kernel gives to each disk that appears, and to each new medium (`diskseq`,
    /// Linux 5.15).
    pub(crate) sequence: u64,
    /// Name that no other device has on any host, which lasts across boots; empty: there is none.
    pub(crate) name: String,
}

impl DeviceIdentity {
    /// Reads the identity of the device that a device node has.
    ///
    /// # Errors
    /// The kernel does not say it.
    pub(crate) fn of(node: &Metadata) -> io::Result<DeviceIdentity> {
        let number = node.rdev();
        let found = Described::of(Path::new(BY_NUMBER), number)?;
        let boot = fs::read_to_string(BOOT)?.trim().to_owned();
        Ok(DeviceIdentity { boot, number, sequence: found.sequence, name: found.name })
    }

    /// Whether `now` is this device. In another boot, only its name tells.
    pub(crate) fn is_still(&self, now: &DeviceIdentity) -> bool {
        let is_named = !self.name.is_empty() && self.name == now.name;
        match self.boot == now.boot {
            true => self == now,
            false => is_named,
        }
    }
}

/// Whether two names show that their devices, each at a host of its own, have no byte in common: a
/// disk and its partitions do not, and a LUN has other names at a host with several paths to it.
pub(crate) fn are_apart(one: &str, other: &str) -> bool {
    let disk_of = |name: &str| name.split('/').next().unwrap_or_default().to_owned();
    let is_volume = one.starts_with(OF_VOLUME) || other.starts_with(OF_VOLUME);
    let are_alike = one.starts_with(OF_PATHS) == other.starts_with(OF_PATHS);
    is_unique(one) && is_unique(other) && disk_of(one) != disk_of(other) && (is_volume || are_alike)
}

fn is_unique(name: &str) -> bool {
    UNIQUE.iter().any(|begin| name.starts_with(*begin))
}

/// What the kernel says of a device.
#[derive(Debug, PartialEq, Eq)]
struct Described {
    sequence: u64,
    name: String,
}

impl Described {
    fn of(by_number: &Path, number: u64) -> io::Result<Described> {
        let at = by_number.join(format!("{}:{}", major(number), minor(number)));
        // A link: the directory of a partition is in that of its disk.
        let at = at.canonicalize()?;
        let partition = text(at.join("partition"));
        let disk = match partition {
            Some(_) => at.parent().unwrap_or(&at),
            None => &at,
        };
        let sequence = text(disk.join("diskseq")).and_then(|text| text.parse().ok());
        let unknown = || io::Error::other("the kernel does not number it (Linux before 5.15)");
        let sequence = sequence.ok_or_else(unknown)?;
        let mut names = NAMES.iter().filter_map(|name| text(disk.join(name)));
        let name = names.find(|name| is_unique(name) && name.len() <= MOST_NAME_BYTES);
        let mut name = name.unwrap_or_default();
        if let Some(partition) = partition.filter(|_| !name.is_empty()) {
            let [start, size] = ["start", "size"].map(|file| text(at.join(file)));
            let (start, size) = (start.unwrap_or_default(), size.unwrap_or_default());
            name = format!("{name}/{partition}@{start}+{size}");
        }
        Ok(Described { sequence, name })
    }
}

/// Returns what a file of the kernel says in its first line; `None` if there is none.
fn text(path: PathBuf) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    Some(text.lines().next().unwrap_or_default().trim().to_owned())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use proptest::prelude::*;
    use rustix::fs::makedev;

    use super::super::tests::LoopDevice;
    use super::*;

    /// Describes devices as sysfs does.
    fn sysfs(files: &[(&str, &str)], links: &[(&str, &str)]) -> tempfile::TempDir {
        let sys = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = sys.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, format!("{text}\n")).unwrap();
        }
        for (link, to) in links {
            symlink(sys.path().join(to), sys.path().join(link)).unwrap();
        }
        sys
    }

    #[test]
    fn a_disk_has_its_own_name_and_a_partition_that_of_its_disk() {
        let sys = sysfs(
            &[
                ("sda/diskseq", "7"),
                ("sda/device/wwid", "naa.5000c500"),
                ("sda/sda2/partition", "2"),
                ("sda/sda2/start", "2048"),
                ("sda/sda2/size", "8192"),
                ("dm-3/diskseq", "12"),
                ("dm-3/dm/uuid", "LVM-abcdef"),
                ("loop0/diskseq", "30"),
                ("loop0/loop/backing_file", "/srv/a.img"),
                ("old/size", "8192"),
                ("vda/diskseq", "4"),
                ("vda/serial", "same-for-all"),
                ("vda/dm/uuid", ""),
                ("dm-4/diskseq", "13"),
                ("dm-4/dm/uuid", "CRYPT-LUKS2-abcdef-web"),
                ("sdb/diskseq", "8"),
                ("sdb/device/wwid", "t10.ATA     QEMU HARDDISK     QM00003"),
            ],
            &[
                ("8:0", "sda"),
                ("8:2", "sda/sda2"),
                ("253:3", "dm-3"),
                ("7:0", "loop0"),
                ("9:9", "old"),
                ("254:0", "vda"),
                ("253:4", "dm-4"),
                ("8:16", "sdb"),
            ],
        );
        let of = |major, minor| Described::of(sys.path(), makedev(major, minor));
        for (major, minor, sequence, name) in [
            (8, 0, 7, "naa.5000c500"),
            (8, 2, 7, "naa.5000c500/2@2048+8192"),
            (253, 3, 12, "LVM-abcdef"),
            (7, 0, 30, ""),
            (254, 0, 4, ""),
            (253, 4, 13, ""),
            (8, 16, 8, ""),
        ] {
            let found = of(major, minor).unwrap();
            assert_eq!((found.sequence, &*found.name), (sequence, name), "{major}:{minor}");
        }
        of(9, 9).unwrap_err();
        of(1, 1).unwrap_err();
    }

    #[test]
    fn a_device_keeps_its_identity_and_another_one_has_another() {
        let Some(device) = LoopDevice::new(1 << 20) else { return };
        let Some(other) = LoopDevice::new(1 << 20) else { return };
        let of =
            |device: &LoopDevice| DeviceIdentity::of(&fs::metadata(&device.path).unwrap()).unwrap();
        assert!(of(&device).is_still(&of(&device)));
        assert!(!of(&device).is_still(&of(&other)));
    }

    #[test]
    fn devices_are_apart_only_if_their_names_show_it() {
        let (lun, part) = ("naa.6001405", "naa.6001405/1@2048+8192");
        for (one, other, expected) in [
            ("LVM-a", "LVM-b", true),
            ("LVM-a", "LVM-a", false),
            ("LVM-a", lun, true),
            ("LVM-a", "mpath-36001405", true),
            (lun, "naa.6001406", true),
            (lun, "eui.6001405", true),
            (lun, part, false),
            (part, "naa.6001406/1@2048+8192", true),
            (lun, "mpath-36001405", false),
            ("mpath-36001405", "mpath-36001406", true),
            ("mpath-36001405", "mpath-36001405", false),
            ("", lun, false),
            ("CRYPT-LUKS2-a-web", lun, false),
            ("anything", "LVM-a", false),
        ] {
            assert_eq!(are_apart(one, other), expected, "{one} {other}");
            assert_eq!(are_apart(other, one), expected, "{other} {one}");
        }
    }

    proptest! {
        #[test]
        fn only_a_name_lasts_across_boots(
            (boot, number, sequence, name) in (0u8..2, 0u64..3, 0u64..3, 0u8..3),
            (boot_now, number_now, sequence_now, name_now) in (0u8..2, 0u64..3, 0u64..3, 0u8..3),
        ) {
            let identity = |boot: u8, number, sequence, name: u8| DeviceIdentity {
                boot: boot.to_string(),
                number,
                sequence,
                name: if name == 0 { String::new() } else { format!("LVM-{name}") },
            };
            let before = identity(boot, number, sequence, name);
            let now = identity(boot_now, number_now, sequence_now, name_now);
            let expected = if boot == boot_now {
                (number, sequence, name) == (number_now, sequence_now, name_now)
            } else {
                name != 0 && name == name_now
            };
            prop_assert_eq!(before.is_still(&now), expected);
            prop_assert_eq!(now.is_still(&before), expected);
        }
    }
}
