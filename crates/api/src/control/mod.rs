//! What the manager's API speaks: `/api/v1`, described by `/api/openapi.json`. Times are milliseconds since 1970 where they name a moment,
//! sizes bytes, rates bits per second, as the field names say.

mod access;
mod baseline;
mod certificates;
mod client;
mod cluster;
mod events;
mod following;
mod hosts;
mod join;
mod limits;
mod moves;
mod preflight;
mod problem;
mod rules;
mod samples;
mod shares;
mod vms;

pub use access::{AuditEntry, AuditOutcome, CreateToken, CreatedToken, Me, Role, TokenInfo};
pub use baseline::{
    BaselineFit, BaselineHost, BaselineVm, COMPUTED_BASELINE, CommonCpu, CpuBaseline,
    CpuBaselineChange, CpuBaselineInfo, NamedCpu, SetCpuBaseline,
};
pub use certificates::{CertificateInfo, RevokedCertificates};
pub use client::{ManagerClient, ManagerError, TOKEN_VARIABLE};
pub use cluster::{Cluster, Leader};
pub use events::{Change, ClusterEvent, StreamedEvent};
pub use following::{ManagerEvent, ManagerEvents};
pub use hosts::{AddHost, HostState, HostSummary, ManagedHost, UpdateHost};
pub use join::{JoinGrant, JoinRequest, JoinToken, JoinTokenInfo, JoinTokenText, Joined};
pub use limits::{HostMoves, LinkMoves, MoveLimits, UpdateLimits};
pub use moves::{
    CreateDrain, CreateMove, Drain, DrainState, DrainVm, DrainVmState, Move, MovePriority,
    MoveState, Waits,
};
pub use preflight::{
    Check, CheckName, PlacementScore, Preflight, PreflightRanking, PreflightReport, RankedHost,
    RuledOutHost, Verdict,
};
pub use problem::{Problem, ProblemCode};
pub use rules::{CreateRule, RuleBreaker, RuleHosts, RuleInfo, RuleKind, RuleState, RuleStrength};
pub use samples::{MoveSamples, PhaseMark};
pub use shares::{DatastoreAtHost, ManagedDatastore, ManagedNetwork, NetworkAtHost};
pub use vms::{
    BindVm, CreateManagedVm, HostedVm, ManagedVm, NameClaim, NameConflict, PlannedPower,
    StartManagedVm, StopManagedVm, VmSummary,
};

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Where a manager listens when nothing else is configured.
pub const DEFAULT_MANAGER_PORT: u16 = 7800;
/// Items of a page, unless a request says otherwise.
pub const DEFAULT_PAGE_ITEMS: u32 = 100;
/// The most that a request may ask for.
pub const MAX_PAGE_ITEMS: u32 = 1000;

/// A page of a list, in the order of the items' names or times.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Page<T> {
    /// What is on it.
    pub items: Vec<T>,
    /// All that the request's filter lets through, on whatever page.
    #[schema(example = 1)]
    pub total: u64,
    /// What the next page is asked for by (`cursor=`); none: this is the last.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<String>,
}
