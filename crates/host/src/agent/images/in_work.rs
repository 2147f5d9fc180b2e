//! Images in work: those that are read as the base of a new image, and those that a merge writes or
//! is about to remove. Neither begins while the other is in progress, and none that is read is
//! deleted.

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
}

static IN_WORK: Mutex<InWork> =
    Mutex::new(InWork { read: BTreeMap::new(), merged: BTreeSet::new() });

/// Images that are being read, until this is dropped.
#[derive(Debug)]
pub(super) struct Reading(Vec<PathBuf>);

/// Images that are being merged, until this is dropped.
#[derive(Debug)]
pub(in crate::agent) struct Merging(Vec<PathBuf>);

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
}
