//! Saved form of moves.

use godwit_api::control::MovePriority;
use godwit_api::{QemuEngineOptions, TravellingDisks};
use godwit_planner::queue::lifecycle::JobState;
use godwit_store::records::{Record, Table};
use godwit_types::{EngineKind, Intent, PageInUse};
use serde::{Deserialize, Serialize};

pub(crate) const MOVES: Table<SavedMove> = Table::new();

/// Saved job.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SavedMove {
    pub(super) vm: String,
    pub(super) from: String,
    pub(super) to: Option<String>,
    pub(super) priority: MovePriority,
    pub(super) engine: EngineKind,
    pub(super) policy: Intent,
    pub(super) page_in: PageInUse,
    pub(super) asked_by: String,
    pub(super) asked_unix_ms: u64,
    pub(super) attempts: u32,
    pub(super) started_unix_ms: Option<u64>,
    pub(super) ended_unix_ms: Option<u64>,
    #[serde(default)]
    pub(super) qemu: QemuEngineOptions,
    #[serde(default)]
    pub(super) disks: Option<TravellingDisks>,
    #[serde(default)]
    pub(super) to_reason: Option<String>,
    #[serde(default)]
    pub(super) drain: Option<String>,
    pub(super) state: JobState,
}

impl Record for SavedMove {
    const KIND: &'static str = "move";
    const PREFIX: &'static str = "moves/";
    const VERSION: u32 = 1;
}
