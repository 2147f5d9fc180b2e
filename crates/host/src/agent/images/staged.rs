//! New images that have no name yet: `.NAME.ID.new` beside it. A note in `STATE_DIR/new-images`
//! names each of them, so that the next agent removes what one that ended has left. A directory for
//! VMs may be shared: nothing else tells whose such a file is.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use godwit_api::{ApiError, ErrorCode};
use godwit_qemu::{ByteSize, DiskFormat, OpenLayer, Uuid, write_image};
use rustix::fs::{AtFlags, Mode, OFlags, RenameFlags};

use super::{NewImages, Place, allocated_bytes, room_of, sync_dir};
use crate::agent::Agent;

/// Directory of the notes, below `state_dir`.
const NOTES: &str = "new-images";
/// Longest note: a path.
const MOST_NOTE_BYTES: u64 = 4096;
/// Interval at which the room is looked at during a copy.
const ROOM_INTERVAL: Duration = Duration::from_millis(100);

/// A new file without its name yet; removed when dropped.
#[derive(Debug)]
pub(super) struct Staged<'a> {
    pub(super) place: &'a Place,
    pub(super) name: String,
    pub(super) file: File,
    note: PathBuf,
}

impl Drop for Staged<'_> {
    fn drop(&mut self) {
        // It is gone if it has got its name.
        let _ = rustix::fs::unlinkat(&self.place.dir, &self.name, AtFlags::empty());
        let _ = fs::remove_file(&self.note);
    }
}

impl Place {
    /// Creates the file of a new image, which has no name yet.
    pub(super) fn stage(&self) -> io::Result<Staged<'_>> {
        let id = Uuid::new_v4();
        let name = format!(".{}{}", self.name.display(), ending(id));
        fs::create_dir_all(&self.notes)?;
        let note = self.notes.join(id.to_string());
        fs::write(&note, self.path.with_file_name(&name).as_os_str().as_bytes())?;
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::RDWR | OFlags::CLOEXEC;
        let opened = rustix::fs::openat(&self.dir, &name, flags, Mode::RUSR | Mode::WUSR);
        match opened {
            Ok(file) => Ok(Staged { place: self, name, file: file.into(), note }),
            Err(error) => {
                let _ = fs::remove_file(&note);
                Err(error.into())
            }
        }
    }
}

impl Staged<'_> {
    pub(super) fn write(
        &self,
        format: DiskFormat,
        bytes: u64,
        backing: Option<(&Path, DiskFormat)>,
    ) -> Result<(), ApiError> {
        tokio::task::block_in_place(|| write_image(&self.file, format, bytes, backing))
            .map_err(|error| self.place.failed("create", &error))
    }

    /// Refuses a copy of an image for which the file system has no room. `bytes`: size of the disk.
    pub(super) fn check_room(&self, layers: &[OpenLayer], bytes: u64) -> Result<(), ApiError> {
        let mut needed = 0_u64;
        for layer in layers {
            let taken = allocated_bytes(&layer.file);
            let taken = taken.map_err(|error| self.place.failed("create", &error))?;
            needed = needed.saturating_add(taken);
        }
        self.check_room_for(needed.min(bytes))
    }

    /// Refuses a copy of so many bytes for which the file system has no room.
    pub(super) fn check_room_for(&self, needed: u64) -> Result<(), ApiError> {
        let room = room_of(&self.file).map_err(|error| self.place.failed("create", &error))?;
        if needed <= room {
            return Ok(());
        }
        let (needed, room) = (ByteSize::from_bytes(needed), ByteSize::from_bytes(room));
        let why = format!("the copy may need {needed}, but its directory has only {room}");
        let remedy = "free space there, or make a linked clone or a layer, which needs no copy";
        Err(self.place.refused("create", ErrorCode::HostFailed, &why, remedy))
    }

    /// Waits until copies have used up the file system's room; returns that error. A compressed
    /// image does not tell beforehand what its copy needs.
    pub(super) async fn until_full(&self) -> ApiError {
        loop {
            tokio::time::sleep(ROOM_INTERVAL).await;
            if let Err(error) = self.place.check_growth(&self.file) {
                return error;
            }
        }
    }

    /// Writes an empty layer on top of an open image.
    pub(super) fn write_layer(&self, bytes: u64, layers: &[OpenLayer]) -> Result<(), ApiError> {
        let backing = layers.first().map(|top| (top.file.real.as_path(), top.format));
        self.write(DiskFormat::Qcow2, bytes, backing)
    }

    pub(super) fn open_layers(&self, format: DiskFormat) -> Result<Vec<OpenLayer>, ApiError> {
        let failed = |error: io::Error| self.place.failed("create", &error);
        let file = self.file.try_clone().map_err(failed)?;
        Ok(vec![OpenLayer::new(file.into(), &self.place.path, format)])
    }

    /// Gives the file its name, unless another one has it by now.
    pub(super) fn name_it(self) -> Result<(), ApiError> {
        let place = self.place;
        self.file.sync_all().map_err(|error| place.failed("create", &error))?;
        match give_name(&place.dir, &self.name, &place.name) {
            // A record may name it next, which must not survive a power cut alone.
            Ok(()) => sync_dir(&place.dir).map_err(|error| {
                place.remove();
                place.failed("create", &error)
            }),
            Err(rustix::io::Errno::EXIST) => Err(place.taken()),
            Err(error) => Err(place.failed("create", &error.into())),
        }
    }
}

/// Gives a file another name in its directory, which nothing has.
pub(super) fn give_name(dir: &OwnedFd, from: &str, to: &OsStr) -> rustix::io::Result<()> {
    match rustix::fs::renameat_with(dir, from, dir, to, RenameFlags::NOREPLACE) {
        // NFS and Ceph know no flags of a rename.
        Err(rustix::io::Errno::INVAL) => give_name_by_link(dir, from, to),
        renamed => renamed,
    }
}

fn give_name_by_link(dir: &OwnedFd, from: &str, to: &OsStr) -> rustix::io::Result<()> {
    rustix::fs::linkat(dir, from, dir, to, AtFlags::empty())?;
    // If this fails, it is tried again when the staged file is dropped.
    let _ = rustix::fs::unlinkat(dir, from, AtFlags::empty());
    Ok(())
}

/// Returns how the name of a staged file ends.
fn ending(id: Uuid) -> String {
    format!(".{id}.new")
}

impl Agent {
    /// Returns the directory of the notes.
    pub(super) fn staging_notes(&self) -> PathBuf {
        self.config().state_dir.join(NOTES)
    }

    /// At the agent's start: removes the new images that an agent which ended has left unfinished.
    pub(in crate::agent) fn remove_staged(&self) {
        let Ok(notes) = fs::read_dir(self.staging_notes()) else { return };
        for note in notes.flatten().map(|entry| entry.path()) {
            match self.remove_noted(&note) {
                Ok(path) => tracing::info!(path = %path.display(), "unfinished image removed"),
                Err(error) => {
                    tracing::warn!(note = %note.display(), error, "a new image may be left");
                }
            }
            if let Err(error) = fs::remove_file(&note) {
                tracing::warn!(note = %note.display(), %error, "cannot remove a note");
            }
        }
    }

    fn remove_noted(&self, note: &Path) -> Result<PathBuf, String> {
        let path = noted(note).map_err(|error| error.to_string())?;
        let place = self.place(&path, "remove").map_err(|error| error.message)?;
        match rustix::fs::unlinkat(&place.dir, &place.name, AtFlags::empty()) {
            Ok(()) | Err(rustix::io::Errno::NOENT) => Ok(path),
            Err(error) => Err(error.to_string()),
        }
    }
}

/// Gives files their names, up to the first that cannot have its name. Returns how many have
/// theirs, and that error.
pub(super) fn name_all(staged: Vec<Staged<'_>>) -> (usize, Option<ApiError>) {
    let mut named = 0;
    for file in staged {
        match file.name_it() {
            Ok(()) => named += 1,
            Err(error) => return (named, Some(error)),
        }
    }
    (named, None)
}

/// Returns the files that have their names; if one of them has none, all are removed.
pub(super) fn named_images(
    places: Vec<Place>,
    (named, failed): (usize, Option<ApiError>),
) -> Result<NewImages, ApiError> {
    let images = NewImages(places.into_iter().take(named).collect(), Vec::new());
    failed.map_or(Ok(images), Err)
}

/// Reads a note: the path of a staged file with the note's name in its own.
fn noted(note: &Path) -> io::Result<PathBuf> {
    let mut text = Vec::new();
    File::open(note)?.take(MOST_NOTE_BYTES).read_to_end(&mut text)?;
    let path = PathBuf::from(std::ffi::OsString::from_vec(text));
    let id = note.file_name().and_then(|name| name.to_str()).and_then(|name| name.parse().ok());
    let name = path.file_name().map(OsStrExt::as_bytes).unwrap_or_default();
    let is_staged = id.is_some_and(|id: Uuid| name.ends_with(ending(id).as_bytes()));
    match is_staged && name.starts_with(b".") {
        true => Ok(path),
        false => Err(io::Error::new(io::ErrorKind::InvalidData, "no note of an unfinished image")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_path_of_a_staged_file_is_a_note() {
        let dir = tempfile::tempdir().unwrap();
        let id = Uuid::from_u128(7);
        let note = dir.path().join(id.to_string());
        let read = |text: &str| {
            fs::write(&note, text).unwrap();
            noted(&note).ok()
        };
        let path = format!("/srv/.web.qcow2.{id}.new");
        assert_eq!(read(&path), Some(PathBuf::from(&path)));
        for other in ["/srv/web.qcow2", "", "/srv/.web.qcow2.new", &format!("/srv/web.{id}.new")] {
            assert_eq!(read(other), None, "{other}");
        }
        assert_eq!(read(&path.replace('7', "8")), None);
    }

    #[test]
    fn a_name_is_given_once_also_by_a_link() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let dir = rustix::fs::open(folder.path(), OFlags::PATH, Mode::empty()).unwrap();
        for (by_link, name) in [(false, "one"), (true, "two")] {
            let give = || match by_link {
                true => give_name_by_link(&dir, "staged", name.as_ref()),
                false => give_name(&dir, "staged", name.as_ref()),
            };
            fs::write(at("staged"), "first").unwrap();
            give().unwrap();
            assert!(!at("staged").exists());
            fs::write(at("staged"), "second").unwrap();
            assert_eq!(give(), Err(rustix::io::Errno::EXIST));
            assert_eq!(fs::read_to_string(at(name)).unwrap(), "first");
        }
    }
}
