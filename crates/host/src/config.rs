//! The agent's configuration file (TOML). Every error names the file, the place in it and the
//! remedy.

mod keep_time;
mod libvirt;

pub use keep_time::KeepTime;
pub use libvirt::LibvirtConfig;

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use godwit_api::{DEFAULT_SOCKET, Endpoint};
use godwit_migration::drive::Deltas;
use godwit_migration::{MeansUse, PolicySettings};
use godwit_qemu::{ByteSize, ThinPool, VmName};
use godwit_types::{Intent, RateLimit, ReferenceUse, TrackingUse};
use serde::Deserialize;

use crate::block_devices;
use crate::ceph::{CephConfig, pools_of, problem_of};
use crate::firmware::FirmwareConfig;
use crate::thin_pools;
use crate::user::UserRange;

/// Longest `run_dir`, in bytes. The path of a unix socket has at most 107 bytes (`sun_path`,
/// unix(7)). It must also hold what the agent appends to `run_dir` for the VM with the longest
/// name: `/vms/NAME/serial.sock`.
const MAX_RUN_DIR_BYTES: usize = 107 - "/vms/".len() - VmName::MAX_BYTES - "/serial.sock".len();

/// Contents of the file that `godwit host run --config FILE` reads.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Name of this host in `migrate --to` and in reports. Default: the machine's name.
    #[serde(default = "godwit_pki::machine_name")]
    pub name: String,
    /// Listen addresses for other agents. Empty: this host takes part in no migration.
    #[serde(default)]
    pub listen: Vec<SocketAddr>,
    /// Unix socket for the command line; only root may use it.
    #[serde(default = "default_socket")]
    pub socket: PathBuf,
    /// Directory for state that must survive a reboot: the definitions of VMs.
    #[serde(default = "default_state_dir")]
    pub state_dir: PathBuf,
    /// Directory for the memory of suspended VMs. Default: `suspended` in the state directory.
    #[serde(default)]
    pub suspend_dir: Option<PathBuf>,
    /// Directory for files that live as long as the VMs' processes: sockets, logs.
    #[serde(default = "default_run_dir")]
    pub run_dir: PathBuf,
    /// Mount point of the tmpfs for guest memory. Default: `ram` in the run directory.
    #[serde(default)]
    pub ram_dir: Option<PathBuf>,
    /// Addresses of this host that receive migrations.
    #[serde(default)]
    pub migration_addresses: Vec<IpAddr>,
    /// QEMU for VMs that name none: a path, or a name to look up in PATH.
    #[serde(default = "default_qemu")]
    pub qemu: PathBuf,
    /// Other QEMU programs that VMs arriving from other hosts may name.
    #[serde(default)]
    pub qemu_programs: Vec<PathBuf>,
    /// Range of user IDs, one for each QEMU. Default: [`crate::DEFAULT_USERS`].
    #[serde(default)]
    pub qemu_users: Option<UserRange>,
    /// One user for all QEMUs, in place of `qemu_users`: a name in /etc/passwd, or `UID:GID`.
    #[serde(default)]
    pub qemu_user: Option<String>,
    /// Whether QEMU runs with its seccomp filter, which denies system calls that it never needs.
    #[serde(default = "yes")]
    pub qemu_sandbox: bool,
    /// Parent cgroup (v2) of the VMs' cgroups, delegated with the controllers `memory` and `pids`.
    /// Default: the cgroup of the packaged unit, if the agent runs from that unit.
    #[serde(default)]
    pub vm_cgroup: Option<PathBuf>,
    /// Directories whose files VMs arriving from other hosts may name. Default: the usual image
    /// directories.
    #[serde(default = "default_vm_dirs")]
    pub vm_dirs: Vec<PathBuf>,
    /// How long images stay after their disks have moved to another host. Default: a day.
    #[serde(default)]
    pub keep_source_disks: KeepTime,
    /// Block devices that VMs may use, and directories of such devices, as volume groups have them.
    #[serde(default)]
    pub block_devices: Vec<PathBuf>,
    /// Images of UEFI firmware. Default: those that QEMU's packages describe.
    #[serde(default)]
    pub firmware: FirmwareConfig,
    /// Program that is the TPM of a VM: a path, or a name to look up in PATH.
    #[serde(default = "default_swtpm")]
    pub swtpm: PathBuf,
    /// Library preloaded into QEMU. Default: `libgodwit_tracker.so` beside this program or in its
    /// lib directory.
    #[serde(default)]
    pub tracker: Option<PathBuf>,
    /// This host's certificate and the authority it trusts. Required unless `insecure` is set.
    #[serde(default)]
    pub tls: Option<TlsConfig>,
    /// Whether agents and migrations communicate without TLS. Only for a dedicated network.
    #[serde(default)]
    pub insecure: bool,
    /// Bandwidth limits of outgoing migrations.
    #[serde(default)]
    pub limits: LimitsConfig,
    /// Page references: pages sent by digest in place of their content.
    #[serde(default)]
    pub references: ReferencesConfig,
    /// Page deltas: memory for earlier page contents, against which changed pages are encoded.
    #[serde(default)]
    pub deltas: DeltasConfig,
    /// Means of finding the pages that guests write.
    #[serde(default)]
    pub tracking: TrackingConfig,
    /// Means of throttling guests that write too fast.
    #[serde(default)]
    pub throttle: ThrottleConfig,
    /// Changes to the policies of migrations from this host.
    #[serde(default)]
    pub policies: PoliciesConfig,
    /// libvirt on this host, whose guests may be adopted.
    #[serde(default)]
    pub libvirt: LibvirtConfig,
    /// High availability of protected VMs.
    #[serde(default)]
    pub ha: HaConfig,
    /// Networks, by the name that NICs use.
    #[serde(default)]
    pub networks: BTreeMap<String, NetworkConfig>,
    /// Clusters of Ceph that VMs may have disks in.
    #[serde(default)]
    pub ceph: Vec<CephConfig>,
    /// Thin pools of LVM that disks may arrive in, of volume groups in `block_devices`.
    #[serde(default)]
    pub thin_pools: Vec<ThinPool>,
    /// LVM's program, for thin pools: a path, or a name to look up in PATH.
    #[serde(default = "default_lvm")]
    pub lvm: PathBuf,
    /// URLs of the agents of other hosts, by host name.
    #[serde(default)]
    pub peers: BTreeMap<String, String>,
}

/// How this host ends its protected VMs if nothing else does.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct HaConfig {
    /// Watchdog of the kernel or the hardware, which `godwit host watchdog` uses.
    pub watchdog: Option<PathBuf>,
}

/// TLS files, as `godwit pki` writes them.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TlsConfig {
    pub authority: PathBuf,
    pub certificate: PathBuf,
    pub key: PathBuf,
    /// List of revoked certificates, written by `godwit pki crl`; used beside the list that a
    /// manager sends.
    #[serde(default)]
    pub revoked: Option<PathBuf>,
}

/// Bandwidth limits of migrations; an operator may change them while the agent runs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LimitsConfig {
    /// Limit of all migrations together.
    #[serde(default)]
    pub host: RateLimit,
    /// Limit of each migration whose request names none.
    #[serde(default)]
    pub migration: RateLimit,
    /// Limits of lanes, by this host's address.
    #[serde(default)]
    pub lanes: BTreeMap<IpAddr, RateLimit>,
}

/// Settings of page references: a page that the destination holds is sent by reference.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ReferencesConfig {
    /// Which references migrations from and to this host may use.
    #[serde(rename = "use")]
    pub by: ReferenceUse,
    /// Memory that the pages of VMs that left may occupy, retained for their return.
    pub base_memory: BaseMemory,
    /// Retention time of that memory, in minutes.
    pub base_minutes: u32,
    /// Memory for the digests of pages that this host offers.
    pub digest_memory: ByteSize,
    /// Memory for the digests of images of disks; 0: arriving VMs' images are not looked into.
    pub disk_digest_memory: ByteSize,
    /// Folder of the files for pages of VMs that left which do not fit in memory; `state_dir` by
    /// default.
    pub spill_dir: Option<PathBuf>,
    /// Size of these files.
    pub spill_size: SpillSize,
}

impl Default for ReferencesConfig {
    fn default() -> Self {
        ReferencesConfig {
            by: ReferenceUse::All,
            base_memory: BaseMemory::Auto,
            base_minutes: 60,
            digest_memory: ByteSize::from_mib(64),
            disk_digest_memory: ByteSize::from_mib(64),
            spill_dir: None,
            spill_size: SpillSize::Auto,
        }
    }
}

/// Settings of page deltas: a page is sent as its difference from the content sent before.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DeltasConfig {
    /// Memory of each outgoing migration for content sent before; 0 disables deltas.
    pub cache_memory: ByteSize,
}

impl Default for DeltasConfig {
    fn default() -> Self {
        DeltasConfig { cache_memory: ByteSize::from_bytes(Deltas::CACHE_BYTES) }
    }
}

/// Settings for finding the pages that a guest writes while it migrates.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TrackingConfig {
    pub means: TrackingUse,
}

/// Settings for throttling guests that dirty memory faster than the link carries it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ThrottleConfig {
    pub means: MeansUse,
}

/// Changes to the documented settings of each policy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default, rename_all = "kebab-case")]
pub struct PoliciesConfig {
    /// Settings of `auto`.
    pub auto: PolicySettings,
    /// Settings of `minimal-pause`.
    pub minimal_pause: PolicySettings,
    /// Settings of `minimal-impact`.
    pub minimal_impact: PolicySettings,
    /// Settings of `fast-evacuation`.
    pub fast_evacuation: PolicySettings,
    /// Settings of `deadline=TIME`.
    pub deadline: PolicySettings,
}

impl PoliciesConfig {
    #[must_use]
    pub fn of(&self, intent: Intent) -> &PolicySettings {
        match intent {
            Intent::Auto => &self.auto,
            Intent::MinimalPause => &self.minimal_pause,
            Intent::MinimalImpact => &self.minimal_impact,
            Intent::FastEvacuation => &self.fast_evacuation,
            Intent::Deadline(_) => &self.deadline,
        }
    }

    fn problem(&self) -> Option<(String, String, &'static str)> {
        let intents = [
            ("auto", Intent::Auto),
            ("minimal-pause", Intent::MinimalPause),
            ("minimal-impact", Intent::MinimalImpact),
            ("fast-evacuation", Intent::FastEvacuation),
            ("deadline", Intent::Deadline(Duration::MAX)),
        ];
        intents.into_iter().find_map(|(name, intent)| {
            let (key, why, remedy) = self.of(intent).problem(intent)?;
            Some((format!("policies.{name}.{key}"), why, remedy))
        })
    }
}

/// Memory for the retained pages of VMs that left.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub enum BaseMemory {
    /// A quarter of the host's memory.
    Auto,
    /// A fixed size; 0 retains nothing.
    Size(ByteSize),
}

/// Size of the files for retained pages that do not fit in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub enum SpillSize {
    /// A tenth of the file system.
    Auto,
    /// A fixed size; 0: no such files.
    Size(ByteSize),
}

impl TryFrom<String> for SpillSize {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        Ok(match BaseMemory::try_from(text)? {
            BaseMemory::Auto => SpillSize::Auto,
            BaseMemory::Size(size) => SpillSize::Size(size),
        })
    }
}

impl BaseMemory {
    /// Returns the size in bytes on a host with `host_bytes` of memory.
    #[must_use]
    pub fn bytes(self, host_bytes: u64) -> u64 {
        match self {
            BaseMemory::Auto => host_bytes / 4,
            BaseMemory::Size(size) => size.bytes(),
        }
    }
}

impl TryFrom<String> for BaseMemory {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        match text.as_str() {
            "auto" => Ok(BaseMemory::Auto),
            "none" => Ok(BaseMemory::Size(ByteSize::from_bytes(0))),
            size => size
                .parse()
                .map(BaseMemory::Size)
                .map_err(|error| format!("{error}, or auto, or none")),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NetworkConfig {
    /// Bridge that taps join. It must exist; the agent does not create it.
    pub bridge: String,
    /// Whether the kernel serves the NICs (vhost-net) in place of QEMU. Hosts may differ in this: a
    /// VM can move between them.
    #[serde(default)]
    pub vhost: bool,
}

fn default_socket() -> PathBuf {
    DEFAULT_SOCKET.into()
}
fn default_state_dir() -> PathBuf {
    "/var/lib/godwit".into()
}
fn default_run_dir() -> PathBuf {
    "/run/godwit".into()
}
fn default_qemu() -> PathBuf {
    "qemu-system-x86_64".into()
}
fn default_swtpm() -> PathBuf {
    "swtpm".into()
}
fn default_lvm() -> PathBuf {
    "lvm".into()
}
fn yes() -> bool {
    true
}
/// Returns the usual image directories, never a directory of the host's own files.
fn default_vm_dirs() -> Vec<PathBuf> {
    ["/srv", "/mnt", "/var/lib/godwit/images", "/var/lib/libvirt/images"]
        .map(PathBuf::from)
        .to_vec()
}

/// Error in a configuration.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read the configuration {path}: {source}")]
    Read { path: PathBuf, source: std::io::Error },
    /// The file does not parse.
    #[error("{path}:{line}: {why}")]
    Syntax {
        path: PathBuf,
        /// Line in the file, from 1.
        line: usize,
        why: String,
    },
    /// A value is invalid.
    #[error("{path}: {key}: {why}")]
    Value { path: PathBuf, key: String, why: String, remedy: String },
}

impl ConfigError {
    /// Returns what to do about it; empty if the message says it all.
    #[must_use]
    pub fn remedy(&self) -> String {
        match self {
            ConfigError::Read { .. } => "name an existing file with --config".to_owned(),
            ConfigError::Syntax { .. } => "docs/host.md lists every key".to_owned(),
            ConfigError::Value { remedy, .. } => remedy.clone(),
        }
    }
}

impl Config {
    /// Path of the configuration unless another is given.
    pub const DEFAULT_FILE: &str = "/etc/godwit/host.toml";

    /// Reads and checks a file. If the default file does not exist, returns the defaults: a host
    /// without peers.
    pub fn load_or_alone(path: &Path) -> Result<Config, ConfigError> {
        match Config::load(path) {
            Err(ConfigError::Read { source, .. })
                if source.kind() == std::io::ErrorKind::NotFound
                    && path == Path::new(Config::DEFAULT_FILE) =>
            {
                Config::parse("", path)
            }
            loaded => loaded,
        }
    }

    /// Reads and checks a file.
    pub fn load(path: &Path) -> Result<Config, ConfigError> {
        let text = std::fs::read_to_string(path)
            .map_err(|source| ConfigError::Read { path: path.to_owned(), source })?;
        Config::parse(&text, path)
    }

    /// Reads and checks the text of the file `path`.
    pub fn parse(text: &str, path: &Path) -> Result<Config, ConfigError> {
        let config: Config = toml::from_str(text).map_err(|error| ConfigError::Syntax {
            path: path.to_owned(),
            line: error
                .span()
                .map_or(1, |span| 1 + text[..span.start.min(text.len())].matches('\n').count()),
            why: error.message().trim().replace('\n', "; "),
        })?;
        match config.first_problem() {
            None => Ok(config),
            Some((key, why, remedy)) => {
                Err(ConfigError::Value { path: path.to_owned(), key, why, remedy })
            }
        }
    }

    /// Returns the directory of the memory of suspended VMs.
    #[must_use]
    pub fn suspend_dir(&self) -> PathBuf {
        self.suspend_dir.clone().unwrap_or_else(|| self.state_dir.join("suspended"))
    }

    /// Returns the directories for VMs, and the pools of Ceph as the parents of their images.
    #[must_use]
    pub fn places_for_vms(&self) -> Vec<PathBuf> {
        let thin_pools = self.thin_pools.iter().map(ThinPool::place);
        self.vm_dirs.iter().cloned().chain(pools_of(&self.ceph)).chain(thin_pools).collect()
    }

    /// Returns the directory of guest memory.
    #[must_use]
    pub fn ram_dir(&self) -> PathBuf {
        self.ram_dir.clone().unwrap_or_else(|| self.run_dir.join("ram"))
    }

    /// Returns the path of the library for QEMU; the library need not exist.
    #[must_use]
    pub fn tracker(&self) -> PathBuf {
        if let Some(path) = &self.tracker {
            return path.clone();
        }
        const NAME: &str = "libgodwit_tracker.so";
        let beside = std::env::current_exe().ok().and_then(|exe| Some(exe.parent()?.join(NAME)));
        let installed = PathBuf::from("/usr/lib/godwit").join(NAME);
        beside.filter(|path| path.exists()).unwrap_or(installed)
    }

    /// Checks the protection: a client of an agent can read and run guests, so either TLS or an
    /// explicit `insecure` is required.
    fn protection_problem(&self) -> Option<(String, String, &'static str)> {
        match (&self.tls, self.insecure) {
            (Some(_), true) => Some((
                "insecure".into(),
                "this host has [tls] as well".into(),
                "remove one of the two",
            )),
            (None, false) if !self.listen.is_empty() || !self.peers.is_empty() => Some((
                "tls".into(),
                "agents communicate with each other, and neither [tls] nor insecure is set".into(),
                "make certificates with `godwit pki` and name them under [tls], \
                                 or write insecure = true on every host",
            )),
            _ => None,
        }
    }

    fn peers_problem(&self) -> Option<(String, String, String)> {
        let problem = |name: &str, why: String, remedy: &str| {
            Some((format!("peers.{name}"), why, remedy.to_owned()))
        };
        for (name, url) in &self.peers {
            match url.parse::<Endpoint>() {
                Err(error) => return problem(name, error.message, &error.remedy),
                Ok(Endpoint::Tcp(_)) if !self.insecure => {
                    let why = "http:// is unprotected, and this host is not insecure".into();
                    return problem(name, why, "write https://");
                }
                Ok(Endpoint::Tls(_)) if self.insecure => {
                    let why =
                        "https:// needs a certificate, and this host has none (insecure)".into();
                    return problem(name, why, "write http://, or set [tls] on this host");
                }
                Ok(_) => {}
            }
            if name == &self.name {
                return problem(name, "a host cannot be its own peer".into(), "remove the line");
            }
        }
        None
    }

    fn path_problem(&self) -> Option<(&'static str, String, String)> {
        let needed =
            [("socket", &self.socket), ("state_dir", &self.state_dir), ("run_dir", &self.run_dir)];
        let given = [
            ("suspend_dir", &self.suspend_dir),
            ("ram_dir", &self.ram_dir),
            ("tracker", &self.tracker),
            ("ha.watchdog", &self.ha.watchdog),
        ];
        let given = given.into_iter().filter_map(|(key, path)| Some((key, path.as_ref()?)));
        let given = given.chain(self.vm_dirs.iter().map(|path| ("vm_dirs", path)));
        let given = given.chain(self.firmware.paths());
        let given = given.chain(self.qemu_programs.iter().map(|path| ("qemu_programs", path)));
        if let Some((key, path)) =
            needed.into_iter().chain(given).find(|(_, path)| !path.is_absolute())
        {
            let why = format!("{} is a relative path", path.display());
            return Some((key, why, "write an absolute path".into()));
        }
        let run_dir_bytes = self.run_dir.as_os_str().len();
        if run_dir_bytes > MAX_RUN_DIR_BYTES {
            let why = format!("{run_dir_bytes} bytes are too long for the sockets in it");
            let remedy = format!("use a path of at most {MAX_RUN_DIR_BYTES} bytes");
            return Some(("run_dir", why, remedy));
        }
        let is_long = self.socket.as_os_str().len() > 107;
        is_long.then(|| {
            let why = "the path of a socket has at most 107 bytes".into();
            ("socket", why, "use a shorter path".into())
        })
    }

    fn first_problem(&self) -> Option<(String, String, String)> {
        let problem =
            |key: &str, why: String, remedy: &str| Some((key.to_owned(), why, remedy.to_owned()));
        if self.name.is_empty()
            || !self.name.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b))
        {
            return problem(
                "name",
                format!("\"{}\" is not a valid host name", self.name),
                "use letters, digits, - _ .",
            );
        }
        if self.qemu_user.is_some() && self.qemu_users.is_some() {
            let why = "qemu_user sets one user for all VMs, qemu_users one for each VM".into();
            return problem("qemu_user", why, "remove one of the two lines");
        }
        if let Some((key, why, remedy)) = self.path_problem() {
            return problem(key, why, &remedy);
        }
        if let Some((key, why, remedy)) = self
            .protection_problem()
            .or_else(|| self.policies.problem())
            .or_else(|| problem_of(&self.ceph))
            .or_else(|| block_devices::problem_of(&self.block_devices))
            .or_else(|| thin_pools::problem_of(&self.thin_pools, &self.block_devices))
        {
            return problem(&key, why, remedy);
        }
        let known = |lane: &IpAddr| self.migration_addresses.contains(lane);
        if let Some(lane) = self.limits.lanes.keys().find(|lane| !known(lane))
            && !self.migration_addresses.is_empty()
        {
            let why = "the address is not in migration_addresses".into();
            return problem(&format!("limits.lanes.\"{lane}\""), why, "use one of them");
        }
        if let Some((key, why, remedy)) = self.peers_problem() {
            return problem(&key, why, &remedy);
        }
        for (name, network) in &self.networks {
            // IFNAMSIZ is 16, including the final zero (linux/if.h).
            if network.bridge.is_empty() || network.bridge.len() > 15 {
                let why = format!("\"{}\" is not a valid interface name", network.bridge);
                return problem(
                    &format!("networks.{name}.bridge"),
                    why,
                    "name a bridge of this host; its name has 1 to 15 bytes",
                );
            }
        }
        None
    }
}

#[cfg(test)]
mod tests;
