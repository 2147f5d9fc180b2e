//! Progress of a running migration.

use std::net::{IpAddr, SocketAddr};

use serde::{Deserialize, Serialize};

use crate::disks::DisksProgress;
use crate::phase::Phase;
use crate::rate::BitRate;

/// State of a running migration.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Progress {
    /// The phase.
    pub phase: Phase,
    /// Number of the current round.
    pub round: u32,
    /// Bytes of guest memory that this round still has to check or send.
    pub remaining_bytes: u64,
    /// Size of the guest's RAM.
    pub total_bytes: u64,
    /// Bytes sent over the wire so far.
    pub sent_bytes: u64,
    /// Rate at which the guest dirties memory.
    pub dirty_bytes_per_s: f64,
    /// Measured throughput.
    pub bandwidth_bytes_per_s: f64,
    /// Current bandwidth limit: the lowest of the limits of the migration, its lanes and its host.
    #[cfg_attr(feature = "schema", schema(value_type = Option<String>))]
    pub bandwidth_limit: Option<BitRate>,
    /// Predicted time to the end, or the time by the current rates if that is longer. Absent if
    /// unknown.
    pub eta_ms: Option<f64>,
    /// Time since the request.
    pub elapsed_ms: f64,
    /// What each lane carries; empty before the first stream is open, and for QEMU's engine.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub lanes: Vec<LaneProgress>,
    /// Limit of the guest's writers; absent if they are not throttled.
    #[serde(default)]
    pub throttled_to_pages_per_s: Option<f64>,
    /// Longest recent round trip from the source host to the guest; it grows while an answer is
    /// missing. Absent if the specification names no IPv4 address of the guest, or it has not
    /// answered yet.
    #[serde(default)]
    pub guest_round_trip_ms: Option<f64>,
    /// Disks that travel with the VM; absent if none do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disks: Option<DisksProgress>,
}

/// What one path between the two hosts carries during a migration.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct LaneProgress {
    /// The source's address; absent if the kernel chooses it.
    #[cfg_attr(feature = "schema", schema(value_type = Option<String>))]
    pub from: Option<IpAddr>,
    /// The destination's address; absent until it is known.
    #[cfg_attr(feature = "schema", schema(value_type = Option<String>))]
    pub to: Option<SocketAddr>,
    /// Number of open data streams.
    pub streams: u32,
    /// Bytes handed to the streams so far, including headers and padding.
    pub bytes: u64,
    /// Bytes per second since the previous progress.
    pub bytes_per_s: f64,
}

impl Progress {
    /// Creates the progress of a migration that has not sent anything yet.
    #[must_use]
    pub fn begin(total_bytes: u64) -> Self {
        Progress {
            phase: Phase::Preflight,
            round: 0,
            remaining_bytes: total_bytes,
            total_bytes,
            sent_bytes: 0,
            dirty_bytes_per_s: 0.0,
            bandwidth_bytes_per_s: 0.0,
            bandwidth_limit: None,
            eta_ms: None,
            elapsed_ms: 0.0,
            lanes: Vec::new(),
            throttled_to_pages_per_s: None,
            guest_round_trip_ms: None,
            disks: None,
        }
    }

    /// Adds the rate of each lane, computed from the previous progress.
    #[must_use]
    pub fn with_lane_rates(mut self, before: &Progress) -> Self {
        let seconds = (self.elapsed_ms - before.elapsed_ms) / 1e3;
        for (number, lane) in self.lanes.iter_mut().enumerate() {
            // The count starts again after a cut of the link.
            let before = before.lanes.get(number).map_or(0, |lane| lane.bytes).min(lane.bytes);
            lane.bytes_per_s =
                if seconds > 0.0 { (lane.bytes - before) as f64 / seconds } else { 0.0 };
        }
        self
    }

    /// Adds the predicted duration of the whole migration: a round's rates cannot account for later
    /// rounds.
    #[must_use]
    pub fn with_predicted(self, migration_time_ms: Option<f64>) -> Self {
        let predicted_ms = migration_time_ms.map(|all_ms| (all_ms - self.elapsed_ms).max(0.0));
        let by_both =
            |eta_ms: f64| predicted_ms.map_or(eta_ms, |predicted_ms| predicted_ms.max(eta_ms));
        let eta_ms = self.eta_ms.map(by_both).or(predicted_ms.filter(|left_ms| *left_ms > 0.0));
        Progress { eta_ms, ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_is_what_was_predicted_or_later() {
        let eta = |eta_ms, predicted_ms| {
            let progress = Progress { eta_ms, elapsed_ms: 4000.0, ..Progress::begin(1) };
            progress.with_predicted(predicted_ms).eta_ms
        };
        assert_eq!(eta(Some(500.0), None), Some(500.0));
        assert_eq!(eta(Some(500.0), Some(10_000.0)), Some(6000.0));
        assert_eq!(eta(Some(7000.0), Some(10_000.0)), Some(7000.0));
        assert_eq!(eta(None, Some(10_000.0)), Some(6000.0));
        // It takes longer than predicted: the remaining time is unknown.
        assert_eq!(eta(None, Some(3000.0)), None);
        assert_eq!(eta(Some(500.0), Some(3000.0)), Some(500.0));
    }
}
