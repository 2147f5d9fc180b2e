//! BLAKE3 of files: the content of a disk's backing files, compared between two hosts. Large files
//! take a while, so what was computed is remembered until the file changes.

use std::fs::{File, Metadata};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::time::{Duration, SystemTime};

use parking_lot::Mutex;

/// Digests that are remembered; the oldest make room.
const MOST_REMEMBERED: usize = 256;

/// Bytes of a read.
const READ_BYTES: usize = 1 << 20;

/// Time without a change after which a file's times are proof that it has not changed. Within it,
/// two changes can carry the same time.
const SETTLED: Duration = Duration::from_secs(2);

/// A file as it was when it was read.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Version {
    device: u64,
    inode: u64,
    bytes: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

impl Version {
    fn of(metadata: &Metadata) -> Self {
        Self {
            device: metadata.dev(),
            inode: metadata.ino(),
            bytes: metadata.len(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
        }
    }

    /// Whether another change would certainly carry another time.
    fn is_settled(&self) -> bool {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let latest = self.modified.0.max(self.changed.0);
        // A time in the future proves nothing.
        u64::try_from(latest).is_ok_and(|latest| now >= Duration::from_secs(latest + 1) + SETTLED)
    }
}

static REMEMBERED: Mutex<Vec<(Version, String)>> = Mutex::new(Vec::new());

/// Returns the length of a file and the BLAKE3 of its bytes, in hexadecimal digits. Blocks while it
/// reads the file.
///
/// # Errors
/// The file cannot be read, or it changes meanwhile.
pub(crate) fn file_digest(file: &File) -> io::Result<(u64, String)> {
    let metadata = file.metadata()?;
    let version = Version::of(&metadata);
    let known = REMEMBERED.lock().iter().find(|(of, _)| *of == version).map(|(_, sum)| sum.clone());
    if let Some(sum) = known {
        return Ok((version.bytes, sum));
    }
    let settled = metadata.is_file() && version.is_settled();
    let (bytes, sum) = read(file)?;
    // The length of a block device is 0 in its metadata.
    if Version::of(&file.metadata()?) != version || (metadata.is_file() && bytes != version.bytes) {
        return Err(io::Error::other("it changed while it was read"));
    }
    if settled {
        let mut remembered = REMEMBERED.lock();
        remembered.retain(|(of, _)| (of.device, of.inode) != (version.device, version.inode));
        if remembered.len() >= MOST_REMEMBERED {
            remembered.remove(0);
        }
        remembered.push((version, sum.clone()));
    }
    Ok((bytes, sum))
}

fn read(file: &File) -> io::Result<(u64, String)> {
    let mut hasher = blake3::Hasher::new();
    let mut buffer = vec![0; READ_BYTES];
    let mut at = 0;
    loop {
        match file.read_at(&mut buffer, at) {
            Ok(0) => return Ok((at, hasher.finalize().to_hex().to_string())),
            Ok(count) => {
                hasher.update(&buffer[..count]);
                at += count as u64;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::OpenOptions;

    use super::*;

    fn times(file: &File, seconds_ago: u64) {
        let then = SystemTime::now() - Duration::from_secs(seconds_ago);
        file.set_modified(then).unwrap();
    }

    #[test]
    fn a_digest_is_that_of_the_content() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("base");
        std::fs::write(&path, vec![7; READ_BYTES + 5]).unwrap();
        let expected = blake3::hash(&vec![7; READ_BYTES + 5]).to_hex().to_string();
        let digest = file_digest(&File::open(&path).unwrap()).unwrap();
        assert_eq!(digest, (READ_BYTES as u64 + 5, expected));
    }

    #[test]
    fn a_change_of_one_byte_is_noticed_even_when_the_modification_time_is_set_back() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("base");
        std::fs::write(&path, b"first").unwrap();
        let file = OpenOptions::new().read(true).write(true).open(&path).unwrap();
        times(&file, 3600);
        let first = file_digest(&file).unwrap();
        file.write_all_at(b"F", 0).unwrap();
        times(&file, 3600);
        let second = file_digest(&file).unwrap();
        assert_eq!(first.0, second.0);
        assert_ne!(first.1, second.1);
    }

    #[test]
    fn only_a_file_that_has_been_left_alone_is_settled() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("base");
        std::fs::write(&path, b"x").unwrap();
        let mut version = Version::of(&path.metadata().unwrap());
        // As if it had just been written, however slow this machine is.
        version.modified.0 += 100;
        version.changed.0 += 100;
        assert!(!version.is_settled());
        version.modified.0 -= 110;
        version.changed.0 -= 110;
        assert!(version.is_settled());
        version.changed.0 += 100;
        assert!(!version.is_settled());
    }
}
