//! VM specifications: the form that a user writes, and the resolved form. The resolved form leaves
//! nothing to a host's defaults, so that both ends of a migration start the same machine.

mod conflict;
mod firmware;
mod name;
mod patch;

use std::fmt;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Deserializer, Serialize};
use uuid::Uuid;

use crate::accel::{AccelProbe, Accelerator, DEFAULT_CPU_MODEL};
use crate::inspect::QemuInfo;
use crate::mac::MacAddress;
use crate::size::ByteSize;
use godwit_types::Fault;

pub use conflict::{AddressConflict, address_conflict};
pub use firmware::Firmware;
pub use name::VmName;
pub use patch::SpecPatch;

/// Machine type of a VM whose specification names none. It is resolved to the versioned type behind
/// it.
pub const DEFAULT_MACHINE: &str = "q35";

/// Bytes in a page, the unit of memory blocks.
const PAGE_BYTES: u64 = 4096;
/// QEMU rounds a machine's memory up to a multiple of this (7.2 `set_memory_options`) and then
/// refuses a backend of another size.
const TOTAL_MEMORY_UNIT_BYTES: u64 = 8192;
/// Most memory blocks (NUMA nodes) a VM may have.
const MAX_MEMORY_BLOCKS: usize = 64;
/// Least memory with which a PC starts.
const MIN_MEMORY_BYTES: u64 = 1 << 20;
/// Most vCPUs a VM may have (KVM_MAX_VCPUS of Linux 6 on x86).
const MAX_VCPUS: u32 = 4096;
/// Most backing files of a disk. A longer chain is a loop.
pub(crate) const MOST_BACKING_FILES: usize = 31;
/// Longest kernel command line on x86 (COMMAND_LINE_SIZE, Linux 6).
const MAX_CMDLINE_BYTES: usize = 2047;

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
    /// Network interfaces, in the order in which the guest finds them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub nics: Vec<Nic>,
    /// Further `-device` arguments in QEMU's syntax.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub extra_devices: Vec<String>,
    /// Whether the guest must never run while pages of its memory are at another host. A migration
    /// that cannot end otherwise fails.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub refuses_page_in: bool,
    /// Identity of the VM, independent of its name; the guest reads it too (SMBIOS). Default:
    /// random.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schema(value_type = Option<String>))]
    pub uuid: Option<Uuid>,
}

/// One block of guest memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct MemoryBlock {
    /// A multiple of 4 KiB.
    pub size: ByteSize,
    /// Where the pages are stored.
    #[serde(default)]
    pub backing: Backing,
}

impl MemoryBlock {
    /// Creates a block in a file that the agent maps too, which the external engine can move.
    #[must_use]
    pub fn shared(size: ByteSize) -> MemoryBlock {
        MemoryBlock { size, backing: Backing::Shared }
    }

    fn is_private(&self) -> bool {
        self.backing == Backing::Private
    }
}

/// Where the pages of a memory block are stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub enum Backing {
    /// In a file of the host's RAM directory, mapped by QEMU and by the agent.
    #[default]
    Shared,
    /// In QEMU's own anonymous memory: only QEMU's own migration can move it.
    Private,
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

/// A disk: an image at a path that exists on every host of the VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Disk {
    /// Absolute path of the image.
    #[cfg_attr(feature = "schema", schema(value_type = String))]
    pub path: PathBuf,
    /// Format of the image. Never guessed from its content: a guest could write another header into
    /// a raw image.
    pub format: DiskFormat,
    /// Whether the guest may only read it.
    #[serde(default)]
    pub readonly: bool,
}

/// Formats of disk images.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub enum DiskFormat {
    /// The bytes of the disk without a header.
    Raw,
    /// QEMU's own format.
    Qcow2,
}

impl DiskFormat {
    /// Returns the name of QEMU's block driver.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            DiskFormat::Raw => "raw",
            DiskFormat::Qcow2 => "qcow2",
        }
    }
}

/// A disk with its backing chain. A guest or the author of an image can change the chain in the
/// image's header, so it is recorded when an operator names the disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ResolvedDisk {
    /// See [`Disk::path`].
    pub path: PathBuf,
    /// See [`Disk::format`].
    pub format: DiskFormat,
    /// See [`Disk::readonly`].
    #[serde(default)]
    pub readonly: bool,
    /// Backing files, from the image's own down to the last one. `None`: not recorded, as in
    /// definitions of releases that recorded no chains. A raw image has no chain to record.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backing: Option<Vec<BackingFile>>,
}

impl From<Disk> for ResolvedDisk {
    fn from(disk: Disk) -> Self {
        ResolvedDisk {
            path: disk.path,
            format: disk.format,
            readonly: disk.readonly,
            backing: None,
        }
    }
}

impl ResolvedDisk {
    /// Returns the disk as its user describes it.
    #[must_use]
    pub fn to_disk(&self) -> Disk {
        Disk { path: self.path.clone(), format: self.format, readonly: self.readonly }
    }
}

/// A backing file of an image, or of another backing file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BackingFile {
    /// Real path, with every link resolved.
    pub path: PathBuf,
    pub format: DiskFormat,
}

impl fmt::Display for BackingFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.path.display(), self.format.name())
    }
}

/// A network interface as its user describes it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Nic {
    /// The network in the host's configuration that it joins.
    pub network: String,
    /// Hardware address. Default: derived from the VM's name and the interface's position.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mac: Option<String>,
    /// Address of the guest in that network, for external monitoring. It is never given to the
    /// guest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schema(value_type = Option<String>))]
    pub address: Option<IpAddr>,
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
    /// Network interfaces with their hardware addresses.
    #[serde(default)]
    pub nics: Vec<ResolvedNic>,
    /// See [`VmSpec::extra_devices`].
    #[serde(default)]
    pub extra_devices: Vec<String>,
    /// See [`VmSpec::refuses_page_in`].
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub refuses_page_in: bool,
    /// See [`VmSpec::uuid`].
    #[serde(default)]
    pub uuid: Uuid,
}

/// A network interface with its hardware address.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ResolvedNic {
    /// See [`Nic::network`].
    pub network: String,
    /// Hardware address, the same on every host.
    pub mac: MacAddress,
    /// See [`Nic::address`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<IpAddr>,
}

/// Why a specification is refused. The text states what and why; [`SpecError::remedy`] what to do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SpecError {
    /// The name cannot be part of file names.
    #[error("\"{name}\" is not a valid VM name")]
    Name { name: String },
    /// QEMU would refuse the memory.
    #[error("invalid VM memory: {why}")]
    Memory {
        /// What is wrong with it.
        why: String,
    },
    /// No vCPU, or more than KVM supports.
    #[error("invalid number of vCPUs {vcpus}: a VM has 1 to {MAX_VCPUS}")]
    Vcpus {
        /// The number given.
        vcpus: u32,
    },
    /// The path is relative or not UTF-8.
    #[error("{role} \"{}\" is {why}", path.display())]
    Path {
        /// What the path is for.
        role: &'static str,
        path: PathBuf,
        /// What is wrong with it.
        why: &'static str,
    },
    /// The specification has neither a kernel nor a disk.
    #[error("the VM has nothing to boot: no kernel and no disk")]
    NothingToBoot,
    /// An initrd or a command line is given without a kernel.
    #[error("{what} was given without a kernel")]
    NoKernel {
        /// The option that lacks its kernel.
        what: &'static str,
    },
    /// The kernel would truncate the command line, or it contains a control character.
    #[error("invalid kernel command line: {why}")]
    Cmdline {
        /// What is wrong with it.
        why: &'static str,
    },
    /// The address is not a hardware address of a single station.
    #[error("\"{mac}\" is not a hardware address of a network interface")]
    Mac {
        /// The given address.
        mac: String,
    },
    /// Two interfaces have one hardware address.
    #[error("two network interfaces have the hardware address {mac}")]
    MacTwice { mac: MacAddress },
    /// The value would spill into other options.
    #[error("invalid {what} \"{value}\": it is empty or contains a character that is not allowed")]
    Value {
        /// The option.
        what: &'static str,
        value: String,
    },
    /// This QEMU lacks the machine type.
    #[error("machine type \"{machine}\" is unknown to {} (QEMU {version})", qemu.display())]
    UnknownMachine {
        /// The given machine type.
        machine: String,
        qemu: PathBuf,
        version: String,
    },
    /// The machine type has no flash for the firmware.
    #[error("machine type \"{machine}\" cannot have firmware {firmware}")]
    Firmware {
        firmware: Firmware,
        /// The versioned machine type.
        machine: String,
    },
    /// This QEMU lacks the CPU model.
    #[error("CPU model \"{model}\" is unknown to {} (QEMU {version})", qemu.display())]
    UnknownCpuModel { model: String, qemu: PathBuf, version: String },
}

impl SpecError {
    /// Stable code for programs.
    #[must_use]
    pub fn code(&self) -> &'static str {
        match self {
            SpecError::Name { .. } => "vm-name",
            SpecError::Memory { .. } => "vm-memory",
            SpecError::Vcpus { .. } => "vm-vcpus",
            SpecError::Path { .. } => "vm-path",
            SpecError::NothingToBoot => "vm-nothing-to-boot",
            SpecError::NoKernel { .. } => "vm-no-kernel",
            SpecError::Cmdline { .. } => "vm-cmdline",
            SpecError::Mac { .. } | SpecError::MacTwice { .. } => "vm-mac",
            SpecError::Value { .. } => "vm-value",
            SpecError::Firmware { .. } => "vm-firmware",
            SpecError::UnknownMachine { .. } => "qemu-machine-unknown",
            SpecError::UnknownCpuModel { .. } => "qemu-cpu-model-unknown",
        }
    }

    /// What the user can do about it.
    #[must_use]
    pub fn remedy(&self) -> String {
        match self {
            SpecError::Name { .. } => {
                let most = VmName::MAX_BYTES;
                format!(
                    "use 1 to {most} letters, digits, \"-\", \"_\" or \".\", starting with a \
                    letter or digit"
                )
            }
            SpecError::Memory { .. } => {
                "give blocks like 1GiB, each a multiple of 4 KiB, with a total that is a multiple \
                of 8 KiB"
                    .to_owned()
            }
            SpecError::Vcpus { .. } => {
                "set vcpus to the number of CPUs that the guest shall have".to_owned()
            }
            SpecError::Path { .. } => "give the absolute path on the host".to_owned(),
            SpecError::NothingToBoot => "give a kernel (with initrd) or a disk image".to_owned(),
            SpecError::NoKernel { .. } => "give the kernel too, or leave this out".to_owned(),
            SpecError::Cmdline { .. } => {
                format!("use at most {MAX_CMDLINE_BYTES} bytes of printable text")
            }
            SpecError::Mac { .. } => {
                "write six hexadecimal bytes like 52:54:00:12:34:56, the first of them even"
                    .to_owned()
            }
            SpecError::MacTwice { .. } => "give each interface its own, or omit it".to_owned(),
            SpecError::Value { .. } => {
                "use a name that the host's QEMU and configuration know".to_owned()
            }
            SpecError::Firmware { .. } => {
                "use machine type q35 (uefi also with pc), or firmware bios".to_owned()
            }
            SpecError::UnknownMachine { qemu, .. } => {
                format!("choose one of `{} -machine help`, or another --qemu", qemu.display())
            }
            SpecError::UnknownCpuModel { qemu, .. } => {
                format!("choose one of `{} -cpu help`, or another --qemu", qemu.display())
            }
        }
    }

    /// Combines code, message and remedy.
    #[must_use]
    pub fn fault(&self) -> Fault {
        Fault::new(self.code(), self.to_string(), self.remedy())
    }
}

fn default_vcpus() -> u32 {
    1
}

fn default_memory() -> Vec<MemoryBlock> {
    vec![MemoryBlock::shared(ByteSize::from_mib(1024))]
}

/// Accepts `"1GiB"`, `1073741824`, one block or a list of blocks.
fn memory_blocks<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<MemoryBlock>, D::Error> {
    #[derive(Deserialize)]
    #[serde(
        untagged,
        expecting = "expected a size like \"1GiB\" or a list of blocks { size, backing }"
    )]
    enum Memory {
        Size(ByteSize),
        Block(MemoryBlock),
        Blocks(Vec<MemoryBlock>),
    }
    Ok(match Memory::deserialize(deserializer)? {
        Memory::Size(size) => vec![MemoryBlock::shared(size)],
        Memory::Block(block) => vec![block],
        Memory::Blocks(blocks) => blocks,
    })
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
            accel: Accel::Auto,
            qemu: None,
            kernel: None,
            initrd: None,
            cmdline: None,
            disks: Vec::new(),
            nics: Vec::new(),
            extra_devices: Vec::new(),
            refuses_page_in: false,
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
        }
        self.resolved_nics().map(drop)
    }

    fn check_boot(&self) -> Result<(), SpecError> {
        let paths =
            [("QEMU", &self.qemu), ("kernel", &self.kernel), ("initrd", &self.initrd)].into_iter();
        let paths = paths.filter_map(|(role, path)| path.as_deref().map(|path| (role, path)));
        for (role, path) in paths.chain(self.disks.iter().map(|disk| ("disk", disk.path.as_path())))
        {
            check_path(role, path)?;
        }
        if self.kernel.is_none() {
            if self.initrd.is_some() {
                return Err(SpecError::NoKernel { what: "an initrd" });
            }
            if self.cmdline.is_some() {
                return Err(SpecError::NoKernel { what: "a kernel command line" });
            }
            if self.disks.is_empty() {
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
            nics.push(ResolvedNic { network: nic.network.clone(), mac, address: nic.address });
        }
        Ok(nics)
    }

    /// Resolves everything that the specification leaves open, for the QEMU that will run it and
    /// the host's KVM.
    ///
    /// # Errors
    /// Those of [`VmSpec::validate`], and machine types and CPU models that this QEMU lacks.
    pub fn resolve(self, qemu: &QemuInfo, accel: &AccelProbe) -> Result<ResolvedSpec, SpecError> {
        self.validate()?;
        let machine = self.machine.as_deref().unwrap_or(DEFAULT_MACHINE);
        let machine = qemu.versioned_machine(machine).ok_or_else(|| SpecError::UnknownMachine {
            machine: machine.to_owned(),
            qemu: qemu.path.clone(),
            version: qemu.version_text(),
        })?;
        self.firmware.check_machine(machine)?;
        let cpu_model = self.cpu_model.as_deref().unwrap_or(DEFAULT_CPU_MODEL);
        if !qemu.knows_cpu_model(cpu_model) {
            return Err(SpecError::UnknownCpuModel {
                model: cpu_model.to_owned(),
                qemu: qemu.path.clone(),
                version: qemu.version_text(),
            });
        }
        Ok(ResolvedSpec {
            nics: self.resolved_nics()?,
            cpu_model: cpu_model.to_owned(),
            machine: machine.to_owned(),
            firmware: self.firmware,
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
            disks: self.disks.into_iter().map(ResolvedDisk::from).collect(),
            extra_devices: self.extra_devices,
            refuses_page_in: self.refuses_page_in,
            uuid: self.uuid.unwrap_or_else(Uuid::new_v4),
        })
    }
}

impl ResolvedSpec {
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
        self.disks.iter().filter_map(|disk| disk.backing.as_deref()).try_for_each(check_chain)
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
            accel: match self.accel {
                Accelerator::Kvm => Accel::Kvm,
                Accelerator::Tcg => Accel::Tcg,
            },
            qemu: self.qemu.clone(),
            kernel: self.kernel.clone(),
            initrd: self.initrd.clone(),
            cmdline: self.cmdline.clone(),
            disks: self.disks.iter().map(ResolvedDisk::to_disk).collect(),
            nics: self
                .nics
                .iter()
                .map(|nic| Nic {
                    network: nic.network.clone(),
                    mac: Some(nic.mac.to_string()),
                    address: nic.address,
                })
                .collect(),
            extra_devices: self.extra_devices.clone(),
            refuses_page_in: self.refuses_page_in,
            uuid: Some(self.uuid),
        }
    }
}

fn check_value(what: &'static str, value: &str, punctuation: &str) -> Result<(), SpecError> {
    let good = |c: char| c.is_ascii_alphanumeric() || punctuation.contains(c);
    if value.starts_with(|c: char| c.is_ascii_alphanumeric()) && value.chars().all(good) {
        return Ok(());
    }
    Err(SpecError::Value { what, value: value.to_owned() })
}

fn check_path(role: &'static str, path: &Path) -> Result<(), SpecError> {
    let error = |why| Err(SpecError::Path { role, path: path.to_owned(), why });
    match path.to_str() {
        None => error("not UTF-8"),
        Some(text) if text.chars().any(char::is_control) => {
            error("a path with a control character")
        }
        Some(_) if !path.is_absolute() => error("not an absolute path"),
        Some(_) => Ok(()),
    }
}

fn check_chain(backing: &[BackingFile]) -> Result<(), SpecError> {
    if let Some(beyond) = backing.get(MOST_BACKING_FILES) {
        return Err(SpecError::Path {
            role: "backing file",
            path: beyond.path.clone(),
            why: "beyond the longest backing chain",
        });
    }
    backing.iter().try_for_each(|file| check_path("backing file", &file.path))
}

fn check_memory(blocks: &[MemoryBlock]) -> Result<(), SpecError> {
    let error = |why: String| Err(SpecError::Memory { why });
    if blocks.is_empty() {
        return error("it has no block".to_owned());
    }
    if blocks.len() > MAX_MEMORY_BLOCKS {
        return error(format!("{} blocks are more than {MAX_MEMORY_BLOCKS}", blocks.len()));
    }
    let mut total_bytes: u64 = 0;
    for (index, block) in blocks.iter().enumerate() {
        let bytes = block.size.bytes();
        if bytes == 0 || !bytes.is_multiple_of(PAGE_BYTES) {
            return error(format!(
                "block {index} of {} is not a whole number of 4 KiB pages",
                block.size
            ));
        }
        total_bytes = match total_bytes.checked_add(bytes) {
            Some(total) => total,
            None => return error("it is larger than any machine".to_owned()),
        };
    }
    if total_bytes < MIN_MEMORY_BYTES {
        return error(format!("{} in all is less than 1 MiB", ByteSize::from_bytes(total_bytes)));
    }
    if !total_bytes.is_multiple_of(TOTAL_MEMORY_UNIT_BYTES) {
        return error(format!("{total_bytes} bytes in all is not a multiple of 8 KiB"));
    }
    Ok(())
}

#[cfg(test)]
mod tests;
