//! The command line of rules about where VMs may be.

use clap::{Args, Subcommand, ValueEnum};
use godwit_api::control::RuleKind;

use super::control::parse_label;

#[derive(Debug, Subcommand)]
pub(crate) enum RuleCommand {
    /// Make a rule; no VM is moved by it, it holds for what is moved from now on
    #[command(after_help = "Examples:
  godwit control rule create db-apart apart --vm db1,db2
  godwit control rule create app-near-db together --vm app,db1 --should
  godwit control rule create licensed on --vm erp --at a,b --at-label licence=erp")]
    Create(CreateRuleArgs),
    /// List the rules: whether each is kept, and by whom it is broken
    #[command(after_help = "Example:
  godwit control rule list")]
    List,
    /// Show a rule, with every VM by which it is broken
    #[command(after_help = "Example:
  godwit control rule show db-apart")]
    Show {
        /// Its name
        name: String,
    },
    /// Delete a rule; no VM is moved by that
    #[command(after_help = "Example:
  godwit control rule delete db-apart")]
    Delete {
        /// Its name
        name: String,
    },
}

#[derive(Debug, Args)]
pub(crate) struct CreateRuleArgs {
    /// Names it
    pub(crate) name: String,
    /// What it asks of its VMs
    #[arg(value_enum)]
    pub(crate) kind: RuleKindName,
    /// A VM that it is for, there or not (repeatable, or several with commas)
    #[arg(long = "vm", value_name = "VM", required = true, value_delimiter = ',')]
    pub(crate) vms: Vec<String>,
    /// A host that on and not-on are about (repeatable, or several with commas)
    #[arg(long = "at", value_name = "HOST", value_delimiter = ',')]
    pub(crate) at: Vec<String>,
    /// Hosts that have this label, and all others named so (repeatable)
    #[arg(long = "at-label", value_name = "KEY=VALUE", value_parser = parse_label)]
    pub(crate) at_labels: Vec<(String, String)>,
    /// It may be broken where all else is worse; without this it never is by a move
    #[arg(long)]
    pub(crate) should: bool,
}

/// [`RuleKind`], as the command line has it.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum RuleKindName {
    /// All on one host
    Together,
    /// No two on one host
    Apart,
    /// On the hosts that --at and --at-label mean, and no others
    On,
    /// On none of these
    NotOn,
}

impl From<RuleKindName> for RuleKind {
    fn from(name: RuleKindName) -> RuleKind {
        match name {
            RuleKindName::Together => RuleKind::Together,
            RuleKindName::Apart => RuleKind::Apart,
            RuleKindName::On => RuleKind::On,
            RuleKindName::NotOn => RuleKind::NotOn,
        }
    }
}
