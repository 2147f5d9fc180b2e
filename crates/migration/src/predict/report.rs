//! The prediction in reports: within a migration's report, and in a dry run's. Times are in
//! milliseconds, sizes in bytes.

use std::time::Duration;

use godwit_lanes::BitRate;
use serde::{Deserialize, Serialize};

use super::{Conditions, Means, Prediction};
use crate::encoding::EncodingName;
use crate::intent::Intent;
use crate::report::millis;
use godwit_types::Fault;

/// Silence that clients of the guest see in addition to the vCPUs' pause: the last answer came some
/// time before it, and the network has to learn the guest's new location. This is an assumption and
/// a lower bound: with TCG the lab's client saw tens of ms (docs/operations.md).
const BEYOND_THE_PAUSE: Duration = Duration::from_millis(5);
/// Pages that a guest accesses one after the other before it answers, if it lacks them: 0.6 to 1.2
/// s in the lab at a round trip of 10 ms, median 0.7 s of eight.
const PAGES_TO_AN_ANSWER: u32 = 70;

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
    /// The longest silence that clients of the guest will see: the pause, and what the lab's client saw beside it.
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
    /// The same for those that it writes.
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

impl Prediction {
    /// Converts the prediction to its form in reports.
    #[must_use]
    pub fn to_report(&self) -> Predicted {
        Predicted {
            migration_time_ms: millis(self.migration),
            wire_bytes: super::whole(self.wire_bytes),
            rounds: self.rounds,
            switchover_ms: millis(self.switchover),
            means: self.means,
            throttled_to_pages_per_s: self.throttled_to_pages_per_s,
        }
    }

    /// Returns the longest silence that clients of the guest will see, as far as it is predictable.
    #[must_use]
    pub fn blackout(&self) -> Duration {
        let fetches = if self.means == Means::PageIn { PAGES_TO_AN_ANSWER } else { 0 };
        self.switchover.saturating_add(BEYOND_THE_PAUSE).saturating_add(fetches * self.round_trip)
    }

    /// Explains the choice of means, in one line for people.
    #[must_use]
    pub fn why(&self, conditions: &Conditions) -> String {
        let writes = conditions.curve.pages_per_s();
        let carries = 1.0 / conditions.hot.time_s.max(1e-12);
        let both = format!("the guest writes {writes:.0} pages/s, the lanes carry {carries:.0}");
        match (self.means, self.throttled_to_pages_per_s) {
            (Means::Plain, _) => format!("{both}: rounds get shorter by themselves"),
            (Means::Throttle, Some(limit)) if writes > limit => {
                let share = 100.0 * limit / writes;
                format!(
                    "{both}: its writers will be held to {limit:.0} pages/s, {share:.0} % of that"
                )
            }
            (Means::Throttle, limit) => {
                format!(
                    "{both}: its writers will be held to {:.0} pages/s",
                    limit.unwrap_or_default()
                )
            }
            (Means::PageIn, _) => {
                format!(
                    "{both}: it will run at the destination while the rest of its memory follows"
                )
            }
            (Means::None, Some(limit)) => {
                format!(
                    "{both}: held to {limit:.0} pages/s it comes to no pause that the policy allows either"
                )
            }
            (Means::None, None) if conditions.policy.may_throttle => {
                format!("{both}: it comes to no pause that the policy allows")
            }
            (Means::None, None) => format!("{both}, and it can't be slowed here"),
        }
    }
}

impl GuestFigures {
    /// Returns the sampled figures of the guest, on these lanes.
    #[must_use]
    pub fn of(conditions: &Conditions) -> GuestFigures {
        let Conditions { curve, data_pages, data, hot, .. } = conditions;
        GuestFigures {
            data_pages: *data_pages,
            sent_as: data.sent_as,
            wire_bytes_per_page: data.wire_bytes,
            written_wire_bytes_per_page: hot.wire_bytes,
            dirty_pages_per_s: curve.pages_per_s(),
            working_set_pages: super::whole(curve.working_set_pages()),
            samples: curve
                .samples()
                .map(|(at, pages)| DirtySample { ms: millis(at), pages })
                .collect(),
        }
    }
}
