//! Command line of imports and exports.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use godwit_api::ExportFormat;

#[derive(Clone, Debug, Args)]
pub(crate) struct ImportArgs {
    /// A libvirt domain (XML), a Proxmox VE configuration, an OVF descriptor or an OVA, recognised
    /// by its content. A file not found here is read on the host
    #[arg(required_unless_present_any = ["libvirt", "plan"],
        conflicts_with_all = ["libvirt", "plan"])]
    pub(crate) file: Option<PathBuf>,
    /// Import a domain of the host's libvirtd, which must be shut off
    #[arg(long, value_name = "DOMAIN")]
    pub(crate) libvirt: Option<String>,
    /// Import many VMs, wave by wave, as this file says (TOML)
    #[arg(long, value_name = "FILE", conflicts_with_all = ["libvirt", "name", "networks",
        "disks_in", "take_disks", "warm", "start"])]
    pub(crate) plan: Option<PathBuf>,
    /// Name of the VM [default: that of the definition]
    #[arg(long)]
    pub(crate) name: Option<String>,
    /// Network of the host for one of the definition (repeatable)
    #[arg(long = "network", value_name = "OLD=NEW", value_parser = parse_network)]
    pub(crate) networks: Vec<(String, String)>,
    /// Directory on the host with the disks, by their file names
    #[arg(long, value_name = "DIR")]
    pub(crate) disks_in: Option<PathBuf>,
    /// Use the disks where they are, without a copy; formats raw and qcow2
    #[arg(long)]
    pub(crate) take_disks: bool,
    /// Copy a disk while its guest still runs, from an NBD export or a raw image on the host; one
    /// for each disk, in the order of the definition. No VM is created yet (repeatable)
    #[arg(long, value_name = "SOURCE", conflicts_with_all = ["take_disks", "start"])]
    pub(crate) warm: Vec<String>,
    /// Run an incremental pass of --warm: copy what differs from the copies
    #[arg(long)]
    pub(crate) again: bool,
    /// Cut over: run the final pass of --warm after the guest has shut down, then create and start
    /// the VM
    #[arg(long, conflicts_with = "again")]
    pub(crate) cut_over: bool,
    /// Datastore of the copies: a directory of the host, with a manager also a name or an ID
    /// [default: auto, the best by space and latency; with --warm the first of the host's vm_dirs]
    #[arg(long, value_name = "DATASTORE", conflicts_with = "take_disks")]
    pub(crate) datastore: Option<String>,
    /// Only show what would be imported, and what changes
    #[arg(long)]
    pub(crate) dry_run: bool,
    /// Start the VM; if the start fails, nothing of it remains
    #[arg(long, conflicts_with = "dry_run")]
    pub(crate) start: bool,
}

#[derive(Clone, Debug, Args)]
pub(crate) struct ExportArgs {
    /// Name of the VM, which must be stopped unless --live is given
    pub(crate) name: String,
    /// Directory on the VM's host, in one of its directories for VMs
    #[arg(long, value_name = "DIR", required_unless_present = "live")]
    pub(crate) to: Option<PathBuf>,
    /// What to write: a libvirt domain with qcow2 images, or an OVA with VMDK images
    #[arg(long, value_enum, required_unless_present = "live")]
    pub(crate) format: Option<ExportTo>,
    /// Give the running guest to the libvirt of its host, without a stop. It must have been adopted
    /// from there
    #[arg(long, conflicts_with_all = ["to", "format"])]
    pub(crate) live: bool,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum ExportTo {
    Libvirt,
    Ova,
}

impl From<ExportTo> for ExportFormat {
    fn from(to: ExportTo) -> ExportFormat {
        match to {
            ExportTo::Libvirt => ExportFormat::Libvirt,
            ExportTo::Ova => ExportFormat::Ova,
        }
    }
}

fn parse_network(text: &str) -> Result<(String, String), String> {
    match text.rsplit_once('=') {
        Some((old, new)) if !old.is_empty() && !new.is_empty() => {
            Ok((old.to_owned(), new.to_owned()))
        }
        _ => Err("write OLD=NEW, such as vmbr0=lan".to_owned()),
    }
}
