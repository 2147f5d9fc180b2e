//! What a probe tells: progress while it runs, a report when it is over. Times in milliseconds, sizes in bytes.

use std::fmt;
use std::net::{IpAddr, SocketAddr};

use godwit_lanes::BitRate;
use serde::{Deserialize, Serialize};

use crate::report::FailureReport;

/// What a probe is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ProbeStage {
    /// Setting streams up.
    Connect,
    /// Throwing a small message back and forth.
    RoundTrip,
    /// Looking for the largest packets that pass.
    Mtu,
    /// Sending as much as goes, on one lane.
    Throughput,
    /// The same on all lanes at once.
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

/// Where a running probe is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ProbeProgress {
    /// The lane, as `from → to`; none where all are used.
    pub lane: Option<String>,
    /// Its number, from 1.
    pub number: usize,
    /// How many lanes there are.
    pub lanes: usize,
    /// What is measured.
    pub stage: ProbeStage,
    /// With how many streams (of each lane), where that is what is measured.
    pub streams: Option<u32>,
    /// Time since the request.
    pub elapsed_ms: f64,
}

/// Counters of a host's CPUs at one moment; two readings make a [`CpuUse`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CpuReading {
    /// When, ns of the probe's clock on that host.
    pub at_ns: u64,
    /// CPU time of the threads that carry the probe's streams, since its begin, ns.
    pub threads_ns: u64,
    /// CPU time of all cores that was not idle, since the host's begin, ns.
    pub busy_ns: u64,
    /// The host's cores.
    pub cores: u32,
}

/// What a measurement cost one of the hosts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct CpuUse {
    /// Cores that the streams' threads kept busy.
    pub threads_cores: f64,
    /// How busy the host's cores were with everything, 0 to 1.
    pub host_share: f64,
    /// The host's cores.
    pub cores: u32,
}

/// One measurement of throughput.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct ThroughputRun {
    /// TCP streams, of each lane.
    pub streams: u32,
    /// What the destination took, by its own clock.
    pub bytes_per_s: f64,
    /// What it cost the source.
    pub source: CpuUse,
    /// What it cost the destination.
    pub destination: CpuUse,
}

/// Round trips of a small message on an idle stream ("hot potato").
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct RoundTrips {
    /// The shortest.
    pub least_ms: f64,
    /// The one in the middle.
    pub median_ms: f64,
    /// How many there were.
    pub count: u32,
}

/// How large packets may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MtuProbe {
    /// The MTU of the source's interface, bytes; none where it is not known.
    pub interface: Option<u32>,
    /// The largest IP packets that arrive, bytes; none where that could not be found.
    pub passes: Option<u32>,
    /// Larger packets vanish without a word: a stream sets up and then stalls as soon as it sends full-size segments.
    pub black_hole: bool,
}

/// What keeps throughput from being higher.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Limit {
    /// More streams bring no more: the wire is full.
    Wire,
    /// Throughput grows with the number of streams: each is held back, by the network or by its window.
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

/// What was found of one lane. What could not be measured is none; `failure` says why.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LaneProbe {
    /// The source's address; none where the kernel was to choose and the lane could not be connected.
    pub from: Option<IpAddr>,
    /// The destination's address; the port is the probe's own.
    pub to: SocketAddr,
    /// Set-up of a TCP connection, median.
    pub connect_ms: Option<f64>,
    /// The TLS handshake on top of it, median; none where streams go in the clear.
    pub secure_ms: Option<f64>,
    /// Round trips.
    pub round_trip: Option<RoundTrips>,
    /// Packet sizes.
    pub mtu: Option<MtuProbe>,
    /// Throughput by the number of streams, the fewest first.
    pub throughput: Vec<ThroughputRun>,
    /// What limits it.
    pub limit: Option<Limit>,
    /// Why it, or the rest of it, could not be measured.
    pub failure: Option<FailureReport>,
}

/// How long the memory of a VM will take: an idle one, of whose pages none is zero. The guest's own writes, and what comes
/// before and after the memory, add to it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct MoveEstimate {
    /// The VM's memory.
    pub guest_bytes: u64,
    /// Streams of each lane that a migration uses unless told otherwise.
    pub streams: u32,
    /// Throughput with these.
    pub bytes_per_s: f64,
    /// Time with these.
    pub migration_time_ms: f64,
    /// The fewest streams that come within 10 % of the highest throughput.
    pub best_streams: u32,
    /// Time with those.
    pub best_migration_time_ms: f64,
}

/// The report of a probe.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ProbeReport {
    /// The source host's name.
    pub from: String,
    /// The destination host's name.
    pub to: String,
    /// Whether the streams went by TLS.
    pub encrypted: bool,
    /// Every lane.
    pub lanes: Vec<LaneProbe>,
    /// All lanes at once, as a migration uses them; empty where only one can be used.
    pub together: Vec<ThroughputRun>,
    /// Why they, or some of them, could not be measured together.
    #[serde(default)]
    pub together_failure: Option<FailureReport>,
    /// The limit of bandwidth that would hold a migration which names none. The probe keeps to no limit.
    #[serde(default)]
    pub bandwidth_limit: Option<BitRate>,
    /// What limits a migration.
    pub limit: Option<Limit>,
    /// What a migration will take; none where no lane carries one.
    pub estimate: Option<MoveEstimate>,
    /// How long the probe took.
    pub probe_time_ms: f64,
}
