//! Inputs for which a source's driver waits, from any thread.
//!
//! The inbox is bounded, and it never fills: a thread of the agent's runtime may put an input
//! there, and must not wait for a driver that waits for the runtime. [`CAPACITY`] is the sum of
//! everything that can be in it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Instant;

use godwit_wire::{MAX_STREAMS, Message, PagedIn};

use super::device_state::{HeldDeviceState, Refused};
use crate::failure::Failure;
use crate::source::{Event, NotServed};

/// Maximum unanswered pings: 25 s of them. The driver then sends no further one.
pub(super) const MOST_UNANSWERED_PINGS: u64 = 256;
/// Inputs that come once, or once at a time: a cancel; what settling led to; a note that streams
/// moved or made room; a note of device state; that the guest stopped, that its devices have, that
/// its device state has ended, and that the hypervisor failed; the destination's Ready,
/// PageInReady, Running and last message; the results of page-in's streams and of page-in itself.
const SINGLE_INPUTS: usize = 16;
/// Room for all inputs that can wait at a time: an answer to each ping, two messages of each data
/// stream (it broke, or it could not be opened), and the single inputs.
const CAPACITY: usize = 1024;
const _: () = assert!(
    MOST_UNANSWERED_PINGS + 2 * MAX_STREAMS as u64 + SINGLE_INPUTS as u64 <= CAPACITY as u64
);

/// Event of the source's hypervisor.
#[derive(Debug, PartialEq)]
pub enum HypervisorEvent {
    /// The vCPUs are paused; only devices that are finishing still write guest memory.
    Stopped,
    /// Its devices have stopped as well: memory can change only by what the hypervisor does to
    /// write the device state.
    DevicesStopped,
    /// All of the device state has been passed to [`Inbox::device_state`].
    DeviceStateEnded,
    /// The hypervisor cannot continue.
    Failed(Failure),
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

/// Entry for events for a source's driver, usable from any thread.
#[derive(Clone, Debug)]
pub struct Inbox {
    sender: mpsc::SyncSender<(Instant, Input)>,
    /// Whether an [`Input::Moved`] waits.
    moved: Arc<AtomicBool>,
    /// Whether a cancel was requested.
    cancelled: Arc<AtomicBool>,
    device_state: Arc<HeldDeviceState>,
}

/// The driver's end of an [`Inbox`].
#[derive(Debug)]
pub struct Events {
    pub(super) receiver: mpsc::Receiver<(Instant, Input)>,
}

/// Creates an inbox and its receiving end.
#[must_use]
pub fn inbox() -> (Inbox, Events) {
    let (sender, receiver) = mpsc::sync_channel(CAPACITY);
    let (moved, cancelled, device_state) = (Arc::default(), Arc::default(), Arc::default());
    (Inbox { sender, moved, cancelled, device_state }, Events { receiver })
}

impl Inbox {
    /// Requests a cancel. After the commit it has no effect.
    pub fn cancel(&self) {
        if !self.cancelled.swap(true, Ordering::SeqCst) {
            self.put_now(Input::Machine(Event::CancelRequested));
        }
    }

    /// Takes an event of the hypervisor that happened at `at`.
    pub fn hypervisor(&self, at: Instant, event: HypervisorEvent) {
        self.put(at, Input::Hypervisor(event));
    }

    /// Takes a piece of the device state stream, in order.
    ///
    /// # Errors
    /// The stream is longer than
    /// [`MOST_DEVICE_STATE_BYTES`](crate::destination::MOST_DEVICE_STATE_BYTES). This ends the
    /// migration; the caller must stop reading.
    pub fn device_state(&self, bytes: &[u8]) -> Result<(), Failure> {
        match self.device_state.add(bytes) {
            Ok(true) => self.put_now(Input::DeviceState),
            Ok(false) => {}
            Err(Refused { failure, is_first }) => {
                if is_first {
                    self.put_now(Input::Hypervisor(HypervisorEvent::Failed(failure.clone())));
                }
                return Err(failure);
            }
        }
        Ok(())
    }

    /// Takes the device state that has arrived since the last call.
    pub(super) fn take_device_state(&self) -> Vec<u8> {
        self.device_state.take()
    }

    /// Notes that the data streams may have reached what the driver waits for.
    pub(crate) fn moved(&self) {
        if !self.moved.swap(true, Ordering::SeqCst) {
            self.put_now(Input::Moved);
        }
    }

    /// Notes that the driver looks at the data streams: later progress is reported again.
    pub(crate) fn reset_moved(&self) {
        self.moved.store(false, Ordering::SeqCst);
    }

    pub(crate) fn put_now(&self, input: Input) {
        self.put(Instant::now(), input);
    }

    pub(crate) fn put(&self, at: Instant, input: Input) {
        // A driver that has ended needs nothing any more.
        let _ = self.sender.send((at, input));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::destination::MOST_DEVICE_STATE_BYTES;

    #[test]
    fn repeated_events_wait_once() {
        let (inbox, events) = inbox();
        for _ in 0..3 * CAPACITY {
            inbox.cancel();
            inbox.moved();
            inbox.device_state(b"s").unwrap();
        }
        assert_eq!(events.receiver.try_iter().count(), 3);
        assert_eq!(inbox.take_device_state().len(), 3 * CAPACITY);
    }

    #[test]
    fn an_endless_device_state_is_refused_at_the_limit() {
        for takes in [false, true] {
            let (inbox, events) = inbox();
            let (piece, mut given) = (vec![0; 1 << 20], 0);
            let failure = loop {
                if let Err(failure) = inbox.device_state(&piece) {
                    break failure;
                }
                given += piece.len() as u64;
                if takes {
                    drop((inbox.take_device_state(), events.receiver.try_iter().count()));
                }
            };
            assert_eq!(given, MOST_DEVICE_STATE_BYTES);
            assert!(failure.detail.contains("device state"), "{failure}");
            assert!(inbox.take_device_state().is_empty(), "what is too much is held");
            let last = events.receiver.try_iter().last();
            assert!(
                matches!(last, Some((_, Input::Hypervisor(HypervisorEvent::Failed(_))))),
                "{last:?}"
            );
            // More of it changes nothing.
            for _ in 0..2 * CAPACITY {
                assert!(inbox.device_state(&piece).is_err());
            }
            assert_eq!(events.receiver.try_iter().count(), 0);
        }
    }
}
