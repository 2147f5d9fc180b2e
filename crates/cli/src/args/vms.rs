//! Command line of VMs.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand, ValueEnum};
use godwit_qemu::{Accel, ByteSize, Firmware, NicLink, Video, Watchdog};

use super::adopt::AdoptArgs;
use super::choices::{ACCELERATORS, FIRMWARES, LINKS, VIDEOS, WATCHDOGS, one_of, parse_label};
use super::clones::{CloneArgs, DeleteArgs, SnapshotCommand};
use super::cloud_init::CloudInitArgs;
use super::imports::{ExportArgs, ImportArgs};
use super::moves::PreflightArgs;
use super::settings::{OnOff, SettingsArgs};
use crate::units::parse_duration;

#[derive(Debug, Subcommand)]
pub(crate) enum VmCommand {
    /// Define a VM on the given host, or on a host that the manager chooses
    #[command(after_help = "Examples:
  godwit vm create web --memory 1GiB --disk path=/srv/web.qcow2,format=qcow2 --label app=web --start
  godwit vm create web --host a --memory 1GiB --vcpus 2 --kernel vmlinuz --initrd initrd.img \\
      --append 'console=ttyS0' --nic network=lan,address=10.88.0.21 --start
  godwit vm create db --host a --memory 4GiB --disk path=/srv/db.qcow2,format=qcow2
  godwit vm create app --disk path=/srv/app.qcow2,format=qcow2 --nic network=lan --guest-agent \\
      --ssh-key ~/.ssh/id_ed25519.pub --ip 10.88.0.30/24,gateway=10.88.0.1 --start
  godwit vm create -f web.toml --host a --start")]
    Create(Box<CreateArgs>),
    /// List the VMs of all hosts
    #[command(after_help = "Examples:
  godwit vm list
  godwit vm list --label tier=front
  godwit vm list --tag prod
  godwit vm list --all
  godwit vm list --host a --json")]
    List {
        /// List also guests of the hosts' libvirt, with what prevents their adoption
        #[arg(long)]
        all: bool,
        /// List only VMs with this label (through the manager; repeatable)
        #[arg(long = "label", value_name = "KEY=VALUE", value_parser = parse_label)]
        labels: Vec<(String, String)>,
        /// List only VMs with this tag (repeatable)
        #[arg(long = "tag", value_name = "TAG")]
        tags: Vec<String>,
    },
    /// Adopt a running guest of libvirt, or of another QEMU, without a stop
    #[command(after_help = "Examples:
  godwit vm adopt --libvirt web --dry-run
  godwit vm adopt --libvirt web
  godwit vm adopt --libvirt web --to b
  godwit vm adopt --qmp /var/run/qemu-server/100.qmp --name db
  godwit vm adopt --libvirt web --host a --manager https://m1:7800

Without --host, the manager finds the host whose libvirt has the domain. Ctrl-C cancels until the \
hand-over: the guest runs on where it was. docs/adopt.md is the walk-through.")]
    Adopt(AdoptArgs),
    /// Check whether a VM can move to a host; without a target, rank all hosts (through the
    /// manager)
    #[command(after_help = "Examples:
  godwit vm preflight web --to b
  godwit vm preflight web --to b --predict
  godwit vm preflight web

The exit code is 5 if the VM cannot move.")]
    Preflight(PreflightArgs),
    /// Show a VM
    #[command(after_help = "Examples:
  godwit vm show web
  godwit vm show web --json")]
    Show {
        /// Name of the VM
        name: String,
    },
    /// Start a stopped VM, or resume a suspended or paused VM
    #[command(
        visible_alias = "resume",
        after_help = "Examples:
  godwit vm start web
  godwit vm resume web
  godwit vm start web --skip-preflight"
    )]
    Start {
        /// Name of the VM
        name: String,
        /// Start the VM even if its CPU model exceeds the cluster's baseline (through the manager)
        #[arg(long)]
        skip_preflight: bool,
    },
    /// Shut down a VM with its ACPI power button; terminate it if it has not stopped within the
    /// grace period
    #[command(after_help = "Examples:
  godwit vm stop web
  godwit vm stop web --grace 2min
  godwit vm stop web --force")]
    Stop(StopArgs),
    /// Stop a VM as `vm stop` does, and start it again
    #[command(after_help = "Examples:
  godwit vm restart web
  godwit vm restart web --grace 2min")]
    Restart(StopArgs),
    /// Reset a running VM, as its reset button does; the guest loses what it has not written
    #[command(after_help = "Example:
  godwit vm reset web")]
    Reset {
        /// Name of the VM
        name: String,
    },
    /// Give a stopped VM another name
    #[command(after_help = "Example:
  godwit vm rename web shop")]
    Rename {
        /// Name of the VM
        name: String,
        /// Its new name
        new_name: String,
    },
    /// Save a running VM's memory to a file of its host and end its process; `vm resume` continues
    /// the guest
    #[command(after_help = "Examples:
  godwit vm suspend web
  godwit vm resume web")]
    Suspend {
        /// Name of the VM
        name: String,
    },
    /// Freeze the file systems of a running VM's guest, for a snapshot by the storage; requires a
    /// guest agent
    #[command(after_help = "Examples:
  godwit vm freeze web
  godwit vm freeze web --for 10s")]
    Freeze {
        /// Name of the VM
        name: String,
        /// Time after which the guest is thawed automatically, at most 10min
        #[arg(long = "for", value_name = "TIME", value_parser = parse_duration,
            default_value = "60s")]
        time: Duration,
    },
    /// Thaw the file systems of a frozen guest
    #[command(after_help = "Example:
  godwit vm thaw web")]
    Thaw {
        /// Name of the VM
        name: String,
    },
    /// Attach or detach a NIC, or set the link of a running VM's NIC
    #[command(subcommand)]
    Nic(NicCommand),
    /// Attach or detach a disk, also while the VM runs
    Disk {
        #[command(subcommand)]
        command: VmDiskCommand,
    },
    /// Insert or eject a CD, also while the VM runs
    Cdrom {
        #[command(subcommand)]
        command: CdromCommand,
    },
    /// Change the specification of a VM, or its labels (through the manager)
    #[command(after_help = "Examples:
  godwit vm set web --memory 4GiB --vcpus 4
  godwit vm set web --max-memory 16GiB --max-cpus 8 --hotplug-slots 4
  godwit vm set web --disk path=/srv/web.qcow2,format=qcow2 --disk path=/srv/data.raw,format=raw
  godwit vm set web --unset append --unset no-page-in
  godwit vm set web --label tier=front --remove-label test
  godwit vm set web --autostart on --autostart-order 10 --autostart-delay 30s
  godwit vm set web --autostart-after db --on-crash 3
  godwit vm set web --protect high
  godwit vm set web --unset protect
  godwit vm set manager --protect-by-agents
  godwit vm set web --description 'The shop' --tag prod --tag shop
  godwit vm set web -f web.toml

What is not named stays; the defaults above are those of a new VM. A list, such as the disks, is \
replaced as a whole. A running VM takes --vcpus up to its --max-cpus, --memory up to its \
--max-memory, --no-page-in, description, tags, autostart, --on-crash and labels; the rest needs a \
stop.")]
    Set(Box<SetArgs>),
    /// Create a VM with the specification and the disks of a stopped VM or a template
    #[command(after_help = "Examples:
  godwit vm clone web web-copy
  godwit vm clone debian-12 web --address 10.88.0.21 --start
  godwit vm clone debian-12 worker --linked --count 20 --start")]
    Clone(CloneArgs),
    /// Import a VM of libvirt, Proxmox VE, VMware or VirtualBox; Ctrl-C leaves nothing of it
    #[command(after_help = "Examples:
  godwit vm import shop.xml --network br-lan=lan --dry-run
  godwit vm import --libvirt shop --network default=lan --take-disks --host a
  godwit vm import 101.conf --network vmbr0=lan --disks-in /dev/pve --start
  godwit vm import /srv/wiki.ova --network 'VM Network'=lan --name wiki
  godwit vm import erp.xml --network br0=lan --warm nbd://10.0.0.5/erp
  godwit vm import erp.xml --network br0=lan --warm nbd://10.0.0.5/erp --cut-over
  godwit vm import --plan waves.toml --dry-run")]
    Import(Box<ImportArgs>),
    /// Write a stopped VM and copies of its disks, or give a running one to libvirt
    #[command(after_help = "Examples:
  godwit vm export web --to /srv/export --format libvirt
  godwit vm export web --to /srv/export --format ova
  godwit vm export web --live")]
    Export(ExportArgs),
    /// Take, list, revert to and delete snapshots of a VM
    Snapshot {
        #[command(subcommand)]
        command: SnapshotCommand,
    },
    /// Make a stopped VM a template, which is cloned and never started
    #[command(after_help = "Examples:
  godwit vm template debian-12
  godwit vm template debian-12 --off")]
    Template {
        /// Name of the VM
        name: String,
        /// Make the template an ordinary VM; refused while disks are layered on its images
        #[arg(long)]
        off: bool,
    },
    /// Delete a stopped VM; its disks are kept unless --delete-disks is given
    #[command(after_help = "Examples:
  godwit vm delete web
  godwit vm delete web --force
  godwit vm delete web --delete-disks --yes")]
    Delete(DeleteArgs),
    /// Open the serial console of a VM; Ctrl-] closes it
    #[command(after_help = "Examples:
  godwit vm console web
  godwit vm console web --port 2")]
    Console {
        /// Name of the VM
        name: String,
        /// Serial port, from 1 [default: 1]
        #[arg(long, value_name = "N")]
        port: Option<u32>,
    },
    /// Show the screen of a VM in a VNC viewer; after a move, the viewer connects again
    #[command(after_help = "Examples:
  godwit vm screen web
  godwit vm screen web --listen 127.0.0.1:5901")]
    Screen(ScreenArgs),
    /// Write a picture of a VM's screen to a file, as PNG
    #[command(after_help = "Example:
  godwit vm screenshot web -o web.png")]
    Screenshot(ScreenshotArgs),
    /// Print the console output of a VM
    #[command(after_help = "Examples:
  godwit vm logs web -f
  godwit vm logs web --port 2
  godwit vm logs web --qemu")]
    Logs {
        /// Name of the VM
        name: String,
        /// Continue to print output as it appears
        #[arg(short, long)]
        follow: bool,
        /// Print the output of QEMU instead
        #[arg(long)]
        qemu: bool,
        /// Print the output of this serial port, from 1 [default: 1]
        #[arg(long, value_name = "N", conflicts_with = "qemu")]
        port: Option<u32>,
    },
}

#[derive(Clone, Debug, Subcommand)]
pub(crate) enum NicCommand {
    /// Set the link of a NIC; the guest sees its cable plugged in or not
    #[command(after_help = "Examples:
  godwit vm nic link web 0 down
  godwit vm nic link web 0 up")]
    Link {
        /// Name of the VM
        name: String,
        /// Position of the NIC in the specification, from 0
        nic: u8,
        /// State of the link
        #[arg(value_parser = one_of::<NicLink>(LINKS))]
        link: NicLink,
    },
    /// Attach a NIC; a running VM needs a free slot (`--hotplug-slots`)
    #[command(after_help = "Examples:
  godwit vm nic attach web --nic network=lan
  godwit vm nic attach web --nic network=lan,mac=52:54:00:12:34:56,queues=2")]
    Attach {
        /// Name of the VM
        name: String,
        /// Network interface, as in `vm create`
        #[arg(long, value_name = "NIC")]
        nic: String,
    },
    /// Detach a NIC; a running VM loses only one that it got while it ran
    #[command(after_help = "Example:
  godwit vm nic detach web --mac 52:54:00:12:34:56")]
    Detach {
        /// Name of the VM
        name: String,
        /// Hardware address of the NIC, see `vm show`
        #[arg(long, value_name = "MAC")]
        mac: String,
    },
}

#[derive(Clone, Debug, Subcommand)]
pub(crate) enum VmDiskCommand {
    /// Attach a disk; a running VM needs a SCSI controller, or for bus virtio a free slot
    #[command(after_help = "Example:
  godwit vm disk attach web --disk path=/srv/data.qcow2,format=qcow2")]
    Attach {
        /// Name of the VM
        name: String,
        /// Disk, as in `vm create`; its bus is scsi unless another is named
        #[arg(long, value_name = "DISK")]
        disk: String,
    },
    /// Detach a disk; its image is kept
    #[command(after_help = "Example:
  godwit vm disk detach web --path /srv/data.qcow2")]
    Detach {
        /// Name of the VM
        name: String,
        /// Path of the disk's image
        #[arg(long, value_name = "FILE")]
        path: PathBuf,
    },
}

#[derive(Clone, Debug, Subcommand)]
pub(crate) enum CdromCommand {
    /// Insert an image into a CD-ROM drive, in place of the one in it
    #[command(after_help = "Example:
  godwit vm cdrom insert web --image /srv/iso/debian-12.iso")]
    Insert {
        /// Name of the VM
        name: String,
        /// Path of the image, on every host of the VM
        #[arg(long, value_name = "FILE")]
        image: PathBuf,
        #[command(flatten)]
        drive: DriveArgs,
    },
    /// Eject what is in a CD-ROM drive
    #[command(after_help = "Example:
  godwit vm cdrom eject web")]
    Eject {
        /// Name of the VM
        name: String,
        #[command(flatten)]
        drive: DriveArgs,
    },
}

#[derive(Clone, Debug, Args)]
pub(crate) struct ScreenArgs {
    /// Name of the VM
    pub(crate) name: String,
    /// Start no viewer, and listen for one at this address or path. Every user of this machine can
    /// connect to an address [default: a socket that only you can open]
    #[arg(long, value_name = "ADDRESS:PORT|PATH")]
    pub(crate) listen: Option<String>,
}

#[derive(Clone, Debug, Args)]
pub(crate) struct ScreenshotArgs {
    /// Name of the VM
    pub(crate) name: String,
    /// File for the picture; `-` for standard output
    #[arg(short, long, value_name = "FILE")]
    pub(crate) output: PathBuf,
}

#[derive(Clone, Debug, Args)]
pub(crate) struct DriveArgs {
    /// Position of the drive, from 0 [default: the only one]
    #[arg(long, value_name = "N")]
    pub(crate) drive: Option<usize>,
    /// Open the tray even if the guest has locked it
    #[arg(long)]
    pub(crate) force: bool,
}

#[derive(Clone, Debug, Args)]
pub(crate) struct StopArgs {
    /// Name of the VM
    pub(crate) name: String,
    /// Terminate the VM immediately, without a shutdown of the guest
    #[arg(long)]
    pub(crate) force: bool,
    /// Grace period for the shutdown of the guest
    #[arg(long, value_name = "TIME", value_parser = parse_duration, default_value = "90s")]
    grace: Duration,
}

impl StopArgs {
    pub(crate) fn grace_ms(&self) -> Option<u64> {
        u64::try_from(self.grace.as_millis()).ok()
    }
}

#[derive(Clone, Debug, Args)]
pub(crate) struct CreateArgs {
    /// Name of the VM
    #[arg(required_unless_present = "file")]
    pub(crate) name: Option<String>,
    /// Read the specification from a TOML or JSON file, in the format of `spec` in `vm show --json`
    #[arg(short, long, value_name = "FILE",
        conflicts_with_all = ["SpecArgs", "SettingsArgs", "CloudInitArgs"])]
    pub(crate) file: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) spec: SpecArgs,
    #[command(flatten)]
    pub(crate) settings: SettingsArgs,
    /// Label for filtering lists of VMs, if the manager creates the VM (repeatable)
    #[arg(long = "label", value_name = "KEY=VALUE", value_parser = parse_label)]
    pub(crate) labels: Vec<(String, String)>,
    /// Start the VM immediately; if the start fails, the VM is removed
    #[arg(long)]
    pub(crate) start: bool,
    // The last: its heading applies to what follows.
    #[command(flatten)]
    pub(crate) cloud_init: CloudInitArgs,
}

#[derive(Clone, Debug, Args)]
pub(crate) struct SetArgs {
    /// Name of the VM
    pub(crate) name: String,
    /// Replace the specification with that of a TOML or JSON file
    #[arg(short, long, value_name = "FILE",
        conflicts_with_all = ["SpecArgs", "SettingsArgs", "CloudInitArgs"])]
    pub(crate) file: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) spec: SpecArgs,
    #[command(flatten)]
    pub(crate) settings: SettingsArgs,
    /// Restore the default of an option of the specification, such as `append` (repeatable)
    #[arg(long, value_name = "OPTION", conflicts_with = "file")]
    pub(crate) unset: Vec<UnsetArg>,
    /// Add a label or change its value (repeatable)
    #[arg(long = "label", value_name = "KEY=VALUE", value_parser = parse_label)]
    pub(crate) labels: Vec<(String, String)>,
    /// Remove a label (repeatable)
    #[arg(long = "remove-label", value_name = "KEY")]
    pub(crate) removed_labels: Vec<String>,
    // The last: its heading applies to what follows.
    #[command(flatten)]
    pub(crate) cloud_init: CloudInitArgs,
}

/// Options of a VM's specification. An absent option keeps the VM's value, or a new VM's default.
#[derive(Clone, Debug, Args)]
#[group(multiple = true)]
pub(crate) struct SpecArgs {
    /// Memory size; if repeated, each value is a separate memory block and NUMA node [default:
    /// 1GiB]
    #[arg(long, value_name = "SIZE")]
    pub(crate) memory: Vec<ByteSize>,
    /// Most memory that the VM may have while it runs [default: what it has]
    #[arg(long, value_name = "SIZE")]
    pub(crate) max_memory: Option<ByteSize>,
    /// Number of virtual CPUs [default: 1]
    #[arg(long, visible_alias = "cpus", value_name = "N")]
    pub(crate) vcpus: Option<u32>,
    /// Most virtual CPUs that the VM may have while it runs [default: as many as it has]
    #[arg(long, value_name = "N")]
    pub(crate) max_cpus: Option<u32>,
    /// CPU model, by its QEMU name [default: the cluster's baseline, else a model that every host
    /// has]
    #[arg(long, value_name = "MODEL")]
    pub(crate) cpu: Option<String>,
    /// Machine type, by its QEMU name [default: q35 of the QEMU version on the host]
    #[arg(long, value_name = "TYPE")]
    pub(crate) machine: Option<String>,
    /// Firmware [default: bios]
    #[arg(long, value_parser = one_of::<Firmware>(FIRMWARES))]
    pub(crate) firmware: Option<Firmware>,
    /// Give the VM a TPM 2.0, with a state of its own (swtpm)
    #[arg(long)]
    pub(crate) tpm: bool,
    /// Video device of the VM's screen [default: none]
    #[arg(long, value_parser = one_of::<Video>(VIDEOS))]
    pub(crate) video: Option<Video>,
    /// Accelerator [default: auto]
    #[arg(long, value_parser = one_of::<Accel>(ACCELERATORS))]
    pub(crate) accel: Option<Accel>,
    /// Kernel image for direct boot
    #[arg(long, value_name = "FILE")]
    pub(crate) kernel: Option<PathBuf>,
    /// Initial RAM disk for direct boot
    #[arg(long, value_name = "FILE")]
    pub(crate) initrd: Option<PathBuf>,
    /// Kernel command line for direct boot
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    pub(crate) append: Option<String>,
    /// Disk: path=FILE,format=raw|qcow2[,readonly][,bus=virtio|scsi|nvme|sata] and further options,
    /// see docs/disks.md; for a new VM also size=SIZE[,image=BASE][,copy=true]
    /// [,datastore=auto|NAME|DIR], which creates the image (repeatable)
    #[arg(long, value_name = "DISK")]
    pub(crate) disk: Vec<String>,
    /// CD-ROM drive: path=FILE or `empty`, then [,bus=sata|scsi][,boot-order=N] (repeatable)
    #[arg(long, value_name = "CDROM")]
    pub(crate) cdrom: Vec<String>,
    /// Give the VM a SCSI controller, so that disks can be attached while it runs
    #[arg(long)]
    pub(crate) scsi_controller: bool,
    /// Network interface: network=NAME[,mac=MAC][,address=IP][,model=virtio|e1000e][,queues=N]
    /// [,mtu=N][,link=up|down][,boot-order=N][,vlan=N][,trunk=N+N][,filter=mac|mac-ip]
    /// [,addresses=IP+IP] (repeatable). The address is informational, except for filter mac-ip,
    /// which lets it and `addresses` pass. With a boot order, the VM can boot from it (PXE)
    #[arg(long, value_name = "NIC")]
    pub(crate) nic: Vec<String>,
    /// Number of slots for NICs and disks that come while the VM runs, up to 16 [default: 0]
    #[arg(long, value_name = "N")]
    pub(crate) hotplug_slots: Option<u32>,
    /// QEMU binary to use instead of the host's default
    #[arg(long, value_name = "PATH")]
    pub(crate) qemu: Option<PathBuf>,
    /// Use guest memory that only QEMU can access; only QEMU's built-in engine can migrate it
    #[arg(long)]
    pub(crate) private_memory: bool,
    /// Additional -device argument for QEMU (repeatable)
    #[arg(long, value_name = "ARG")]
    pub(crate) device: Vec<String>,
    /// Never run the VM while some of its memory is on another host, regardless of migration
    /// options
    #[arg(long)]
    pub(crate) no_page_in: bool,
    /// Give the VM a port for a guest agent (qemu-guest-agent), for its addresses, shutdowns and
    /// freezes
    #[arg(long)]
    pub(crate) guest_agent: bool,
    /// Give the VM a source of random numbers (virtio-rng)
    #[arg(long)]
    pub(crate) rng: bool,
    /// Have no free memory reported by the guest (virtio-balloon)
    #[arg(long)]
    pub(crate) no_free_page_reporting: bool,
    /// Number of serial ports, 1 to 4 [default: 1]
    #[arg(long, value_name = "N")]
    pub(crate) serial_ports: Option<u32>,
    /// Give the VM a watchdog (i6300esb) with this action
    #[arg(long, value_name = "ACTION", value_parser = one_of::<Watchdog>(WATCHDOGS))]
    pub(crate) watchdog: Option<Watchdog>,
    /// Whether the guest can report a panic (pvpanic) [default: on with --on-crash]
    #[arg(long, value_name = "ON")]
    pub(crate) panic_device: Option<OnOff>,
}

/// Options of a specification that have a default.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum UnsetArg {
    Firmware,
    Tpm,
    Video,
    Cpu,
    Kernel,
    Initrd,
    Append,
    Disk,
    Cdrom,
    ScsiController,
    Nic,
    MaxMemory,
    MaxCpus,
    HotplugSlots,
    Qemu,
    Device,
    NoPageIn,
    GuestAgent,
    Rng,
    FreePageReporting,
    Watchdog,
    PanicDevice,
    Description,
    Tag,
    Autostart,
    OnCrash,
    Protect,
    ProtectByAgents,
    SerialPorts,
    CloudInit,
    User,
    SshKey,
    PasswordHash,
    Hostname,
    Ip,
    UserData,
    Topology,
}

impl UnsetArg {
    /// Key of the specification; a key of `cloud_init` follows a dot.
    pub(crate) fn key(self) -> &'static str {
        match self {
            UnsetArg::Firmware => "firmware",
            UnsetArg::Tpm => "tpm",
            UnsetArg::Video => "video",
            UnsetArg::Cpu => "cpu_model",
            UnsetArg::Kernel => "kernel",
            UnsetArg::Initrd => "initrd",
            UnsetArg::Append => "cmdline",
            UnsetArg::Disk => "disks",
            UnsetArg::Cdrom => "cdroms",
            UnsetArg::ScsiController => "scsi_controller",
            UnsetArg::Nic => "nics",
            UnsetArg::MaxMemory => "max_memory",
            UnsetArg::MaxCpus => "max_cpus",
            UnsetArg::HotplugSlots => "hotplug_slots",
            UnsetArg::Qemu => "qemu",
            UnsetArg::Device => "extra_devices",
            UnsetArg::Topology => "topology",
            UnsetArg::NoPageIn => "refuses_page_in",
            UnsetArg::GuestAgent => "guest_agent",
            UnsetArg::Rng => "rng",
            UnsetArg::FreePageReporting => "free_page_reporting",
            UnsetArg::Watchdog => "watchdog",
            UnsetArg::PanicDevice => "panic_device",
            UnsetArg::Description => "description",
            UnsetArg::Tag => "tags",
            UnsetArg::Autostart => "autostart",
            UnsetArg::OnCrash => "on_crash",
            UnsetArg::Protect => "protect",
            UnsetArg::ProtectByAgents => "protect_by_agents",
            UnsetArg::SerialPorts => "serial_ports",
            UnsetArg::CloudInit => "cloud_init",
            UnsetArg::User => "cloud_init.user",
            UnsetArg::SshKey => "cloud_init.ssh_keys",
            UnsetArg::PasswordHash => "cloud_init.password_hash",
            UnsetArg::Hostname => "cloud_init.hostname",
            UnsetArg::Ip => "cloud_init.network",
            UnsetArg::UserData => "cloud_init.user_data",
        }
    }
}
