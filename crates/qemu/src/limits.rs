//! Limits of one QEMU: memory, tasks, descriptors.
//!
//! They confine a guest that broke out of its QEMU to what its VM could have used anyway, with an
//! allowance for QEMU itself. The allowance is generous: a limit that an intact QEMU reaches would
//! end a guest.
//!
//! Memory is limited by a cgroup (v2) if the agent has one ([`VmGroups`]), otherwise by the size of
//! the address space, which must leave room for everything that a process maps and never uses.
//!
//! File sizes have no limit (`RLIMIT_FSIZE`): it is a single number for all files of a process,
//! disk images may have any size, and a process that exceeds it is killed.

mod group;

use godwit_ram::ChildLimits;

use crate::accel::Accelerator;
use crate::rbd::is_rbd;
use crate::spec::{MOST_SCSI_DISKS, ResolvedSpec};

pub use group::{VmGroupError, VmGroups};

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// Memory of QEMU itself, with its firmware, display memory, file caches and the loaded kernel and
/// initrd.
const QEMU_BYTES: u64 = GIB;
/// Memory of TCG's translation buffer, 1 GiB at most (tcg/region.c, QEMU 7.2 to 10.0), and of its
/// maps of guest pages.
const TCG_BYTES: u64 = GIB + GIB / 2;
/// Memory of a vCPU's thread: its stack, its malloc arena, its TLB under TCG.
const VCPU_BYTES: u64 = 16 * MIB;
/// Memory of a device, or of a layer of a disk: rings, requests in flight, a qcow2 image's caches
/// (32 MiB by default, for each layer).
const DEVICE_BYTES: u64 = 64 * MIB;
/// Memory of librados and librbd for a disk in a pool of Ceph: a cache of 32 MiB, and requests in
/// flight; beside what every device has.
const RBD_BYTES: u64 = 256 * MIB;
/// Threads of librados and librbd for such a disk: about 20 (Ceph 16).
const RBD_TASKS: u64 = 64;
/// Page tables of guest memory in QEMU and in KVM, and bitmaps of its pages, as a shift: 1/32 of
/// the memory is more than all of these. A guest that runs guests has shadow pages for 2 % of its
/// own (KVM_PERMILLE_MMU_PAGES).
const PAGE_TABLES_SHIFT: u32 = 5;

/// Address space that is reserved and never used: libraries, the sandbox, alignment of guest
/// memory.
const RESERVED_BYTES: u64 = 8 * GIB;
/// Address space of each thread: 8 MiB of stack and an arena of 64 MiB, aligned in 128 MiB (glibc
/// 2.36).
const THREAD_RESERVED_BYTES: u64 = 136 * MIB;

/// Threads of QEMU's pool for disk requests (64), 255 channels of its own migration, tracker and
/// display threads. QEMU 7.2 aborts if it cannot start a thread.
const OTHER_TASKS: u64 = 512;
/// Descriptors of sockets, images, libraries, taps.
const OTHER_FILES: u64 = 4096;

/// The limits of one VM's QEMU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QemuLimits {
    /// Memory that it may use, guest memory included, in bytes.
    pub memory_bytes: u64,
    /// Address space that it may map, in bytes.
    pub address_space_bytes: u64,
    /// Number of threads.
    pub tasks: u64,
    pub open_files: u64,
}

impl QemuLimits {
    /// Computes the limits of a VM.
    #[must_use]
    pub fn of(spec: &ResolvedSpec) -> QemuLimits {
        // Devices, memory and vCPUs may come while QEMU runs.
        let (guest, vcpus) = (spec.most_memory_bytes(), u64::from(spec.most_vcpus()));
        let attached = if spec.scsi_controller { MOST_SCSI_DISKS as usize } else { 0 };
        let disks = spec.disks.len() + spec.cdroms.len() + attached;
        let slots = spec.hotplug_slots as usize;
        let adopted = spec.topology.as_ref().map_or(0, |topology| topology.parts.len());
        let devices = disks + spec.nics.len() + spec.extra_devices.len() + slots + adopted;
        let devices = devices as u64;
        let layers: usize =
            spec.disks.iter().map(|disk| disk.backing.as_ref().map_or(0, Vec::len)).sum();
        let in_pools = spec.disks.iter().filter(|disk| is_rbd(&disk.path)).count() as u64;
        let tcg = if spec.accel == Accelerator::Tcg { TCG_BYTES } else { 0 };
        let parts = [
            guest,
            guest >> PAGE_TABLES_SHIFT,
            QEMU_BYTES,
            tcg,
            vcpus.saturating_mul(VCPU_BYTES),
            (devices + layers as u64).saturating_mul(DEVICE_BYTES),
            in_pools.saturating_mul(RBD_BYTES),
        ];
        let memory_bytes = parts.into_iter().fold(0, u64::saturating_add);
        let tasks = OTHER_TASKS + vcpus + 8 * devices + RBD_TASKS * in_pools;
        let reserved = RESERVED_BYTES.saturating_add(tasks.saturating_mul(THREAD_RESERVED_BYTES));
        QemuLimits {
            memory_bytes,
            address_space_bytes: memory_bytes.saturating_add(guest / 8).saturating_add(reserved),
            tasks,
            // Each queue of a device has two event descriptors. A device may have one queue per
            // vCPU.
            open_files: OTHER_FILES + 4 * vcpus * (devices + 1),
        }
    }

    /// Returns the limits of the process itself. `has_user`: no other process has its user.
    /// `has_group`: a cgroup limits its memory.
    #[must_use]
    pub fn of_process(&self, has_user: bool, has_group: bool) -> ChildLimits {
        ChildLimits {
            address_space_bytes: (!has_group).then_some(self.address_space_bytes),
            // The kernel counts the tasks of a user, not of a process.
            tasks: has_user.then_some(self.tasks),
            open_files: Some(self.open_files),
            file_bytes: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(mib: u64, accel: &str) -> ResolvedSpec {
        serde_json::from_value(serde_json::json!({
            "name": "web", "memory": [{"size": mib * MIB}], "vcpus": 4, "cpu_model": "Westmere-v1",
            "machine": "pc-q35-7.2", "accel": accel, "kernel": "/boot/vmlinuz",
            "disks": [{"path": "/srv/web.qcow2", "format": "qcow2"}],
        }))
        .unwrap()
    }

    #[test]
    fn a_vm_may_use_its_memory_and_the_allowance_for_qemu() {
        let kvm = QemuLimits::of(&spec(65_536, "kvm"));
        assert_eq!(kvm.memory_bytes, (65_536 + 2048 + 1024 + 64 + 64) * MIB);
        assert_eq!(QemuLimits::of(&spec(65_536, "tcg")).memory_bytes, kvm.memory_bytes + TCG_BYTES);
        assert_eq!((kvm.tasks, kvm.open_files), (524, 4128));
        assert!(kvm.address_space_bytes > kvm.memory_bytes + 40 * GIB);
        let mut pooled = spec(65_536, "kvm");
        pooled.disks[0].path = "rbd:vms/web".into();
        let pooled = QemuLimits::of(&pooled);
        assert_eq!(pooled.memory_bytes, kvm.memory_bytes + RBD_BYTES);
        assert_eq!(pooled.tasks, kvm.tasks + RBD_TASKS);
    }

    #[test]
    fn a_limit_shared_with_other_processes_is_not_set() {
        let limits = QemuLimits::of(&spec(64, "tcg"));
        assert_eq!(limits.of_process(false, true).tasks, None);
        assert_eq!(limits.of_process(true, true).address_space_bytes, None);
        let all = limits.of_process(true, false);
        assert_eq!(all.address_space_bytes, Some(limits.address_space_bytes));
        assert_eq!((all.tasks, all.open_files), (Some(limits.tasks), Some(limits.open_files)));
    }
}
