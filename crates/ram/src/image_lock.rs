//! QEMU's lock of a disk image.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

/// Bytes that QEMU locks in an image, for what it does (from 100) and what others must not do (from
/// 200): `RAW_LOCK_PERM_BASE` and `RAW_LOCK_SHARED_BASE` of QEMU's block/file-posix.c. They need
/// not exist.
const FIRST: libc::off_t = 100;
const BYTES: libc::off_t = 200;
/// Of these, the byte of a QEMU that may write: bit 1 of what it does is `BLK_PERM_WRITE`.
const WRITES: libc::off_t = FIRST + 1;

/// Locks an image, open to be written, so that no QEMU can open it with `locking=on` or `auto`, on
/// another host neither if the file system shares locks. The lock ends with the open file and its
/// duplicates. Returns whether it is locked; a QEMU that has the image open prevents that.
///
/// # Errors
/// The kernel's error, for example for a file system without locks.
pub fn lock_image(file: &File) -> io::Result<bool> {
    lock(file, FIRST, BYTES)
}

/// Locks an image, open to be written, so that no QEMU can open it to write, as [`lock_image`] does
/// for all. Returns whether it is locked; a QEMU that has it open to write prevents that.
///
/// # Errors
/// The kernel's error, for example for a file system without locks.
pub fn lock_against_writers(file: &File) -> io::Result<bool> {
    lock(file, WRITES, 1)
}

fn lock(file: &File, first: libc::off_t, bytes: libc::off_t) -> io::Result<bool> {
    let lock = libc::flock {
        l_type: libc::c_short::try_from(libc::F_WRLCK).map_err(io::Error::other)?,
        l_whence: libc::c_short::try_from(libc::SEEK_SET).map_err(io::Error::other)?,
        l_start: first,
        l_len: bytes,
        l_pid: 0,
    };
    // SAFETY: the kernel reads the structure, which outlives the call, and writes nothing.
    let result = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const lock) };
    if result == 0 {
        return Ok(true);
    }
    let error = io::Error::last_os_error();
    match error.raw_os_error() {
        Some(libc::EAGAIN | libc::EACCES) => Ok(false),
        _ => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_is_locked_until_the_open_file_ends() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let [one, two] = [(); 2].map(|()| File::options().write(true).open(file.path()).unwrap());
        assert!(lock_image(&one).unwrap());
        assert!(!lock_image(&two).unwrap());
        // Another open file of this process that ends takes nothing away.
        drop(File::open(file.path()).unwrap());
        assert!(!lock_image(&two).unwrap());
        drop(one);
        assert!(lock_image(&two).unwrap());
    }

    #[test]
    fn a_program_that_writes_an_image_is_noticed_and_one_that_reads_it_is_not() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let open = || File::options().write(true).open(file.path()).unwrap();
        let reader = open();
        assert!(lock(&reader, FIRST, 1).unwrap());
        assert!(lock_against_writers(&open()).unwrap());
        let writer = open();
        assert!(lock(&writer, WRITES, 1).unwrap());
        assert!(!lock_against_writers(&open()).unwrap());
        drop(writer);
        assert!(lock_against_writers(&open()).unwrap());
    }
}
