//! Tracking for the benchmark of large guests, which has no guest. It is not a stable interface.
//!
//! [`NotedPages`] is the set of dirty pages that tracking by faults keeps, without a process whose
//! faults fill it. [`with_library`] lets a [`super::DirtyTracker`] track the process that it is in.

use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::io::Errno;
use rustix::net::{
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, Shutdown, SocketFlags, accept_with,
    sendmsg, shutdown,
};

use super::block::STEP_PAGES;
use super::figures::{ChunkCount, DirtyCount};
use super::kernel::open_device;
use super::library::protocol::{self, MESSAGE_LEN, Origin};
use super::library::tracker_listener;
use super::sync_memory::{DirtyPages, RUNS_A_SEARCH};
use super::uffd::Userfaultfd;
use crate::pages::{PageRange, page_count, push_merged};

/// Dirty pages of a block of synchronous memory, and the searches for them.
#[derive(Debug)]
pub struct NotedPages {
    all: PageRange,
    dirty: DirtyPages,
}

impl NotedPages {
    /// Creates an empty set for a block of so many pages.
    pub fn new(pages: u64) -> NotedPages {
        let all = PageRange::new(0, pages);
        NotedPages { all, dirty: DirtyPages::new(all) }
    }

    /// Notes a write.
    pub fn write(&mut self, page: u64) {
        self.dirty.insert(PageRange::new(page, 1));
    }

    /// Takes dirty pages as [`super::DirtyTracker::take_dirty`] does.
    pub fn take(&mut self, within: PageRange, max_pages: u64, out: &mut Vec<PageRange>) -> u64 {
        let (floor, mut left) = (out.len(), max_pages.max(1));
        for step in within.chunks(STEP_PAGES) {
            let mut noted = Vec::new();
            self.dirty.find(step, usize::MAX, &mut noted);
            for run in noted {
                let (taken, _) = run.split(left);
                self.dirty.remove(taken);
                push_merged(out, floor, taken);
                left -= taken.count;
                if taken.count < run.count {
                    return taken.end();
                }
            }
        }
        within.end()
    }

    /// Appends the dirty pages of `within` to `out`, an empty list, and leaves them dirty.
    pub fn peek(&self, within: PageRange, out: &mut Vec<PageRange>) {
        self.dirty.find(within, usize::MAX, out);
    }

    /// Counts the dirty pages as [`super::DirtyTracker::count_dirty`] does.
    pub fn count(&self) -> DirtyCount {
        let (mut count, mut chunk) = (DirtyCount::default(), ChunkCount::default());
        let mut rest = self.all;
        while !rest.is_empty() {
            let mut noted = Vec::new();
            let end = self.dirty.find(rest, RUNS_A_SEARCH, &mut noted);
            noted.iter().for_each(|run| chunk.add(*run));
            count.pages += page_count(&noted);
            rest = PageRange::between(end, rest.end());
        }
        DirtyCount { fullest_chunk_pages: chunk.most, ..count }
    }
}

/// Runs `work` while this process answers at `socket` as the tracker library does in QEMU.
///
/// # Errors
/// The socket cannot be made.
pub fn with_library<T>(socket: &Path, work: impl FnOnce() -> T) -> io::Result<T> {
    let listener = tracker_listener(socket)?;
    Ok(std::thread::scope(|scope| {
        let _ending = Ending(&listener);
        scope.spawn(|| while answer(&listener).is_ok() {});
        work()
    }))
}

/// Ends the thread that answers, however the work ends.
struct Ending<'a>(&'a OwnedFd);

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        // It fails only for a socket that does not listen.
        let _ = shutdown(self.0, Shutdown::Both);
    }
}

/// Answers one request with a userfaultfd of this process.
fn answer(listener: &OwnedFd) -> Result<(), Errno> {
    let connection = accept_with(listener, SocketFlags::CLOEXEC)?;
    // A device that comes with the request is not needed: this process may open it itself.
    rustix::io::read(&connection, &mut [0; MESSAGE_LEN])?;
    let userfaultfd = Userfaultfd::of_this_process().map_err(|_| Errno::PERM)?;
    let origin = open_device().map_or(Origin::UserModeOnly, |_| Origin::Device);
    let answer = protocol::answer(origin, 0);
    let descriptors = [userfaultfd.as_fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !control.push(SendAncillaryMessage::ScmRights(&descriptors)) {
        return Err(Errno::NOBUFS);
    }
    sendmsg(&connection, &[IoSlice::new(&answer)], &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dirty_pages_are_taken_once_and_in_parts() {
        let mut noted = NotedPages::new(3 * STEP_PAGES);
        let all = PageRange::new(0, 3 * STEP_PAGES);
        for page in [0, 1, 7, STEP_PAGES, 3 * STEP_PAGES - 1] {
            noted.write(page);
        }
        let count = noted.count();
        assert_eq!((count.pages, count.fullest_chunk_pages), (5, 3));
        let mut out = Vec::new();
        assert_eq!(noted.take(all, 2, &mut out), 7);
        assert_eq!(out, [PageRange::new(0, 2)]);
        let mut seen = Vec::new();
        noted.peek(PageRange::between(7, all.end()), &mut seen);
        out.clear();
        assert_eq!(noted.take(PageRange::between(7, all.end()), u64::MAX, &mut out), all.end());
        assert_eq!((page_count(&seen), seen), (3, out));
        assert_eq!(noted.count().pages, 0);
    }
}
