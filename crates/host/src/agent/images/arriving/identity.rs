//! What tells an image that was made for a transfer from another file of its name: the number of
//! the file, and the time of its birth. A number is used again. Where the file system does not
//! record births, the image has a random mark instead, as an extended attribute.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::time::UNIX_EPOCH;

use godwit_qemu::Uuid;
use rustix::fs::{OFlags, XattrFlags, fgetxattr, fsetxattr};
use rustix::io::Errno;

use crate::agent::images::Place;
use crate::store::SavedArrivingDisk;

/// The extended attribute.
const MARK: &str = "user.godwit.image";

/// Marks a new image if its file system does not record births. Without extended attributes, only
/// its number tells it from another.
pub(in crate::agent::images) fn mark_new(file: &File) {
    if born_unix_ns(file).is_ok_and(|born| born == 0)
        && let Err(error) = set_mark(file, Uuid::new_v4().as_u64_pair().0)
    {
        tracing::info!(%error, "an image cannot be marked");
    }
}

/// Returns the number of a file, and the time of its birth in nanoseconds or its mark; 0 if it has
/// neither.
pub(in crate::agent::images) fn identity_of(file: &File) -> io::Result<(u64, u64)> {
    let number = file.metadata()?.ino();
    Ok(match born_unix_ns(file)? {
        0 => (number, mark_of(file)?),
        born => (number, born),
    })
}

/// Whether the file at a place is the image that was made for this disk.
pub(super) fn is_ours(place: &Place, disk: &SavedArrivingDisk) -> io::Result<bool> {
    let file = match place.open(OFlags::RDONLY) {
        Err(error)
            if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::InvalidInput) =>
        {
            return Ok(false);
        }
        opened => opened?,
    };
    Ok(identity_of(&file)? == (disk.inode, disk.born_unix_ns))
}

fn born_unix_ns(file: &File) -> io::Result<u64> {
    let born = file.metadata()?.created().ok();
    let born = born.and_then(|born| born.duration_since(UNIX_EPOCH).ok());
    Ok(born.map_or(0, |born| u64::try_from(born.as_nanos()).unwrap_or(0)))
}

fn set_mark(file: &File, mark: u64) -> io::Result<()> {
    Ok(fsetxattr(file, MARK, &mark.to_le_bytes(), XattrFlags::empty())?)
}

/// Returns the mark of a file; 0 if it has none.
fn mark_of(file: &File) -> io::Result<u64> {
    let mut bytes = [0_u8; 8];
    match fgetxattr(file, MARK, &mut bytes) {
        Ok(8) => Ok(u64::from_le_bytes(bytes)),
        // None, none of this length, or a file system without.
        Ok(_) | Err(Errno::NODATA | Errno::RANGE | Errno::NOTSUP) => Ok(0),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_mark_is_of_one_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("web.raw");
        let file = File::create(&path).unwrap();
        assert_eq!(mark_of(&file).unwrap(), 0);
        if let Err(error) = set_mark(&file, 7) {
            eprintln!("skipped: no extended attributes here: {error}");
            return;
        }
        assert_eq!(mark_of(&File::open(&path).unwrap()).unwrap(), 7);
        fs::remove_file(&path).unwrap();
        let another = File::create(&path).unwrap();
        assert_eq!(mark_of(&another).unwrap(), 0);
        // One of another length is none.
        fsetxattr(&another, MARK, b"long mark of another", XattrFlags::empty()).unwrap();
        assert_eq!(mark_of(&another).unwrap(), 0);
    }

    #[test]
    fn a_file_is_marked_only_where_births_are_unknown() {
        let dir = tempfile::tempdir().unwrap();
        let file = File::create(dir.path().join("web.raw")).unwrap();
        mark_new(&file);
        let born = born_unix_ns(&file).unwrap();
        let identity = identity_of(&file).unwrap();
        assert_eq!(identity.0, file.metadata().unwrap().ino());
        match born {
            0 => assert_eq!(identity.1, mark_of(&file).unwrap()),
            _ => assert_eq!((identity.1, mark_of(&file).unwrap()), (born, 0)),
        }
    }
}
