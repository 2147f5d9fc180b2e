//! The host's resources, and whether a VM fits on it.

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use godwit_api::{ApiError, DatastoreInfo, ErrorCode, HostInfo, NetworkInfo};
use godwit_qemu::{InspectError, OpenFiles, QemuInfo, ResolvedSpec, is_rbd};
use godwit_ram::check_kernel;

use crate::agent::Agent;
use crate::agent::vm_files::FileRule;
use crate::config::NetworkConfig;
use crate::failure::{host_failed, qemu_unusable};
use crate::memory::{self, MemoryFigures, Promise};
use crate::network::{check_nic, filter, filtering_networks};
use crate::processors;
use crate::thin_pools::Lvm;
use crate::vm::Begin;

/// Resources of the host for a VM that fits on it.
#[derive(Debug)]
pub(super) struct Fit {
    pub(super) files: OpenFiles,
    /// Network of each NIC, in order.
    pub(super) bridges: Vec<NetworkConfig>,
}

impl Agent {
    /// Returns the answer to `GET /v1/host`.
    pub async fn host_info(&self) -> Result<HostInfo, ApiError> {
        let qemu = self.qemu(None).await;
        let accel = match &qemu {
            // The probe holds the lock while it runs; this request does not wait for it.
            Ok(qemu) => {
                self.accels.try_lock().ok().and_then(|known| known.get(&qemu.path).cloned())
            }
            Err(_) => None,
        };
        let (cpu, cpu_problem) = match (&qemu, &accel) {
            (Ok(qemu), Some(accel)) => self.known_cpu(&qemu.path, accel.kvm),
            _ => (None, None),
        };
        let filtering = filtering_networks(&self.config.networks).await;
        let networks = self.config.networks.iter();
        let networks = networks.map(|(name, network)| {
            let bridge = network.bridge.clone();
            (name.clone(), NetworkInfo { bridge, vlans: filtering.get(name).copied() })
        });
        let memory = self.memory_figures()?;
        Ok(HostInfo {
            name: self.config.name.clone(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            kernel: rustix::system::uname().release().to_string_lossy().into_owned(),
            qemu: qemu.as_ref().ok().map(|qemu| qemu.path.clone()),
            qemu_version: qemu.as_ref().ok().map(QemuInfo::version_text),
            machines: qemu.as_ref().map(machines_of).unwrap_or_default(),
            firmware: self.config.firmware.available(),
            tpm: Some(self.has_swtpm()),
            tpm_version: self.swtpm_version().await,
            qemu_problem: qemu.err().map(|error| error.to_string()),
            kvm: accel.as_ref().map(|accel| accel.kvm),
            kvm_reason: accel.map(|accel| accel.reason),
            tracking_problem: self.tracking_problem(),
            cpu,
            cpu_problem,
            logical_cores: processors::logical_cores(),
            load_average_1min: processors::average_1min(),
            memory_total_bytes: memory.total_bytes,
            memory_available_bytes: memory.available_bytes,
            memory_committed_bytes: memory.committed_bytes,
            references: self.references.info(),
            huge_pages: self.ram.huge_pages(),
            migration_addresses: self.config.migration_addresses.clone(),
            networks: networks.collect(),
            nic_filters: Some(filter::is_available()),
            vm_dirs: self.config.places_for_vms(),
            datastores: self.described_datastores(),
            block_devices: self.config.block_devices.clone(),
            peers: self.peers.all(),
            vms: self.table().len(),
        })
    }

    /// Returns the directories that hold disks of VMs, and those that may.
    pub(super) fn directories(&self) -> BTreeSet<PathBuf> {
        let slots = self.table();
        let images = slots.values().flat_map(|slot| slot.spec.images());
        let files = images.filter(|image| !is_rbd(image));
        let of_disks = files.filter_map(|image| image.parent().map(Path::to_owned));
        self.config.vm_dirs.iter().cloned().chain(of_disks).collect()
    }

    /// Returns what is known of this host's directories with disks and of its pools.
    fn described_datastores(&self) -> BTreeMap<PathBuf, DatastoreInfo> {
        let mut all = self.datastores.infos(&self.directories(), &self.config.vm_dirs);
        all.extend(self.pools.infos(&self.config.ceph, self.query_user()));
        all.extend(self.thin_pools.infos(&self.config.thin_pools, &Lvm::new(&self.config.lvm)));
        all
    }

    /// Returns why the external engine cannot track guest memory on this host; `None` if it can.
    #[must_use]
    pub fn tracking_problem(&self) -> Option<String> {
        if let Err(error) = check_kernel() {
            return Some(error.to_string());
        }
        let library = self.config.tracker();
        (!library.exists()).then(|| {
            format!(
                "cannot find the tracker library {} (install it, or set tracker in the \
                 configuration)",
                library.display()
            )
        })
    }

    /// Inspects the QEMU that a caller with full rights named, or the host's own. The result is
    /// cached until the file changes.
    pub async fn qemu(&self, wanted: Option<&Path>) -> Result<QemuInfo, ApiError> {
        match wanted {
            None => self.inspected(&self.config.qemu).await,
            Some(wanted) => self.inspected(&roots_program(wanted)?).await,
        }
    }

    /// Returns the user of a QEMU without a guest.
    pub(super) fn query_user(&self) -> (u32, u32) {
        let user = self.places.users.for_query();
        (user.uid, user.gid)
    }

    /// Inspects the QEMU that runs a VM. A QEMU that another host names for an arriving guest must
    /// be listed in this host's configuration.
    pub(crate) async fn qemu_of(
        &self,
        spec: &ResolvedSpec,
        begin: Begin,
    ) -> Result<QemuInfo, ApiError> {
        match &spec.qemu {
            Some(wanted) if matches!(begin, Begin::Incoming | Begin::IncomingRuns) => {
                self.inspected(&self.listed_program(&spec.name, wanted)?).await
            }
            wanted => self.qemu(wanted.as_deref()).await,
        }
    }

    /// Inspects a program. The lock is not held while the program answers.
    async fn inspected(&self, program: &Path) -> Result<QemuInfo, ApiError> {
        let known = self.qemus.lock().await.get(program).cloned();
        if let Some((changed, info)) = known
            && modified(&info.path).is_some_and(|now| now == changed)
        {
            return Ok(info);
        }
        let user = self.places.users.for_query();
        let info = godwit_qemu::inspect(program, Some((user.uid, user.gid)))
            .await
            .map_err(|error| qemu_unusable(&error))?;
        if let Some(changed) = modified(&info.path) {
            self.qemus.lock().await.insert(program.to_owned(), (changed, info.clone()));
        }
        Ok(info)
    }

    /// Returns the real path of a program that another host names: this host's QEMU, or one of
    /// `qemu_programs`. The error reveals nothing else about the path.
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
                "cannot start QEMU {wanted} for VM \"{vm}\": it is not in qemu_programs of host \
                 {host}"
            ),
            "add it to qemu_programs in that host's configuration, or define the VM without a QEMU \
             of its own",
        ))
    }

    /// Checks that a VM could start here: memory, networks, disks and boot files. Opens the files.
    /// Frees retained pages if the VM needs their memory.
    pub(super) async fn check_fits(
        self: &Arc<Self>,
        spec: &ResolvedSpec,
        rule: FileRule,
    ) -> Result<Fit, ApiError> {
        let lacking = self.check_memory(spec, 0)?;
        if lacking > 0 {
            tokio::task::block_in_place(|| self.references.free(lacking, &spec.name));
        }
        self.firmware_images(spec)?;
        self.tpm_site(spec)?;
        let files = self.open_files(spec, rule)?;
        Ok(Fit { files, bridges: self.check_networks(spec).await? })
    }

    /// Checks that a VM of another host could start here; changes nothing.
    pub(super) async fn check_could_fit(&self, spec: &ResolvedSpec) -> Result<(), ApiError> {
        Agent::refuse_own("accept", spec)?;
        self.check_term("accept", spec)?;
        self.check_memory(spec, 0)?;
        self.tpm_site(spec)?;
        let files = self.open_files(spec, FileRule::OtherHost)?;
        self.check_pools(&spec.name, &files).await?;
        self.check_networks(spec).await.map(drop)
    }

    pub(super) async fn check_networks(
        &self,
        spec: &ResolvedSpec,
    ) -> Result<Vec<NetworkConfig>, ApiError> {
        let mut bridges = Vec::new();
        for nic in &spec.nics {
            let network = self.network(&nic.network)?;
            check_nic(nic, network).await.map_err(|error| ApiError {
                message: format!("host {}: {error}", self.config.name),
                ..error.into()
            })?;
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
                format!("use a network of [networks] in its configuration: {known}"),
            )
        })
    }

    /// Checks that the VM, with `beside` bytes beside its memory, fits. Returns how many bytes of
    /// retained pages must be freed for that.
    pub(super) fn check_memory(&self, spec: &ResolvedSpec, beside: u64) -> Result<u64, ApiError> {
        self.check_room(spec, spec.memory_bytes().saturating_add(beside))
    }

    /// Checks that a running VM, of whose memory `taken` bytes are taken, fits with all of it.
    /// Returns how many bytes of retained pages must be freed for that.
    pub(super) fn check_growth(&self, spec: &ResolvedSpec, taken: u64) -> Result<u64, ApiError> {
        self.check_room(spec, spec.memory_bytes().saturating_sub(taken))
    }

    fn check_room(&self, spec: &ResolvedSpec, wanted: u64) -> Result<u64, ApiError> {
        let free = self.grantable_bytes(Some(&spec.name), 0)?;
        if wanted <= free {
            return Ok(0);
        }
        // Retained pages of VMs that left give way to any VM that needs the memory.
        let left = self.grantable_bytes(Some(&spec.name), self.references.base_bytes())?;
        if wanted <= left {
            return Ok(wanted - free);
        }
        let mib = |bytes: u64| bytes >> 20;
        Err(ApiError::new(
            ErrorCode::InsufficientMemory,
            format!(
                "VM \"{}\" needs {} MiB, and host {} has {} MiB left for it",
                spec.name,
                mib(wanted),
                self.config.name,
                mib(left)
            ),
            "stop or migrate another VM, give this one less memory, or use another host",
        ))
    }

    /// Returns the memory that has to be freed of retained pages for a VM if it comes here, as far
    /// as that is known now.
    pub(super) fn displaced_bytes(&self, spec: &ResolvedSpec) -> u64 {
        let free = self.grantable_bytes(Some(&spec.name), 0).unwrap_or(u64::MAX);
        spec.memory_bytes().saturating_sub(free)
    }

    /// Returns the guest memory of this host.
    ///
    /// # Errors
    /// [`ErrorCode::HostFailed`]: the kernel does not report it.
    pub(crate) fn memory_figures(&self) -> Result<MemoryFigures, ApiError> {
        Ok(MemoryFigures {
            total_bytes: memory::guest_bytes(self.ram.path())
                .map_err(|error| meminfo_failed(&error))?,
            available_bytes: self.grantable_bytes(None, self.references.base_bytes())?,
            committed_bytes: self.promises(None).iter().map(|promise| promise.promised_bytes).sum(),
        })
    }

    /// Returns the memory available to a new VM. `except`: a VM whose own promise does not count;
    /// `base_bytes`: memory held by what can be dropped.
    fn grantable_bytes(&self, except: Option<&str>, base_bytes: u64) -> Result<u64, ApiError> {
        let available = memory::available_bytes().map_err(|error| meminfo_failed(&error))?;
        let (available, ram_dir) =
            (available + base_bytes, self.ram.available_bytes() + base_bytes);
        Ok(memory::grantable_bytes(available, ram_dir, &self.promises(except)))
    }

    fn promises(&self, except: Option<&str>) -> Vec<Promise> {
        let table = self.table();
        let active = table.iter().filter(|(name, slot)| {
            let holds = slot.condition.holds_memory() || slot.resumes;
            holds && except.is_none_or(|except| except != name.as_str())
        });
        active
            .map(|(name, slot)| Promise {
                promised_bytes: slot.spec.memory_bytes(),
                // Counts the memory also while the VM's QEMU has not been contacted yet.
                taken_bytes: match &slot.vm {
                    Some(vm) => vm.memory_taken_bytes(),
                    None => self.places.vm(name).memory_taken_bytes(&slot.spec),
                },
            })
            .collect()
    }
}

fn meminfo_failed(error: &std::io::Error) -> ApiError {
    host_failed("cannot read the host's memory from /proc/meminfo", error)
}

/// Returns the real path of a program to start. Root must own it and its directories, so that no
/// other user can replace it meanwhile.
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
        format!("cannot start QEMU \"{}\": users other than root can change it", wanted.display()),
        "name one that root owns, in directories that root owns, or set qemu in the agent's \
         configuration",
    ))
}

fn machines_of(qemu: &QemuInfo) -> Vec<String> {
    qemu.machines.iter().map(|machine| machine.name.clone()).collect()
}

/// Returns the modification time of a program.
pub(super) fn modified(path: &Path) -> Option<std::time::SystemTime> {
    std::fs::metadata(path).ok()?.modified().ok()
}
