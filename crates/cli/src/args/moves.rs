//! Command line of moves and drains through the manager.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use godwit_api::control::MovePriority;
use godwit_types::EngineKind;

use super::choices::{ENGINES, PRIORITIES, one_of};
use super::place::{ManagerPlace, NoHost};
use super::travelling::TravellingArgs;

#[derive(Debug, Subcommand)]
pub(crate) enum MoveCommand {
    /// Queue a move of a VM; the manager carries it out even if this command ends
    #[command(after_help = "Examples:
  godwit control move create web
  godwit control move create web --to b --priority high
  godwit control move create web --to b --detach
  godwit control move create web --to b --with-disks

Without --detach, the command waits for the end of the move, and its exit code gives the \
result. Ctrl-C stops only this command (exit code 130); the move continues. If the manager is \
unreachable for several seconds, the command retries.")]
    Create {
        /// Name of the VM
        vm: String,
        /// Target host [default: chosen by the manager]
        #[arg(long, value_name = "HOST")]
        to: Option<String>,
        /// Priority in the queue
        #[arg(long, value_parser = one_of::<MovePriority>(PRIORITIES), default_value = "normal")]
        priority: MovePriority,
        /// Engine that transfers the memory
        #[arg(long, value_parser = one_of::<EngineKind>(ENGINES), default_value = "godwit")]
        engine: EngineKind,
        #[command(flatten)]
        disks: TravellingArgs,
        /// Exit without waiting for the end
        #[arg(long)]
        detach: bool,
    },
    /// List moves, with the reason for those that wait
    #[command(after_help = "Examples:
  godwit control move list
  godwit control move list --all --json")]
    List {
        /// Include moves that have ended
        #[arg(long)]
        all: bool,
    },
    /// Show a move
    #[command(after_help = "Examples:
  godwit control move show v69204f1e-0c3a55d1
  godwit control move show v69204f1e-0c3a55d1 --json")]
    Show {
        /// ID of the move
        id: String,
    },
    /// Cancel a move
    #[command(after_help = "Example:
  godwit control move cancel v69204f1e-0c3a55d1")]
    Cancel {
        /// ID of the move
        id: String,
    },
}

#[derive(Debug, Args)]
pub(crate) struct PreflightArgs {
    /// Name of the VM
    pub(crate) vm: String,
    /// Target host [default: rank all hosts]
    #[arg(long, value_name = "HOST")]
    pub(crate) to: Option<String>,
    /// Let the hosts predict the move to the target or the best host; takes several seconds and
    /// requires the role operator
    #[arg(long)]
    pub(crate) predict: bool,
    /// Check a move in which the disks travel with the VM
    #[arg(long)]
    pub(crate) with_disks: bool,
    /// Directory for the images at the target [default: that of each image]
    #[arg(long, value_name = "DIR", requires = "with_disks")]
    pub(crate) disks_to: Option<PathBuf>,
    /// Check a move that copies what the backing files have, too
    #[arg(long, requires = "with_disks")]
    pub(crate) flatten_disks: bool,
    /// Check a move that overwrites block devices with content
    #[arg(long, requires = "with_disks")]
    pub(crate) overwrite_devices: bool,
    #[command(flatten)]
    pub(crate) no_host: NoHost,
}

#[derive(Debug, Args)]
pub(crate) struct DrainArgs {
    /// Host to drain
    #[arg(value_name = "HOST")]
    pub(crate) of: String,
    #[command(flatten)]
    pub(crate) place: ManagerPlace,
    /// Show the targets and the predicted duration without moving anything
    #[arg(long, conflicts_with_all = ["cancel", "undo"])]
    pub(crate) plan: bool,
    /// Cancel the drain: queued VMs stay, running migrations complete
    #[arg(long, conflicts_with = "undo")]
    pub(crate) cancel: bool,
    /// Undo the last drain of the host: it accepts VMs again, and the moved VMs return
    #[arg(long)]
    pub(crate) undo: bool,
    /// Priority of the drain's moves
    #[arg(long, value_parser = one_of::<MovePriority>(PRIORITIES), default_value = "normal")]
    pub(crate) priority: MovePriority,
    /// Engine that transfers the memory
    #[arg(long, value_parser = one_of::<EngineKind>(ENGINES), default_value = "godwit")]
    pub(crate) engine: EngineKind,
    #[command(flatten)]
    pub(crate) disks: TravellingArgs,
    /// Exit without waiting for the end
    #[arg(long)]
    pub(crate) detach: bool,
    #[command(flatten)]
    pub(crate) no_host: NoHost,
}
