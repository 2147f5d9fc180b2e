//! Command line of move limits and of host settings.

use std::str::FromStr;

use clap::{Args, Subcommand};
use godwit_api::Endpoint;
use godwit_types::BitRate;

use super::choices::parse_label;

#[derive(Debug, Subcommand)]
pub(crate) enum LimitsCommand {
    /// Show the limits for concurrent moves
    #[command(after_help = "Example:
  godwit control limits show")]
    Show,
    /// Set the limits for concurrent moves, effective immediately; running moves continue
    #[command(after_help = "Examples:
  godwit control limits set --in-all 20 --out 2
  godwit control limits set --datastore /srv/slow=2
  godwit control limits set --in-all default")]
    Set(SetLimitsArgs),
}

/// A value, or a reset to the default.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Setting<T> {
    Set(T),
    Default,
}

impl<T> Setting<T> {
    /// Returns the value for a request; `None` resets the setting.
    pub(crate) fn value(self) -> Option<T> {
        match self {
            Setting::Set(value) => Some(value),
            Setting::Default => None,
        }
    }
}

fn parse_setting<T: FromStr<Err: ToString> + Clone>(text: &str) -> Result<Setting<T>, String> {
    if text == "default" {
        return Ok(Setting::Default);
    }
    text.parse().map(Setting::Set).map_err(|error: T::Err| error.to_string())
}

fn parse_datastore(text: &str) -> Result<(String, Setting<u32>), String> {
    let (path, limit) = text.rsplit_once('=').ok_or("write PATH=N, or PATH=default")?;
    Ok((path.to_owned(), parse_setting(limit)?))
}

#[derive(Debug, Args)]
#[group(required = true, multiple = true)]
pub(crate) struct SetLimitsArgs {
    /// Moves out of each host without a limit of its own; default: as configured, or by its link
    #[arg(long, value_name = "N|default", value_parser = parse_setting::<u32>)]
    pub(crate) out: Option<Setting<u32>>,
    /// Moves into each host without a limit of its own; default: as configured, or by its link
    #[arg(long, value_name = "N|default", value_parser = parse_setting::<u32>)]
    pub(crate) into: Option<Setting<u32>>,
    /// Moves of VMs with disks on the same datastore; default: as configured, or 128
    #[arg(long, value_name = "N|default", value_parser = parse_setting::<u32>)]
    pub(crate) per_datastore: Option<Setting<u32>>,
    /// Moves in the cluster; default: as configured, or unlimited
    #[arg(long, value_name = "N|default", value_parser = parse_setting::<u32>)]
    pub(crate) in_all: Option<Setting<u32>>,
    /// Moves of VMs with disks on this datastore (repeatable)
    #[arg(long = "datastore", value_name = "PATH=N|default", value_parser = parse_datastore)]
    pub(crate) datastores: Vec<(String, Setting<u32>)>,
}

#[derive(Debug, Args)]
pub(crate) struct SetHostArgs {
    /// Name of the host
    pub(crate) name: String,
    #[command(flatten)]
    pub(crate) changes: HostChanges,
}

#[derive(Debug, Args)]
#[group(required = true, multiple = true)]
pub(crate) struct HostChanges {
    /// Address of the host's agent
    #[arg(long, value_name = "URL")]
    pub(crate) address: Option<Endpoint>,
    /// Label that rules can refer to; replaces all previous labels (repeatable)
    #[arg(long = "label", value_name = "KEY=VALUE", value_parser = parse_label)]
    pub(crate) labels: Vec<(String, String)>,
    /// Remove all labels
    #[arg(long, conflicts_with = "labels")]
    pub(crate) no_labels: bool,
    /// Speed of the host's link; default: unknown
    #[arg(long, value_name = "RATE|default", value_parser = parse_setting::<BitRate>)]
    pub(crate) link: Option<Setting<BitRate>>,
    /// Concurrent moves out of the host and into it; default: by the general limits, or its link
    #[arg(long, value_name = "N|default", value_parser = parse_setting::<u32>)]
    pub(crate) most_moves: Option<Setting<u32>>,
}
