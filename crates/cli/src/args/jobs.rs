//! Command line of long work.

use clap::Subcommand;

#[derive(Debug, Subcommand)]
pub(crate) enum JobCommand {
    /// List imports, exports, adoptions and moves of disks: those that run, and the latest ended
    #[command(after_help = "Examples:
  godwit job list
  godwit job list --host a --json
  godwit job list --manager https://m1:7800

A host knows its latest jobs until its agent ends. Checks of imports (--dry-run) are listed while \
they run. `godwit migration list` lists migrations.")]
    List,
    /// Cancel an import, export, move of a disk or adoption. Adoptions and live exports only until
    /// their hand-over
    #[command(after_help = "Examples:
  godwit job cancel 5b1c2a60-7d0f-4d2e-9f0e-2f5f4f7f0001

It returns when the job has ended, and can be repeated. A job that is done stays as it is (exit \
code 4).")]
    Cancel {
        /// ID of the job
        id: String,
    },
}
