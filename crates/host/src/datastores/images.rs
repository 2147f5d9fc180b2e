//! Bytes that the images in a directory promise to guests: the sum of their disks' sizes.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use godwit_qemu::image_head;
use rustix::fs::{Mode, OFlags};

/// Most entries that are looked at.
const MOST_ENTRIES: usize = 10_000;
/// Depth of the directories that belong to a datastore, as in the list of disks.
const MOST_DEEP: usize = 2;

/// Returns the bytes that images in a directory promise; `None` if it cannot be read.
pub(super) fn promised_bytes(directory: &Path) -> Option<u64> {
    let device = fs::metadata(directory).ok()?.dev();
    let mut left = MOST_ENTRIES;
    Some(sum_below(directory, device, MOST_DEEP, &mut left))
}

fn sum_below(directory: &Path, device: u64, deep: usize, left: &mut usize) -> u64 {
    let Ok(entries) = fs::read_dir(directory) else { return 0 };
    let mut sum = 0_u64;
    for entry in entries.flatten() {
        let Some(rest) = left.checked_sub(1) else { break };
        *left = rest;
        let Ok(kind) = entry.file_type() else { continue };
        if entry.file_name().as_encoded_bytes().starts_with(b".") {
            continue;
        }
        let path = entry.path();
        let bytes = if kind.is_file() {
            bytes_of(&path)
        } else if kind.is_dir() && deep > 1 && is_on(&path, device) {
            sum_below(&path, device, deep - 1, left)
        } else {
            0
        };
        sum = sum.saturating_add(bytes);
    }
    sum
}

/// Returns whether a directory is on this device: another file system has its own space.
fn is_on(directory: &Path, device: u64) -> bool {
    fs::symlink_metadata(directory).is_ok_and(|found| found.dev() == device)
}

/// Returns the size of the disk in an image; 0 if it cannot be read.
fn bytes_of(path: &Path) -> u64 {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let Ok(file) = rustix::fs::open(path, flags, Mode::empty()).map(File::from) else { return 0 };
    let Ok(found) = file.metadata() else { return 0 };
    if !found.is_file() {
        return 0;
    }
    // The header of a damaged or foreign image says nothing.
    image_head(&file).map_or(found.len(), |head| head.virtual_bytes)
}

#[cfg(test)]
mod tests {
    use godwit_qemu::{DiskFormat, write_image};

    use super::*;

    #[test]
    fn images_count_with_the_sizes_of_their_disks() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        fs::create_dir_all(at("below/deeper")).unwrap();
        let image = |name: &str| {
            let file = File::create_new(at(name)).unwrap();
            write_image(&file, DiskFormat::Qcow2, 1 << 30, None).unwrap();
        };
        image("a.qcow2");
        image("below/b.qcow2");
        // Deeper than the list of disks, hidden, or no file.
        image("below/deeper/c.qcow2");
        image(".d.qcow2.new");
        std::os::unix::fs::symlink(at("a.qcow2"), at("link")).unwrap();
        fs::write(at("raw"), vec![0; 4096]).unwrap();
        assert_eq!(promised_bytes(folder.path()), Some((2 << 30) + 4096));
        assert_eq!(promised_bytes(&at("missing")), None);
    }
}
