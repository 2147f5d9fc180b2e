//! The lanes of a source while it sends: each gets the streams that pay, and the work of one that stands still goes to the others.

use std::sync::mpsc::Sender;
use std::time::Duration;

use godwit_lanes::{LaneError, StreamSender};
use godwit_wire::{MAX_STREAMS, Message};

use super::streams::wire_number;
use crate::drive::dispatch::{Dispatch, LaneFigures};
use crate::scaler::{FIRST_STREAMS, Scaler};

/// The longest that a data stream carries nothing of what it has, while another has nothing to do.
const STALL_LIMIT: Duration = Duration::from_secs(5);
/// The same while the guest stands still.
const STALL_LIMIT_STOPPED: Duration = Duration::from_secs(1);

pub(super) struct Lanes<'a> {
    dispatch: &'a Dispatch,
    /// Takes the numbers of streams that are to be opened.
    opener: Sender<usize>,
    count: usize,
    /// None: the number of streams is fixed.
    scaler: Option<Scaler>,
}

impl<'a> Lanes<'a> {
    /// So many lanes; `is_fixed`: they keep the streams that they begin with.
    pub(super) fn new(dispatch: &'a Dispatch, opener: Sender<usize>, count: usize, is_fixed: bool) -> Self {
        let scaler = (!is_fixed).then(|| Scaler::new(count, usize::from(MAX_STREAMS)));
        Lanes { dispatch, opener, count, scaler }
    }

    /// Opens each lane's first streams.
    pub(super) fn open(&self, streams: Option<usize>) {
        // In turns: where the most that there may be is reached, no lane is without.
        for _ in 0..streams.unwrap_or(FIRST_STREAMS).max(1) {
            (0..self.count).for_each(|lane| self.open_stream(lane));
        }
    }

    fn open_stream(&self, lane: usize) {
        if self.dispatch.streams() < usize::from(MAX_STREAMS) {
            // Whoever opens them is there as long as the driver.
            let _ = self.opener.send(self.dispatch.open(lane));
        }
    }

    /// To be called every now and then, `now` being the time since the begin.
    pub(super) fn look(
        &mut self,
        now: Duration,
        round_trip: Duration,
        stopped: bool,
        control: &mut StreamSender,
    ) -> Result<(), LaneError> {
        let limit = if stopped { STALL_LIMIT_STOPPED } else { STALL_LIMIT };
        for number in self.dispatch.break_stalled(limit) {
            tracing::warn!(stream = number, "a data stream stands still: the others do its work");
            control.send(&Message::CloseStream { stream: wire_number(number) })?;
        }
        // While the guest stands still a new stream would only carry its last pages by a small window.
        let Some(scaler) = self.scaler.as_mut().filter(|_| !stopped) else { return Ok(()) };
        let (samples, is_busy) = self.dispatch.look(self.count);
        for opening in scaler.look(now, round_trip, &samples, is_busy) {
            tracing::debug!(lane = opening.lane, more = opening.streams, "a lane gets more streams");
            (0..opening.streams).for_each(|_| self.open_stream(opening.lane));
        }
        Ok(())
    }

    /// What each lane carried.
    pub(super) fn figures(&self) -> Vec<LaneFigures> {
        self.dispatch.lane_figures(self.count)
    }
}
