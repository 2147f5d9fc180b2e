//! The command line of the cluster's CPU baseline.

use clap::{Args, Subcommand};

#[derive(Debug, Subcommand)]
pub(crate) enum CpuBaselineCommand {
    /// Show the baseline, every host against it, and what all hosts could have
    #[command(after_help = "Examples:
  godwit control cpu-baseline show
  godwit control cpu-baseline show --vms")]
    Show {
        /// Also the VMs that run with another CPU, and have to be started with this one to have it
        #[arg(long)]
        vms: bool,
    },
    /// Set the baseline: new VMs get it, and none goes to a host that falls short; VMs that run keep their CPU
    #[command(after_help = "Examples:
  godwit control cpu-baseline set computed --plan
  godwit control cpu-baseline set x86-64-v3 --without old1,old2")]
    Set(SetBaselineArgs),
    /// Have no baseline any more: VMs get what their specifications say
    #[command(after_help = "Example:
  godwit control cpu-baseline clear

There is no --plan for that: it is never refused and changes no VM that runs. Hosts that fall short of the baseline, which `show` names, take VMs again.")]
    Clear,
}

#[derive(Debug, Args)]
pub(crate) struct SetBaselineArgs {
    /// computed: what the hosts have in common; or a level (x86-64-v3), or a model of QEMU's in a version
    #[arg(value_name = "MODEL|computed")]
    pub(crate) model: String,
    /// Tell what it would mean, and set nothing
    #[arg(long)]
    pub(crate) plan: bool,
    /// A host in use that may fall short of it: no VM goes there any more (repeatable, or several with commas)
    #[arg(long, value_name = "HOST", value_delimiter = ',')]
    pub(crate) without: Vec<String>,
}
