//! The command line of moves and drains by the manager.

use clap::{Args, Subcommand, ValueEnum};
use godwit_api::control::MovePriority;

use super::{EngineArg, ManagerPlace, NoHost};

#[derive(Debug, Subcommand)]
pub(crate) enum MoveCommand {
    /// Ask for a VM's move; it waits for its turn, and is carried out also when nobody looks
    #[command(after_help = "Examples:
  godwit control move create web
  godwit control move create web --to b --priority high
  godwit control move create web --to b --detach

Without --detach it waits for the end, and its exit code says how the move ended. Ctrl-C ends the looking alone (exit code 130): the \
move goes on. A manager that is away for some seconds is asked again.")]
    Create {
        /// The VM
        vm: String,
        /// The host that it is to go to [default: the manager's choice]
        #[arg(long, value_name = "HOST")]
        to: Option<String>,
        /// How soon it is to come
        #[arg(long, value_enum, default_value_t = PriorityName::Normal)]
        priority: PriorityName,
        /// Who moves the memory
        #[arg(long, value_enum, default_value_t = EngineArg::Godwit)]
        engine: EngineArg,
        /// Do not wait for its end
        #[arg(long)]
        detach: bool,
    },
    /// List moves: those that wait say for what
    #[command(after_help = "Examples:
  godwit control move list
  godwit control move list --all --json")]
    List {
        /// Those that are over as well
        #[arg(long)]
        all: bool,
    },
    /// Show a move
    #[command(after_help = "Examples:
  godwit control move show v69204f1e-0c3a55d1
  godwit control move show v69204f1e-0c3a55d1 --json")]
    Show {
        /// Its id
        id: String,
    },
    /// Call a move off
    #[command(after_help = "Example:
  godwit control move cancel v69204f1e-0c3a55d1")]
    Cancel {
        /// Its id
        id: String,
    },
}

#[derive(Debug, Args)]
pub(crate) struct PreflightArgs {
    /// The VM
    pub(crate) vm: String,
    /// The host that it is to go to [default: all are ranked]
    #[arg(long, value_name = "HOST")]
    pub(crate) to: Option<String>,
    /// Have the hosts predict the move too, to the target or the best one: takes some seconds and the role operator
    #[arg(long)]
    pub(crate) predict: bool,
    #[command(flatten)]
    pub(crate) no_host: NoHost,
}

#[derive(Debug, Args)]
pub(crate) struct DrainArgs {
    /// The host
    #[arg(value_name = "HOST")]
    pub(crate) of: String,
    #[command(flatten)]
    pub(crate) place: ManagerPlace,
    /// Show who would go where and how long it would take, and move nothing
    #[arg(long, conflicts_with_all = ["cancel", "undo"])]
    pub(crate) plan: bool,
    /// Call the host's drain off: who waits stays, who is on the way arrives
    #[arg(long, conflicts_with = "undo")]
    pub(crate) cancel: bool,
    /// Undo the host's last drain: it takes VMs again, and those that had gone come back
    #[arg(long)]
    pub(crate) undo: bool,
    /// How soon its moves are to come
    #[arg(long, value_enum, default_value_t = PriorityName::Normal)]
    pub(crate) priority: PriorityName,
    /// Who moves the memory
    #[arg(long, value_enum, default_value_t = EngineArg::Godwit)]
    pub(crate) engine: EngineArg,
    /// Do not wait for its end
    #[arg(long)]
    pub(crate) detach: bool,
    #[command(flatten)]
    pub(crate) no_host: NoHost,
}

/// [`MovePriority`], as the command line has it.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum PriorityName {
    /// When nothing else waits
    Low,
    /// In its turn
    Normal,
    /// Before others
    High,
    /// Next
    Urgent,
}

impl From<PriorityName> for MovePriority {
    fn from(name: PriorityName) -> MovePriority {
        match name {
            PriorityName::Low => MovePriority::Low,
            PriorityName::Normal => MovePriority::Normal,
            PriorityName::High => MovePriority::High,
            PriorityName::Urgent => MovePriority::Urgent,
        }
    }
}
