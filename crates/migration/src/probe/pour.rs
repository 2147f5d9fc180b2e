//! Throughput: streams send as much as possible, and their answers give the rate.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use godwit_lanes::{Incoming, LaneError, StreamReceiver};
use godwit_types::Lane;
use godwit_wire::{MAX_PADDING, Message};

use super::cpu::{self, CpuMeter};
use super::measure::{Opened, Prober};
use crate::clock::PeerClock;
use crate::drive::lane_failure;
use crate::failure::Failure;
use godwit_types::probe::{CpuReading, ThroughputRun};

/// Time in which windows open and congestion controls find their rate; not counted.
const WARM_UP: Duration = Duration::from_millis(300);
/// Round trips added to [`WARM_UP`]: a window doubles in each.
const WARM_UP_ROUND_TRIPS: u32 = 10;
/// Bytes of the first frames: on a slow wire several must arrive within a measurement.
const LEAST_FRAME: u32 = 16 * 1024;
/// Bytes of the largest frames; larger ones save nothing.
const MOST_FRAME: u32 = 512 * 1024;
const _: () = assert!(MOST_FRAME <= MAX_PADDING);
/// Time for a frame to arrive, once the stream's rate is known; a ping follows each frame.
const FRAME_TIME: Duration = Duration::from_millis(5);
/// Time after which a rate is known: data that fits into buffers goes at another rate.
const RATE_TIME: Duration = Duration::from_millis(20);
/// Longest time that a stream may accept nothing.
const STALL_LIMIT: Duration = Duration::from_secs(5);

/// Bytes of a stream that had been taken at a time of the destination's clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Sample {
    at_ns: u64,
    bytes: u64,
}

impl Prober<'_> {
    /// Measures the throughput of `lanes` together, with `streams` streams each.
    pub(super) fn throughput(
        &self,
        lanes: &[Lane],
        streams: u32,
        clock: &PeerClock,
    ) -> Result<ThroughputRun, Failure> {
        let each = usize::try_from(streams).unwrap_or(usize::MAX);
        let opened = (0..each)
            .flat_map(|_| lanes)
            .map(|lane| self.open(*lane, None, STALL_LIMIT))
            .collect::<Result<Vec<_>, _>>()?;
        let handles: Vec<_> = opened.iter().map(|opened| opened.stream.clone()).collect();
        let (meter, stop) = (CpuMeter::new(self.begun), AtomicBool::new(false));
        let (readings, poured) = std::thread::scope(|scope| {
            let (meter, stop) = (&meter, &stop);
            let pouring: Vec<_> = opened
                .into_iter()
                .map(|opened| scope.spawn(move || pour(opened, meter, stop)))
                .collect();
            let readings = self.let_it_run(meter, clock);
            stop.store(true, Ordering::Relaxed);
            // Ends the wait of threads for room to send.
            handles.iter().for_each(godwit_lanes::Stream::close);
            let poured: Vec<_> =
                pouring.into_iter().map(std::thread::ScopedJoinHandle::join).collect();
            (readings, poured)
        });
        // Data in queues must not be waited for.
        drop(handles);
        let (before, after) = readings?;
        let to_peer_ns = |reading: &CpuReading| clock.to_peer_ns(reading.at_ns).unwrap_or_default();
        let (from_ns, to_ns) = (to_peer_ns(&before), to_peer_ns(&after));
        let mut bytes_per_s = 0.0;
        for samples in poured {
            let panicked = |_| {
                Failure::new(crate::failure::FailureCode::Internal, "a stream's thread panicked")
            };
            let samples = samples.map_err(panicked)?.map_err(|error| lane_failure(&error))?;
            bytes_per_s += rate(&samples, from_ns, to_ns);
        }
        let theirs = (self.job.readings)(from_ns.saturating_sub(crate::nanos(WARM_UP)))?;
        Ok(ThroughputRun {
            streams,
            bytes_per_s,
            source: cpu::used(&before, &after),
            destination: cpu::around(&theirs, from_ns, to_ns),
        })
    }

    /// Lets the streams run. Returns readings of this host's CPUs at the start and at the end of
    /// the time that counts.
    fn let_it_run(
        &self,
        meter: &CpuMeter,
        clock: &PeerClock,
    ) -> Result<(CpuReading, CpuReading), Failure> {
        let round_trips = clock.round_trip().unwrap_or_default() * WARM_UP_ROUND_TRIPS;
        self.job.cancel.wait(WARM_UP + round_trips.min(WARM_UP * WARM_UP_ROUND_TRIPS))?;
        let before = meter.read();
        self.job.cancel.wait(self.job.plan.time)?;
        Ok((before, meter.read()))
    }
}

/// Sends until it is stopped, or until the stream breaks, which is an error only before that.
fn pour(mut opened: Opened, meter: &CpuMeter, stop: &AtomicBool) -> Result<Vec<Sample>, LaneError> {
    let mut pouring = Pouring::default();
    let mut thread = meter.thread();
    let outcome = loop {
        if stop.load(Ordering::Relaxed) {
            break Ok(());
        }
        if let Err(error) = pouring.next(&mut opened) {
            break Err(error);
        }
        thread.count();
    };
    match outcome {
        Err(error) if !stop.load(Ordering::Relaxed) => Err(error),
        _ => {
            // Answers received are still there to be read; the end of the stream is not an error.
            let _ = pouring.read_answers(&mut opened.receiver);
            Ok(pouring.samples)
        }
    }
}

/// Sending state of one stream.
#[derive(Debug, Default)]
struct Pouring {
    sent_bytes: u64,
    /// Bytes sent before each ping that has not been answered.
    waiting: VecDeque<u64>,
    samples: Vec<Sample>,
}

impl Pouring {
    /// Sends a frame, followed by a ping.
    fn next(&mut self, opened: &mut Opened) -> Result<(), LaneError> {
        let frame = frame_bytes(&self.samples);
        opened.sender.send(&Message::Padding { bytes: frame })?;
        opened.sender.send(&Message::Ping { sent_ns: 0 })?;
        self.sent_bytes += u64::from(frame);
        self.waiting.push_back(self.sent_bytes);
        self.read_answers(&mut opened.receiver)
    }

    /// Takes the answers that have arrived. They come in the pings' order.
    fn read_answers(&mut self, receiver: &mut StreamReceiver) -> Result<(), LaneError> {
        while !receiver.is_idle() {
            let Incoming::Message(message) = receiver.receive()? else {
                return Err(LaneError::Unexpected(godwit_wire::Kind::Pages));
            };
            let Message::Pong { answered_ns: at_ns, .. } = message else {
                return Err(LaneError::Unexpected(message.kind()));
            };
            let Some(bytes) = self.waiting.pop_front() else {
                return Err(LaneError::Unexpected(godwit_wire::Kind::Pong));
            };
            self.samples.push(Sample { at_ns, bytes });
        }
        Ok(())
    }
}

/// Returns the size of the next frame, from what has been taken so far: data that is only in
/// buffers says nothing about the wire.
fn frame_bytes(samples: &[Sample]) -> u32 {
    let (Some(first), Some(last)) = (samples.first(), samples.last()) else { return LEAST_FRAME };
    let time_ns = u128::from(last.at_ns.saturating_sub(first.at_ns));
    if time_ns < RATE_TIME.as_nanos() {
        return LEAST_FRAME;
    }
    let bytes =
        u128::from(last.bytes.saturating_sub(first.bytes)) * FRAME_TIME.as_nanos() / time_ns;
    u32::try_from(bytes).unwrap_or(MOST_FRAME).clamp(LEAST_FRAME, MOST_FRAME)
}

/// Returns the bytes per second that were taken between two times. Between two samples the stream
/// is assumed to run evenly. Times come from a peer: samples that run backwards do not count.
#[expect(clippy::cast_precision_loss, reason = "three digits count")]
fn rate(samples: &[Sample], from_ns: u64, to_ns: u64) -> f64 {
    let time_ns = to_ns.saturating_sub(from_ns) as f64;
    let bytes = taken_at(samples, to_ns) - taken_at(samples, from_ns);
    if time_ns > 0.0 { (bytes / time_ns * 1e9).max(0.0) } else { 0.0 }
}

#[expect(clippy::cast_precision_loss, reason = "three digits count")]
fn taken_at(samples: &[Sample], at_ns: u64) -> f64 {
    let after = samples.partition_point(|sample| sample.at_ns <= at_ns);
    let before = after.checked_sub(1).and_then(|before| samples.get(before));
    match (before, samples.get(after)) {
        (Some(before), Some(after)) => {
            let part = at_ns.saturating_sub(before.at_ns) as f64
                / after.at_ns.saturating_sub(before.at_ns).max(1) as f64;
            before.bytes as f64
                + part.clamp(0.0, 1.0) * after.bytes.saturating_sub(before.bytes) as f64
        }
        // Before the first and after the last answer, no movement is known.
        (Some(last), None) => last.bytes as f64,
        (None, Some(first)) => first.bytes as f64,
        (None, None) => 0.0,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn even(every_ns: u64, bytes: u64, count: u64) -> Vec<Sample> {
        (1..=count).map(|n| Sample { at_ns: n * every_ns, bytes: n * bytes }).collect()
    }

    #[test]
    fn the_rate_is_that_of_the_time_asked_for() {
        // 1000 bytes in 1 ms: 1 MB/s, whatever part is examined.
        let samples = even(1_000_000, 1000, 100);
        for (from, to) in [(10, 90), (5, 6), (33, 34)] {
            let measured = rate(&samples, from * 1_000_000 + 300_000, to * 1_000_000 + 300_000);
            assert!((measured - 1e6).abs() < 1.0, "{measured}");
        }
        // A stream that stalled halfway carried half.
        let measured = rate(&samples[..50], 0, 100_000_000);
        assert!((measured - 0.49e6).abs() < 1.0, "{measured}");
    }

    #[test]
    fn frames_fit_the_rate_at_which_they_are_taken() {
        assert_eq!(frame_bytes(&[]), LEAST_FRAME);
        // 100 MB/s: 500 kB in 5 ms. Known after 20 ms.
        assert_eq!(frame_bytes(&even(1_000_000, 100_000, 20)), LEAST_FRAME);
        assert_eq!(frame_bytes(&even(1_000_000, 100_000, 30)), 500_000);
        assert_eq!(frame_bytes(&even(1_000_000, 1000, 100)), LEAST_FRAME);
        assert_eq!(frame_bytes(&even(1_000_000, u64::from(u32::MAX), 100)), MOST_FRAME);
    }

    #[test]
    fn without_answers_there_is_no_rate() {
        assert_eq!(rate(&[], 0, 1_000_000_000).to_bits(), 0.0_f64.to_bits());
        assert_eq!(rate(&even(10, 10, 1), 0, 1_000_000_000).to_bits(), 0.0_f64.to_bits());
        assert_eq!(rate(&even(10, 10, 9), 50, 50).to_bits(), 0.0_f64.to_bits());
    }

    proptest! {
        #[test]
        fn any_clock_of_a_peer_gives_a_valid_rate(
            times in prop::collection::vec(any::<u64>(), 0..20),
            from in any::<u64>(),
            to in any::<u64>(),
        ) {
            let samples: Vec<_> =
                (0..).zip(times).map(|(n, at_ns)| Sample { at_ns, bytes: n * 1000 }).collect();
            let measured = rate(&samples, from, to);
            prop_assert!(measured.is_finite() && measured >= 0.0);
        }
    }
}
