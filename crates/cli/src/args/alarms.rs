//! Command line of alarms.

use clap::Subcommand;

#[derive(Debug, Subcommand)]
pub(crate) enum AlarmCommand {
    /// List the alarms that are raised, the oldest first
    #[command(after_help = "Examples:
  godwit control alarm list
  godwit control alarm list --open
  godwit control alarm list --json")]
    List {
        /// Only alarms that nobody has acknowledged
        #[arg(long)]
        open: bool,
    },
    /// Acknowledge an alarm: the other operators see that somebody attends to it
    #[command(after_help = "Examples:
  godwit control alarm acknowledge a69204f1e-0c3a55d1
  godwit control alarm acknowledge a69204f1e-0c3a55d1 --note 'disks are ordered'")]
    Acknowledge {
        /// ID of the alarm
        id: String,
        /// Note for the other operators
        #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
        note: String,
    },
    /// Send a test notice to every receiver in the manager's configuration
    #[command(after_help = "Example:
  godwit control alarm test

The command fails if a receiver does not accept the notice. docs/alarms.md describes how to set up \
receivers.")]
    Test,
}
