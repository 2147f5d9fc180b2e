//! # On page-in
//!
//! A guest that writes faster than any wire carries can be moved all the same: it is handed over while pages of its memory are
//! still at the source, and whoever comes to one of them at the destination waits until it has been fetched. (Others call it
//! post-copy.) Once the guest runs there, no host has all of its newest memory. So:
//!
//! - **The source keeps every page until the destination has said that all are there.** It sends them as often as it takes; the
//!   guest stands still here, so that what it sends does not change.
//! - **The destination alone knows what is missing** ([`MissingPages`]), in a file beside the memory that outlives its agent. A page's bit
//!   is cleared when its bytes are in place, and before anybody sees them; and what is not missing is never written.
//! - **A session** is a set of streams by which pages come: one on which they are asked for, and come that were
//!   ([`PAGE_IN_STREAM`]), and others that bring the rest in the meantime. Within a session each page is sent once. A session that
//!   breaks is replaced by another, which begins with the destination's word of what it lacks; so it is all the same whether a link was
//!   cut or an agent restarted, at which end, and when. The first is opened while the guest still runs at the source and begins with the
//!   source's own list, so that it costs no round trip.
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

/// The memory of one chunk is under control as long as a page of it is missing.
pub(crate) const CHUNK_PAGES: u64 = 512;
/// Between two words of the destination, when it has nothing to ask for.
const PING_INTERVAL: Duration = Duration::from_millis(300);
/// A peer that is silent for longer is gone: a session costs a few round trips to replace, and who waits for a page does not see why.
const SILENCE_LIMIT: Duration = Duration::from_secs(2);

/// The accesses of a guest to pages that may be missing. In the product this is [`godwit_ram::PageIn`].
pub trait Faults: Send + Sync {
    /// From the return on whoever comes to a page of these that is not mapped waits for [`Faults::show`].
    ///
    /// # Errors
    /// It can't be done; the guest must not run.
    fn watch(&self, block: usize, pages: PageRange) -> Result<(), TrackError>;

    /// Those of the pages that are mapped already: nobody waits for them.
    ///
    /// # Errors
    /// As [`Faults::watch`].
    fn mapped(&self, block: usize, pages: PageRange) -> Result<Vec<PageRange>, TrackError>;

    /// Waits a while for accesses, and appends those that have begun to wait since the last call.
    ///
    /// # Errors
    /// The process is gone, or nobody is told of its accesses any more.
    fn accesses(&self, limit: Duration, out: &mut Vec<Access>) -> Result<(), TrackError>;

    /// Lets the guest have watched pages whose bytes are there.
    ///
    /// # Errors
    /// As [`Faults::accesses`].
    fn show(&self, block: usize, pages: PageRange) -> Result<(), TrackError>;

    /// All of these pages are there: the guest has them at its own speed.
    ///
    /// # Errors
    /// As [`Faults::accesses`].
    fn release(&self, block: usize, pages: PageRange) -> Result<(), TrackError>;

    /// Nothing is missing any more, anywhere.
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
            // A signal, or nothing: it is asked again.
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
            // What is there is there: at worst each first access to it costs a word.
            tracing::warn!(%error, "memory that is whole stays under control");
        }
    }
}
