//! The command line. Every command has an example.

use std::net::IpAddr;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};
use godwit_lab::{
    BitRate, DEFAULT_PREFIX, DEFAULT_STATE_DIR, DaemonKind, Family, LabName, Loss, Rtt,
};

/// Makes hosts, networks and a client on this machine, to try Godwit with.
#[derive(Debug, Parser)]
#[command(name = "godwit-lab", version, max_term_width = 110)]
#[command(after_help = "Examples:
  godwit-lab up
  godwit-lab status
  godwit-lab guest web verify
  godwit-lab down")]
pub(crate) struct Cli {
    /// Write results as JSON, and failures as one JSON line on standard error
    #[arg(long, global = true)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) place: LabPlace,
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// Which lab of this machine.
#[derive(Debug, Args)]
pub(crate) struct LabPlace {
    /// What the names of the lab's namespaces begin with
    #[arg(long, global = true, value_name = "NAME", default_value = DEFAULT_PREFIX)]
    prefix: String,
    /// Where its files are
    #[arg(long, global = true, value_name = "DIR", default_value = DEFAULT_STATE_DIR)]
    state_dir: PathBuf,
}

impl LabPlace {
    pub(crate) fn name(&self) -> LabName {
        LabName { prefix: self.prefix.clone(), state_dir: self.state_dir.clone() }
    }
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Bring the lab up
    #[command(after_help = "Examples:
  godwit-lab up
  godwit-lab up --hosts 3 --link 1gbit --rtt 10ms --loss 0.1%
  godwit-lab up --lane 1gbit --lane 250mbit --family ipv4")]
    Up(UpArgs),
    /// Take the lab down; nothing of it is left
    #[command(after_help = "Examples:
  godwit-lab down
  godwit-lab down --prefix trial")]
    Down,
    /// Show the lab
    #[command(after_help = "Example:
  godwit-lab status --json")]
    Status,
    /// Ask a guest of the lab, from the client's namespace
    #[command(after_help = "Examples:
  godwit-lab guest web status
  godwit-lab guest web workload dirty:rate=5000,ws=256M,order=random
  godwit-lab guest web verify")]
    Guest {
        /// The VM
        vm: String,
        /// The guest's address [default: that of its first NIC that has one]
        #[arg(long, value_name = "IP")]
        address: Option<IpAddr>,
        #[command(subcommand)]
        command: GuestCommand,
    },
    /// Run a process of the lab
    #[command(hide = true)]
    Daemon {
        /// emulator, client or door
        kind: DaemonKind,
        /// Its configuration
        #[arg(long, value_name = "FILE")]
        config: PathBuf,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum GuestCommand {
    /// Show what it does and how fast
    #[command(after_help = "Example:
  godwit-lab guest web status")]
    Status,
    /// Check every page of its memory
    #[command(after_help = "Example:
  godwit-lab guest web verify")]
    Verify,
    /// Give it other work: idle, compute, dirty:rate=…,ws=…,order=…
    #[command(after_help = "Examples:
  godwit-lab guest web workload idle
  godwit-lab guest web workload dirty:rate=5000,ws=256M,order=random")]
    Workload {
        /// The work
        spec: String,
    },
}

#[derive(Debug, Args)]
pub(crate) struct UpArgs {
    /// How many hosts
    #[arg(long, value_name = "N", default_value_t = 2)]
    pub(crate) hosts: u32,
    /// Rate of each host's link on the migration network [default: as fast as the machine]
    #[arg(long, value_name = "RATE")]
    pub(crate) link: Option<BitRate>,
    /// Several migration networks, each with a NIC on each host: the rate of each one's links
    #[arg(long = "lane", value_name = "RATE", value_delimiter = ',', conflicts_with = "link")]
    pub(crate) lanes: Vec<BitRate>,
    /// Addresses on the migration networks: ipv4, ipv6 or both
    #[arg(long, value_name = "FAMILY", default_value = "both")]
    pub(crate) family: Family,
    /// The most that each TCP connection gets on a migration network [default: all of the link]
    #[arg(long, value_name = "RATE")]
    pub(crate) flow_cap: Option<BitRate>,
    /// Round-trip time between two hosts
    #[arg(long, value_name = "TIME", default_value = "0ms")]
    pub(crate) rtt: Rtt,
    /// Packet loss in each direction
    #[arg(long, value_name = "SHARE", default_value = "0%")]
    pub(crate) loss: Loss,
    /// Use the project's own link emulator also where the kernel could do it
    #[arg(long)]
    pub(crate) emulator: bool,
    /// Networks only, no agents
    #[arg(long)]
    pub(crate) no_agents: bool,
    /// Networks and agents, no manager
    #[arg(long)]
    pub(crate) no_manager: bool,
    /// The agents' and the manager's godwit [default: the one beside this program]
    #[arg(long, value_name = "PATH")]
    pub(crate) godwit: Option<PathBuf>,
    /// The agents' QEMU
    #[arg(long, value_name = "PATH")]
    pub(crate) qemu: Option<PathBuf>,
    /// The one user that all QEMUs run as; otherwise each has its own
    #[arg(long, value_name = "USER")]
    pub(crate) qemu_user: Option<String>,
    /// The directory for VMs of all hosts [default: all of this machine's]
    #[arg(long, value_name = "DIR")]
    pub(crate) vm_dir: Option<PathBuf>,
    /// Agents and migrations go unprotected; otherwise the lab has certificates of its own
    #[arg(long)]
    pub(crate) insecure: bool,
    /// The tracker library
    #[arg(long, value_name = "PATH")]
    pub(crate) tracker: Option<PathBuf>,
    /// Take a lab with other options down first
    #[arg(long)]
    pub(crate) replace: bool,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    fn parse(line: &str) -> Result<Cli, clap::Error> {
        Cli::try_parse_from(line.split_whitespace())
    }

    /// Every command with its full name, the top one first.
    fn commands() -> Vec<clap::Command> {
        let mut root = Cli::command().term_width(100);
        root.build();
        let mut commands = vec![root];
        let mut next = 0;
        while let Some(command) = commands.get(next) {
            let subs: Vec<_> =
                command.get_subcommands().filter(|sub| sub.get_name() != "help").cloned().collect();
            commands.extend(subs.into_iter().map(|sub| sub.term_width(100)));
            next += 1;
        }
        commands
    }

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_command_of_the_manual_is_accepted() {
        for line in [
            "godwit-lab up --hosts 3 --link 1gbit --rtt 10ms --loss 0.1%",
            "godwit-lab up --lane 1gbit,250mbit --family ipv6 --flow-cap 200mbit",
            "godwit-lab up --godwit /usr/bin/godwit --no-manager --insecure --replace",
            "godwit-lab down --state-dir /run/l",
            "godwit-lab --prefix trial status --json",
            "godwit-lab --json guest web status --state-dir /run/l",
            "godwit-lab guest web workload dirty:rate=5000,ws=256M",
            "godwit-lab daemon client --config /c",
        ] {
            if let Err(error) = parse(line) {
                panic!("{line}: {error}");
            }
        }
    }

    #[test]
    fn contradictory_and_unknown_options_are_refused() {
        for line in [
            "godwit-lab",
            "godwit-lab up --link 1gbit --lane 1gbit",
            "godwit-lab up --family ipv5",
            "godwit-lab guest web",
            "godwit-lab daemon nobody --config /c",
        ] {
            assert!(parse(line).is_err(), "{line}");
        }
    }

    #[test]
    fn each_command_has_examples_that_are_accepted() {
        for command in commands().into_iter().filter(|command| !command.is_hide_set()) {
            let name = command.get_bin_name().unwrap_or("godwit-lab").to_owned();
            // The VM stands between a command's words.
            let is_of_it = |line: &&str| {
                let mut typed = line.split(' ');
                name.split(' ').all(|word| typed.any(|found| found == word))
            };
            let footer = command.get_after_help().map(ToString::to_string).unwrap_or_default();
            let examples: Vec<&str> =
                footer.lines().filter_map(|line| line.strip_prefix("  ")).collect();
            assert!(examples.iter().any(is_of_it), "{name} --help has no example");
            for line in examples {
                assert!(parse(line).is_ok(), "{line} of {name} --help");
            }
        }
    }

    /// The whole help as one text: a change of the interface shows in review.
    #[test]
    fn the_help_is_as_recorded() {
        let help = |mut command: clap::Command| format!("{}\n\n", command.render_long_help());
        let text: String = commands().into_iter().map(help).collect();
        if std::env::var_os("GODWIT_RECORD").is_some() {
            std::fs::write(
                concat!(env!("CARGO_MANIFEST_DIR"), "/src/bin/godwit-lab/help.txt"),
                &text,
            )
            .unwrap();
            return;
        }
        assert!(
            text == include_str!("help.txt"),
            "the help has changed: record it with GODWIT_RECORD=1 cargo test -p godwit-lab --bins"
        );
    }
}
