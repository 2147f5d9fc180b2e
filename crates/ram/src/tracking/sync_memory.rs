//! # On memory whose writes wait
//!
//! Tracking leaves a mark on each page (see [`super`]). If the userfaultfd is one of `WP_ASYNC`, a
//! write to a marked page removes the mark and goes on. If it is not, the write waits until this
//! process answers. Such memory is *synchronous* here. It serves two purposes.
//!
//! - **To name what is dirty.** The faults name the pages that are written, so this memory is not
//!   searched while the guest is paused. A scan of the page tables takes about a millisecond per
//!   GiB.
//! - **To throttle.** A guest that writes memory faster than the wire carries it never finishes
//!   moving by itself. A throttle must slow its writes without slowing computation or reads.
//!   Answers come at the rate that the wire can follow. This slows each page's *first* write since
//!   it was last sent, and nothing else. vSphere calls this stun during page send (SDPS); here it
//!   is exact to the page and to the thread.
//!
//! ## Which memory is synchronous
//!
//! With [`DirtyTracker::by_faults`], all memory is synchronous from the start. An answer costs the
//! guest 5 to 15 µs on an idle core and 0.1 ms on a busy one, so memory that is written all the
//! time must not stay so. If a 16th of 2 MiB is dirty, the rest of it is released too: all of it
//! counts as dirty. When [`DirtyTracker::take_dirty`] reaches the chunk, it becomes asynchronous. A
//! guest that writes many scattered pages would wait often and gain nothing:
//! [`DirtyTracker::settle`] then makes all memory asynchronous, before anything is sent. What
//! remains synchronous is the memory that is seldom written, which is most of a large guest. The
//! paused guest's last pages are then the noted pages, and a scan of the asynchronous chunks.
//!
//! A throttle goes the other way: each chunk with dirty pages becomes synchronous when
//! [`DirtyTracker::take_dirty`] reaches it, and no page is released beyond the limit.
//!
//! While the guest runs, synchronous memory is scanned as well: [`DirtyTracker::take_dirty`] scans
//! what it takes, and [`DirtyTracker::check_notes`] all of it. A page that lost its mark without a
//! fault (the kernel drops the marks of memory that is discarded while it is being read) is found
//! then. The notes alone are relied on from the last scan to the end of the pause.
//!
//! ## Changing over
//!
//! A range of memory belongs to one userfaultfd at a time, and the asynchronous mode is a property
//! of the userfaultfd. Taking a range from one and giving it to another removes all marks, so for a
//! moment writes are not seen. The guest is not stopped for this. A piece of memory changes over as
//! follows:
//!
//! 1. Its bytes are copied.
//! 2. The pages that were written since they were last taken are looked up: *W*. A page that is not
//!    in W was not written since before the copy, so its copy is what the page holds.
//! 3. The piece is unregistered here and registered there, and all of it except W is marked: from
//!    here on each write is seen.
//! 4. The pages that are not in W are compared with the copy. A page that differs was written
//!    between 2 and 3, and counts as dirty. A page that is equal may have been written too, but
//!    with the bytes that it had.
//!
//! This holds only if no thread reads the memory between 2 and 3: such a thread might see bytes
//! that are gone again by 4. So the memory that changes over is always memory that the current call
//! has not returned yet. A caller that reads memory returned earlier (when another stream redoes a
//! stream's work) must prevent changes meanwhile ([`DirtyTracker::let_change`]).
//!
//! ## Taking dirty pages
//!
//! `PAGEMAP_SCAN` marks asynchronous memory only. In synchronous memory it reports which runs are
//! unmarked, and exactly those runs are then marked. A page written between the two is either among
//! them, and is read afterwards, or is not, and stays unmarked. A page is noted and released under
//! a lock, and removed from the notes and marked under the same lock, so a note never lacks a page
//! that is unmarked.
//!
//! [`DirtyTracker::take_dirty`]: super::DirtyTracker::take_dirty
//! [`DirtyTracker::let_change`]: super::DirtyTracker::let_change
//! [`DirtyTracker::by_faults`]: super::DirtyTracker::by_faults
//! [`DirtyTracker::settle`]: super::DirtyTracker::settle
//! [`DirtyTracker::check_notes`]: super::DirtyTracker::check_notes

mod chunks;
mod dirty_pages;
mod handler;
mod pacer;
mod places;

use std::path::Path;
use std::time::{Duration, Instant};

use linux_raw_sys::general::page_region;
use rustix::io::Errno;

pub use chunks::throttle_chunk_pages;
pub(super) use dirty_pages::DirtyPages;
pub use handler::ThrottleFigures;

use super::block::{Block, STEP_PAGES};
use super::figures::FaultFigures;
use super::kernel::io_or_gone;
use super::maps::Segment;
use super::pagemap::{Pagemap, Scan};
use super::uffd::Userfaultfd;
use super::{library, take};
use crate::error::TrackError;
use crate::pages::{PAGE_SIZE, PageRange, gaps, normalise, page_count};
use handler::{Handler, SyncBlock};

/// Memory that changes over at a time: 4 MiB, a millisecond or two of copying and comparing.
const PIECE_PAGES: u64 = 1024;
/// Runs of noted pages that are found at a time.
pub(super) const RUNS_A_SEARCH: usize = 256;

/// What synchronous memory serves at the moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Purpose {
    /// Names what is written. Chunks that are written all the time become asynchronous.
    Tracking,
    /// Slows the writers. Chunks that are written become synchronous.
    Throttling,
    /// The guest is paused or about to be: nothing changes over.
    Stopping,
}

/// Part of a guest's memory whose writes wait for an answer.
pub(super) struct SyncMemory {
    handler: Handler,
    pid: i32,
    /// When the memory was protected.
    since: Instant,
    purpose: Purpose,
    /// Whether memory may change over now.
    may_change: bool,
    /// Memory that changed over since this list was last cleared.
    changed_over: Vec<PageRange>,
    /// Dirty pages that no fault had named.
    unnoted_pages: u64,
    before: Vec<u8>,
    after: Vec<u8>,
}

/// Tracked memory that changes over.
pub(super) struct Tracked<'a> {
    pub(super) userfaultfd: &'a Userfaultfd,
    pub(super) pagemap: &'a Pagemap,
    pub(super) block: &'a Block,
    pub(super) runs: &'a mut [page_region],
}

impl SyncMemory {
    /// Prepares to answer the writes of the tracked process; no memory is synchronous yet.
    /// `by_faults`: it is to name what is dirty, and not only to throttle.
    pub(super) fn new(
        tracker_socket: &Path,
        pid: i32,
        vcpus: &[u32],
        blocks: &[Block],
        by_faults: bool,
    ) -> Result<SyncMemory, TrackError> {
        let (userfaultfd, handles_kernel) = library::request_userfaultfd(tracker_socket)?;
        if !handles_kernel {
            return Err(TrackError::NoKernelFaults);
        }
        let userfaultfd = Userfaultfd::new(userfaultfd);
        userfaultfd.enable_faults()?;
        let handler = Handler::start(userfaultfd, pid, vcpus, blocks, by_faults)
            .map_err(|errno| io_or_gone("start to answer the writes", pid, errno))?;
        Ok(SyncMemory {
            handler,
            pid,
            since: Instant::now(),
            purpose: Purpose::Tracking,
            may_change: true,
            changed_over: Vec::new(),
            unnoted_pages: 0,
            before: Vec::new(),
            after: Vec::new(),
        })
    }

    /// Makes all memory synchronous and protects it. Nothing of it may be tracked before: writes in
    /// between are not seen.
    pub(super) fn take_all(
        &mut self,
        asynchronous: &Userfaultfd,
        blocks: &[Block],
    ) -> Result<(), TrackError> {
        let failed = |errno| io_or_gone("write-protect the RAM", self.pid, errno);
        self.handler.blocks().iter_mut().for_each(|block| block.chunks.set_all());
        for mapping in blocks.iter().flat_map(|block| &block.mappings) {
            let (address, len_bytes) = (mapping.address, mapping.count * PAGE_SIZE);
            asynchronous.unregister(address, len_bytes).map_err(failed)?;
            let userfaultfd = self.handler.userfaultfd();
            userfaultfd.register(address, len_bytes).map_err(failed)?;
            for step in mapping.pages().chunks(STEP_PAGES) {
                userfaultfd
                    .write_protect(mapping.address_of(step.first), step.len_bytes())
                    .map_err(failed)?;
            }
        }
        self.since = Instant::now();
        Ok(())
    }

    /// Ends the protection of all memory. The descriptor alone may not: a process that was just
    /// forked may hold a copy of it.
    pub(super) fn release_all(self, blocks: &[Block]) {
        for mapping in blocks.iter().flat_map(|block| &block.mappings) {
            // What is asynchronous is not registered here.
            let _ =
                self.handler.userfaultfd().unregister(mapping.address, mapping.count * PAGE_SIZE);
        }
    }

    /// Limits writers to so many pages per second. `None`: answers at once.
    pub(super) fn set_limit(&mut self, pages_per_s: Option<f64>) {
        self.purpose = if pages_per_s.is_some() { Purpose::Throttling } else { Purpose::Tracking };
        self.handler.set_limit(pages_per_s);
    }

    /// Announces that the guest is being stopped: until the next limit is set, no write waits for
    /// long, no memory changes over, and dirty pages are found by the notes alone.
    pub(super) fn let_stop(&mut self) {
        self.purpose = Purpose::Stopping;
        self.handler.let_stop();
    }

    /// Sets whether memory may change over. It may if no thread reads memory that was taken before.
    pub(super) fn let_change(&mut self, may_change: bool) {
        self.may_change = may_change;
    }

    /// Returns the memory that changed over since [`SyncMemory::forget_changes`].
    pub(super) fn changed_over(&self) -> &[PageRange] {
        &self.changed_over
    }

    pub(super) fn forget_changes(&mut self) {
        self.changed_over.clear();
    }

    /// Returns whether asynchronous chunks that are written to are to become synchronous.
    pub(super) fn grows(&self) -> bool {
        self.purpose == Purpose::Throttling && self.may_change
    }

    /// Returns whether a synchronous chunk is to become asynchronous, because parts of it were
    /// released as a whole.
    pub(super) fn gives_back(&self, block: usize, chunk: PageRange) -> bool {
        self.purpose == Purpose::Tracking
            && self.may_change
            && self.handler.blocks().get(block).is_some_and(|of| of.dirty.has_full_chunk(chunk))
    }

    /// Returns whether the guest is being stopped.
    pub(super) fn is_stopping(&self) -> bool {
        self.purpose == Purpose::Stopping
    }

    pub(super) fn throttle_figures(&self) -> ThrottleFigures {
        self.handler.figures()
    }

    /// Returns the statistics of tracking by faults.
    pub(super) fn fault_figures(&self) -> FaultFigures {
        let blocks = self.handler.blocks();
        FaultFigures {
            synchronous_pages: blocks.iter().map(|block| block.chunks.synchronous_pages()).sum(),
            unnoted_pages: self.unnoted_pages,
            ..self.handler.fault_figures()
        }
    }

    /// Checks that writes are still answered.
    ///
    /// # Errors
    /// Writes are not answered any more: only ending the tracking helps.
    pub(super) fn check(&self) -> Result<(), TrackError> {
        match self.handler.is_well() {
            true => Ok(()),
            false => Err(TrackError::WritesUnanswered { pid: self.pid }),
        }
    }

    /// Returns the first pages of `stretch` that are under one protection, and whether that is
    /// synchronous.
    pub(super) fn of_one_kind(&self, block: usize, stretch: PageRange) -> (PageRange, bool) {
        match self.handler.blocks().get(block) {
            Some(block) => block.chunks.of_one_kind(stretch),
            None => (stretch, false),
        }
    }

    /// Returns the chunk that contains `page`.
    pub(super) fn chunk_of(&self, block: usize, page: u64) -> PageRange {
        let blocks = self.handler.blocks();
        blocks.get(block).map_or(PageRange::new(page, 1), |of| of.chunks.chunk_of(page))
    }

    /// Appends the noted pages of `within` to `out`, run by run, some at a time. Returns the page
    /// to go on from.
    pub(super) fn noted(&self, block: usize, within: PageRange, out: &mut Vec<PageRange>) -> u64 {
        match self.handler.blocks().get(block) {
            Some(block) => block.dirty.find(within, RUNS_A_SEARCH, out),
            None => within.end(),
        }
    }

    /// Passes the noted pages of `within` to `found`, some at a time.
    pub(super) fn for_each_noted(
        &self,
        block: usize,
        within: PageRange,
        mut found: impl FnMut(&[PageRange]),
    ) {
        let mut rest = within;
        while !rest.is_empty() {
            let mut noted = Vec::new();
            let end = self.noted(block, rest, &mut noted);
            found(&noted);
            rest = PageRange::between(end, rest.end());
        }
    }

    /// Protects dirty pages in synchronous memory, and removes them from the notes. All of them are
    /// in `segment`.
    pub(super) fn protect(
        &self,
        block: usize,
        segment: &Segment,
        pages: PageRange,
    ) -> Result<(), Errno> {
        let mut blocks = self.handler.blocks();
        let userfaultfd = self.handler.userfaultfd();
        segment
            .addresses_of(pages)
            .try_for_each(|address| userfaultfd.write_protect(address, pages.len_bytes()))?;
        if let Some(block) = blocks.get_mut(block) {
            block.dirty.remove(pages);
        }
        Ok(())
    }

    /// Adds to `seen`, the unmarked pages of `within`, those that are only noted.
    pub(super) fn add_noted(&mut self, block: usize, within: PageRange, seen: &mut Vec<PageRange>) {
        let blocks = self.handler.blocks();
        let Some(block) = blocks.get(block) else { return };
        let mut noted = Vec::new();
        block.dirty.find(within, usize::MAX, &mut noted);
        self.unnoted_pages += seen.iter().map(|run| page_count(&gaps(*run, &noted))).sum::<u64>();
        seen.extend(noted);
        normalise(seen);
    }

    /// Notes unmarked pages of `seen`, in ascending order, and returns the number of those that no
    /// fault has named. All of them are synchronous.
    pub(super) fn note_unnoted(&self, block: usize, seen: &[PageRange]) -> u64 {
        if seen.is_empty() {
            return 0;
        }
        let (mut blocks, mut unnoted) = (self.handler.blocks(), 0);
        let Some(block) = blocks.get_mut(block) else { return 0 };
        for run in seen {
            let mut noted = Vec::new();
            block.dirty.find(*run, usize::MAX, &mut noted);
            unnoted += page_count(&gaps(*run, &noted));
            block.dirty.insert(*run);
        }
        unnoted
    }

    /// Counts pages that no fault has named.
    pub(super) fn add_unnoted(&mut self, pages: u64) {
        self.unnoted_pages += pages;
    }

    /// Returns the number of noted pages that are dirty only because pages around them are.
    pub(super) fn filled_pages(&self) -> u64 {
        self.handler.blocks().iter().map(|block| block.dirty.filled_pages()).sum()
    }

    /// Returns the number of noted pages in 2 MiB that have not become dirty as a whole, and the
    /// time since all memory was protected.
    pub(super) fn scattered_pages(&self) -> (u64, Duration) {
        let blocks = self.handler.blocks();
        let pages = blocks.iter().map(|block| block.dirty.scattered_pages()).sum();
        (pages, self.since.elapsed())
    }

    /// Makes a chunk synchronous. Dirty pages in it stay dirty, and no write is missed.
    pub(super) fn take_over(
        &mut self,
        block: usize,
        chunk: PageRange,
        tracked: &mut Tracked<'_>,
    ) -> Result<(), TrackError> {
        self.change(block, |of| of.chunks.set(chunk.first, true));
        self.changed_over.push(chunk);
        for piece in chunk.chunks(PIECE_PAGES) {
            let written =
                |_: &SyncMemory, tracked: &mut Tracked<'_>| written_in(tracked, piece, Scan::Look);
            let dirty = self.change_over(block, piece, tracked, written, Direction::IntoSync)?;
            self.change(block, |of| dirty.iter().for_each(|run| of.dirty.insert(*run)));
        }
        Ok(())
    }

    /// Makes a chunk asynchronous, as [`SyncMemory::take_over`] does the opposite.
    pub(super) fn give_back(
        &mut self,
        block: usize,
        chunk: PageRange,
        tracked: &mut Tracked<'_>,
    ) -> Result<(), TrackError> {
        self.changed_over.push(chunk);
        for piece in chunk.chunks(PIECE_PAGES) {
            let written = |memory: &SyncMemory, tracked: &mut Tracked<'_>| {
                let mut written = written_in(tracked, piece, Scan::LookAnywhere)?;
                memory.change(block, |of| {
                    let mut noted = Vec::new();
                    of.dirty.find(piece, usize::MAX, &mut noted);
                    written.extend(noted);
                    of.dirty.remove(piece);
                });
                normalise(&mut written);
                Ok(written)
            };
            let dirty = self.change_over(block, piece, tracked, written, Direction::IntoAsync)?;
            self.unmark(tracked, &dirty)?;
        }
        // Writes that were noted while their piece changed over.
        let mut late = Vec::new();
        self.change(block, |of| {
            of.chunks.set(chunk.first, false);
            of.dirty.find(chunk, usize::MAX, &mut late);
            of.dirty.remove(chunk);
        });
        self.unmark(tracked, &late)
    }

    fn change(&self, block: usize, change: impl FnOnce(&mut SyncBlock)) {
        if let Some(block) = self.handler.blocks().get_mut(block) {
            change(block);
        }
    }

    /// Removes the marks of dirty pages in asynchronous memory.
    fn unmark(&self, tracked: &Tracked<'_>, dirty: &[PageRange]) -> Result<(), TrackError> {
        for segment in &tracked.block.segments {
            let here = dirty.iter().map(|run| run.intersect(segment.pages));
            for run in here.filter(|run| !run.is_empty()) {
                for address in segment.addresses_of(run) {
                    tracked
                        .userfaultfd
                        .release(address, run.len_bytes())
                        .map_err(|errno| io_or_gone("track the RAM", self.pid, errno))?;
                }
            }
        }
        Ok(())
    }

    /// Changes a piece over, and protects all of it but `written`. Returns the dirty pages.
    fn change_over(
        &mut self,
        block: usize,
        piece: PageRange,
        tracked: &mut Tracked<'_>,
        written: impl FnOnce(&SyncMemory, &mut Tracked<'_>) -> Result<Vec<PageRange>, Errno>,
        direction: Direction,
    ) -> Result<Vec<PageRange>, TrackError> {
        let len = usize::try_from(piece.len_bytes()).unwrap_or(usize::MAX);
        self.before.resize(len, 0);
        self.after.resize(len, 0);
        let region = &tracked.block.region;
        let unreadable = |_| TrackError::OutOfBounds { block, range: piece };
        region.copy_out(piece.offset_bytes(), &mut self.before).map_err(unreadable)?;
        let mut dirty = written(self, tracked)
            .map_err(|errno| io_or_gone("scan the page map", self.pid, errno))?;
        let (from, to) = match direction {
            Direction::IntoSync => (tracked.userfaultfd, self.handler.userfaultfd()),
            Direction::IntoAsync => (self.handler.userfaultfd(), tracked.userfaultfd),
        };
        change_hands(&tracked.block.segments, from, to, piece, &dirty)
            .map_err(|errno| io_or_gone("change the protection of the RAM", self.pid, errno))?;
        region.copy_out(piece.offset_bytes(), &mut self.after).map_err(unreadable)?;
        dirty.extend(changed_pages(piece, &self.before, &self.after));
        normalise(&mut dirty);
        Ok(dirty)
    }
}

/// Direction in which memory changes over.
#[derive(Clone, Copy, Debug)]
enum Direction {
    IntoSync,
    IntoAsync,
}

/// Returns the unmarked pages, as a normal list.
fn written_in(
    tracked: &mut Tracked<'_>,
    chunk: PageRange,
    look: Scan,
) -> Result<Vec<PageRange>, Errno> {
    let mut written = Vec::new();
    for segment in &tracked.block.segments {
        let mut rest = segment.pages.intersect(chunk);
        while !rest.is_empty() {
            let seen = take::scan(tracked.pagemap, look, segment, rest, 0, tracked.runs)?;
            written.extend(seen.dirty);
            rest = PageRange::between(seen.end, rest.end());
        }
    }
    normalise(&mut written);
    Ok(written)
}

/// Moves a piece from one userfaultfd to another and protects all of it except what was written, in
/// each mapping.
fn change_hands(
    segments: &[Segment],
    from: &Userfaultfd,
    to: &Userfaultfd,
    piece: PageRange,
    written: &[PageRange],
) -> Result<(), Errno> {
    for segment in segments {
        let pages = segment.pages.intersect(piece);
        if pages.is_empty() {
            continue;
        }
        let clean = gaps(pages, written);
        for address in segment.addresses_of(pages) {
            from.unregister(address, pages.len_bytes())?;
            to.register(address, pages.len_bytes())?;
            for run in &clean {
                to.write_protect(address + (run.first - pages.first) * PAGE_SIZE, run.len_bytes())?;
            }
        }
    }
    Ok(())
}

/// Returns the pages whose bytes have changed.
fn changed_pages<'a>(
    piece: PageRange,
    before: &'a [u8],
    after: &'a [u8],
) -> impl Iterator<Item = PageRange> + 'a {
    const PAGE_BYTES: usize = 4096;
    const _: () = assert!(PAGE_BYTES as u64 == PAGE_SIZE);
    let both = before.chunks(PAGE_BYTES).zip(after.chunks(PAGE_BYTES));
    (piece.first..piece.end())
        .zip(both)
        .filter(|(_, (before, after))| before != after)
        .map(|(page, _)| PageRange::new(page, 1))
}
