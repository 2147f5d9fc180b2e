//! The destination of a migration as a state machine: (state, event) → (state, actions), without
//! I/O.
//!
//! The guest runs here only after the commit has been read, the device state is loaded, and a
//! record states that it may run ([`crate::handover`]). Before the commit, any failure discards the
//! shadow VM. After it, the destination either runs the guest or refuses it explicitly.

use godwit_wire::{Begin, Reason};

use crate::failure::{Failure, FailureCode};
use godwit_types::{Incarnation, Ownership};

/// Maximum device state of a guest that a source reads from its hypervisor, or a destination
/// accepts from a source. A usual VM has 0.2 MiB; the largest part that occurs is the memory of an
/// emulated graphics card. The source holds all of it while it sends the last pages, so this bounds
/// the memory that a hypervisor controlled by a guest can make its agent use.
pub const MOST_DEVICE_STATE_BYTES: u64 = 256 << 20;

/// Input of the state machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// The source has sent the parameters of the guest.
    Begin(Begin),
    /// The source has sent all pages, and they are in memory.
    PagesComplete {
        /// Number of pages that the source sent.
        sent: u64,
        /// Number of pages in memory.
        applied: u64,
    },
    /// A piece of the device state was handed to the hypervisor.
    DeviceStateFed {
        /// Its length in bytes.
        bytes: u64,
    },
    /// The answer to [`Action::NoteTakeOver`]: the record is written.
    Noted,
    /// The source has reported that the device state is complete.
    DeviceStateEnd {
        /// The total length in bytes.
        bytes: u64,
    },
    /// The hypervisor has loaded the device state.
    Loaded,
    /// The source hands the guest over.
    Commit { ownership: Ownership },
    /// The guest runs (or, if it was paused, is complete and paused).
    GuestRuns,
    /// The source gives up.
    Aborted(Reason),
    /// The lane broke, or the peer violated the protocol.
    LaneLost(Failure),
    /// Memory or hypervisor failed on this host.
    Failed(Failure),
    /// The operator or the source's agent requests that the migration be discarded.
    CancelRequested,
}

/// Output of the state machine, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Report to the source that the shadow VM matches.
    SendReady,
    /// Record that the guest may run here from now on, concurrently with other work: the guest is
    /// about to be stopped. Answered by [`Event::Noted`] or [`Event::Failed`].
    NoteTakeOver,
    /// Wait until the hypervisor has loaded the device state. Answered by [`Event::Loaded`] or
    /// [`Event::Failed`].
    FinishLoad,
    /// Run the guest under the new epoch. Answered by [`Event::GuestRuns`] or [`Event::Failed`].
    RunGuest {
        /// False: the guest was paused at the source and stays paused.
        run: bool,
    },
    /// Report to the source that the guest runs here.
    SendRunning,
    /// Report to the source, best effort, that the guest does not and will not run here.
    Refuse(Failure),
    /// End the shadow VM and free its memory.
    Discard(Failure),
    /// Record that the guest belongs to this host, and announce its addresses.
    Promote,
    Finish(Ending),
}

impl Action {
    /// Returns the action's name at hold points ([`crate::hold`]).
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Action::SendReady => "send-ready",
            Action::NoteTakeOver => "note-take-over",
            Action::FinishLoad => "finish-load",
            Action::RunGuest { .. } => "run-guest",
            Action::SendRunning => "send-running",
            Action::Refuse(_) => "refuse",
            Action::Discard(_) => "discard",
            Action::Promote => "promote",
            Action::Finish(_) => "finish",
        }
    }
}

/// Outcome at the destination.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ending {
    /// The guest runs here.
    Runs,
    /// Nothing is left here.
    Discarded(Failure),
    /// The lane was cut while only memory had arrived: it is kept for another lane.
    Cut(Failure),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// The lane is connected.
    Awaiting,
    /// Rounds are arriving.
    Receiving,
    /// The device state is complete and being loaded.
    Loading,
    /// The device state is loaded, and there is no commit yet.
    Loaded,
    /// Committed and loaded: the guest is being started.
    Starting,
    Ended,
}

/// State machine of the destination.
#[derive(Clone, Debug)]
pub struct Destination {
    state: State,
    block_pages: Vec<u64>,
    ownership: Ownership,
    run: bool,
    committed: bool,
    pages_complete: bool,
    /// Set once the record that the guest may run here was requested; true: it is written.
    noted: Option<bool>,
    device_state_bytes: u64,
}

impl Destination {
    /// Creates a destination whose shadow VM has RAM blocks of these sizes in pages, and that was
    /// prepared for `ownership`.
    #[must_use]
    pub fn new(block_pages: Vec<u64>, ownership: Ownership) -> Self {
        Destination {
            state: State::Awaiting,
            block_pages,
            ownership,
            run: true,
            committed: false,
            pages_complete: false,
            noted: None,
            device_state_bytes: 0,
        }
    }

    /// Takes an event and returns what to do.
    pub fn on(&mut self, event: Event) -> Vec<Action> {
        match (self.state, event) {
            (State::Ended, _) => vec![],
            (State::Awaiting, Event::Begin(begin)) => self.begin(&begin),
            (State::Receiving, Event::PagesComplete { sent, applied }) if !self.pages_complete => {
                self.pages_complete(sent, applied)
            }
            (State::Receiving, Event::DeviceStateFed { bytes }) => {
                self.device_state_bytes += bytes;
                if self.device_state_bytes > MOST_DEVICE_STATE_BYTES {
                    let most = MOST_DEVICE_STATE_BYTES >> 20;
                    let detail = format!("the source sent more than {most} MiB of device state");
                    return self.discard(Failure::new(FailureCode::ProtocolBroken, detail), true);
                }
                self.note_take_over()
            }
            (State::Receiving | State::Loading | State::Loaded, Event::Noted)
                if self.noted == Some(false) =>
            {
                self.noted = Some(true);
                self.run_if_committed()
            }
            (State::Receiving, Event::DeviceStateEnd { bytes }) if self.pages_complete => {
                self.device_state_end(bytes)
            }
            (State::Loading, Event::Loaded) => {
                self.state = State::Loaded;
                self.run_if_committed()
            }
            (State::Loading | State::Loaded, Event::Commit { ownership }) if !self.committed => {
                self.commit(ownership)
            }
            (State::Starting, Event::GuestRuns) => {
                self.state = State::Ended;
                // Recorded before the source learns of it and discards the guest.
                vec![Action::Promote, Action::SendRunning, Action::Finish(Ending::Runs)]
            }
            // After the commit the guest belongs to this host: a lost lane or a late message of the
            // source changes nothing.
            (
                State::Loading | State::Loaded | State::Starting,
                Event::LaneLost(_) | Event::Aborted(_) | Event::CancelRequested,
            ) if self.committed => {
                vec![]
            }
            (State::Awaiting | State::Receiving, Event::LaneLost(failure))
                if failure.code == FailureCode::LaneLost
                    && self.noted.is_none()
                    && !self.pages_complete =>
            {
                self.state = State::Ended;
                vec![Action::Finish(Ending::Cut(failure))]
            }
            (_, Event::LaneLost(failure)) => self.discard(failure, false),
            (_, Event::Aborted(reason)) => self.discard(Failure::from_peer(&reason), false),
            (_, Event::CancelRequested) => self.discard(
                Failure::new(FailureCode::Cancelled, "cancelled at the destination"),
                true,
            ),
            (_, Event::Failed(failure)) => self.discard(failure, true),
            (state, event) => {
                let detail = format!("a message out of order ({event:?} while {state:?})");
                self.discard(Failure::new(FailureCode::ProtocolBroken, detail), true)
            }
        }
    }

    fn begin(&mut self, begin: &Begin) -> Vec<Action> {
        if begin.block_pages != self.block_pages {
            let detail = format!(
                "the source's RAM blocks have {:?} pages, the shadow VM's {:?}",
                begin.block_pages, self.block_pages
            );
            return self.discard(Failure::new(FailureCode::MemoryMismatch, detail), true);
        }
        let handed_over =
            Ownership { incarnation: Incarnation::new(begin.incarnation), epoch: begin.epoch };
        if handed_over != self.ownership {
            let detail =
                format!("the source hands over {handed_over}; prepared is {}", self.ownership);
            return self.discard(Failure::new(FailureCode::StaleEpoch, detail), true);
        }
        self.run = begin.run;
        self.state = State::Receiving;
        vec![Action::SendReady]
    }

    fn pages_complete(&mut self, sent: u64, applied: u64) -> Vec<Action> {
        if applied != sent {
            let detail = format!("{sent} pages were sent, {applied} arrived");
            return self.discard(Failure::new(FailureCode::ProtocolBroken, detail), true);
        }
        self.pages_complete = true;
        vec![]
    }

    fn device_state_end(&mut self, bytes: u64) -> Vec<Action> {
        if bytes != self.device_state_bytes {
            let detail =
                format!("the device state has {bytes} bytes, {} arrived", self.device_state_bytes);
            return self.discard(Failure::new(FailureCode::ProtocolBroken, detail), true);
        }
        self.state = State::Loading;
        let mut actions = self.note_take_over();
        actions.push(Action::FinishLoad);
        actions
    }

    /// Requests the record once, as soon as the switchover is expected: it takes a disk's time.
    fn note_take_over(&mut self) -> Vec<Action> {
        if self.noted.is_some() {
            return vec![];
        }
        self.noted = Some(false);
        vec![Action::NoteTakeOver]
    }

    fn commit(&mut self, ownership: Ownership) -> Vec<Action> {
        if ownership != self.ownership {
            let detail = format!("the commit is for {ownership}; prepared is {}", self.ownership);
            return self.discard(Failure::new(FailureCode::ProtocolBroken, detail), true);
        }
        self.committed = true;
        self.run_if_committed()
    }

    fn run_if_committed(&mut self) -> Vec<Action> {
        if self.committed && self.state == State::Loaded && self.noted == Some(true) {
            self.state = State::Starting;
            vec![Action::RunGuest { run: self.run }]
        } else {
            vec![]
        }
    }

    /// Discards the shadow VM before the source learns of it: from then on nothing can run here.
    fn discard(&mut self, failure: Failure, notify: bool) -> Vec<Action> {
        self.state = State::Ended;
        let mut actions = vec![Action::Discard(failure.clone())];
        if notify {
            actions.push(Action::Refuse(failure.clone()));
        }
        actions.push(Action::Finish(Ending::Discarded(failure)));
        actions
    }
}
