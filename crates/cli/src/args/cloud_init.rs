//! Options for the guest's first boot, by cloud-init.

use std::path::PathBuf;

use clap::Args;

/// Options for cloud-init. Any of them gives the VM a disk for cloud-init.
#[derive(Clone, Debug, Default, Args)]
#[group(multiple = true)]
#[command(next_help_heading = "First boot (cloud-init in the guest)")]
pub(crate) struct CloudInitArgs {
    /// Give the VM the disk for cloud-init, with the VM's name as the host name and DHCP on all
    /// NICs, unless other options say otherwise
    #[arg(long)]
    pub(crate) cloud_init: bool,
    /// Name of the guest's first user [default: that of the image]
    #[arg(long, value_name = "NAME")]
    pub(crate) user: Option<String>,
    /// File with public SSH keys of that user, one a line (repeatable)
    #[arg(long, value_name = "FILE")]
    pub(crate) ssh_key: Vec<PathBuf>,
    /// File with the hash of that user's password, as `openssl passwd -6` prints it; - reads the
    /// standard input
    #[arg(long, value_name = "FILE")]
    pub(crate) password_hash: Option<PathBuf>,
    /// Host name of the guest [default: the VM's name]
    #[arg(long, value_name = "NAME")]
    pub(crate) hostname: Option<String>,
    /// Network settings of a NIC in the guest: dhcp or ADDRESS/PREFIX[,ADDRESS/PREFIX][,gateway=IP]
    /// [,dns=IP] (repeatable, in the order of the NICs) [default: dhcp]
    #[arg(long, value_name = "SETTINGS")]
    pub(crate) ip: Vec<String>,
    /// File with user data for cloud-init, at most 64 KiB
    #[arg(long, value_name = "FILE")]
    pub(crate) user_data: Option<PathBuf>,
}
