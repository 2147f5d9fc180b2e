//! Bytes sent over time, as a report holds them for a chart.

use serde::{Deserialize, Serialize};

/// Maximum points of a report.
pub const MOST_POINTS: usize = 200;

/// So much had been sent by then.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct BandwidthPoint {
    /// Time since the request.
    pub ms: f64,
    /// Bytes handed to the wire at the source since then, as the engine counts them.
    pub bytes: u64,
}
