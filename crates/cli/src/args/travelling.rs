//! Command line of disks that travel with a VM: the same options for `godwit migrate`, moves and
//! drains.

use std::path::PathBuf;

use clap::Args;
use godwit_api::TravellingDisks;

#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "Disks")]
pub(crate) struct TravellingArgs {
    /// Move the images of the disks too, while the guest runs; otherwise the destination must have
    /// them under the same paths
    #[arg(long)]
    pub(crate) with_disks: bool,
    /// Directory for the images at the destination, in one of its directories for VMs (vm_dirs), a
    /// directory of its block devices (block_devices), such as /dev/vg0, or a pool there: of Ceph
    /// as rbd:POOL, a thin pool of LVM as lvm:GROUP/POOL [default: the directory of each image]
    #[arg(long, value_name = "DIR", requires = "with_disks")]
    pub(crate) disks_to: Option<PathBuf>,
    /// Delete the images at the source once the VM runs at the destination [default: they stay for
    /// a day, or as keep_source_disks of that host says, and no VM uses them]
    #[arg(long, requires = "with_disks")]
    pub(crate) delete_source_disks: bool,
    /// Keep the images at the source until they are removed by request (`godwit disk kept`)
    #[arg(long, requires = "with_disks", conflicts_with = "delete_source_disks")]
    pub(crate) keep_source_disks: bool,
    /// Copy what the backing files have, too; otherwise the destination must have the same backing
    /// files
    #[arg(long, requires = "with_disks")]
    pub(crate) flatten_disks: bool,
    /// Overwrite block devices at the destination that have content [default: only empty ones are
    /// used]
    #[arg(long, requires = "with_disks")]
    pub(crate) overwrite_devices: bool,
}

impl TravellingArgs {
    /// Returns how the disks travel; `None`: they stay where they are.
    pub(crate) fn request(&self) -> Option<TravellingDisks> {
        self.with_disks.then(|| TravellingDisks {
            to: self.disks_to.clone(),
            delete_source: self.delete_source_disks,
            keep_source: self.keep_source_disks,
            flatten: self.flatten_disks,
            overwrite: self.overwrite_devices,
        })
    }
}
