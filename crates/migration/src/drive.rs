//! The drivers: they carry out what the machines decide, on threads of their own that block on sockets. The hypervisor is
//! behind two traits whose contracts are part of the hand-over.

mod contents;
mod destination;
mod device_state;
mod dispatch;
mod handshake;
mod heat;
mod inbox;
mod intake;
pub mod page_in;
mod referring;
mod source;
mod sweep;
mod throttled;

use std::path::PathBuf;

use godwit_ram::{DirtyCount, DirtyTracker, PageRange, ThrottleFigures, TrackError};
use godwit_wire::{Message, PagedIn, WireError};

use crate::failure::{Failure, FailureCode};
use crate::source::{Event, NotServed};

pub use contents::{Beside, Offer};
pub use destination::{DestinationJob, receive};
pub use device_state::MOST_DEVICE_STATE_BYTES;
pub use dispatch::LaneFigures;
pub use handshake::{Hello, WelcomedStream, say_hello, welcome};
pub use inbox::{Events, Inbox, inbox};
pub use page_in::SessionStream;
pub use referring::{Deltas, References};
pub use source::{Connect, Kept, SourceJob, SourceResult, Unsent, send};
pub(crate) use source::{LEAST_LAST_PAGES, LONG_ROUND_TRIP, MOST_LAST_PAGES};
pub(crate) use sweep::SAMPLED_AFTER;
pub use throttled::{CpuQuota, Throttled, Throttling};

/// The hypervisor at the source.
pub trait SourceHypervisor: Send {
    /// Asks it to stop the guest for the switchover. [`HypervisorEvent::Stopped`] follows, and
    /// pieces of the device state may ([`Inbox::device_state`]). `page_in`: once it runs at the
    /// destination it will need what is here; an agent that takes this over has to know.
    ///
    /// # Errors
    /// The guest runs on as before.
    fn begin_switchover(&mut self, events: &Inbox, page_in: bool) -> Result<(), Failure>;

    /// Lets it write the device state of the stopped guest; [`HypervisorEvent::DeviceStateEnded`] follows.
    ///
    /// # Errors
    /// The guest stands still; [`SourceHypervisor::resume`] is called next.
    fn write_device_state(&mut self) -> Result<(), Failure>;

    /// Undoes the switchover, at whatever point it is. On success the guest runs as before (or is paused, if it was).
    ///
    /// # Errors
    /// The guest can't be made to run here: its hypervisor is gone.
    fn resume(&mut self) -> Result<(), Failure>;

    /// The destination runs the guest: ends the hypervisor and frees what it had.
    fn release(&mut self);
}

/// The guest's writes as the engine sees them. In the product this is [`godwit_ram::DirtyTracker`].
pub trait Tracking: Send {
    /// Protects all memory: from here on each write is seen.
    ///
    /// # Errors
    /// The writes can't be seen: the guest can't be moved by this engine.
    fn start(&mut self) -> Result<(), TrackError>;

    /// Reports the pages of `block` within `within` that were written since they were last protected, and protects them again.
    /// Stops after `max_pages`; returns the page to go on from.
    ///
    /// # Errors
    /// As [`Tracking::start`].
    fn take_dirty(
        &mut self,
        block: usize,
        within: PageRange,
        max_pages: u64,
        out: &mut Vec<PageRange>,
    ) -> Result<u64, TrackError>;

    /// Reports the pages of `block` within `within` that were written since they were last protected, and leaves them so.
    ///
    /// # Errors
    /// As [`Tracking::start`].
    fn look(&mut self, block: usize, within: PageRange, out: &mut Vec<PageRange>) -> Result<(), TrackError>;

    /// Counts the dirty pages of all blocks, changing nothing.
    ///
    /// # Errors
    /// As [`Tracking::start`].
    fn count_dirty(&self) -> Result<DirtyCount, TrackError>;

    /// Holds the guest to so many pages a second that are written anew; none: to no limit any more. What is taken from then on
    /// is held.
    ///
    /// # Errors
    /// It can't be done; the guest runs as before.
    fn throttle(&mut self, pages_per_s: Option<f64>) -> Result<(), TrackError>;

    /// Keeps to the limit where that needs looking at again and again. To be called often while one holds; it looks at the clock itself.
    fn steer(&mut self) {}

    /// Whether memory may change over to being held in [`Tracking::take_dirty`]: not while somebody reads pages that earlier calls
    /// gave.
    fn let_grow(&mut self, may_grow: bool);

    /// The memory of the last [`Tracking::take_dirty`]'s block that changed over in it.
    fn changed_over(&self) -> Vec<PageRange>;

    /// The guest is about to be stopped: no write is held for long any more, and nothing changes over.
    fn let_stop(&mut self);

    /// What holding it has done so far.
    fn throttle_figures(&self) -> ThrottleFigures;

    /// The least CPU time that its processors got, as a share of what they could take; none: they were not held so.
    fn least_cpu_share(&self) -> Option<f64> {
        None
    }
}

impl Tracking for DirtyTracker {
    fn start(&mut self) -> Result<(), TrackError> {
        DirtyTracker::start(self)
    }

    fn take_dirty(
        &mut self,
        block: usize,
        within: PageRange,
        max_pages: u64,
        out: &mut Vec<PageRange>,
    ) -> Result<u64, TrackError> {
        DirtyTracker::take_dirty(self, block, within, max_pages, out)
    }

    fn look(&mut self, block: usize, within: PageRange, out: &mut Vec<PageRange>) -> Result<(), TrackError> {
        DirtyTracker::look(self, block, within, out)
    }

    fn count_dirty(&self) -> Result<DirtyCount, TrackError> {
        DirtyTracker::count_dirty(self)
    }

    fn throttle(&mut self, pages_per_s: Option<f64>) -> Result<(), TrackError> {
        DirtyTracker::throttle(self, pages_per_s)
    }

    fn let_grow(&mut self, may_grow: bool) {
        DirtyTracker::let_grow(self, may_grow);
    }

    fn changed_over(&self) -> Vec<PageRange> {
        DirtyTracker::changed_over(self).to_vec()
    }

    fn let_stop(&mut self) {
        DirtyTracker::let_stop(self);
    }

    fn throttle_figures(&self) -> ThrottleFigures {
        DirtyTracker::throttle_figures(self)
    }
}

/// What the source's hypervisor tells on its own.
#[derive(Debug, PartialEq)]
pub enum HypervisorEvent {
    /// The vCPUs stand still; nothing writes guest memory any more but devices finishing.
    Stopped,
    /// All of the device state has been given to [`Inbox::device_state`].
    DeviceStateEnded,
    /// It can't go on.
    Failed(Failure),
}

/// What is told when something is written down, or can't be.
pub type Noted = Box<dyn FnOnce(Result<(), Failure>) + Send>;

/// The hypervisor at the destination: a shadow VM that waits for a device state.
pub trait DestinationHypervisor: Send {
    /// Takes a piece of the device state stream.
    ///
    /// # Errors
    /// The shadow VM is useless.
    fn feed(&mut self, bytes: &[u8]) -> Result<(), Failure>;

    /// Has it written down that the guest may run here from now on, and calls `noted` when that is durable, or can't be. Does not wait;
    /// [`DestinationHypervisor::discard`] does, where it is called before.
    fn note_take_over(&mut self, noted: Noted);

    /// Waits until the device state is loaded. On success the guest is complete and paused.
    ///
    /// # Errors
    /// The shadow VM is useless.
    fn finish_load(&mut self) -> Result<(), Failure>;

    /// What a guest needs to run while pages of it are missing: who tells of its accesses, and where to note what is missing.
    ///
    /// # Errors
    /// It can't here; the shadow VM is as it was.
    fn prepare_page_in(&mut self) -> Result<(Box<dyn page_in::Faults>, PathBuf), Failure>;

    /// Lets the guest run, unless `run` is false. Returns when the vCPUs run; that it is this host's alone is recorded by
    /// [`DestinationHypervisor::promote`].
    ///
    /// # Errors
    /// The guest does not run here and will not.
    fn run(&mut self, run: bool) -> Result<(), Failure>;

    /// Ends the shadow VM. On return nothing of it can run any more.
    fn discard(&mut self, failure: &Failure);

    /// Records that the shadow VM is a VM of this host, and announces the guest's addresses.
    fn promote(&mut self);
}

/// What a source's driver waits for.
#[derive(Debug)]
pub(crate) enum Input {
    Machine(Event),
    Hypervisor(HypervisorEvent),
    /// The inbox holds device state.
    DeviceState,
    Lane(Message),
    /// The data streams may have come to what is waited for.
    Moved,
    /// A data stream's socket failed.
    StreamBroke {
        /// Its number on the board.
        number: usize,
    },
    /// The streams for page-in are open, or can't be.
    PageInStreams {
        /// They are.
        open: bool,
    },
    /// All pages are at the destination, or it has no such guest.
    PagedIn(Result<Option<PagedIn>, NotServed>),
}

/// A lane's error as the failure of a migration: what the peer did wrong, what this host lacks, and what is only lost.
#[must_use]
pub fn lane_failure(error: &godwit_lanes::LaneError) -> Failure {
    use godwit_lanes::LaneError;
    let code = match error {
        // The peer sent something else: another way, or another moment, may carry it whole.
        LaneError::Wire(WireError::Corrupted { .. }) => FailureCode::LaneLost,
        LaneError::Wire(_)
        | LaneError::OutOfBounds { .. }
        | LaneError::Garbled { .. }
        | LaneError::OldRound { .. }
        | LaneError::Unexpected(_) => FailureCode::ProtocolBroken,
        LaneError::Memory(_) => FailureCode::MemoryFailed,
        _ => FailureCode::LaneLost,
    };
    Failure::new(code, error.to_string())
}
