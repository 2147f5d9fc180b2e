//! Zeros in files and block devices.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use rustix::fs::FallocateFlags;
use rustix::io::Errno;

/// Bytes that are written at once.
const ZERO_BYTES: usize = 256 << 10;

/// Makes a part of a file or a block device zero: as a hole where the file system has holes, and by
/// the device itself where it can. A device refuses a part of one of its blocks.
pub(crate) fn make_zero(file: &File, at: u64, bytes: u64) -> io::Result<()> {
    if bytes == 0 {
        return Ok(());
    }
    let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    match rustix::fs::fallocate(file, hole, at, bytes) {
        Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL) => write_zeros(file, at, bytes),
        done => Ok(done?),
    }
}

fn write_zeros(file: &File, at: u64, bytes: u64) -> io::Result<()> {
    let zeros = vec![0; ZERO_BYTES];
    let end = at.saturating_add(bytes);
    let mut at = at;
    while at < end {
        let length = usize::try_from(end - at).unwrap_or(ZERO_BYTES).min(ZERO_BYTES);
        file.write_all_at(&zeros[..length], at)?;
        at += length as u64;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::block_devices::open_exclusively;
    use crate::block_devices::tests::LoopDevice;

    const BYTES: usize = 3 * ZERO_BYTES;

    /// Checks that `zero` changes the middle of a file or device, and nothing else.
    fn check(file: &File, zero: impl Fn(&File, u64, u64) -> io::Result<()>) {
        file.write_all_at(&vec![7; BYTES], 0).unwrap();
        let length = 2 * ZERO_BYTES - 100;
        zero(file, 300, length as u64).unwrap();
        zero(file, 0, 0).unwrap();
        let mut found = vec![1; BYTES];
        file.read_exact_at(&mut found, 0).unwrap();
        assert!(found[300..300 + length].iter().all(|byte| *byte == 0));
        assert_eq!(found.iter().filter(|byte| **byte == 7).count(), BYTES - length);
    }

    #[test]
    fn zeros_are_written_with_and_without_holes() {
        let file = tempfile::tempfile().unwrap();
        check(&file, make_zero);
        check(&file, write_zeros);
    }

    #[test]
    fn a_device_gets_zeros_also_in_parts_of_its_blocks() {
        let Some(device) = LoopDevice::new(BYTES as u64) else { return };
        check(&open_exclusively(&device.path).unwrap(), make_zero);
    }
}
