//! # On throttling writers
//!
//! A guest that writes memory faster than the wire carries it never finishes moving by itself. A
//! throttle must slow its writes without slowing computation or reads. So it uses the mark that
//! tracking leaves on a page (see [`super`]) in the kernel's other mode: if the userfaultfd is
//! *not* one of `WP_ASYNC`, a write to a marked page waits until a process answers. Answers come at
//! the rate that the wire can follow. This slows each page's *first* write since it was last sent,
//! and nothing else: a guest that stays within a page, computes, or reads, runs at its own speed.
//! vSphere calls this stun during page send (SDPS); here it is exact to the page and to the thread.
//!
//! ## From asynchronous to synchronous
//!
//! A range of memory belongs to one userfaultfd at a time, and the asynchronous mode is a property
//! of the userfaultfd. Taking a range from one and giving it to another removes all marks, so for a
//! moment writes are not seen. The guest is not stopped for this. A piece of memory changes hands
//! as follows:
//!
//! 1. Its bytes are copied.
//! 2. The pages that were written since they were last taken are looked up: *W*. A page that is not
//!    in W was not written since before the copy, so its copy is what the page holds.
//! 3. The piece is unregistered here and registered there, and all of it except W is marked: from
//!    here on each write waits.
//! 4. The pages that are not in W are compared with the copy. A page that differs was written
//!    between 2 and 3, and loses its mark, as if it had been written later. A page that is equal
//!    may have been written too, but with the bytes that it had.
//!
//! This holds only if no thread reads the memory between 2 and 3: such a thread might see bytes
//! that are gone again by 4. So the memory that changes hands is always memory that the current
//! call has not returned yet. A caller that reads memory returned earlier (when another stream
//! redoes a stream's work) must prevent changes meanwhile ([`DirtyTracker::let_grow`]).
//!
//! Unmarked still means dirty, and marked clean, so a scan works as before. It finds the same
//! pages, or more.
//!
//! Only chunks with written pages change hands, when [`DirtyTracker::take_dirty`] reaches them, a
//! few per call: the rest of the memory is cold. They do not change back: a throttle without a
//! limit answers at once.
//!
//! ## Taking dirty pages
//!
//! `PAGEMAP_SCAN` marks asynchronous memory only. In synchronous memory it reports which runs are
//! unmarked, and exactly those runs are then marked. A page written between the two is either among
//! them, and is read afterwards, or is not, and stays unmarked. The handler may remove a mark at
//! any moment; that makes a page dirty, which is never wrong.
//!
//! [`DirtyTracker::take_dirty`]: super::DirtyTracker::take_dirty
//! [`DirtyTracker::let_grow`]: super::DirtyTracker::let_grow

mod handler;
mod pacer;

use std::path::Path;

use linux_raw_sys::general::page_region;
use rustix::io::Errno;

pub use handler::ThrottleFigures;

use super::kernel::io_or_gone;
use super::maps::Segment;
use super::pagemap::{Pagemap, Scan};
use super::uffd::Userfaultfd;
use super::{Block, library, take};
use crate::error::TrackError;
use crate::pages::{PAGE_SIZE, PageRange, gaps, normalise};
use handler::Handler;

/// Smallest chunk that is throttled because of one written page: 8 MiB.
const LEAST_CHUNK_PAGES: u64 = 2048;
/// Memory that changes hands at a time: 4 MiB, a millisecond or two of copying and comparing.
const PIECE_PAGES: u64 = 1024;
/// Maximum chunks of a block. Each may become a mapping of its own, of which a process may have
/// 65,530.
const MOST_CHUNKS: u64 = 4096;

/// Part of a guest's memory whose writers wait.
pub(super) struct Throttle {
    handler: Handler,
    pid: i32,
    /// Whether chunks that are written to are to become throttled.
    grows: bool,
    /// Whether chunks may become throttled now.
    may_grow: bool,
    /// Memory that changed hands since this list was last cleared.
    changed_over: Vec<PageRange>,
    blocks: Vec<Chunks>,
    before: Vec<u8>,
    after: Vec<u8>,
}

/// Record of which chunks of a block are throttled.
struct Chunks {
    chunk_pages: u64,
    throttled: Vec<bool>,
}

/// Tracked memory that a chunk leaves.
pub(super) struct Tracked<'a> {
    pub(super) userfaultfd: &'a Userfaultfd,
    pub(super) pagemap: &'a Pagemap,
    pub(super) block: &'a Block,
    pub(super) runs: &'a mut [page_region],
}

impl Throttle {
    /// Prepares to throttle process `pid`; nothing is throttled yet.
    pub(super) fn new(
        tracker_socket: &Path,
        pid: i32,
        vcpus: &[u32],
        blocks: &[Block],
    ) -> Result<Throttle, TrackError> {
        let (userfaultfd, handles_kernel) = library::request_userfaultfd(tracker_socket)?;
        if !handles_kernel {
            return Err(TrackError::NoKernelFaults);
        }
        let userfaultfd = Userfaultfd::new(userfaultfd);
        userfaultfd.enable_faults()?;
        let handler = Handler::start(userfaultfd, pid, vcpus)
            .map_err(|errno| io_or_gone("start to answer the writes", pid, errno))?;
        let blocks = blocks.iter().map(|block| Chunks::new(block.pages)).collect();
        Ok(Throttle {
            handler,
            pid,
            grows: false,
            may_grow: true,
            changed_over: Vec::new(),
            blocks,
            before: Vec::new(),
            after: Vec::new(),
        })
    }

    /// Limits writers to so many pages per second. `None`: answers at once, and leaves the rest of
    /// the memory alone.
    pub(super) fn set_limit(&mut self, pages_per_s: Option<f64>) {
        self.grows = pages_per_s.is_some();
        self.handler.set_limit(pages_per_s);
    }

    /// Announces that the guest is being stopped: until the next limit is set, no write waits for
    /// long, and no memory changes hands.
    pub(super) fn let_stop(&mut self) {
        self.grows = false;
        self.handler.let_stop();
    }

    /// Sets whether memory may change hands. It may if no thread reads memory that was taken
    /// before.
    pub(super) fn let_grow(&mut self, may_grow: bool) {
        self.may_grow = may_grow;
    }

    /// Returns the memory that changed hands since [`Throttle::forget_changes`].
    pub(super) fn changed_over(&self) -> &[PageRange] {
        &self.changed_over
    }

    pub(super) fn forget_changes(&mut self) {
        self.changed_over.clear();
    }

    /// Returns whether chunks that are written to are to be throttled.
    pub(super) fn grows(&self) -> bool {
        self.grows && self.may_grow
    }

    pub(super) fn figures(&self) -> ThrottleFigures {
        self.handler.figures()
    }

    /// Checks that writes are still answered.
    ///
    /// # Errors
    /// Writes are not answered any more: only ending the throttle helps.
    pub(super) fn check(&self) -> Result<(), TrackError> {
        match self.handler.is_well() {
            true => Ok(()),
            false => Err(TrackError::ThrottleFailed { pid: self.pid }),
        }
    }

    /// Returns the first pages of `stretch` that are either all throttled or all not, and which of
    /// the two.
    pub(super) fn of_one_kind(&self, block: usize, stretch: PageRange) -> (PageRange, bool) {
        match self.blocks.get(block) {
            Some(chunks) => chunks.of_one_kind(stretch),
            None => (stretch, false),
        }
    }

    /// Protects pages that were found dirty in throttled memory. All of them are in `segment`.
    pub(super) fn protect(&self, segment: &Segment, pages: PageRange) -> Result<(), Errno> {
        let userfaultfd = self.handler.userfaultfd();
        segment
            .addresses_of(pages)
            .try_for_each(|address| userfaultfd.write_protect(address, pages.len_bytes()))
    }

    /// Returns the chunk that contains `page`.
    pub(super) fn chunk_of(&self, block: usize, page: u64, all: PageRange) -> PageRange {
        self.blocks.get(block).map_or(PageRange::new(page, 1), |chunks| chunks.chunk_of(page, all))
    }

    /// Throttles a chunk. Dirty pages in it stay dirty, and no write is missed.
    pub(super) fn take_over(
        &mut self,
        block: usize,
        chunk: PageRange,
        tracked: &mut Tracked<'_>,
    ) -> Result<(), TrackError> {
        if let Some(chunks) = self.blocks.get_mut(block) {
            chunks.mark(chunk.first);
        }
        self.changed_over.push(chunk);
        chunk.chunks(PIECE_PAGES).try_for_each(|piece| self.take_over_piece(block, piece, tracked))
    }

    fn take_over_piece(
        &mut self,
        block: usize,
        piece: PageRange,
        tracked: &mut Tracked<'_>,
    ) -> Result<(), TrackError> {
        let len = usize::try_from(piece.len_bytes()).unwrap_or(usize::MAX);
        self.before.resize(len, 0);
        self.after.resize(len, 0);
        let region = &tracked.block.region;
        let unreadable = |_| TrackError::OutOfBounds { block, range: piece };
        region.copy_out(piece.offset_bytes(), &mut self.before).map_err(unreadable)?;
        let written = written_in(tracked, piece)
            .map_err(|errno| io_or_gone("scan the page map", self.pid, errno))?;
        change_hands(tracked, self.handler.userfaultfd(), piece, &written)
            .map_err(|errno| io_or_gone("throttle the RAM", self.pid, errno))?;
        region.copy_out(piece.offset_bytes(), &mut self.after).map_err(unreadable)?;
        let changed = changed_pages(piece, &self.before, &self.after);
        for page in changed.filter(|page| !written.iter().any(|run| run.contains(*page))) {
            let page = PageRange::new(page, 1);
            let segments =
                tracked.block.segments.iter().filter(|segment| segment.pages.contains(page.first));
            for address in segments.flat_map(|segment| segment.addresses_of(page)) {
                self.handler
                    .userfaultfd()
                    .release(address, PAGE_SIZE)
                    .map_err(|errno| io_or_gone("throttle the RAM", self.pid, errno))?;
            }
        }
        Ok(())
    }
}

/// Returns the size, in pages, of the aligned pieces in which a block of so many pages comes under
/// a throttle.
#[must_use]
pub fn throttle_chunk_pages(block_pages: u64) -> u64 {
    let mut chunk_pages = LEAST_CHUNK_PAGES;
    while block_pages.div_ceil(chunk_pages) > MOST_CHUNKS {
        chunk_pages *= 2;
    }
    chunk_pages
}

impl Chunks {
    fn new(pages: PageRange) -> Chunks {
        let chunk_pages = throttle_chunk_pages(pages.count);
        let count = usize::try_from(pages.count.div_ceil(chunk_pages)).unwrap_or(usize::MAX);
        Chunks { chunk_pages, throttled: vec![false; count] }
    }

    fn index(&self, page: u64) -> usize {
        usize::try_from(page / self.chunk_pages).unwrap_or(usize::MAX)
    }

    fn is_throttled(&self, page: u64) -> bool {
        self.throttled.get(self.index(page)).copied().unwrap_or(false)
    }

    fn mark(&mut self, page: u64) {
        let index = self.index(page);
        if let Some(throttled) = self.throttled.get_mut(index) {
            *throttled = true;
        }
    }

    fn chunk_of(&self, page: u64, all: PageRange) -> PageRange {
        PageRange::new(page / self.chunk_pages * self.chunk_pages, self.chunk_pages).intersect(all)
    }

    fn of_one_kind(&self, stretch: PageRange) -> (PageRange, bool) {
        let kind = self.is_throttled(stretch.first);
        let mut end = stretch.first;
        while end < stretch.end() && self.is_throttled(end) == kind {
            end = (end / self.chunk_pages + 1) * self.chunk_pages;
        }
        (PageRange::between(stretch.first, end.min(stretch.end())), kind)
    }
}

/// Returns what was written in asynchronous memory and not taken since, as a normal list.
fn written_in(tracked: &mut Tracked<'_>, chunk: PageRange) -> Result<Vec<PageRange>, Errno> {
    let mut written = Vec::new();
    for segment in &tracked.block.segments {
        let mut rest = segment.pages.intersect(chunk);
        while !rest.is_empty() {
            let seen = take::scan(tracked.pagemap, Scan::Look, segment, rest, 0, tracked.runs)?;
            written.extend(seen.dirty);
            rest = PageRange::between(seen.end, rest.end());
        }
    }
    normalise(&mut written);
    Ok(written)
}

/// Moves the chunk from one userfaultfd to another and protects all of it except what was written,
/// in each mapping.
fn change_hands(
    tracked: &Tracked<'_>,
    throttle: &Userfaultfd,
    chunk: PageRange,
    written: &[PageRange],
) -> Result<(), Errno> {
    for segment in &tracked.block.segments {
        let pages = segment.pages.intersect(chunk);
        if pages.is_empty() {
            continue;
        }
        let clean = gaps(pages, written);
        for address in segment.addresses_of(pages) {
            tracked.userfaultfd.unregister(address, pages.len_bytes())?;
            throttle.register(address, pages.len_bytes())?;
            for run in &clean {
                throttle.write_protect(
                    address + (run.first - pages.first) * PAGE_SIZE,
                    run.len_bytes(),
                )?;
            }
        }
    }
    Ok(())
}

/// Returns the pages whose bytes have changed.
fn changed_pages<'a>(
    chunk: PageRange,
    before: &'a [u8],
    after: &'a [u8],
) -> impl Iterator<Item = u64> + 'a {
    const PAGE_BYTES: usize = 4096;
    const _: () = assert!(PAGE_BYTES as u64 == PAGE_SIZE);
    let both = before.chunks(PAGE_BYTES).zip(after.chunks(PAGE_BYTES));
    (chunk.first..chunk.end())
        .zip(both)
        .filter(|(_, (before, after))| before != after)
        .map(|(page, _)| page)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stretch_is_cut_where_the_throttle_begins_and_ends() {
        let mut chunks = Chunks::new(PageRange::new(0, 5 * 2048 + 7));
        chunks.mark(2048);
        chunks.mark(3 * 2048 - 1 + 2048);
        chunks.mark(5 * 2048 + 6);
        let mut rest = PageRange::new(100, 5 * 2048 - 93);
        let mut pieces = Vec::new();
        while !rest.is_empty() {
            let (piece, kind) = chunks.of_one_kind(rest);
            pieces.push((piece.first, piece.end(), kind));
            rest = PageRange::between(piece.end(), rest.end());
        }
        let expected = [
            (100, 2048, false),
            (2048, 4096, true),
            (4096, 6144, false),
            (6144, 8192, true),
            (8192, 10_240, false),
            (10_240, 10_247, true),
        ];
        assert_eq!(pieces, expected);
        assert_eq!(chunks.chunk_of(10_241, PageRange::new(0, 10_247)), PageRange::new(10_240, 7));
    }

    #[test]
    fn a_large_guest_has_large_chunks() {
        let chunks = Chunks::new(PageRange::new(0, 1 << 28));
        assert_eq!((chunks.chunk_pages, chunks.throttled.len()), (1 << 16, 4096));
    }
}
