//! Command line of high availability.

use clap::{Args, Subcommand};
use godwit_api::control::AdmissionPolicy;

use super::choices::{ADMISSION_POLICIES, one_of};
use super::settings::OnOff;

#[derive(Debug, Subcommand)]
pub(crate) enum HaCommand {
    /// Show the settings, the term of each host, every protected VM and the VMs that agents restart
    #[command(after_help = "Examples:
  godwit control ha show
  godwit control ha show --json

A host without a problem loses its term by itself when it fails; its protected VMs then start \
elsewhere. docs/ha.md explains terms.")]
    Show,
    /// Change the settings: whether hosts get terms, and how many hosts may fail at once (requires
    /// the role admin)
    #[command(after_help = "Examples:
  godwit control ha set --enabled on
  godwit control ha set --failures 2 --admission refuse
  godwit control ha set --enabled off

HA cannot be turned off while a VM is protected: `godwit vm set VM --unset protect` first.")]
    Set(SetHaArgs),
    /// Confirm that a doubtful host has no power, so that its protected VMs start elsewhere
    /// (requires the role operator)
    #[command(after_help = "Example:
  godwit control ha confirm-off a --term 3

Look at the host or at its power supply first. If the host still runs, its VMs run twice after \
this command, and their disks are destroyed. --term is the term that `godwit control ha show` \
lists; a later one is left alone.")]
    ConfirmOff {
        /// Name of the host
        host: String,
        /// Doubtful term of the host
        #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
        term: u64,
    },
    /// Manage the fencing devices that cut the power of hosts
    #[command(after_help = "Example:
  godwit control ha fencing test")]
    Fencing {
        #[command(subcommand)]
        command: FencingCommand,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum HostHaCommand {
    /// Confirm that the former host of a VM that agents protect has no power, so that it starts
    #[command(after_help = "Example:
  godwit host ha confirm-off b manager --term 3

Look at the former host or at its power supply first. If it still runs, the VM runs twice after \
this command, and its disks are destroyed. --term is the term that `godwit host ha` lists for the \
VM; a later one is left alone. A VM in the state resting is confirmed in the same way. The request \
goes to the agent of HOST: from another machine it needs an operator's certificate.")]
    ConfirmOff {
        /// Name of the host that should start the VM, not of the one that is off
        host: String,
        /// Name of the VM
        vm: String,
        /// Doubtful term of the VM
        #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
        term: u64,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum FencingCommand {
    /// Ask every fencing device for the power state of its host; nothing is switched (requires the
    /// role operator)
    #[command(after_help = "Example:
  godwit control ha fencing test

The command fails if a device does not answer. The manager's configuration names the devices \
(docs/ha.md).")]
    Test,
}

#[derive(Debug, Args)]
#[group(required = true, multiple = true)]
pub(crate) struct SetHaArgs {
    /// Whether hosts get terms, in which protected VMs run
    #[arg(long, value_name = "ON")]
    pub(crate) enabled: Option<OnOff>,
    /// Number of hosts that may fail at once, for the admission control
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=8))]
    pub(crate) failures: Option<u32>,
    /// What happens to the start of a protected VM that would not fit after these failures
    #[arg(long, value_parser = one_of::<AdmissionPolicy>(ADMISSION_POLICIES))]
    pub(crate) admission: Option<AdmissionPolicy>,
}
