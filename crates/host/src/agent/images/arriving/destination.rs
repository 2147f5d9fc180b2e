//! Decides which kind of place a request for arriving disks names. No other module decides that.

use std::path::{Path, PathBuf};

use godwit_api::ArrivingDisks;
use godwit_qemu::{DiskFormat, ThinPool, is_thin_pool};

use super::devices;

/// Kind of place for the images of a transfer.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Destination<'a> {
    /// Directories of files.
    Files,
    /// A pool of Ceph, or the namespace of one: `POOL` or `POOL/NAMESPACE`, well formed or not.
    Ceph(&'a str),
    /// A thin pool of LVM, in which volumes are made.
    ThinPool(ThinPool),
    /// Block devices that exist.
    Devices,
}

impl Destination<'_> {
    /// Returns the kind of place that a request names.
    pub(super) fn of(request: &ArrivingDisks) -> Destination<'_> {
        let to = request.to.as_deref();
        if let Some(pool) = to.and_then(Path::to_str).and_then(|to| to.strip_prefix("rbd:")) {
            return Destination::Ceph(pool);
        }
        match to.and_then(ThinPool::of) {
            Some(pool) => Destination::ThinPool(pool),
            None if devices::are_wanted(request) => Destination::Devices,
            None => Destination::Files,
        }
    }

    /// Returns the only storage that it is on; `None`: each disk has its own.
    pub(super) fn storage(&self) -> Option<PathBuf> {
        match self {
            Destination::Ceph(pool) => Some(format!("rbd:{pool}").into()),
            Destination::ThinPool(pool) => Some(pool.place()),
            Destination::Files | Destination::Devices => None,
        }
    }
}

/// Checks that disks can be where a request wants them.
///
/// # Errors
/// What is wrong with it.
pub(super) fn check(request: &ArrivingDisks) -> Result<(), &'static str> {
    let has_others = request.disks.iter().any(|disk| disk.format != DiskFormat::Raw);
    match Destination::of(request) {
        Destination::Files if request.to.as_deref().is_some_and(is_thin_pool) => {
            Err("they are to be in a thin pool whose name is not lvm:GROUP/POOL")
        }
        Destination::Ceph(_) if has_others => {
            Err("one of them is to be in a pool of Ceph and is not raw")
        }
        Destination::ThinPool(_) if has_others => {
            Err("one of them is to be in a thin pool and is not raw")
        }
        // A device that exists is overwritten. A volume that is made has nothing.
        Destination::Ceph(_) | Destination::ThinPool(_) if devices::are_wanted(request) => {
            Err("they are to be in a pool and on block devices")
        }
        Destination::Devices => devices::check(request),
        Destination::Files | Destination::Ceph(_) | Destination::ThinPool(_) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use godwit_api::{ArrivingDisk, OntoDevice};
    use godwit_qemu::{Uuid, VmName};

    use super::*;

    fn request(to: Option<&str>, format: DiskFormat, onto: bool) -> ArrivingDisks {
        let disk = ArrivingDisk {
            path: "/srv/web.raw".into(),
            format,
            virtual_bytes: 1 << 20,
            used_bytes: 0,
            base: Vec::new(),
            onto: onto.then_some(OntoDevice { overwrite: false, source: None }),
        };
        ArrivingDisks {
            transfer: format!("{:032x}", 7),
            vm: VmName::new("web").unwrap(),
            uuid: Uuid::nil(),
            from: "b".into(),
            to: to.map(Into::into),
            disks: vec![disk],
        }
    }

    #[test]
    fn the_place_decides_the_kind() {
        let raw = DiskFormat::Raw;
        let thin = ThinPool::of(Path::new("lvm:vg0/thin0")).unwrap();
        for (to, onto, kind, storage) in [
            (None, false, Destination::Files, None),
            (Some("/ssd"), false, Destination::Files, None),
            (Some("rbd:vms"), false, Destination::Ceph("vms"), Some("rbd:vms")),
            (Some("rbd:vms/a"), false, Destination::Ceph("vms/a"), Some("rbd:vms/a")),
            (Some("lvm:vg0/thin0"), false, Destination::ThinPool(thin), Some("lvm:vg0/thin0")),
            (Some("/dev/vg0"), true, Destination::Devices, None),
        ] {
            let asked = request(to, raw, onto);
            assert_eq!(Destination::of(&asked), kind, "{to:?}");
            assert_eq!(kind.storage().as_deref(), storage.map(Path::new), "{to:?}");
            check(&asked).unwrap();
        }
    }

    #[test]
    fn pools_and_devices_have_raw_disks_and_one_of_them_alone() {
        for to in ["rbd:vms", "lvm:vg0/thin0"] {
            assert!(check(&request(Some(to), DiskFormat::Qcow2, false)).is_err(), "{to}");
            assert!(check(&request(Some(to), DiskFormat::Raw, true)).is_err(), "{to}");
        }
        assert!(check(&request(Some("/dev/vg0"), DiskFormat::Qcow2, true)).is_err());
        check(&request(Some("/ssd"), DiskFormat::Qcow2, false)).unwrap();
        for bad in ["lvm:", "lvm:vg0", "lvm:-f/thin0", "lvm:vg0/thin0/web"] {
            assert!(check(&request(Some(bad), DiskFormat::Raw, false)).is_err(), "{bad}");
        }
    }
}
