//! The lanes of a source while it sends: each gets the streams that pay, and the work of a stalled
//! stream goes to the others.

use std::sync::mpsc::SyncSender;
use std::time::Duration;

use godwit_lanes::{Carries, LaneError, StreamSender};
use godwit_ram::PAGE_SIZE;
use godwit_wire::{MAX_STREAMS, Message};

use super::narrow::{Beside, Narrowness, Step};
use super::streams::wire_number;
use crate::drive::dispatch::Dispatch;
use crate::drive::dispatch::lanes::LaneFigures;
use crate::drive::dispatch::stream_state::LanePace;
use crate::scaler::{LaneSample, Scaler, first_streams};

/// Longest time that a data stream with data in flight makes no progress, while another has nothing
/// to do.
const STALL_LIMIT: Duration = Duration::from_secs(5);
/// [`STALL_LIMIT`] while the guest is paused.
const STALL_LIMIT_STOPPED: Duration = Duration::from_secs(1);

/// Time that a unit takes on a stream while the guest is paused: the others wait for the last one.
const UNIT_TIME: Duration = Duration::from_millis(5);
/// Fewer bytes in flight leave gaps, whatever rate was seen on the stream.
const LEAST_UNACKED: u64 = 32 << 10;
/// A shorter interval between two looks does not show a rate.
const LEAST_LOOK: Duration = Duration::from_millis(50);

pub(super) struct Lanes<'a> {
    dispatch: &'a Dispatch,
    /// Receives the numbers of streams to open.
    opener: SyncSender<usize>,
    count: usize,
    /// `None`: the number of streams is fixed.
    scaler: Option<Scaler>,
    carried: Vec<Carried>,
    narrowness: Vec<Narrowness>,
}

/// Rate observed on a lane.
#[derive(Clone, Copy, Debug, Default)]
struct Carried {
    /// Time of the last look, and the bytes until then.
    last: Option<(Duration, u64)>,
    /// Highest rate between two looks, bytes per second.
    best_bytes_per_s: f64,
    streams: usize,
}

impl Carried {
    fn sample(&mut self, now: Duration, sample: LaneSample) {
        self.streams = sample.streams;
        let Some((at, bytes)) = self.last else {
            self.last = Some((now, sample.bytes));
            return;
        };
        let took = now.saturating_sub(at);
        if took >= LEAST_LOOK {
            let rate = sample.bytes.saturating_sub(bytes) as f64 / took.as_secs_f64();
            self.best_bytes_per_s = self.best_bytes_per_s.max(rate);
            self.last = Some((now, sample.bytes));
        }
    }

    /// Returns how its streams continue while the guest is paused, or `None` if nothing is known
    /// about the lane.
    fn pace(&self, round_trip: Duration) -> Option<LanePace> {
        if self.streams == 0 || self.best_bytes_per_s <= 0.0 {
            return None;
        }
        let of_a_stream = self.best_bytes_per_s / self.streams as f64;
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "positive, and far from the end"
        )]
        let bytes_in = |time: Duration| (of_a_stream * time.as_secs_f64()) as u64;
        Some(LanePace {
            chunk_pages: bytes_in(UNIT_TIME) / PAGE_SIZE,
            most_unacked_bytes: bytes_in(round_trip + UNIT_TIME).max(LEAST_UNACKED),
        })
    }
}

impl<'a> Lanes<'a> {
    /// Creates the state for so many lanes. `is_fixed`: they keep the streams that they begin with.
    pub(super) fn new(
        dispatch: &'a Dispatch,
        opener: SyncSender<usize>,
        count: usize,
        is_fixed: bool,
    ) -> Self {
        let scaler = (!is_fixed).then(|| Scaler::new(count, usize::from(MAX_STREAMS)));
        let carried = vec![Carried::default(); count];
        let narrowness = vec![Narrowness::default(); count];
        Lanes { dispatch, opener, count, scaler, carried, narrowness }
    }

    /// Opens each lane's first streams: the given number, or as many as the path's round trip
    /// requires.
    pub(super) fn open(&self, streams: Option<usize>, round_trip: Duration) {
        // In turns, so that no lane is without a stream if the maximum is reached.
        for _ in 0..streams.unwrap_or(first_streams(round_trip)).max(1) {
            (0..self.count).for_each(|lane| self.open_stream(lane));
        }
    }

    fn open_stream(&self, lane: usize) {
        let narrow = self.narrowness.get(lane).is_some_and(Narrowness::is_narrow);
        self.open_sized(lane, if narrow { Carries::PagesNarrowly } else { Carries::Pages });
    }

    fn open_sized(&self, lane: usize, carries: Carries) -> Option<usize> {
        if self.dispatch.streams() >= usize::from(MAX_STREAMS) {
            return None;
        }
        let number = self.dispatch.open(lane, carries);
        // The receiver exists as long as the driver.
        self.opener.send(number).ok().map(|()| number)
    }

    /// Replaces the streams of lanes that drop large packets by streams with small segments.
    fn check_narrow(
        &mut self,
        now: Duration,
        round_trip: Duration,
        control: &mut StreamSender,
    ) -> Result<(), LaneError> {
        for lane in 0..self.count {
            let beside =
                self.narrowness[lane].trial().map_or(Beside::Broken, |trial| self.beside(trial));
            let streams = self.dispatch.full_size(lane);
            match self.narrowness[lane].step(now, round_trip, &streams, beside) {
                Step::Nothing => {}
                Step::Try => {
                    tracing::debug!(lane, "a lane's streams time out: does it take small packets?");
                    if let Some(number) = self.open_sized(lane, Carries::PagesNarrowly) {
                        self.narrowness[lane].tries(number);
                    }
                }
                Step::Narrow => self.narrow(lane, control)?,
            }
        }
        Ok(())
    }

    fn beside(&self, trial: usize) -> Beside {
        match self.dispatch.is_ready(trial) {
            None => Beside::Broken,
            Some(false) => Beside::Connecting,
            Some(true) => Beside::Ready,
        }
    }

    /// Opens as many streams with small segments in place of those with large ones.
    fn narrow(&self, lane: usize, control: &mut StreamSender) -> Result<(), LaneError> {
        // Before the others end: the one that showed the need may be gone as well, and the end of
        // the last stream ends the migration.
        for _ in 0..self.dispatch.full_size(lane).len() {
            self.open_sized(lane, Carries::PagesNarrowly);
        }
        for number in self.dispatch.break_full_size(lane) {
            control.send(&Message::CloseStream { stream: wire_number(number) })?;
        }
        Ok(())
    }

    /// Evaluates the lanes. Call it now and then; `now` is the time since the start.
    pub(super) fn evaluate(
        &mut self,
        now: Duration,
        round_trip: Duration,
        stopped: bool,
        control: &mut StreamSender,
    ) -> Result<(), LaneError> {
        let limit = if stopped { STALL_LIMIT_STOPPED } else { STALL_LIMIT };
        for number in self.dispatch.break_stalled(limit) {
            tracing::warn!(
                stream = number,
                "a data stream has stalled: the others take over its work"
            );
            control.send(&Message::CloseStream { stream: wire_number(number) })?;
        }
        if stopped {
            // A new stream would only carry the last pages with a small window.
            return Ok(());
        }
        self.check_narrow(now, round_trip, control)?;
        let (samples, is_busy) = self.dispatch.sample_lanes(self.count);
        for (carried, sample) in self.carried.iter_mut().zip(&samples) {
            carried.sample(now, *sample);
        }
        let Some(scaler) = &mut self.scaler else { return Ok(()) };
        for opening in scaler.evaluate(now, round_trip, &samples, is_busy) {
            tracing::debug!(
                lane = opening.lane,
                more = opening.streams,
                "a lane gets more streams"
            );
            (0..opening.streams).for_each(|_| self.open_stream(opening.lane));
        }
        Ok(())
    }

    /// Returns the highest rate seen on all lanes together, bytes per second, or `None` if it has
    /// not shown.
    pub(super) fn carried_bytes_per_s(&self) -> Option<u64> {
        let best: f64 = self.carried.iter().map(|carried| carried.best_bytes_per_s).sum();
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "positive, and far from the end"
        )]
        (best > 0.0).then_some(best as u64)
    }

    /// Returns how the lanes continue while the guest is paused. Streams of one lane share its
    /// wire, so they do not wait for one of them.
    pub(super) fn paces(&self, round_trip: Duration) -> Vec<Option<LanePace>> {
        if self.carried.iter().filter(|carried| carried.streams > 0).count() < 2 {
            return Vec::new();
        }
        self.carried.iter().map(|carried| carried.pace(round_trip)).collect()
    }

    /// Returns the totals of each lane.
    pub(super) fn figures(&self) -> Vec<LaneFigures> {
        self.dispatch.lane_figures(self.count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lane_is_paced_by_its_observed_rate() {
        let (mut slow, ms) = (Carried::default(), Duration::from_millis);
        assert_eq!(slow.pace(Duration::ZERO), None);
        // 12.5 MB/s with two streams, with a pause.
        for (at, bytes) in
            [(0, 0), (100, 1_250_000), (200, 1_250_000), (210, 1_500_000), (300, 2_500_000)]
        {
            slow.sample(ms(at), LaneSample { bytes, streams: 2, connecting: false });
        }
        let pace = slow.pace(Duration::ZERO).unwrap();
        assert_eq!((pace.chunk_pages, pace.most_unacked_bytes), (7, LEAST_UNACKED));
        // On a longer path, the bytes that fill it are added.
        assert_eq!(slow.pace(ms(40)).unwrap().most_unacked_bytes, 6_250_000 * 45 / 1000);
    }
}
