//! How far a move was at times of its migration.

use godwit_types::{Phase, Progress};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// When a migration came to a phase.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct PhaseMark {
    /// The phase.
    pub phase: Phase,
    /// The round that it was in.
    pub round: u32,
    /// Since the migration was asked for, milliseconds, when it was first heard of.
    pub at_ms: f64,
}

/// `GET /api/v1/moves/{id}/samples`: of the last attempt.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[schema(example = json!({
    "id": "v6b0450ea-9781d5ce", "migration": "v6b0450ea-9781d5ce-1", "started_unix_ms": 1_795_444_970_237_u64,
    "phases": [{ "phase": "preflight", "round": 0, "at_ms": 0.1 }, { "phase": "pre-copy", "round": 0, "at_ms": 812.4 }],
    "samples": [{
        "phase": "pre-copy", "round": 0, "remaining_bytes": 3_221_225_472_u64, "total_bytes": 4_294_967_296_u64, "sent_bytes": 1_073_741_824,
        "dirty_bytes_per_s": 0.0, "bandwidth_bytes_per_s": 1_100_000_000.0, "bandwidth_limit": "10gbit", "eta_ms": 2900.0, "elapsed_ms": 1812.4,
        "lanes": [{ "from": "10.0.0.11", "to": "10.0.0.12:7701", "streams": 2, "bytes": 1_073_741_824, "bytes_per_s": 1_100_000_000.0 }],
        "throttled_to_pages_per_s": null, "guest_round_trip_ms": 0.31
    }]
}))]
pub struct MoveSamples {
    /// The move.
    pub id: String,
    /// The migration at the source's agent; none: nothing is kept of it, since it has not begun, is long over, or began under another manager.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub migration: Option<String>,
    /// When that was asked for, milliseconds since 1970.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub started_unix_ms: Option<u64>,
    /// The phases that it came to.
    pub phases: Vec<PhaseMark>,
    /// How far it was, 600 times at most: of a longer one fewer for each second. A round trip to the guest is the longest since the sample before.
    pub samples: Vec<Progress>,
}
