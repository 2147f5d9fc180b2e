//! Command line of the cluster's CPU baseline.

use clap::{Args, Subcommand};

#[derive(Debug, Subcommand)]
pub(crate) enum CpuBaselineCommand {
    /// Show the baseline, compare every host with it, and list baselines that all hosts satisfy
    #[command(after_help = "Examples:
  godwit control cpu-baseline show
  godwit control cpu-baseline show --vms")]
    Show {
        /// Also list the running VMs with another CPU, which must be restarted to get the baseline
        #[arg(long)]
        vms: bool,
    },
    /// Set the baseline: new VMs get it, and no VM moves to a host that does not satisfy it;
    /// running VMs keep their CPU
    #[command(after_help = "Examples:
  godwit control cpu-baseline set computed --plan
  godwit control cpu-baseline set x86-64-v3 --without old1,old2")]
    Set(SetBaselineArgs),
    /// Remove the baseline: VMs get the CPU of their specifications
    #[command(after_help = "Example:
  godwit control cpu-baseline clear

There is no --plan: the command is never refused and changes no running VM. Hosts that do not \
satisfy the baseline, which `show` lists, accept VMs again.")]
    Clear,
}

#[derive(Debug, Args)]
pub(crate) struct SetBaselineArgs {
    /// computed for the CPU common to the hosts, a level (x86-64-v3), or a versioned QEMU model
    #[arg(value_name = "MODEL|computed")]
    pub(crate) model: String,
    /// Show the consequences without setting the baseline
    #[arg(long)]
    pub(crate) plan: bool,
    /// Host in use that is exempt from the baseline: no VM moves to it any more (repeatable, or
    /// separated by commas)
    #[arg(long, value_name = "HOST", value_delimiter = ',')]
    pub(crate) without: Vec<String>,
}
