//! What a running VM can get: devices in slots for PCI, vCPUs and memory up to declared maxima.
//! Pure.
//!
//! Everything is recorded so that the destination of a move starts the same machine: a device by
//! its slot, vCPUs by their number (they are always the first of those that the machine can have,
//! with the topology that `-smp` gives to the maximum), memory by blocks with their address.

use crate::size::ByteSize;
use crate::spec::checks::MAX_VCPUS;
use crate::spec::disk::DiskBus;
use crate::spec::error::SpecError;
use crate::spec::memory::{Backing, DIMM_SLOTS, DIMM_UNIT_BYTES, MemoryBlock};
use crate::spec::{ResolvedSpec, VmSpec};

/// Most slots for devices that come while a VM runs.
pub const MOST_HOTPLUG_SLOTS: u32 = 16;

const GIB: u64 = 1 << 30;

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
pub(super) fn is_zero(number: &u32) -> bool {
    *number == 0
}

/// Checks what does not depend on the machine type.
///
/// # Errors
/// A slot is taken twice or does not exist, or a maximum is below what the VM has.
pub(super) fn check_hotplug(spec: &VmSpec) -> Result<(), SpecError> {
    let wrong = |why: String| Err(SpecError::Hotplug { why });
    let slots = spec.hotplug_slots;
    if slots > MOST_HOTPLUG_SLOTS {
        return wrong(format!("{slots} slots are more than {MOST_HOTPLUG_SLOTS}"));
    }
    if let Some(disk) = spec.disks.iter().find(|d| d.slot.is_some() && d.bus != DiskBus::Virtio) {
        return wrong(format!("a disk on bus {} has no slot", disk.bus.name()));
    }
    if spec.nics.iter().any(|nic| nic.slot.is_some() && nic.boot_order.is_some()) {
        return wrong("a NIC in a slot has no place in the boot order".to_owned());
    }
    let of_disks = spec.disks.iter().filter_map(|disk| disk.slot);
    let mut taken: Vec<u32> = spec.nics.iter().filter_map(|nic| nic.slot).chain(of_disks).collect();
    taken.sort_unstable();
    if let Some(slot) = taken.iter().find(|slot| **slot >= slots) {
        return wrong(format!("a device is in slot {slot}, and the VM has {slots} slots"));
    }
    if let Some(pair) = taken.windows(2).find(|pair| pair[0] == pair[1]) {
        return wrong(format!("two devices are in slot {}", pair[0]));
    }
    match spec.max_cpus {
        Some(max) if max > MAX_VCPUS => return Err(SpecError::Vcpus { vcpus: max }),
        Some(max) if max < spec.vcpus => {
            return wrong(format!("{} vCPUs are more than max_cpus, {max}", spec.vcpus));
        }
        _ => {}
    }
    check_max_memory(&spec.memory, spec.max_memory)
}

fn check_max_memory(blocks: &[MemoryBlock], max: Option<ByteSize>) -> Result<(), SpecError> {
    let wrong = |why: String| Err(SpecError::Hotplug { why });
    let total = total_bytes(blocks);
    let dimms = blocks.iter().filter(|block| block.address.is_some());
    match max {
        Some(max) if max.bytes() < total => {
            let total = ByteSize::from_bytes(total);
            wrong(format!("{total} of memory are more than max_memory, {max}"))
        }
        Some(max) if !max.bytes().is_multiple_of(DIMM_UNIT_BYTES) => {
            wrong(format!("max_memory, {max}, is not a multiple of 128 MiB"))
        }
        None if dimms.count() > 0 => wrong("a memory module needs max_memory".to_owned()),
        _ => Ok(()),
    }
}

pub(super) fn total_bytes(blocks: &[MemoryBlock]) -> u64 {
    blocks.iter().map(|block| block.size.bytes()).fold(0, u64::saturating_add)
}

/// Checks whether a machine type can get what a VM declares.
///
/// # Errors
/// It is not a PC.
pub(super) fn check_machine(spec: &ResolvedSpec) -> Result<(), SpecError> {
    let declares = spec.hotplug_slots > 0 || spec.max_cpus.is_some() || spec.max_memory.is_some();
    if !declares || spec.machine.starts_with("pc-") {
        return Ok(());
    }
    let why = format!("machine type \"{}\" takes nothing while it runs", spec.machine);
    Err(SpecError::Hotplug { why })
}

/// Gives each memory module the address behind the one before.
pub(super) fn place_dimms(machine: &str, blocks: &mut [MemoryBlock]) {
    let base: Vec<MemoryBlock> =
        blocks.iter().copied().filter(|block| block.address.is_none()).collect();
    let mut next = device_memory_base(machine, total_bytes(&base));
    for block in blocks.iter_mut().filter(|block| block.address.is_some()) {
        block.address = Some(next);
        next = next.saturating_add(block.size.bytes());
    }
}

/// Returns the address at which QEMU's region for memory modules begins: the first whole GiB behind
/// the memory above 4 GiB (QEMU 7.2 to 10.0: `pc_q35_init`, `pc_init1`,
/// `pc_get_device_memory_range`). QEMU refuses a module that is not in its region, so a QEMU with
/// another rule refuses the change, and nothing more.
fn device_memory_base(machine: &str, base_bytes: u64) -> u64 {
    let (from, low) = match machine.starts_with("pc-q35") {
        true => (0xb000_0000, 0x8000_0000),
        false => (0xe000_0000, 0xc000_0000),
    };
    let above = if base_bytes >= from { base_bytes.saturating_sub(low) } else { 0 };
    (4 * GIB).saturating_add(above).checked_next_multiple_of(GIB).unwrap_or(u64::MAX)
}

impl ResolvedSpec {
    /// Most vCPUs that the VM may have while it runs.
    #[must_use]
    pub fn most_vcpus(&self) -> u32 {
        self.max_cpus.unwrap_or(self.vcpus).max(self.vcpus)
    }

    /// Most memory that the VM may have while it runs, in bytes.
    #[must_use]
    pub fn most_memory_bytes(&self) -> u64 {
        self.max_memory.map_or(0, ByteSize::bytes).max(self.memory_bytes())
    }

    /// Returns the lowest slot without a device.
    #[must_use]
    pub fn free_slot(&self) -> Option<u32> {
        let of_disks = self.disks.iter().filter_map(|disk| disk.slot);
        let taken: Vec<u32> = self.nics.iter().filter_map(|nic| nic.slot).chain(of_disks).collect();
        (0..self.hotplug_slots).find(|slot| !taken.contains(slot))
    }

    /// Returns the VM with more memory: in a new module that makes it `bytes` in total.
    ///
    /// # Errors
    /// It declares no such maximum, has no slot left, or guests cannot take as much.
    pub fn with_more_memory(&self, bytes: u64) -> Result<ResolvedSpec, SpecError> {
        let wrong = |why: String| Err(SpecError::Hotplug { why });
        let (now, most) = (self.memory_bytes(), self.most_memory_bytes());
        let size = ByteSize::from_bytes;
        let Some(more) = bytes.checked_sub(now).filter(|more| *more > 0) else {
            return wrong(format!("{} are not more than it has, {}", size(bytes), size(now)));
        };
        if self.max_memory.is_none() {
            return wrong("it declares no max_memory".to_owned());
        }
        if bytes > most {
            return wrong(format!("{} are more than max_memory, {}", size(bytes), size(most)));
        }
        if !more.is_multiple_of(DIMM_UNIT_BYTES) {
            return wrong(format!(
                "a running guest takes memory in units of 128 MiB, and {} are {} more than it has",
                size(bytes),
                size(more)
            ));
        }
        if self.dimms().count() >= DIMM_SLOTS {
            return wrong(format!("all of its {DIMM_SLOTS} slots for memory are taken"));
        }
        let mut spec = self.clone();
        let backing = self.memory.first().map_or(Backing::Shared, |block| block.backing);
        spec.memory.push(MemoryBlock { size: size(more), backing, address: Some(0) });
        place_dimms(&spec.machine, &mut spec.memory);
        Ok(spec)
    }

    /// Returns the blocks that it got while it ran, each with its index.
    pub fn dimms(&self) -> impl Iterator<Item = (usize, &MemoryBlock)> {
        self.memory.iter().enumerate().filter(|(_, block)| block.address.is_some())
    }

    /// Memory that it has from the start, in bytes.
    pub(crate) fn base_memory_bytes(&self) -> u64 {
        let base = self.memory.iter().filter(|block| block.address.is_none());
        base.map(|block| block.size.bytes()).fold(0, u64::saturating_add)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::{Disk, DiskFormat, Nic};

    const MIB: u64 = 1 << 20;

    fn resolved(machine: &str, mib: u64, max: Option<u64>) -> ResolvedSpec {
        let mut spec: ResolvedSpec = serde_json::from_value(serde_json::json!({
            "name": "web", "memory": [{"size": mib * MIB}], "vcpus": 1, "accel": "tcg",
            "cpu_model": "Westmere-v1", "machine": machine, "kernel": "/boot/vmlinuz",
        }))
        .unwrap();
        spec.max_memory = max.map(ByteSize::from_mib);
        spec
    }

    #[test]
    fn modules_follow_the_memory_from_the_start_and_each_other() {
        for (machine, mib, address) in [
            ("pc-q35-7.2", 256, 4 * GIB),
            ("pc-q35-7.2", 2816, 5 * GIB),
            ("pc-q35-7.2", 4096, 6 * GIB),
            ("pc-i440fx-7.2", 2816, 4 * GIB),
            ("pc-i440fx-7.2", 4096, 5 * GIB),
        ] {
            let spec = resolved(machine, mib, Some(64 << 10));
            let more = spec.with_more_memory((mib + 128) * MIB).unwrap();
            assert_eq!(more.memory[1].address, Some(address), "{machine} {mib}");
            let more = more.with_more_memory((mib + 384) * MIB).unwrap();
            assert_eq!(more.memory[2].address, Some(address + 128 * MIB));
            assert_eq!(more.memory_bytes(), (mib + 384) * MIB);
            assert_eq!(more.base_memory_bytes(), mib * MIB);
            more.validate().unwrap();
        }
    }

    #[test]
    fn memory_beyond_what_was_declared_is_refused() {
        let why = |spec: &ResolvedSpec, mib: u64| {
            spec.with_more_memory(mib * MIB).unwrap_err().to_string()
        };
        let spec = resolved("pc-q35-7.2", 256, Some(1024));
        assert!(why(&spec, 256).contains("not more"));
        assert!(why(&spec, 1152).contains("more than max_memory, 1GiB"), "{}", why(&spec, 1152));
        assert!(why(&spec, 300).contains("units of 128 MiB"));
        assert!(why(&resolved("pc-q35-7.2", 256, None), 384).contains("declares no max_memory"));
        let mut full = resolved("pc-q35-7.2", 256, Some(8192));
        for module in 1..=DIMM_SLOTS as u64 {
            full = full.with_more_memory((256 + 128 * module) * MIB).unwrap();
        }
        assert!(why(&full, 4096).contains("slots"));
    }

    #[test]
    fn slots_and_maxima_are_checked() {
        let why = |change: &dyn Fn(&mut VmSpec)| {
            let mut spec = VmSpec { kernel: Some("/k".into()), ..VmSpec::new("web") };
            change(&mut spec);
            spec.validate().err().map(|error| error.to_string()).unwrap_or_default()
        };
        let nic = |slot| Nic { network: "lan".into(), slot: Some(slot), ..Nic::default() };
        let disk = |slot| Disk { slot: Some(slot), ..Disk::new("/d", DiskFormat::Raw) };
        assert_eq!(why(&|spec| (spec.hotplug_slots, spec.nics) = (2, vec![nic(1)])), "");
        assert!(why(&|spec| spec.nics = vec![nic(0)]).contains("has 0 slots"));
        assert!(why(&|spec| spec.hotplug_slots = 17).contains("more than 16"));
        let twice = |spec: &mut VmSpec| {
            (spec.hotplug_slots, spec.nics, spec.disks) = (4, vec![nic(3)], vec![disk(3)]);
        };
        assert!(why(&twice).contains("two devices are in slot 3"));
        let scsi = |spec: &mut VmSpec| {
            spec.disks = vec![Disk { bus: DiskBus::Scsi, ..disk(0) }];
        };
        assert!(why(&scsi).contains("bus scsi"));
        assert!(why(&|spec| (spec.vcpus, spec.max_cpus) = (4, Some(2))).contains("max_cpus, 2"));
        assert!(why(&|spec| spec.max_cpus = Some(5000)).contains("5000"));
        let small = Some(ByteSize::from_mib(512));
        assert!(why(&|spec| spec.max_memory = small).contains("max_memory, 512MiB"));
        let odd = Some(ByteSize::from_mib(1100));
        assert!(why(&|spec| spec.max_memory = odd).contains("multiple of 128 MiB"));
        let module =
            MemoryBlock { address: Some(0), ..MemoryBlock::shared(ByteSize::from_mib(128)) };
        assert!(why(&|spec| spec.memory.push(module)).contains("needs max_memory"));
        let mut other = resolved("microvm", 256, None);
        assert_eq!(check_machine(&other), Ok(()));
        other.hotplug_slots = 1;
        assert!(check_machine(&other).unwrap_err().to_string().contains("microvm"));
    }

    #[test]
    fn the_lowest_free_slot_is_taken() {
        let mut spec = resolved("pc-q35-7.2", 256, None);
        assert_eq!(spec.free_slot(), None);
        spec.hotplug_slots = 2;
        assert_eq!(spec.free_slot(), Some(0));
        spec.disks = vec![crate::spec::ResolvedDisk {
            slot: Some(0),
            ..Disk::new("/d", DiskFormat::Raw).into()
        }];
        assert_eq!(spec.free_slot(), Some(1));
    }
}
