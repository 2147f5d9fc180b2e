//! Options for the settings of a VM that its guest does not see.

use std::time::Duration;

use clap::{Args, ValueEnum};

use crate::units::parse_duration;

/// Options for description, tags and the start with the host. They also change while the VM runs.
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
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum OnOff {
    On,
    Off,
}
