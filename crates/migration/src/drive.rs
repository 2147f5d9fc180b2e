//! The drivers carry out the decisions of the state machines, on threads of their own that block on
//! sockets. The hypervisor is behind two traits whose contracts are part of the hand-over.

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

/// Hypervisor at the source.
pub trait SourceHypervisor: Send {
    /// Requests a stop of the guest for the switchover. [`HypervisorEvent::Stopped`] follows, and
    /// pieces of the device state may ([`Inbox::device_state`]). `page_in`: once the guest runs at
    /// the destination it will need pages that are here. An agent that takes over must know that.
    ///
    /// # Errors
    /// The guest runs on as before.
    fn begin_switchover(&mut self, events: &Inbox, page_in: bool) -> Result<(), Failure>;

    /// Lets the hypervisor write the device state of the stopped guest;
    /// [`HypervisorEvent::DeviceStateEnded`] follows.
    ///
    /// # Errors
    /// The guest stays stopped; [`SourceHypervisor::resume`] is called next.
    fn write_device_state(&mut self) -> Result<(), Failure>;

    /// Undoes the switchover, at whatever point it is. On success the guest runs as before (or is
    /// paused, if it was).
    ///
    /// # Errors
    /// The guest cannot run here any more: its hypervisor is gone.
    fn resume(&mut self) -> Result<(), Failure>;

    /// Ends the hypervisor and frees its resources, because the destination runs the guest.
    fn release(&mut self);
}

/// Tracking of the guest's writes. In the product this is [`godwit_ram::DirtyTracker`].
pub trait Tracking: Send {
    /// Protects all memory: from the return on, each write is seen.
    ///
    /// # Errors
    /// The writes cannot be seen: this engine cannot move the guest.
    fn start(&mut self) -> Result<(), TrackError>;

    /// Reports the pages of `block` within `within` that were written since they were last
    /// protected, and protects them again. Stops after `max_pages`; returns the page to go on from.
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

    /// Reports the pages of `block` within `within` that were written since they were last
    /// protected, and leaves them dirty.
    ///
    /// # Errors
    /// As [`Tracking::start`].
    fn look(
        &mut self,
        block: usize,
        within: PageRange,
        out: &mut Vec<PageRange>,
    ) -> Result<(), TrackError>;

    /// Counts the dirty pages of all blocks and leaves them dirty.
    ///
    /// # Errors
    /// As [`Tracking::start`].
    fn count_dirty(&self) -> Result<DirtyCount, TrackError>;

    /// Limits the guest to so many newly written pages per second; `None` lifts the limit. It
    /// applies to memory that is taken from then on.
    ///
    /// # Errors
    /// It is impossible; the guest runs as before.
    fn throttle(&mut self, pages_per_s: Option<f64>) -> Result<(), TrackError>;

    /// Adjusts the throttle to keep the limit, if the means requires that. Call it often while a
    /// limit is in force; it checks the clock itself.
    fn steer(&mut self) {}

    /// Sets whether memory may come under the throttle in [`Tracking::take_dirty`]. It must not
    /// while a thread reads pages that earlier calls returned.
    fn let_grow(&mut self, may_grow: bool);

    /// Returns the memory that came under the throttle in the last [`Tracking::take_dirty`], in its
    /// block.
    fn changed_over(&self) -> Vec<PageRange>;

    /// Announces that the guest is about to be stopped: writes are no longer held for long, and no
    /// more memory comes under the throttle.
    fn let_stop(&mut self);

    /// Returns the throttle's statistics so far.
    fn throttle_figures(&self) -> ThrottleFigures;

    /// Returns the lowest share of CPU time that its vCPUs got, of what they could take, or `None`
    /// if their CPU time was not limited.
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

    fn look(
        &mut self,
        block: usize,
        within: PageRange,
        out: &mut Vec<PageRange>,
    ) -> Result<(), TrackError> {
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

/// Event of the source's hypervisor.
#[derive(Debug, PartialEq)]
pub enum HypervisorEvent {
    /// The vCPUs are paused; only devices that are finishing still write guest memory.
    Stopped,
    /// All of the device state has been passed to [`Inbox::device_state`].
    DeviceStateEnded,
    /// The hypervisor cannot continue.
    Failed(Failure),
}

/// Callback for a record that is durable, or could not be written.
pub type Noted = Box<dyn FnOnce(Result<(), Failure>) + Send>;

/// Hypervisor at the destination: a shadow VM that waits for a device state.
pub trait DestinationHypervisor: Send {
    /// Takes a piece of the device state stream.
    ///
    /// # Errors
    /// The shadow VM is unusable.
    fn feed(&mut self, bytes: &[u8]) -> Result<(), Failure>;

    /// Starts recording that the guest may run here from now on, and calls `noted` when the record
    /// is durable or has failed. It does not wait; [`DestinationHypervisor::discard`] waits if it
    /// is called before that.
    fn note_take_over(&mut self, noted: Noted);

    /// Waits until the device state is loaded. On success the guest is complete and paused.
    ///
    /// # Errors
    /// The shadow VM is unusable.
    fn finish_load(&mut self) -> Result<(), Failure>;

    /// Prepares a guest that runs while some of its pages are missing. Returns what reports its
    /// accesses, and the path of the record of missing pages.
    ///
    /// # Errors
    /// It is impossible here; the shadow VM is unchanged.
    fn prepare_page_in(&mut self) -> Result<(Box<dyn page_in::Faults>, PathBuf), Failure>;

    /// Runs the guest, unless `run` is false. Returns when the vCPUs run.
    /// [`DestinationHypervisor::promote`] records that the guest belongs to this host alone.
    ///
    /// # Errors
    /// The guest does not run here and will not.
    fn run(&mut self, run: bool) -> Result<(), Failure>;

    /// Ends the shadow VM. After the return no part of it can run any more.
    fn discard(&mut self, failure: &Failure);

    /// Records that the shadow VM is a VM of this host, and announces the guest's addresses.
    fn promote(&mut self);
}

/// Input of a source's driver.
#[derive(Debug)]
pub(crate) enum Input {
    Machine(Event),
    Hypervisor(HypervisorEvent),
    /// The inbox holds device state.
    DeviceState,
    Lane(Message),
    /// The data streams may have reached what the driver waits for.
    Moved,
    /// A data stream's socket failed.
    StreamBroke {
        /// Its number on the board.
        number: usize,
    },
    /// The streams for page-in are open, or cannot be opened.
    PageInStreams {
        /// Whether they are open.
        open: bool,
    },
    /// All pages are at the destination, or it does not have this guest.
    PagedIn(Result<Option<PagedIn>, NotServed>),
}

/// Converts a lane's error to the failure of a migration. It distinguishes violations by the peer,
/// deficiencies of this host, and mere losses.
#[must_use]
pub fn lane_failure(error: &godwit_lanes::LaneError) -> Failure {
    use godwit_lanes::LaneError;
    let code = match error {
        // The bytes were altered on the way: another path, or another moment, may carry them
        // intact.
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
