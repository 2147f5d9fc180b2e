//! VM specifications: the form that a user writes, and the resolved form. The resolved form leaves
//! nothing to a host's defaults, so that both ends of a migration start the same machine.

mod checks;
mod clone;
mod cloud_init;
mod conflict;
mod crash;
mod disk;
mod error;
mod firmware;
mod hotplug;
mod memory;
mod name;
mod nic;
mod patch;
mod settings;
mod topology;
mod video;
mod watchdog;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::accel::{AccelProbe, Accelerator, DEFAULT_CPU_MODEL};
use crate::inspect::QemuInfo;
use crate::mac::MacAddress;
use crate::size::ByteSize;

pub use checks::MOST_SERIAL_PORTS;
use checks::{MAX_CMDLINE_BYTES, MAX_VCPUS, check_path, check_tpm, check_value};
use memory::{check_memory, default_memory, memory_blocks};
use topology::Wanted;

pub use cloud_init::{AddressWithPrefix, CloudInit, GuestNetwork, HIDDEN, MOST_USER_DATA_BYTES};
pub use conflict::{AddressConflict, ClaimedNic, address_conflict};
pub use crash::OnCrash;
pub(crate) use disk::MOST_BACKING_FILES;
pub use disk::{
    BackingFile, Cdrom, Disk, DiskBus, DiskCache, DiskFormat, MOST_SCSI_DISKS, ResolvedDisk,
};
pub use error::SpecError;
pub use firmware::Firmware;
pub use hotplug::MOST_HOTPLUG_SLOTS;
pub(crate) use memory::DIMM_SLOTS;
pub use memory::{Backing, MemoryBlock};
pub use name::VmName;
pub use nic::{MOST_QUEUES, Nic, NicFilter, NicLink, NicModel, ResolvedNic};
pub use patch::SpecPatch;
pub use settings::{Autostart, RestartPriority, kept_by_agents};
pub(crate) use topology::allowed;
pub use topology::{Part, Properties, Topology};
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
    /// Most memory that it may have while it runs; machine types q35 and pc. Default: what it has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schema(value_type = Option<String>))]
    pub max_memory: Option<ByteSize>,
    /// Number of vCPUs.
    #[serde(default = "default_vcpus")]
    pub vcpus: u32,
    /// Most vCPUs that it may have while it runs; machine types q35 and pc. Default: as many as it
    /// has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_cpus: Option<u32>,
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
    /// Whether the VM has a TPM 2.0, with a state of its own; machine types q35 and pc.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub tpm: bool,
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
    /// Number of slots for NICs and disks that come while the VM runs, up to 16; machine types q35
    /// and pc.
    #[serde(default, skip_serializing_if = "hotplug::is_zero")]
    #[cfg_attr(feature = "schema", schema(maximum = 16))]
    pub hotplug_slots: u32,
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
    /// Whether the guest reports free memory (virtio-balloon), which then takes no memory of the
    /// host and does not travel; machine types q35 and pc. Default: it does, unless
    /// `extra_devices` have a balloon.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub free_page_reporting: Option<bool>,
    /// Watchdog (i6300esb) with this action; machine types q35 and pc.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub watchdog: Option<Watchdog>,
    /// Whether the guest can report a panic (pvpanic); machine types q35 and pc. Default: it can if
    /// `on_crash` restarts the VM.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub panic_device: Option<bool>,
    /// Number of serial ports, 1 to 4. The first is the console of the firmware and, usually, of
    /// the guest.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    #[cfg_attr(feature = "schema", schema(minimum = 1, maximum = 4, default = 1))]
    pub serial_ports: u32,
    /// Further `-device` arguments in QEMU's syntax.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub extra_devices: Vec<String>,
    /// Devices of a VM that was adopted from another program, at their addresses; they replace
    /// those that Godwit would choose.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schema(value_type = Option<Vec<Object>>))]
    pub topology: Option<Topology>,
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
    /// Restarts of the VM after crashes. Default: none.
    #[serde(default, skip_serializing_if = "OnCrash::is_never")]
    pub on_crash: OnCrash,
    /// Restart of the VM on another host when its host fails, with this priority. Default: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub protect: Option<RestartPriority>,
    /// Whether the agents of hosts with its shared datastore restart the VM among themselves when
    /// its host fails: for the machine of a single manager. Not together with `protect`.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub protect_by_agents: bool,
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
    /// See [`VmSpec::max_memory`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_memory: Option<ByteSize>,
    /// At least one vCPU.
    pub vcpus: u32,
    /// See [`VmSpec::max_cpus`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_cpus: Option<u32>,
    /// Value of `-cpu`.
    pub cpu_model: String,
    /// A versioned machine type, such as `pc-q35-7.2`.
    pub machine: String,
    /// See [`VmSpec::firmware`].
    #[serde(default, skip_serializing_if = "Firmware::is_bios")]
    pub firmware: Firmware,
    /// See [`VmSpec::tpm`].
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub tpm: bool,
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
    /// See [`VmSpec::hotplug_slots`].
    #[serde(default, skip_serializing_if = "hotplug::is_zero")]
    pub hotplug_slots: u32,
    /// See [`VmSpec::guest_agent`].
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub guest_agent: bool,
    /// See [`VmSpec::cloud_init`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cloud_init: Option<CloudInit>,
    /// See [`VmSpec::rng`].
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub rng: bool,
    /// See [`VmSpec::free_page_reporting`]. A VM that was defined before there was a choice does
    /// not have the device.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub free_page_reporting: bool,
    /// See [`VmSpec::watchdog`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub watchdog: Option<Watchdog>,
    /// See [`VmSpec::panic_device`]. A VM that was defined before there was a choice does not have
    /// the device.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub panic_device: bool,
    /// See [`VmSpec::serial_ports`].
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub serial_ports: u32,
    /// See [`VmSpec::extra_devices`].
    #[serde(default)]
    pub extra_devices: Vec<String>,
    /// See [`VmSpec::topology`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub topology: Option<Topology>,
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
    /// See [`VmSpec::on_crash`].
    #[serde(default, skip_serializing_if = "OnCrash::is_never")]
    pub on_crash: OnCrash,
    /// See [`VmSpec::protect`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub protect: Option<RestartPriority>,
    /// See [`VmSpec::protect_by_agents`].
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub protect_by_agents: bool,
    /// See [`VmSpec::uuid`].
    #[serde(default)]
    pub uuid: Uuid,
}

fn default_vcpus() -> u32 {
    1
}

fn one() -> u32 {
    1
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_one(value: &u32) -> bool {
    *value == 1
}

impl VmSpec {
    /// Creates a VM of that name with one vCPU, 1 GiB of shared memory and nothing to boot yet.
    #[must_use]
    pub fn new(name: impl Into<String>) -> VmSpec {
        VmSpec {
            name: name.into(),
            memory: default_memory(),
            max_memory: None,
            vcpus: default_vcpus(),
            max_cpus: None,
            cpu_model: None,
            machine: None,
            firmware: Firmware::Bios,
            tpm: false,
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
            hotplug_slots: 0,
            guest_agent: false,
            cloud_init: None,
            rng: false,
            free_page_reporting: None,
            watchdog: None,
            panic_device: None,
            serial_ports: 1,
            extra_devices: Vec::new(),
            topology: None,
            refuses_page_in: false,
            description: None,
            tags: BTreeSet::new(),
            autostart: None,
            on_crash: OnCrash::Never,
            protect: None,
            protect_by_agents: false,
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
        if !(1..=MOST_SERIAL_PORTS).contains(&self.serial_ports) {
            return Err(SpecError::SerialPorts { ports: self.serial_ports });
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
            let from_start = self.nics.iter().filter(|nic| nic.slot.is_none());
            settings.check(from_start.count())?;
        }
        let description = self.description.as_deref();
        settings::check(&self.name, description, &self.tags, self.autostart.as_ref())?;
        self.on_crash.check()?;
        settings::check_own(self)?;
        hotplug::check_hotplug(self)?;
        self.check_topology()?;
        self.resolved_nics().map(drop)
    }

    /// Checks that the topology has a place for everything, and that nothing else is wanted.
    fn check_topology(&self) -> Result<(), SpecError> {
        let Some(topology) = &self.topology else { return Ok(()) };
        let in_slots = self.disks.iter().any(|disk| disk.slot.is_some())
            || self.nics.iter().any(|nic| nic.slot.is_some());
        let is_plain =
            |block: &MemoryBlock| block.backing == Backing::Shared && block.address.is_none();
        for (what, is_wanted) in [
            ("memory that is not shared", !self.memory.iter().all(is_plain)),
            ("max_memory", self.max_memory.is_some()),
            ("max_cpus", self.max_cpus.is_some()),
            ("hotplug_slots", self.hotplug_slots > 0),
            ("a TPM", self.tpm),
            ("cloud_init", self.cloud_init.is_some()),
            ("extra_devices", !self.extra_devices.is_empty()),
            ("a watchdog", self.watchdog.is_some()),
            ("a panic_device", self.panic_device == Some(true)),
            ("free_page_reporting", self.free_page_reporting == Some(true)),
            ("a disk or NIC in a slot", in_slots),
        ] {
            if is_wanted {
                return Err(SpecError::Topology { why: format!("it has no place for {what}") });
            }
        }
        topology.check(Wanted {
            memory: self.memory.len(),
            disks: self.disks.len(),
            cdroms: self.cdroms.len(),
            nics: self.nics.len(),
            serial_ports: self.serial_ports,
        })
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
        let mut orders = Vec::new();
        for nic in &self.nics {
            disk::take_order(&mut orders, nic.boot_order)
                .map_err(|why| SpecError::NicBoot { why })?;
        }
        let boots_from_network = !orders.is_empty();
        disk::check_drives(&self.disks, &self.cdroms, orders)?;
        if self.kernel.is_none() {
            if self.initrd.is_some() {
                return Err(SpecError::NoKernel { what: "an initrd" });
            }
            if self.cmdline.is_some() {
                return Err(SpecError::NoKernel { what: "a kernel command line" });
            }
            if self.disks.is_empty() && self.cdroms.is_empty() && !boots_from_network {
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

    /// Whether the VM differs from another in its settings alone: description, tags, autostart,
    /// `on_crash`, protection.
    #[must_use]
    pub fn differs_in_settings_alone(&self, other: &VmSpec) -> bool {
        let as_other = VmSpec {
            description: other.description.clone(),
            tags: other.tags.clone(),
            autostart: other.autostart.clone(),
            on_crash: other.on_crash,
            protect: other.protect,
            protect_by_agents: other.protect_by_agents,
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
        check_tpm(self.tpm, machine)?;
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
        let mut memory = self.memory.clone();
        hotplug::place_dimms(machine, &mut memory);
        let reports = self.free_page_reporting.unwrap_or_else(|| {
            let is_balloon = |device: &String| device.contains("balloon");
            let has_place = checks::is_pc(machine) && self.topology.is_none();
            has_place && !self.extra_devices.iter().any(is_balloon)
        });
        let wanted = (self.panic_device, self.topology.is_some());
        let panic_device =
            self.on_crash.gives_panic_device(wanted, machine, &self.extra_devices)?;
        let spec = ResolvedSpec {
            nics: self.resolved_nics()?,
            free_page_reporting: reports,
            hotplug_slots: self.hotplug_slots,
            cpu_model: cpu_model.to_owned(),
            machine: machine.to_owned(),
            firmware: self.firmware,
            tpm: self.tpm,
            video: self.video,
            accel: match self.accel {
                Accel::Auto if accel.kvm => Accelerator::Kvm,
                Accel::Auto | Accel::Tcg => Accelerator::Tcg,
                Accel::Kvm => Accelerator::Kvm,
            },
            name: VmName::new(self.name)?,
            memory,
            max_memory: self.max_memory,
            vcpus: self.vcpus,
            max_cpus: self.max_cpus,
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
            panic_device,
            serial_ports: self.serial_ports,
            extra_devices: self.extra_devices,
            topology: self.topology,
            refuses_page_in: self.refuses_page_in,
            description: self.description,
            tags: self.tags,
            autostart: self.autostart,
            on_crash: self.on_crash,
            protect: self.protect,
            protect_by_agents: self.protect_by_agents,
            uuid: self.uuid.unwrap_or_else(Uuid::new_v4),
        };
        hotplug::check_machine(&spec)?;
        Ok(spec)
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
        hotplug::total_bytes(&self.memory)
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
        check_tpm(self.tpm, &self.machine)?;
        checks::check_panic_device(self.panic_device, &self.machine)?;
        self.video.check_machine(&self.machine)?;
        hotplug::check_machine(self)?;
        disk::check_units(&self.disks, &self.cdroms)?;
        self.disks.iter().filter_map(|disk| disk.backing.as_deref()).try_for_each(disk::check_chain)
    }

    /// Returns the addresses that the VM claims, by network interface.
    #[must_use]
    pub fn claimed_nics(&self) -> Vec<ClaimedNic> {
        ClaimedNic::all(&self.nics, self.cloud_init.as_ref())
    }

    /// Returns the VM with the description, tags, autostart, `on_crash` and protection of a
    /// specification.
    #[must_use]
    pub fn with_settings_of(&self, wanted: &VmSpec) -> ResolvedSpec {
        ResolvedSpec {
            description: wanted.description.clone(),
            tags: wanted.tags.clone(),
            autostart: wanted.autostart.clone(),
            on_crash: wanted.on_crash,
            protect: wanted.protect,
            protect_by_agents: wanted.protect_by_agents,
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

    /// Returns the VM for another QEMU: the names of block nodes are those of a new one.
    #[must_use]
    pub fn with_fresh_node_names(&self) -> ResolvedSpec {
        let mut spec = self.clone();
        spec.disks.iter_mut().for_each(|disk| disk.image_generation = 0);
        spec
    }

    /// Returns the VM as a specification with every choice spelled out.
    #[must_use]
    pub fn to_vm_spec(&self) -> VmSpec {
        VmSpec {
            name: self.name.to_string(),
            memory: self.memory.clone(),
            max_memory: self.max_memory,
            vcpus: self.vcpus,
            max_cpus: self.max_cpus,
            cpu_model: Some(self.cpu_model.clone()),
            machine: Some(self.machine.clone()),
            firmware: self.firmware,
            tpm: self.tpm,
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
            hotplug_slots: self.hotplug_slots,
            guest_agent: self.guest_agent,
            cloud_init: self.cloud_init.clone(),
            rng: self.rng,
            free_page_reporting: Some(self.free_page_reporting),
            watchdog: self.watchdog,
            panic_device: Some(self.panic_device),
            serial_ports: self.serial_ports,
            extra_devices: self.extra_devices.clone(),
            topology: self.topology.clone(),
            refuses_page_in: self.refuses_page_in,
            description: self.description.clone(),
            tags: self.tags.clone(),
            autostart: self.autostart.clone(),
            on_crash: self.on_crash,
            protect: self.protect,
            protect_by_agents: self.protect_by_agents,
            uuid: Some(self.uuid),
        }
    }
}

#[cfg(test)]
mod tests;
