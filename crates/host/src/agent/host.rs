//! What the host has and whether a VM fits on it.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use godwit_api::{ApiError, ErrorCode, HostInfo, NetworkInfo};
use godwit_qemu::{AccelProbe, QemuInfo, ResolvedSpec};
use godwit_ram::check_kernel;

use crate::agent::Agent;
use crate::config::NetworkConfig;
use crate::failure::{host_failed, qemu_unusable};
use crate::memory::{self, Promise};
use crate::network::{link_exists, open_vhost};

impl Agent {
    /// What `GET /v1/host` tells.
    pub async fn host_info(&self) -> Result<HostInfo, ApiError> {
        let qemu = self.qemu(None).await;
        let accel = match &qemu {
            // The probe holds the lock while it runs; nobody waits for it here.
            Ok(qemu) => self.accels.try_lock().ok().and_then(|known| known.get(&qemu.path).cloned()),
            Err(_) => None,
        };
        let networks = self.config.networks.iter();
        let networks = networks.map(|(name, network)| {
            let bridge = network.bridge.clone();
            (name.clone(), NetworkInfo { bridge })
        });
        Ok(HostInfo {
            name: self.config.name.clone(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            kernel: rustix::system::uname().release().to_string_lossy().into_owned(),
            qemu: qemu.as_ref().ok().map(|qemu| qemu.path.clone()),
            qemu_version: qemu.as_ref().ok().map(QemuInfo::version_text),
            qemu_problem: qemu.err().map(|error| error.to_string()),
            kvm: accel.as_ref().map(|accel| accel.kvm),
            kvm_reason: accel.map(|accel| accel.reason),
            tracking_problem: self.tracking_problem(),
            memory_available_bytes: self.grantable_bytes(None, self.references.base_bytes())?,
            memory_committed_bytes: self.promises(None).iter().map(|promise| promise.promised_bytes).sum(),
            references: self.references.info(),
            huge_pages: self.ram.huge_pages(),
            migration_addresses: self.config.migration_addresses.clone(),
            networks: networks.collect(),
            peers: self.config.peers.clone(),
            vms: self.table().len(),
        })
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

    /// The QEMU of a specification, or the host's own; asked once and again when the file has changed.
    pub async fn qemu(&self, wanted: Option<&Path>) -> Result<QemuInfo, ApiError> {
        let path = wanted.unwrap_or(&self.config.qemu).to_owned();
        let mut known = self.qemus.lock().await;
        if let Some((changed, info)) = known.get(&path)
            && modified(&info.path).is_some_and(|now| now == *changed)
        {
            return Ok(info.clone());
        }
        let info = godwit_qemu::inspect(&path).await.map_err(|error| qemu_unusable(&error))?;
        if let Some(changed) = modified(&info.path) {
            known.insert(path, (changed, info.clone()));
        }
        Ok(info)
    }

    /// Whether KVM runs 64-bit guests here, by a guest that tries; asked once a QEMU.
    pub async fn accel(&self, qemu: &Path) -> AccelProbe {
        let mut known = self.accels.lock().await;
        if let Some(probe) = known.get(qemu) {
            return probe.clone();
        }
        let probe = godwit_qemu::usable_accel(qemu).await;
        tracing::info!(kvm = probe.kvm, reason = probe.reason, "KVM probed");
        known.insert(qemu.to_owned(), probe.clone());
        probe
    }

    /// Checks that a VM could start here: memory, networks, disks and boot files. Frees what is only kept where it needs that.
    pub async fn check_fits(self: &Arc<Self>, spec: &ResolvedSpec) -> Result<Vec<NetworkConfig>, ApiError> {
        let lacking = self.check_memory(spec)?;
        if lacking > 0 {
            tokio::task::block_in_place(|| self.references.free(lacking));
        }
        self.check_files_and_networks(spec).await
    }

    /// Checks the same and changes nothing.
    pub(super) async fn check_could_fit(&self, spec: &ResolvedSpec) -> Result<(), ApiError> {
        self.check_memory(spec)?;
        self.check_files_and_networks(spec).await.map(drop)
    }

    async fn check_files_and_networks(&self, spec: &ResolvedSpec) -> Result<Vec<NetworkConfig>, ApiError> {
        check_files(spec)?;
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

    /// Bytes that the VM needs of those that are kept of others.
    fn check_memory(&self, spec: &ResolvedSpec) -> Result<u64, ApiError> {
        let wanted = spec.memory_bytes();
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

    /// Memory for a new VM; `except`: a VM whose own promise does not count; `base_bytes`: taken by what can be dropped.
    fn grantable_bytes(&self, except: Option<&str>, base_bytes: u64) -> Result<u64, ApiError> {
        let available = memory::available_bytes()
            .map_err(|error| host_failed("the host's memory can't be read from /proc/meminfo", &error))?;
        let (available, ram_dir) = (available + base_bytes, self.ram.available_bytes() + base_bytes);
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

fn check_files(spec: &ResolvedSpec) -> Result<(), ApiError> {
    let files = [("kernel", &spec.kernel), ("initrd", &spec.initrd)];
    let files = files.into_iter().filter_map(|(role, path)| path.as_ref().map(|path| (role, path)));
    for (role, path) in files.chain(spec.disks.iter().map(|disk| ("disk", &disk.path))) {
        if let Err(error) = std::fs::File::open(path) {
            return Err(ApiError::new(
                ErrorCode::NotFound,
                format!("the {role} {} of VM \"{}\" can't be opened: {error}", path.display(), spec.name),
                "every host that runs the VM must see it at that path",
            ));
        }
    }
    Ok(())
}

fn modified(path: &PathBuf) -> Option<std::time::SystemTime> {
    std::fs::metadata(path).ok()?.modified().ok()
}
