//! The report at the end of a migration. The JSON, the log and the terminal use the same keys.

use std::net::{IpAddr, SocketAddr};

use serde::{Deserialize, Serialize};

use crate::bandwidth::BandwidthPoint;
use crate::disks::DisksReport;
use crate::encoding::{EncodingReport, ReferencedPages};
use crate::engine::EngineKind;
use crate::failure::FailureCode;
use crate::fault::Fault;
use crate::intent::Intent;
use crate::lane::Lane;
use crate::phase::Phase;
use crate::prediction::{Means, Predicted};
use crate::rate::BitRate;
use crate::tracking::TrackingReport;

/// How a migration ended, and so where the guest is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub enum Outcome {
    /// The guest runs at the destination.
    Completed,
    /// Nothing moved; the guest runs on at the source.
    Failed,
    /// The migration was cancelled; the guest runs on at the source.
    Cancelled,
    /// The link broke after the commit, and the destination has not answered since. The guest is
    /// kept paused at the source until it is known whether the destination runs it.
    InDoubt,
}

/// Round of pre-copy: one pass over the guest's memory.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct RoundReport {
    /// Number of the round. Round 0 sends all memory except pages that are hot already; the last
    /// round runs while the guest is paused.
    pub round: u32,
    /// Number of pages sent, including zero pages.
    pub pages: u64,
    /// Number of zero pages among them; a run of zero pages costs a few bytes.
    pub zero_pages: u64,
    /// Bytes on the wire.
    pub bytes: u64,
    /// Time from the first page until the destination has applied all; until the last page was
    /// handed to the wire if the next round followed at once.
    pub duration_ms: f64,
    /// Rate at which the guest dirtied pages during the round.
    pub dirty_pages_per_s: f64,
    /// Limit of the guest's writers during the round; absent if they were not throttled.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub throttled_to_pages_per_s: Option<f64>,
}

/// Means of throttling writers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub enum ThrottleMeans {
    /// Each write to a page that would have to be sent again causes a fault, which waits for an
    /// answer.
    #[default]
    Faults,
    /// The vCPUs get less CPU time.
    Quota,
}

/// Effect of throttling the guest's writers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct ThrottleReport {
    /// `quota` if a quota was used at any time; faults may have been used before or after it.
    #[serde(default)]
    pub means: ThrottleMeans,
    /// Number of writes that waited for an answer, including those without a limit.
    pub faults: u64,
    /// Number of pages that these answers released.
    pub pages: u64,
    /// Time that all vCPUs together waited.
    pub held_ms: f64,
    /// Least CPU time that a quota left the vCPUs, in percent of what they could use.
    /// Absent without a quota.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub least_cpu_percent: Option<f64>,
}

/// Page-in: how the missing pages arrived after the hand-over.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct PageInReport {
    /// Number of missing pages.
    pub pages: u64,
    /// Number of missing pages that the guest accessed before they arrived.
    pub demanded_pages: u64,
    /// Number of times that the link was cut or an agent was away.
    pub cuts: u64,
    /// Time from the message about the missing pages until the destination reported all of them.
    pub duration_ms: f64,
    /// Times that the guest waited for a page.
    pub fetch_ms: FetchTimes,
    /// Histogram of these times, without empty classes.
    #[serde(default)]
    pub waits: Vec<WaitClass>,
}

/// Times that a guest waited for missing pages; 0 if it accessed none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct FetchTimes {
    /// Median.
    pub median: f64,
    /// 90th percentile.
    pub p90: f64,
    /// 99th percentile.
    pub p99: f64,
    /// Longest time.
    pub max: f64,
}

/// Class of a histogram of waiting times.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct WaitClass {
    /// Upper bound, exclusive. The lower bound is half of it, and 0 for the first class. Absent for
    /// the last class, which has no upper bound.
    pub below_ms: Option<f64>,
    /// Number of waits.
    pub waits: u64,
}

/// One path between the two hosts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct LaneReport {
    /// The source's address; absent if the kernel chose it.
    #[cfg_attr(feature = "schema", schema(value_type = Option<String>))]
    pub from: Option<IpAddr>,
    /// The destination's address.
    #[cfg_attr(feature = "schema", schema(value_type = String))]
    pub to: SocketAddr,
    /// Number of data streams that were open on it.
    pub streams: u32,
    /// Bytes handed to the streams, including headers and padding.
    pub bytes: u64,
    /// Reasons why streams broke or could not be opened. Other streams took over their work.
    pub broken: Vec<String>,
    /// MTU of the interface in bytes, if packets of that size were dropped while small ones passed;
    /// the streams then continued with small packets.
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

/// Total time in one phase.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct PhaseReport {
    /// The phase.
    pub phase: Phase,
    /// Time in it.
    pub duration_ms: f64,
}

/// Cut of the link while the guest ran at the source.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct CutReport {
    /// Time of detection, since the request.
    pub at_ms: f64,
    /// Time after that in which nothing was sent.
    pub lasted_ms: f64,
    /// Number of pages that the destination lacked when the migration continued, not counting what
    /// the guest had written since the cut.
    pub unsent_pages: u64,
    /// How it was detected.
    pub why: String,
}

/// Parts of the vCPUs' pause. They follow each other and add up to the whole.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct SwitchoverReport {
    /// From the guest's stop until the last dirty pages are handed to the wire (QEMU writes the
    /// device state at the same time).
    pub last_pages_ms: f64,
    /// From then until the last byte of the device state and the commit are handed to the wire.
    pub device_state_ms: f64,
    /// From then until the destination has read the commit (clocks compared by the lane's pings).
    pub flight_ms: f64,
    /// From then until the device state is loaded.
    pub load_ms: f64,
    /// From then until the vCPUs run.
    pub resume_ms: f64,
}

impl SwitchoverReport {
    /// Returns the whole pause.
    #[must_use]
    pub fn total_ms(&self) -> f64 {
        self.last_pages_ms + self.device_state_ms + self.flight_ms + self.load_ms + self.resume_ms
    }
}

/// Report of a migration. Times are in milliseconds, sizes in bytes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Report {
    /// How the migration ended.
    pub outcome: Outcome,
    /// Engine that moved the memory.
    pub engine: EngineKind,
    /// Name of the VM.
    pub vm: String,
    /// Name of the source host.
    pub from: String,
    /// Name of the destination host.
    pub to: String,
    /// Time from the request until the guest runs at the destination and the source has released
    /// it.
    pub migration_time_ms: f64,
    /// Pause of the vCPUs; absent if the guest was never stopped.
    pub switchover_ms: Option<f64>,
    /// Switchover budget: the longest permitted pause.
    #[serde(default)]
    pub switchover_budget_ms: Option<f64>,
    /// Longest silence that a client outside measured; absent if none was measured.
    pub blackout_ms: Option<f64>,
    /// Bytes sent over the wire.
    pub wire_bytes: u64,
    /// Size of the guest's RAM.
    pub guest_bytes: u64,
    /// Bandwidth limit at the end: the lowest of the limits of the migration, its lanes and its
    /// host.
    #[cfg_attr(feature = "schema", schema(value_type = Option<String>))]
    pub bandwidth_limit: Option<BitRate>,
    /// Shortest round trip of the lane's pings.
    pub round_trip_ms: Option<f64>,
    /// What each lane carried; empty for QEMU's engine, which has one path.
    #[serde(default)]
    pub lanes: Vec<LaneReport>,
    /// Encodings of the pages; empty if the engine does not report them.
    #[serde(default)]
    pub encodings: Vec<EncodingReport>,
    /// Where the content of pages was that were sent by reference.
    #[serde(default)]
    pub referenced: ReferencedPages,
    /// Number of pages that were sent by reference, were no longer at the destination, and were
    /// sent after that.
    #[serde(default)]
    pub missing_pages: u64,
    /// Bytes sent over time, at most [`MOST_POINTS`](crate::MOST_POINTS) points; the last is that
    /// of the report. Empty if nothing was sent, and in the log.
    #[serde(default)]
    pub bandwidth: Vec<BandwidthPoint>,
    /// All rounds.
    pub rounds: Vec<RoundReport>,
    /// How dirty pages were found; null for QEMU's engine.
    #[serde(default)]
    pub tracking: Option<TrackingReport>,
    /// Effect of throttling; null if the writers were not throttled.
    #[serde(default)]
    pub throttle: Option<ThrottleReport>,
    /// Page-in; null if no page was missing at the hand-over.
    #[serde(default)]
    pub page_in: Option<PageInReport>,
    /// Goal of the migration; absent for QEMU's engine.
    #[serde(default)]
    #[cfg_attr(feature = "schema", schema(value_type = Option<String>))]
    pub policy: Option<Intent>,
    /// Means of convergence, or `none` if the guest did not converge; absent if the migration ended
    /// for another reason, and for QEMU's engine.
    #[serde(default)]
    pub means: Option<Means>,
    /// Prediction before round 0; absent if too little was known.
    #[serde(default)]
    pub predicted: Option<Predicted>,
    /// Disks that travelled with the VM; absent if none did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disks: Option<DisksReport>,
    /// Cuts of the link after which the migration continued; empty if there was none.
    #[serde(default)]
    pub cuts: Vec<CutReport>,
    /// All phases that were entered.
    pub phases: Vec<PhaseReport>,
    /// Parts of the pause; absent if the engine does not report them.
    pub switchover: Option<SwitchoverReport>,
    /// Reason why the migration did not complete.
    pub error: Option<Fault>,
}

impl Report {
    /// Creates the report of a migration with all figures empty.
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
            referenced: ReferencedPages::default(),
            missing_pages: 0,
            bandwidth: Vec::new(),
            rounds: Vec::new(),
            tracking: None,
            throttle: None,
            page_in: None,
            policy: None,
            means: None,
            predicted: None,
            disks: None,
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

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn keys(report: &Report) -> BTreeSet<String> {
        let value = serde_json::to_value(report).expect("a report is JSON");
        value.as_object().expect("an object").keys().cloned().collect()
    }

    /// A program that reads reports finds the same keys whatever a move needed.
    #[test]
    fn every_report_has_the_same_keys() {
        let plain = Report::blank(Outcome::Completed, "web", "a", "b");
        let needed_all = Report {
            tracking: Some(TrackingReport::default()),
            throttle: Some(ThrottleReport::default()),
            page_in: Some(PageInReport::default()),
            cuts: vec![CutReport {
                at_ms: 1.0,
                lasted_ms: 2.0,
                unsent_pages: 3,
                why: "reset".to_owned(),
            }],
            ..plain.clone()
        };
        assert_eq!(keys(&plain), keys(&needed_all));
    }
}
