//! Requests and responses. Times are in milliseconds and sizes in bytes, as the field names say.

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use godwit_qemu::{Firmware, SpecPatch, VmSpec};
use godwit_types::{
    Compression, EngineKind, Incarnation, Intent, PageInUse, Progress, RateLimit, ReferenceUse,
    Report, TrackingUse,
};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{ApiError, DatastoreInfo, ErrorCode, HostCpuInfo, LastCrash, LoadSample, NewDisk};

/// Budget for the vCPU pause if a request sets none, in milliseconds.
pub const DEFAULT_SWITCHOVER_BUDGET_MS: f64 = 20.0;

/// State of a VM on a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum VmState {
    /// The VM is defined and has no process.
    Stopped,
    /// The host is preparing the VM's resources and its hypervisor.
    Starting,
    /// The guest runs on this host.
    Running,
    /// The hypervisor runs on this host and the vCPUs are paused.
    Paused,
    /// The VM is shutting down.
    Stopping,
    /// The guest runs on this host while its memory is sent to another host.
    MigratingOut,
    /// Shadow VM: receives memory from another host, where the guest runs.
    MigratingIn,
    /// The hypervisor exited unexpectedly; `reason` gives the known cause.
    Failed,
    /// The VM has no process. Its memory and device state are in a file of the host.
    Suspended,
    /// The VM is a template: it is never started, and its images are never written. Clones are
    /// made of it.
    Template,
}

impl VmState {
    /// Returns the name that logs and the API use.
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
            VmState::Suspended => "suspended",
            VmState::Template => "template",
        }
    }

    /// Whether the VM has no hypervisor, and none is being started.
    #[must_use]
    pub fn is_off(self) -> bool {
        matches!(self, VmState::Stopped | VmState::Failed | VmState::Suspended | VmState::Template)
    }
}

impl fmt::Display for VmState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Response of `GET /v1/host`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct HostInfo {
    /// Name of the host, as configured.
    pub name: String,
    /// Version of the agent.
    pub version: String,
    /// Version of the running kernel.
    pub kernel: String,
    /// QEMU binary for VMs that name none; absent if it is unusable (see `qemu_problem`).
    #[schema(value_type = Option<String>)]
    pub qemu: Option<PathBuf>,
    /// Version of that QEMU.
    pub qemu_version: Option<String>,
    /// Reason why QEMU is unusable.
    pub qemu_problem: Option<String>,
    /// Versioned machine types of that QEMU; empty if QEMU is unusable or the agent has an older
    /// version.
    #[serde(default)]
    pub machines: Vec<String>,
    /// Firmware that VMs of machine type q35 may have; empty if the agent has an older version.
    #[serde(default)]
    pub firmware: Vec<Firmware>,
    /// Whether VMs may have a TPM; absent if the agent has an older version.
    #[serde(default)]
    pub tpm: Option<bool>,
    /// Version of its swtpm; absent if there is none or the agent has an older version.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tpm_version: Option<String>,
    /// Whether a 64-bit guest really runs under KVM on this host; absent until QEMU has been
    /// probed.
    pub kvm: Option<bool>,
    /// Reason why KVM is unusable, or how the value of `kvm` was determined.
    pub kvm_reason: Option<String>,
    /// Reason why the external engine cannot track memory on this host; absent if it can.
    pub tracking_problem: Option<String>,
    /// CPU available to guests; absent until QEMU has been probed or if it did not report it.
    #[serde(default)]
    pub cpu: Option<HostCpuInfo>,
    /// Reason why QEMU did not report the CPU available to guests.
    #[serde(default)]
    pub cpu_problem: Option<String>,
    /// Online logical processors, counting each hardware thread; 0 if the agent has an older
    /// version.
    #[serde(default)]
    pub logical_cores: u32,
    /// Load average over the last minute: runnable tasks.
    #[serde(default)]
    pub load_average_1min: f64,
    /// Guest memory that would be available without any VM; 0 if the agent has an older version.
    #[serde(default)]
    pub memory_total_bytes: u64,
    /// Guest memory available for a new VM.
    pub memory_available_bytes: u64,
    /// Guest memory committed to the active VMs.
    pub memory_committed_bytes: u64,
    /// Memory that pages of arriving guests may be sent by reference to.
    #[serde(default)]
    pub references: ReferencesInfo,
    /// Whether the kernel backs guest memory with huge pages.
    pub huge_pages: bool,
    /// Addresses on which the host accepts migrations.
    #[schema(value_type = Vec<String>)]
    pub migration_addresses: Vec<IpAddr>,
    /// Networks that a NIC can join.
    pub networks: BTreeMap<String, NetworkInfo>,
    /// Whether the host can filter what guests send (nftables); absent if the agent has an older
    /// version.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nic_filters: Option<bool>,
    /// Directories that must contain the disks of arriving guests, pools of Ceph as `rbd:POOL` or
    /// `rbd:POOL/NAMESPACE`, and thin pools of LVM as `lvm:GROUP/POOL`; empty if the agent has an
    /// older version.
    #[serde(default)]
    #[schema(value_type = Vec<String>)]
    pub vm_dirs: Vec<PathBuf>,
    /// Block devices that VMs may use, and directories of such devices, as volume groups have them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(value_type = Vec<String>)]
    pub block_devices: Vec<PathBuf>,
    /// Capacity of these directories and of directories with VM disks, for those that exist; empty
    /// until the first one was queried or if the agent has an older version.
    #[serde(default)]
    #[schema(value_type = BTreeMap<String, DatastoreInfo>)]
    pub datastores: BTreeMap<PathBuf, DatastoreInfo>,
    /// Hosts to which VMs can migrate: agent addresses, by name.
    pub peers: BTreeMap<String, String>,
    /// VMs defined on this host, shadow VMs included.
    pub vms: usize,
}

/// Memory of a host that pages of arriving guests may be sent by reference to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ReferencesInfo {
    /// VMs that have left and whose memory is retained for their return.
    pub bases: usize,
    /// Bytes of retained memory; they count as available.
    pub base_bytes: u64,
    /// Bytes of retained pages that were moved from memory to a disk.
    #[serde(default)]
    pub spilled_bytes: u64,
    /// Pages of images of disks whose digests are known, in steps of 2 MiB.
    #[serde(default)]
    pub disk_pages: u64,
    /// Pages of retained memory and of VMs that have arrived and run here.
    pub pages: u64,
    /// Pages whose digests are computed. The other digests are computed when a migration needs
    /// them, which takes time.
    pub digested_pages: u64,
}

/// A network of a host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NetworkInfo {
    /// Bridge that the tap devices join.
    pub bridge: String,
    /// Whether the bridge filters VLANs, so that NICs can have some; absent if that is unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vlans: Option<bool>,
}

/// A VM as one host reports it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct VmInfo {
    /// Name of the VM, unique on a host.
    pub name: String,
    /// Name of the host.
    pub host: String,
    /// State of the VM on this host.
    pub state: VmState,
    /// Known cause of the state: why the VM failed, or what it waits for.
    pub reason: Option<String>,
    /// Whether it is unknown which host may run the VM, this one or another.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub in_doubt: bool,
    /// Identifies this instance of the VM: a VM that is deleted and created again gets a new
    /// incarnation.
    #[serde(default, skip_serializing_if = "Incarnation::is_unrecorded")]
    #[schema(value_type = String)]
    pub incarnation: Incarnation,
    /// Ownership generation; it increases with each migration.
    pub epoch: u64,
    /// Process ID of the hypervisor, if there is one.
    pub pid: Option<i32>,
    /// Memory of the VM in bytes, all memory blocks together.
    pub memory_bytes: u64,
    /// Number of virtual CPUs.
    pub vcpus: u32,
    /// `kvm` or `tcg`.
    pub accel: String,
    /// Versioned machine type.
    pub machine: String,
    /// Migration in progress for this VM.
    pub migration: Option<String>,
    /// Memory that the VM still has to receive; absent if none is missing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub page_in: Option<PageInState>,
    /// Time at which the guest's frozen file systems are thawed, in milliseconds since 1970; absent
    /// if they are not frozen.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub frozen_until_ms: Option<u64>,
    /// Its last crash on this host; absent if there was none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_crash: Option<LastCrash>,
    /// Number of its snapshots. A VM with any does not move.
    #[serde(default, skip_serializing_if = "is_none_of_them")]
    pub snapshots: usize,
    /// IP addresses of its NICs, as the specification lists them.
    #[schema(value_type = Vec<String>)]
    pub addresses: Vec<IpAddr>,
    /// Specification of the VM, with all defaults filled in. Secrets in it are hidden; as a new
    /// value, `(hidden)` keeps a secret.
    pub spec: VmSpec,
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_none_of_them(count: &usize) -> bool {
    *count == 0
}

/// Request of `POST /v1/vms`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CreateVm {
    /// Specification of the VM.
    pub spec: VmSpec,
    /// Start the VM immediately. If the start fails, nothing remains, not even the definition.
    #[serde(default)]
    pub start: bool,
    /// Refuse files outside the host's `vm_dirs`. Links are followed and backing files of disks are
    /// included. The manager sets this for operators below the role admin.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub vm_dirs_only: bool,
    /// Disks whose images are created with the VM. They follow those of the specification.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub new_disks: Vec<NewDisk>,
}

impl CreateVm {
    /// Creates a request that permits any file and creates no disks.
    #[must_use]
    pub fn new(spec: VmSpec, start: bool) -> CreateVm {
        CreateVm { spec, start, vm_dirs_only: false, new_disks: Vec::new() }
    }
}

/// Request of `POST /v1/vms/{name}/resolve`: an operator's verified decision about a VM in doubt.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Resolve {
    /// The host that owns the guest. Name the addressed host if the other host of the hand-over
    /// does not run the guest and never will. Name the other host if it owns the guest; the
    /// addressed host then removes what is left of the VM.
    pub runs_on: String,
    /// Resume the guest at the source with the memory that it had at the hand-over. By default the
    /// guest ends, to be started again from its disks. Set this only if the destination never ran
    /// the guest: the retained memory does not reflect anything that the destination wrote to the
    /// disks.
    #[serde(default)]
    pub keep_memory: bool,
}

/// Response to a [`Resolve`] request.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Resolved {
    /// The VM on the addressed host; absent if nothing is left of it there.
    pub vm: Option<VmInfo>,
}

/// Request of `POST /v1/vms/{name}/stop`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StopVm {
    /// Terminate the hypervisor immediately, without a shutdown of the guest.
    #[serde(default)]
    pub force: bool,
    /// Time the guest may take to shut down after the ACPI power button, in milliseconds; absent:
    /// the agent's default.
    #[serde(default)]
    pub grace_ms: Option<u64>,
}

impl StopVm {
    /// Returns the time that the guest gets beyond the agent's default.
    pub(crate) fn grace(self) -> Duration {
        Duration::from_millis(self.grace_ms.unwrap_or(0))
    }
}

/// Request of `POST /v1/vms/{name}/rename`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({ "name": "shop" }))]
pub struct RenameVm {
    /// The VM's new name.
    pub name: String,
}

/// Request of `PATCH /v1/vms/{name}`: changes the specification of a stopped VM.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ChangeVm {
    /// Keys of the specification with their new values; null restores a key's default (JSON Merge
    /// Patch, RFC 7396). `name` and `uuid` cannot be changed.
    pub spec: SpecPatch,
    /// Begin with a new VM's defaults, not with the current specification.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub replace: bool,
    /// Specification that the change was checked against; the agent refuses the change if the VM
    /// has another one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expected: Option<Box<VmSpec>>,
    /// See [`CreateVm::vm_dirs_only`]; applies if the change names a file that the VM did not name.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub vm_dirs_only: bool,
}

/// Selects a log of a VM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogSource {
    /// Output of the guest on its serial console.
    #[default]
    Console,
    /// Output of the hypervisor.
    Qemu,
}

impl LogSource {
    /// Returns the value of the `source` query parameter.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            LogSource::Console => "console",
            LogSource::Qemu => "qemu",
        }
    }
}

/// Settings of QEMU's built-in migration, for `engine: qemu`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct QemuEngineOptions {
    /// Number of multifd channels; absent: a single stream without multifd.
    #[serde(default)]
    #[schema(minimum = 1, maximum = 255)]
    pub multifd_channels: Option<u32>,
    /// QEMU's `multifd-compression`: `zstd`, `zlib` or `none`. Requires multifd.
    #[serde(default)]
    #[schema(pattern = "^(none|zlib|zstd)$")]
    pub compression: Option<String>,
    /// Throttle the vCPUs if the migration does not converge (QEMU's auto-converge).
    #[serde(default)]
    pub auto_converge: bool,
    /// Switch to post-copy after the first round.
    #[serde(default)]
    pub postcopy: bool,
    /// Allow QEMU to send guest memory without TLS between hosts that otherwise use TLS.
    #[serde(default)]
    pub plaintext: bool,
    /// Let the destination's QEMU run the guest as soon as it has loaded it, without waiting for
    /// the source agent. This saves half a round trip. If the link breaks at the very end, two
    /// copies of the guest can run. Post-copy always works this way.
    #[serde(default)]
    pub autostart: bool,
}

impl QemuEngineOptions {
    /// Checks each value on its own.
    ///
    /// # Errors
    /// [`ErrorCode::InvalidRequest`]: QEMU does not support the value.
    pub fn check_values(&self) -> Result<(), ApiError> {
        let refuse =
            |message, remedy| Err(ApiError::new(ErrorCode::InvalidRequest, message, remedy));
        match self.multifd_channels {
            Some(channels) if !(1..=255).contains(&channels) => {
                return refuse(
                    format!("invalid number of multifd channels: {channels}"),
                    "use 1 to 255",
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

    /// Checks the combination of values.
    ///
    /// # Errors
    /// [`ErrorCode::InvalidRequest`]: QEMU does not support the combination.
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

    /// Returns whether the destination's QEMU runs the guest without waiting for the agents.
    #[must_use]
    pub fn runs_by_itself(&self) -> bool {
        self.autostart || self.postcopy
    }
}

/// Request of `POST /v1/vms/{name}/migrations`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MigrationRequest {
    /// Destination host, one of the source's peers.
    pub to: String,
    /// Migration ID chosen by the client. A repeated request with the same ID does not start a
    /// second migration. Absent: the agent chooses an ID.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// Engine that transfers the memory.
    #[serde(default)]
    pub engine: EngineKind,
    /// Longest allowed pause of the vCPUs, in milliseconds.
    #[serde(default = "default_budget_ms")]
    pub switchover_budget_ms: f64,
    /// Goal of the migration, for `engine: godwit`: `auto`, `minimal-pause`, `minimal-impact`,
    /// `fast-evacuation`, `deadline=90s`.
    #[serde(default)]
    pub policy: Intent,
    /// Whether the guest may run at the destination while some of its pages are still at the
    /// source, for `engine: godwit`: `never`, `allowed` (if the policy finds no better plan) or
    /// `now` (after each page has been sent once). If the VM's specification forbids it, it never
    /// happens.
    #[serde(default)]
    pub page_in: PageInUse,
    /// Settings for `engine: qemu`.
    #[serde(default)]
    pub qemu: QemuEngineOptions,
    /// TCP streams of each lane; absent: the number that measurement shows to be useful.
    #[serde(default)]
    pub streams: Option<u32>,
    /// Bandwidth limit of this migration, in addition to the limits of lanes and host; absent: the
    /// host's default for migrations.
    #[serde(default)]
    pub bandwidth_limit: Option<RateLimit>,
    /// Compression of pages, for `engine: godwit`. QEMU's engine has its own setting
    /// ([`QemuEngineOptions::compression`]).
    #[serde(default)]
    pub compression: Compression,
    /// Longest interruption of the link before the switchover, in milliseconds, for `engine:
    /// godwit`. Both hosts keep their state and the migration resumes where it was. 0: an
    /// interruption ends the migration.
    #[serde(default = "default_cut_limit_ms")]
    pub cut_limit_ms: u64,
    /// Memory that pages may refer to instead of being sent, for `engine: godwit`. The
    /// configuration of either host may restrict it. `all` also lets the source retain the memory
    /// for the VM's return.
    #[serde(default)]
    pub references: ReferenceUse,
    /// How the pages are found that the guest writes, for `engine: godwit`. `auto`: the source
    /// host's configuration decides.
    #[serde(default, skip_serializing_if = "TrackingUse::is_auto")]
    pub tracking: TrackingUse,
    /// Disks travel with the VM, for `engine: godwit`. Absent: the destination must have them under
    /// the same paths.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disks: Option<TravellingDisks>,
}

/// How disks travel with a VM. Disks that the VM only reads, and CDs, do not travel: the
/// destination must have them under the same paths.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct TravellingDisks {
    /// Directory for the images at the destination, one of its directories for VMs or of its block
    /// devices for VMs, or a pool of Ceph there, as `rbd:POOL` or `rbd:POOL/NAMESPACE`, or a thin
    /// pool of LVM, as `lvm:GROUP/POOL`. Absent: the directory of each image at the source.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub to: Option<PathBuf>,
    /// Whether the source deletes its images once the VM runs at the destination. Otherwise they
    /// stay for a time that the source's configuration sets, a day by default, as images that no
    /// VM uses.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub delete_source: bool,
    /// Whether the source keeps its images until they are deleted by request. Not together with
    /// `delete_source`.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub keep_source: bool,
    /// Whether the content of backing files travels, too: the images at the destination need none.
    /// Otherwise the destination must have the same backing files, with the same content.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub flatten: bool,
    /// Whether block devices at the destination that have content are overwritten. Otherwise only
    /// empty ones are used.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub overwrite: bool,
}

impl TravellingDisks {
    /// Checks what the source is to do with its images.
    ///
    /// # Errors
    /// It would delete and keep them.
    pub fn check(&self) -> Result<(), ApiError> {
        if !(self.delete_source && self.keep_source) {
            return Ok(());
        }
        let message = "cannot both delete and keep the images at the source";
        let remedy = "set delete_source or keep_source, not both";
        Err(ApiError::new(ErrorCode::InvalidRequest, message, remedy))
    }
}

/// Maximum of [`MigrationRequest::streams`].
pub const MAX_STREAMS_A_LANE: u32 = 64;

/// Default of [`MigrationRequest::cut_limit_ms`]: 5 minutes.
pub const DEFAULT_CUT_LIMIT_MS: u64 = 300_000;

fn default_cut_limit_ms() -> u64 {
    DEFAULT_CUT_LIMIT_MS
}

fn default_budget_ms() -> f64 {
    DEFAULT_SWITCHOVER_BUDGET_MS
}

impl MigrationRequest {
    /// Creates a request with the default settings.
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
            tracking: TrackingUse::default(),
            disks: None,
        }
    }
}

/// Response to a [`MigrationRequest`]: the migration has started.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MigrationAccepted {
    /// ID of the migration.
    pub id: String,
}

/// Response of `GET /v1/migrations/{id}`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MigrationStatus {
    /// ID of the migration.
    pub id: String,
    pub vm: String,
    /// Source host.
    pub from: String,
    /// Destination host.
    pub to: String,
    /// Engine that transfers the memory.
    pub engine: EngineKind,
    /// Start time, in milliseconds since 1970.
    pub started_unix_ms: u64,
    /// Bandwidth limit of this migration; `progress` has the effective limit, which includes those
    /// of lanes and host.
    #[serde(default)]
    pub bandwidth_limit: RateLimit,
    /// Current phase and progress.
    pub progress: Progress,
    /// Result; absent while the migration runs.
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

/// Response of `GET /v1/limits`: bandwidth limits for guest pages that leave the host. A limit is a
/// rate in bits per second, measured on the data handed to TCP, as text: `2gbit`, `500mbit`, at
/// least `1mbit`; or `none`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    /// Limit for all migrations together.
    pub host: RateLimit,
    /// Default limit of a migration whose request sets none.
    pub migration: RateLimit,
    /// Limits of lanes, by this host's address; lanes that are not listed have no limit.
    pub lanes: BTreeMap<IpAddr, RateLimit>,
}

/// Request of `PUT /v1/limits/host`, `/v1/limits/migration`, `/v1/limits/lanes/{address}` and
/// `/v1/migrations/{id}/limit`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SetLimit {
    /// New limit, effective immediately.
    pub limit: RateLimit,
}

/// Selects one of a host's limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LimitOf {
    /// All migrations of the host together.
    Host,
    /// Each migration that starts from then on and whose request sets no limit.
    Migration,
    /// Lanes that leave from this address of the host.
    Lane(IpAddr),
}

/// Request of `PUT /v1/peers`: migration targets in addition to those of the configuration, which
/// take precedence.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SetPeers {
    /// Agent addresses, by host name.
    pub peers: BTreeMap<String, String>,
}

/// Request of `PUT /v1/revocations`: the revoked certificates. The list replaces the previous one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SetRevocations {
    /// X.509 certificate revocation list signed by the cluster's certificate authority, PEM.
    pub list: String,
}

/// Response to [`SetRevocations`]: the list is in effect.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RevocationsTaken {
    pub number: u64,
    pub certificates: usize,
}

/// Event of `GET /v1/watch`: first the whole state of the host, then `known`, then each change.
#[derive(Clone, Debug, PartialEq)]
pub enum HostEvent {
    /// Properties and resources of the host.
    Host(Box<HostInfo>),
    /// A VM that is new or has changed.
    Vm(Box<VmInfo>),
    /// Name of a VM that no longer exists on the host.
    VmGone(String),
    /// A migration from this host that runs or has ended since the stream began. Migrations that
    /// had ended before are not reported.
    Migration(Box<MigrationStatus>),
    /// Load of the host and its VMs: the newest sample, then each new one.
    Load(Box<LoadSample>),
    /// The initial state is complete.
    Known,
}

/// Event of `GET /v1/migrations/{id}/events`: progress, then one report.
#[derive(Clone, Debug, PartialEq)]
pub enum MigrationEvent {
    /// Current progress.
    Progress(Progress),
    /// Result; the last event.
    Report(Box<Report>),
}

/// Memory that a running VM still has to receive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PageInState {
    /// Pages that are still at the source.
    pub missing_pages: u64,
    /// Whether pages arrive now; false while the link to the source is interrupted.
    pub connected: bool,
}
