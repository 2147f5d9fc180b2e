//! The streams of each lane: they are added here, watched for stalls, and counted.

use std::time::{Duration, Instant};

use godwit_lanes::{Carries, Stream};
use godwit_types::LaneProgress;

use super::stream_state::{Quota, StreamState, Waits};
use super::{Dispatch, State};
use crate::scaler::LaneSample;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LaneFigures {
    /// Number of streams that were connected.
    pub streams: u32,
    /// Bytes handed to the streams.
    pub bytes: u64,
    /// Reasons why its streams broke.
    pub broken: Vec<String>,
    /// MTU of its interface at which packets were lost while small ones passed.
    pub vanishing_mtu: Option<u32>,
}

impl Dispatch {
    /// Adds a stream of a lane and returns its number on the board.
    pub(crate) fn open(&self, lane: usize, carries: Carries) -> usize {
        let mut state = self.lock();
        state.streams.push(StreamState {
            lane,
            carries,
            stream: None,
            ready: false,
            quota: Quota::default(),
            waits: None,
            failure: None,
            vanishing_mtu: None,
            most_unacked: None,
        });
        state.board.open()
    }

    /// Returns the number of streams that were ever added.
    pub(crate) fn streams(&self) -> usize {
        self.lock().streams.len()
    }

    /// Returns the lane of a stream, and the stream's purpose.
    pub(crate) fn way_of(&self, stream: usize) -> (usize, Carries) {
        let one = &self.lock().streams[stream];
        (one.lane, one.carries)
    }

    /// Notes that the stream is connected: the end of the migration closes it.
    pub(crate) fn connected(&self, number: usize, stream: &Stream) {
        let mut state = self.lock();
        if state.over {
            stream.close();
        }
        state.streams[number].stream = Some(stream.clone());
    }

    /// Notes that the destination has welcomed the stream.
    pub(crate) fn ready(&self, number: usize) {
        self.lock().streams[number].ready = true;
    }

    /// Breaks and returns streams that have had data in flight for longer than `limit` without
    /// progress, while another stream has nothing to do. A stream makes progress if TCP carries any
    /// byte, or if a bandwidth limit holds it.
    pub(crate) fn break_stalled(&self, limit: Duration) -> Vec<usize> {
        // The kernel is queried without the lock: the query may have to wait for a sender.
        let carried: Vec<_> = self
            .stallable()
            .into_iter()
            .map(|(number, stream)| (number, stream.carried_bytes(), stream.is_held()))
            .collect();
        let mut state = self.lock();
        let mut stalled = Vec::new();
        for (number, bytes, is_held) in carried {
            let Some(waits) = &mut state.streams[number].waits else { continue };
            if is_held || waits.carried_bytes != Some(bytes) {
                *waits = Waits { since: Instant::now(), carried_bytes: Some(bytes) };
            } else if waits.since.elapsed() > limit {
                stalled.push(number);
            }
        }
        for stream in &stalled {
            state.break_off(*stream, &format!("it carried nothing for {} ms", limit.as_millis()));
        }
        drop(state);
        if !stalled.is_empty() {
            // Only with a reason: a woken stream begins anew to count its silence.
            self.work.notify_all();
        }
        stalled
    }

    /// Returns the streams with data in flight, if another stream could do their work.
    fn stallable(&self) -> Vec<(usize, Stream)> {
        let state = self.lock();
        let State { board, streams, sealed, .. } = &*state;
        let live = || streams.iter().enumerate().filter(|(stream, _)| !board.is_broken(*stream));
        if *sealed || !live().any(|(stream, one)| board.under_way(stream) == 0 && one.ready) {
            return Vec::new();
        }
        let waiting = live().filter(|(_, one)| one.waits.is_some());
        waiting.filter_map(|(stream, one)| Some((stream, one.stream.clone()?))).collect()
    }

    /// Returns the state of each lane, and whether there has been work at every moment since the
    /// last call.
    pub(crate) fn sample_lanes(&self, lanes: usize) -> (Vec<LaneSample>, bool) {
        let streams: Vec<_> = self.lock().streams.iter().map(|one| one.stream.clone()).collect();
        // The kernel is queried without the lock: the query may have to wait for a sender.
        let carried: Vec<_> =
            streams.iter().map(|stream| stream.as_ref().map_or(0, Stream::carried_bytes)).collect();
        let mut state = self.lock();
        let mut samples = vec![LaneSample::default(); lanes];
        for (stream, one) in state.streams.iter().enumerate() {
            let sample = &mut samples[one.lane];
            sample.bytes += carried.get(stream).copied().unwrap_or(0);
            if !state.board.is_broken(stream) {
                sample.streams += 1;
                sample.connecting |= !one.ready;
            }
        }
        (samples, !std::mem::take(&mut state.starved))
    }

    /// Returns the totals of each lane.
    pub(crate) fn lane_figures(&self, lanes: usize) -> Vec<LaneFigures> {
        let state = self.lock();
        let mut figures = vec![LaneFigures::default(); lanes];
        for one in &state.streams {
            let figures = &mut figures[one.lane];
            figures.bytes += one.sent_bytes();
            figures.streams += u32::from(one.ready);
            figures.broken.extend(one.failure.clone());
            figures.vanishing_mtu = figures.vanishing_mtu.max(one.vanishing_mtu);
        }
        figures
    }

    /// Returns the progress of each lane that has streams; its addresses are not known here.
    pub(crate) fn lanes(&self) -> Vec<LaneProgress> {
        let state = self.lock();
        let count = state.streams.iter().map(|one| one.lane + 1).max().unwrap_or(0);
        let mut lanes = vec![LaneProgress::default(); count];
        for one in &state.streams {
            let lane = &mut lanes[one.lane];
            lane.bytes += one.sent_bytes();
            lane.streams += u32::from(one.ready && one.failure.is_none());
        }
        lanes
    }

    /// Makes everything sent from now on leave as soon as the windows allow. A congestion control
    /// that paces (BBR) saw small rounds last, and would spread the data at their rate: over tens
    /// of ms on a slow wire.
    pub(crate) fn burst(&self) {
        let state = self.lock();
        state.streams.iter().filter_map(|one| one.stream.as_ref()).for_each(Stream::send_in_bursts);
    }

    /// Returns the bytes handed to the data streams so far, including padding and current units.
    pub(crate) fn handed_bytes(&self) -> u64 {
        self.lock().streams.iter().map(StreamState::sent_bytes).sum()
    }
}
