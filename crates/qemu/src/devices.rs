//! Parts of a VM that the external engine cannot move, and why. QEMU's own engine may still move
//! them.

use std::path::Path;

use serde_json::Value;

use crate::inspect::{OLDEST_QEMU, QemuInfo};
use crate::spec::{Backing, DiskBus, MemoryBlock, ResolvedSpec};
use godwit_types::Fault;

/// Returns what prevents the external engine from moving this VM; may be empty.
#[must_use]
pub fn external_engine_obstacles(spec: &ResolvedSpec, qemu: &QemuInfo) -> Vec<Fault> {
    let mut obstacles = Vec::new();
    if qemu.version < OLDEST_QEMU {
        obstacles.push(Fault::new(
            "qemu-too-old",
            format!("QEMU {} at {} is older than 7.2", qemu.version_text(), qemu.path.display()),
            "install QEMU 7.2 or later and start the VM under it",
        ));
    }
    obstacles.extend(untrackable_parts(&spec.memory, &spec.extra_devices));
    obstacles
        .extend(unmovable_disks(spec.disks.iter().map(|disk| (disk.path.as_path(), disk.bus))));
    obstacles
}

/// Returns the disks that QEMU cannot migrate, whichever engine moves the memory. Of an NVMe
/// controller, QEMU says "State blocked by non-migratable device" (7.2 to 10.0).
pub fn unmovable_disks<'a>(disks: impl Iterator<Item = (&'a Path, DiskBus)>) -> Vec<Fault> {
    let unmovable = disks.filter(|(_, bus)| *bus == DiskBus::Nvme);
    let fault = |(path, _): (&Path, DiskBus)| {
        Fault::new(
            "disk-nvme",
            format!("disk {} is on bus nvme, which QEMU cannot migrate", path.display()),
            "stop the VM and put the disk on bus virtio or scsi",
        )
    };
    unmovable.map(fault).collect()
}

/// Returns the parts of a VM that prevent the external engine from moving it, whichever QEMU runs
/// it.
#[must_use]
pub fn untrackable_parts(memory: &[MemoryBlock], extra_devices: &[String]) -> Vec<Fault> {
    let mut obstacles = Vec::new();
    let private = memory.iter().enumerate().filter(|(_, block)| block.backing == Backing::Private);
    obstacles.extend(private.map(|(index, _)| {
        Fault::new(
            "memory-private",
            format!("memory block {index} is private to QEMU: no other process can read it"),
            "start the VM with backing \"shared\", or use --engine qemu",
        )
    }));
    obstacles.extend(extra_devices.iter().filter_map(|device| device_obstacle(device)));
    obstacles
}

/// Returns why a device given as a `-device` argument does not work with the external engine.
fn device_obstacle(argument: &str) -> Option<Fault> {
    let driver = driver_of(argument);
    let has = |part: &str| driver.contains(part);
    let (code, why, remedy) = if has("vhost-user") || driver.starts_with("vhost-vdpa") {
        let why = "its back end writes guest memory from its own process, which dirty tracking \
            does not see";
        ("device-vhost-user", why, "use --engine qemu, or a virtio device that QEMU itself serves")
    } else if driver.starts_with("vfio") {
        let why = "the hardware writes guest memory, which dirty tracking does not see";
        (
            "device-vfio",
            why,
            "unplug the device before the migration, or use --engine qemu if its driver can \
            migrate it",
        )
    } else if driver.starts_with("vhost-") {
        let why = "its state is in this host's kernel";
        ("device-vhost", why, "unplug the device before the migration, or use --engine qemu")
    } else if driver.starts_with("ivshmem") {
        let why = "its memory is shared with other processes, which write it undetected";
        ("device-shared-memory", why, "unplug the device before the migration")
    } else if ["pc-dimm", "nvdimm", "virtio-mem", "virtio-pmem", "sgx-epc"]
        .iter()
        .any(|name| driver.starts_with(name))
    {
        let why = "it adds memory that is not a block of the specification";
        ("device-memory", why, "give the VM this memory as a block, or use --engine qemu")
    } else {
        return None;
    };
    Some(Fault::new(code, format!("device {driver}: {why}"), remedy))
}

/// Returns the driver that a `-device` argument names, in JSON or QEMU's own syntax; lower case.
fn driver_of(argument: &str) -> String {
    let driver = match serde_json::from_str::<Value>(argument) {
        Ok(Value::Object(device)) => {
            device.get("driver").and_then(Value::as_str).map(str::to_owned)
        }
        _ => {
            let mut parts = argument.split(',');
            let first = parts.next().filter(|part| !part.contains('=')).map(str::to_owned);
            first.or_else(|| {
                argument
                    .split(',')
                    .find_map(|part| part.trim().strip_prefix("driver="))
                    .map(str::to_owned)
            })
        }
    };
    driver.unwrap_or_default().trim().to_ascii_lowercase()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::accel::AccelProbe;
    use crate::inspect::MachineType;
    use crate::size::ByteSize;
    use crate::spec::VmSpec;

    fn qemu(version: (u32, u32, u32)) -> QemuInfo {
        let machine =
            MachineType { name: "pc-q35-7.2".into(), alias: Some("q35".into()), is_default: false };
        QemuInfo {
            path: "/q".into(),
            version,
            machines: vec![machine],
            cpu_models: vec!["Westmere-v1".into()],
        }
    }

    fn codes(change: impl FnOnce(&mut VmSpec), version: (u32, u32, u32)) -> Vec<String> {
        let mut spec = VmSpec { kernel: Some("/k".into()), ..VmSpec::new("a") };
        change(&mut spec);
        let probe = AccelProbe { kvm: false, reason: String::new() };
        let spec = spec.resolve(&qemu(version), &probe).unwrap();
        let obstacles = external_engine_obstacles(&spec, &qemu(version));
        assert!(obstacles.iter().all(|obstacle| !obstacle.remedy.is_empty()));
        obstacles.into_iter().map(|obstacle| obstacle.code).collect()
    }

    #[test]
    fn devices_that_the_tracker_cannot_see_are_refused() {
        assert!(codes(|_| {}, (7, 2, 0)).is_empty());
        assert_eq!(codes(|_| {}, (7, 1, 9)), ["qemu-too-old"]);
        let private =
            MemoryBlock { size: ByteSize::from_mib(16), backing: Backing::Private, address: None };
        assert_eq!(codes(|spec| spec.memory.push(private), (10, 0, 0)), ["memory-private"]);
        let cases = [
            ("vhost-user-blk-pci,chardev=c0", vec!["device-vhost-user"]),
            ("driver=vhost-user-fs-pci,tag=t", vec!["device-vhost-user"]),
            ("id=x,driver=VFIO-pci,host=1:00.0", vec!["device-vfio"]),
            (r#"{"driver": "vfio-pci", "host": "1:00.0"}"#, vec!["device-vfio"]),
            ("vhost-vsock-pci,guest-cid=5", vec!["device-vhost"]),
            ("ivshmem-plain,memdev=m", vec!["device-shared-memory"]),
            ("virtio-mem-pci,memdev=m", vec!["device-memory"]),
            ("virtio-rng-pci", vec![]),
            (r#"{"driver": "virtio-balloon-pci", "id": "vfio"}"#, vec![]),
        ];
        for (device, expected) in cases {
            assert_eq!(
                codes(|spec| spec.extra_devices.push(device.into()), (7, 2, 0)),
                expected,
                "{device}"
            );
        }
    }
}
