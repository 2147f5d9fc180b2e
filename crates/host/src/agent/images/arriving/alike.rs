//! Images of this host that disks which arrive are probably like: what an earlier move of the same
//! guest has left here, clones of the same template. A wrong guess costs reads: content is taken
//! only by its hash ([`godwit_migration::disks::Lookup`]).

use std::cmp::Reverse;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use godwit_api::ApiError;
use godwit_qemu::{Disk, DiskFormat, ResolvedDisk, image_head};
use godwit_types::ReferenceUse;
use rustix::fs::OFlags;

use crate::agent::Agent;
use crate::agent::images::in_work::is_being_made;
use crate::agent::images::{
    MOST_DEEP, MOST_ENTRIES, NO_VM, format_by_name, tool_failed, walk_permit,
};
use crate::disk_arrivals::{AlikeImage, DiskArrival, OpenedContent};
use crate::store::SavedArrivingDisk;

/// Most images that are looked up for one disk. Each in qcow2 format takes a QEMU.
const MOST_ALIKE: usize = 2;
/// Most headers that are read for one disk.
const MOST_HEADS: usize = 64;

/// A file below `vm_dirs`.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Listed {
    path: PathBuf,
    modified: SystemTime,
}

impl Agent {
    /// Finds for each disk of a transfer the images that it is probably like, the likeliest first;
    /// none if this host allows no references.
    pub(crate) async fn find_alike(&self, arrival: &DiskArrival) -> Vec<Vec<AlikeImage>> {
        if self.config().references.by != ReferenceUse::All {
            return Vec::new();
        }
        let _turn = walk_permit().await;
        tokio::task::block_in_place(|| {
            let mut files = Vec::new();
            for dir in &self.config().vm_dirs {
                list_below(dir, MOST_DEEP, &mut files);
            }
            let disks = arrival.record.disks.iter();
            disks.map(|disk| self.alike_disk(&files, disk)).collect()
        })
    }

    fn alike_disk(&self, files: &[Listed], disk: &SavedArrivingDisk) -> Vec<AlikeImage> {
        let likely = likeliest_first(files, &disk.source).into_iter().take(MOST_HEADS);
        let alike = likely.filter_map(|path| self.alike_image(path, disk));
        alike.take(MOST_ALIKE).collect()
    }

    fn alike_image(&self, path: &Path, disk: &SavedArrivingDisk) -> Option<AlikeImage> {
        let place = self.place(path, "read").ok()?;
        // What arrives itself, too.
        if is_being_made(&place.real, NO_VM) {
            return None;
        }
        let head = image_head(&place.open(OFlags::RDONLY).ok()?).ok()?;
        let is_alike =
            are_relatives(path, &disk.source) || head.virtual_bytes == disk.virtual_bytes;
        // A guest can write any header to its raw disk.
        let is_sound = head.format == format_by_name(path);
        (is_alike && is_sound).then(|| AlikeImage { path: path.to_owned(), format: head.format })
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
fn likeliest_first<'a>(files: &'a [Listed], source: &Path) -> Vec<&'a Path> {
    let mut files: Vec<&Listed> = files.iter().collect();
    files.sort_by_cached_key(|file| (!are_relatives(&file.path, source), Reverse(file.modified)));
    files.into_iter().map(|file| file.path.as_path()).collect()
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
        let names: Vec<_> = order.iter().filter_map(|path| path.file_name()).collect();
        assert_eq!(names, ["web-12.raw", "web.raw", "web-new.raw", "db.raw", "web.qcow2"]);
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
