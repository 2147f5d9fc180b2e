//! Block devices of disks that do not travel. Two hosts may have different devices at one path.
//! Their names show that, where they have names that no other device has.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use super::identity::{DeviceIdentity, are_apart};
use super::is_device_path;

/// Returns the names of those images that are block devices with a name that no other device has,
/// by path.
pub(crate) fn names_of<'a>(images: impl Iterator<Item = &'a Path>) -> BTreeMap<PathBuf, String> {
    images.filter_map(|image| Some((image.to_owned(), name_of(image)?))).collect()
}

/// Returns the first image that is another device here than at the host that gave these names.
pub(crate) fn other_here<'a>(
    images: impl Iterator<Item = &'a Path>,
    there: &BTreeMap<PathBuf, String>,
) -> Option<&'a Path> {
    first_other(images, there, name_of)
}

fn first_other<'a>(
    mut images: impl Iterator<Item = &'a Path>,
    there: &BTreeMap<PathBuf, String>,
    here: impl Fn(&Path) -> Option<String>,
) -> Option<&'a Path> {
    images.find(|image| {
        let names = there.get(*image).zip(here(image));
        names.is_some_and(|(there, here)| are_apart(there, &here))
    })
}

/// Returns the name of the device that an image is. `None`: it is a file, its device has no such
/// name, or there is nothing, which is reported when the image is opened.
fn name_of(image: &Path) -> Option<String> {
    if !is_device_path(image) {
        return None;
    }
    let node = fs::metadata(image).ok().filter(|node| node.file_type().is_block_device())?;
    let name = DeviceIdentity::of(&node).ok()?.name;
    (!name.is_empty()).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_of_the_same_path_and_another_name_is_another_one() {
        let (web, db) = (Path::new("/dev/vg0/web"), Path::new("/dev/vg0/db"));
        let file = Path::new("/srv/vms/log.raw");
        let images = || [file, db, web].into_iter();
        let names = |web_name: &str| -> BTreeMap<PathBuf, String> {
            let all = [(db, "LVM-db"), (web, web_name)];
            all.map(|(path, name)| (path.to_owned(), name.to_owned())).into_iter().collect()
        };
        let there = names("LVM-one");
        for (here, other) in [
            ("LVM-one", None),
            ("LVM-two", Some(web)),
            ("naa.6001405", Some(web)),
            // Nothing shows whether it is another one.
            ("", None),
        ] {
            let here = names(here);
            let found = first_other(images(), &there, |image| here.get(image).cloned());
            assert_eq!(found, other, "{here:?}");
        }
        // A source of an earlier release gives no names, and this host may lack the device.
        assert_eq!(first_other(images(), &BTreeMap::new(), |_| Some("LVM-two".to_owned())), None);
        assert_eq!(first_other(images(), &there, |_| None), None);
        // What a source names beyond the VM's images does not count.
        assert_eq!(first_other([file].into_iter(), &there, |_| Some("LVM-x".to_owned())), None);
    }

    #[test]
    fn only_devices_have_names() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let images = [file.path(), Path::new("/dev/null"), Path::new("/dev/none/none")];
        assert_eq!(names_of(images.into_iter()), BTreeMap::new());
    }
}
