//! Samples of the load of simulated hosts: every figure swings slowly, each VM's in its own rhythm.

use godwit_api::{DiskLoad, HostLoad, LOAD_INTERVAL_MS, LoadSample, StorageLoad, VmLoad, VmState};

use super::{Host, HostEvent, VmInfo, World};

/// Shortest period of a swing.
const LEAST_PERIOD_MS: u64 = 120_000;
/// Memory and CPU that a host uses itself.
const HOST_BYTES: u64 = 2 << 30;
const HOST_MILLICORES: u64 = 200;

impl World {
    /// Sends the samples that are due. The hosts take turns within the interval.
    pub(crate) fn report_loads(&mut self, now_ms: u64, unix_ms: u64) {
        let hosts = u64::try_from(self.hosts.len()).unwrap_or(1).max(1);
        for (number, host) in (0_u64..).zip(&mut self.hosts) {
            let first_ms = number * LOAD_INTERVAL_MS / hosts;
            let due_ms = host.sampled_ms.map_or(first_ms, |sampled| sampled + LOAD_INTERVAL_MS);
            if now_ms < due_ms {
                continue;
            }
            host.sampled_ms = Some(now_ms);
            if !host.watchers.is_empty() {
                let sample = host.sample(unix_ms);
                host.publish(&HostEvent::Load(Box::new(sample)));
            }
        }
    }
}

impl Host {
    /// Returns the load in the interval that ends at this time.
    pub(crate) fn sample(&self, unix_ms: u64) -> LoadSample {
        let runs = |vm: &&VmInfo| {
            matches!(vm.state, VmState::Running | VmState::Paused | VmState::MigratingOut)
        };
        let vms: Vec<VmLoad> =
            self.vms.values().filter(runs).map(|vm| of_vm(vm, unix_ms)).collect();
        let sum = |figure: fn(&VmLoad) -> u64| vms.iter().map(figure).sum::<u64>();
        let cores = self.info.logical_cores;
        let mut host = HostLoad {
            cores,
            cpu_used_millicores: (sum(|vm| vm.cpu_used_millicores) + HOST_MILLICORES)
                .min(u64::from(cores) * 1000),
            memory_total_bytes: self.info.memory_total_bytes,
            memory_used_bytes: (sum(|vm| vm.memory_used_bytes) + HOST_BYTES)
                .min(self.info.memory_total_bytes),
            rx_bytes_per_s: sum(|vm| vm.rx_bytes_per_s),
            tx_bytes_per_s: sum(|vm| vm.tx_bytes_per_s),
            ..HostLoad::default()
        };
        let loads = vms.iter().flat_map(|vm| vm.disks.iter().flatten());
        for disk in loads {
            let directory = disk.path.rsplit_once('/').map_or("", |(directory, _)| directory);
            let all = host.directories.entry(directory.to_owned()).or_default();
            all.reads_per_s += disk.load.reads_per_s;
            all.writes_per_s += disk.load.writes_per_s;
            all.read_bytes_per_s += disk.load.read_bytes_per_s;
            all.write_bytes_per_s += disk.load.write_bytes_per_s;
            all.latency_us = all.latency_us.max(disk.load.latency_us);
        }
        // Simulated VMs seldom have disks; their hosts' directories are in use all the same.
        for directory in self.info.datastores.keys().filter_map(|path| path.to_str()) {
            let seed = seed(&format!("{}{directory}", self.info.name));
            let entry = host.directories.entry(directory.to_owned());
            entry.or_insert_with(|| storage(level(seed, unix_ms)));
        }
        LoadSample { at_unix_ms: unix_ms, interval_ms: LOAD_INTERVAL_MS, host, vms }
    }
}

fn of_vm(vm: &VmInfo, unix_ms: u64) -> VmLoad {
    let level = match vm.state {
        VmState::Paused => 0,
        _ => level(seed(&vm.name), unix_ms),
    };
    let disks = vm.spec.disks.iter().map(|disk| DiskLoad {
        path: disk.path.to_string_lossy().into_owned(),
        load: storage(level),
    });
    let is_leaving = vm.state == VmState::MigratingOut;
    let cpu_used_millicores = u64::from(vm.vcpus) * level;
    VmLoad {
        name: vm.name.clone(),
        uuid: vm.spec.uuid.unwrap_or_default(),
        cpu_used_millicores,
        cpu_ready_millicores: Some(cpu_used_millicores / 40),
        vcpus: vm.vcpus,
        memory_total_bytes: vm.memory_bytes,
        memory_used_bytes: vm.memory_bytes / 2000 * (800 + level),
        memory_ballooned_bytes: Some(0),
        dirty_bytes_per_s: is_leaving.then_some(level * 16 * 4096),
        rx_bytes_per_s: level * 1500,
        tx_bytes_per_s: level * 4000,
        disks: (!is_leaving).then(|| disks.collect()),
    }
}

fn storage(level: u64) -> StorageLoad {
    StorageLoad {
        reads_per_s: level / 4,
        writes_per_s: level / 8,
        read_bytes_per_s: level / 4 * 16_384,
        write_bytes_per_s: level / 8 * 8_192,
        latency_us: (level > 8).then_some(300 + level),
    }
}

/// Returns thousandths of full load at a time: a triangle on top of a base.
fn level(seed: u64, unix_ms: u64) -> u64 {
    let (base, height) = (30 + seed % 500, 50 + (seed >> 16) % 400);
    let period_ms = LEAST_PERIOD_MS + (seed >> 32) % 600_000;
    let at_ms = (unix_ms + seed % period_ms) % period_ms;
    let half_ms = period_ms / 2;
    base + at_ms.abs_diff(half_ms) * height / half_ms
}

/// Returns a number that a name determines (FNV-1a).
fn seed(name: &str) -> u64 {
    let step = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
    // Mixed: short names differ in the last bytes alone.
    let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325, step);
    (hash ^ (hash >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9)
}
