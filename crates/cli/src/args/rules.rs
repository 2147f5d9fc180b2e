//! Command line of placement rules.

use clap::{Args, Subcommand};
use godwit_api::control::RuleKind;

use super::choices::{RULE_KINDS, one_of, parse_label};

#[derive(Debug, Subcommand)]
pub(crate) enum RuleCommand {
    /// Create a placement rule. It moves no VM by itself and applies to later moves
    #[command(after_help = "Examples:
  godwit control rule create db-apart apart --vm db1,db2
  godwit control rule create app-near-db together --vm app,db1 --should
  godwit control rule create licensed on --vm erp --at a,b --at-label licence=erp")]
    Create(CreateRuleArgs),
    /// List the rules, with their state and the VMs that violate them
    #[command(after_help = "Example:
  godwit control rule list")]
    List,
    /// Show a rule, with every VM that violates it
    #[command(after_help = "Example:
  godwit control rule show db-apart")]
    Show {
        /// Name of the rule
        name: String,
    },
    /// Delete a rule; no VM moves because of that
    #[command(after_help = "Example:
  godwit control rule delete db-apart")]
    Delete {
        /// Name of the rule
        name: String,
    },
}

#[derive(Debug, Args)]
pub(crate) struct CreateRuleArgs {
    /// Name of the rule
    pub(crate) name: String,
    /// Constraint on the VMs
    #[arg(value_parser = one_of::<RuleKind>(RULE_KINDS))]
    pub(crate) kind: RuleKind,
    /// VM that the rule applies to; it need not exist (repeatable, or separated by commas)
    #[arg(long = "vm", value_name = "VM", required = true, value_delimiter = ',')]
    pub(crate) vms: Vec<String>,
    /// Host for on and not-on (repeatable, or separated by commas)
    #[arg(long = "at", value_name = "HOST", value_delimiter = ',')]
    pub(crate) at: Vec<String>,
    /// Label that hosts for on and not-on must have, together with all other given labels
    /// (repeatable)
    #[arg(long = "at-label", value_name = "KEY=VALUE", value_parser = parse_label)]
    pub(crate) at_labels: Vec<(String, String)>,
    /// Allow violations if every alternative is worse; without this, no move violates the rule
    #[arg(long)]
    pub(crate) should: bool,
}
