//! Moves, which migrate one VM each through a queue, and drains, which move all VMs off a host.

use godwit_types::Fault;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{QemuEngineOptions, TravellingDisks};
use godwit_types::{EngineKind, Intent, PageInUse, Progress, Report};

/// Priority of a move in the queue.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    Serialize,
    Deserialize,
    ToSchema,
)]
#[serde(rename_all = "kebab-case")]
pub enum MovePriority {
    /// After all others.
    Low,
    /// Default order.
    #[default]
    Normal,
    /// Before moves of normal priority.
    High,
    /// Before all others.
    Urgent,
}

/// State of a move.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum MoveState {
    /// Queued; `waits` gives the reason.
    Waiting,
    /// The manager has sent the request to the source host.
    Starting,
    /// The migration runs.
    Running,
    /// The VM runs at the target.
    Done,
    /// The move failed and is not retried.
    Failed,
    /// A user cancelled the move.
    Cancelled,
}

impl MoveState {
    /// Returns whether the state is final.
    #[must_use]
    pub fn is_over(self) -> bool {
        matches!(self, MoveState::Done | MoveState::Failed | MoveState::Cancelled)
    }
}

/// Reason why a move waits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Waits {
    /// Stable code for programs.
    pub code: String,
    /// Explanation in one line.
    pub text: String,
}

/// Request of `POST /api/v1/vms/{vm}/moves`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
#[schema(example = json!({ "to": "host-b", "priority": "high" }))]
pub struct CreateMove {
    /// Target host; absent: the manager chooses one and gives its reason.
    pub to: Option<String>,
    /// Priority in the queue.
    pub priority: MovePriority,
    /// Engine that transfers the memory: `godwit` or `qemu`.
    pub engine: EngineKind,
    /// Goal of the migration: `auto`, `minimal-pause`, `minimal-impact`, `fast-evacuation`,
    /// `deadline=90s` (`ms`, `s`, `min` or `h`).
    #[schema(
        value_type = String,
        pattern = "^(auto|minimal-pause|minimal-impact|fast-evacuation\
                   |deadline=[1-9][0-9]{0,5}(ms|s|min|h))$"
    )]
    pub policy: Intent,
    /// Whether the guest may run at the target while some of its pages are still at the source:
    /// `never`, `allowed`, `now`.
    pub page_in: PageInUse,
    /// Attempt the move even if preflight fails. The agents repeat their own checks.
    pub skip_preflight: bool,
    /// Settings of QEMU's built-in engine.
    pub qemu: QemuEngineOptions,
    /// Disks travel with the VM. Absent: the target must have them under the same paths.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disks: Option<TravellingDisks>,
}

/// Response of `GET /api/v1/moves/{id}`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[schema(example = json!({
    "id": "v6b0450ea-9781d5ce", "vm": "web", "from": "host-a", "to": "host-b",
    "to_reason": "best: 54.7 GiB of 64 GiB memory left after it, 27.0 of 32 cores idle, \
        no VMs arriving",
    "state": "waiting",
    "waits": { "code": "source-limit",
    "text": "moves out of host-a: 2 of 2 at once (db and mail); place 1 in line" },
    "priority": "normal", "drain": "d6b0450ea-7e6c241b", "asked_by": "ana",
    "asked_unix_ms": 1_795_444_970_237_u64, "attempts": 0
}))]
pub struct Move {
    /// ID of the move. Followed by the attempt, it is also the migration ID at the source's agent.
    pub id: String,
    pub vm: String,
    /// Source host.
    pub from: String,
    /// Target host; absent until one is chosen.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to: Option<String>,
    /// Reason for the target, if the manager chose it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to_reason: Option<String>,
    /// State of the move.
    pub state: MoveState,
    /// Reason why it waits, if it does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waits: Option<Waits>,
    /// Priority in the queue.
    pub priority: MovePriority,
    /// Drain that the move belongs to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub drain: Option<String>,
    /// User who requested the move.
    pub asked_by: String,
    /// Time of the request.
    pub asked_unix_ms: u64,
    /// Start time of the last attempt.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub started_unix_ms: Option<u64>,
    /// End time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended_unix_ms: Option<u64>,
    /// Number of attempts.
    pub attempts: u32,
    /// Migration ID at the source's agent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub migration: Option<String>,
    /// Progress of the migration.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub progress: Option<Progress>,
    /// Reason why the move or its last attempt failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<Fault>,
    /// Report of the migration; only for a single move, not in lists.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub report: Option<Report>,
}

/// Request of `POST /api/v1/hosts/{host}/drain`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
#[schema(example = json!({ "plan_only": true, "priority": "high" }))]
pub struct CreateDrain {
    /// Return the plan without moving anything.
    pub plan_only: bool,
    /// Priority of the drain's moves.
    pub priority: MovePriority,
    /// Engine that transfers the memory: `godwit` or `qemu`.
    pub engine: EngineKind,
    /// Settings of QEMU's built-in engine.
    pub qemu: QemuEngineOptions,
    /// Disks travel with each VM whose images the target does not share. Absent: the targets must
    /// have them under the same paths.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disks: Option<TravellingDisks>,
}

/// State of a drain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum DrainState {
    /// A plan only; nothing moves.
    Planned,
    /// VMs leave the host.
    Running,
    /// All VMs that can move have left the host.
    Done,
    /// A user cancelled the drain; VMs that have left stay where they are.
    Cancelled,
    /// A user cancelled the drain, and VMs that have left return.
    Undoing,
    /// The VMs have returned.
    Undone,
}

/// State of a VM in a drain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum DrainVmState {
    /// The move waits or runs.
    Going,
    /// The VM has left the host.
    Gone,
    /// The VM cannot move; `reason` explains why.
    Stays,
    /// The VM has returned.
    Back,
}

/// A VM of a drain.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DrainVm {
    /// Name of the VM.
    pub vm: String,
    /// State of the VM in the drain.
    pub state: DrainVmState,
    /// Target host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to: Option<String>,
    /// Reason for the target, or why the VM stays.
    pub reason: String,
    /// ID of its move.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub r#move: Option<String>,
    /// Predicted time at which the VM has left, in milliseconds since 1970.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gone_unix_ms: Option<u64>,
}

/// Response of `GET /api/v1/drains/{id}`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(example = json!({
    "id": "d6b0450ea-7e6c241b", "host": "host-a", "state": "running", "asked_by": "ana",
    "asked_unix_ms": 1_795_444_970_237_u64,
    "eta_unix_ms": 1_795_445_090_237_u64,
    "vms": [
        { "vm": "web", "state": "going", "to": "host-b",
        "reason": "best: 254.7 GiB of 256 GiB memory left after it",
          "move": "v6b0450ea-9781d5ce", "gone_unix_ms": 1_795_445_090_237_u64 },
        { "vm": "gpu", "state": "stays", "reason": "one of its devices cannot be migrated" }
    ]
}))]
pub struct Drain {
    /// ID of the drain.
    pub id: String,
    /// Host that is drained.
    pub host: String,
    /// State of the drain.
    pub state: DrainState,
    /// User who requested the drain.
    pub asked_by: String,
    /// Time of the request.
    pub asked_unix_ms: u64,
    /// Predicted time at which all VMs that can move have left, in milliseconds since 1970, from
    /// current knowledge.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eta_unix_ms: Option<u64>,
    /// End time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended_unix_ms: Option<u64>,
    pub vms: Vec<DrainVm>,
}
