//! Guest RAM seen from outside the hypervisor: the files that hold it, transfer between them and
//! sockets, and the tracking of what the guest dirties.
//!
//! - [`RamDir`]: the host's own tmpfs for guest RAM. [`Region`]: one RAM block, a file in it that
//!   QEMU maps shared. [`PageFile`]: one that is only read.
//! - [`Region::receive`]: from a socket to a region's pages without a copy in between.
//! - [`DirtyTracker`]: which pages a running guest has written; [`tracking`] has the essay on how.
//! - [`PageIn`]: a guest that runs while some of its pages are missing; [`page_in`] has the essay.
//! - [`MissingPages`]: which pages those are, in a file that outlives the agent.
//! - [`PageRange`] and its lists ([`pages`]).
//! - [`limit_child`], [`end_child_with_parent`]: limits of a process that the agent starts,
//!   [`lock_image`], [`lock_against_writers`]: QEMU's lock of a disk image, and
//!   [`KernelWatchdog`]; they are here only because of their unsafe code.
//!
//! Only this crate and the tracker library contain unsafe code. The crate knows neither the
//! migration protocol nor QEMU's monitor. It never makes a `&[u8]` to memory that a guest can
//! change: such memory is read through raw pointers or by the kernel.
#![allow(
    unsafe_code,
    reason = "memory shared with another process is mapped and read through raw pointers here, so \
        that nobody else has to"
)]

mod child;
mod error;
mod file;
mod image_lock;
mod missing;
pub mod page_in;
pub mod pages;
mod ramdir;
mod region;
mod tcp;
pub mod tracking;
mod transfer;
mod watchdog;
mod zero;

pub use child::{ChildLimits, end_child_with_parent, limit_child};
pub use error::{RamError, TrackError};
pub use file::PageFile;
pub use image_lock::{lock_against_writers, lock_image};
pub use missing::MissingPages;
pub use page_in::{Access, PageIn};
pub use pages::{PAGE_SIZE, PageRange, gaps, push_merged};
pub use ramdir::RamDir;
pub use region::Region;
pub use tcp::{acked_bytes, limit_unsent_bytes, unacked_bytes, unanswered_timeouts, unsent_bytes};
pub use tracking::{
    CHUNK_PAGES, DirtyCount, DirtyTracker, FaultFigures, ScanCores, ThrottleFigures, check_kernel,
    throttle_chunk_pages, tracker_listener,
};
pub use watchdog::KernelWatchdog;
