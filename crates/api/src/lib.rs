//! The types of the agent's HTTP API and the client that the CLI, the agents among themselves and, later, the
//! manager share.
//!
//! What crosses the API is defined here and nowhere else; how an agent carries it out is not known here.

mod client;
pub mod control;
mod cpu;
mod error;
mod events;
mod incoming;
mod probe;
mod sse;
mod types;

pub use client::{Client, ClientError, Connection, ConsoleStream, Endpoint, LogStream};
pub use cpu::{GenerationInfo, HostCpuInfo};
pub use error::{ApiError, ErrorCode};
pub use events::{Events, HostEvents, MigrationEvents, ProbeEvents, Told};
pub use incoming::{
    IncomingAccepted, IncomingChecked, IncomingRequest, IncomingResume, IncomingRun, IncomingState,
    IncomingStatus, PageInAnswer, PageInRequest, PageInState,
};
pub use probe::{
    DEFAULT_PROBE_GUEST_BYTES, DEFAULT_PROBE_SECONDS, IncomingProbeAccepted, IncomingProbeRequest,
    IncomingProbeStatus, PROBE_SECONDS, ProbeEvent, ProbeRequest,
};
pub use sse::{Event, EventParser};
pub use types::{
    CreateVm, DEFAULT_CUT_LIMIT_MS, DatastoreInfo, HostEvent, HostInfo, LimitOf, Limits, LogSource,
    MAX_STREAMS_A_LANE, MigrationAccepted, MigrationEvent, MigrationRequest, MigrationStatus,
    NetworkInfo, QemuEngineOptions, ReferencesInfo, Resolve, Resolved, RevocationsTaken, SetLimit,
    SetPeers, SetRevocations, StopVm, VmInfo, VmState,
};

/// Where an agent listens for the local command line when nothing else is configured.
pub const DEFAULT_SOCKET: &str = "/run/godwit/agent.sock";

/// The budget for the vCPUs' pause when a request names none, in milliseconds.
pub const DEFAULT_SWITCHOVER_BUDGET_MS: f64 = 20.0;
