//! Command line definition. Every command has an example. `--help` and docs/cli.md describe the
//! same commands and options.

mod adopt;
mod alarms;
mod baseline;
mod choices;
mod clones;
mod cloud_init;
mod control;
mod datastores;
mod disks;
mod ha;
mod imports;
mod jobs;
mod journal;
mod limits;
mod load;
mod moves;
mod pki;
mod place;
mod rules;
mod settings;
mod travelling;
mod vms;

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};
use clap_complete::Shell;
use godwit_api::{DEFAULT_PROBE_GUEST_BYTES, DEFAULT_PROBE_SECONDS, Endpoint};
use godwit_pki::Fingerprint;
use godwit_qemu::ByteSize;
use godwit_types::{Compression, EngineKind, Intent, RateLimit, ReferenceUse, TrackingUse};

use crate::exit::{EXIT_CODES, Failure};
use crate::units::parse_duration;
use choices::{COMPRESSIONS, ENGINES, MULTIFD_COMPRESSIONS, REFERENCES, TRACKINGS, one_of};
use place::{NO_HOST, ONE_HOST};

pub(crate) use adopt::AdoptArgs;
pub(crate) use alarms::AlarmCommand;
pub(crate) use baseline::{CpuBaselineCommand, SetBaselineArgs};
pub(crate) use clones::{CloneArgs, DeleteArgs, SnapshotCommand};
pub(crate) use cloud_init::CloudInitArgs;
pub(crate) use control::{
    CertificateCommand, ControlCommand, JoinTokenCommand, ManagedHostCommand, Switch, TokenCommand,
};
pub(crate) use datastores::{DatastoreCommand, DrainDatastoreArgs, SetDatastoreArgs};
pub(crate) use disks::{CreateDiskArgs, DiskCommand, KeptCommand, MoveDiskArgs};
pub(crate) use ha::{FencingCommand, HaCommand, HostHaCommand, SetHaArgs};
pub(crate) use imports::{ExportArgs, ImportArgs};
pub(crate) use jobs::JobCommand;
pub(crate) use journal::JournalCommand;
pub(crate) use limits::{HostChanges, LimitsCommand, SetHostArgs, SetLimitsArgs, Setting};
pub(crate) use load::{LoadArgs, TopArgs};
pub(crate) use moves::{DrainArgs, MoveCommand, PreflightArgs};
pub(crate) use pki::PkiCommand;
pub(crate) use place::{ManagerPlace, NoHost};
pub(crate) use rules::{CreateRuleArgs, RuleCommand};
pub(crate) use settings::{OnOff, SettingsArgs};
pub(crate) use travelling::TravellingArgs;
pub(crate) use vms::{
    CdromCommand, CreateArgs, NicCommand, ScreenArgs, ScreenshotArgs, SetArgs, SpecArgs, VmCommand,
    VmDiskCommand,
};

/// Live migration of running virtual machines between hosts
#[derive(Debug, Parser)]
#[command(name = "godwit", version, about, after_help = EXIT_CODES, max_term_width = 110)]
pub(crate) struct Cli {
    /// Write results as JSON, and errors as one JSON line on standard error
    #[arg(long, global = true)]
    pub(crate) json: bool,
    /// File that lists the hosts [default: /etc/godwit/hosts.toml, else the lab's hosts, else the
    /// agent of this machine]
    #[arg(long, value_name = "FILE", env = "GODWIT_HOSTS", hide_env_values = true)]
    hosts: Option<PathBuf>,
    /// Query only this host
    #[arg(id = ONE_HOST, long = "host", global = true, value_name = "NAME")]
    pub(crate) host: Option<String>,
    #[command(subcommand)]
    pub(crate) command: Command,
}

impl Cli {
    /// Returns the error for `--host` before a command that queries no host by itself.
    pub(crate) fn refused_host(&self) -> Option<Failure> {
        let no_host = match &self.command {
            Command::Control { no_host, .. }
            | Command::Pki { no_host, .. }
            | Command::Completions { no_host, .. }
            | Command::Watch(WatchArgs { no_host, .. })
            | Command::Top(TopArgs { no_host, .. })
            | Command::Host {
                command:
                    HostCommand::Run { no_host, .. }
                    | HostCommand::Watchdog { no_host, .. }
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
            | Command::Disk { .. }
            | Command::Datastore { .. }
            | Command::Job { .. }
            | Command::Migrate(_)
            | Command::Probe(_)
            | Command::Migration { .. } => return None,
        };
        let named = no_host.named.as_ref().or(self.host.as_ref());
        named.map(|named| Failure::usage(format!("--host {named}: {NO_HOST}"), "see --help"))
    }

    /// Returns the hosts file given before or after the command.
    pub(crate) fn hosts_file(&self) -> Option<PathBuf> {
        let behind = match &self.command {
            Command::Host { hosts, .. }
            | Command::Vm { hosts, .. }
            | Command::Disk { hosts, .. }
            | Command::Datastore { hosts, .. }
            | Command::Job { hosts, .. }
            | Command::Migration { hosts, .. } => hosts,
            Command::Migrate(options) => &options.hosts,
            Command::Probe(options) => &options.hosts,
            Command::Pki { .. }
            | Command::Control { .. }
            | Command::Watch(_)
            | Command::Top(_)
            | Command::Completions { .. } => {
                return self.hosts.clone();
            }
        };
        behind.file.clone().or_else(|| self.hosts.clone())
    }
}

/// `--hosts` after a command that queries hosts.
#[derive(Debug, Args)]
pub(crate) struct HostsFile {
    /// File that lists the hosts [env: GODWIT_HOSTS]
    #[arg(id = "hosts_file", long = "hosts", global = true, value_name = "FILE")]
    file: Option<PathBuf>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Manage hosts and run a host's agent
    Host {
        #[command(flatten)]
        hosts: HostsFile,
        #[command(subcommand)]
        command: HostCommand,
    },
    /// Manage virtual machines
    Vm {
        #[command(flatten)]
        hosts: HostsFile,
        #[command(flatten)]
        place: ManagerPlace,
        #[command(subcommand)]
        command: VmCommand,
    },
    /// Manage disk images at a host
    Disk {
        #[command(flatten)]
        hosts: HostsFile,
        #[command(flatten)]
        place: ManagerPlace,
        #[command(subcommand)]
        command: DiskCommand,
    },
    /// Manage datastores: directories with disks that hosts have or share, and pools
    Datastore {
        #[command(flatten)]
        hosts: HostsFile,
        #[command(flatten)]
        place: ManagerPlace,
        #[command(subcommand)]
        command: DatastoreCommand,
    },
    /// List and cancel imports, exports, moves of disks and adoptions
    Job {
        #[command(flatten)]
        hosts: HostsFile,
        #[command(flatten)]
        place: ManagerPlace,
        #[command(subcommand)]
        command: JobCommand,
    },
    /// Migrate a running VM to another host
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
  godwit migrate web --to b --with-disks --disks-to /ssd --delete-source-disks
  godwit migrate web --to b --with-disks --disks-to /dev/vg0 --overwrite-devices

Ctrl-C cancels the migration and waits until the guest continues at the source. A second Ctrl-C \
exits immediately and leaves the migration to the agents.")]
    Migrate(MigrateArgs),
    /// Measure the network between two hosts as a migration would use it
    #[command(after_help = "Examples:
  godwit probe b
  godwit probe b --from a --size 64GiB
  godwit probe b --seconds 5 --json >probe.json

For each lane, the probe reports the connection time, the round trip, the usable packet size, \
the throughput with 1, 2, 4 and 8 streams, and the bottleneck. It then estimates the migration \
time of a VM of the given size. It saturates the network for several seconds. Ctrl-C ends it.")]
    Probe(ProbeArgs),
    /// Manage current and past migrations
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
    /// Run the manager of the cluster and send requests to it
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
    /// Manage the certificate authority and the certificates of hosts and operators
    #[command(after_help = "Examples:
  godwit pki init --dir /etc/godwit/pki
  godwit pki issue a --address 10.77.0.11 --dir /etc/godwit/pki
  godwit pki issue admin --operator --days 30 --dir /etc/godwit/pki
  godwit pki renew a --dir /etc/godwit/pki
  godwit pki show /etc/godwit/pki/a.pem

A host needs ca.pem, NAME.pem and NAME.key. Keep ca.key where it was created. An agent loads a \
renewed certificate without a restart.")]
    Pki {
        #[command(flatten)]
        no_host: NoHost,
        #[command(subcommand)]
        command: PkiCommand,
    },
    /// Probe a guest a thousand times per second and report each gap in its replies
    #[command(after_help = "Examples:
  godwit watch 10.88.0.21
  godwit watch 10.88.0.21 --min-gap 5ms --for 1min --json")]
    Watch(WatchArgs),
    /// Show the VMs and hosts that use most, every 5 s until Ctrl-C
    #[command(after_help = "Examples:
  godwit top
  godwit top --by disk --limit 50
  godwit top --once
  godwit top --by memory --json

CPU and ready are processors: 0.81/2 is 81 % of one of two. Ready is the time that threads waited \
for a processor. A figure that is unknown shows as -.")]
    Top(TopArgs),
    /// Print a shell completion script
    #[command(after_help = "Example:
  godwit completions bash >/usr/share/bash-completion/completions/godwit")]
    Completions {
        #[command(flatten)]
        no_host: NoHost,
        /// Shell
        shell: Shell,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum HostCommand {
    /// Run the agent of this host until SIGTERM; its VMs keep running without it
    #[command(after_help = "Example:
  godwit host run --config /etc/godwit/host.toml")]
    Run {
        /// Agent configuration; if the default file is missing, the host runs standalone
        #[arg(long, value_name = "FILE", default_value = godwit_host::Config::DEFAULT_FILE)]
        config: PathBuf,
        #[command(flatten)]
        no_host: NoHost,
    },
    /// Run the watchdog of this host: it ends protected VMs when the lease of the host has run out
    #[command(after_help = "Example:
  godwit host watchdog --config /etc/godwit/host.toml

The agent sends it what to guard; without protected VMs it does nothing. [ha] watchdog in \
the configuration names a watchdog of the kernel, which then resets the host if a VM cannot be \
ended. If this command is killed while VMs are guarded, the host is reset unless it is started \
again within 5 s.")]
    Watchdog {
        /// Agent configuration
        #[arg(long, value_name = "FILE", default_value = godwit_host::Config::DEFAULT_FILE)]
        config: PathBuf,
        #[command(flatten)]
        no_host: NoHost,
    },
    /// Join a cluster: create a key, get a certificate from the manager and write the agent
    /// configuration
    #[command(after_help = "Examples:
  godwit host join --manager https://m1:7800 --token-file c.token --address https://10.77.0.13:7700
  godwit host join --manager https://m1:7800 --token-file c.token --authority ca.pem

An admin creates the token with `godwit control join-token create HOST`. It can be used once \
and contains the fingerprint of the authority with which this host verifies the manager. The \
private key never leaves this host. The command can be repeated: it does not change a host that \
has joined.")]
    Join(JoinArgs),
    /// Show the properties and resources of a host
    #[command(after_help = "Example:
  godwit host show a")]
    Show {
        /// Host name [default: all]
        name: Option<String>,
    },
    /// Show the guard of a host: its term, its lease, its heartbeats and its protected VMs
    #[command(
        args_conflicts_with_subcommands = true,
        after_help = "Examples:
  godwit host ha a
  godwit host ha --json
  godwit host ha confirm-off b manager --term 3

The lease is the time in which the host may still run its protected VMs without a further \
renewal. For the manager's view of all hosts, see `godwit control ha show`."
    )]
    Ha {
        /// Host name [default: all]
        name: Option<String>,
        #[command(subcommand)]
        command: Option<HostHaCommand>,
    },
    /// Show the newest sample of the load of a host and its VMs, means over 5 s
    #[command(after_help = "Examples:
  godwit host load a
  godwit host load --json

CPU and ready are numbers of processors: those in use, and those that a VM could use and waits \
for. A figure that could not be measured is \"-\".")]
    Load {
        /// Host name [default: all]
        name: Option<String>,
    },
    /// List the hosts and their connection state
    #[command(after_help = "Examples:
  godwit host list
  godwit host list --host a --json")]
    List,
    /// Drain a host: move every VM that can move to another host, and list the others with the
    /// reason
    #[command(after_help = "Examples:
  godwit host drain a --plan
  godwit host drain a
  godwit host drain a --detach --priority high
  godwit host drain a --undo

The host enters maintenance mode and accepts no VMs until the drain is undone or `godwit \
control host maintenance a off` is run. Ctrl-C stops only this command (exit code 130); the \
drain continues. If the manager is unreachable for several seconds, the command retries.")]
    Drain(DrainArgs),
    /// List the drains of the cluster
    #[command(after_help = "Examples:
  godwit host drains
  godwit host drains --json")]
    Drains {
        #[command(flatten)]
        place: ManagerPlace,
        #[command(flatten)]
        no_host: NoHost,
    },
    /// Show or set the bandwidth limits for guest memory that leaves a host; set limits last until
    /// its agent exits
    #[command(after_help = "Examples:
  godwit host limit
  godwit host limit 5gbit --host a
  godwit host limit 1gbit --lane 10.77.0.11 --host a
  godwit host limit 2gbit --each-migration --host a
  godwit host limit none --host a

All migrations of a host share its limit fairly, and all migrations on a lane share the limit \
of the lane. After a restart of the agent, the limits in [limits] of its configuration apply \
again.")]
    Limit {
        /// Rate of at least 1mbit, or none [default: show the limits]
        #[arg(value_name = "RATE|none")]
        limit: Option<RateLimit>,
        /// Set the limit of the lanes that leave from this address of the host
        #[arg(long, value_name = "ADDRESS", requires = "limit")]
        lane: Option<IpAddr>,
        /// Set the default limit of each migration that starts from then on
        #[arg(long, requires = "limit", conflicts_with = "lane")]
        each_migration: bool,
    },
}

#[derive(Debug, Args)]
pub(crate) struct JoinArgs {
    /// Address of the manager
    #[arg(long, value_name = "URL")]
    pub(crate) manager: Endpoint,
    /// File with the join token
    #[arg(long, value_name = "FILE")]
    pub(crate) token_file: PathBuf,
    /// Certificate of the authority, instead of the fingerprint in the token
    #[arg(long, value_name = "FILE", conflicts_with = "fingerprint")]
    pub(crate) authority: Option<PathBuf>,
    /// Fingerprint of the authority's certificate, SHA256:…, instead of the one in the token
    #[arg(long, value_name = "SHA256:HEX")]
    pub(crate) fingerprint: Option<Fingerprint>,
    /// Address at which the manager reaches the agent of this host [default: the address in the
    /// token]
    #[arg(long, value_name = "URL")]
    pub(crate) address: Option<Endpoint>,
    /// Address of this host that accepts migrations (repeatable)
    #[arg(long = "migration-address", value_name = "IP")]
    pub(crate) migration_addresses: Vec<IpAddr>,
    /// Directory for the key and the certificates
    #[arg(long, value_name = "DIR", default_value = "/etc/godwit/pki")]
    pub(crate) dir: PathBuf,
    /// Agent configuration, written if the file does not exist
    #[arg(long, value_name = "FILE", default_value = godwit_host::Config::DEFAULT_FILE)]
    pub(crate) config: PathBuf,
    #[command(flatten)]
    pub(crate) no_host: NoHost,
}

#[derive(Debug, Args)]
pub(crate) struct MigrateArgs {
    #[command(flatten)]
    hosts: HostsFile,
    /// Name of the VM
    pub(crate) vm: String,
    /// Destination host
    #[arg(long, value_name = "HOST")]
    pub(crate) to: String,
    /// Engine that transfers the memory
    #[arg(long, value_parser = one_of::<EngineKind>(ENGINES), default_value = "godwit")]
    pub(crate) engine: EngineKind,
    /// Longest predicted pause of the vCPUs with which the migration switches over
    #[arg(long, value_name = "TIME", value_parser = parse_duration, default_value = "20ms")]
    pub(crate) switchover_budget: Duration,
    /// Goal of the migration: minimal-pause (keep the budget, however much vCPUs that write are
    /// throttled), minimal-impact (throttle as little as possible), fast-evacuation (empty the
    /// source as soon as possible), deadline=TIME (throttle as far as the deadline requires), or
    /// auto [default: auto]
    #[arg(long, value_name = "POLICY")]
    pub(crate) policy: Option<Intent>,
    /// Run the guest at the destination after each page has been sent once, and fetch the pages
    /// changed since then
    #[arg(long, conflicts_with = "no_page_in")]
    pub(crate) page_in: bool,
    /// Never run the guest at the destination before all of its memory is there [default: allowed
    /// if nothing else helps]
    #[arg(long)]
    pub(crate) no_page_in: bool,
    /// TCP streams of each lane, at most 256 in all lanes together [default: the number that
    /// measurement shows to be useful]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64))]
    pub(crate) streams: Option<u32>,
    /// Bandwidth limit for the memory, and for disks that move with the VM: at least 1mbit, or none
    /// [default: the source host's limit for each migration]
    #[arg(long, value_name = "RATE|none")]
    pub(crate) bandwidth_limit: Option<RateLimit>,
    /// Longest interruption of the link before the switchover; the migration then resumes where it
    /// was. With 0s, an interruption ends the migration
    #[arg(long, value_name = "TIME", value_parser = parse_duration, default_value = "5min")]
    pub(crate) cut_limit: Duration,
    /// Compression of guest pages [default: auto]
    #[arg(long, value_parser = one_of::<Compression>(COMPRESSIONS))]
    pub(crate) compression: Option<Compression>,
    /// Memory that pages may refer to instead of being sent [default: all]
    #[arg(long, value_parser = one_of::<ReferenceUse>(REFERENCES))]
    pub(crate) references: Option<ReferenceUse>,
    /// How the pages are found that the guest writes [default: the source host's choice]
    #[arg(long, value_parser = one_of::<TrackingUse>(TRACKINGS))]
    pub(crate) tracking: Option<TrackingUse>,
    #[command(flatten)]
    pub(crate) disks: TravellingArgs,
    /// Number of parallel multifd channels
    #[arg(
        long,
        value_name = "N",
        value_parser = clap::value_parser!(u32).range(1..=255),
        help_heading = "With --engine qemu"
    )]
    pub(crate) multifd_channels: Option<u32>,
    /// Compression of the multifd channels
    #[arg(
        long,
        value_parser = one_of::<String>(MULTIFD_COMPRESSIONS),
        requires = "multifd_channels",
        help_heading = "With --engine qemu"
    )]
    pub(crate) multifd_compression: Option<String>,
    /// Throttle the vCPUs until the migration converges
    #[arg(long, help_heading = "With --engine qemu")]
    pub(crate) auto_converge: bool,
    /// Switch to post-copy after the first round
    #[arg(long, help_heading = "With --engine qemu")]
    pub(crate) postcopy: bool,
    /// Send guest memory without TLS between hosts that otherwise use TLS
    #[arg(long, help_heading = "With --engine qemu")]
    pub(crate) plaintext: bool,
    /// Let the destination's QEMU start the guest by itself: faster, but unsafe if the link breaks
    /// at the end
    #[arg(long, help_heading = "With --engine qemu")]
    pub(crate) autostart: bool,
    /// Start the migration, print its ID and exit
    #[arg(long)]
    pub(crate) detach: bool,
    /// Move nothing: run the checks, measure the guest for 3 s and the lanes, and predict the
    /// migration
    #[arg(long, conflicts_with = "detach")]
    pub(crate) dry_run: bool,
}

#[derive(Debug, Args)]
pub(crate) struct ProbeArgs {
    #[command(flatten)]
    hosts: HostsFile,
    /// Destination host
    #[arg(value_name = "HOST")]
    pub(crate) to: String,
    /// Source host [default: the only other host, or the one whose agent runs on this machine]
    #[arg(long, value_name = "HOST")]
    pub(crate) from: Option<String>,
    /// Memory size of the VM for the estimate
    #[arg(
        long,
        value_name = "SIZE",
        default_value_t = ByteSize::from_bytes(DEFAULT_PROBE_GUEST_BYTES)
    )]
    pub(crate) size: ByteSize,
    /// Duration of each throughput measurement in seconds, 0.1 to 30
    #[arg(long, value_name = "N", default_value_t = DEFAULT_PROBE_SECONDS)]
    pub(crate) seconds: f64,
}

#[derive(Debug, Subcommand)]
pub(crate) enum MigrationCommand {
    /// List the migrations of all hosts
    #[command(after_help = "Examples:
  godwit migration list
  godwit migration list --host a --json")]
    List,
    /// Show a migration, with its report if it has ended
    #[command(after_help = "Example:
  godwit migration show m69204f1e-0")]
    Show {
        /// ID of the migration
        id: String,
    },
    /// Show the progress of a migration until it ends
    #[command(after_help = "Example:
  godwit migration follow m69204f1e-0")]
    Follow {
        /// ID of the migration
        id: String,
    },
    /// Set the bandwidth limit of a running migration
    #[command(after_help = "Examples:
  godwit migration limit m69204f1e-0 500mbit
  godwit migration limit m69204f1e-0 none

The limits of its lanes and its host apply as well. The limit of the migration does not apply \
to the last pages, which are sent while the guest is paused.")]
    Limit {
        /// ID of the migration
        id: String,
        /// Rate of at least 1mbit, or none
        #[arg(value_name = "RATE|none")]
        limit: RateLimit,
    },
    /// Cancel a migration; the guest continues at the source
    #[command(after_help = "Example:
  godwit migration cancel m69204f1e-0")]
    Cancel {
        /// ID of the migration
        id: String,
    },
    /// Decide which host owns a VM in doubt, after the other host was fenced
    #[command(after_help = "Examples:
  godwit migration resolve web --runs-on a
  godwit migration resolve web --runs-on a --keep-memory
  godwit migration resolve web --runs-on b --host b

A VM is in doubt if the link or a host was lost at the moment of its hand-over. The two hosts \
resolve this automatically when they can communicate again. Decide manually only if one of them \
is lost permanently. Make sure first that it does not run the guest: power it off. A guest that \
runs on two hosts destroys its disks.

By default the guest at the source ends, and `godwit vm start` boots it from its disks, because \
the other host may have run it and written to them. If the other host certainly never ran it, \
--keep-memory resumes the guest with its memory.")]
    Resolve {
        /// Name of the VM
        vm: String,
        /// Host that owns the guest from now on
        #[arg(long, value_name = "HOST")]
        runs_on: String,
        /// Resume the guest with its memory at the hand-over, instead of ending it: only if the
        /// other host never ran it
        #[arg(long)]
        keep_memory: bool,
    },
}

#[derive(Debug, Args)]
pub(crate) struct WatchArgs {
    /// Address of the guest
    pub(crate) address: IpAddr,
    /// Shortest gap to report
    #[arg(long, value_name = "TIME", value_parser = parse_duration, default_value = "10ms")]
    pub(crate) min_gap: Duration,
    /// Duration of the measurement [default: until Ctrl-C]
    #[arg(long = "for", value_name = "TIME", value_parser = parse_duration)]
    pub(crate) duration: Option<Duration>,
    /// Echo port of the guest
    #[arg(long, default_value_t = 7)]
    pub(crate) port: u16,
    /// Network namespace to probe from [default: as set in the hosts file]
    #[arg(long, value_name = "NAME")]
    pub(crate) namespace: Option<String>,
    #[command(flatten)]
    pub(crate) no_host: NoHost,
}

#[cfg(test)]
mod tests;
