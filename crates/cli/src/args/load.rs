//! Command line of the load of VMs, hosts, datastores and the cluster.

use std::time::Duration;

use clap::Args;
use godwit_api::control::{LoadResolution, TopBy};

use super::choices::{LOAD_RESOLUTIONS, TOPS, one_of};
use super::place::{ManagerPlace, NoHost};
use crate::units::parse_duration;

#[derive(Debug, Args)]
pub(crate) struct TopArgs {
    #[command(flatten)]
    pub(crate) place: ManagerPlace,
    #[command(flatten)]
    pub(crate) no_host: NoHost,
    /// Order
    #[arg(long, value_parser = one_of::<TopBy>(TOPS), default_value = "cpu")]
    pub(crate) by: TopBy,
    /// Most hosts and most VMs to show
    #[arg(
        long,
        value_name = "N",
        default_value_t = 20,
        value_parser = clap::value_parser!(u16).range(1..=1000)
    )]
    pub(crate) limit: u16,
    /// Print once and exit; so it does with --json, and where the output is no terminal
    #[arg(long)]
    pub(crate) once: bool,
}

#[derive(Debug, Args)]
pub(crate) struct LoadArgs {
    /// vm:NAME, host:NAME, datastore:NAME or cluster; a VM that is gone by its UUID, vm:UUID
    #[arg(value_name = "OBJECT")]
    pub(crate) object: String,
    /// Time before the present at which the output begins
    #[arg(long, value_name = "TIME", value_parser = parse_duration, default_value = "1h")]
    pub(crate) since: Duration,
    /// Resolution [default: the finest one that reaches back so far]
    #[arg(long, value_parser = one_of::<LoadResolution>(LOAD_RESOLUTIONS))]
    pub(crate) resolution: Option<LoadResolution>,
}
