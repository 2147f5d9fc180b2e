//! The command line of the manager.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand, ValueEnum};
use godwit_api::Endpoint;
use godwit_api::control::Role;
use godwit_pki::Serial;
use godwit_types::BitRate;

use super::{CpuBaselineCommand, LimitsCommand, MoveCommand, RuleCommand, SetHostArgs};
use crate::exit::Failure;
use crate::units::parse_duration;

/// Where the manager is that is asked. The environment is read here and not by clap, whose usage would show what stands there as required.
#[derive(Debug, Args)]
pub(crate) struct ManagerPlace {
    /// The manager's address, unix:PATH or https://HOST:PORT [env: GODWIT_MANAGER] [default: unix:/run/godwit-control/control.sock]
    #[arg(long, global = true, value_name = "URL")]
    manager: Option<Endpoint>,
    /// The authority's certificate that an https:// address is checked by [env: GODWIT_CA]
    #[arg(long, global = true, value_name = "FILE")]
    ca: Option<PathBuf>,
}

fn of_environment(name: &str) -> Option<OsString> {
    std::env::var_os(name).filter(|value| !value.is_empty())
}

impl ManagerPlace {
    /// Whether a manager is named, rightly or not.
    pub(crate) fn is_named(&self) -> bool {
        self.manager.is_some() || of_environment("GODWIT_MANAGER").is_some()
    }

    /// The manager that is named.
    pub(crate) fn manager(&self) -> Result<Option<Endpoint>, Failure> {
        let Some(named) = of_environment("GODWIT_MANAGER").filter(|_| self.manager.is_none())
        else {
            return Ok(self.manager.clone());
        };
        let endpoint = named.to_string_lossy().parse::<Endpoint>();
        endpoint.map(Some).map_err(|error| {
            Failure::usage(format!("GODWIT_MANAGER: {}", error.message), error.remedy)
        })
    }

    /// The certificate that is named.
    pub(crate) fn authority(&self) -> Option<PathBuf> {
        self.ca.clone().or_else(|| of_environment("GODWIT_CA").map(PathBuf::from))
    }
}

#[derive(Debug, Subcommand)]
pub(crate) enum ControlCommand {
    /// Run the manager until SIGTERM; migrations go on without it
    #[command(after_help = "Example:
  godwit control run --config /etc/godwit/control.toml")]
    Run {
        /// The manager's configuration
        #[arg(long, value_name = "FILE")]
        config: PathBuf,
    },
    /// Copy this machine's manager's store into a new file, while the manager runs or not
    #[command(after_help = "Examples:
  godwit control backup /backup/control.sqlite
  godwit control backup /backup/control.sqlite --config /etc/godwit/m2.toml

Only what SQLite keeps: etcd makes copies by itself, `etcdctl snapshot save`. docs/recover.md says what else belongs to a backup.")]
    Backup {
        /// The new file; one that is there is left alone
        #[arg(value_name = "FILE")]
        file: PathBuf,
        /// The manager's configuration
        #[arg(long, value_name = "FILE", default_value = "/etc/godwit/control.toml")]
        config: PathBuf,
    },
    /// Write the OpenAPI document of the manager's API; asks no manager
    #[command(after_help = "Example:
  godwit control openapi >godwit.json")]
    Openapi,
    /// Show the cluster as a whole
    #[command(after_help = "Examples:
  godwit control status
  godwit control status --manager https://m1:7800 --ca /etc/godwit/pki/ca.pem")]
    Status,
    /// Hosts, as the manager knows them
    #[command(after_help = "Examples:
  godwit control host add a --address https://10.77.0.11:7700 --label rack=r1 --link 10gbit
  godwit control host list
  godwit control host forget a")]
    Host {
        #[command(subcommand)]
        command: ManagedHostCommand,
    },
    /// VMs of all hosts, as their agents tell
    #[command(after_help = "Examples:
  godwit control vms
  godwit control vms --json")]
    Vms,
    /// VMs' names that other hosts than their own claim, without a move that explains it
    #[command(after_help = "Example:
  godwit control conflicts

Such a claim changes nothing: what is asked of a VM goes to the host that holds its name.")]
    Conflicts,
    /// Give a VM's name to the VM that a host reports
    #[command(after_help = "Example:
  godwit control bind web --to b

For a name whose host is gone for good, or that the wrong one of two VMs has. No VM is stopped or deleted by it.")]
    Bind {
        /// The VM's name
        vm: String,
        /// The host whose VM gets it
        #[arg(long, value_name = "HOST")]
        to: String,
    },
    /// Networks: the hosts that have them, and how many VMs are in each
    #[command(after_help = "Example:
  godwit control networks")]
    Networks,
    /// Directories of disks: the hosts that have them, their room there, and how many VMs have disks in each
    #[command(after_help = "Example:
  godwit control datastores")]
    Datastores,
    /// Moves of VMs: who waits for what, who is on the way, what became of it
    #[command(after_help = "Examples:
  godwit control move create web --to b
  godwit control move list
  godwit control move cancel v69204f1e-0c3a55d1")]
    Move {
        #[command(subcommand)]
        command: MoveCommand,
    },
    /// Rules about where VMs may be: affinity, anti-affinity, hosts (needs the role admin to change)
    #[command(after_help = "Examples:
  godwit control rule create db-apart apart --vm db1,db2
  godwit control rule create app-near-db together --vm app,db1 --should
  godwit control rule create licensed on --vm erp --at a,b --at-label licence=erp
  godwit control rule list
  godwit control rule delete db-apart

A host is meant if it is named, or has all of the labels. Drains and moves obey rules; no rule moves a VM by itself.")]
    Rule {
        #[command(subcommand)]
        command: RuleCommand,
    },
    /// The CPU that guests of the cluster get, so that each can go to each host (EVC; needs the role admin to change)
    #[command(after_help = "Examples:
  godwit control cpu-baseline show
  godwit control cpu-baseline set computed --plan
  godwit control cpu-baseline set x86-64-v3 --without old1,old2
  godwit control cpu-baseline clear

A guest that runs keeps its CPU: its VM has to be stopped and made anew with the baseline to have it.")]
    CpuBaseline {
        #[command(subcommand)]
        command: CpuBaselineCommand,
    },
    /// How many moves run at a time (needs the role admin to change)
    #[command(after_help = "Examples:
  godwit control limits show
  godwit control limits set --in-all 20 --out 2
  godwit control limits set --datastore /srv/slow=2
  godwit control limits set --in-all default

What is set holds at once, over the manager's configuration, until it is set back to default. 0 lets nothing begin. One host's own: godwit control host set.")]
    Limits {
        #[command(subcommand)]
        command: LimitsCommand,
    },
    /// Follow what changes in the cluster, a line each, with --json one JSON object a line
    #[command(after_help = "Examples:
  godwit control events
  godwit --json control events | jq .

Ctrl-C ends it. A manager that falls silent is asked again, and goes on behind the last event that came.")]
    Events {
        /// Begin behind the event of this number [default: with what comes from now on]
        #[arg(long, value_name = "NUMBER")]
        behind: Option<u64>,
    },
    /// Who did what, and who was refused, the newest first (needs the role admin)
    #[command(after_help = "Examples:
  godwit control audit
  godwit control audit --lines 500 --json >audit.json")]
    Audit {
        /// Lines to show
        #[arg(long, value_name = "LINES", default_value_t = 50, value_parser = clap::value_parser!(u16).range(1..=1000))]
        lines: u16,
    },
    /// Tokens, by which people and programs ask the manager
    #[command(after_help = "Examples:
  godwit control token create monitoring --role viewer --days 365
  godwit control token list
  godwit control token revoke 1f0c9a3b77d2

The secret is shown once. Give it to commands in the environment: GODWIT_TOKEN.")]
    Token {
        #[command(subcommand)]
        command: TokenCommand,
    },
    /// Tokens by which hosts join, one host each, once
    #[command(after_help = "Examples:
  godwit control join-token create c --valid 1h >c.token
  godwit control join-token create c --address https://10.77.0.13:7700
  godwit control join-token list
  godwit control join-token revoke 1f0c9a3b77d2

The token is shown once. On the host: godwit host join --manager https://m1:7800 --token-file c.token")]
    JoinToken {
        #[command(subcommand)]
        command: JoinTokenCommand,
    },
    /// Hosts' certificates, and those that are revoked (needs the role admin)
    #[command(after_help = "Examples:
  godwit control certificate list
  godwit control certificate revoke --cert admin.pem

Forgetting a host revokes its certificates. Every agent gets the list.")]
    Certificate {
        #[command(subcommand)]
        command: CertificateCommand,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum CertificateCommand {
    /// List the certificates that the manager has issued or seen, and all that are revoked
    #[command(after_help = "Example:
  godwit control certificate list")]
    List,
    /// Revoke a certificate for good: agents and managers refuse it from the next connection on
    #[command(after_help = "Examples:
  godwit control certificate revoke 5f0c9a3b77d24e1f8a6b3c2d1e0f9a8b
  godwit control certificate revoke --cert admin.pem")]
    Revoke {
        /// Its serial number
        #[arg(value_name = "SERIAL", required_unless_present = "file")]
        serial: Option<Serial>,
        /// The certificate's file, instead of its serial number
        #[arg(long = "cert", value_name = "FILE", conflicts_with = "serial")]
        file: Option<PathBuf>,
    },
    /// Print the list of revoked certificates (an X.509 CRL)
    #[command(after_help = "Example:
  godwit control certificate crl >revoked.pem")]
    Crl,
}

#[derive(Debug, Subcommand)]
pub(crate) enum JoinTokenCommand {
    /// Make a token by which one host joins, and show it this once
    #[command(after_help = "Examples:
  godwit control join-token create c >c.token
  godwit control join-token create c --valid 24h --address https://10.77.0.13:7700 >c.token")]
    Create {
        /// The host's name
        host: String,
        /// Its agent's address; without it the host says it itself
        #[arg(long, value_name = "URL")]
        address: Option<Endpoint>,
        /// How long it is good for, 168h at most
        #[arg(long, value_name = "TIME", value_parser = parse_duration, default_value = "1h")]
        valid: Duration,
    },
    /// List the join tokens, without their secrets
    #[command(after_help = "Example:
  godwit control join-token list")]
    List,
    /// Revoke a join token; a host that has joined by it stays
    #[command(after_help = "Example:
  godwit control join-token revoke 1f0c9a3b77d2")]
    Revoke {
        /// Its id
        id: String,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum ManagedHostCommand {
    /// Take a host in whose agent has a certificate of the cluster's authority
    #[command(after_help = "Examples:
  godwit control host add a --address https://10.77.0.11:7700
  godwit control host add a --address https://10.77.0.11:7700 --label rack=r1 --link 10gbit")]
    Add {
        /// Its name, as in its certificate
        name: String,
        /// Its agent's address
        #[arg(long, value_name = "URL")]
        address: Endpoint,
        /// What rules may name it by (repeatable)
        #[arg(long = "label", value_name = "KEY=VALUE", value_parser = parse_label)]
        labels: Vec<(String, String)>,
        /// What its link carries
        #[arg(long, value_name = "RATE")]
        link: Option<BitRate>,
    },
    /// List the hosts and whether they are heard
    #[command(after_help = "Examples:
  godwit control host list
  godwit control host list --json")]
    List,
    /// Show a host
    #[command(after_help = "Example:
  godwit control host show a")]
    Show {
        /// Its name
        name: String,
    },
    /// Change a host's address, labels, link or number of moves at a time
    #[command(after_help = "Examples:
  godwit control host set a --label rack=r2 --label licence=erp
  godwit control host set a --link 25gbit --most-moves 12
  godwit control host set a --most-moves default")]
    Set(SetHostArgs),
    /// Keep new VMs from a host, or let it take them again; its own VMs stay (`godwit host drain` moves them)
    #[command(after_help = "Examples:
  godwit control host maintenance a on
  godwit control host maintenance a off")]
    Maintenance {
        /// Its name
        name: String,
        /// on: it takes none; off: it takes them
        #[arg(value_enum)]
        switch: Switch,
    },
    /// Forget a host and revoke its certificates; what runs there runs on
    #[command(after_help = "Example:
  godwit control host forget a")]
    Forget {
        /// Its name
        name: String,
        /// Also one in use: its moves end as failed, its drain ends, and what runs there no manager knows of
        #[arg(long)]
        force: bool,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum TokenCommand {
    /// Make a token, and show its secret this once
    #[command(after_help = "Examples:
  godwit control token create monitoring --role viewer --days 365
  godwit control token create ana --role operator >ana.token")]
    Create {
        /// Whose it is; stands in the audit log
        name: String,
        /// What it allows: each role may do what those before it may
        #[arg(long)]
        role: RoleName,
        /// How long it is good for
        #[arg(long, value_name = "DAYS", default_value_t = 90, value_parser = clap::value_parser!(u32).range(1..=3650))]
        days: u32,
    },
    /// List the tokens, without their secrets
    #[command(after_help = "Example:
  godwit control token list")]
    List,
    /// Revoke a token: it is unknown from now on
    #[command(after_help = "Example:
  godwit control token revoke 1f0c9a3b77d2")]
    Revoke {
        /// Its id
        id: String,
    },
}

/// On or off.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Switch {
    On,
    Off,
}

/// [`Role`], as the command line has it.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum RoleName {
    /// Look
    Viewer,
    /// Work with VMs, moves and drains
    Operator,
    /// Work with hosts, rules, limits and tokens
    Admin,
}

impl From<RoleName> for Role {
    fn from(name: RoleName) -> Role {
        match name {
            RoleName::Viewer => Role::Viewer,
            RoleName::Operator => Role::Operator,
            RoleName::Admin => Role::Admin,
        }
    }
}

pub(super) fn parse_label(text: &str) -> Result<(String, String), String> {
    let (key, value) = text.split_once('=').ok_or("write KEY=VALUE")?;
    if key.is_empty() {
        Err("the key is empty".to_owned())
    } else {
        Ok((key.to_owned(), value.to_owned()))
    }
}
