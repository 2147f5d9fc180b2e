//! Command line of `godwit control`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Subcommand, ValueEnum};
use godwit_api::Endpoint;
use godwit_api::control::Role;
use godwit_pki::Serial;
use godwit_types::BitRate;

use super::alarms::AlarmCommand;
use super::baseline::CpuBaselineCommand;
use super::choices::{ROLES, one_of, parse_label};
use super::ha::HaCommand;
use super::journal::JournalCommand;
use super::limits::{LimitsCommand, SetHostArgs};
use super::load::LoadArgs;
use super::moves::MoveCommand;
use super::rules::RuleCommand;
use crate::units::parse_duration;

#[derive(Debug, Subcommand)]
pub(crate) enum ControlCommand {
    /// Run the manager until SIGTERM; migrations continue without it
    #[command(after_help = "Example:
  godwit control run --config /etc/godwit/control.toml")]
    Run {
        /// Configuration of the manager
        #[arg(long, value_name = "FILE")]
        config: PathBuf,
    },
    /// Copy the store of this machine's manager to a new file, whether or not the manager runs
    #[command(after_help = "Examples:
  godwit control backup /backup/control.sqlite
  godwit control backup /backup/control.sqlite --config /etc/godwit/m2.toml

This command supports SQLite only. For etcd, use `etcdctl snapshot save`. docs/recover.md \
describes what else belongs to a backup.")]
    Backup {
        /// New file; an existing file is not overwritten
        #[arg(value_name = "FILE")]
        file: PathBuf,
        /// Configuration of the manager
        #[arg(long, value_name = "FILE", default_value = "/etc/godwit/control.toml")]
        config: PathBuf,
    },
    /// Write the OpenAPI document of the manager's API; needs no running manager
    #[command(after_help = "Example:
  godwit control openapi >godwit.json")]
    Openapi,
    /// Show a summary of the cluster
    #[command(after_help = "Examples:
  godwit control status
  godwit control status --manager https://m1:7800 --ca /etc/godwit/pki/ca.pem")]
    Status,
    /// Manage the hosts of the cluster
    #[command(after_help = "Examples:
  godwit control host add a --address https://10.77.0.11:7700 --label rack=r1 --link 10gbit
  godwit control host list
  godwit control host forget a")]
    Host {
        #[command(subcommand)]
        command: ManagedHostCommand,
    },
    /// List the VMs of all hosts, as their agents report them
    #[command(after_help = "Examples:
  godwit control vms
  godwit control vms --json")]
    Vms,
    /// List VM names that several hosts claim without a move that explains it
    #[command(after_help = "Example:
  godwit control conflicts

Such a claim has no effect: operations on the VM go to the host that holds its name.")]
    Conflicts,
    /// Bind a VM's name to the VM that a host reports
    #[command(after_help = "Example:
  godwit control bind web --to b

Use this for a name whose host is lost permanently, or that the wrong one of two VMs holds. It \
does not stop or delete any VM.")]
    Bind {
        /// Name of the VM
        vm: String,
        /// Host whose VM gets the name
        #[arg(long, value_name = "HOST")]
        to: String,
    },
    /// List networks, with their hosts and number of VMs
    #[command(after_help = "Example:
  godwit control networks")]
    Networks,
    /// List datastores, with their hosts, free space and number of VMs
    #[command(after_help = "Example:
  godwit control datastores")]
    Datastores,
    /// Manage moves of VMs: queued, running and past migrations
    #[command(after_help = "Examples:
  godwit control move create web --to b
  godwit control move list
  godwit control move cancel v69204f1e-0c3a55d1")]
    Move {
        #[command(subcommand)]
        command: MoveCommand,
    },
    /// Manage placement rules: affinity, anti-affinity, hosts (changes require the role admin)
    #[command(after_help = "Examples:
  godwit control rule create db-apart apart --vm db1,db2
  godwit control rule create app-near-db together --vm app,db1 --should
  godwit control rule create licensed on --vm erp --at a,b --at-label licence=erp
  godwit control rule list
  godwit control rule delete db-apart

A rule selects a host by its name, or by all of the given labels. Drains and moves obey rules. \
A rule never moves a VM by itself.")]
    Rule {
        #[command(subcommand)]
        command: RuleCommand,
    },
    /// Manage the CPU baseline that lets each guest move to each host (EVC; changes require the
    /// role admin)
    #[command(after_help = "Examples:
  godwit control cpu-baseline show
  godwit control cpu-baseline set computed --plan
  godwit control cpu-baseline set x86-64-v3 --without old1,old2
  godwit control cpu-baseline clear

A running guest keeps its CPU. To get the baseline, its VM must be stopped and created again.")]
    CpuBaseline {
        #[command(subcommand)]
        command: CpuBaselineCommand,
    },
    /// Manage the limits for concurrent moves (changes require the role admin)
    #[command(after_help = "Examples:
  godwit control limits show
  godwit control limits set --in-all 20 --out 2
  godwit control limits set --datastore /srv/slow=2
  godwit control limits set --in-all default

A set limit takes effect immediately and overrides the manager's configuration until it is set \
to default. 0 prevents new moves. For the limits of one host, see `godwit control host set`.")]
    Limits {
        #[command(subcommand)]
        command: LimitsCommand,
    },
    /// Manage high availability: protected VMs start elsewhere when their host fails (changes
    /// require the role admin)
    #[command(after_help = "Examples:
  godwit control ha show
  godwit control ha set --enabled on --failures 1 --admission warn
  godwit control ha confirm-off a --term 3
  godwit control ha fencing test

`godwit vm set VM --protect normal` protects a VM.")]
    Ha {
        #[command(subcommand)]
        command: HaCommand,
    },
    /// List and acknowledge alarms: what needs attention in the cluster
    #[command(after_help = "Examples:
  godwit control alarm list
  godwit control alarm acknowledge a69204f1e-0c3a55d1 --note 'disks are ordered'
  godwit control alarm test

The manager's configuration names receivers of notices about alarms: webhooks and mail.")]
    Alarm {
        #[command(subcommand)]
        command: AlarmCommand,
    },
    /// Show changes of the cluster as they happen, one per line; with --json, one JSON object per
    /// line
    #[command(after_help = "Examples:
  godwit control events
  godwit --json control events | jq .

Ctrl-C ends the command. If the manager becomes silent, the command reconnects and continues \
after the last received event.")]
    Events {
        /// Start after the event with this number [default: with new events]
        #[arg(long, value_name = "NUMBER")]
        behind: Option<u64>,
    },
    /// Show the load of a VM, a host, a datastore or the cluster over time
    #[command(after_help = "Examples:
  godwit control load vm:web
  godwit control load host:a --since 24h
  godwit control load cluster --since 720h --json >load.json
  godwit control load datastore:/srv --since 10min --resolution 5s

Load is kept for an hour in periods of 5 s, for a day in minutes and for a year in hours. Periods \
in which nothing was measured are left out; in JSON they are null.")]
    Load(LoadArgs),
    /// Show the audit log of requests and refusals, newest first (requires the role admin)
    #[command(after_help = "Examples:
  godwit control audit
  godwit control audit --lines 500 --json >audit.json")]
    Audit {
        /// Number of lines to show
        #[arg(
            long,
            value_name = "LINES",
            default_value_t = 50,
            value_parser = clap::value_parser!(u16).range(1..=1000)
        )]
        lines: u16,
    },
    /// Show the journal: what happened in the cluster, and why
    #[command(after_help = "Examples:
  godwit control journal list --since 24h
  godwit control journal list --follow
  godwit control journal export >journal.jsonl")]
    Journal {
        #[command(subcommand)]
        command: JournalCommand,
    },
    /// Manage access tokens for users and programs
    #[command(after_help = "Examples:
  godwit control token create monitoring --role viewer --days 365
  godwit control token list
  godwit control token revoke 1f0c9a3b77d2

The secret is shown only once. Pass it to commands in the environment variable GODWIT_TOKEN.")]
    Token {
        #[command(subcommand)]
        command: TokenCommand,
    },
    /// Manage join tokens; each lets one host join, once
    #[command(after_help = "Examples:
  godwit control join-token create c --valid 1h >c.token
  godwit control join-token create c --address https://10.77.0.13:7700
  godwit control join-token list
  godwit control join-token revoke 1f0c9a3b77d2

The token is shown only once. On the host, run: godwit host join --manager https://m1:7800 \
--token-file c.token")]
    JoinToken {
        #[command(subcommand)]
        command: JoinTokenCommand,
    },
    /// Manage the certificates of hosts and revoked certificates (requires the role admin)
    #[command(after_help = "Examples:
  godwit control certificate list
  godwit control certificate revoke --cert admin.pem

Removing a host revokes its certificates. Every agent receives the list.")]
    Certificate {
        #[command(subcommand)]
        command: CertificateCommand,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum CertificateCommand {
    /// List the certificates that the manager has issued or seen, and all revoked certificates
    #[command(after_help = "Example:
  godwit control certificate list")]
    List,
    /// Revoke a certificate permanently: agents and managers refuse it from the next connection on
    #[command(after_help = "Examples:
  godwit control certificate revoke 5f0c9a3b77d24e1f8a6b3c2d1e0f9a8b
  godwit control certificate revoke --cert admin.pem")]
    Revoke {
        /// Serial number of the certificate
        #[arg(value_name = "SERIAL", required_unless_present = "file")]
        serial: Option<Serial>,
        /// Certificate file, instead of the serial number
        #[arg(long = "cert", value_name = "FILE", conflicts_with = "serial")]
        file: Option<PathBuf>,
    },
    /// Print the certificate revocation list (X.509 CRL)
    #[command(after_help = "Example:
  godwit control certificate crl >revoked.pem")]
    Crl,
}

#[derive(Debug, Subcommand)]
pub(crate) enum JoinTokenCommand {
    /// Create a token with which one host can join; it is shown only once
    #[command(after_help = "Examples:
  godwit control join-token create c >c.token
  godwit control join-token create c --valid 24h --address https://10.77.0.13:7700 >c.token")]
    Create {
        /// Name of the host
        host: String,
        /// Address of the host's agent; if omitted, the host provides it
        #[arg(long, value_name = "URL")]
        address: Option<Endpoint>,
        /// Validity, at most 168h
        #[arg(long, value_name = "TIME", value_parser = parse_duration, default_value = "1h")]
        valid: Duration,
    },
    /// List the join tokens, without their secrets
    #[command(after_help = "Example:
  godwit control join-token list")]
    List,
    /// Revoke a join token; a host that has joined with it stays
    #[command(after_help = "Example:
  godwit control join-token revoke 1f0c9a3b77d2")]
    Revoke {
        /// ID of the token
        id: String,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum ManagedHostCommand {
    /// Add a host whose agent already has a certificate of the cluster's authority
    #[command(after_help = "Examples:
  godwit control host add a --address https://10.77.0.11:7700
  godwit control host add a --address https://10.77.0.11:7700 --label rack=r1 --link 10gbit")]
    Add {
        /// Name of the host, as in its certificate
        name: String,
        /// Address of the host's agent
        #[arg(long, value_name = "URL")]
        address: Endpoint,
        /// Label that rules can refer to (repeatable)
        #[arg(long = "label", value_name = "KEY=VALUE", value_parser = parse_label)]
        labels: Vec<(String, String)>,
        /// Speed of the host's link
        #[arg(long, value_name = "RATE")]
        link: Option<BitRate>,
    },
    /// List the hosts and the state of their agents
    #[command(after_help = "Examples:
  godwit control host list
  godwit control host list --json")]
    List,
    /// Show a host
    #[command(after_help = "Example:
  godwit control host show a")]
    Show {
        /// Name of the host
        name: String,
    },
    /// Change the address, labels, link speed or move limit of a host
    #[command(after_help = "Examples:
  godwit control host set a --label rack=r2 --label licence=erp
  godwit control host set a --link 25gbit --most-moves 12
  godwit control host set a --most-moves default")]
    Set(SetHostArgs),
    /// Turn the maintenance mode of a host on or off; its VMs stay (`godwit host drain` moves them)
    #[command(after_help = "Examples:
  godwit control host maintenance a on
  godwit control host maintenance a off")]
    Maintenance {
        /// Name of the host
        name: String,
        /// on: the host accepts no VMs; off: it accepts VMs
        #[arg(value_enum)]
        switch: Switch,
    },
    /// Remove a host from the cluster and revoke its certificates; its guests keep running
    #[command(after_help = "Example:
  godwit control host forget a")]
    Forget {
        /// Name of the host
        name: String,
        /// Remove a host in use: its moves fail, its drain ends, and the manager no longer knows
        /// its VMs
        #[arg(long)]
        force: bool,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum TokenCommand {
    /// Create a token; its secret is shown only once
    #[command(after_help = "Examples:
  godwit control token create monitoring --role viewer --days 365
  godwit control token create ana --role operator >ana.token")]
    Create {
        /// Name of the token's owner, shown in the audit log
        name: String,
        /// Role of the token; each role includes the permissions of those before it
        #[arg(long, value_parser = one_of::<Role>(ROLES))]
        role: Role,
        /// Validity
        #[arg(
            long,
            value_name = "DAYS",
            default_value_t = 90,
            value_parser = clap::value_parser!(u32).range(1..=3650)
        )]
        days: u32,
    },
    /// List the tokens, without their secrets
    #[command(after_help = "Example:
  godwit control token list")]
    List,
    /// Revoke a token, effective immediately
    #[command(after_help = "Example:
  godwit control token revoke 1f0c9a3b77d2")]
    Revoke {
        /// ID of the token
        id: String,
    },
}

/// On or off.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Switch {
    On,
    Off,
}
