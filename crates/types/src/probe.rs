//! Output of a probe: progress while it runs, and a report at the end. Times are in milliseconds,
//! sizes in bytes.

use std::fmt;
use std::net::{IpAddr, SocketAddr};

use serde::{Deserialize, Serialize};

use crate::fault::Fault;
use crate::lane::Lane;
use crate::rate::BitRate;

/// Numbers of streams with which throughput is measured.
pub const STREAM_COUNTS: [u32; 4] = [1, 2, 4, 8];

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ProbeStage {
    Connect,
    /// Timing round trips of a small message.
    RoundTrip,
    /// Searching the largest packets that pass.
    Mtu,
    /// Measuring throughput on one lane.
    Throughput,
    /// Measuring throughput on all lanes at once.
    Together,
}

impl fmt::Display for ProbeStage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ProbeStage::Connect => "connection set-up",
            ProbeStage::RoundTrip => "round trip",
            ProbeStage::Mtu => "MTU",
            ProbeStage::Throughput => "throughput",
            ProbeStage::Together => "throughput of all lanes together",
        })
    }
}

/// Progress of a running probe.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ProbeProgress {
    /// The lane, as `from → to`; `None` if all are used.
    pub lane: Option<String>,
    /// The lane's number, from 1.
    pub number: usize,
    pub lanes: usize,
    /// What is being measured.
    pub stage: ProbeStage,
    /// Number of streams (of each lane), if the stage measures throughput.
    pub streams: Option<u32>,
    /// Time since the request.
    pub elapsed_ms: f64,
}

/// Counters of a host's CPUs at one moment; two readings make a [`CpuUse`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CpuReading {
    /// Time of the reading, ns of the probe's clock on that host.
    pub at_ns: u64,
    /// CPU time of the threads that carry the probe's streams, since the probe began, ns.
    pub threads_ns: u64,
    /// CPU time of all cores that was not idle, since the host booted, ns.
    pub busy_ns: u64,
    /// Number of the host's cores.
    pub cores: u32,
}

/// CPU use of one of the hosts during a measurement.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct CpuUse {
    /// Number of cores that the streams' threads kept busy.
    pub threads_cores: f64,
    /// Load of the host's cores by all programs, 0 to 1.
    pub host_share: f64,
    /// Number of the host's cores.
    pub cores: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct ThroughputRun {
    /// Number of TCP streams of each lane.
    pub streams: u32,
    /// Rate at which the destination took the data, by its own clock.
    pub bytes_per_s: f64,
    /// CPU use of the source.
    pub source: CpuUse,
    /// CPU use of the destination.
    pub destination: CpuUse,
}

/// Round trips of a small message on an idle stream ("hot potato").
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct RoundTrips {
    /// The shortest round trip.
    pub least_ms: f64,
    /// The median round trip.
    pub median_ms: f64,
    /// Number of round trips.
    pub count: u32,
}

/// Size of packets on a lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MtuProbe {
    /// MTU of the source's interface, bytes; `None` if unknown.
    pub interface: Option<u32>,
    /// Largest IP packets that arrive, bytes; `None` if not found.
    pub passes: Option<u32>,
    /// Whether larger packets are lost without a report: a stream connects, and stalls as soon as
    /// it sends full-size segments.
    pub black_hole: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Limit {
    /// The wire is full: more streams carry no more.
    Wire,
    /// Each stream is limited, by the network or by its window: throughput grows with the number of
    /// streams.
    FlowCap,
    /// The source's CPUs are used up.
    SourceCpu,
    /// The destination's CPUs are used up.
    DestinationCpu,
    /// Full-size packets do not arrive: a migration would stall.
    Mtu,
    /// The figures fit none of these.
    Unclear,
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Limit::Wire => "wire",
            Limit::FlowCap => "flow cap",
            Limit::SourceCpu => "source's CPU",
            Limit::DestinationCpu => "destination's CPU",
            Limit::Mtu => "MTU",
            Limit::Unclear => "unclear",
        })
    }
}

/// Results for one lane. Values that could not be measured are `None`; `failure` gives the reason.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LaneProbe {
    /// The source's address; `None` if the kernel was to choose it and the lane could not be
    /// connected.
    pub from: Option<IpAddr>,
    /// The destination's address; the port is the probe's own.
    pub to: SocketAddr,
    /// Median set-up time of a TCP connection.
    pub connect_ms: Option<f64>,
    /// Median time of the TLS handshake after it; `None` if streams are unencrypted.
    pub secure_ms: Option<f64>,
    /// Round trips of a small message.
    pub round_trip: Option<RoundTrips>,
    /// Packet sizes.
    pub mtu: Option<MtuProbe>,
    /// Throughput by the number of streams, the fewest first.
    pub throughput: Vec<ThroughputRun>,
    pub limit: Option<Limit>,
    /// Why the lane, or the rest of it, could not be measured.
    pub failure: Option<Fault>,
}

impl LaneProbe {
    /// Creates the result for a lane of which nothing has been measured.
    #[must_use]
    pub fn of(lane: Lane) -> LaneProbe {
        LaneProbe {
            from: lane.from,
            to: lane.to,
            connect_ms: None,
            secure_ms: None,
            round_trip: None,
            mtu: None,
            throughput: Vec::new(),
            limit: None,
            failure: None,
        }
    }

    /// Returns whether the lane was measured completely and a migration would not stall on it.
    #[must_use]
    pub fn is_usable(&self) -> bool {
        self.failure.is_none() && self.limit != Some(Limit::Mtu)
    }
}

/// Estimated time for transferring the memory of an idle VM without zero pages. The guest's own
/// writes, and the phases before and after the memory, add to it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct MoveEstimate {
    /// Size of the VM's memory, bytes.
    pub guest_bytes: u64,
    /// Default number of streams of each lane in a migration.
    pub streams: u32,
    /// Throughput with the default number.
    pub bytes_per_s: f64,
    /// Time with the default number.
    pub migration_time_ms: f64,
    /// The fewest streams that reach 90 % of the highest throughput.
    pub best_streams: u32,
    pub best_migration_time_ms: f64,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ProbeReport {
    /// Name of the source host.
    pub from: String,
    /// Name of the destination host.
    pub to: String,
    /// Whether the streams went over TLS.
    pub encrypted: bool,
    /// All lanes, one by one.
    pub lanes: Vec<LaneProbe>,
    /// All lanes at once, as a migration uses them; empty if only one is usable.
    pub together: Vec<ThroughputRun>,
    /// Why some or all of them could not be measured together.
    #[serde(default)]
    pub together_failure: Option<Fault>,
    /// The bandwidth limit that would apply to a migration without a limit of its own. The probe
    /// itself observes no limit.
    #[serde(default)]
    pub bandwidth_limit: Option<BitRate>,
    pub limit: Option<Limit>,
    /// Estimated duration of a migration; `None` if no lane carries one.
    pub estimate: Option<MoveEstimate>,
    pub probe_time_ms: f64,
}
