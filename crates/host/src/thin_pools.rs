//! Thin pools of LVM on this host that disks may arrive in: what the configuration says of them,
//! and LVM's program ([`Lvm`]), the only one that looks at them and changes them. It knows no VMs
//! and no transfers.

mod lvm;

use std::path::{Path, PathBuf};

use godwit_qemu::ThinPool;

use crate::block_devices;

pub(crate) use lvm::{ARRIVING_TAG, Lvm, LvmError, PoolState, Seen, ThinVolume};

/// Returns the first invalid entry of the configuration: its key, what is wrong, and the remedy.
/// `devices`: block devices that VMs may use.
pub(crate) fn problem_of(
    pools: &[ThinPool],
    devices: &[PathBuf],
) -> Option<(String, String, &'static str)> {
    pools.iter().enumerate().find_map(|(index, pool)| {
        if pools.iter().take(index).any(|other| other == pool) {
            let why = format!("{pool} is named twice");
            return Some((format!("thin_pools[{index}].pool"), why, "remove one of the two"));
        }
        // The volumes are block devices of VMs as any others.
        if block_devices::allows(devices, &pool.device("any")) {
            return None;
        }
        let key = format!("thin_pools[{index}].group");
        let why = format!("block_devices does not have /dev/{}", pool.group());
        Some((key, why, "add that directory to block_devices, so that VMs may use its volumes"))
    })
}

/// Returns the pool of the configuration that a place names.
pub(crate) fn find<'a>(pools: &'a [ThinPool], place: &Path) -> Option<&'a ThinPool> {
    pools.iter().find(|pool| pool.place() == place)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_volumes_of_a_pool_are_devices_for_vms() {
        let pool = |place: &str| ThinPool::of(Path::new(place)).unwrap();
        let pools = [pool("lvm:vg0/thin0"), pool("lvm:vg1/thin0")];
        let both = ["/dev/vg0", "/dev/vg1"].map(PathBuf::from);
        assert_eq!(problem_of(&pools, &both), None);
        assert_eq!(problem_of(&pools, &both[..1]).unwrap().0, "thin_pools[1].group");
        let twice = [pools[0].clone(), pools[0].clone()];
        assert_eq!(problem_of(&twice, &both).unwrap().0, "thin_pools[1].pool");
        // A directory of files has no volumes.
        let shm = [PathBuf::from("/dev/shm")];
        assert!(problem_of(&[pool("lvm:shm/thin0")], &shm).is_some());
        assert_eq!(find(&pools, Path::new("lvm:vg1/thin0")), Some(&pools[1]));
        assert_eq!(find(&pools, Path::new("lvm:vg1/other")), None);
    }
}
