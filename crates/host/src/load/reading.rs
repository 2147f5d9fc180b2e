//! Counters of a host and its VMs, as they were at one time.

use std::collections::BTreeMap;
use std::time::Duration;

use godwit_qemu::{DiskCounters, Uuid};

/// Number and start time of a process. Numbers are reused; pairs are not.
pub(crate) type Process = (i32, u64);

/// One reading of all counters.
#[derive(Clone, Debug, Default)]
pub(crate) struct Reading {
    /// Time since the first reading, by a clock that nobody sets.
    pub(crate) at: Duration,
    /// Time by the host's clock, in milliseconds since 1970.
    pub(crate) at_unix_ms: u64,
    pub(crate) host: HostReading,
    /// VMs by the process of their QEMU.
    pub(crate) vms: BTreeMap<Process, VmReading>,
}

/// Counters of a host.
#[derive(Clone, Debug, Default)]
pub(crate) struct HostReading {
    /// Online logical processors.
    pub(crate) cores: u32,
    /// Time of all processors in ticks: that in which they had work, and all.
    pub(crate) cpu: Option<CpuTicks>,
    pub(crate) memory_total_bytes: u64,
    pub(crate) memory_available_bytes: u64,
    /// Traffic of the interfaces that lead out of the host, by name.
    pub(crate) interfaces: BTreeMap<String, Traffic>,
}

/// Time of all processors since the host's boot, in clock ticks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CpuTicks {
    /// Time with work, and time that a hypervisor below took.
    pub(crate) busy: u64,
    /// Busy and idle time.
    pub(crate) all: u64,
}

/// Bytes of a network interface.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Traffic {
    /// Bytes that the interface has received.
    pub(crate) rx_bytes: u64,
    /// Bytes that it has sent.
    pub(crate) tx_bytes: u64,
}

/// Counters of a VM.
#[derive(Clone, Debug, Default)]
pub(crate) struct VmReading {
    pub(crate) name: String,
    pub(crate) uuid: Uuid,
    pub(crate) vcpus: u32,
    pub(crate) memory_total_bytes: u64,
    pub(crate) memory_used_bytes: u64,
    pub(crate) memory_ballooned_bytes: Option<u64>,
    pub(crate) dirty_bytes_per_s: Option<u64>,
    /// CPU time of its QEMU since that started, in nanoseconds.
    pub(crate) cpu_ns: u64,
    /// Time that each thread of its QEMU waited for a processor, in nanoseconds, by the thread's
    /// number; `None` if the kernel does not report it.
    pub(crate) waits_ns: Option<BTreeMap<i32, u64>>,
    /// Traffic of its taps, by name: what a tap has received, the guest has sent.
    pub(crate) taps: BTreeMap<String, Traffic>,
    /// `None`: its QEMU did not answer, or was not asked.
    pub(crate) disks: Option<DiskReading>,
}

/// Counters of a VM's disks, as QEMU reported them.
#[derive(Clone, Debug, Default)]
pub(crate) struct DiskReading {
    /// Time of the answer, by the clock of [`Reading::at`].
    pub(crate) at: Duration,
    /// Counters by the path of the image.
    pub(crate) counters: BTreeMap<String, DiskCounters>,
}
