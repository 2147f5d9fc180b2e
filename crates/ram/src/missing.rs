//! The set of a guest's missing pages: a bitmap for each of its RAM blocks, in a file beside the
//! RAM.
//!
//! The file is on a tmpfs and is mapped shared. A bit that was cleared is therefore cleared for the
//! next process that opens the file, at once and without a system call. An agent that dies in the
//! middle of a page-in leaves a correct record as long as the host runs. Only the bits count: a
//! process that opens the file counts them anew.
//!
//! File format: `MAGIC`, the version and the number of blocks as 32-bit numbers, the size of each
//! block in pages as a 64-bit number, and zeros up to a multiple of 4096 bytes. Then follow, for
//! each block, one bit per page in words of 64 bits, the lowest page first. Numbers are in the
//! host's byte order, because no other host reads them. The magic is written last, so an unfinished
//! file is not valid.
//!
//! This module knows neither why pages are missing nor how they arrive.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::FallocateFlags;
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};

use crate::pages::{PageRange, push_merged};

/// First bytes of a file.
const MAGIC: [u8; 8] = *b"GWMISSNG";
const VERSION: u32 = 1;
/// Magic, version and number of blocks, in bytes.
const FIXED_BYTES: usize = 16;
/// The header ends at a multiple of this, so that the words after it are aligned.
const HEADER_UNIT_BYTES: usize = 4096;
/// More blocks than QEMU gives a guest. It bounds the reading of a corrupt header.
const MAX_BLOCKS: usize = 1 << 12;
/// Pages per word.
const WORD_PAGES: u64 = 64;

/// Set of the missing pages of each RAM block. Several threads may use it at once; each call on a
/// page is atomic. Blocks are numbered in the order of the sizes given. Pages outside the blocks
/// are never missing, and a query for them is not an error.
#[derive(Debug)]
pub struct MissingPages {
    block_pages: Vec<u64>,
    /// Index of each block's first word.
    first_words: Vec<usize>,
    words: Words,
    /// Number of missing pages. It is raised before bits are set and lowered after they are
    /// cleared, so it is never too low.
    count: AtomicU64,
}

#[derive(Debug)]
enum Words {
    Own(Vec<AtomicU64>),
    OfFile(Mapping),
}

impl MissingPages {
    /// Creates the file for blocks of these sizes in pages, with no page missing. Only its owner
    /// may read and write it. It replaces a file with that name. The file's memory is allocated, so
    /// setting a bit later cannot fail.
    ///
    /// # Errors
    /// `InvalidInput` if there are too many blocks or pages, otherwise the file system's error
    /// (`StorageFull`). No file remains after an error.
    pub fn create(path: &Path, block_pages: &[u64]) -> io::Result<MissingPages> {
        let layout = Layout::of(block_pages)
            .filter(|_| block_pages.len() <= MAX_BLOCKS)
            .ok_or(io::ErrorKind::InvalidInput)?;
        match std::fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let file = options().create_new(true).mode(0o600).open(path)?;
        let finish = || {
            file.set_len(layout.file_bytes)?;
            let mapping = Mapping::new(&file, &layout)?;
            file.write_all_at(&header(block_pages)[MAGIC.len()..], MAGIC.len() as u64)?;
            file.write_all_at(&MAGIC, 0)?;
            Ok(MissingPages::with(block_pages.to_vec(), layout, Words::OfFile(mapping)))
        };
        finish().inspect_err(|_| {
            // The file was created above; the first error says more.
            let _ = std::fs::remove_file(path);
        })
    }

    /// Opens a file that [`MissingPages::create`] made, in this process or in one that died.
    ///
    /// # Errors
    /// `InvalidData` if it is not such a file or is corrupt, otherwise the file system's error.
    pub fn open(path: &Path) -> io::Result<MissingPages> {
        let file = options().open(path)?;
        let metadata = file.metadata()?;
        if !metadata.is_file() {
            return Err(garbled("not a file"));
        }
        let block_pages = read_header(&file, metadata.len())?;
        let layout =
            Layout::of(&block_pages).ok_or_else(|| garbled("blocks of impossible sizes"))?;
        if layout.file_bytes != metadata.len() {
            return Err(garbled("its length does not fit its blocks"));
        }
        let mapping = Mapping::new(&file, &layout)?;
        let missing = MissingPages::with(block_pages, layout, Words::OfFile(mapping));
        let (all, inside) = (missing.count_all(), missing.count.load(Ordering::Relaxed));
        if all != inside {
            return Err(garbled("it names pages outside its blocks"));
        }
        Ok(missing)
    }

    /// Creates a set without a file, with no page missing. It ends with this process. The sizes
    /// must be those of existing blocks and not a peer's claim, because so many bits are allocated.
    #[must_use]
    pub fn in_memory(block_pages: &[u64]) -> MissingPages {
        // A size that no memory holds ends the process in the next line, as a list of that length
        // would.
        let layout = Layout::of(block_pages)
            .unwrap_or_else(|| Layout { words: usize::MAX, ..Layout::default() });
        let words = (0..layout.words).map(|_| AtomicU64::new(0)).collect();
        MissingPages::with(block_pages.to_vec(), layout, Words::Own(words))
    }

    fn with(block_pages: Vec<u64>, layout: Layout, words: Words) -> MissingPages {
        let missing = MissingPages {
            block_pages,
            first_words: layout.first_words,
            words,
            count: AtomicU64::new(0),
        };
        let inside = (0..missing.block_pages.len())
            .map(|block| missing.count_in(block, PageRange::new(0, u64::MAX)))
            .sum();
        missing.count.store(inside, Ordering::Relaxed);
        missing
    }

    /// Returns the size of each block, in pages.
    #[must_use]
    pub fn block_pages(&self) -> &[u64] {
        &self.block_pages
    }

    /// Marks pages of `block` as missing. Pages outside the block are ignored.
    pub fn insert(&self, block: usize, pages: PageRange) {
        for (word, _, mask) in self.parts(block, pages) {
            self.count.fetch_add(mask.count_ones().into(), Ordering::AcqRel);
            let before = word.fetch_or(mask, Ordering::AcqRel);
            self.count.fetch_sub((before & mask).count_ones().into(), Ordering::AcqRel);
        }
    }

    /// Returns whether the page is missing.
    #[must_use]
    pub fn contains(&self, block: usize, page: u64) -> bool {
        self.parts(block, PageRange::new(page, 1))
            .any(|(word, _, mask)| word.load(Ordering::Acquire) & mask != 0)
    }

    /// Marks the page as present. Its bytes must already be in the file; otherwise an agent that
    /// dies would lose them. Returns true to exactly one of concurrent callers, and only if the
    /// page was missing.
    pub fn remove(&self, block: usize, page: u64) -> bool {
        let removed = self
            .parts(block, PageRange::new(page, 1))
            .any(|(word, _, mask)| word.fetch_and(!mask, Ordering::AcqRel) & mask != 0);
        if removed {
            self.count.fetch_sub(1, Ordering::AcqRel);
        }
        removed
    }

    /// Returns the number of missing pages of all blocks, at no cost. While other threads insert or
    /// remove pages, the number may be too high, but never too low: 0 means that no page is
    /// missing.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.count.load(Ordering::Acquire)
    }

    /// Returns how many of the pages of `block` are missing.
    #[must_use]
    pub fn count_in(&self, block: usize, pages: PageRange) -> u64 {
        self.parts(block, pages)
            .map(|(word, _, mask)| u64::from((word.load(Ordering::Acquire) & mask).count_ones()))
            .sum()
    }

    /// Returns the missing pages of `block` within `within`, as a normal list.
    #[must_use]
    pub fn runs(&self, block: usize, within: PageRange) -> Vec<PageRange> {
        let mut runs = Vec::new();
        for (word, first_page, mask) in self.parts(block, within) {
            let mut bits = word.load(Ordering::Acquire) & mask;
            while bits != 0 {
                let (start, count) =
                    (bits.trailing_zeros(), (bits >> bits.trailing_zeros()).trailing_ones());
                push_merged(
                    &mut runs,
                    0,
                    PageRange::new(first_page + u64::from(start), count.into()),
                );
                bits &= !bits_of(start, count);
            }
        }
        runs
    }

    /// Returns the words that contain bits of `pages`, which are cut to the block. Each word comes
    /// with the page of its lowest bit and a mask of the pages requested.
    fn parts(
        &self,
        block: usize,
        pages: PageRange,
    ) -> impl Iterator<Item = (&AtomicU64, u64, u64)> {
        let block_pages = self.block_pages.get(block).copied().unwrap_or(0);
        let pages = pages.intersect(PageRange::new(0, block_pages));
        let words = match pages.is_empty() {
            true => 0..0,
            false => pages.first / WORD_PAGES..pages.end().div_ceil(WORD_PAGES),
        };
        let base = self.first_words.get(block).copied().unwrap_or(0);
        words.filter_map(move |index| {
            let word = self.words().get(base + usize::try_from(index).ok()?)?;
            let held = PageRange::new(index * WORD_PAGES, WORD_PAGES).intersect(pages);
            let start = u32::try_from(held.first - index * WORD_PAGES).ok()?;
            Some((word, index * WORD_PAGES, bits_of(start, u32::try_from(held.count).ok()?)))
        })
    }

    fn words(&self) -> &[AtomicU64] {
        match &self.words {
            Words::Own(words) => words,
            Words::OfFile(mapping) => mapping.words(),
        }
    }

    fn count_all(&self) -> u64 {
        self.words().iter().map(|word| u64::from(word.load(Ordering::Relaxed).count_ones())).sum()
    }
}

/// Returns a mask of `count` bits from bit `start` on.
fn bits_of(start: u32, count: u32) -> u64 {
    let ones = u64::MAX.checked_shr(u64::BITS.saturating_sub(count)).unwrap_or(0);
    ones.checked_shl(start).unwrap_or(0)
}

#[derive(Default)]
struct Layout {
    first_words: Vec<usize>,
    words: usize,
    header_bytes: usize,
    file_bytes: u64,
}

impl Layout {
    /// Returns `None` if the file would exceed the address space.
    fn of(block_pages: &[u64]) -> Option<Layout> {
        let mut layout = Layout {
            header_bytes: header_bytes(block_pages.len()).next_multiple_of(HEADER_UNIT_BYTES),
            ..Layout::default()
        };
        for pages in block_pages {
            layout.first_words.push(layout.words);
            layout.words =
                layout.words.checked_add(usize::try_from(pages.div_ceil(WORD_PAGES)).ok()?)?;
        }
        let file_bytes =
            layout.words.checked_mul(size_of::<u64>())?.checked_add(layout.header_bytes)?;
        // Largest size of a slice.
        isize::try_from(file_bytes).ok()?;
        layout.file_bytes = file_bytes as u64;
        Some(layout)
    }
}

fn header_bytes(blocks: usize) -> usize {
    FIXED_BYTES + blocks * size_of::<u64>()
}

fn header(block_pages: &[u64]) -> Vec<u8> {
    // There are at most MAX_BLOCKS blocks.
    let blocks = u32::try_from(block_pages.len()).unwrap_or(u32::MAX);
    let mut header = MAGIC.to_vec();
    header.extend(VERSION.to_ne_bytes());
    header.extend(blocks.to_ne_bytes());
    header.extend(block_pages.iter().flat_map(|pages| pages.to_ne_bytes()));
    header
}

/// Reads the blocks' sizes from the header of a file with so many bytes.
fn read_header(file: &File, file_bytes: u64) -> io::Result<Vec<u64>> {
    if file_bytes < FIXED_BYTES as u64 {
        return Err(garbled("too short"));
    }
    let mut fixed = [0; FIXED_BYTES];
    file.read_exact_at(&mut fixed, 0)?;
    let [magic @ .., v0, v1, v2, v3, b0, b1, b2, b3] = fixed;
    if magic != MAGIC {
        return Err(garbled("no such file, or not finished"));
    }
    if u32::from_ne_bytes([v0, v1, v2, v3]) != VERSION {
        return Err(garbled("of another version"));
    }
    let blocks = usize::try_from(u32::from_ne_bytes([b0, b1, b2, b3])).unwrap_or(usize::MAX);
    if blocks > MAX_BLOCKS || header_bytes(blocks) as u64 > file_bytes {
        return Err(garbled("too many blocks"));
    }
    let mut sizes = vec![0; blocks * size_of::<u64>()];
    file.read_exact_at(&mut sizes, FIXED_BYTES as u64)?;
    let (sizes, _) = sizes.as_chunks();
    Ok(sizes.iter().map(|size| u64::from_ne_bytes(*size)).collect())
}

fn garbled(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("not a list of missing pages: {what}"))
}

fn options() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.read(true).write(true).custom_flags(libc::O_CLOEXEC | libc::O_NOFOLLOW);
    options
}

/// File mapped shared. Only agents know its name, and they never change its length.
#[derive(Debug)]
struct Mapping {
    base: *mut u8,
    len: usize,
    header_bytes: usize,
    words: usize,
}

// SAFETY: the mapping is valid until it is dropped, by whichever thread, and its words are accessed
// only as atomics.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps a file that has the length of the layout.
    fn new(file: &File, layout: &Layout) -> io::Result<Mapping> {
        // A word without memory behind it would raise a signal that ends the agent.
        loop {
            match rustix::fs::fallocate(file, FallocateFlags::empty(), 0, layout.file_bytes) {
                Ok(()) => break,
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        let len = usize::try_from(layout.file_bytes).map_err(|_| io::ErrorKind::OutOfMemory)?;
        // SAFETY: a new mapping, at an address that the kernel chooses, replaces nothing.
        let base = unsafe {
            let access = ProtFlags::READ | ProtFlags::WRITE;
            rustix::mm::mmap(ptr::null_mut(), len, access, MapFlags::SHARED, file, 0)
        }?;
        Ok(Mapping {
            base: base.cast(),
            len,
            header_bytes: layout.header_bytes,
            words: layout.words,
        })
    }

    fn words(&self) -> &[AtomicU64] {
        // SAFETY: the words lie within the mapping, behind a header that is a multiple of a page,
        // and are therefore aligned. Every bit pattern is valid. Other processes write the words
        // only as atomics. The words live as long as the mapping, which is borrowed.
        unsafe {
            std::slice::from_raw_parts(self.base.wrapping_add(self.header_bytes).cast(), self.words)
        }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: `new` made the mapping with this length, and all borrows of it have ended.
        let _ = unsafe { rustix::mm::munmap(self.base.cast(), self.len) };
    }
}

#[cfg(test)]
#[path = "missing_tests.rs"]
mod tests;
