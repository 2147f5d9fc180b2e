//! The hypervisor at each end, behind two traits whose contracts are part of the hand-over.

use std::path::PathBuf;

use godwit_wire::BlockRun;

use super::inbox::Inbox;
use super::page_in::Faults;
use crate::failure::Failure;

/// Hypervisor at the source.
pub trait SourceHypervisor: Send {
    /// Prepares for a switchover that may come soon. It does not wait, and may be called again
    /// before the next attempt.
    fn expect_switchover(&mut self) {}

    /// Returns whether anything besides the memory moves with the guest.
    fn settles(&self) -> bool {
        false
    }

    /// Brings up to date what moves with the guest besides its memory, while the guest runs. It may
    /// block for some seconds. Returns false if that is not possible now: the link is cut, for
    /// example. It is called again later.
    ///
    /// # Errors
    /// It will not be possible.
    fn settle(&mut self) -> Result<bool, Failure> {
        Ok(true)
    }

    /// Requests a stop of the guest for the switchover. `HypervisorEvent::Stopped` follows, and
    /// pieces of the device state may ([`Inbox::device_state`]). `page_in`: once the guest runs at
    /// the destination it will need pages that are here. An agent that takes over must know that.
    ///
    /// # Errors
    /// The guest runs on as before.
    fn begin_switchover(&mut self, events: &Inbox, page_in: bool) -> Result<(), Failure>;

    /// Lets the hypervisor write the device state of the stopped guest.
    /// `HypervisorEvent::DevicesStopped` may follow, as soon as no device writes memory any more
    /// except with its state, then `HypervisorEvent::DeviceStateEnded`.
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

    /// Ends the hypervisor and frees its resources, because the destination runs the guest. `hot`:
    /// memory that the guest wrote again and again, and that it has probably changed since.
    fn release(&mut self, hot: Vec<BlockRun>);
}

/// Callback for a record that is durable, or could not be written.
pub type Noted = Box<dyn FnOnce(Result<(), Failure>) + Send>;

/// Hypervisor at the destination: a shadow VM that waits for a device state.
pub trait DestinationHypervisor: Send {
    /// Prepares for a switchover that may come soon. It does not wait.
    fn expect_switchover(&mut self) {}

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
    fn prepare_page_in(&mut self) -> Result<(Box<dyn Faults>, PathBuf), Failure>;

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
