//! CPU time of a guest's vCPUs, limited by a migration: the cgroup of QEMU's vCPU threads.

use std::io;

use godwit_migration::drive::CpuQuota;
use godwit_qemu::VcpuGroup;

/// Cgroup of a QEMU's vCPU threads; created on demand and removed when dropped.
pub(super) struct VcpuQuota(pub(super) VcpuGroup);

impl CpuQuota for VcpuQuota {
    fn set_share(&mut self, share: Option<f64>) -> io::Result<()> {
        self.0.set_share(share).map_err(io::Error::other)
    }
}
