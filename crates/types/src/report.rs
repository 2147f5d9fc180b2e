//! The report at the end of a migration. The JSON, the log and the terminal use the same keys.

use std::net::{IpAddr, SocketAddr};

use serde::{Deserialize, Serialize};

use crate::bandwidth::BandwidthPoint;
use crate::encoding::EncodingReport;
use crate::engine::EngineKind;
use crate::failure::FailureCode;
use crate::fault::Fault;
use crate::intent::Intent;
use crate::lane::Lane;
use crate::phase::Phase;
use crate::prediction::{Means, Predicted};
use crate::rate::BitRate;

/// How a migration ended, and so where the guest is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub enum Outcome {
    /// The guest runs at the destination.
    Completed,
    /// Nothing moved; the guest runs on at the source.
    Failed,
    /// Somebody cancelled; the guest runs on at the source.
    Cancelled,
    /// The link broke after the commit and the destination did not answer since: the guest is kept
    /// paused at
    /// the source until it is known whether the destination runs it.
    InDoubt,
}

/// One sweep over the guest's memory.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct RoundReport {
    /// 0 is all of memory but what is hot already; the last one runs while the guest stands still.
    pub round: u32,
    /// Pages sent, zero pages included.
    pub pages: u64,
    /// Pages of them that were zero and cost a few bytes a run.
    pub zero_pages: u64,
    /// Bytes on the wire.
    pub bytes: u64,
    /// From the first page looked at to the destination's word that all is applied; to the last
    /// page handed to the wire where
    /// the next round followed at once.
    pub duration_ms: f64,
    /// Pages that the guest dirtied meanwhile, a second.
    pub dirty_pages_per_s: f64,
    /// What its writers were held to meanwhile; none: they were not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub throttled_to_pages_per_s: Option<f64>,
}

/// By what writers are slowed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub enum ThrottleMeans {
    /// Each write to a page that would have to be sent again waits for an answer.
    #[default]
    Faults,
    /// The vCPUs get less CPU time.
    Quota,
}

/// What slowing the guest's writers did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct ThrottleReport {
    /// By what: the quota, where it was used at all; faults may have been before or after.
    #[serde(default)]
    pub means: ThrottleMeans,
    /// Writes that waited for the answer that let them go on; those of no limit count too.
    pub faults: u64,
    /// Pages that were let go by them.
    pub pages: u64,
    /// How long the vCPUs waited, all together.
    pub held_ms: f64,
    /// The least CPU time that a quota left the vCPUs, in percent of what they could take; none
    /// without a quota.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub least_cpu_percent: Option<f64>,
}

/// How the pages came that the guest lacked when it was handed over.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct PageInReport {
    /// Pages that it lacked.
    pub pages: u64,
    /// Pages of them that it came to before they were there.
    pub demanded_pages: u64,
    /// How often the link was cut, or an agent away, meanwhile.
    pub cuts: u64,
    /// From the word of what it will lack to the destination's that all is there.
    pub duration_ms: f64,
    /// How long it waited for such a page.
    pub fetch_ms: FetchTimes,
    /// Those times by their length; classes that nobody waited in are left out.
    #[serde(default)]
    pub waits: Vec<WaitClass>,
}

/// How long a guest waited for pages that it lacked: 0 where it came to none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct FetchTimes {
    /// Half of the times were no longer,
    pub median: f64,
    /// nine of ten,
    pub p90: f64,
    /// ninety-nine of a hundred,
    pub p99: f64,
    /// and the longest.
    pub max: f64,
}

/// Waits of one length.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct WaitClass {
    /// Shorter than this and no shorter than half of it; the first begins at 0, the last has no
    /// end.
    pub below_ms: Option<f64>,
    /// How many.
    pub waits: u64,
}

/// One path between the two hosts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct LaneReport {
    /// The source's address; none: the kernel's choice.
    #[cfg_attr(feature = "schema", schema(value_type = Option<String>))]
    pub from: Option<IpAddr>,
    /// The destination's.
    #[cfg_attr(feature = "schema", schema(value_type = String))]
    pub to: SocketAddr,
    /// Data streams that were open on it.
    pub streams: u32,
    /// Bytes handed to them, headers and padding included.
    pub bytes: u64,
    /// Why streams of it broke or could not be opened. Their work was done by the others.
    pub broken: Vec<String>,
    /// The MTU of its interface, bytes, where packets of that size were found to vanish while small
    /// ones passed; its streams went on
    /// with small ones.
    #[serde(default)]
    pub vanishing_mtu: Option<u32>,
}

impl LaneReport {
    /// Creates the report of a lane that has carried nothing.
    #[must_use]
    pub fn of(lane: Lane) -> LaneReport {
        let Lane { from, to } = lane;
        LaneReport { from, to, streams: 0, bytes: 0, broken: Vec::new(), vanishing_mtu: None }
    }

    /// Returns the lane, in its form for people.
    #[must_use]
    pub fn lane(&self) -> Lane {
        Lane { from: self.from, to: self.to }
    }
}

/// Time spent in one phase, summed over its visits.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct PhaseReport {
    /// The phase.
    pub phase: Phase,
    /// Time in it.
    pub duration_ms: f64,
}

/// A cut of the link, while the guest ran at the source.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct CutReport {
    /// When it was noticed, since the migration's begin.
    pub at_ms: f64,
    /// How long nothing was sent after that.
    pub lasted_ms: f64,
    /// Pages that the destination lacked when it went on, beside what the guest had written
    /// meanwhile.
    pub unsent_pages: u64,
    /// How it was noticed.
    pub why: String,
}

/// The vCPUs' pause, piece by piece. The pieces follow each other and add up to the whole.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct SwitchoverReport {
    /// Guest stopped → last dirty pages handed to the wire (the device state is written
    /// meanwhile).
    pub last_pages_ms: f64,
    /// → the device state's last byte and the commit handed to the wire.
    pub device_state_ms: f64,
    /// → the commit read at the destination (clocks compared by the lane's pings).
    pub flight_ms: f64,
    /// → the device state loaded there.
    pub load_ms: f64,
    /// → the vCPUs run.
    pub resume_ms: f64,
}

impl SwitchoverReport {
    /// Returns the whole pause.
    #[must_use]
    pub fn total_ms(&self) -> f64 {
        self.last_pages_ms + self.device_state_ms + self.flight_ms + self.load_ms + self.resume_ms
    }
}

/// The report of a migration. Times in milliseconds, sizes in bytes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Report {
    /// How it ended.
    pub outcome: Outcome,
    /// Which engine moved it.
    pub engine: EngineKind,
    /// The VM's name.
    pub vm: String,
    /// The source host's name.
    pub from: String,
    /// The destination host's name.
    pub to: String,
    /// From the request to the guest running at the destination and the source let go.
    pub migration_time_ms: f64,
    /// The vCPUs' pause; none where the guest was never stopped.
    pub switchover_ms: Option<f64>,
    /// What the vCPUs' pause was to be at most.
    #[serde(default)]
    pub switchover_budget_ms: Option<f64>,
    /// The longest silence that a client outside saw; none where nobody watches, or nothing moved.
    pub blackout_ms: Option<f64>,
    /// Bytes sent over the wire.
    pub wire_bytes: u64,
    /// The guest's RAM.
    pub guest_bytes: u64,
    /// The limit that held the migration's pages at its end: the least of its own, its lanes' and
    /// its host's.
    #[cfg_attr(feature = "schema", schema(value_type = Option<String>))]
    pub bandwidth_limit: Option<BitRate>,
    /// The shortest round trip that the lane's pings saw.
    pub round_trip_ms: Option<f64>,
    /// What each lane carried; none by QEMU's engine, which has one path.
    #[serde(default)]
    pub lanes: Vec<LaneReport>,
    /// What the pages were sent as; empty where the engine does not tell.
    #[serde(default)]
    pub encodings: Vec<EncodingReport>,
    /// Pages that were told by their content, were not there any more, and were sent after all.
    #[serde(default)]
    pub missing_pages: u64,
    /// What was sent by when, at most [`MOST_POINTS`](crate::MOST_POINTS) points, the last at the
    /// report; empty where nothing was
    /// sent, and in the log's line.
    #[serde(default)]
    pub bandwidth: Vec<BandwidthPoint>,
    /// Every round.
    pub rounds: Vec<RoundReport>,
    /// What slowing the guest's writers did; none where they were not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub throttle: Option<ThrottleReport>,
    /// How the pages came that the guest lacked when it was handed over; none where it lacked none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub page_in: Option<PageInReport>,
    /// What was to matter most; none by QEMU's engine.
    #[serde(default)]
    #[cfg_attr(feature = "schema", schema(value_type = Option<String>))]
    pub policy: Option<Intent>,
    /// By what it came to its switchover, or that it did not converge; none where it ended by
    /// something else, and by QEMU's engine.
    #[serde(default)]
    pub means: Option<Means>,
    /// What was predicted before round 0; none where too little was known.
    #[serde(default)]
    pub predicted: Option<Predicted>,
    /// The cuts of the link after which it went on where it was.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cuts: Vec<CutReport>,
    /// Every phase entered.
    pub phases: Vec<PhaseReport>,
    /// The pause in pieces; none where the engine does not tell them.
    pub switchover: Option<SwitchoverReport>,
    /// Why it did not complete.
    pub error: Option<Fault>,
}

impl Report {
    /// Creates a report of a migration from which nothing has come yet.
    pub fn blank(
        outcome: Outcome,
        vm: impl Into<String>,
        from: impl Into<String>,
        to: impl Into<String>,
    ) -> Report {
        Report {
            outcome,
            engine: EngineKind::Godwit,
            vm: vm.into(),
            from: from.into(),
            to: to.into(),
            migration_time_ms: 0.0,
            switchover_ms: None,
            switchover_budget_ms: None,
            blackout_ms: None,
            wire_bytes: 0,
            guest_bytes: 0,
            bandwidth_limit: None,
            round_trip_ms: None,
            lanes: Vec::new(),
            encodings: Vec::new(),
            missing_pages: 0,
            bandwidth: Vec::new(),
            rounds: Vec::new(),
            throttle: None,
            page_in: None,
            policy: None,
            means: None,
            predicted: None,
            cuts: Vec::new(),
            phases: Vec::new(),
            switchover: None,
            error: None,
        }
    }

    /// Returns whether anything was begun, that is, whether no check refused the migration.
    #[must_use]
    pub fn has_begun(&self) -> bool {
        !self.phases.is_empty() || self.wire_bytes > 0
    }

    /// Returns the means of convergence that the rounds used so far; see [`Report::means`].
    #[must_use]
    pub fn means_of_rounds(&self) -> Option<Means> {
        let code = self.error.as_ref().map(|error| error.code.as_str());
        match self.outcome {
            Outcome::Completed if self.page_in.is_some() => Some(Means::PageIn),
            Outcome::Completed
                if self.rounds.iter().any(|round| round.throttled_to_pages_per_s.is_some()) =>
            {
                Some(Means::Throttle)
            }
            Outcome::Completed => Some(Means::Plain),
            _ if code == Some(FailureCode::NotConverging.name()) => Some(Means::None),
            _ => None,
        }
    }
}
