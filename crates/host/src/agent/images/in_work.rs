//! Images in work: those that are read as the base of a new image, those that a merge writes or is
//! about to remove, and those that are created, written by a warm import or deleted. No merge
//! begins while its images are read, and no reading while they are merged. No image is deleted that
//! is read or written, and no VM gets one that is written for another.
//!
//! A deletion claims the image, and then looks for VMs and readers that use it. A VM that gets an
//! image is in the table, and a reader is noted, before they look for such a claim. So one of the
//! two notices the other, and no lock is held while storage is waited for.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use godwit_qemu::OpenLayer;
use parking_lot::Mutex;

/// Real paths of images in work.
#[derive(Debug)]
struct InWork {
    /// Images that are being read, with the number of readers.
    read: BTreeMap<PathBuf, usize>,
    merged: BTreeSet<PathBuf>,
    /// Images that are being created, written by a warm import or deleted, with the VM that may
    /// use them already.
    made: BTreeMap<PathBuf, Option<String>>,
}

static IN_WORK: Mutex<InWork> =
    Mutex::new(InWork { read: BTreeMap::new(), merged: BTreeSet::new(), made: BTreeMap::new() });

/// Images that are being read, until this is dropped.
#[derive(Debug)]
pub(super) struct Reading(Vec<PathBuf>);

/// Images that are being merged, until this is dropped.
#[derive(Debug)]
pub(in crate::agent) struct Merging(Vec<PathBuf>);

/// An image that is being created, written by a warm import or deleted, until this is dropped.
#[derive(Debug)]
pub(super) struct WriteClaim(PathBuf);

/// Begins the only creation, pass or deletion of an image with this real path; `None` if there is
/// one already.
pub(super) fn claim(real: &Path) -> Option<WriteClaim> {
    match IN_WORK.lock().made.entry(real.to_owned()) {
        Entry::Occupied(_) => None,
        Entry::Vacant(free) => {
            free.insert(None);
            Some(WriteClaim(real.to_owned()))
        }
    }
}

/// Whether the image with this real path is being created, written by a warm import or deleted, and
/// is not for this VM.
pub(in crate::agent) fn is_being_made(real: &Path, vm: &str) -> bool {
    let in_work = IN_WORK.lock();
    in_work.made.get(real).is_some_and(|owner| owner.as_deref() != Some(vm))
}

impl WriteClaim {
    /// Lets the VM of this name use the image, which is complete. No other VM may use it.
    pub(super) fn reserve_for(&self, vm: &str) {
        if let Some(owner) = IN_WORK.lock().made.get_mut(&self.0) {
            *owner = Some(vm.to_owned());
        }
    }
}

/// Claims of images for a VM, which are for none until this is dropped.
#[derive(Debug)]
pub(super) struct Withdrawn<'a> {
    images: &'a [PathBuf],
    vm: &'a str,
}

impl Withdrawn<'_> {
    /// Leaves the images for none until their claims end.
    pub(super) fn for_good(mut self) {
        self.images = &[];
    }
}

/// Keeps also the VM for which images with these real paths are claimed from getting them.
pub(super) fn withdraw<'a>(images: &'a [PathBuf], vm: &'a str) -> Withdrawn<'a> {
    reserve_all(images, None);
    Withdrawn { images, vm }
}

fn reserve_all(images: &[PathBuf], vm: Option<&str>) {
    let mut in_work = IN_WORK.lock();
    for image in images {
        if let Some(owner) = in_work.made.get_mut(image) {
            *owner = vm.map(str::to_owned);
        }
    }
}

impl Drop for Withdrawn<'_> {
    fn drop(&mut self) {
        reserve_all(self.images, Some(self.vm));
    }
}

impl Drop for WriteClaim {
    fn drop(&mut self) {
        IN_WORK.lock().made.remove(&self.0);
    }
}

/// Begins to read open images; returns the one that is being merged, if there is one.
pub(super) fn read(layers: &[OpenLayer]) -> Result<Reading, PathBuf> {
    let mut in_work = IN_WORK.lock();
    let paths: Vec<PathBuf> = layers.iter().map(|layer| layer.file.real.clone()).collect();
    if let Some(path) = paths.iter().find(|path| in_work.merged.contains(*path)) {
        return Err(path.clone());
    }
    for path in &paths {
        *in_work.read.entry(path.clone()).or_default() += 1;
    }
    Ok(Reading(paths))
}

/// Returns why an image cannot be read that is being merged.
pub(super) fn being_merged(path: &Path) -> String {
    format!("layers are being merged into {} or from it", path.display())
}

/// Begins to merge images with these real paths; `None` if one of them is being read or merged.
pub(super) fn merge(paths: Vec<PathBuf>) -> Option<Merging> {
    let mut in_work = IN_WORK.lock();
    if paths.iter().any(|path| in_work.read.contains_key(path) || in_work.merged.contains(path)) {
        return None;
    }
    in_work.merged.extend(paths.iter().cloned());
    Some(Merging(paths))
}

/// Whether the image with this real path is being read.
pub(super) fn is_read(real: &Path) -> bool {
    IN_WORK.lock().read.contains_key(real)
}

impl Drop for Reading {
    fn drop(&mut self) {
        let mut in_work = IN_WORK.lock();
        for path in &self.0 {
            if let Some(readers) = in_work.read.get_mut(path) {
                *readers -= 1;
                if *readers == 0 {
                    in_work.read.remove(path);
                }
            }
        }
    }
}

impl Drop for Merging {
    fn drop(&mut self) {
        let mut in_work = IN_WORK.lock();
        in_work.merged.retain(|path| !self.0.contains(path));
    }
}

#[cfg(test)]
mod tests {
    use godwit_qemu::DiskFormat;

    use super::*;

    #[test]
    fn an_image_is_read_or_merged_and_not_both() {
        let dir = tempfile::tempdir().unwrap();
        let layer = |name: &str| {
            let path = dir.path().join(name);
            let file = std::fs::File::create(&path).unwrap();
            OpenLayer::new(file.into(), &path, DiskFormat::Qcow2)
        };
        let (top, base) = (layer("top"), layer("base"));
        let paths = || vec![top.file.real.clone(), base.file.real.clone()];
        let [first, second] = [(); 2].map(|()| read(std::slice::from_ref(&base)).unwrap());
        assert!(merge(paths()).is_none());
        drop(first);
        assert!(is_read(&base.file.real) && merge(paths()).is_none());
        drop(second);
        assert!(!is_read(&base.file.real));
        let merging = merge(paths()).unwrap();
        assert_eq!(read(&[layer("other"), base]).unwrap_err(), merging.0[1]);
        assert!(!is_read(&dir.path().join("other")) && merge(vec![merging.0[0].clone()]).is_none());
        drop(merging);
        read(&[top]).unwrap();
    }

    #[test]
    fn an_image_that_is_written_is_for_one_vm() {
        let image = Path::new("/in-work/web.raw");
        let claimed = claim(image).unwrap();
        assert!(claim(image).is_none() && is_being_made(image, "web"));
        claimed.reserve_for("web");
        assert!(claim(image).is_none() && !is_being_made(image, "web"));
        assert!(is_being_made(image, "db"));
        // While its removal is being checked, it is for none.
        let (images, other) = ([image.to_owned()], Path::new("/in-work/other.raw"));
        let withdrawn = withdraw(&images, "web");
        assert!(is_being_made(image, "web") && is_being_made(image, "db"));
        assert!(!is_being_made(other, "db"));
        drop(withdrawn);
        assert!(!is_being_made(image, "web") && is_being_made(image, "db"));
        // Once it is being removed, it is for none until that ends.
        withdraw(&images, "web").for_good();
        assert!(is_being_made(image, "web") && is_being_made(image, "db"));
        drop(claimed);
        assert!(!is_being_made(image, "web") && !is_being_made(image, "db"));
        claim(image).unwrap();
    }
}
