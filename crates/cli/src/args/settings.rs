//! Options for the settings of a VM that its guest does not see.

use std::time::Duration;

use clap::{Args, ValueEnum};
use godwit_qemu::{OnCrash, RestartPriority};

use super::choices::{RESTART_PRIORITIES, one_of};
use crate::units::parse_duration;

/// Options for description, tags, the start with the host, and restarts after crashes and after the
/// failure of the host. They also change while the VM runs.
#[derive(Clone, Debug, Default, Args)]
#[group(multiple = true)]
pub(crate) struct SettingsArgs {
    /// Description, up to 4096 bytes; empty removes it
    #[arg(long, value_name = "TEXT")]
    pub(crate) description: Option<String>,
    /// Tag for filtering lists of VMs (repeatable)
    #[arg(long = "tag", value_name = "TAG")]
    pub(crate) tags: Vec<String>,
    /// Whether the VM starts with its host [default: off]
    #[arg(long, value_name = "ON")]
    pub(crate) autostart: Option<OnOff>,
    /// Place in the order of start, lowest first; implies --autostart on [default: after those with
    /// a place]
    #[arg(long, value_name = "N")]
    pub(crate) autostart_order: Option<u32>,
    /// Time between this start and the next VM's, at most 1h; implies --autostart on [default: 0s]
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    pub(crate) autostart_delay: Option<Duration>,
    /// VM of the same host that is started before this one, up to 32 (repeatable); implies
    /// --autostart on; empty removes them
    #[arg(long, value_name = "VM")]
    pub(crate) autostart_after: Vec<String>,
    /// Restart of the VM when its QEMU has ended by itself, its guest has panicked, or its watchdog
    /// has powered it off: never, always, or at most N times within an hour, 1 to 100
    /// [default: never]
    #[arg(long, value_name = "POLICY", value_parser = parse_on_crash)]
    pub(crate) on_crash: Option<OnCrash>,
    /// Restart of the VM on another host when its host fails, with this priority; the cluster must
    /// have HA turned on [default: none]
    #[arg(
        long,
        value_name = "PRIORITY",
        value_parser = one_of::<RestartPriority>(RESTART_PRIORITIES)
    )]
    pub(crate) protect: Option<RestartPriority>,
    /// Restart of the VM on another host by the hosts' agents alone, for the VM of a single
    /// manager; its disks must be on one shared datastore
    #[arg(long, conflicts_with = "protect")]
    pub(crate) protect_by_agents: bool,
}

/// Parses `--on-crash`.
fn parse_on_crash(text: &str) -> Result<OnCrash, String> {
    match text {
        "never" => Ok(OnCrash::Never),
        "always" => Ok(OnCrash::Always),
        number => number
            .parse()
            .map(OnCrash::Times)
            .map_err(|_| "write never, always, or a number of restarts within an hour".to_owned()),
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum OnOff {
    On,
    Off,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_policy_for_crashes_is_a_word_or_a_number() {
        assert_eq!(parse_on_crash("never"), Ok(OnCrash::Never));
        assert_eq!(parse_on_crash("always"), Ok(OnCrash::Always));
        assert_eq!(parse_on_crash("3"), Ok(OnCrash::Times(3)));
        for wrong in ["", "-1", "often", "3 times"] {
            assert!(parse_on_crash(wrong).unwrap_err().contains("always"));
        }
    }
}
