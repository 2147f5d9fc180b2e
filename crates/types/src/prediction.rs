//! The prediction of a migration: within its report, and as a dry run. Times are in milliseconds,
//! sizes in bytes.

use serde::{Deserialize, Serialize};

use crate::encoding::EncodingName;
use crate::fault::Fault;
use crate::intent::Intent;
use crate::rate::BitRate;

/// By what a guest is brought to its switchover.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub enum Means {
    /// By rounds alone.
    Plain,
    /// Its writers are slowed.
    Throttle,
    /// It runs at the destination while the rest of its memory follows.
    PageIn,
    /// Not at all: it writes too much.
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

/// What a migration will be.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Predicted {
    /// From the request to the source's letting go.
    pub migration_time_ms: f64,
    /// Bytes on the wire.
    pub wire_bytes: u64,
    /// Rounds, the last one included.
    pub rounds: u32,
    /// The vCPUs' pause.
    pub switchover_ms: f64,
    /// By what it comes to its switchover.
    pub means: Means,
    /// The lowest limit that its writers will be held to; none: they are not.
    pub throttled_to_pages_per_s: Option<f64>,
}

/// What a dry run tells.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct DryRun {
    /// The VM's name.
    pub vm: String,
    /// The source host's name.
    pub from: String,
    /// The destination host's name.
    pub to: String,
    /// What is to matter most.
    #[cfg_attr(feature = "schema", schema(value_type = String))]
    pub policy: Intent,
    /// What the pause is to be at most.
    pub switchover_budget_ms: f64,
    /// The guest's RAM.
    pub guest_bytes: u64,
    /// What the migration will be; none where it would be refused.
    pub predicted: Option<Predicted>,
    /// The longest silence that clients of the guest will see: the pause, and what the lab's client
    /// saw beside it.
    pub blackout_ms: Option<f64>,
    /// Why by these means, one line for people.
    pub why: Option<String>,
    /// What was seen of the guest.
    pub guest: Option<GuestFigures>,
    /// What is known of the lanes.
    pub lanes: Option<LanesFigures>,
    /// Why the migration would be refused, as its report would say.
    pub error: Option<Fault>,
    /// How long the dry run took.
    pub dry_run_time_ms: f64,
}

/// What was seen of a guest.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct GuestFigures {
    /// Pages that hold something else than zeros, by a sample.
    pub data_pages: u64,
    /// As what these will go.
    pub sent_as: EncodingName,
    /// Bytes on the wire for each of them.
    pub wire_bytes_per_page: f64,
    /// Bytes on the wire for a page that the guest writes.
    pub written_wire_bytes_per_page: f64,
    /// Pages that it writes a second.
    pub dirty_pages_per_s: f64,
    /// Pages that it wrote within the longest time looked at.
    pub working_set_pages: u64,
    /// What was counted.
    pub samples: Vec<DirtySample>,
}

/// So many different pages were written within so long.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct DirtySample {
    /// Since all were protected.
    pub ms: f64,
    /// Pages.
    pub pages: u64,
}

/// How it is known what the lanes carry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub enum LanesKnownBy {
    /// By a short probe, just now.
    Probe,
    /// By what was carried there lately.
    Migration,
}

/// What is known of the lanes.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct LanesFigures {
    /// What they carry together, bytes a second, whatever the limits.
    pub bytes_per_s: f64,
    /// The shortest round trip.
    pub round_trip_ms: f64,
    /// The limit that would hold the migration; none: there is none.
    #[cfg_attr(feature = "schema", schema(value_type = Option<String>))]
    pub bandwidth_limit: Option<BitRate>,
    /// How that is known.
    pub known_by: LanesKnownBy,
}
