//! Opening of congestion windows on a long path. After a small round, the switchover would have to
//! open them while the guest is paused. Padding opens them before: on the control stream for the
//! device state, on each data stream for its share of what the last sweep would send. The round is
//! over when the padding has arrived.

use std::time::{Duration, Instant};

use godwit_lanes::LaneError;
use godwit_lanes::pacing::MigrationPace;
use godwit_ram::PAGE_SIZE;

use super::peer::Peer;
use crate::drive::dispatch::Dispatch;
use crate::policy::LONG_ROUND_TRIP;

/// Time limit for the arrival of the control stream's padding, in addition to
/// [`WINDOW_ROUND_TRIPS`].
const WINDOW_LIMIT: Duration = Duration::from_secs(2);
/// Slow start from ten segments to [`DEVICE_STATE_ROOM`], and as much again.
const WINDOW_ROUND_TRIPS: u32 = 10;
/// Device state of a usual VM, with a margin: 0.2 MiB measured.
const DEVICE_STATE_ROOM: u64 = 384 * 1024;
/// Size of the last pages of an idle guest, with a margin: 0.6 MiB measured.
pub(crate) const LEAST_LAST_PAGES: u64 = 1024 * 1024;
/// Beyond this, padding costs more than it gains: the wire's rate matters, not the window.
pub(crate) const MOST_LAST_PAGES: u64 = 16 * 1024 * 1024;

/// First padding while round 0 is under way: ten segments, a new connection's window.
const FIRST_PADDING: u64 = 14 * 1024;
/// Interval at which [`Windows::warm_up`] examines whether the last padding has arrived.
const WARM_INTERVAL: Duration = Duration::from_millis(5);

/// Padding of the current round.
#[derive(Debug, Default)]
pub(super) struct Windows {
    /// The ping behind the padding, whose answer shows that the padding has arrived, and the time
    /// when it was sent.
    ping: Option<(u64, Instant)>,
    /// Padding of data streams before the round, and of the control stream within it.
    before: u64,
    control: u64,
    /// Size of the last padding in round 0.
    warmed_bytes: u64,
    /// Time of the last call of [`Windows::warm_up`].
    examined: Option<Instant>,
}

impl Windows {
    pub(super) fn round_begins(&mut self, dispatch: &Dispatch) {
        (self.before, self.control) = (dispatch.totals.padding_bytes(), 0);
    }

    /// Returns whether [`Windows::warm_up`] is due.
    pub(super) fn warm_up_is_due(&self, round_trip: Duration) -> bool {
        round_trip >= LONG_ROUND_TRIP
            && self.warmed_bytes < DEVICE_STATE_ROOM
            && self.examined.is_none_or(|examined| examined.elapsed() >= WARM_INTERVAL)
    }

    /// Begins to open the control stream's window when only `left` of round 0 remains, so that the
    /// drain after it need not. Each padding is twice as large as the one before and follows once
    /// that has arrived, so it never waits for the window.
    pub(super) fn warm_up(
        &mut self,
        left: Duration,
        carried_bytes_per_s: Option<u64>,
        pace: &MigrationPace,
        peer: &mut Peer<'_>,
    ) -> Result<(), LaneError> {
        self.examined = Some(Instant::now());
        let is_near = left <= WINDOW_ROUND_TRIPS * peer.round_trip();
        if !is_near || peer.control.unacked_bytes() >= FIRST_PADDING / 2 {
            return Ok(());
        }
        self.warmed_bytes = (2 * self.warmed_bytes).clamp(FIRST_PADDING, DEVICE_STATE_ROOM);
        let limit = pace.data_bytes_per_s();
        let most = largest_window(peer.round_trip(), limit, carried_bytes_per_s);
        self.pad(self.warmed_bytes.min(most), pace, peer)
    }

    /// Sends padding on the control stream, which never waits for a limit, so that it can always
    /// send; the data streams wait for its bytes.
    fn pad(
        &mut self,
        bytes: u64,
        pace: &MigrationPace,
        peer: &mut Peer<'_>,
    ) -> Result<(), LaneError> {
        self.control += bytes;
        peer.sender.pad(bytes)?;
        if let Ok(near) = peer.control.local() {
            pace.charge(near.ip(), bytes);
        }
        Ok(())
    }

    /// Returns the bytes of padding in this round.
    pub(super) fn padding_bytes(&self, dispatch: &Dispatch) -> u64 {
        dispatch.totals.padding_bytes() - self.before + self.control
    }

    /// Opens the windows if the path is long. `carried_bytes_per_s`: highest rate seen on the
    /// lanes.
    pub(super) fn open(
        &mut self,
        remaining_pages: u64,
        carried_bytes_per_s: Option<u64>,
        pace: &MigrationPace,
        dispatch: &Dispatch,
        peer: &mut Peer<'_>,
    ) -> Result<(), LaneError> {
        let round_trip = peer.round_trip();
        if round_trip < LONG_ROUND_TRIP {
            return Ok(());
        }
        let most = largest_window(round_trip, pace.data_bytes_per_s(), carried_bytes_per_s);
        let last_pages = (remaining_pages * PAGE_SIZE).clamp(LEAST_LAST_PAGES, MOST_LAST_PAGES);
        dispatch.pad(last_pages.min(most));
        self.pad(DEVICE_STATE_ROOM.min(most), pace, peer)?;
        peer.ping()?;
        self.ping = Some((peer.clock_ns(peer.last_ping), peer.last_ping));
        Ok(())
    }

    /// Returns whether the control stream's padding is known to have arrived, or is not waited for.
    pub(super) fn are_open(&self) -> bool {
        self.ping.is_none()
    }

    /// Takes the answer to a ping. Returns whether it is the one that shows the padding's arrival.
    pub(super) fn pong(&mut self, sent_ns: u64) -> bool {
        self.ping.take_if(|(ping_ns, _)| sent_ns >= *ping_ns).is_some()
    }

    /// Gives up waiting if that takes too long: padding must save time, not cost it. Returns
    /// whether it does.
    pub(super) fn give_up(&mut self, round_trip: Duration) -> bool {
        let limit = WINDOW_LIMIT + WINDOW_ROUND_TRIPS * round_trip;
        self.ping.take_if(|(_, sent)| sent.elapsed() > limit).is_some()
    }
}

/// Returns the largest useful window. A window beyond what two round trips carry at the limit is
/// useless, and slow to open. So is one beyond what the lanes carry. Twice the rate seen is allowed
/// for, because the full rate may not have shown yet: on a slow wire padding would delay each
/// round.
fn largest_window(
    round_trip: Duration,
    limit_bytes_per_s: Option<u64>,
    carried_bytes_per_s: Option<u64>,
) -> u64 {
    let within = |round_trips: u128, bytes_per_s: u64| {
        let bytes = u128::from(bytes_per_s) * round_trips * round_trip.as_nanos() / 1_000_000_000;
        u64::try_from(bytes).unwrap_or(u64::MAX)
    };
    let limited = limit_bytes_per_s.map_or(u64::MAX, |limit| within(2, limit));
    limited.min(carried_bytes_per_s.map_or(u64::MAX, |carried| within(4, carried)))
}
