//! Types of the agent's and the manager's HTTP APIs, and their clients, shared by the CLI, the
//! agents and the manager.
//!
//! This crate defines everything that crosses the APIs. How an agent carries out a request is not
//! known here.

mod adoption;
mod arriving_disks;
mod client;
mod clones;
pub mod control;
mod cpu;
mod crash;
mod datastores;
mod disks;
mod drives;
mod endpoint;
mod error;
mod events;
mod guest;
mod ha;
mod imports;
mod incoming;
mod jobs;
mod kept_disks;
mod load;
mod nics;
mod probe;
mod sse;
mod types;

pub use adoption::{AdoptGuest, Adoption, AdoptionState, ForeignGuest, ForeignPlace};
pub use arriving_disks::{
    ArrivingBase, ArrivingDisk, ArrivingDisks, ArrivingDisksAccepted, ArrivingDisksChecked,
    ArrivingImage, MOST_TRAVELLING_DISKS, OntoDevice,
};
pub use client::{Client, Connection, ConsoleStream, KeptConnections, LogStream};
pub use clones::{
    CloneMode, CloneVm, CreateSnapshot, KeptImage, RevertVm, SetTemplate, SnapshotInfo, VmImages,
};
pub use cpu::{GenerationInfo, HostCpuInfo};
pub use crash::{CrashCause, LastCrash};
pub use datastores::{CEPH_RBD, DatastoreInfo};
pub use disks::{CreateDisk, DiskInfo, DiskList, MoveDisk, NewDisk, ResizeDisk, with_new_disks};
pub use drives::{ChangeDrive, DriveChange};
pub use endpoint::{ClientError, Endpoint};
pub use error::{ApiError, ErrorCode};
pub use events::{Events, HostEvents, MigrationEvents, ProbeEvents, StreamEvent};
pub use godwit_types::ImportFinding;
pub use guest::{DEFAULT_FREEZE_MS, FreezeVm, GuestInfo, GuestNic, MOST_FREEZE_MS, SetNicLink};
pub use ha::{
    ConfirmOwnOff, HaAnswer, HaForward, HaForwarded, HaHost, HaRenewal, HaStanding, HaVerdict,
    HeartbeatReading, HeartbeatSlot, HeartbeatState, MOST_ENDING, MOST_HEARTBEAT_DATASTORES,
    MOST_HEARTBEATS_READ, MOST_HERE, MOST_OWN_VMS, MOST_RELEASED, OpenHeartbeat, OwnStanding,
    OwnVm, ReadHeartbeats, ReleaseVms, ReleasedVm, START_CARRIED_OUT, StartProtected, TermHolder,
};
pub use imports::{
    ExportFormat, ExportVm, ImportDisk, ImportFrom, ImportPlan, ImportVm, JobState, JobStatus,
    WarmImport, WarmStep,
};
pub use incoming::{
    IncomingAccepted, IncomingChecked, IncomingFirmware, IncomingRequest, IncomingResume,
    IncomingRun, IncomingState, IncomingStatus, OfferedContent, PageInAnswer, PageInRequest,
};
pub use jobs::{JobKind, JobSummary};
pub use kept_disks::{KeepDisk, KeptDisk, KeptDisks};
pub use load::{
    DiskLoad, HostLoad, LOAD_INTERVAL_MS, LoadSample, MOST_SAMPLED_DIRECTORIES, MOST_SAMPLED_DISKS,
    MOST_SAMPLED_PATH_BYTES, MOST_SAMPLED_VMS, StorageLoad, VmLoad,
};
pub use nics::NicChange;
pub use probe::{
    DEFAULT_PROBE_GUEST_BYTES, DEFAULT_PROBE_SECONDS, IncomingProbeAccepted, IncomingProbeRequest,
    IncomingProbeStatus, PROBE_SECONDS, ProbeEvent, ProbeRequest,
};
pub use sse::{Event, EventParser};
pub use types::{
    ChangeVm, CreateVm, DEFAULT_CUT_LIMIT_MS, DEFAULT_SWITCHOVER_BUDGET_MS, HostEvent, HostInfo,
    LimitOf, Limits, LogSource, MAX_STREAMS_A_LANE, MigrationAccepted, MigrationEvent,
    MigrationRequest, MigrationStatus, NetworkInfo, PageInState, QemuEngineOptions, ReferencesInfo,
    RenameVm, Resolve, Resolved, RevocationsTaken, SetLimit, SetPeers, SetRevocations, StopVm,
    TravellingDisks, VmInfo, VmState,
};

/// Socket on which an agent listens for the local command line if nothing else is configured.
pub const DEFAULT_SOCKET: &str = "/run/godwit/agent.sock";

/// Returns the name of a variant without fields in JSON.
#[must_use]
pub fn json_name(variant: &impl serde::Serialize) -> String {
    let name = serde_json::to_value(variant).unwrap_or_default();
    name.as_str().unwrap_or_default().to_owned()
}
