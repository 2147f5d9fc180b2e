//! What the host has and whether a VM fits on it.

use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use godwit_api::{ApiError, ErrorCode, HostInfo, NetworkInfo};
use godwit_qemu::{AccelProbe, InspectError, OpenFiles, QemuInfo, ResolvedSpec};
use godwit_ram::check_kernel;

use crate::agent::Agent;
use crate::agent::vm_files::FileRule;
use crate::config::NetworkConfig;
use crate::failure::{host_failed, qemu_unusable};
use crate::load;
use crate::memory::{self, Promise};
use crate::network::{link_exists, open_vhost};
use crate::vm::Begin;

/// Guest memory of a host.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MemoryFigures {
    /// What there would be without any VM.
    pub(crate) total_bytes: u64,
    /// What a new VM can get.
    pub(crate) available_bytes: u64,
    /// What is promised to VMs that are active.
    pub(crate) committed_bytes: u64,
}

/// What a VM that fits on this host has of it.
#[derive(Debug)]
pub(super) struct Fit {
    pub(super) files: OpenFiles,
    /// The bridge of each of its NICs, in order.
    pub(super) bridges: Vec<NetworkConfig>,
}

impl Agent {
    /// What `GET /v1/host` tells.
    pub async fn host_info(&self) -> Result<HostInfo, ApiError> {
        let qemu = self.qemu(None).await;
        let accel = match &qemu {
            // The probe holds the lock while it runs; nobody waits for it here.
            Ok(qemu) => {
                self.accels.try_lock().ok().and_then(|known| known.get(&qemu.path).cloned())
            }
            Err(_) => None,
        };
        let (cpu, cpu_problem) = match (&qemu, &accel) {
            (Ok(qemu), Some(accel)) => self.known_cpu(&qemu.path, accel.kvm),
            _ => (None, None),
        };
        let networks = self.config.networks.iter();
        let networks = networks.map(|(name, network)| {
            let bridge = network.bridge.clone();
            (name.clone(), NetworkInfo { bridge })
        });
        let memory = self.memory_figures()?;
        Ok(HostInfo {
            name: self.config.name.clone(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            kernel: rustix::system::uname().release().to_string_lossy().into_owned(),
            qemu: qemu.as_ref().ok().map(|qemu| qemu.path.clone()),
            qemu_version: qemu.as_ref().ok().map(QemuInfo::version_text),
            machines: qemu.as_ref().map(machines_of).unwrap_or_default(),
            qemu_problem: qemu.err().map(|error| error.to_string()),
            kvm: accel.as_ref().map(|accel| accel.kvm),
            kvm_reason: accel.map(|accel| accel.reason),
            tracking_problem: self.tracking_problem(),
            cpu,
            cpu_problem,
            logical_cores: load::logical_cores(),
            load_average_1min: load::average_1min(),
            memory_total_bytes: memory.total_bytes,
            memory_available_bytes: memory.available_bytes,
            memory_committed_bytes: memory.committed_bytes,
            references: self.references.info(),
            huge_pages: self.ram.huge_pages(),
            migration_addresses: self.config.migration_addresses.clone(),
            networks: networks.collect(),
            vm_dirs: self.config.vm_dirs.clone(),
            datastores: self.datastores.told(self.directories()),
            peers: self.peers.all(),
            vms: self.table().len(),
        })
    }

    /// Where VMs have their disks, or may have them.
    fn directories(&self) -> BTreeSet<PathBuf> {
        let slots = self.table();
        let disks = slots.values().flat_map(|slot| &slot.spec.disks);
        let of_disks = disks.filter_map(|disk| disk.path.parent().map(Path::to_owned));
        self.config.vm_dirs.iter().cloned().chain(of_disks).collect()
    }

    /// Why the external engine can't track guest memory on this host; none where it can.
    #[must_use]
    pub fn tracking_problem(&self) -> Option<String> {
        if let Err(error) = check_kernel() {
            return Some(error.to_string());
        }
        let library = self.config.tracker();
        (!library.exists()).then(|| {
            format!(
                "the tracker library {} is missing (install it, or set tracker in the configuration)",
                library.display()
            )
        })
    }

    /// The QEMU that somebody with all rights named, or the host's own; asked once and again when the file has changed.
    pub async fn qemu(&self, wanted: Option<&Path>) -> Result<QemuInfo, ApiError> {
        match wanted {
            None => self.inspected(&self.config.qemu).await,
            Some(wanted) => self.inspected(&roots_program(wanted)?).await,
        }
    }

    /// The QEMU that runs a VM. What another host names, of a guest that it sends, has to be a QEMU of this host by its configuration.
    pub(crate) async fn qemu_of(
        &self,
        spec: &ResolvedSpec,
        begin: Begin,
    ) -> Result<QemuInfo, ApiError> {
        match &spec.qemu {
            Some(wanted) if begin != Begin::Boot => {
                self.inspected(&self.listed_program(&spec.name, wanted)?).await
            }
            wanted => self.qemu(wanted.as_deref()).await,
        }
    }

    /// The lock is not held while a program answers.
    async fn inspected(&self, program: &Path) -> Result<QemuInfo, ApiError> {
        let known = self.qemus.lock().await.get(program).cloned();
        if let Some((changed, info)) = known
            && modified(&info.path).is_some_and(|now| now == changed)
        {
            return Ok(info);
        }
        let user = self.places.users.of_question();
        let info = godwit_qemu::inspect(program, Some((user.uid, user.gid)))
            .await
            .map_err(|error| qemu_unusable(&error))?;
        if let Some(changed) = modified(&info.path) {
            self.qemus.lock().await.insert(program.to_owned(), (changed, info.clone()));
        }
        Ok(info)
    }

    /// Where a program really is that another host names: this host's QEMU, or one of `qemu_programs`. Who names another learns
    /// nothing of it.
    fn listed_program(&self, vm: &str, wanted: &Path) -> Result<PathBuf, ApiError> {
        let real = |path: &Path| godwit_qemu::find_program(path).ok()?.canonicalize().ok();
        let mut listed = std::iter::once(&self.config.qemu).chain(&self.config.qemu_programs);
        if let Some(wanted) = real(wanted)
            && listed.any(|listed| real(listed).is_some_and(|listed| listed == wanted))
        {
            return roots_program(&wanted);
        }
        let (host, wanted) = (&self.config.name, wanted.display());
        Err(ApiError::new(
            ErrorCode::Preflight,
            format!(
                "VM \"{vm}\" has {wanted} as its QEMU, which host {host} starts for no guest of another host"
            ),
            "add it to qemu_programs of that host's configuration, or let the VM have the host's own QEMU",
        ))
    }

    /// Whether KVM runs 64-bit guests here, by a guest that tries; asked once a QEMU.
    pub async fn accel(&self, qemu: &Path) -> AccelProbe {
        let mut known = self.accels.lock().await;
        if let Some(probe) = known.get(qemu) {
            return probe.clone();
        }
        let probe = godwit_qemu::usable_accel(qemu, self.config.qemu_sandbox).await;
        tracing::info!(kvm = probe.kvm, reason = probe.reason, "KVM probed");
        known.insert(qemu.to_owned(), probe.clone());
        probe
    }

    /// Checks that a VM could start here: memory, networks, disks and boot files, which it opens.
    /// Frees what is only kept where it needs that.
    pub(super) async fn check_fits(
        self: &Arc<Self>,
        spec: &ResolvedSpec,
        rule: FileRule,
    ) -> Result<Fit, ApiError> {
        let lacking = self.check_memory(spec, 0)?;
        if lacking > 0 {
            tokio::task::block_in_place(|| self.references.free(lacking));
        }
        let files = self.open_files(spec, rule)?;
        Ok(Fit { files, bridges: self.check_networks(spec).await? })
    }

    /// Checks that a VM of another host could start here, and changes nothing.
    pub(super) async fn check_could_fit(&self, spec: &ResolvedSpec) -> Result<(), ApiError> {
        self.check_memory(spec, 0)?;
        self.open_files(spec, FileRule::OtherHost)?;
        self.check_networks(spec).await.map(drop)
    }

    async fn check_networks(&self, spec: &ResolvedSpec) -> Result<Vec<NetworkConfig>, ApiError> {
        let mut bridges = Vec::new();
        for nic in &spec.nics {
            let network = self.network(&nic.network)?;
            if !link_exists(&network.bridge).await? {
                return Err(ApiError::new(
                    ErrorCode::NotFound,
                    format!(
                        "bridge {} of network \"{}\" does not exist on host {}",
                        network.bridge, nic.network, self.config.name
                    ),
                    format!(
                        "make it, or correct networks.{}.bridge in the agent's configuration",
                        nic.network
                    ),
                ));
            }
            drop(open_vhost(&nic.network, network)?);
            bridges.push(network.clone());
        }
        Ok(bridges)
    }

    fn network(&self, name: &str) -> Result<&NetworkConfig, ApiError> {
        self.config.networks.get(name).ok_or_else(|| {
            let known: Vec<&str> = self.config.networks.keys().map(String::as_str).collect();
            let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
            ApiError::new(
                ErrorCode::NotFound,
                format!("no network \"{name}\" on host {}", self.config.name),
                format!("its configuration's [networks] names: {known}"),
            )
        })
    }

    /// Bytes that the VM, with so many beside its memory, needs of those that are kept of others.
    pub(super) fn check_memory(&self, spec: &ResolvedSpec, beside: u64) -> Result<u64, ApiError> {
        let wanted = spec.memory_bytes().saturating_add(beside);
        let free = self.grantable_bytes(Some(&spec.name), 0)?;
        if wanted <= free {
            return Ok(0);
        }
        // What is kept of VMs that left is kept for as long as nobody needs the memory.
        let left = self.grantable_bytes(Some(&spec.name), self.references.base_bytes())?;
        if wanted <= left {
            return Ok(wanted - free);
        }
        let mib = |bytes: u64| bytes >> 20;
        Err(ApiError::new(
            ErrorCode::InsufficientMemory,
            format!(
                "VM \"{}\" needs {} MiB and host {} has {} MiB left beside its other VMs",
                spec.name,
                mib(wanted),
                self.config.name,
                mib(left)
            ),
            "stop or move a VM, give this one less memory, or take another host",
        ))
    }

    /// Guest memory of this host.
    ///
    /// # Errors
    /// [`ErrorCode::HostFailed`]: the kernel does not say.
    pub(crate) fn memory_figures(&self) -> Result<MemoryFigures, ApiError> {
        Ok(MemoryFigures {
            total_bytes: memory::guest_bytes(self.ram.path())
                .map_err(|error| meminfo_failed(&error))?,
            available_bytes: self.grantable_bytes(None, self.references.base_bytes())?,
            committed_bytes: self.promises(None).iter().map(|promise| promise.promised_bytes).sum(),
        })
    }

    /// Memory for a new VM; `except`: a VM whose own promise does not count; `base_bytes`: taken by what can be dropped.
    fn grantable_bytes(&self, except: Option<&str>, base_bytes: u64) -> Result<u64, ApiError> {
        let available = memory::available_bytes().map_err(|error| meminfo_failed(&error))?;
        let (available, ram_dir) =
            (available + base_bytes, self.ram.available_bytes() + base_bytes);
        Ok(memory::grantable_bytes(available, ram_dir, &self.promises(except)))
    }

    fn promises(&self, except: Option<&str>) -> Vec<Promise> {
        let table = self.table();
        let active = table.iter().filter(|(name, slot)| {
            slot.condition.holds_memory() && except.is_none_or(|except| except != name.as_str())
        });
        active
            .map(|(name, slot)| Promise {
                promised_bytes: slot.spec.memory_bytes(),
                // Also of one whose QEMU has not been spoken to yet.
                taken_bytes: match &slot.vm {
                    Some(vm) => vm.memory_taken_bytes(),
                    None => self.places.vm(name).memory_taken_bytes(&slot.spec),
                },
            })
            .collect()
    }
}

fn meminfo_failed(error: &std::io::Error) -> ApiError {
    host_failed("the host's memory can't be read from /proc/meminfo", error)
}

/// Where a program really is that is then started: it has to be one that the host's root has put there, so that nobody else can put
/// another one into that place meanwhile.
fn roots_program(wanted: &Path) -> Result<PathBuf, ApiError> {
    let roots = |path: &Path| {
        std::fs::metadata(path).is_ok_and(|data| data.uid() == 0 && data.mode() & 0o022 == 0)
    };
    let found = godwit_qemu::find_program(wanted).map_err(|error| qemu_unusable(&error))?;
    let real = found.canonicalize().map_err(|why| {
        qemu_unusable(&InspectError::CannotStart { path: wanted.to_owned(), why })
    })?;
    if real.ancestors().all(roots) {
        return Ok(real);
    }
    Err(ApiError::new(
        ErrorCode::InvalidRequest,
        format!("QEMU \"{}\" is not started: others than root may change it", wanted.display()),
        "name one that belongs to root, in directories that do, or set qemu in the agent's configuration",
    ))
}

fn machines_of(qemu: &QemuInfo) -> Vec<String> {
    qemu.machines.iter().map(|machine| machine.name.clone()).collect()
}

/// When a program was changed last.
pub(super) fn modified(path: &Path) -> Option<std::time::SystemTime> {
    std::fs::metadata(path).ok()?.modified().ok()
}
