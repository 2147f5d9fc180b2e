//! The source's side of a probe: it measures, lane by lane, the conditions for a migration.

use std::net::IpAddr;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant};

use godwit_lanes::{
    CONNECT_LIMIT, Incoming, LaneError, SAFE_SEGMENT_BYTES, Stream, StreamReceiver, StreamSender,
    connect, connect_sized,
};
use godwit_types::Lane;
use godwit_wire::{Message, MigrationId, SUPPORTED};

use super::Cancel;
use super::judge::{estimate, limit_of};
use crate::clock::PeerClock;
use crate::drive::{Hello, lane_failure, say_hello};
use crate::failure::{Failure, FailureCode};
use crate::report::{millis, nanos};
use crate::scaler::first_streams;
use godwit_types::{
    Fault,
    probe::{
        CpuReading, LaneProbe, Limit, MoveEstimate, ProbeProgress, ProbeStage, RoundTrips,
        STREAM_COUNTS, ThroughputRun,
    },
};

/// Time limit for an answer on an idle stream.
const ANSWER_LIMIT: Duration = Duration::from_secs(3);
/// Number of connections that are timed.
const SET_UPS: usize = 5;
/// Number of round trips that are timed, unless they exceed [`ROUND_TRIP_LIMIT`] together.
const ROUND_TRIPS: usize = 50;
/// Number of round trips in a brief probe.
const BRIEF_ROUND_TRIPS: usize = 10;
/// Time limit for all round trips together; see [`ROUND_TRIPS`].
const ROUND_TRIP_LIMIT: Duration = Duration::from_secs(1);

#[derive(Clone, Copy, Debug)]
pub struct ProbePlan {
    /// Duration of each throughput measurement.
    pub time: Duration,
    /// Memory of the VM to be moved, bytes.
    pub guest_bytes: u64,
    /// Default number of streams of each lane in a migration.
    pub usual_streams: u32,
    pub extent: ProbeExtent,
}

/// Extent of a probe's measurements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProbeExtent {
    /// Everything that can be measured of each lane.
    Full,
    /// What a prediction needs: round trips, and what all lanes carry together with the usual
    /// number of streams and with many.
    Brief,
    /// As [`ProbeExtent::Brief`], with so many streams of each lane.
    Fixed(u32),
}

/// Everything that a probe needs. Its callbacks may block.
pub struct ProbeJob<'a> {
    /// The lanes to the destination.
    pub lanes: Vec<Lane>,
    /// ID issued by the destination.
    pub id: MigrationId,
    /// Parameters.
    pub plan: ProbePlan,
    /// Makes a stream secure; `None`: streams are unencrypted.
    pub secure: Option<&'a (dyn Fn(Stream) -> Result<Stream, LaneError> + Sync)>,
    /// Returns the MTU of the interface that has an address of this host, if known.
    pub interface_mtu: &'a (dyn Fn(IpAddr) -> Option<u32> + Sync),
    /// Returns how busy the destination was since that time of its clock.
    pub readings: &'a (dyn Fn(u64) -> Result<Vec<CpuReading>, Failure> + Sync),
    pub progress: &'a (dyn Fn(ProbeProgress) + Sync),
    /// Ends the probe.
    pub cancel: &'a Cancel,
}

/// Results of a probe and their interpretation.
#[derive(Clone, Debug)]
pub struct Findings {
    /// All lanes, one by one.
    pub lanes: Vec<LaneProbe>,
    /// All lanes at once; empty if only one is usable.
    pub together: Vec<ThroughputRun>,
    /// Why some or all of them could not be measured together.
    pub together_failure: Option<Fault>,
    pub limit: Option<Limit>,
    /// Estimated duration of a migration.
    pub estimate: Option<MoveEstimate>,
}

/// Probes all lanes, one after another and then together. A lane that fails is reported, and the
/// others are measured.
///
/// # Errors
/// The probe was ended, here or at the destination, or the destination has no protocol version in
/// common.
pub fn probe(job: &ProbeJob<'_>) -> Result<Findings, Failure> {
    let prober = Prober { job, begun: Instant::now(), streams: AtomicU16::new(0) };
    let (mut lanes, mut clock) = (Vec::new(), PeerClock::default());
    for (place, lane) in job.lanes.iter().enumerate() {
        let mut found = LaneProbe::of(*lane);
        match prober.lane(place, *lane, &mut found) {
            Ok(compared) => clock = compared,
            Err(failure) if ends_all(&failure) => return Err(failure),
            Err(failure) => found.failure = Some(lane_report(&failure)),
        }
        lanes.push(found);
    }
    let usable: Vec<Lane> = job
        .lanes
        .iter()
        .zip(&lanes)
        .filter(|(_, found)| found.is_usable())
        .map(|(lane, _)| *lane)
        .collect();
    let (mut together, mut together_failure) = (Vec::new(), None);
    if usable.len() > 1 || (prober.is_brief() && !usable.is_empty()) {
        match prober.together(&usable, &clock, &mut together) {
            Ok(()) => {}
            Err(failure) if ends_all(&failure) => return Err(failure),
            // What the lanes carry one by one is known nevertheless.
            Err(failure) => together_failure = Some(lane_report(&failure)),
        }
    }
    let runs = match lanes.iter().find(|found| found.is_usable()) {
        Some(only) if together.is_empty() => &only.throughput,
        _ => &together,
    };
    let limit = limit_of(runs).or_else(|| lanes.iter().find_map(|found| found.limit));
    let estimate = estimate(job.plan.guest_bytes, job.plan.usual_streams, runs);
    Ok(Findings { limit, estimate, together, together_failure, lanes })
}

/// Returns whether a failure concerns more than one lane.
fn ends_all(failure: &Failure) -> bool {
    use FailureCode::{Cancelled, Internal, UnknownMigration, VersionMismatch};
    [Cancelled, Internal, UnknownMigration, VersionMismatch].contains(&failure.code)
}

fn lane_report(failure: &Failure) -> Fault {
    let remedy = "check the network between the two addresses; a migration leaves out a lane \
        that can't be connected";
    Fault { remedy: remedy.to_owned(), ..failure.to_fault() }
}

/// Connected and welcomed stream.
pub(super) struct Opened {
    pub(super) stream: Stream,
    pub(super) sender: StreamSender,
    pub(super) receiver: StreamReceiver,
    /// Duration of the TCP set-up.
    connect: Duration,
    /// Duration of the TLS handshake.
    secure: Option<Duration>,
}

pub(super) struct Prober<'a> {
    pub(super) job: &'a ProbeJob<'a>,
    pub(super) begun: Instant,
    /// Number of streams so far.
    streams: AtomicU16,
}

impl Prober<'_> {
    fn lane(&self, place: usize, lane: Lane, found: &mut LaneProbe) -> Result<PeerClock, Failure> {
        let report = |stage, streams| self.report(Some((place, lane)), stage, streams);
        report(ProbeStage::Connect, None);
        let mut small = self.set_up(lane, found)?;
        report(ProbeStage::RoundTrip, None);
        let clock = self.round_trips(&mut small, found)?;
        report(ProbeStage::Mtu, None);
        let mtu = self.mtu(lane, &small, clock.round_trip().unwrap_or_default())?;
        drop(small);
        found.mtu = Some(mtu);
        if mtu.black_hole {
            found.limit = Some(Limit::Mtu);
            return Ok(clock);
        }
        if self.is_brief() {
            return Ok(clock);
        }
        for streams in STREAM_COUNTS {
            report(ProbeStage::Throughput, Some(streams));
            found.throughput.push(self.throughput(&[lane], streams, &clock)?);
        }
        found.limit = limit_of(&found.throughput);
        Ok(clock)
    }

    /// Measures all lanes at once: with the usual number of streams, and with many.
    fn together(
        &self,
        lanes: &[Lane],
        clock: &PeerClock,
        runs: &mut Vec<ThroughputRun>,
    ) -> Result<(), Failure> {
        let most = STREAM_COUNTS.iter().copied().max().unwrap_or(1);
        let usual = match self.job.plan.extent {
            ProbeExtent::Full => self.job.plan.usual_streams,
            ProbeExtent::Brief => {
                u32::try_from(first_streams(clock.round_trip().unwrap_or_default())).unwrap_or(most)
            }
            ProbeExtent::Fixed(streams) => {
                self.report(None, ProbeStage::Together, Some(streams));
                runs.push(self.throughput(lanes, streams, clock)?);
                return Ok(());
            }
        };
        for streams in [usual.clamp(1, most), most] {
            self.report(None, ProbeStage::Together, Some(streams));
            runs.push(self.throughput(lanes, streams, clock)?);
        }
        Ok(())
    }

    fn is_brief(&self) -> bool {
        self.job.plan.extent != ProbeExtent::Full
    }

    fn report(&self, lane: Option<(usize, Lane)>, stage: ProbeStage, streams: Option<u32>) {
        let lanes = self.job.lanes.len();
        (self.job.progress)(ProbeProgress {
            lane: lane.map(|(_, lane)| lane.to_string()),
            number: lane.map_or(lanes, |(place, _)| place + 1),
            lanes,
            stage,
            streams,
            elapsed_ms: millis(self.begun.elapsed()),
        });
    }

    /// Opens a stream. Its segments are as large as the path permits, unless `segment_bytes` is
    /// given. No operation on it may take longer than `limit`, except connecting.
    pub(super) fn open(
        &self,
        lane: Lane,
        segment_bytes: Option<u32>,
        limit: Duration,
    ) -> Result<Opened, Failure> {
        self.job.cancel.check()?;
        let begun = Instant::now();
        let connected = match segment_bytes {
            Some(bytes) => connect_sized(lane, CONNECT_LIMIT, bytes),
            None => connect(lane, CONNECT_LIMIT),
        };
        let stream = connected.map_err(|error| lane_failure(&error))?;
        let connect = begun.elapsed();
        let limited = stream.limit_waiting(limit).and_then(|()| stream.forget_unsent());
        limited.map_err(|error| lane_failure(&error))?;
        let begun = Instant::now();
        let (stream, secure) = match self.job.secure {
            Some(secure) => {
                (secure(stream).map_err(|error| lane_failure(&error))?, Some(begun.elapsed()))
            }
            None => (stream, None),
        };
        let (mut sender, mut receiver) = (stream.sender(), stream.receiver());
        let number = self.streams.fetch_add(1, Ordering::Relaxed);
        let hello = Hello { migration: self.job.id, stream: number, versions: SUPPORTED };
        say_hello(&mut sender, &mut receiver, hello)?;
        Ok(Opened { stream, sender, receiver, connect, secure })
    }

    /// Times the set-up of several streams and keeps the last one.
    fn set_up(&self, lane: Lane, found: &mut LaneProbe) -> Result<Opened, Failure> {
        let mut last = self.open(lane, Some(SAFE_SEGMENT_BYTES), ANSWER_LIMIT)?;
        let (mut connects, mut secures) = (vec![last.connect], Vec::from_iter(last.secure));
        let set_ups = if self.is_brief() { 1 } else { SET_UPS };
        for _ in 1..set_ups {
            last = self.open(lane, Some(SAFE_SEGMENT_BYTES), ANSWER_LIMIT)?;
            connects.push(last.connect);
            secures.extend(last.secure);
        }
        found.from = Some(last.stream.local().map_err(|error| lane_failure(&error))?.ip());
        found.connect_ms = median(&mut connects).map(millis);
        found.secure_ms = median(&mut secures).map(millis);
        Ok(last)
    }

    /// Times round trips of a small message.
    fn round_trips(
        &self,
        opened: &mut Opened,
        found: &mut LaneProbe,
    ) -> Result<PeerClock, Failure> {
        let (mut clock, mut times) = (PeerClock::default(), Vec::new());
        let now_ns = || nanos(self.begun.elapsed());
        let until = Instant::now() + ROUND_TRIP_LIMIT;
        let count = if self.is_brief() { BRIEF_ROUND_TRIPS } else { ROUND_TRIPS };
        while times.is_empty() || (times.len() < count && Instant::now() < until) {
            self.job.cancel.check()?;
            let sent_ns = now_ns();
            opened.sender.send(&Message::Ping { sent_ns }).map_err(|error| lane_failure(&error))?;
            match opened.receiver.receive().map_err(|error| lane_failure(&error))? {
                Incoming::Message(Message::Pong { sent_ns: echoed, answered_ns })
                    if echoed == sent_ns =>
                {
                    let received_ns = now_ns();
                    clock.pong(sent_ns, answered_ns, received_ns);
                    times.push(Duration::from_nanos(received_ns - sent_ns));
                }
                _ => {
                    let detail = "the destination answers a ping with something else";
                    return Err(Failure::new(FailureCode::ProtocolBroken, detail));
                }
            }
        }
        let count = u32::try_from(times.len()).unwrap_or(u32::MAX);
        if let (Some(least), Some(median)) = (times.iter().min().copied(), median(&mut times)) {
            found.round_trip =
                Some(RoundTrips { least_ms: millis(least), median_ms: millis(median), count });
        }
        Ok(clock)
    }
}

fn median(times: &mut [Duration]) -> Option<Duration> {
    times.sort_unstable();
    times.get(times.len() / 2).copied()
}
