//! Images of this host that disks which arrive are probably like: what an earlier move of the same
//! guest has left here, clones of the same template. A wrong guess costs reads: content is taken
//! only by its hash ([`godwit_migration::disks::Lookup`]).

mod looks;

use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use futures::future::join_all;
use godwit_api::ApiError;
use godwit_qemu::{Disk, DiskFormat, ResolvedDisk, image_head};
use godwit_types::ReferenceUse;
use rustix::fs::OFlags;

use crate::agent::Agent;
use crate::agent::images::in_work::is_being_made;
use crate::agent::images::{MOST_DEEP, MOST_ENTRIES, NO_VM, format_by_name, tool_failed};
use crate::disk_arrivals::{AlikeImage, DiskArrival, OpenedContent};
use crate::store::SavedArrivingDisk;

/// Most images that are looked up for one disk. Each in qcow2 format takes a QEMU.
const MOST_ALIKE: usize = 2;
/// Most headers that are read for one disk in one directory.
const MOST_HEADS: usize = 64;
/// Longest time for which a new arrival waits for a directory.
const LOOK_LIMIT: Duration = Duration::from_secs(10);
/// Longest time for which an arrival that goes on waits for a directory: after a cut, its source
/// waits 5 s for the answer.
const LOOK_AGAIN_LIMIT: Duration = Duration::from_secs(2);

/// A file below `vm_dirs`.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Listed {
    path: PathBuf,
    modified: SystemTime,
}

/// An image that is alike, and how likely it is.
struct Candidate {
    is_relative: bool,
    modified: SystemTime,
    image: AlikeImage,
}

impl Agent {
    /// Finds for each disk of a transfer the images that it is probably like, the likeliest first;
    /// none if this host allows no references. A directory that takes too long is left out.
    /// `is_new`: the transfer has just begun.
    pub(crate) async fn find_alike(
        self: &Arc<Self>,
        arrival: &DiskArrival,
        is_new: bool,
    ) -> Vec<Vec<AlikeImage>> {
        if self.config().references.by != ReferenceUse::All {
            return Vec::new();
        }
        let disks = &arrival.record.disks;
        let limit = if is_new { LOOK_LIMIT } else { LOOK_AGAIN_LIMIT };
        let looks = self.config().vm_dirs.iter().map(|dir| {
            let (agent, below, disks) = (Arc::clone(self), dir.clone(), disks.clone());
            looks::look_at(dir, limit, move || agent.alike_below(&below, &disks))
        });
        let found = join_all(looks).await;
        likeliest_of_each(disks.len(), found.into_iter().flatten())
    }

    /// Finds the images below one directory, for each disk. Blocks.
    fn alike_below(&self, dir: &Path, disks: &[SavedArrivingDisk]) -> Vec<Vec<Candidate>> {
        let mut files = Vec::new();
        list_below(dir, MOST_DEEP, &mut files);
        disks.iter().map(|disk| self.alike_disk(&files, disk)).collect()
    }

    fn alike_disk(&self, files: &[Listed], disk: &SavedArrivingDisk) -> Vec<Candidate> {
        let likely = likeliest_first(files, &disk.source).into_iter().take(MOST_HEADS);
        let alike = likely.filter_map(|file| self.alike_image(file, disk));
        alike.take(MOST_ALIKE).collect()
    }

    fn alike_image(&self, file: &Listed, disk: &SavedArrivingDisk) -> Option<Candidate> {
        let path = &file.path;
        let place = self.place(path, "read").ok()?;
        // What arrives itself, too.
        if is_being_made(&place.real, NO_VM) {
            return None;
        }
        let head = image_head(&place.open(OFlags::RDONLY).ok()?).ok()?;
        let is_relative = are_relatives(path, &disk.source);
        let is_alike = is_relative || head.virtual_bytes == disk.virtual_bytes;
        // A guest can write any header to its raw disk.
        let is_sound = head.format == format_by_name(path);
        let image = AlikeImage { path: path.clone(), format: head.format };
        let candidate = Candidate { is_relative, modified: file.modified, image };
        (is_alike && is_sound).then_some(candidate)
    }

    /// Opens an image to look for content. Others may write it meanwhile.
    ///
    /// # Errors
    /// It is gone, or QEMU cannot read it.
    pub(crate) async fn open_alike(&self, image: &AlikeImage) -> Result<OpenedContent, ApiError> {
        let place = self.place(&image.path, "read")?;
        if image.format == DiskFormat::Raw {
            let opened = place.open(OFlags::RDONLY);
            return opened.map(OpenedContent::Raw).map_err(|error| place.failed("read", &error));
        }
        let disk = ResolvedDisk::from(Disk::new(&place.real, image.format).readonly());
        let layers = self.open_image(&disk)?;
        let tool = self.image_tool().await?;
        let stream = tool.export_to_read(&layers).await;
        let stream = stream.map_err(|error| tool_failed("read", &image.path, &error))?;
        Ok(OpenedContent::Exported(stream, Box::new(tool)))
    }
}

/// Lists the files below a directory. What cannot be looked at is left out.
fn list_below(dir: &Path, deep: usize, files: &mut Vec<Listed>) {
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        if files.len() >= MOST_ENTRIES {
            return;
        }
        let Ok(data) = entry.metadata() else { continue };
        if entry.file_name().as_encoded_bytes().starts_with(b".") {
            continue;
        }
        if data.is_dir() && deep > 1 {
            list_below(&entry.path(), deep - 1, files);
        } else if data.is_file()
            && let Ok(modified) = data.modified()
        {
            files.push(Listed { path: entry.path(), modified });
        }
    }
}

/// Returns the files in the order in which they are probably like an image with this path at its
/// source: relatives by name first, of equals the one that was written last.
fn likeliest_first<'a>(files: &'a [Listed], source: &Path) -> Vec<&'a Listed> {
    let mut files: Vec<&Listed> = files.iter().collect();
    files.sort_by_cached_key(|file| (!are_relatives(&file.path, source), Reverse(file.modified)));
    files
}

/// Returns the likeliest images of each disk in the same order, from those of each directory.
fn likeliest_of_each(
    disks: usize,
    found: impl Iterator<Item = Vec<Vec<Candidate>>>,
) -> Vec<Vec<AlikeImage>> {
    let mut all: Vec<Vec<Candidate>> = Vec::new();
    all.resize_with(disks, Vec::new);
    for below in found {
        all.iter_mut().zip(below).for_each(|(all, mut more)| all.append(&mut more));
    }
    let likeliest = |mut images: Vec<Candidate>| {
        images.sort_by_key(|one| (!one.is_relative, Reverse(one.modified)));
        // One directory may be below another.
        let mut paths = BTreeSet::new();
        images.retain(|one| paths.insert(one.image.path.clone()));
        images.into_iter().map(|one| one.image).take(MOST_ALIKE).collect()
    };
    all.into_iter().map(likeliest).collect()
}

/// Whether two images have the same name but for the number that tells images of a name apart.
fn are_relatives(one: &Path, other: &Path) -> bool {
    one.extension() == other.extension() && stem_of(one) == stem_of(other)
}

/// Returns the name of an image without its number and its extension.
fn stem_of(path: &Path) -> &str {
    let stem = path.file_stem().and_then(OsStr::to_str).unwrap_or_default();
    match stem.rsplit_once('-') {
        Some((name, number)) if number.bytes().all(|byte| byte.is_ascii_digit()) => name,
        _ => stem,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn relatives_by_name_come_first_and_of_them_the_newest() {
        let file = |name: &str, age_s: u64| Listed {
            path: Path::new("/srv").join(name),
            modified: SystemTime::UNIX_EPOCH + Duration::from_secs(1000 - age_s),
        };
        let files = [
            file("db.raw", 1),
            file("web.raw", 9),
            file("web.qcow2", 2),
            file("web-12.raw", 5),
            file("web-new.raw", 0),
        ];
        let order = likeliest_first(&files, Path::new("/ssd/web-1.raw"));
        let names: Vec<_> = order.iter().filter_map(|file| file.path.file_name()).collect();
        assert_eq!(names, ["web-12.raw", "web.raw", "web-new.raw", "db.raw", "web.qcow2"]);
    }

    #[test]
    fn the_likeliest_of_all_directories_are_taken() {
        let candidate = |path: &str, is_relative: bool, age_s: u64| Candidate {
            is_relative,
            modified: SystemTime::UNIX_EPOCH + Duration::from_secs(1000 - age_s),
            image: AlikeImage { path: path.into(), format: DiskFormat::Raw },
        };
        let slow = vec![vec![candidate("/a/db.raw", false, 1), candidate("/a/x.raw", false, 7)]];
        let other = vec![vec![candidate("/b/web-1.raw", true, 9)], Vec::new()];
        // Of a directory above.
        let twice = vec![vec![candidate("/b/web-1.raw", true, 9)], Vec::new()];
        let found = likeliest_of_each(2, [slow, other, twice].into_iter());
        let paths = |images: &[AlikeImage]| -> Vec<_> {
            images.iter().map(|image| image.path.clone()).collect()
        };
        let wanted = ["/b/web-1.raw", "/a/db.raw"].map(PathBuf::from);
        assert_eq!((paths(&found[0]), paths(&found[1])), (wanted.to_vec(), Vec::new()));
        // No directory has answered.
        assert!(likeliest_of_each(2, std::iter::empty()).iter().all(Vec::is_empty));
    }

    #[test]
    fn hidden_files_and_deep_ones_are_not_listed() {
        let dir = tempfile::tempdir().unwrap();
        let deep = dir.path().join("a/b");
        std::fs::create_dir_all(&deep).unwrap();
        for path in ["web.raw", ".staged", "a/web.raw", "a/b/web.raw"] {
            std::fs::write(dir.path().join(path), "image").unwrap();
        }
        let mut files = Vec::new();
        list_below(dir.path(), 2, &mut files);
        list_below(&dir.path().join("missing"), 2, &mut files);
        let mut paths: Vec<_> = files.into_iter().map(|file| file.path).collect();
        paths.sort();
        assert_eq!(paths, [dir.path().join("a/web.raw"), dir.path().join("web.raw")]);
    }
}
