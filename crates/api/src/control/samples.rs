//! Progress samples of a move's migration.

use godwit_types::{Phase, Progress};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Start of a phase of a migration.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct PhaseMark {
    /// Phase.
    pub phase: Phase,
    /// Round in which the phase began.
    pub round: u32,
    /// First observation of the phase, in milliseconds since the migration was requested.
    pub at_ms: f64,
}

/// Response of `GET /api/v1/moves/{id}/samples`, for the last attempt.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[schema(example = json!({
    "id": "v6b0450ea-9781d5ce", "migration": "v6b0450ea-9781d5ce-1",
    "started_unix_ms": 1_795_444_970_237_u64,
    "phases": [{ "phase": "preflight", "round": 0, "at_ms": 0.1 }, { "phase": "pre-copy",
    "round": 0, "at_ms": 812.4 }],
    "samples": [{
        "phase": "pre-copy", "round": 0, "remaining_bytes": 3_221_225_472_u64,
        "total_bytes": 4_294_967_296_u64, "sent_bytes": 1_073_741_824,
        "dirty_bytes_per_s": 0.0, "bandwidth_bytes_per_s": 1_100_000_000.0,
        "bandwidth_limit": "10gbit", "eta_ms": 2900.0, "elapsed_ms": 1812.4,
        "lanes": [{ "from": "10.0.0.11", "to": "10.0.0.12:7701", "streams": 2,
        "bytes": 1_073_741_824, "bytes_per_s": 1_100_000_000.0 }],
        "throttled_to_pages_per_s": null, "guest_round_trip_ms": 0.31
    }]
}))]
pub struct MoveSamples {
    /// ID of the move.
    pub id: String,
    /// Migration ID at the source's agent; absent if nothing is stored: the migration has not
    /// started, ended long ago, or started under another manager.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub migration: Option<String>,
    /// Time at which the migration was requested, in milliseconds since 1970.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub started_unix_ms: Option<u64>,
    /// Phases of the migration.
    pub phases: Vec<PhaseMark>,
    /// Progress over time, at most 600 samples: a longer migration has fewer samples per second.
    /// The round trip to the guest is the longest one since the previous sample.
    pub samples: Vec<Progress>,
}
