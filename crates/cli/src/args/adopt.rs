//! Command line of adoptions.

use std::path::PathBuf;

use clap::Args;

#[derive(Clone, Debug, Args)]
pub(crate) struct AdoptArgs {
    /// Name of a domain of the host's libvirt
    #[arg(long, value_name = "NAME", required_unless_present = "qmp", conflicts_with = "qmp")]
    pub(crate) libvirt: Option<String>,
    /// QMP socket of a QEMU; of a VM of Proxmox VE: /var/run/qemu-server/ID.qmp
    #[arg(long, value_name = "SOCKET")]
    pub(crate) qmp: Option<PathBuf>,
    /// Name of the VM at Godwit [default: the one that the guest has]
    #[arg(long, value_name = "NAME")]
    pub(crate) name: Option<String>,
    /// Adopt the guest onto this host, which then runs it, also without a stop [default: the host
    /// that the guest is on]
    #[arg(long, value_name = "HOST")]
    pub(crate) to: Option<String>,
    /// Show what would prevent the adoption, and change nothing
    #[arg(long)]
    pub(crate) dry_run: bool,
    /// Remove the definition of libvirt's domain afterwards
    #[arg(long, conflicts_with = "qmp")]
    pub(crate) undefine: bool,
}
