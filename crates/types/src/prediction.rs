//! Prediction of a migration, in its report and as a dry run. Times are in milliseconds,
//! sizes in bytes.

use serde::{Deserialize, Serialize};

use crate::encoding::EncodingName;
use crate::fault::Fault;
use crate::intent::Intent;
use crate::rate::BitRate;

/// Means by which a guest reaches its switchover.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub enum Means {
    /// Rounds only.
    Plain,
    /// The guest's writers are throttled.
    Throttle,
    /// The guest runs at the destination while the rest of its memory follows.
    PageIn,
    /// None: the guest writes too much.
    None,
}

impl Means {
    /// Returns the name used in reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Means::Plain => "plain",
            Means::Throttle => "throttle",
            Means::PageIn => "page-in",
            Means::None => "none",
        }
    }
}

impl std::fmt::Display for Means {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

/// Predicted figures of a migration.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Predicted {
    /// Time from the request until the source releases the guest.
    pub migration_time_ms: f64,
    /// Bytes on the wire.
    pub wire_bytes: u64,
    /// Number of rounds, including the last one.
    pub rounds: u32,
    /// Pause of the vCPUs.
    pub switchover_ms: f64,
    /// Means of convergence.
    pub means: Means,
    /// Lowest limit of the guest's writers; absent if they will not be throttled.
    pub throttled_to_pages_per_s: Option<f64>,
}

/// Result of a dry run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct DryRun {
    /// Name of the VM.
    pub vm: String,
    /// Name of the source host.
    pub from: String,
    /// Name of the destination host.
    pub to: String,
    /// Goal of the migration.
    #[cfg_attr(feature = "schema", schema(value_type = String))]
    pub policy: Intent,
    /// Longest permitted pause.
    pub switchover_budget_ms: f64,
    /// Size of the guest's RAM.
    pub guest_bytes: u64,
    /// Prediction; absent if the migration would be refused.
    pub predicted: Option<Predicted>,
    /// Longest silence that clients of the guest will see: the pause, and what the lab's client
    /// measured beyond it.
    pub blackout_ms: Option<f64>,
    /// Reason for these means, one line for people.
    pub why: Option<String>,
    /// Figures of the guest.
    pub guest: Option<GuestFigures>,
    /// Figures of the lanes.
    pub lanes: Option<LanesFigures>,
    /// Reason why the migration would be refused.
    pub error: Option<Fault>,
    /// Duration of the dry run.
    pub dry_run_time_ms: f64,
}

/// Figures of a guest, from a sample of its memory and its writes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct GuestFigures {
    /// Number of pages that are not zero, estimated from a sample.
    pub data_pages: u64,
    /// Encoding in which they will be sent.
    pub sent_as: EncodingName,
    /// Bytes on the wire for each of these pages.
    pub wire_bytes_per_page: f64,
    /// Bytes on the wire for a page that the guest writes.
    pub written_wire_bytes_per_page: f64,
    /// Number of pages that the guest writes per second.
    pub dirty_pages_per_s: f64,
    /// Number of pages that the guest wrote during the longest sample.
    pub working_set_pages: u64,
    /// Samples of the dirty rate.
    pub samples: Vec<DirtySample>,
}

/// Number of different pages that were written within a time.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct DirtySample {
    /// Time since all pages were protected.
    pub ms: f64,
    /// Number of pages.
    pub pages: u64,
}

/// Source of the lanes' figures.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub enum LanesKnownBy {
    /// A short probe, just now.
    Probe,
    /// Recent migrations.
    Migration,
}

/// Figures of all lanes together.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct LanesFigures {
    /// Throughput without limits, bytes per second.
    pub bytes_per_s: f64,
    /// Shortest round trip.
    pub round_trip_ms: f64,
    /// Bandwidth limit that would apply; absent if there is none.
    #[cfg_attr(feature = "schema", schema(value_type = Option<String>))]
    pub bandwidth_limit: Option<BitRate>,
    /// Source of these figures.
    pub known_by: LanesKnownBy,
}
