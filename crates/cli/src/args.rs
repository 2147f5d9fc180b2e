//! The command line. Every command has an example; `--help` and docs/cli.md say the same.

mod baseline;
mod control;
mod limits;
mod moves;
mod pki;
mod rules;

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;
use godwit_api::{DEFAULT_PROBE_GUEST_BYTES, DEFAULT_PROBE_SECONDS, Endpoint};
use godwit_pki::Fingerprint;
use godwit_qemu::ByteSize;
use godwit_types::{Compression, EngineKind, Intent, RateLimit, ReferenceUse};

use crate::exit::{EXIT_CODES, Failure};
use crate::units::parse_duration;
use control::parse_label;

pub(crate) use baseline::{CpuBaselineCommand, SetBaselineArgs};
pub(crate) use control::{
    CertificateCommand, ControlCommand, JoinTokenCommand, ManagedHostCommand, ManagerPlace, Switch,
    TokenCommand,
};
pub(crate) use limits::{HostChanges, LimitsCommand, SetHostArgs, SetLimitsArgs, Setting};
pub(crate) use moves::{DrainArgs, MoveCommand, PreflightArgs};
pub(crate) use pki::PkiCommand;
pub(crate) use rules::{CreateRuleArgs, RuleCommand};

/// What clap knows `--host` by: [`NoHost`] takes its place. No other argument has that name.
const ONE_HOST: &str = "one_host";

/// Godwit moves running virtual machines between hosts without stopping them.
#[derive(Debug, Parser)]
#[command(name = "godwit", version, about, after_help = EXIT_CODES, max_term_width = 110)]
pub(crate) struct Cli {
    /// Write results as JSON, and failures as one JSON line on standard error
    #[arg(long, global = true)]
    pub(crate) json: bool,
    /// The file that names the hosts [default: /etc/godwit/hosts.toml, else the lab's, else this machine's agent]
    #[arg(long, value_name = "FILE", env = "GODWIT_HOSTS", hide_env_values = true)]
    hosts: Option<PathBuf>,
    /// Ask this host only
    #[arg(id = ONE_HOST, long = "host", global = true, value_name = "NAME")]
    pub(crate) host: Option<String>,
    #[command(subcommand)]
    pub(crate) command: Command,
}

impl Cli {
    /// A host that is named before a command which asks none by itself.
    pub(crate) fn unheard_host(&self) -> Option<Failure> {
        let no_host = match &self.command {
            Command::Control { no_host, .. }
            | Command::Pki { no_host, .. }
            | Command::Completions { no_host, .. }
            | Command::Watch(WatchArgs { no_host, .. })
            | Command::Host {
                command:
                    HostCommand::Run { no_host, .. }
                    | HostCommand::Join(JoinArgs { no_host, .. })
                    | HostCommand::Drain(DrainArgs { no_host, .. })
                    | HostCommand::Drains { no_host, .. },
                ..
            }
            | Command::Vm {
                command: VmCommand::Preflight(PreflightArgs { no_host, .. }), ..
            } => no_host,
            Command::Host { .. }
            | Command::Vm { .. }
            | Command::Migrate(_)
            | Command::Probe(_)
            | Command::Migration { .. } => return None,
        };
        let named = no_host.named.as_ref().or(self.host.as_ref());
        named.map(|named| Failure::usage(format!("--host {named}: {NO_HOST}"), "see --help"))
    }

    /// The hosts file named, before or behind the command.
    pub(crate) fn hosts_file(&self) -> Option<PathBuf> {
        let behind = match &self.command {
            Command::Host { hosts, .. }
            | Command::Vm { hosts, .. }
            | Command::Migration { hosts, .. } => hosts,
            Command::Migrate(options) => &options.hosts,
            Command::Probe(options) => &options.hosts,
            Command::Pki { .. }
            | Command::Control { .. }
            | Command::Watch(_)
            | Command::Completions { .. } => {
                return self.hosts.clone();
            }
        };
        behind.file.clone().or_else(|| self.hosts.clone())
    }
}

/// `--hosts` behind a command that asks hosts.
#[derive(Debug, Args)]
pub(crate) struct HostsFile {
    /// The file that names the hosts [env: GODWIT_HOSTS]
    #[arg(id = "hosts_file", long = "hosts", global = true, value_name = "FILE")]
    file: Option<PathBuf>,
}

/// In a command that asks no host by itself: `--host` is not shown there, and refused instead of going unheard.
#[derive(Debug, Args)]
pub(crate) struct NoHost {
    #[arg(id = ONE_HOST, long = "host", global = true, hide = true, value_name = "NAME", value_parser = refuse_host)]
    named: Option<String>,
}

const NO_HOST: &str = "this command asks no host by itself: leave --host out";

fn refuse_host(_: &str) -> Result<String, String> {
    Err(NO_HOST.to_owned())
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// The hosts: run an agent, ask what a host has
    Host {
        #[command(flatten)]
        hosts: HostsFile,
        #[command(subcommand)]
        command: HostCommand,
    },
    /// Virtual machines
    Vm {
        #[command(flatten)]
        hosts: HostsFile,
        #[command(flatten)]
        place: ManagerPlace,
        #[command(subcommand)]
        command: VmCommand,
    },
    /// Move a running VM to another host
    #[command(after_help = "Examples:
  godwit migrate web --to b
  godwit migrate web --to b --dry-run
  godwit migrate web --to b --switchover-budget 10ms --json >report.json
  godwit migrate web --to b --policy deadline=5min
  godwit migrate web --to b --page-in
  godwit migrate web --to b --compression zstd
  godwit migrate web --to b --engine qemu --multifd-channels 4 --multifd-compression zstd
  godwit migrate web --to b --detach
  godwit migrate web --to b --bandwidth-limit 2gbit

Ctrl-C cancels and waits until the guest runs on at the source; a second Ctrl-C leaves it to itself.")]
    Migrate(MigrateArgs),
    /// Measure the lanes between two hosts: what a migration would find there
    #[command(after_help = "Examples:
  godwit probe b
  godwit probe b --from a --size 64GiB
  godwit probe b --seconds 5 --json >probe.json

Lane by lane: connection set-up, round trip, the packets that pass, throughput with 1, 2, 4 and 8 \
streams, and what limits it; then how long a VM of that size will take. It sends as much as goes \
for some seconds. Ctrl-C ends it.")]
    Probe(ProbeArgs),
    /// Migrations that run or ran
    #[command(after_help = "Examples:
  godwit migration list
  godwit migration follow m69204f1e-0
  godwit migration cancel m69204f1e-0")]
    Migration {
        #[command(flatten)]
        hosts: HostsFile,
        #[command(subcommand)]
        command: MigrationCommand,
    },
    /// The manager of all hosts: run it, ask it
    #[command(after_help = "Examples:
  godwit control run --config /etc/godwit/control.toml
  godwit control status
  godwit control host list
  godwit control token create monitoring --role viewer")]
    Control {
        #[command(flatten)]
        place: ManagerPlace,
        #[command(flatten)]
        no_host: NoHost,
        #[command(subcommand)]
        command: ControlCommand,
    },
    /// The authority and the certificates of hosts and operators
    #[command(after_help = "Examples:
  godwit pki init --dir /etc/godwit/pki
  godwit pki issue a --address 10.77.0.11 --dir /etc/godwit/pki
  godwit pki issue admin --operator --days 30 --dir /etc/godwit/pki
  godwit pki renew a --dir /etc/godwit/pki
  godwit pki show /etc/godwit/pki/a.pem

A host needs ca.pem, NAME.pem and NAME.key; ca.key stays where it was made. An agent takes a renewed certificate without a \
restart.")]
    Pki {
        #[command(flatten)]
        no_host: NoHost,
        #[command(subcommand)]
        command: PkiCommand,
    },
    /// Probe a guest a thousand times a second and tell each gap in its answers
    #[command(after_help = "Examples:
  godwit watch 10.88.0.21
  godwit watch 10.88.0.21 --min-gap 5ms --for 1min --json")]
    Watch(WatchArgs),
    /// Print a shell's completions
    #[command(after_help = "Example:
  godwit completions bash >/usr/share/bash-completion/completions/godwit")]
    Completions {
        #[command(flatten)]
        no_host: NoHost,
        /// The shell
        shell: Shell,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum HostCommand {
    /// Run this host's agent until SIGTERM; its VMs run on without it
    #[command(after_help = "Example:
  godwit host run --config /etc/godwit/host.toml")]
    Run {
        /// The agent's configuration; where the default is missing, the host is alone
        #[arg(long, value_name = "FILE", default_value = godwit_host::Config::DEFAULT_FILE)]
        config: PathBuf,
        #[command(flatten)]
        no_host: NoHost,
    },
    /// Join a cluster: make this host's key, have the manager sign for it, write the agent's configuration
    #[command(after_help = "Examples:
  godwit host join --manager https://m1:7800 --token-file c.token --address https://10.77.0.13:7700
  godwit host join --manager https://m1:7800 --token-file c.token --authority ca.pem

An admin makes the token: godwit control join-token create HOST. It is good once, and tells this host by which authority it \
knows the manager. The key never leaves this host. It can be repeated: a host that has joined is left as it is.")]
    Join(JoinArgs),
    /// Show what a host is and has
    #[command(after_help = "Example:
  godwit host show a")]
    Show {
        /// The host [default: all]
        name: Option<String>,
    },
    /// List the hosts and whether they answer
    #[command(after_help = "Examples:
  godwit host list
  godwit host list --host a --json")]
    List,
    /// Empty a host by the manager: every VM that can go gets a target, the others are named with the reason
    #[command(after_help = "Examples:
  godwit host drain a --plan
  godwit host drain a
  godwit host drain a --detach --priority high
  godwit host drain a --undo

The host is in maintenance from then on and takes no VMs, until it is undone or `godwit control host maintenance a off`. \
Ctrl-C ends the looking alone (exit code 130): the drain goes on. A manager that is away for some seconds is asked again.")]
    Drain(DrainArgs),
    /// List the manager's drains
    #[command(after_help = "Examples:
  godwit host drains
  godwit host drains --json")]
    Drains {
        #[command(flatten)]
        place: ManagerPlace,
        #[command(flatten)]
        no_host: NoHost,
    },
    /// Show how fast guests' pages may leave a host, or set that until its agent ends
    #[command(after_help = "Examples:
  godwit host limit
  godwit host limit 5gbit --host a
  godwit host limit 1gbit --lane 10.77.0.11 --host a
  godwit host limit 2gbit --each-migration --host a
  godwit host limit none --host a

All migrations of a host share its limit fairly, and those on a lane the lane's. A limit of [limits] in the agent's \
configuration holds again when the agent has been restarted.")]
    Limit {
        /// A rate of at least 1mbit, or none [default: show the limits]
        #[arg(value_name = "RATE|none")]
        limit: Option<RateLimit>,
        /// The limit of the lanes that leave from this address of the host
        #[arg(long, value_name = "ADDRESS", requires = "limit")]
        lane: Option<IpAddr>,
        /// The limit of each migration that begins from then on and names none
        #[arg(long, requires = "limit", conflicts_with = "lane")]
        each_migration: bool,
    },
}

#[derive(Debug, Args)]
pub(crate) struct JoinArgs {
    /// The manager's address
    #[arg(long, value_name = "URL")]
    pub(crate) manager: Endpoint,
    /// The file with the join token
    #[arg(long, value_name = "FILE")]
    pub(crate) token_file: PathBuf,
    /// The authority's certificate, if the token is not to be believed
    #[arg(long, value_name = "FILE", conflicts_with = "fingerprint")]
    pub(crate) authority: Option<PathBuf>,
    /// The same by its fingerprint, SHA256:…
    #[arg(long, value_name = "SHA256:HEX")]
    pub(crate) fingerprint: Option<Fingerprint>,
    /// Where the manager reaches this host's agent [default: what the token was made with]
    #[arg(long, value_name = "URL")]
    pub(crate) address: Option<Endpoint>,
    /// An address of this host at which migrations arrive (repeatable)
    #[arg(long = "migration-address", value_name = "IP")]
    pub(crate) migration_addresses: Vec<IpAddr>,
    /// Where key and certificates go
    #[arg(long, value_name = "DIR", default_value = "/etc/godwit/pki")]
    pub(crate) dir: PathBuf,
    /// The agent's configuration, written if there is none
    #[arg(long, value_name = "FILE", default_value = godwit_host::Config::DEFAULT_FILE)]
    pub(crate) config: PathBuf,
    #[command(flatten)]
    pub(crate) no_host: NoHost,
}

#[derive(Debug, Subcommand)]
pub(crate) enum VmCommand {
    /// Define a VM on a host: the one named, or where a manager is known the one that it chooses
    #[command(after_help = "Examples:
  godwit vm create web --memory 1GiB --disk path=/srv/web.qcow2,format=qcow2 --label app=shop --start
  godwit vm create web --host a --memory 1GiB --vcpus 2 --kernel vmlinuz --initrd initrd.img \\
      --append 'console=ttyS0' --nic network=lan,address=10.88.0.21 --start
  godwit vm create db --host a --memory 4GiB --disk path=/srv/db.qcow2,format=qcow2
  godwit vm create -f web.toml --host a --start")]
    Create(Box<CreateArgs>),
    /// List VMs of all hosts
    #[command(after_help = "Examples:
  godwit vm list
  godwit vm list --host a --json")]
    List,
    /// Tell what stands in the way of a VM's move, or without a target where it can go, best first (by the manager)
    #[command(after_help = "Examples:
  godwit vm preflight web --to b
  godwit vm preflight web --to b --predict
  godwit vm preflight web

It ends with exit code 5 where the VM can't move.")]
    Preflight(PreflightArgs),
    /// Show a VM
    #[command(after_help = "Examples:
  godwit vm show web
  godwit vm show web --json")]
    Show {
        /// Its name
        name: String,
    },
    /// Start a stopped VM, or let a paused one go on
    #[command(after_help = "Examples:
  godwit vm start web
  godwit vm start web --skip-preflight")]
    Start {
        /// Its name
        name: String,
        /// By the manager: start it although its CPU model is more than the cluster's baseline
        #[arg(long)]
        skip_preflight: bool,
    },
    /// Stop a VM: press its power button, and end it if it has not gone within the grace
    #[command(after_help = "Examples:
  godwit vm stop web
  godwit vm stop web --grace 2min
  godwit vm stop web --force")]
    Stop {
        /// Its name
        name: String,
        /// End it at once
        #[arg(long)]
        force: bool,
        /// How long the guest may take
        #[arg(long, value_name = "TIME", value_parser = parse_duration, default_value = "90s")]
        grace: Duration,
    },
    /// Delete a stopped VM; disks are left alone
    #[command(after_help = "Examples:
  godwit vm delete web
  godwit vm delete web --force")]
    Delete {
        /// Its name
        name: String,
        /// Stop it first, at once; of a VM in doubt, give up what is here, which may be all that there is of its guest
        #[arg(long)]
        force: bool,
    },
    /// Open a VM's serial console; Ctrl-] leaves it
    #[command(after_help = "Example:
  godwit vm console web")]
    Console {
        /// Its name
        name: String,
    },
    /// Print what a VM wrote to its console
    #[command(after_help = "Examples:
  godwit vm logs web -f
  godwit vm logs web --qemu")]
    Logs {
        /// Its name
        name: String,
        /// Go on as it grows
        #[arg(short, long)]
        follow: bool,
        /// What QEMU wrote instead
        #[arg(long)]
        qemu: bool,
    },
}

#[derive(Clone, Debug, Args)]
pub(crate) struct CreateArgs {
    /// Its name
    #[arg(required_unless_present = "file")]
    pub(crate) name: Option<String>,
    /// Read the specification from a TOML or JSON file, the form that `vm show --json` prints as `spec`
    #[arg(short, long, value_name = "FILE", conflicts_with_all = [
        "memory", "vcpus", "cpu", "machine", "accel", "kernel", "initrd", "append", "disk", "nic", "qemu",
        "private_memory", "device", "no_page_in",
    ])]
    pub(crate) file: Option<PathBuf>,
    /// Memory; repeated, each becomes a block and NUMA node of its own [default: 1GiB]
    #[arg(long, value_name = "SIZE")]
    pub(crate) memory: Vec<ByteSize>,
    /// Virtual CPUs
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) vcpus: u32,
    /// CPU model, as QEMU names it [default: the cluster's baseline, else one that every host has]
    #[arg(long, value_name = "MODEL")]
    pub(crate) cpu: Option<String>,
    /// Machine type, as QEMU names it [default: q35 of this QEMU's version]
    #[arg(long, value_name = "TYPE")]
    pub(crate) machine: Option<String>,
    /// What runs the guest's code
    #[arg(long, value_enum, default_value_t = AccelArg::Auto)]
    pub(crate) accel: AccelArg,
    /// A kernel to boot directly
    #[arg(long, value_name = "FILE")]
    pub(crate) kernel: Option<PathBuf>,
    /// Its initial RAM disk
    #[arg(long, value_name = "FILE")]
    pub(crate) initrd: Option<PathBuf>,
    /// Its command line
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    pub(crate) append: Option<String>,
    /// A disk: path=FILE,format=raw|qcow2[,readonly]
    #[arg(long, value_name = "DISK")]
    pub(crate) disk: Vec<String>,
    /// A network interface: network=NAME[,mac=MAC][,address=IP]; the address is for those who watch it
    #[arg(long, value_name = "NIC")]
    pub(crate) nic: Vec<String>,
    /// Another QEMU than the host's own
    #[arg(long, value_name = "PATH")]
    pub(crate) qemu: Option<PathBuf>,
    /// Memory that QEMU alone sees: only its own engine can move it
    #[arg(long)]
    pub(crate) private_memory: bool,
    /// A further -device argument for QEMU
    #[arg(long, value_name = "ARG")]
    pub(crate) device: Vec<String>,
    /// Never run it while pages of its memory are at another host, whatever a migration asks for
    #[arg(long)]
    pub(crate) no_page_in: bool,
    /// A label, by which VMs are listed, where the manager makes it (repeatable)
    #[arg(long = "label", value_name = "KEY=VALUE", value_parser = parse_label)]
    pub(crate) labels: Vec<(String, String)>,
    /// Start it at once; if that fails, nothing is left of it
    #[arg(long)]
    pub(crate) start: bool,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum AccelArg {
    /// KVM where a 64-bit guest really runs on it, else TCG
    Auto,
    /// The kernel's hypervisor
    Kvm,
    /// QEMU's own translator
    Tcg,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum EngineArg {
    /// This project's, beside QEMU
    Godwit,
    /// QEMU's own
    Qemu,
}

impl From<EngineArg> for EngineKind {
    fn from(engine: EngineArg) -> EngineKind {
        match engine {
            EngineArg::Godwit => EngineKind::Godwit,
            EngineArg::Qemu => EngineKind::Qemu,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum CompressionArg {
    /// Whatever pays on the link, with the CPU that is free
    Auto,
    /// None
    None,
    /// Fast, less small
    Lz4,
    /// Smaller, less fast
    Zstd,
}

impl From<CompressionArg> for Compression {
    fn from(compression: CompressionArg) -> Compression {
        match compression {
            CompressionArg::Auto => Compression::Auto,
            CompressionArg::None => Compression::None,
            CompressionArg::Lz4 => Compression::Lz4,
            CompressionArg::Zstd => Compression::Zstd,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ReferencesArg {
    /// Whatever the destination has: an earlier stay, other guests, this guest's own pages
    All,
    /// The guest's own pages
    Own,
    /// Nothing: every page is sent, and no memory is kept for the way back
    None,
}

impl From<ReferencesArg> for ReferenceUse {
    fn from(references: ReferencesArg) -> ReferenceUse {
        match references {
            ReferencesArg::All => ReferenceUse::All,
            ReferencesArg::Own => ReferenceUse::Own,
            ReferencesArg::None => ReferenceUse::None,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum MultifdCompressionArg {
    /// Slow, small
    Zlib,
    /// Fast, small
    Zstd,
    /// None
    None,
}

impl MultifdCompressionArg {
    pub(crate) fn name(self) -> &'static str {
        match self {
            MultifdCompressionArg::Zlib => "zlib",
            MultifdCompressionArg::Zstd => "zstd",
            MultifdCompressionArg::None => "none",
        }
    }
}

#[derive(Debug, Args)]
pub(crate) struct MigrateArgs {
    #[command(flatten)]
    hosts: HostsFile,
    /// The VM
    pub(crate) vm: String,
    /// The destination
    #[arg(long, value_name = "HOST")]
    pub(crate) to: String,
    /// Who moves the memory
    #[arg(long, value_enum, default_value_t = EngineArg::Godwit)]
    pub(crate) engine: EngineArg,
    /// How long the vCPUs may stand still
    #[arg(long, value_name = "TIME", value_parser = parse_duration, default_value = "20ms")]
    pub(crate) switchover_budget: Duration,
    /// What matters most: minimal-pause (the budget is kept, whatever writers lose), minimal-impact (they are slowed as little as will
    /// do), fast-evacuation (the host is empty soonest), deadline=TIME (they are slowed as far as that takes), or auto [default: auto]
    #[arg(long, value_name = "POLICY")]
    pub(crate) policy: Option<Intent>,
    /// Let it run at the destination as soon as each page has been sent once, and fetch what it has written since
    #[arg(long, conflicts_with = "no_page_in")]
    pub(crate) page_in: bool,
    /// Never let it run there before all of its memory is there [default: where nothing else helps]
    #[arg(long)]
    pub(crate) no_page_in: bool,
    /// TCP streams of each lane, all lanes together at most 256 [default: as many as are found to pay]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64))]
    pub(crate) streams: Option<u32>,
    /// How fast guest memory may leave: at least 1mbit, or none [default: the source host's for each migration]
    #[arg(long, value_name = "RATE|none")]
    pub(crate) bandwidth_limit: Option<RateLimit>,
    /// How long a cut of the link may last before the switchover; the migration goes on where it was. 0s: a cut is the end
    #[arg(long, value_name = "TIME", value_parser = parse_duration, default_value = "5min")]
    pub(crate) cut_limit: Duration,
    /// What compresses the guest's pages [default: auto]
    #[arg(long, value_enum)]
    pub(crate) compression: Option<CompressionArg>,
    /// What pages may be told by instead of being sent [default: all]
    #[arg(long, value_enum)]
    pub(crate) references: Option<ReferencesArg>,
    /// QEMU's engine: channels in parallel
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=255), help_heading = "With --engine qemu")]
    pub(crate) multifd_channels: Option<u32>,
    /// Compression of its channels
    #[arg(long, value_enum, requires = "multifd_channels", help_heading = "With --engine qemu")]
    pub(crate) multifd_compression: Option<MultifdCompressionArg>,
    /// Throttle the vCPUs until it converges
    #[arg(long, help_heading = "With --engine qemu")]
    pub(crate) auto_converge: bool,
    /// Switch over after the first round and let pages follow
    #[arg(long, help_heading = "With --engine qemu")]
    pub(crate) postcopy: bool,
    /// Send the guest's memory unprotected, between hosts that protect what they say
    #[arg(long, help_heading = "With --engine qemu")]
    pub(crate) plaintext: bool,
    /// Let the destination's QEMU run the guest by itself: sooner, and unsafe if the link breaks at the end
    #[arg(long, help_heading = "With --engine qemu")]
    pub(crate) autostart: bool,
    /// Begin, print the migration's name and return
    #[arg(long)]
    pub(crate) detach: bool,
    /// Move nothing: run the checks, look at the guest for 3 s and at the lanes, and tell what the migration will be
    #[arg(long, conflicts_with = "detach")]
    pub(crate) dry_run: bool,
}

#[derive(Debug, Args)]
pub(crate) struct ProbeArgs {
    #[command(flatten)]
    hosts: HostsFile,
    /// The destination
    #[arg(value_name = "HOST")]
    pub(crate) to: String,
    /// The source [default: the only other host, or the one whose agent runs on this machine]
    #[arg(long, value_name = "HOST")]
    pub(crate) from: Option<String>,
    /// Memory of the VM that is to be moved
    #[arg(long, value_name = "SIZE", default_value_t = ByteSize::from_bytes(DEFAULT_PROBE_GUEST_BYTES))]
    pub(crate) size: ByteSize,
    /// How long each throughput is measured, 0.1 to 30
    #[arg(long, value_name = "N", default_value_t = DEFAULT_PROBE_SECONDS)]
    pub(crate) seconds: f64,
}

#[derive(Debug, Subcommand)]
pub(crate) enum MigrationCommand {
    /// List migrations of all hosts
    #[command(after_help = "Examples:
  godwit migration list
  godwit migration list --host a --json")]
    List,
    /// Show a migration; its report, when it is over
    #[command(after_help = "Example:
  godwit migration show m69204f1e-0")]
    Show {
        /// The migration's name
        id: String,
    },
    /// Follow a migration to its report
    #[command(after_help = "Example:
  godwit migration follow m69204f1e-0")]
    Follow {
        /// The migration's name
        id: String,
    },
    /// Set how fast the guest memory of a running migration may leave
    #[command(after_help = "Examples:
  godwit migration limit m69204f1e-0 500mbit
  godwit migration limit m69204f1e-0 none

The limits of its lanes and its host hold as well. The last pages, sent while the guest stands still, are not held by the \
migration's own.")]
    Limit {
        /// The migration's name
        id: String,
        /// A rate of at least 1mbit, or none
        #[arg(value_name = "RATE|none")]
        limit: RateLimit,
    },
    /// Cancel a migration; the guest runs on at the source
    #[command(after_help = "Example:
  godwit migration cancel m69204f1e-0")]
    Cancel {
        /// The migration's name
        id: String,
    },
    /// Decide which host has a VM that is in doubt, after its other host was fenced
    #[command(after_help = "Examples:
  godwit migration resolve web --runs-on a
  godwit migration resolve web --runs-on a --keep-memory
  godwit migration resolve web --runs-on b --host b

A VM is in doubt when the link or a host was lost at the very moment of its hand-over. Both hosts settle it by themselves as soon as \
they can speak to each other. Decide yourself only where one of them is gone for good, and make sure first that it does not run the \
guest: power it off. A guest that runs on two hosts destroys its disks.

The source's guest is ended, and `godwit vm start` boots it from its disks: the other host may have run it and written to them. Where it \
certainly never did, --keep-memory lets the guest go on as it was.")]
    Resolve {
        /// The VM's name
        vm: String,
        /// The host that has the guest from now on
        #[arg(long, value_name = "HOST")]
        runs_on: String,
        /// Let it go on as it was at the hand-over, instead of ending it: only if the other host never ran it
        #[arg(long)]
        keep_memory: bool,
    },
}

#[derive(Debug, Args)]
pub(crate) struct WatchArgs {
    /// The guest's address
    pub(crate) address: IpAddr,
    /// Tell gaps from this length on
    #[arg(long, value_name = "TIME", value_parser = parse_duration, default_value = "10ms")]
    pub(crate) min_gap: Duration,
    /// How long to watch [default: until Ctrl-C]
    #[arg(long = "for", value_name = "TIME", value_parser = parse_duration)]
    pub(crate) duration: Option<Duration>,
    /// The echo port
    #[arg(long, default_value_t = 7)]
    pub(crate) port: u16,
    /// The network namespace to watch from [default: the hosts file's]
    #[arg(long, value_name = "NAME")]
    pub(crate) namespace: Option<String>,
    #[command(flatten)]
    pub(crate) no_host: NoHost,
}

#[cfg(test)]
mod tests;
