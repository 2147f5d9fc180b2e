//! The command line of limits, and of what a host is set to.

use std::str::FromStr;

use clap::{Args, Subcommand};
use godwit_api::Endpoint;
use godwit_types::BitRate;

use super::control::parse_label;

#[derive(Debug, Subcommand)]
pub(crate) enum LimitsCommand {
    /// Show how many moves may run at a time
    #[command(after_help = "Example:
  godwit control limits show")]
    Show,
    /// Set how many moves may run at a time, from now on; what runs runs on
    #[command(after_help = "Examples:
  godwit control limits set --in-all 20 --out 2
  godwit control limits set --datastore /srv/slow=2
  godwit control limits set --in-all default")]
    Set(SetLimitsArgs),
}

/// A value, or back to what holds without one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Setting<T> {
    Set(T),
    Default,
}

impl<T> Setting<T> {
    /// As requests have it: none takes it back.
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
    /// Out of each host that has no number of its own; default: as configured, or by its link
    #[arg(long, value_name = "N|default", value_parser = parse_setting::<u32>)]
    pub(crate) out: Option<Setting<u32>>,
    /// Into each host that has no number of its own; default: as configured, or by its link
    #[arg(long, value_name = "N|default", value_parser = parse_setting::<u32>)]
    pub(crate) into: Option<Setting<u32>>,
    /// Of VMs with disks on one datastore; default: as configured, or 128
    #[arg(long, value_name = "N|default", value_parser = parse_setting::<u32>)]
    pub(crate) per_datastore: Option<Setting<u32>>,
    /// In all; default: as configured, or no limit
    #[arg(long, value_name = "N|default", value_parser = parse_setting::<u32>)]
    pub(crate) in_all: Option<Setting<u32>>,
    /// Of VMs with disks on this datastore (repeatable)
    #[arg(long = "datastore", value_name = "PATH=N|default", value_parser = parse_datastore)]
    pub(crate) datastores: Vec<(String, Setting<u32>)>,
}

#[derive(Debug, Args)]
pub(crate) struct SetHostArgs {
    /// Its name
    pub(crate) name: String,
    #[command(flatten)]
    pub(crate) changes: HostChanges,
}

#[derive(Debug, Args)]
#[group(required = true, multiple = true)]
pub(crate) struct HostChanges {
    /// Its agent's address
    #[arg(long, value_name = "URL")]
    pub(crate) address: Option<Endpoint>,
    /// What rules may name it by, in the place of all before (repeatable)
    #[arg(long = "label", value_name = "KEY=VALUE", value_parser = parse_label)]
    pub(crate) labels: Vec<(String, String)>,
    /// It has no labels any more
    #[arg(long, conflicts_with = "labels")]
    pub(crate) no_labels: bool,
    /// What its link carries; default: nobody says
    #[arg(long, value_name = "RATE|default", value_parser = parse_setting::<BitRate>)]
    pub(crate) link: Option<Setting<BitRate>>,
    /// Moves out of it and into it at a time; default: by the limits of all hosts, or its link
    #[arg(long, value_name = "N|default", value_parser = parse_setting::<u32>)]
    pub(crate) most_moves: Option<Setting<u32>>,
}
