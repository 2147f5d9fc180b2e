//! Why a specification is refused.

use std::path::PathBuf;

use godwit_types::Fault;

use crate::mac::MacAddress;
use crate::spec::checks::{MAX_CMDLINE_BYTES, MAX_VCPUS, MOST_SERIAL_PORTS};
use crate::spec::firmware::Firmware;
use crate::spec::name::VmName;
use crate::spec::video::Video;

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
    /// No serial port, or more than a PC has.
    #[error("invalid number of serial ports {ports}: a VM has 1 to {MOST_SERIAL_PORTS}")]
    SerialPorts {
        /// The number given.
        ports: u32,
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
    /// An option of a disk is invalid.
    #[error("invalid disk {}: {why}", path.display())]
    Disk {
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// An option of a CD-ROM drive is invalid.
    #[error("invalid CD-ROM drive {index}: {why}")]
    Cdrom {
        /// Position among the drives, from 0.
        index: usize,
        /// What is wrong with it.
        why: String,
    },
    /// A controller has fewer units.
    #[error("too many disks on bus {bus}: {count}, and its controller has {most}")]
    TooManyDrives {
        bus: &'static str,
        /// Disks and CD-ROM drives on the bus.
        count: usize,
        most: u32,
    },
    /// The specification has neither a kernel nor a disk.
    #[error("the VM has nothing to boot: no kernel, disk, CD-ROM drive or NIC with a boot order")]
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
    /// QEMU or the kernel would refuse the interface.
    #[error("invalid network interface: {why}")]
    Nic { why: &'static str },
    /// The interface's place in the boot order is invalid.
    #[error("invalid network interface: {why}")]
    NicBoot { why: String },
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
    /// The machine type has no place for a TPM.
    #[error("machine type \"{machine}\" cannot have a TPM")]
    Tpm {
        /// The versioned machine type.
        machine: String,
    },
    /// A setting for cloud-init is invalid. Its value may be a secret.
    #[error("invalid cloud_init.{what}: {why}")]
    CloudInit {
        /// The setting.
        what: &'static str,
        /// What is wrong with it.
        why: &'static str,
    },
    /// A description, tag, start with the host, policy or small device is invalid.
    #[error("invalid {what}: {why}")]
    Setting {
        /// The setting.
        what: &'static str,
        /// What is wrong with it.
        why: &'static str,
        /// What the user can do about it.
        remedy: &'static str,
    },
    /// The machine type takes fewer vCPUs.
    #[error("machine type \"{machine}\" cannot have {vcpus} vCPUs: it takes up to {most}")]
    TooManyVcpus {
        vcpus: u32,
        /// The versioned machine type.
        machine: String,
        most: u32,
    },
    /// The machine type has no bus for the video device.
    #[error("machine type \"{machine}\" cannot have video {video}")]
    Video {
        video: Video,
        /// The versioned machine type.
        machine: String,
    },
    /// What a running VM shall get, or may get, is invalid.
    #[error("invalid hot-plug: {why}")]
    Hotplug {
        /// What is wrong with it.
        why: String,
    },
    /// The devices of an adopted VM do not fit the rest, or one may not be there.
    #[error("invalid topology: {why}")]
    Topology {
        /// What is wrong with it.
        why: String,
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
            SpecError::Vcpus { .. } | SpecError::TooManyVcpus { .. } => "vm-vcpus",
            SpecError::Setting { .. } => "vm-setting",
            SpecError::SerialPorts { .. } => "vm-serial-ports",
            SpecError::Disk { .. } | SpecError::Cdrom { .. } | SpecError::TooManyDrives { .. } => {
                "vm-disk"
            }
            SpecError::Path { .. } => "vm-path",
            SpecError::NothingToBoot => "vm-nothing-to-boot",
            SpecError::NoKernel { .. } => "vm-no-kernel",
            SpecError::Cmdline { .. } => "vm-cmdline",
            SpecError::Mac { .. } | SpecError::MacTwice { .. } => "vm-mac",
            SpecError::Nic { .. } | SpecError::NicBoot { .. } => "vm-nic",
            SpecError::Value { .. } => "vm-value",
            SpecError::Firmware { .. } => "vm-firmware",
            SpecError::Tpm { .. } => "vm-tpm",
            SpecError::CloudInit { .. } => "vm-cloud-init",
            SpecError::Video { .. } => "vm-video",
            SpecError::Hotplug { .. } => "vm-hotplug",
            SpecError::Topology { .. } => "vm-topology",
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
            SpecError::SerialPorts { .. } => "give a number from 1 to 4".to_owned(),
            SpecError::Path { .. } => "give the absolute path on the host".to_owned(),
            SpecError::Disk { .. } | SpecError::Cdrom { .. } => {
                "correct this option; docs/disks.md lists them".to_owned()
            }
            SpecError::TooManyDrives { .. } => "put some on another bus".to_owned(),
            SpecError::NothingToBoot => {
                "give a kernel (with initrd), a disk image or a CD-ROM".to_owned()
            }
            SpecError::NoKernel { .. } => "give the kernel too, or leave this out".to_owned(),
            SpecError::Cmdline { .. } => {
                format!("use at most {MAX_CMDLINE_BYTES} bytes of printable text")
            }
            SpecError::Mac { .. } => {
                "write six hexadecimal bytes like 52:54:00:12:34:56, the first of them even"
                    .to_owned()
            }
            SpecError::NicBoot { .. } => "give each device another position, from 1".to_owned(),
            SpecError::Nic { .. } => "correct the interface, or leave the setting out".to_owned(),
            SpecError::MacTwice { .. } => "give each interface its own, or omit it".to_owned(),
            SpecError::Value { .. } => {
                "use a name that the host's QEMU and configuration know".to_owned()
            }
            SpecError::Firmware { .. } => {
                "use machine type q35 (uefi also with pc), or firmware bios".to_owned()
            }
            SpecError::Tpm { .. } => "use machine type q35 or pc, or no TPM".to_owned(),
            SpecError::CloudInit { what, .. } => match *what {
                "user" => "use lower-case letters, digits, \"-\" and \"_\", at most 32",
                "ssh_keys" => "give the content of files like id_ed25519.pub, at most 32",
                "password_hash" => "give what `openssl passwd -6` prints",
                "hostname" => "use letters, digits, \"-\" and \".\"",
                "user_data" => "give a text of 1 byte to 64 KiB",
                _ => {
                    "give each NIC at most one item: addresses like 10.0.0.5/24, at most one \
                     gateway of each family, and name servers"
                }
            }
            .to_owned(),
            SpecError::Setting { remedy, .. } => (*remedy).to_owned(),
            SpecError::TooManyVcpus { most, .. } => {
                format!("set vcpus to {most} or less, or choose another machine type")
            }
            SpecError::Video { .. } => "use machine type q35 or pc, or video none".to_owned(),
            SpecError::Hotplug { .. } => {
                "set max_cpus, max_memory and hotplug_slots while the VM is stopped; \
                 docs/hotplug.md says what each allows"
                    .to_owned()
            }
            SpecError::Topology { .. } => {
                "leave the devices of an adopted VM as they are, or define the VM again without \
                 topology (docs/adopt.md)"
                    .to_owned()
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
