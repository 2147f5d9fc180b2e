//! State of a data stream, and limits that apply to it.

use std::time::Instant;

use godwit_lanes::{Carries, Stream};

/// Limits for a lane's streams while the guest is paused, so that none of them makes the others
/// wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LanePace {
    /// Maximum pages of a unit.
    pub(crate) chunk_pages: u64,
    /// A stream takes no unit while more of its bytes are unacknowledged.
    pub(crate) most_unacked_bytes: u64,
}

/// Data stream as the driver sees it.
#[derive(Debug)]
pub(super) struct StreamState {
    pub(super) lane: usize,
    pub(super) carries: Carries,
    /// Set once the stream is connected.
    pub(super) stream: Option<Stream>,
    /// Whether the destination has welcomed the stream.
    pub(super) ready: bool,
    /// Bytes that it has sent and must send in this round.
    pub(super) quota: Quota,
    /// Time since which data is in flight without progress; `None` if nothing is in flight.
    pub(super) waits: Option<Waits>,
    pub(super) failure: Option<String>,
    /// MTU that its packets kept to, if they were lost because of their size.
    pub(super) vanishing_mtu: Option<u32>,
    /// The stream takes nothing more while so many of its bytes are unacknowledged.
    pub(super) most_unacked: Option<u64>,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Waits {
    pub(super) since: Instant,
    /// Bytes that TCP had carried at that time, if they were read.
    pub(super) carried_bytes: Option<u64>,
}

/// Bytes of one stream in one round.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Quota {
    pub(super) sent: u64,
    /// Minimum, reached with padding if there is not that much work.
    pub(super) least: u64,
}

impl Quota {
    pub(super) fn owed(self) -> u64 {
        self.least.saturating_sub(self.sent)
    }
}

impl StreamState {
    /// Returns the bytes handed to the kernel so far, including those of the current unit.
    pub(super) fn sent_bytes(&self) -> u64 {
        self.stream.as_ref().map_or(0, Stream::sent_bytes)
    }

    /// Returns whether it has as much data in flight as allowed.
    pub(super) fn is_full(&self) -> bool {
        let unacked = || self.stream.as_ref().map_or(0, Stream::unacked_bytes);
        self.most_unacked.is_some_and(|most| unacked() > most)
    }
}

/// State of a stream with full-size segments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FullSize {
    /// Its number on the board.
    pub(crate) stream: usize,
    /// Bytes that TCP has carried.
    pub(crate) carried_bytes: u64,
    /// Number of consecutive unanswered retransmissions.
    pub(crate) timeouts: u8,
}
