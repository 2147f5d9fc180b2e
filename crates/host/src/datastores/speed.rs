//! Latency and throughput of a datastore, measured with a small file that has no name.
//!
//! A measurement writes and reads 4 MiB and some single blocks, and ends early if that takes long:
//! it must not be felt by the guests that use the same disks.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use godwit_qemu::Uuid;
use godwit_types::DatastoreSpeed;
use rustix::fs::{Advice, AtFlags, Mode, OFlags, fadvise, openat, unlinkat};
use rustix::io::Errno;

/// Bytes of a single write or read.
const BLOCK_BYTES: usize = 4 << 10;
/// Single writes and reads.
const BLOCKS: u64 = 8;
/// Bytes of a large write or read, and their number.
const PIECE_BYTES: usize = 1 << 20;
const PIECES: u64 = 4;
/// Time after which no further write or read begins.
const LIMIT: Duration = Duration::from_secs(2);

/// Measures the file system of an open directory. Nothing of the measurement remains.
pub(super) fn measure(dir: &OwnedFd) -> io::Result<DatastoreSpeed> {
    let file = scratch(dir)?;
    let begun = Instant::now();
    let is_over = || begun.elapsed() >= LIMIT;
    let piece = noise();
    let mut writes = Vec::new();
    for index in 0..BLOCKS {
        writes.push(timed(|| {
            file.write_all_at(&piece[..BLOCK_BYTES], at(index, BLOCK_BYTES))?;
            file.sync_data()
        })?);
        if is_over() {
            break;
        }
    }
    let mut written = 0;
    let write_time = timed(|| {
        while written < PIECES && (written == 0 || !is_over()) {
            file.write_all_at(&piece, at(written, PIECE_BYTES))?;
            written += 1;
        }
        file.sync_data()
    })?;
    drop_cached(&file);
    let mut block = [0; BLOCK_BYTES];
    let mut reads = Vec::new();
    // One block in each part of the file, from its end.
    let part = at(written, PIECE_BYTES) / BLOCKS;
    for index in (0..BLOCKS).rev() {
        reads.push(timed(|| file.read_exact_at(&mut block, index * part))?);
        if is_over() {
            break;
        }
    }
    drop_cached(&file);
    let mut buffer = vec![0; PIECE_BYTES];
    let mut read = 0;
    let read_time = timed(|| {
        while read < written && (read == 0 || !is_over()) {
            file.read_exact_at(&mut buffer, at(read, PIECE_BYTES))?;
            read += 1;
        }
        Ok(())
    })?;
    Ok(DatastoreSpeed {
        write_us: median_us(writes),
        read_us: median_us(reads),
        write_bytes_per_s: rate(at(written, PIECE_BYTES), write_time),
        read_bytes_per_s: rate(at(read, PIECE_BYTES), read_time),
        measured_unix_ms: unix_ms(),
    })
}

/// Creates a file without a name.
fn scratch(dir: &OwnedFd) -> io::Result<File> {
    let (flags, mode) = (OFlags::RDWR | OFlags::CLOEXEC, Mode::RUSR | Mode::WUSR);
    match openat(dir, ".", flags | OFlags::TMPFILE, mode) {
        Ok(file) => return Ok(file.into()),
        // NFS and FUSE know no files without a name.
        Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::INVAL | Errno::NOENT) => {}
        Err(error) => return Err(error.into()),
    }
    let name = format!(".godwit-speed.{}", Uuid::new_v4());
    let file = openat(dir, &name, flags | OFlags::CREATE | OFlags::EXCL, mode)?;
    unlinkat(dir, &name, AtFlags::empty())?;
    Ok(file.into())
}

/// Drops what the page cache has of a file, so that reads come from the disk.
fn drop_cached(file: &File) {
    // The figures are too good if this fails.
    let _ = fadvise(file, 0, None, Advice::DontNeed);
    let _ = fadvise(file, 0, None, Advice::Random);
}

/// Returns bytes that no file system compresses or shares.
fn noise() -> Vec<u8> {
    let mut state = (u64::from(std::process::id()) ^ unix_ms()) | 1;
    let words = (0..PIECE_BYTES / 8).flat_map(|_| {
        // xorshift64 (Marsaglia, "Xorshift RNGs", 2003).
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    });
    words.collect()
}

fn at(index: u64, bytes: usize) -> u64 {
    index * bytes as u64
}

fn timed(mut work: impl FnMut() -> io::Result<()>) -> io::Result<Duration> {
    let begun = Instant::now();
    work()?;
    Ok(begun.elapsed())
}

fn median_us(mut times: Vec<Duration>) -> u64 {
    times.sort();
    let median = times.get(times.len() / 2).copied().unwrap_or_default();
    // What takes less counts as one: 0 is no latency.
    u64::try_from(median.as_micros()).unwrap_or(u64::MAX).max(1)
}

fn rate(bytes: u64, time: Duration) -> u64 {
    let us = time.as_micros().max(1);
    u64::try_from(u128::from(bytes) * 1_000_000 / us).unwrap_or(u64::MAX)
}

fn unix_ms() -> u64 {
    let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since_1970.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_measurement_leaves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let dir = rustix::fs::open(folder.path(), flags, Mode::empty()).unwrap();
        let speed = measure(&dir).unwrap();
        assert!(speed.write_us > 0 && speed.read_us > 0, "{speed:?}");
        assert!(speed.write_bytes_per_s > 0 && speed.read_bytes_per_s > 0, "{speed:?}");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn figures_are_of_what_was_measured() {
        let ms = Duration::from_millis;
        assert_eq!(median_us(vec![ms(9), ms(1), ms(2)]), 2_000);
        assert_eq!(median_us(Vec::new()), 1);
        assert_eq!(rate(4 << 20, ms(500)), 8 << 20);
        let noise = noise();
        assert!(noise.len() == PIECE_BYTES && noise[..64] != noise[64..128]);
    }
}
