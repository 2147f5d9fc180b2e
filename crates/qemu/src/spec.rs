//! VM specifications: the form that a user writes, and the resolved form. The resolved form leaves
//! nothing to a host's defaults, so that both ends of a migration start the same machine.

mod checks;
mod cloud_init;
mod conflict;
mod disk;
mod error;
mod firmware;
mod memory;
mod name;
mod nic;
mod patch;
mod settings;
mod video;
mod watchdog;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::accel::{AccelProbe, Accelerator, DEFAULT_CPU_MODEL};
use crate::inspect::QemuInfo;
use crate::mac::MacAddress;

use checks::{MAX_CMDLINE_BYTES, MAX_VCPUS, check_path, check_value};
use memory::{check_memory, default_memory, memory_blocks};

pub use cloud_init::{AddressWithPrefix, CloudInit, GuestNetwork, HIDDEN, MOST_USER_DATA_BYTES};
pub use conflict::{AddressConflict, ClaimedNic, address_conflict};
pub(crate) use disk::MOST_BACKING_FILES;
pub use disk::{
    BackingFile, Cdrom, Disk, DiskBus, DiskCache, DiskFormat, MOST_SCSI_DISKS, ResolvedDisk,
};
pub use error::SpecError;
pub use firmware::Firmware;
pub use memory::{Backing, MemoryBlock};
pub use name::VmName;
pub use nic::{MOST_QUEUES, Nic, NicFilter, NicLink, NicModel, ResolvedNic};
pub use patch::SpecPatch;
pub use settings::Autostart;
pub use video::Video;
pub use watchdog::Watchdog;

/// Machine type of a VM whose specification names none. It is resolved to the versioned type behind
/// it.
pub const DEFAULT_MACHINE: &str = "q35";

/// A VM as its user describes it. JSON or TOML; unknown keys are refused.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct VmSpec {
    /// Unique among all hosts; letters, digits, `-`, `_` and `.`.
    pub name: String,
    /// Memory blocks; several become as many NUMA nodes. A bare size means one shared block.
    #[serde(default = "default_memory", deserialize_with = "memory_blocks")]
    pub memory: Vec<MemoryBlock>,
    /// Number of vCPUs.
    #[serde(default = "default_vcpus")]
    pub vcpus: u32,
    /// A CPU model of `qemu -cpu help`, optionally followed by `,+feature` or `,-feature`. Default:
    /// [`DEFAULT_CPU_MODEL`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_model: Option<String>,
    /// A machine type or alias of `qemu -machine help`. Default: [`DEFAULT_MACHINE`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub machine: Option<String>,
    /// Firmware that starts the VM.
    #[serde(default, skip_serializing_if = "Firmware::is_bios")]
    pub firmware: Firmware,
    /// Video device of the VM's screen.
    #[serde(default, skip_serializing_if = "Video::is_none")]
    pub video: Video,
    /// Accelerator that runs the guest's code.
    #[serde(default)]
    pub accel: Accel,
    /// A QEMU other than the host's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schema(value_type = Option<String>))]
    pub qemu: Option<PathBuf>,
    /// A kernel to boot directly.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schema(value_type = Option<String>))]
    pub kernel: Option<PathBuf>,
    /// The initial RAM disk of that kernel.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schema(value_type = Option<String>))]
    pub initrd: Option<PathBuf>,
    /// The command line of that kernel.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cmdline: Option<String>,
    /// Disks, in the order in which the guest finds them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub disks: Vec<Disk>,
    /// CD-ROM drives, in the order in which the guest finds them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cdroms: Vec<Cdrom>,
    /// Whether the VM has a SCSI controller, so that disks can be attached while it runs. A disk or
    /// CD-ROM drive on bus scsi implies one.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub scsi_controller: bool,
    /// Network interfaces, in the order in which the guest finds them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub nics: Vec<Nic>,
    /// Whether the VM has a port for an agent in the guest (`qemu-ga`), which Godwit then asks for
    /// addresses, shutdowns, freezes and the time.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub guest_agent: bool,
    /// Settings that the guest takes at its first boot, by cloud-init. The VM gets a small
    /// read-only disk with them, after its other disks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cloud_init: Option<CloudInit>,
    /// Whether the VM has a source of random numbers (virtio-rng), the host's.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub rng: bool,
    /// Watchdog (i6300esb) with this action; machine types q35 and pc.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub watchdog: Option<Watchdog>,
    /// Further `-device` arguments in QEMU's syntax.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub extra_devices: Vec<String>,
    /// Whether the guest must never run while pages of its memory are at another host. A migration
    /// that cannot end otherwise fails.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub refuses_page_in: bool,
    /// Text about the VM, for people; up to 4096 bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub description: Option<String>,
    /// Words by which lists of VMs can be filtered; up to 32.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    #[cfg_attr(feature = "schema", schema(value_type = Vec<String>, max_items = 32))]
    pub tags: BTreeSet<String>,
    /// Start of the VM with its host. Default: it is not started.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub autostart: Option<Autostart>,
    /// Identity of the VM, independent of its name; the guest reads it too (SMBIOS). Default:
    /// random.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schema(value_type = Option<String>))]
    pub uuid: Option<Uuid>,
}

/// Accelerator that a user requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub enum Accel {
    /// KVM if the host's probe ran a 64-bit guest on it, otherwise TCG.
    #[default]
    Auto,
    /// KVM, even if the host's probe for 64-bit guests failed (a 32-bit guest may still run).
    Kvm,
    /// QEMU's own translator.
    Tcg,
}

/// A VM without defaults: the form that a host starts, stores and sends to another host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ResolvedSpec {
    /// See [`VmSpec::name`].
    pub name: VmName,
    /// At least one block. Block `i` has the ID `ram<i>` in QEMU.
    pub memory: Vec<MemoryBlock>,
    /// At least one vCPU.
    pub vcpus: u32,
    /// Value of `-cpu`.
    pub cpu_model: String,
    /// A versioned machine type, such as `pc-q35-7.2`.
    pub machine: String,
    /// See [`VmSpec::firmware`].
    #[serde(default, skip_serializing_if = "Firmware::is_bios")]
    pub firmware: Firmware,
    /// See [`VmSpec::video`].
    #[serde(default, skip_serializing_if = "Video::is_none")]
    pub video: Video,
    /// Accelerator that runs the guest's code.
    pub accel: Accelerator,
    /// A QEMU other than the host's own, if the user requested one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub qemu: Option<PathBuf>,
    /// See [`VmSpec::kernel`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kernel: Option<PathBuf>,
    /// See [`VmSpec::initrd`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub initrd: Option<PathBuf>,
    /// See [`VmSpec::cmdline`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cmdline: Option<String>,
    /// Disks with their backing chains. See [`VmSpec::disks`].
    #[serde(default)]
    pub disks: Vec<ResolvedDisk>,
    /// See [`VmSpec::cdroms`].
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cdroms: Vec<Cdrom>,
    /// See [`VmSpec::scsi_controller`]. Set also if a disk implies it: the controller stays when
    /// that disk is detached.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub scsi_controller: bool,
    /// Network interfaces with their hardware addresses.
    #[serde(default)]
    pub nics: Vec<ResolvedNic>,
    /// See [`VmSpec::guest_agent`].
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub guest_agent: bool,
    /// See [`VmSpec::cloud_init`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cloud_init: Option<CloudInit>,
    /// See [`VmSpec::rng`].
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub rng: bool,
    /// See [`VmSpec::watchdog`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub watchdog: Option<Watchdog>,
    /// See [`VmSpec::extra_devices`].
    #[serde(default)]
    pub extra_devices: Vec<String>,
    /// See [`VmSpec::refuses_page_in`].
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub refuses_page_in: bool,
    /// See [`VmSpec::description`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub description: Option<String>,
    /// See [`VmSpec::tags`].
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub tags: BTreeSet<String>,
    /// See [`VmSpec::autostart`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub autostart: Option<Autostart>,
    /// See [`VmSpec::uuid`].
    #[serde(default)]
    pub uuid: Uuid,
}

fn default_vcpus() -> u32 {
    1
}

impl VmSpec {
    /// Creates a VM of that name with one vCPU, 1 GiB of shared memory and nothing to boot yet.
    #[must_use]
    pub fn new(name: impl Into<String>) -> VmSpec {
        VmSpec {
            name: name.into(),
            memory: default_memory(),
            vcpus: default_vcpus(),
            cpu_model: None,
            machine: None,
            firmware: Firmware::Bios,
            video: Video::None,
            accel: Accel::Auto,
            qemu: None,
            kernel: None,
            initrd: None,
            cmdline: None,
            disks: Vec::new(),
            cdroms: Vec::new(),
            scsi_controller: false,
            nics: Vec::new(),
            guest_agent: false,
            cloud_init: None,
            rng: false,
            watchdog: None,
            extra_devices: Vec::new(),
            refuses_page_in: false,
            description: None,
            tags: BTreeSet::new(),
            autostart: None,
            uuid: None,
        }
    }

    /// Checks everything that can be checked without a host.
    ///
    /// # Errors
    /// The first error found.
    pub fn validate(&self) -> Result<(), SpecError> {
        VmName::new(self.name.as_str())?;
        check_memory(&self.memory)?;
        if self.vcpus == 0 || self.vcpus > MAX_VCPUS {
            return Err(SpecError::Vcpus { vcpus: self.vcpus });
        }
        for (what, value) in [("CPU model", &self.cpu_model), ("machine type", &self.machine)] {
            if let Some(value) = value {
                check_value(what, value, "=,+-._")?;
            }
        }
        for device in &self.extra_devices {
            if device.is_empty() || device.chars().any(char::is_control) {
                return Err(SpecError::Value { what: "device", value: device.clone() });
            }
        }
        self.check_boot()?;
        for nic in &self.nics {
            check_value("network", &nic.network, "-._")?;
            nic.check()?;
        }
        if let Some(settings) = &self.cloud_init {
            settings.check(self.nics.len())?;
        }
        settings::check(self.description.as_deref(), &self.tags, self.autostart)?;
        self.resolved_nics().map(drop)
    }

    /// Returns the specification for everyone who may see the VM: with marks in place of secrets.
    #[must_use]
    pub fn without_secrets(mut self) -> VmSpec {
        if let Some(settings) = &mut self.cloud_init {
            settings.hide_secrets();
        }
        self
    }

    /// Replaces the marks of [`VmSpec::without_secrets`] with the secrets of `known`.
    #[must_use]
    pub fn with_secrets_of(mut self, known: &VmSpec) -> VmSpec {
        if let (Some(settings), Some(known)) = (&mut self.cloud_init, &known.cloud_init) {
            settings.restore_secrets(known);
        }
        self
    }

    fn check_boot(&self) -> Result<(), SpecError> {
        let paths =
            [("QEMU", &self.qemu), ("kernel", &self.kernel), ("initrd", &self.initrd)].into_iter();
        let paths = paths.filter_map(|(role, path)| path.as_deref().map(|path| (role, path)));
        for (role, path) in paths {
            check_path(role, path)?;
        }
        disk::check_drives(&self.disks, &self.cdroms)?;
        if self.kernel.is_none() {
            if self.initrd.is_some() {
                return Err(SpecError::NoKernel { what: "an initrd" });
            }
            if self.cmdline.is_some() {
                return Err(SpecError::NoKernel { what: "a kernel command line" });
            }
            if self.disks.is_empty() && self.cdroms.is_empty() {
                return Err(SpecError::NothingToBoot);
            }
        }
        match &self.cmdline {
            Some(line) if line.len() > MAX_CMDLINE_BYTES => {
                Err(SpecError::Cmdline { why: "it is too long" })
            }
            Some(line) if line.chars().any(char::is_control) => {
                Err(SpecError::Cmdline { why: "it contains a control character" })
            }
            _ => Ok(()),
        }
    }

    /// Returns the images of its disks and those in its CD-ROM drives.
    pub fn images(&self) -> impl Iterator<Item = &Path> {
        let disks = self.disks.iter().map(|disk| disk.path.as_path());
        disks.chain(self.cdroms.iter().filter_map(|drive| drive.image.as_deref()))
    }

    /// Returns the network interfaces with their hardware addresses.
    ///
    /// # Errors
    /// A hardware address is invalid, or two interfaces have it.
    pub fn resolved_nics(&self) -> Result<Vec<ResolvedNic>, SpecError> {
        let mut nics: Vec<ResolvedNic> = Vec::with_capacity(self.nics.len());
        for (index, nic) in self.nics.iter().enumerate() {
            let mac = match &nic.mac {
                Some(text) => text.parse().map_err(|_| SpecError::Mac { mac: text.clone() })?,
                None => MacAddress::derived(&self.name, index),
            };
            if nics.iter().any(|other| other.mac == mac) {
                return Err(SpecError::MacTwice { mac });
            }
            nics.push(nic.resolved(mac));
        }
        Ok(nics)
    }

    /// Returns the addresses that the VM claims, by network interface.
    ///
    /// # Errors
    /// Those of [`VmSpec::resolved_nics`].
    pub fn claimed_nics(&self) -> Result<Vec<ClaimedNic>, SpecError> {
        Ok(ClaimedNic::all(&self.resolved_nics()?, self.cloud_init.as_ref()))
    }

    /// Whether the VM differs from another in its settings alone: description, tags, autostart.
    #[must_use]
    pub fn differs_in_settings_alone(&self, other: &VmSpec) -> bool {
        let as_other = VmSpec {
            description: other.description.clone(),
            tags: other.tags.clone(),
            autostart: other.autostart,
            ..self.clone()
        };
        as_other == *other
    }

    /// Resolves everything that the specification leaves open, for the QEMU that will run it and
    /// the host's KVM.
    ///
    /// # Errors
    /// Those of [`VmSpec::validate`], and machine types and CPU models that this QEMU lacks.
    pub fn resolve(self, qemu: &QemuInfo, accel: &AccelProbe) -> Result<ResolvedSpec, SpecError> {
        self.validate()?;
        self.cloud_init.as_ref().map_or(Ok(()), CloudInit::refuse_hidden)?;
        let machine = self.machine.as_deref().unwrap_or(DEFAULT_MACHINE);
        let machine = qemu.versioned_machine(machine).ok_or_else(|| SpecError::UnknownMachine {
            machine: machine.to_owned(),
            qemu: qemu.path.clone(),
            version: qemu.version_text(),
        })?;
        self.firmware.check_machine(machine)?;
        self.video.check_machine(machine)?;
        let cpu_model = self.cpu_model.as_deref().unwrap_or(DEFAULT_CPU_MODEL);
        if !qemu.knows_cpu_model(cpu_model) {
            return Err(SpecError::UnknownCpuModel {
                model: cpu_model.to_owned(),
                qemu: qemu.path.clone(),
                version: qemu.version_text(),
            });
        }
        let mut disks: Vec<_> = self.disks.iter().cloned().map(ResolvedDisk::from).collect();
        let mut cdroms = self.cdroms.clone();
        disk::assign_units(&mut disks, &mut cdroms);
        let buses = disks.iter().map(|disk| disk.bus).chain(cdroms.iter().map(|drive| drive.bus));
        let has_scsi = buses.into_iter().any(|bus| bus == DiskBus::Scsi);
        Ok(ResolvedSpec {
            nics: self.resolved_nics()?,
            cpu_model: cpu_model.to_owned(),
            machine: machine.to_owned(),
            firmware: self.firmware,
            video: self.video,
            accel: match self.accel {
                Accel::Auto if accel.kvm => Accelerator::Kvm,
                Accel::Auto | Accel::Tcg => Accelerator::Tcg,
                Accel::Kvm => Accelerator::Kvm,
            },
            name: VmName::new(self.name)?,
            memory: self.memory,
            vcpus: self.vcpus,
            qemu: self.qemu,
            kernel: self.kernel,
            initrd: self.initrd,
            cmdline: self.cmdline,
            disks,
            cdroms,
            scsi_controller: self.scsi_controller || has_scsi,
            guest_agent: self.guest_agent,
            cloud_init: self.cloud_init,
            rng: self.rng,
            watchdog: self.watchdog,
            extra_devices: self.extra_devices,
            refuses_page_in: self.refuses_page_in,
            description: self.description,
            tags: self.tags,
            autostart: self.autostart,
            uuid: self.uuid.unwrap_or_else(Uuid::new_v4),
        })
    }
}

impl ResolvedSpec {
    /// Returns the images of its disks and those in its CD-ROM drives, without backing files.
    pub fn images(&self) -> impl Iterator<Item = &Path> {
        let disks = self.disks.iter().map(|disk| disk.path.as_path());
        disks.chain(self.cdroms.iter().filter_map(|drive| drive.image.as_deref()))
    }

    /// Total guest memory in bytes.
    #[must_use]
    pub fn memory_bytes(&self) -> u64 {
        self.memory.iter().map(|block| block.size.bytes()).fold(0, u64::saturating_add)
    }

    /// Guest memory in files of the RAM directory, in bytes.
    #[must_use]
    pub fn shared_memory_bytes(&self) -> u64 {
        let shared = self.memory.iter().filter(|block| block.backing == Backing::Shared);
        shared.map(|block| block.size.bytes()).fold(0, u64::saturating_add)
    }

    /// Checks a specification from a peer as strictly as one from a user.
    ///
    /// # Errors
    /// The first error found.
    pub fn validate(&self) -> Result<(), SpecError> {
        self.to_vm_spec().validate()?;
        self.firmware.check_machine(&self.machine)?;
        self.video.check_machine(&self.machine)?;
        disk::check_units(&self.disks, &self.cdroms)?;
        self.disks.iter().filter_map(|disk| disk.backing.as_deref()).try_for_each(disk::check_chain)
    }

    /// Returns the addresses that the VM claims, by network interface.
    #[must_use]
    pub fn claimed_nics(&self) -> Vec<ClaimedNic> {
        ClaimedNic::all(&self.nics, self.cloud_init.as_ref())
    }

    /// Returns the VM with the description, tags and autostart of a specification.
    #[must_use]
    pub fn with_settings_of(&self, wanted: &VmSpec) -> ResolvedSpec {
        ResolvedSpec {
            description: wanted.description.clone(),
            tags: wanted.tags.clone(),
            autostart: wanted.autostart,
            ..self.clone()
        }
    }

    /// Returns the VM with the disks and CD-ROM drives of `wanted`, which it does not have yet
    /// resolved. A disk that stays keeps its address and its backing chain.
    ///
    /// # Errors
    /// Those of [`VmSpec::validate`].
    pub fn with_drives(&self, wanted: &VmSpec) -> Result<ResolvedSpec, SpecError> {
        wanted.validate()?;
        let resolved = |disk: &Disk| {
            let known = self.disks.iter().find(|known| known.to_disk() == *disk);
            known.cloned().unwrap_or_else(|| disk.clone().into())
        };
        let mut spec = ResolvedSpec {
            disks: wanted.disks.iter().map(resolved).collect(),
            cdroms: wanted.cdroms.clone(),
            ..self.clone()
        };
        disk::assign_units(&mut spec.disks, &mut spec.cdroms);
        Ok(spec)
    }

    /// Returns the VM as a specification with every choice spelled out.
    #[must_use]
    pub fn to_vm_spec(&self) -> VmSpec {
        VmSpec {
            name: self.name.to_string(),
            memory: self.memory.clone(),
            vcpus: self.vcpus,
            cpu_model: Some(self.cpu_model.clone()),
            machine: Some(self.machine.clone()),
            firmware: self.firmware,
            video: self.video,
            accel: match self.accel {
                Accelerator::Kvm => Accel::Kvm,
                Accelerator::Tcg => Accel::Tcg,
            },
            qemu: self.qemu.clone(),
            kernel: self.kernel.clone(),
            initrd: self.initrd.clone(),
            cmdline: self.cmdline.clone(),
            disks: self.disks.iter().map(ResolvedDisk::to_disk).collect(),
            cdroms: self.cdroms.clone(),
            scsi_controller: self.scsi_controller,
            nics: self.nics.iter().map(ResolvedNic::to_nic).collect(),
            guest_agent: self.guest_agent,
            cloud_init: self.cloud_init.clone(),
            rng: self.rng,
            watchdog: self.watchdog,
            extra_devices: self.extra_devices.clone(),
            refuses_page_in: self.refuses_page_in,
            description: self.description.clone(),
            tags: self.tags.clone(),
            autostart: self.autostart,
            uuid: Some(self.uuid),
        }
    }
}

#[cfg(test)]
mod tests;
