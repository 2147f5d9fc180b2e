//! How the pages are found that a guest writes while it migrates.

use serde::{Deserialize, Serialize};

/// Permitted means of finding dirty pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TrackingUse {
    /// Faults for guests of 2 GiB and more, scans for smaller ones.
    #[default]
    Auto,
    /// Faults for the memory that is seldom written, scans for the rest.
    Faults,
    /// Scans of all memory.
    Scans,
}

impl TrackingUse {
    /// Returns whether the means are left to others.
    #[must_use]
    pub fn is_auto(&self) -> bool {
        *self == TrackingUse::Auto
    }
}

/// Means of finding dirty pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub enum TrackingMeans {
    /// Scans of the page tables.
    #[default]
    Scans,
    /// Faults name the dirty pages of memory that is seldom written; the rest is scanned.
    Faults,
}

/// How dirty pages were found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct TrackingReport {
    /// The means; a throttle may add faults to scans.
    pub means: TrackingMeans,
    /// Number of first writes to a page that waited for an answer, without a limit.
    pub faults: u64,
    /// Time that it took to answer them.
    pub answering_ms: f64,
    /// Memory in which faults named the dirty pages at the end.
    pub by_faults_bytes: u64,
    /// Number of dirty pages that a scan found and no fault had named; 0 is expected.
    pub unnoted_pages: u64,
}
