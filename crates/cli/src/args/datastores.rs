//! Command line of datastores.

use clap::{Args, Subcommand};
use godwit_types::RateLimit;

use super::Switch;

#[derive(Debug, Subcommand)]
pub(crate) enum DatastoreCommand {
    /// List the datastores of the cluster, or of a host
    #[command(after_help = "Examples:
  godwit datastore list
  godwit datastore list --tag ssd --json
  godwit datastore list --host a")]
    List {
        /// Datastores with this tag
        #[arg(long)]
        tag: Option<String>,
    },
    /// Show a datastore: capacity, health and speed at each host, and the disks in it
    #[command(after_help = "Examples:
  godwit datastore show fast
  godwit datastore show /srv/shared --json
  godwit datastore show rbd:vms")]
    Show {
        /// ID, name or path of the datastore
        datastore: String,
    },
    /// Set the name, the description or the tags of a datastore
    #[command(after_help = "Examples:
  godwit datastore set /srv/shared --name fast --tag ssd --tag rack=1
  godwit datastore set fast --description 'all-flash NFS'
  godwit datastore set fast --reset")]
    Set(SetDatastoreArgs),
    /// Set or end the maintenance of a datastore: in maintenance it takes no new disks
    #[command(after_help = "Examples:
  godwit datastore maintenance fast on
  godwit datastore maintenance fast off")]
    Maintenance {
        /// ID, name or path of the datastore
        datastore: String,
        /// on: it takes no new disks; off: it takes disks
        #[arg(value_enum)]
        switch: Switch,
    },
    /// Drain a datastore: move each disk in it to another datastore of its VM's host, also while
    /// the guests run
    #[command(after_help = "Examples:
  godwit datastore drain old --dry-run
  godwit datastore drain old
  godwit datastore drain old --to fast --bandwidth-limit 2gbit --detach
  godwit datastore drain old --to rbd:vms --flatten
  godwit datastore drain old --cancel
  godwit datastore drain old --undo

The datastore enters maintenance and takes no new disks until the drain is undone or \
`godwit datastore maintenance old off` is run. Ctrl-C stops only this command (exit code 130); \
the drain continues.")]
    Drain(DrainDatastoreArgs),
    /// List the drains of datastores
    #[command(after_help = "Example:
  godwit datastore drains")]
    Drains,
}

#[derive(Debug, Args)]
pub(crate) struct SetDatastoreArgs {
    /// ID, name or path of the datastore
    pub(crate) datastore: String,
    /// Name, unique in the cluster; an empty one makes its path its name
    #[arg(long)]
    pub(crate) name: Option<String>,
    /// Description
    #[arg(long, value_name = "TEXT")]
    pub(crate) description: Option<String>,
    /// Tag, which replaces all others (repeatable)
    #[arg(long = "tag", value_name = "TAG")]
    pub(crate) tags: Vec<String>,
    /// Remove all tags
    #[arg(long, conflicts_with = "tags")]
    pub(crate) no_tags: bool,
    /// Remove all settings: name, description, tags and maintenance
    #[arg(long, conflicts_with_all = ["name", "description", "tags", "no_tags"])]
    pub(crate) reset: bool,
}

#[derive(Debug, Args)]
pub(crate) struct DrainDatastoreArgs {
    /// ID, name or path of the datastore
    pub(crate) datastore: String,
    /// Show which disk would go where and why, and which cannot, without moving anything
    #[arg(long, alias = "plan", conflicts_with_all = ["cancel", "undo"])]
    pub(crate) dry_run: bool,
    /// Cancel the drain: disks that wait stay, disks that move keep their old images
    #[arg(long, conflicts_with = "undo")]
    pub(crate) cancel: bool,
    /// Undo the last drain of the datastore: it takes disks again, and the moved disks return
    #[arg(long)]
    pub(crate) undo: bool,
    /// Datastore that disks may go to: ID, name or path, or a pool of Ceph as rbd:POOL (repeatable)
    /// [default: any other directory of the host]
    #[arg(long, value_name = "DATASTORE")]
    pub(crate) to: Vec<String>,
    /// Copy what the backing files have, too; otherwise a layer stays a layer on the same base
    #[arg(long)]
    pub(crate) flatten: bool,
    /// Bandwidth limit of each copy while the guest runs: at least 1mbit, or none
    #[arg(long, value_name = "RATE|none")]
    pub(crate) bandwidth_limit: Option<RateLimit>,
    /// Exit without waiting for the end
    #[arg(long)]
    pub(crate) detach: bool,
}
