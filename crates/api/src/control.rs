//! Types and client of the manager's API: `/api/v1`, described by `/api/openapi.json`.
//!
//! Points in time are milliseconds since 1970, sizes are bytes and rates are bits per second, as
//! the field names say.

mod access;
mod alarms;
mod baseline;
mod certificates;
mod client;
mod cluster;
mod datastore_drains;
mod datastores;
mod events;
mod following;
mod ha;
mod hosts;
mod join;
mod journal;
mod limits;
mod load;
mod moves;
mod page;
mod preflight;
mod problem;
mod rules;
mod samples;
mod screen;
mod shares;
mod vms;

pub use access::{AuditEntry, AuditOutcome, CreateToken, CreatedToken, Me, Role, TokenInfo};
pub use alarms::{
    AcknowledgeAlarm, Acknowledgement, Alarm, AlarmChange, AlarmKind, AlarmNotice, AlarmSeverity,
    AlarmTest, ReceiverKind, ReceiverTest,
};
pub use baseline::{
    BaselineFit, BaselineHost, BaselineVm, COMPUTED_BASELINE, CommonCpu, CpuBaseline,
    CpuBaselineChange, CpuBaselineInfo, NamedCpu, SetCpuBaseline,
};
pub use certificates::{CertificateInfo, RevokedCertificates};
pub use client::{ManagerClient, ManagerError, TOKEN_VARIABLE};
pub use cluster::{Cluster, Leader};
pub use datastore_drains::{CreateDatastoreDrain, DatastoreDrain, DrainDisk, DrainDiskState};
pub use datastores::{
    DatastoreAtHost, DatastoreDetails, DatastoreDisk, ManagedDatastore, UpdateDatastore,
};
pub use events::{Change, ClusterEvent, StreamedEvent};
pub use following::{ManagerEvent, ManagerEvents};
pub use ha::{
    AdmissionPolicy, ConfirmOff, FencingTest, HaHostStatus, HaOwnVmStatus, HaPhase, HaSettings,
    HaShortfall, HaStatus, HaVmStatus,
};
pub use hosts::{AddHost, HostState, HostSummary, ManagedHost, UpdateHost};
pub use join::{JoinGrant, JoinRequest, JoinToken, JoinTokenInfo, JoinTokenText, Joined};
pub use journal::{JournalEntry, JournalFilter, JournalKind, JournalSeverity};
pub use limits::{HostMoves, LinkMoves, MoveLimits, UpdateLimits};
pub use load::{
    LoadCapacity, LoadHistory, LoadMetric, LoadResolution, LoadSeries, LoadTop, MOST_LOAD_POINTS,
    TopBy, TopHost, TopVm,
};
pub use moves::{
    CreateDrain, CreateMove, Drain, DrainState, DrainVm, DrainVmState, Move, MovePriority,
    MoveState, Waits,
};
pub use page::{DEFAULT_PAGE_ITEMS, MAX_PAGE_ITEMS, Page};
pub use preflight::{
    Check, CheckName, HostWarning, PlacementScore, Preflight, PreflightRanking, PreflightReport,
    RankedHost, RuledOutHost, Verdict,
};
pub use problem::{Problem, ProblemCode};
pub use rules::{CreateRule, RuleBreaker, RuleHosts, RuleInfo, RuleKind, RuleState, RuleStrength};
pub use samples::{MoveSamples, PhaseMark};
pub use screen::{SCREEN_CONNECT_AGAIN, VmMessage, VmSocket};
pub use shares::{ManagedNetwork, NetworkAtHost};
pub use vms::{
    BindVm, ChangeManagedVm, ChangedVm, CloneManagedVm, CreateManagedVm, HostedVm, ManagedVm,
    NameClaim, NameConflict, PlannedPower, StartManagedVm, StopManagedVm, VmSummary,
};

/// Port on which a manager listens if nothing else is configured.
pub const DEFAULT_MANAGER_PORT: u16 = 7800;
