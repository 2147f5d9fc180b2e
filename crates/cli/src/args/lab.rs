//! The command line of the lab.

use std::net::IpAddr;
use std::path::PathBuf;

use clap::{Args, Subcommand};
use godwit_lab::{BitRate, Family, Loss, Rtt};

use super::HostsFile;

#[derive(Debug, Subcommand)]
pub(crate) enum LabCommand {
    /// Bring the lab up
    #[command(after_help = "Examples:
  godwit lab up
  godwit lab up --hosts 3 --link 1gbit --rtt 10ms --loss 0.1%
  godwit lab up --lane 1gbit --lane 250mbit --family ipv4")]
    Up(LabUpArgs),
    /// Take the lab down; nothing of it is left
    #[command(after_help = "Examples:
  godwit lab down
  godwit lab down --prefix trial")]
    Down(LabPlace),
    /// Show the lab
    #[command(after_help = "Example:
  godwit lab status --json")]
    Status(LabPlace),
    /// Ask the lab's guest, from the client's namespace
    #[command(after_help = "Examples:
  godwit lab guest web status
  godwit lab guest web workload dirty:rate=5000,ws=256M,order=random
  godwit lab guest web verify")]
    Guest {
        /// The VM
        vm: String,
        /// The guest's address [default: that of its first NIC that has one]
        #[arg(long, value_name = "IP")]
        address: Option<IpAddr>,
        #[command(flatten)]
        hosts: HostsFile,
        #[command(subcommand)]
        command: GuestCommand,
    },
    /// A process of the lab
    #[command(hide = true)]
    Daemon {
        kind: String,
        #[arg(long)]
        config: PathBuf,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum GuestCommand {
    /// What it does and how fast
    #[command(after_help = "Example:
  godwit lab guest web status")]
    Status,
    /// Check every page of its memory
    #[command(after_help = "Example:
  godwit lab guest web verify")]
    Verify,
    /// Give it other work: idle, compute, dirty:rate=…,ws=…,order=…
    #[command(after_help = "Examples:
  godwit lab guest web workload idle
  godwit lab guest web workload dirty:rate=5000,ws=256M,order=random")]
    Workload {
        /// The work
        spec: String,
    },
}

#[derive(Debug, Args)]
pub(crate) struct LabPlace {
    /// What the names of the lab's namespaces begin with
    #[arg(long, value_name = "NAME")]
    pub(crate) prefix: Option<String>,
    /// Where its files are
    #[arg(long, value_name = "DIR")]
    pub(crate) state_dir: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct LabUpArgs {
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
    /// The agents' QEMU
    #[arg(long, value_name = "PATH")]
    pub(crate) qemu: Option<PathBuf>,
    /// The one user that all QEMUs run as; otherwise each has its own
    #[arg(long, value_name = "USER")]
    pub(crate) qemu_user: Option<String>,
    /// Agents and migrations go unprotected; otherwise the lab has certificates of its own
    #[arg(long)]
    pub(crate) insecure: bool,
    /// The tracker library
    #[arg(long, value_name = "PATH")]
    pub(crate) tracker: Option<PathBuf>,
    /// Take a lab with other options down first
    #[arg(long)]
    pub(crate) replace: bool,
    #[command(flatten)]
    pub(crate) place: LabPlace,
}
