//! Command line of clones, templates and snapshots, and of a deletion.

use std::net::IpAddr;

use clap::{Args, Subcommand};

use super::choices::parse_label;
use crate::exit::Failure;

/// Most clones of one command.
const MOST_CLONES: u32 = 1000;

#[derive(Clone, Debug, Args)]
pub(crate) struct CloneArgs {
    /// Name of the stopped VM or template
    pub(crate) source: String,
    /// Name of the clone; with --count, followed by -1, -2 and so on
    pub(crate) name: String,
    /// Layer the clone's disks on those of the template [default for a template]
    #[arg(long, conflicts_with = "full")]
    pub(crate) linked: bool,
    /// Copy the disks [default for a VM]
    #[arg(long)]
    pub(crate) full: bool,
    /// Number of clones
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub(crate) count: Option<u32>,
    /// Address of the next NIC, in place of the source's (repeatable)
    #[arg(long = "address", value_name = "IP", conflicts_with = "count")]
    pub(crate) addresses: Vec<IpAddr>,
    /// Label of the clone, if the manager creates it (repeatable)
    #[arg(long = "label", value_name = "KEY=VALUE", value_parser = parse_label)]
    pub(crate) labels: Vec<(String, String)>,
    /// Start the clone immediately; if the start fails, the clone is removed
    #[arg(long)]
    pub(crate) start: bool,
}

impl CloneArgs {
    /// Returns the names of the clones.
    pub(crate) fn names(&self) -> Vec<String> {
        match self.count {
            None => vec![self.name.clone()],
            Some(count) => (1..=count.min(MOST_CLONES))
                .map(|number| format!("{}-{number}", self.name))
                .collect(),
        }
    }

    /// Refuses labels where there is no manager.
    pub(crate) fn refuse_labels(&self) -> Result<(), Failure> {
        match self.labels.is_empty() {
            true => Ok(()),
            false => Err(Failure::usage(
                "cannot set labels: the clone is created without a manager",
                "name a manager (--manager, or [manager] in the hosts file), or omit --label",
            )),
        }
    }
}

#[derive(Clone, Debug, Subcommand)]
pub(crate) enum SnapshotCommand {
    /// Take a snapshot; a running VM is paused meanwhile, and its memory is in the snapshot
    #[command(after_help = "Example:
  godwit vm snapshot create web before-upgrade")]
    Create {
        /// Name of the VM
        vm: String,
        /// Name of the snapshot
        name: String,
    },
    /// List the snapshots of a VM, the oldest first
    #[command(after_help = "Example:
  godwit vm snapshot list web")]
    List {
        /// Name of the VM
        vm: String,
    },
    /// Revert a stopped or suspended VM to a snapshot; what it has now is lost
    #[command(after_help = "Examples:
  godwit vm snapshot revert web before-upgrade
  godwit vm resume web")]
    Revert {
        /// Name of the VM
        vm: String,
        /// Name of the snapshot
        name: String,
    },
    /// Delete a snapshot; the VM stays as it is
    #[command(after_help = "Example:
  godwit vm snapshot delete web before-upgrade")]
    Delete {
        /// Name of the VM
        vm: String,
        /// Name of the snapshot
        name: String,
    },
}

impl SnapshotCommand {
    pub(crate) fn vm(&self) -> &str {
        match self {
            SnapshotCommand::Create { vm, .. }
            | SnapshotCommand::List { vm }
            | SnapshotCommand::Revert { vm, .. }
            | SnapshotCommand::Delete { vm, .. } => vm,
        }
    }
}

#[derive(Clone, Debug, Args)]
pub(crate) struct DeleteArgs {
    /// Name of the VM
    pub(crate) name: String,
    /// Terminate a running VM first, and delete suspended memory and snapshots. For a VM in doubt,
    /// discard its state on this host, which may be the only copy
    #[arg(long)]
    pub(crate) force: bool,
    /// Delete its own disk images, too; asks before
    #[arg(long)]
    pub(crate) delete_disks: bool,
    /// Do not ask
    #[arg(long, requires = "delete_disks")]
    pub(crate) yes: bool,
}
