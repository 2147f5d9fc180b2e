//! Composition of a fleet.

use godwit_api::{HostInfo, VmInfo};
use godwit_qemu::{DEFAULT_CPU_MODEL, Uuid};
use godwit_types::Incarnation;
use serde_json::json;

/// Composition of a fleet.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct FleetPlan {
    pub hosts: usize,
    /// Number of VMs, spread over the first hosts.
    pub vms: usize,
    /// Number of hosts that have VMs at the beginning, from the first on.
    pub hosts_with_vms: usize,
    /// Memory of the VMs, in turns, in bytes.
    pub vm_memory_bytes: Vec<u64>,
    /// Memory of a host, in bytes.
    pub host_memory_bytes: u64,
    /// Rate of a host's link in each direction, in bits per second.
    pub link_bits_per_s: u64,
    /// Speed of migrations, as a multiple of real time.
    pub speed: f64,
    /// Whether hosts have directories for VMs: one of their own, and one that all share; and a pool
    /// of Ceph.
    pub datastores: bool,
}

impl Default for FleetPlan {
    fn default() -> Self {
        FleetPlan {
            hosts: 8,
            vms: 200,
            hosts_with_vms: 8,
            vm_memory_bytes: vec![256 << 20, 512 << 20, 1 << 30],
            host_memory_bytes: 256 << 30,
            link_bits_per_s: 1_000_000_000,
            speed: 1.0,
            datastores: false,
        }
    }
}

/// Identity of the directory that all hosts share.
pub(crate) const SHARED_DATASTORE: Uuid = Uuid::from_u128(2_u128 << 96);
/// Identity of the pool of Ceph that all hosts use.
const POOL_DATASTORE: Uuid = Uuid::from_u128(3_u128 << 96);

/// Features of a server CPU of ten years ago, by QEMU's names.
const FEATURES: [&str; 24] = [
    "aes",
    "apic",
    "avx",
    "avx2",
    "bmi1",
    "bmi2",
    "cx16",
    "fma",
    "fpu",
    "lahf-lm",
    "lm",
    "movbe",
    "nx",
    "pclmulqdq",
    "pni",
    "popcnt",
    "rdtscp",
    "sse",
    "sse2",
    "sse4.1",
    "sse4.2",
    "ssse3",
    "syscall",
    "xsave",
];

impl FleetPlan {
    /// Returns the name of the host with this number.
    #[must_use]
    pub fn host_name(&self, number: usize) -> String {
        format!("host-{number:04}")
    }

    /// Returns the name of the VM with this number.
    #[must_use]
    pub fn vm_name(&self, number: usize) -> String {
        format!("vm-{number:05}")
    }

    /// Returns the number of the host on which a VM begins.
    pub(crate) fn host_of(&self, vm: usize) -> usize {
        vm % self.hosts_with_vms.clamp(1, self.hosts.max(1))
    }

    /// Returns the state of a host without VMs. Built from JSON, so that fields of later versions
    /// get their defaults.
    pub(crate) fn host(&self, number: usize) -> Result<HostInfo, serde_json::Error> {
        let (vm_dirs, datastores) = self.datastores_of(number);
        serde_json::from_value(json!({
            "vm_dirs": vm_dirs, "datastores": datastores,
            "name": self.host_name(number), "version": env!("CARGO_PKG_VERSION"),
            "kernel": "6.1.0-simulated", "qemu": "/usr/bin/qemu-system-x86_64",
            "qemu_version": "10.0.0", "kvm": true, "kvm_reason": "simulated QEMU",
            "cpu": {
                "vendor": "GenuineIntel", "name": "simulated", "accel": "kvm",
                "level": "x86-64-v3", "features": FEATURES,
                "models": [DEFAULT_CPU_MODEL, "x86-64-v2", "x86-64-v3"],
                "generations": {
                    DEFAULT_CPU_MODEL: { "features": FEATURES, "aliases": ["Westmere"] },
                },
            },
            "logical_cores": 32, "load_average_1min": 4.0,
            "memory_total_bytes": self.host_memory_bytes,
            "memory_available_bytes": self.host_memory_bytes, "memory_committed_bytes": 0,
            "huge_pages": true, "migration_addresses": ["127.0.0.1"],
            "networks": { "lan": { "bridge": "br0" } }, "peers": {}, "vms": 0,
        }))
    }

    /// Returns the directories for VMs and the pool of a host, and what its agent says of them.
    fn datastores_of(&self, number: usize) -> (Vec<&'static str>, serde_json::Value) {
        if !self.datastores {
            return (Vec::new(), json!({}));
        }
        let speed = |write_us: u64| {
            json!({ "write_us": write_us, "read_us": write_us / 2,
                "write_bytes_per_s": 200_000_000_000 / write_us,
                "read_bytes_per_s": 400_000_000_000 / write_us,
                "measured_unix_ms": 1_795_000_000_000_u64 })
        };
        let of = |identity: u128, kind: &str, free_bytes: u64, write_us: u64| {
            json!({ "identity": Uuid::from_u128(identity), "kind": kind, "health": "ok",
                "total_bytes": 4_u64 << 40, "free_bytes": free_bytes,
                "promised_bytes": 6_u64 << 40, "speed": speed(write_us) })
        };
        let own = (1_u128 << 96) + number as u128;
        let datastores = json!({
            "/srv/local": of(own, "xfs", 1 << 40, 8_000),
            "/srv/shared": of(SHARED_DATASTORE.as_u128(), "nfs", 3 << 40, 600),
            "rbd:vms": { "identity": POOL_DATASTORE, "kind": "ceph-rbd", "health": "ok",
                "total_bytes": 40_u64 << 40, "free_bytes": 30_u64 << 40,
                "promised_bytes": 20_u64 << 40 },
        });
        // Of /srv nothing is known: it is no place for new disks.
        (vec!["/srv/local", "/srv/shared", "/srv", "rbd:vms"], datastores)
    }

    /// Returns the state of a VM that was just created on the host. Each has its own incarnation.
    pub(crate) fn vm(&self, number: usize, host: &str) -> Result<VmInfo, serde_json::Error> {
        let turns = self.vm_memory_bytes.len().max(1);
        let memory_bytes = self.vm_memory_bytes.get(number % turns).copied().unwrap_or(256 << 20);
        let name = self.vm_name(number);
        let address =
            format!("10.{}.{}.{}", 64 + (number >> 16), (number >> 8) & 255, number & 255);
        let incarnation = Incarnation::new(Uuid::new_v4().as_u128());
        serde_json::from_value(json!({
            "name": name, "host": host, "state": "running", "incarnation": incarnation, "epoch": 1,
            "pid": 1000 + number, "memory_bytes": memory_bytes, "vcpus": 2,
            "accel": "kvm", "machine": "pc-q35-10.0", "migration": null, "addresses": [address],
            "spec": {
                "name": name, "memory": memory_bytes.to_string(), "vcpus": 2,
                "kernel": "/srv/images/vmlinuz", "accel": "kvm", "machine": "pc-q35-10.0",
                "uuid": Uuid::new_v4(),
            },
        }))
    }
}
