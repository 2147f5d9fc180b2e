//! A guest's memory and device state in a file, to go on from there later.
//!
//! The file begins with pieces: runs of pages that are not all zero, compressed where that pays.
//! The device state follows, the index of the pieces, and last the footer, without which the file
//! is not valid. Threads write and read the pieces in any order.
//!
//! ```text
//! ┌────────┬────────┬─────┬──────────────┬───────┬─────────┬────────┐
//! │ piece  │ piece  │  …  │ device state │ index │ caption │ footer │
//! └────────┴────────┴─────┴──────────────┴───────┴─────────┴────────┘
//! ```
//! Every part has a checksum. A reader trusts nothing in the file: it checks each offset, length
//! and page number before it uses it.

mod format;
mod read;
mod write;

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use godwit_ram::{PAGE_SIZE, RamError};

pub use read::SavedGuest;
pub use write::{GuestWriter, WrittenGuest};

/// Pages that a thread takes at a time (2 MiB).
const STRIDE_PAGES: u64 = (2 << 20) / PAGE_SIZE;

/// Why a guest cannot be saved to a file, or loaded from it.
#[derive(Debug, thiserror::Error)]
pub enum SavedError {
    /// The file cannot be read or written.
    #[error("{what}: {source}")]
    Io {
        /// What failed.
        what: &'static str,
        source: io::Error,
    },
    /// The guest's memory cannot be read or written.
    #[error(transparent)]
    Ram(#[from] RamError),
    /// The file is not a saved guest, or is damaged.
    #[error("the file is damaged: {0}")]
    Damaged(&'static str),
    /// The file is of a guest with other memory blocks.
    #[error("the file is of a guest with other memory")]
    OtherMemory,
    /// [`Progress::cancel`] was called.
    #[error("it was cancelled")]
    Cancelled,
}

impl SavedError {
    fn io(what: &'static str) -> impl FnOnce(io::Error) -> SavedError {
        move |source| SavedError::Io { what, source }
    }
}

/// Progress of saving or loading, read by other threads.
#[derive(Debug, Default)]
pub struct Progress {
    done_bytes: AtomicU64,
    cancelled: AtomicBool,
}

impl Progress {
    /// Returns how much of the guest's memory has been looked at (saving), or how much content has
    /// been restored (loading), in bytes.
    #[must_use]
    pub fn done_bytes(&self) -> u64 {
        self.done_bytes.load(Ordering::Relaxed)
    }

    /// Ends the work with [`SavedError::Cancelled`].
    pub fn cancel(&self) {
        self.cancelled.store(true, Ordering::Relaxed);
    }

    fn add(&self, bytes: u64) -> Result<(), SavedError> {
        self.done_bytes.fetch_add(bytes, Ordering::Relaxed);
        match self.cancelled.load(Ordering::Relaxed) {
            true => Err(SavedError::Cancelled),
            false => Ok(()),
        }
    }
}

/// Runs `work` in `threads` threads and returns their results, or the first error.
fn in_threads<T: Send>(
    threads: usize,
    work: impl Fn() -> Result<T, SavedError> + Sync,
) -> Result<Vec<T>, SavedError> {
    std::thread::scope(|scope| {
        let others: Vec<_> = (1..threads).map(|_| scope.spawn(&work)).collect();
        let mine = work();
        let others = others.into_iter().map(|thread| match thread.join() {
            Ok(result) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        });
        std::iter::once(mine).chain(others).collect()
    })
}

#[cfg(test)]
mod tests;
