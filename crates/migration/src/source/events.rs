//! Inputs and outputs of the source's state machine.

use std::time::Duration;

use godwit_wire::Running;

use crate::failure::Failure;
use crate::ledger::SentTotals;

/// What remains to be sent, and what it costs to find out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counted {
    /// Pages that are dirty now.
    pub pages: u64,
    /// How many of them are dirty only because pages around them are.
    pub filled_pages: u64,
    /// Round trip of the lane.
    pub round_trip: Duration,
    /// What the limits in force leave for pages, bytes per second.
    pub limit_bytes_per_s: Option<u64>,
    /// Time that counting took.
    pub scan: Duration,
    /// Time that the last sweep took to find its pages, without waiting for room on the board.
    pub search: Duration,
}

impl Counted {
    /// Returns the pages that are known to be written.
    pub(crate) fn written_pages(&self) -> u64 {
        self.pages.saturating_sub(self.filled_pages)
    }
}

/// Input of the state machine.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// The lane is connected and the version negotiated.
    Connected,
    /// The destination's shadow VM is ready and matches.
    PeerReady,
    /// Some time into round 0: the number of pages written since tracking began.
    Sampled {
        /// The number of those pages.
        pages: u64,
    },
    /// The requested sweep is handed to the wire.
    RoundSent(SentTotals),
    /// The destination has applied the round.
    RoundApplied {
        round: u32,
        /// Bytes of padding that went with it.
        padding_bytes: u64,
    },
    /// The answer to [`Action::CountRemaining`].
    RemainingCounted(Counted),
    /// The answer to [`Action::Settle`]: the guest may be stopped.
    Settled,
    /// The answer to [`Action::Settle`]: not now. The guest runs, and nothing of a hand-over has
    /// begun.
    PutOff,
    /// The vCPUs are paused.
    GuestStopped,
    /// The guest's devices have stopped as well: from here on, memory can change only by what the
    /// hypervisor does to write the device state. It stays out where one more sweep does not pay.
    DevicesStopped,
    /// The hypervisor has written all of the device state.
    DeviceStateEnded,
    /// The last pages requested are handed to the wire.
    LastPagesSent(SentTotals),
    /// The kernel has taken all of the commit: the answer to [`Action::SendCommit`].
    CommitSent,
    /// The destination runs the guest.
    PeerRunning(Running),
    /// The destination does not and will not run the guest.
    PeerRefused(Failure),
    /// The lane broke, or the peer violated the protocol.
    LaneLost(Failure),
    /// The hypervisor, the tracking or the memory failed on this host.
    Failed(Failure),
    /// A user cancels the migration.
    CancelRequested,
    /// The answer to [`Action::Throttle`] if it is impossible.
    CannotThrottle,
    /// The answer to [`Action::PreparePageIn`].
    PageInReady {
        /// False: the destination cannot do it, or no stream for it could be opened.
        able: bool,
    },
    /// The answer to [`Action::AnnounceRemaining`].
    RemainingAnnounced {
        /// Pages that the guest will lack.
        pages: u64,
    },
    /// The answer to [`Action::ServePages`], possibly before that action: all pages are at the
    /// destination, or serving has ended.
    PagedIn(Result<(), NotServed>),
    /// The answer to [`Action::ResumeGuest`].
    GuestResumed(Result<(), Failure>),
    /// The answer to [`Action::AskVerdict`].
    Verdict(Verdict),
    /// The answer to [`Action::ReleaseGuest`].
    Released,
}

/// Reason why pages are no longer served although the destination has not reported that it has
/// them.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotServed {
    /// The destination does not and will not run the guest, and never had streams for its pages.
    #[error("{0}")]
    Refused(Failure),
    /// It is unknown what became of the guest.
    #[error("{0}")]
    Lost(Failure),
}

/// Answer of the destination about a hand-over when it is queried again, after the lane broke.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    Runs,
    /// It does not and will not run the guest.
    Refused(Failure),
    /// It is unreachable.
    Unknown,
}

/// Output of the state machine. The driver carries actions out in order, and takes no event between
/// them. It drops the rest of a list at the first message that cannot be sent; [`Event::LaneLost`]
/// follows.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Send the destination the parameters of the guest.
    SendBegin,
    /// Protect all memory: from here on each write is seen.
    StartTracking,
    /// Send dirty pages (in round 0: all pages that are not dirty; the rest belongs to the next
    /// round). Answered by [`Event::RoundSent`].
    SendRound {
        round: u32,
        /// Nothing goes by reference or as a delta: a switchover may follow before the destination
        /// has reported what it misses.
        brief: bool,
    },
    /// Wait until the destination has applied everything sent, and prepare the streams for a
    /// switchover. Answered by [`Event::RoundApplied`].
    Drain,
    /// Count dirty pages. Answered by [`Event::RemainingCounted`].
    CountRemaining,
    /// Limit the guest's writers to so many pages per second. Answered by [`Event::CannotThrottle`]
    /// if it is impossible.
    Throttle {
        /// Newly written pages per second.
        pages_per_s: f64,
    },
    /// Lift the limit on writers.
    LetWritersGo,
    /// Prepare the destination, and streams to it, for a guest that lacks pages. Answered by
    /// [`Event::PageInReady`].
    PreparePageIn,
    /// Bring up to date what moves with the guest besides its memory, while the guest runs.
    /// Answered by [`Event::Settled`] or [`Event::PutOff`], after whatever happened meanwhile.
    Settle,
    /// Stop the guest. Answered by [`Event::GuestStopped`].
    BeginSwitchover {
        /// Whether the guest will run at the destination while some of its pages are here.
        page_in: bool,
    },
    /// Let the hypervisor write the device state, which is held back. Answered by
    /// [`Event::DeviceStateEnded`].
    WriteDeviceState,
    /// Send every page dirtied since the last sweep. Answered by [`Event::LastPagesSent`].
    SendLastPages { round: u32 },
    /// Send the device state as it is written, as soon as everything sent before is in the
    /// destination's memory.
    PassDeviceState,
    /// Send the list of pages that the guest will lack at the destination, and begin to send those
    /// pages. Answered by [`Event::RemainingAnnounced`].
    AnnounceRemaining,
    /// Report that all pages have been sent, and their number.
    EndPages,
    /// Send what is left of the device state, and its end. What was written since the guest stopped
    /// comes after the pages that its devices wrote ([`Action::PassDeviceState`], or this action),
    /// because the destination's hypervisor reads queues in guest memory while it loads, and must
    /// read what the source's left there.
    SendDeviceState,
    /// Send the commit. Answered by [`Event::CommitSent`]: from then on the destination owns the
    /// guest.
    SendCommit,
    /// Notify the destination that the migration is aborted. Best effort.
    AbortPeer(Failure),
    /// The guest runs at the destination, or whether it does is being queried: keep the pages, and
    /// send them as often as necessary. Answered by [`Event::PagedIn`].
    ServePages,
    /// Undo the switchover: the guest runs as before, or stays paused if it was. Answered by
    /// [`Event::GuestResumed`].
    ResumeGuest,
    /// Lift the limit on writers for good: no further round follows. The tracking itself ends when
    /// the driver drops its job.
    StopTracking,
    /// Query the destination, on another connection, whether it runs the guest. Answered by
    /// [`Event::Verdict`].
    AskVerdict,
    /// The guest is gone permanently: end its hypervisor, free its memory. Answered by
    /// [`Event::Released`].
    ReleaseGuest,
    /// The migration has ended.
    Finish,
}

impl Action {
    /// Returns the action's name at hold points ([`crate::hold`]).
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Action::SendBegin => "send-begin",
            Action::StartTracking => "start-tracking",
            Action::SendRound { round: 0, .. } => "send-first-round",
            Action::SendRound { .. } => "send-round",
            Action::Drain => "drain",
            Action::CountRemaining => "count-remaining",
            Action::Throttle { .. } => "throttle",
            Action::LetWritersGo => "let-writers-go",
            Action::PreparePageIn => "prepare-page-in",
            Action::Settle => "settle",
            Action::BeginSwitchover { .. } => "begin-switchover",
            Action::WriteDeviceState => "write-device-state",
            Action::SendLastPages { .. } => "send-last-pages",
            Action::PassDeviceState => "pass-device-state",
            Action::AnnounceRemaining => "announce-remaining",
            Action::EndPages => "end-pages",
            Action::SendDeviceState => "send-device-state",
            Action::SendCommit => "send-commit",
            Action::AbortPeer(_) => "abort-peer",
            Action::ServePages => "serve-pages",
            Action::ResumeGuest => "resume-guest",
            Action::StopTracking => "stop-tracking",
            Action::AskVerdict => "ask-verdict",
            Action::ReleaseGuest => "release-guest",
            Action::Finish => "finish",
        }
    }
}
