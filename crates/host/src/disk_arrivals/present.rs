//! Map of the parts of a transfer's disks that are on this host's disk: a bit for each block. A
//! transfer that was interrupted goes on with what is missing.
//!
//! A part is marked after it was flushed, and the map itself is never flushed: after a power cut it
//! may have fewer bits, and never more. A block that the guest has written since is in the source's
//! dirty bitmaps, so a mark is never taken back.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Size of a block.
const BLOCK_BYTES: u64 = 64 << 10;
/// Size of a block of a disk of more than [`LARGE_BYTES`].
const LARGE_BLOCK_BYTES: u64 = 1 << 20;
const LARGE_BYTES: u64 = 1 << 40;
/// Most runs that are reported: an answer to a source has a bound.
const MOST_RUNS: usize = 16_384;

/// A part of a disk: its number, offset and length.
pub(crate) type DiskPart = (usize, u64, u64);

/// The map of a transfer.
#[derive(Debug)]
pub(crate) struct PresentMap {
    path: PathBuf,
    /// `None`: it cannot be written, and lasts as long as this agent.
    file: Option<File>,
    disks: Vec<DiskMap>,
}

struct DiskMap {
    /// Size of the disk.
    bytes: u64,
    block_bytes: u64,
    /// Its place in the file.
    at: u64,
    bits: Vec<u8>,
}

impl std::fmt::Debug for DiskMap {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DiskMap").field("bytes", &self.bytes).finish_non_exhaustive()
    }
}

impl DiskMap {
    fn new(bytes: u64, at: u64) -> DiskMap {
        let block_bytes = if bytes > LARGE_BYTES { LARGE_BLOCK_BYTES } else { BLOCK_BYTES };
        let length = bytes.div_ceil(block_bytes).div_ceil(8);
        // A disk has a bound. The kernel gives memory for what is marked, or read from a file.
        DiskMap { bytes, block_bytes, at, bits: vec![0; usize::try_from(length).unwrap_or(0)] }
    }

    /// Marks the blocks that a part covers wholly. Returns the bytes of the map that changed.
    fn mark(&mut self, offset: u64, bytes: u64) -> Option<(usize, usize)> {
        let end = offset.saturating_add(bytes).min(self.bytes);
        let first = offset.div_ceil(self.block_bytes);
        let behind = match end == self.bytes {
            true => end.div_ceil(self.block_bytes),
            false => end / self.block_bytes,
        };
        for block in first..behind {
            if let Some(byte) = usize::try_from(block / 8).ok().and_then(|at| self.bits.get_mut(at))
            {
                *byte |= 1 << (block % 8);
            }
        }
        let at = |block: u64| usize::try_from(block / 8).unwrap_or(usize::MAX);
        (first < behind).then(|| (at(first), (at(behind - 1) + 1).min(self.bits.len())))
    }

    /// Calls `found` with each run of marked blocks: its offset and length.
    fn each_run(&self, mut found: impl FnMut(u64, u64)) {
        let mut begun = None;
        let blocks = self.bytes.div_ceil(self.block_bytes);
        let mut block = 0;
        while block < blocks {
            let byte = usize::try_from(block / 8).ok().and_then(|at| self.bits.get(at));
            let byte = byte.copied().unwrap_or(0);
            let same = if begun.is_some() { u8::MAX } else { 0 };
            // Most bytes are all or nothing.
            if block.is_multiple_of(8) && byte == same {
                block += 8;
                continue;
            }
            let is_marked = byte & (1 << (block % 8)) != 0;
            match (is_marked, begun) {
                (true, None) => begun = Some(block),
                (false, Some(first)) => {
                    found(first * self.block_bytes, (block - first) * self.block_bytes);
                    begun = None;
                }
                _ => {}
            }
            block += 1;
        }
        if let Some(first) = begun {
            let offset = first * self.block_bytes;
            found(offset, self.bytes - offset);
        }
    }
}

impl PresentMap {
    /// Opens the map of disks of these sizes, or begins one. `is_new`: nothing of them has arrived.
    pub(crate) fn open(path: &Path, sizes: &[u64], is_new: bool) -> PresentMap {
        let mut disks: Vec<DiskMap> = Vec::with_capacity(sizes.len());
        let mut length = 0;
        for &bytes in sizes {
            let disk = DiskMap::new(bytes, length);
            length += disk.bits.len() as u64;
            disks.push(disk);
        }
        let file = open_file(path, length, is_new).inspect_err(|error| {
            let path = path.display();
            tracing::warn!(%path, %error, "what arrives of disks is not recorded");
        });
        let mut map = PresentMap { path: path.to_owned(), file: file.ok(), disks };
        // A new one has only zeros, which would take memory.
        if !is_new && map.read().is_err() {
            map.file = None;
            map.disks.iter_mut().for_each(|disk| disk.bits.fill(0));
        }
        map
    }

    fn read(&mut self) -> io::Result<()> {
        let Some(mut file) = self.file.as_ref() else { return Ok(()) };
        self.disks.iter_mut().try_for_each(|disk| file.read_exact(&mut disk.bits))
    }

    /// Marks parts that are on the disk.
    pub(crate) fn mark(&mut self, mut parts: Vec<DiskPart>) {
        parts.sort_unstable();
        // Streams share a disk: blocks may begin in one part and end in the next.
        let joined = |part: &mut DiskPart, before: &mut DiskPart| {
            let follows = part.0 == before.0 && part.1 <= before.1.saturating_add(before.2);
            if follows {
                let end = part.1.saturating_add(part.2).max(before.1.saturating_add(before.2));
                before.2 = end - before.1;
            }
            follows
        };
        parts.dedup_by(joined);
        for (disk, offset, bytes) in parts {
            let Some(disk) = self.disks.get_mut(disk) else { continue };
            let Some((first, behind)) = disk.mark(offset, bytes) else { continue };
            let Some(file) = &self.file else { continue };
            let changed = disk.bits.get(first..behind).unwrap_or_default();
            if let Err(error) = file.write_all_at(changed, disk.at + first as u64) {
                let path = self.path.display();
                tracing::warn!(%path, %error, "what arrives of disks is not recorded");
                self.file = None;
            }
        }
    }

    /// Returns for each disk the runs of what is on the disk, ascending. Of many, the longest.
    pub(crate) fn runs(&self) -> Vec<Vec<(u64, u64)>> {
        // The shortest is on top.
        let mut longest = BinaryHeap::new();
        for (index, disk) in self.disks.iter().enumerate() {
            disk.each_run(|offset, bytes| {
                longest.push(Reverse((bytes, index, offset)));
                if longest.len() > MOST_RUNS {
                    longest.pop();
                }
            });
        }
        let mut runs = vec![Vec::new(); self.disks.len()];
        for Reverse((bytes, index, offset)) in longest {
            runs[index].push((offset, bytes));
        }
        runs.iter_mut().for_each(|runs: &mut Vec<(u64, u64)>| runs.sort_unstable());
        runs
    }
}

/// Opens the file of a map. One of another length is of other disks, and begins anew.
fn open_file(path: &Path, length: u64, is_new: bool) -> io::Result<File> {
    if is_new && path.exists() {
        fs::remove_file(path)?;
    }
    let mut options = File::options();
    let file =
        options.read(true).write(true).create(true).truncate(false).mode(0o600).open(path)?;
    if file.metadata()?.len() != length {
        file.set_len(0)?;
        file.set_len(length)?;
    }
    Ok(file)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const K64: u64 = BLOCK_BYTES;

    fn nothing() -> Vec<Vec<(u64, u64)>> {
        vec![Vec::new(); 2]
    }

    fn map(dir: &Path, is_new: bool) -> PresentMap {
        PresentMap::open(&dir.join("map"), &[20 * K64 + 512, K64], is_new)
    }

    #[test]
    fn only_whole_blocks_are_marked_and_the_next_agent_finds_them() {
        let dir = tempfile::tempdir().unwrap();
        let mut present = map(dir.path(), true);
        assert_eq!(present.runs(), nothing());
        // Two streams bring the halves of a block.
        present.mark(vec![(0, K64 + K64 / 2, K64), (0, K64, K64 / 2), (1, 0, 512)]);
        assert_eq!(present.runs(), [vec![(K64, K64)], vec![]]);
        // The last block is short; nothing is beyond it.
        present.mark(vec![(0, 10 * K64, u64::MAX), (1, 0, K64), (2, 0, K64)]);
        let runs = [vec![(K64, K64), (10 * K64, 10 * K64 + 512)], vec![(0, K64)]];
        assert_eq!(present.runs(), runs);
        drop(present);
        assert_eq!(map(dir.path(), false).runs(), runs);
    }

    #[test]
    fn a_map_of_other_disks_or_of_an_earlier_transfer_does_not_count() {
        let dir = tempfile::tempdir().unwrap();
        map(dir.path(), true).mark(vec![(0, 0, 8 * K64)]);
        assert_eq!(map(dir.path(), true).runs(), nothing());
        map(dir.path(), true).mark(vec![(0, 0, 8 * K64)]);
        let other = PresentMap::open(&dir.path().join("map"), &[K64], false);
        assert!(other.runs()[0].is_empty());
        // A directory that cannot be written: the map lasts as long as the agent.
        let mut lost = PresentMap::open(&dir.path().join("none/map"), &[K64], true);
        lost.mark(vec![(0, 0, K64)]);
        assert_eq!(lost.runs(), [vec![(0_u64, K64)]]);
    }

    #[test]
    fn the_report_has_a_bound_and_the_longest_runs() {
        let dir = tempfile::tempdir().unwrap();
        let bytes = 8 * MOST_RUNS as u64 * K64;
        let mut present = PresentMap::open(&dir.path().join("map"), &[bytes], true);
        let scattered = (0..2 * MOST_RUNS as u64).map(|run| (0, 2 * run * K64, K64));
        present.mark(scattered.chain([(0, bytes - 5 * K64, 5 * K64)]).collect());
        let runs = present.runs().remove(0);
        assert_eq!(runs.len(), MOST_RUNS);
        assert_eq!(runs.last(), Some(&(bytes - 5 * K64, 5 * K64)));
    }

    proptest! {
        #[test]
        fn a_run_is_never_more_than_was_marked(
            parts in prop::collection::vec((0_usize..40, 1_usize..12), 0..12),
        ) {
            let dir = tempfile::tempdir().unwrap();
            let mut present = PresentMap::open(&dir.path().join("map"), &[20 * K64], true);
            let half = K64 / 2;
            let mut marked = [false; 40];
            for &(at, count) in &parts {
                present.mark(vec![(0, at as u64 * half, count as u64 * half)]);
                marked[at..(at + count).min(40)].fill(true);
            }
            for (offset, bytes) in present.runs().remove(0) {
                let [first, behind] = [offset, offset + bytes].map(|at| at / half);
                let covered = &marked[usize::try_from(first)?..usize::try_from(behind)?];
                prop_assert!(covered.iter().all(|marked| *marked), "{first} to {behind}");
            }
        }
    }
}
