//! How much of the host one QEMU may take: memory, tasks, descriptors.
//!
//! A guest that broke out of its QEMU is then bounded by what its VM could have taken anyway, with
//! an allowance for QEMU itself. The allowance is generous: a limit that a sound QEMU meets would
//! end a guest.
//!
//! Memory is bounded by a cgroup (v2) where the agent has been given one ([`VmGroups`]), else by
//! the size of the address space, which has to leave room for all that a process maps and never
//! uses.
//!
//! Files have no limit (`RLIMIT_FSIZE`): it is one number for all files of a process, disk images
//! may be of any size, and a process beyond it is ended.

mod group;

use godwit_ram::ChildLimits;

use crate::spec::{Accelerator, ResolvedSpec};

pub use group::{VmGroupError, VmGroups};

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// QEMU itself, with its firmware, display memory, caches of files and the kernel and initrd that
/// it loads.
const QEMU_BYTES: u64 = GIB;
/// TCG's translation buffer, 1 GiB at most (tcg/region.c, QEMU 7.2 to 10.0), and its maps of guest
/// pages.
const TCG_BYTES: u64 = GIB + GIB / 2;
/// A vCPU's thread: its stack, its arena of malloc, its TLB under TCG.
const VCPU_BYTES: u64 = 16 * MIB;
/// A device, or a layer of a disk: rings, requests under way, a qcow2 image's caches (32 MiB by
/// default, for each layer).
const DEVICE_BYTES: u64 = 64 * MIB;
/// Page tables of guest memory in QEMU and in KVM, and bitmaps of its pages: 1/32 of it is more
/// than all of these. A guest that runs guests has shadow pages for 2 % of its own (KVM_PERMILLE_MMU_PAGES).
const PAGE_TABLES_SHIFT: u32 = 5;

/// Address space that is reserved and never used: libraries, the sandbox, alignment of guest
/// memory.
const RESERVED_BYTES: u64 = 8 * GIB;
/// Of each thread: 8 MiB of stack and an arena of 64 MiB, which is aligned in 128 MiB (glibc 2.36).
const THREAD_RESERVED_BYTES: u64 = 136 * MIB;

/// QEMU's pool for disk requests (64 threads), 255 channels of its own migration, tracker and display
/// threads. QEMU 7.2 aborts where it cannot start a thread.
const OTHER_TASKS: u64 = 512;
/// Sockets, images, libraries, taps.
const OTHER_FILES: u64 = 4096;

/// The limits of one VM's QEMU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QemuLimits {
    /// Memory that it may use, guest memory included, in bytes.
    pub memory_bytes: u64,
    /// Address space that it may map, in bytes.
    pub address_space_bytes: u64,
    /// Threads.
    pub tasks: u64,
    pub open_files: u64,
}

impl QemuLimits {
    /// The limits of a VM.
    #[must_use]
    pub fn of(spec: &ResolvedSpec) -> QemuLimits {
        let (guest, vcpus) = (spec.memory_bytes(), u64::from(spec.vcpus));
        let devices = (spec.disks.len() + spec.nics.len() + spec.extra_devices.len()) as u64;
        let layers: usize =
            spec.disks.iter().map(|disk| disk.backing.as_ref().map_or(0, Vec::len)).sum();
        let tcg = if spec.accel == Accelerator::Tcg { TCG_BYTES } else { 0 };
        let parts = [
            guest,
            guest >> PAGE_TABLES_SHIFT,
            QEMU_BYTES,
            tcg,
            vcpus.saturating_mul(VCPU_BYTES),
            (devices + layers as u64).saturating_mul(DEVICE_BYTES),
        ];
        let memory_bytes = parts.into_iter().fold(0, u64::saturating_add);
        let tasks = OTHER_TASKS + vcpus + 8 * devices;
        let reserved = RESERVED_BYTES.saturating_add(tasks.saturating_mul(THREAD_RESERVED_BYTES));
        QemuLimits {
            memory_bytes,
            address_space_bytes: memory_bytes.saturating_add(guest / 8).saturating_add(reserved),
            tasks,
            // Each queue of a device has two event descriptors, and may have as many queues as
            // there are vCPUs.
            open_files: OTHER_FILES + 4 * vcpus * (devices + 1),
        }
    }

    /// What the process itself is limited to. `has_user`: no other process has its user.
    /// `has_group`: a cgroup bounds its memory.
    #[must_use]
    pub fn of_process(&self, has_user: bool, has_group: bool) -> ChildLimits {
        ChildLimits {
            address_space_bytes: (!has_group).then_some(self.address_space_bytes),
            // The kernel counts the tasks of a user, not of a process.
            tasks: has_user.then_some(self.tasks),
            open_files: Some(self.open_files),
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
    fn a_vm_may_have_its_memory_and_what_qemu_needs_beside_it() {
        let kvm = QemuLimits::of(&spec(65_536, "kvm"));
        assert_eq!(kvm.memory_bytes, (65_536 + 2048 + 1024 + 64 + 64) * MIB);
        assert_eq!(QemuLimits::of(&spec(65_536, "tcg")).memory_bytes, kvm.memory_bytes + TCG_BYTES);
        assert_eq!((kvm.tasks, kvm.open_files), (524, 4128));
        assert!(kvm.address_space_bytes > kvm.memory_bytes + 40 * GIB);
    }

    #[test]
    fn a_limit_that_others_would_use_up_is_not_set() {
        let limits = QemuLimits::of(&spec(64, "tcg"));
        assert_eq!(limits.of_process(false, true).tasks, None);
        assert_eq!(limits.of_process(true, true).address_space_bytes, None);
        let all = limits.of_process(true, false);
        assert_eq!(all.address_space_bytes, Some(limits.address_space_bytes));
        assert_eq!((all.tasks, all.open_files), (Some(limits.tasks), Some(limits.open_files)));
    }
}
