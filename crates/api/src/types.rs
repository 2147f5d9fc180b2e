//! Requests and answers. Times in milliseconds, sizes in bytes, as the field names say.

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;
use std::path::PathBuf;

use godwit_qemu::VmSpec;
use godwit_types::{
    Compression, EngineKind, Incarnation, Intent, PageInUse, Progress, RateLimit, ReferenceUse,
    Report,
};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{ApiError, DEFAULT_SWITCHOVER_BUDGET_MS, ErrorCode, HostCpuInfo, PageInState};

/// What a VM does on this host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum VmState {
    /// Defined, no process.
    Stopped,
    /// Its resources and its hypervisor are being made.
    Starting,
    /// The guest runs here.
    Running,
    /// The hypervisor is here, the vCPUs stand still.
    Paused,
    /// It is being shut down.
    Stopping,
    /// The guest runs here and its memory is on the way to another host.
    MigratingOut,
    /// A shadow: memory arrives from another host, where the guest runs.
    MigratingIn,
    /// The hypervisor is gone and nobody asked for that; `reason` says what is known.
    Failed,
}

impl VmState {
    /// The name that logs and the API use.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            VmState::Stopped => "stopped",
            VmState::Starting => "starting",
            VmState::Running => "running",
            VmState::Paused => "paused",
            VmState::Stopping => "stopping",
            VmState::MigratingOut => "migrating-out",
            VmState::MigratingIn => "migrating-in",
            VmState::Failed => "failed",
        }
    }
}

impl fmt::Display for VmState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// `GET /v1/host`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct HostInfo {
    /// The host's name, as in its configuration.
    pub name: String,
    /// The agent's version.
    pub version: String,
    /// The running kernel.
    pub kernel: String,
    /// The QEMU that VMs get that name none; none where it can't be used (`qemu_problem` says why).
    #[schema(value_type = Option<String>)]
    pub qemu: Option<PathBuf>,
    /// Its version.
    pub qemu_version: Option<String>,
    /// Why it can't be used.
    pub qemu_problem: Option<String>,
    /// The machine types that it has, by their versioned names; empty: it can't be used, or the agent is of an older version.
    #[serde(default)]
    pub machines: Vec<String>,
    /// Whether a 64-bit guest really runs under KVM here; none while nobody has asked QEMU yet.
    pub kvm: Option<bool>,
    /// Why not, or how that is known.
    pub kvm_reason: Option<String>,
    /// Why the external engine can't track memory here; none where it can.
    pub tracking_problem: Option<String>,
    /// The CPU that guests can have; none while nobody has asked QEMU yet, or where it did not say.
    #[serde(default)]
    pub cpu: Option<HostCpuInfo>,
    /// Why QEMU did not say what CPU guests can have.
    #[serde(default)]
    pub cpu_problem: Option<String>,
    /// Processors that run, each thread of a core counted; 0: the agent is of an older version.
    #[serde(default)]
    pub logical_cores: u32,
    /// Tasks that ran or wanted to, on average over the last minute.
    #[serde(default)]
    pub load_average_1min: f64,
    /// Guest memory that there would be without any VM; 0: the agent is of an older version.
    #[serde(default)]
    pub memory_total_bytes: u64,
    /// Guest memory that a new VM can get.
    pub memory_available_bytes: u64,
    /// Guest memory promised to the VMs that are active here.
    pub memory_committed_bytes: u64,
    /// What arriving guests' pages may be told by.
    #[serde(default)]
    pub references: ReferencesInfo,
    /// Whether the kernel backs guest memory with huge pages.
    pub huge_pages: bool,
    /// Addresses at which migrations arrive.
    #[schema(value_type = Vec<String>)]
    pub migration_addresses: Vec<IpAddr>,
    /// The networks that a NIC can join.
    pub networks: BTreeMap<String, NetworkInfo>,
    /// Directories below which disks of arriving guests have to be; empty: the agent is of an older version.
    #[serde(default)]
    #[schema(value_type = Vec<String>)]
    pub vm_dirs: Vec<PathBuf>,
    /// Room in these and in directories of VMs' disks, of those that are there; empty: none has been asked yet, or the agent is of an older version.
    #[serde(default)]
    #[schema(value_type = BTreeMap<String, DatastoreInfo>)]
    pub datastores: BTreeMap<PathBuf, DatastoreInfo>,
    /// The hosts that VMs can be moved to.
    pub peers: BTreeMap<String, String>,
    /// VMs defined here, shadows included.
    pub vms: usize,
}

/// Memory of a host that arriving guests' pages may be told by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ReferencesInfo {
    /// VMs that left and whose memory is kept for their way back.
    pub bases: usize,
    /// Memory that this takes; it counts as available.
    pub base_bytes: u64,
    /// Pages of these and of VMs that arrived and run here.
    pub pages: u64,
    /// Pages of them whose digests are worked out: what is not is worked out when a migration asks for it, which takes time.
    pub digested_pages: u64,
}

/// The file system that a directory of a host is on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DatastoreInfo {
    /// What it holds, bytes.
    pub total_bytes: u64,
    /// What of that users may still fill, bytes.
    pub free_bytes: u64,
}

/// A network of a host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NetworkInfo {
    /// The bridge that taps join.
    pub bridge: String,
}

/// A VM as one host sees it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct VmInfo {
    /// Its name, unique on a host.
    pub name: String,
    /// The host's name.
    pub host: String,
    /// What it does.
    pub state: VmState,
    /// What is known about how it came into that state (why it failed, what it waits for).
    pub reason: Option<String>,
    /// Whether it is not known if this host or another may run it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub in_doubt: bool,
    /// Which life of the VM this is: another one after it was deleted and created again.
    #[serde(default, skip_serializing_if = "Incarnation::is_unrecorded")]
    #[schema(value_type = String)]
    pub incarnation: Incarnation,
    /// The generation of its ownership: grows with each move.
    pub epoch: u64,
    /// The hypervisor's process, where there is one.
    pub pid: Option<i32>,
    /// All memory blocks together.
    pub memory_bytes: u64,
    /// Virtual CPUs.
    pub vcpus: u32,
    /// `kvm` or `tcg`.
    pub accel: String,
    /// The versioned machine type.
    pub machine: String,
    /// The migration that holds it.
    pub migration: Option<String>,
    /// What it still lacks of its memory; none: nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub page_in: Option<PageInState>,
    /// Addresses of its NICs, as the specification names them.
    #[schema(value_type = Vec<String>)]
    pub addresses: Vec<IpAddr>,
    /// The specification it was made from, with everything filled in.
    pub spec: VmSpec,
}

/// `POST /v1/vms`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CreateVm {
    /// What to make.
    pub spec: VmSpec,
    /// Start it at once; if that fails, nothing is left, not even the definition.
    #[serde(default)]
    pub start: bool,
    /// Refuse files that are not below the host's `vm_dirs`, links followed, backing files of disks
    /// included. The manager sets it for operators below the role admin.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub vm_dirs_only: bool,
}

/// `POST /v1/vms/{name}/resolve`: an operator's word on a VM in doubt, who has made sure of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Resolve {
    /// The host whose guest it is: the asked one, where the other one of the hand-over does not run it and never will, or that other
    /// one; then what is left of it at the asked host goes.
    pub runs_on: String,
    /// Where it is the source's: its guest goes on as it was when it was handed over, instead of being ended, to be started anew from its
    /// disks. For where the destination never ran it: of what it wrote to disks there, this memory knows nothing.
    #[serde(default)]
    pub keep_memory: bool,
}

/// The answer to a [`Resolve`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Resolved {
    /// The VM at the asked host; none: nothing is left of it there.
    pub vm: Option<VmInfo>,
}

/// `POST /v1/vms/{name}/stop`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StopVm {
    /// Do not ask the guest, end the hypervisor at once.
    #[serde(default)]
    pub force: bool,
    /// How long the guest may take after the power button, in milliseconds; none: the agent's default.
    #[serde(default)]
    pub grace_ms: Option<u64>,
}

/// Which log of a VM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogSource {
    /// What the guest wrote to its serial console.
    #[default]
    Console,
    /// What the hypervisor wrote.
    Qemu,
}

impl LogSource {
    /// The value of the `source` query parameter.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            LogSource::Console => "console",
            LogSource::Qemu => "qemu",
        }
    }
}

/// Settings of QEMU's own migration, for `engine: qemu`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct QemuEngineOptions {
    /// Parallel channels; none: one plain stream.
    #[serde(default)]
    #[schema(minimum = 1, maximum = 255)]
    pub multifd_channels: Option<u32>,
    /// `zstd`, `zlib` or `none`, with multifd: QEMU's `multifd-compression`.
    #[serde(default)]
    #[schema(pattern = "^(none|zlib|zstd)$")]
    pub compression: Option<String>,
    /// Throttle the vCPUs where the migration does not converge.
    #[serde(default)]
    pub auto_converge: bool,
    /// Switch to post-copy when the first round is over.
    #[serde(default)]
    pub postcopy: bool,
    /// Between hosts that protect what they say: QEMU's own engine may send the guest's memory unprotected all the same.
    #[serde(default)]
    pub plaintext: bool,
    /// The destination's QEMU runs the guest as soon as it has loaded it, without the source agent's word: half a round
    /// trip sooner, and a link that breaks at the very end can leave two that run. Post-copy is always so.
    #[serde(default)]
    pub autostart: bool,
}

impl QemuEngineOptions {
    /// What is wrong with a value.
    ///
    /// # Errors
    /// [`ErrorCode::InvalidRequest`]: QEMU has no such value.
    pub fn check_values(&self) -> Result<(), ApiError> {
        let refuse =
            |message, remedy| Err(ApiError::new(ErrorCode::InvalidRequest, message, remedy));
        match self.multifd_channels {
            Some(channels) if !(1..=255).contains(&channels) => {
                return refuse(
                    format!("{channels} multifd channels are not possible"),
                    "give 1 to 255",
                );
            }
            _ => {}
        }
        match self.compression.as_deref() {
            None | Some("none" | "zlib" | "zstd") => Ok(()),
            Some(other) => {
                refuse(format!("QEMU knows no compression \"{other}\""), "give none, zlib or zstd")
            }
        }
    }

    /// What is wrong with what is asked together.
    ///
    /// # Errors
    /// [`ErrorCode::InvalidRequest`]: QEMU can't do both.
    pub fn check_together(&self) -> Result<(), ApiError> {
        let refuse =
            |message: &str, remedy| Err(ApiError::new(ErrorCode::InvalidRequest, message, remedy));
        match self.multifd_channels {
            Some(_) if self.postcopy => {
                refuse("post-copy and multifd do not go together in QEMU", "leave one of them out")
            }
            None if self.compression.is_some() => {
                refuse("compression needs multifd", "give --multifd-channels as well")
            }
            _ => Ok(()),
        }
    }

    /// Whether the destination's QEMU runs the guest by itself.
    #[must_use]
    pub fn runs_by_itself(&self) -> bool {
        self.autostart || self.postcopy
    }
}

/// `POST /v1/vms/{name}/migrations`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MigrationRequest {
    /// The destination, one of the source's peers.
    pub to: String,
    /// Its name, chosen by who asks: asked for again by the same name, it is not begun again. None: the agent's choice.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// Who moves the memory.
    #[serde(default)]
    pub engine: EngineKind,
    /// How long the vCPUs may stand still.
    #[serde(default = "default_budget_ms")]
    pub switchover_budget_ms: f64,
    /// What matters most, for `engine: godwit`: `auto`, `minimal-pause`, `minimal-impact`, `fast-evacuation`, `deadline=90s`.
    #[serde(default)]
    pub policy: Intent,
    /// Whether the guest may run at the destination while pages of it are still at the source, for `engine: godwit`: `never`,
    /// `allowed` (where the policy finds nothing better), `now` (when each page has been sent once). A VM whose specification
    /// refuses it is never.
    #[serde(default)]
    pub page_in: PageInUse,
    /// Settings for `engine: qemu`.
    #[serde(default)]
    pub qemu: QemuEngineOptions,
    /// TCP streams of each lane; none: as many as measurement finds to pay.
    #[serde(default)]
    pub streams: Option<u32>,
    /// How fast its pages may leave, beside the limits of lanes and host; none: the host's default for migrations.
    #[serde(default)]
    pub bandwidth_limit: Option<RateLimit>,
    /// What compresses the pages, for `engine: godwit`; QEMU's has its own ([`QemuEngineOptions::compression`]).
    #[serde(default)]
    pub compression: Compression,
    /// How long a cut of the link may last before the switchover, in milliseconds, for `engine: godwit`: both hosts keep what they have, and
    /// it goes on where it was. 0: a cut is the end.
    #[serde(default = "default_cut_limit_ms")]
    pub cut_limit_ms: u64,
    /// What pages may be told by instead of being sent, for `engine: godwit`; both hosts' configurations may allow less. `all`
    /// also lets the source keep the memory for the way back.
    #[serde(default)]
    pub references: ReferenceUse,
}

/// The most that a request may ask for.
pub const MAX_STREAMS_A_LANE: u32 = 64;

/// How long a cut of the link may last, unless a request says otherwise: 5 minutes.
pub const DEFAULT_CUT_LIMIT_MS: u64 = 300_000;

fn default_cut_limit_ms() -> u64 {
    DEFAULT_CUT_LIMIT_MS
}

fn default_budget_ms() -> f64 {
    DEFAULT_SWITCHOVER_BUDGET_MS
}

impl MigrationRequest {
    /// A migration with the defaults.
    pub fn to(host: impl Into<String>) -> Self {
        MigrationRequest {
            to: host.into(),
            id: None,
            engine: EngineKind::default(),
            switchover_budget_ms: DEFAULT_SWITCHOVER_BUDGET_MS,
            policy: Intent::default(),
            page_in: PageInUse::default(),
            qemu: QemuEngineOptions::default(),
            streams: None,
            bandwidth_limit: None,
            compression: Compression::default(),
            cut_limit_ms: DEFAULT_CUT_LIMIT_MS,
            references: ReferenceUse::default(),
        }
    }
}

/// The answer to a [`MigrationRequest`]: it has begun.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MigrationAccepted {
    /// Names it from here on.
    pub id: String,
}

/// `GET /v1/migrations/{id}`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MigrationStatus {
    /// Its name.
    pub id: String,
    pub vm: String,
    /// The source host.
    pub from: String,
    /// The destination host.
    pub to: String,
    /// Who moves the memory.
    pub engine: EngineKind,
    /// When it began, milliseconds since 1970.
    pub started_unix_ms: u64,
    /// Its own limit; what holds it, with those of lanes and host, stands in `progress`.
    #[serde(default)]
    pub bandwidth_limit: RateLimit,
    /// Where it is.
    pub progress: Progress,
    /// How it ended; none while it runs.
    pub report: Option<Report>,
}

impl MigrationStatus {
    /// Creates the status of a migration by Godwit's own engine that has not sent anything yet.
    pub fn begun(
        id: impl Into<String>,
        vm: impl Into<String>,
        from: impl Into<String>,
        to: impl Into<String>,
        guest_bytes: u64,
    ) -> MigrationStatus {
        MigrationStatus {
            id: id.into(),
            vm: vm.into(),
            from: from.into(),
            to: to.into(),
            engine: EngineKind::Godwit,
            started_unix_ms: 0,
            bandwidth_limit: RateLimit::NONE,
            progress: Progress::begin(guest_bytes),
            report: None,
        }
    }
}

/// `GET /v1/limits`: how fast the pages of guests may leave the host. A limit is a rate in bits per second of what is handed to
/// TCP, as text: `2gbit`, `500mbit`, at least `1mbit`; or `none`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    /// All migrations together.
    pub host: RateLimit,
    /// Each migration whose request names none.
    pub migration: RateLimit,
    /// Lanes, by this host's address; those that are not named have no limit.
    pub lanes: BTreeMap<IpAddr, RateLimit>,
}

/// `PUT /v1/limits/host`, `/v1/limits/migration`, `/v1/limits/lanes/{address}` and `/v1/migrations/{id}/limit`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SetLimit {
    /// The limit from now on.
    pub limit: RateLimit,
}

/// One of a host's limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LimitOf {
    /// All migrations of the host together.
    Host,
    /// Each migration that begins from then on and whose request names none.
    Migration,
    /// The lanes that leave from this address of the host.
    Lane(IpAddr),
}

/// `PUT /v1/peers`: hosts that VMs can be moved to beside those of the configuration, which come first.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SetPeers {
    /// Their agents' addresses, by name.
    pub peers: BTreeMap<String, String>,
}

/// `PUT /v1/revocations`: the certificates that are revoked, in the place of the list before.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SetRevocations {
    /// An X.509 revocation list that the cluster's authority has signed, PEM.
    pub list: String,
}

/// The answer to [`SetRevocations`]: the list counts from now on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RevocationsTaken {
    pub number: u64,
    pub certificates: usize,
}

/// What `GET /v1/watch` sends: everything that the host has, `known`, and then each change.
#[derive(Clone, Debug, PartialEq)]
pub enum HostEvent {
    /// What the host is and has.
    Host(Box<HostInfo>),
    /// A VM that is new or has changed.
    Vm(Box<VmInfo>),
    /// A VM that the host has no more, by its name.
    VmGone(String),
    /// A migration from this host that runs, or has ended since; of those that had ended before, nothing is told.
    Migration(Box<MigrationStatus>),
    /// Everything that was there at the beginning has been told.
    Known,
}

/// What `GET /v1/migrations/{id}/events` sends: progress, then one report.
#[derive(Clone, Debug, PartialEq)]
pub enum MigrationEvent {
    /// Where it is.
    Progress(Progress),
    /// How it ended; the last event.
    Report(Box<Report>),
}
