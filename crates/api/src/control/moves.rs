//! Moves: what was asked for, what waits for what, what runs, what became of it; and drains, which are many of them.

use godwit_types::Fault;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::QemuEngineOptions;
use godwit_types::{EngineKind, Intent, PageInUse, Progress, Report};

/// How soon a move is to come.
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
    /// When nothing else waits.
    Low,
    /// In its turn.
    #[default]
    Normal,
    /// Before others.
    High,
    /// Next.
    Urgent,
}

/// Where a move is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum MoveState {
    /// For something: `waits` says for what.
    Waiting,
    /// Its host is being asked.
    Starting,
    /// It runs.
    Running,
    /// The VM runs at the target.
    Done,
    /// It does not, and is not tried again.
    Failed,
    /// Somebody called it off.
    Cancelled,
}

impl MoveState {
    /// Whether nothing comes after it.
    #[must_use]
    pub fn is_over(self) -> bool {
        matches!(self, MoveState::Done | MoveState::Failed | MoveState::Cancelled)
    }
}

/// What a move waits for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Waits {
    /// Stable code for programs.
    pub code: String,
    /// One line for people.
    pub text: String,
}

/// `POST /api/v1/vms/{vm}/moves`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
#[schema(example = json!({ "to": "host-b", "priority": "high" }))]
pub struct CreateMove {
    /// Where; none: the manager's choice, told with its reason.
    pub to: Option<String>,
    /// How soon.
    pub priority: MovePriority,
    /// Who moves the memory: `godwit` or `qemu`.
    pub engine: EngineKind,
    /// What matters most: `auto`, `minimal-pause`, `minimal-impact`, `fast-evacuation`, `deadline=90s` (`ms`, `s`, `min` or `h`).
    #[schema(value_type = String, pattern = "^(auto|minimal-pause|minimal-impact|fast-evacuation|deadline=[1-9][0-9]{0,5}(ms|s|min|h))$")]
    pub policy: Intent,
    /// Whether the guest may run at the target while pages of it are still at the source: `never`, `allowed`, `now`.
    pub page_in: PageInUse,
    /// It is tried although preflight says that it can't be: the agents check again.
    pub skip_preflight: bool,
    /// Settings of QEMU's own engine.
    pub qemu: QemuEngineOptions,
}

/// `GET /api/v1/moves/{id}`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[schema(example = json!({
    "id": "v6b0450ea-9781d5ce", "vm": "web", "from": "host-a", "to": "host-b",
    "to_reason": "best: 254.7 GiB of 256 GiB memory left after it, 27.0 of 32 cores idle, 0 arriving", "state": "waiting",
    "waits": { "code": "source-limit", "text": "moves out of host-a: 2 of 2 at once (db and mail); place 1 in line" },
    "priority": "normal", "drain": "d6b0450ea-7e6c241b", "asked_by": "ana", "asked_unix_ms": 1_795_444_970_237_u64, "attempts": 0
}))]
pub struct Move {
    /// Names it; also names the migration at the source's agent, with the attempt behind it.
    pub id: String,
    pub vm: String,
    /// The host that it leaves.
    pub from: String,
    /// The host that it goes to; none: not chosen yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to: Option<String>,
    /// Why that one, where the manager chose.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to_reason: Option<String>,
    /// Where it is.
    pub state: MoveState,
    /// What it waits for, where it does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waits: Option<Waits>,
    /// How soon it is to come.
    pub priority: MovePriority,
    /// The drain that it is part of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub drain: Option<String>,
    /// Who asked for it.
    pub asked_by: String,
    /// When.
    pub asked_unix_ms: u64,
    /// When it began to run, the last attempt.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub started_unix_ms: Option<u64>,
    /// When it was over.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended_unix_ms: Option<u64>,
    /// Times that it was begun.
    pub attempts: u32,
    /// The migration at the source's agent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub migration: Option<String>,
    /// How far that is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub progress: Option<Progress>,
    /// Why it failed, or its last attempt did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<Fault>,
    /// What the migration took; only of one move, not in lists.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub report: Option<Report>,
}

/// `POST /api/v1/hosts/{host}/drain`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
#[schema(example = json!({ "plan_only": true, "priority": "high" }))]
pub struct CreateDrain {
    /// Plan and tell, and move nothing.
    pub plan_only: bool,
    /// How soon its moves are to come.
    pub priority: MovePriority,
    /// Who moves the memory: `godwit` or `qemu`.
    pub engine: EngineKind,
    /// Settings of QEMU's own engine.
    pub qemu: QemuEngineOptions,
}

/// Where a drain is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum DrainState {
    /// Planned, and nothing moves.
    Planned,
    /// VMs leave.
    Running,
    /// All that could go have gone.
    Done,
    /// Somebody called it off; those that have gone stay where they are.
    Cancelled,
    /// Somebody called it off, and those that had gone come back.
    Undoing,
    /// They are back.
    Undone,
}

/// Where a VM of a drain is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum DrainVmState {
    /// Its move waits or runs.
    Going,
    /// It is gone.
    Gone,
    /// It can't go: `reason` says why.
    Stays,
    /// It came back.
    Back,
}

/// A VM of a drain.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DrainVm {
    /// Its name.
    pub vm: String,
    /// Where it is.
    pub state: DrainVmState,
    /// Where it goes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to: Option<String>,
    /// Why there, or why it stays.
    pub reason: String,
    /// Its move.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub r#move: Option<String>,
    /// When it is foreseen to be gone, milliseconds since 1970.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gone_unix_ms: Option<u64>,
}

/// `GET /api/v1/drains/{id}`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(example = json!({
    "id": "d6b0450ea-7e6c241b", "host": "host-a", "state": "running", "asked_by": "ana", "asked_unix_ms": 1_795_444_970_237_u64,
    "eta_unix_ms": 1_795_445_090_237_u64,
    "vms": [
        { "vm": "web", "state": "going", "to": "host-b", "reason": "best: 254.7 GiB of 256 GiB memory left after it",
          "move": "v6b0450ea-9781d5ce", "gone_unix_ms": 1_795_445_090_237_u64 },
        { "vm": "gpu", "state": "stays", "reason": "a device of it can't move" }
    ]
}))]
pub struct Drain {
    /// Names it.
    pub id: String,
    /// The host that is emptied.
    pub host: String,
    /// Where it is.
    pub state: DrainState,
    /// Who asked for it.
    pub asked_by: String,
    /// When.
    pub asked_unix_ms: u64,
    /// When all that can go are foreseen to be gone, milliseconds since 1970, as far as is known now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eta_unix_ms: Option<u64>,
    /// When it was over.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended_unix_ms: Option<u64>,
    pub vms: Vec<DrainVm>,
}
