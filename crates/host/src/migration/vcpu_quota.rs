//! CPU time of a guest's processors as a migration may take it: the cgroup of QEMU's vCPU threads.

use std::io;

use godwit_migration::drive::CpuQuota;
use godwit_qemu::VcpuGroup;

/// The cgroup of a QEMU's vCPU threads; made when it is needed, gone with this.
pub(super) struct VcpuQuota(pub(super) VcpuGroup);

impl CpuQuota for VcpuQuota {
    fn set_share(&mut self, share: Option<f64>) -> io::Result<()> {
        self.0.set_share(share).map_err(io::Error::other)
    }
}
