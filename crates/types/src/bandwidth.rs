//! Bytes sent over time, as a report holds them for a chart.

use serde::{Deserialize, Serialize};

/// Maximum points of a report.
pub const MOST_POINTS: usize = 200;

/// Bytes sent by a point in time.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct BandwidthPoint {
    /// Time since the request.
    pub ms: f64,
    /// Bytes handed to the wire at the source since then, as the engine counts them.
    pub bytes: u64,
}
