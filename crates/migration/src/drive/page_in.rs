//! # On page-in
//!
//! A guest that writes faster than any wire carries can still be moved: it is handed over while
//! pages of its memory are still at the source. An access to one of them at the destination waits
//! until the page has been fetched. (Others call this post-copy.) Once the guest runs there, no
//! host has all of its newest memory. Therefore:
//!
//! - **The source keeps every page until the destination has reported that all have arrived.** It
//!   sends them as often as necessary. The guest is stopped here, so what it sends does not change.
//! - **Only the destination knows what is missing** ([`MissingPages`]). The record is in a file
//!   beside the memory that outlives its agent. A page's bit is cleared when its bytes are in
//!   place, and before the guest can see them. A page that is not missing is never written.
//! - **A session** is a set of streams that carry pages: one for requests and the pages requested
//!   ([`PAGE_IN_STREAM`]), and others that bring the rest meanwhile. Within a session each page is
//!   sent once. A session that breaks is replaced by another one, which begins with the
//!   destination's list of missing pages. So it makes no difference whether a link was cut or an
//!   agent restarted, at which end, and when. The first session is opened while the guest still
//!   runs at the source, and begins with the source's own list, so it costs no round trip.
//!
//! [`MissingPages`]: godwit_ram::MissingPages
//! [`PAGE_IN_STREAM`]: godwit_wire::PAGE_IN_STREAM

mod arriving;
mod serving;
mod waits;

use std::time::Duration;

use godwit_ram::{Access, PageIn, PageRange, TrackError};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

pub(crate) use arriving::FIRST_SESSION;
pub use arriving::PagingIn;
pub use serving::{Again, AskAgain, KeptPages, SessionStream, open_session, serve};

/// Pages of a chunk. A chunk's memory is watched while one of its pages is missing.
pub(crate) const CHUNK_PAGES: u64 = 512;
/// Interval of messages from the destination when it has no requests.
const PING_INTERVAL: Duration = Duration::from_millis(300);
/// A peer that is silent for longer is considered gone. Replacing a session costs only a few round
/// trips, and a thread that waits for a page cannot see the reason.
const SILENCE_LIMIT: Duration = Duration::from_secs(2);

/// Accesses of a guest to pages that may be missing. In the product this is [`godwit_ram::PageIn`].
pub trait Faults: Send + Sync {
    /// Watches pages: from the return on, an access to one that is not mapped waits for
    /// [`Faults::show`].
    ///
    /// # Errors
    /// The pages cannot be watched; the guest must not run.
    fn watch(&self, block: usize, pages: PageRange) -> Result<(), TrackError>;

    /// Returns those of the pages that are mapped already: accesses to them do not wait.
    ///
    /// # Errors
    /// As [`Faults::watch`].
    fn mapped(&self, block: usize, pages: PageRange) -> Result<Vec<PageRange>, TrackError>;

    /// Waits up to `limit` for accesses, and appends those that have begun to wait since the last
    /// call.
    ///
    /// # Errors
    /// The process is gone, or its accesses can no longer be reported.
    fn accesses(&self, limit: Duration, out: &mut Vec<Access>) -> Result<(), TrackError>;

    /// Makes watched pages whose bytes are in place available to the guest.
    ///
    /// # Errors
    /// As [`Faults::accesses`].
    fn show(&self, block: usize, pages: PageRange) -> Result<(), TrackError>;

    /// Stops watching pages that have all arrived: the guest accesses them at full speed.
    ///
    /// # Errors
    /// As [`Faults::accesses`].
    fn release(&self, block: usize, pages: PageRange) -> Result<(), TrackError>;

    /// Ends page-in: no page is missing any more.
    fn end(&self);
}

impl Faults for PageIn {
    fn watch(&self, block: usize, pages: PageRange) -> Result<(), TrackError> {
        PageIn::watch(self, block, pages)
    }

    fn mapped(&self, block: usize, pages: PageRange) -> Result<Vec<PageRange>, TrackError> {
        PageIn::mapped(self, block, pages)
    }

    fn accesses(&self, limit: Duration, out: &mut Vec<Access>) -> Result<(), TrackError> {
        let fd = self.as_fd();
        let mut ready = [PollFd::new(&fd, PollFlags::IN)];
        if let Ok(limit) = Timespec::try_from(limit) {
            // A signal, or nothing: the poll is repeated.
            let _ = poll(&mut ready, Some(&limit));
        }
        PageIn::accesses(self, out)
    }

    fn show(&self, block: usize, pages: PageRange) -> Result<(), TrackError> {
        PageIn::show(self, block, pages)
    }

    fn release(&self, block: usize, pages: PageRange) -> Result<(), TrackError> {
        PageIn::release(self, block, pages)
    }

    fn end(&self) {
        if let Err(error) = PageIn::end(self) {
            // The pages are present: at worst each first access to one costs a message.
            tracing::warn!(%error, "memory that is whole stays under control");
        }
    }
}
