//! Differences of two readings as a sample. Pure: it reads no clock and no file.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use godwit_api::{
    DiskLoad, HostLoad, LoadSample, MOST_SAMPLED_DIRECTORIES, MOST_SAMPLED_DISKS,
    MOST_SAMPLED_PATH_BYTES, MOST_SAMPLED_VMS, StorageLoad, VmLoad,
};
use godwit_qemu::DiskCounters;

use crate::load::reading::{DiskReading, HostReading, Reading, Traffic, VmReading};

/// Most bytes of the paths and figures of all disks in a sample: a manager reads events of 2 MiB.
const MOST_DISK_BYTES: usize = 768 << 10;
/// Most bytes of the paths and figures of all directories in a sample.
const MOST_DIRECTORY_BYTES: usize = 128 << 10;
/// Most bytes of the figures of a disk or a directory as JSON, without its path.
const FIGURES_BYTES: usize = 256;

/// The reading that the next one is compared with.
#[derive(Debug, Default)]
pub(crate) struct Sampler {
    before: Option<Reading>,
}

impl Sampler {
    /// Takes the next reading; returns the load since the previous one, if there was one.
    pub(crate) fn take(&mut self, mut now: Reading) -> Option<LoadSample> {
        let before = self.before.take();
        let sample = before.as_ref().and_then(|before| sample(before, &now));
        for (process, vm) in &mut now.vms {
            if vm.disks.is_none() {
                // The next answer is compared with the last one.
                let last = before.as_ref().and_then(|before| before.vms.get(process));
                vm.disks = last.and_then(|last| last.disks.clone());
            }
        }
        self.before = Some(now);
        sample
    }
}

fn sample(before: &Reading, now: &Reading) -> Option<LoadSample> {
    let time = now.at.checked_sub(before.at).filter(|time| time.as_millis() > 0)?;
    let mut storage = Storage::default();
    let both = now.vms.iter().filter_map(|(process, vm)| Some((before.vms.get(process)?, vm)));
    let mut vms: Vec<VmLoad> =
        both.take(MOST_SAMPLED_VMS).map(|(old, vm)| vm_load(old, vm, time, &mut storage)).collect();
    vms.sort_unstable_by(|one, other| one.name.cmp(&other.name));
    let host = HostLoad {
        directories: storage.directories.into_iter().map(|(at, sum)| (at, sum.load())).collect(),
        ..host_load(&before.host, &now.host, time)
    };
    let interval_ms = u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
    Some(LoadSample { at_unix_ms: now.at_unix_ms, interval_ms, host, vms })
}

fn host_load(before: &HostReading, now: &HostReading, time: Duration) -> HostLoad {
    let used = before.cpu.zip(now.cpu).map_or(0, |(earlier, later)| {
        let all = since(earlier.all, later.all);
        let busy = since(earlier.busy, later.busy).min(all);
        let thousandths = u128::from(busy) * u128::from(now.cores) * 1000;
        narrow(thousandths / u128::from(all.max(1)))
    });
    let traffic = traffic(&before.interfaces, &now.interfaces, time);
    HostLoad {
        cores: now.cores,
        cpu_used_millicores: used,
        memory_total_bytes: now.memory_total_bytes,
        memory_used_bytes: now.memory_total_bytes.saturating_sub(now.memory_available_bytes),
        rx_bytes_per_s: traffic.rx_bytes,
        tx_bytes_per_s: traffic.tx_bytes,
        directories: BTreeMap::new(),
    }
}

fn vm_load(before: &VmReading, now: &VmReading, time: Duration, storage: &mut Storage) -> VmLoad {
    let taps = traffic(&before.taps, &now.taps, time);
    let disks = before.disks.as_ref().zip(now.disks.as_ref());
    VmLoad {
        name: now.name.clone(),
        uuid: now.uuid,
        cpu_used_millicores: millicores(since(before.cpu_ns, now.cpu_ns), time),
        cpu_ready_millicores: before.waits_ns.as_ref().zip(now.waits_ns.as_ref()).map(
            |(before, now)| {
                let waits = now.iter().map(|(thread, waited_ns)| {
                    since(before.get(thread).copied().unwrap_or(0), *waited_ns)
                });
                millicores(waits.fold(0, u64::saturating_add), time)
            },
        ),
        vcpus: now.vcpus,
        memory_total_bytes: now.memory_total_bytes,
        memory_used_bytes: now.memory_used_bytes,
        memory_ballooned_bytes: now.memory_ballooned_bytes,
        dirty_bytes_per_s: now.dirty_bytes_per_s,
        // What a tap has sent, the guest has received.
        rx_bytes_per_s: taps.tx_bytes,
        tx_bytes_per_s: taps.rx_bytes,
        disks: disks.and_then(|(before, now)| storage.add(before, now)),
    }
}

/// Returns the traffic in a second of the interfaces that were there before.
fn traffic(
    before: &BTreeMap<String, Traffic>,
    now: &BTreeMap<String, Traffic>,
    time: Duration,
) -> Traffic {
    let mut sum = Traffic::default();
    for (name, now) in now {
        let Some(before) = before.get(name) else { continue };
        sum.rx_bytes = sum.rx_bytes.saturating_add(since(before.rx_bytes, now.rx_bytes));
        sum.tx_bytes = sum.tx_bytes.saturating_add(since(before.tx_bytes, now.tx_bytes));
    }
    Traffic { rx_bytes: a_second(sum.rx_bytes, time), tx_bytes: a_second(sum.tx_bytes, time) }
}

/// Requests to disks, added up by directory.
#[derive(Debug, Default)]
struct Storage {
    directories: BTreeMap<String, Sum>,
    /// Bytes of the directories that are already in the sample.
    directory_bytes: usize,
    /// Bytes of the disks that are already in the sample.
    disk_bytes: usize,
}

impl Storage {
    /// Adds the load of a VM's disks, and returns it. `None`: the sample has no room for it.
    fn add(&mut self, before: &DiskReading, now: &DiskReading) -> Option<Vec<DiskLoad>> {
        let time = now.at.checked_sub(before.at).filter(|time| time.as_millis() > 0)?;
        let both = now.counters.iter().filter_map(|(path, now)| {
            let before = before.counters.get(path)?;
            is_shown(path).then(|| (path, Sum::of(before, now, time)))
        });
        let both: Vec<_> = both.take(MOST_SAMPLED_DISKS).collect();
        for (path, sum) in &both {
            self.add_to_directory(path, sum);
        }
        let bytes = self.disk_bytes + both.iter().map(|(path, _)| json_bytes(path)).sum::<usize>();
        if bytes > MOST_DISK_BYTES {
            return None;
        }
        self.disk_bytes = bytes;
        Some(
            both.iter()
                .map(|(path, sum)| DiskLoad { path: (*path).clone(), load: sum.load() })
                .collect(),
        )
    }

    fn add_to_directory(&mut self, path: &str, sum: &Sum) {
        let Some(directory) = Path::new(path).parent().and_then(Path::to_str) else { return };
        if let Some(all) = self.directories.get_mut(directory) {
            return all.add(sum);
        }
        let bytes = self.directory_bytes + json_bytes(directory);
        if self.directories.len() < MOST_SAMPLED_DIRECTORIES && bytes <= MOST_DIRECTORY_BYTES {
            self.directory_bytes = bytes;
            self.directories.insert(directory.to_owned(), *sum);
        }
    }
}

/// Returns at most how long the figures of this path are as JSON, which escapes some characters.
fn json_bytes(path: &str) -> usize {
    FIGURES_BYTES + 2 * path.len()
}

fn is_shown(path: &str) -> bool {
    path.len() <= MOST_SAMPLED_PATH_BYTES && !path.contains(char::is_control)
}

/// Requests to one or more disks.
#[derive(Clone, Copy, Debug, Default)]
struct Sum {
    /// Figures of a second, without the latency.
    rates: StorageLoad,
    /// Reads and writes, and the sum of their times.
    requests: u64,
    busy_ns: u64,
}

impl Sum {
    fn of(before: &DiskCounters, now: &DiskCounters, time: Duration) -> Sum {
        let reads = since(before.reads, now.reads);
        let writes = since(before.writes, now.writes);
        Sum {
            rates: StorageLoad {
                reads_per_s: a_second(reads, time),
                writes_per_s: a_second(writes, time),
                read_bytes_per_s: a_second(since(before.read_bytes, now.read_bytes), time),
                write_bytes_per_s: a_second(since(before.write_bytes, now.write_bytes), time),
                latency_us: None,
            },
            requests: reads.saturating_add(writes),
            busy_ns: since(before.busy_ns, now.busy_ns),
        }
    }

    fn add(&mut self, other: &Sum) {
        let (all, one) = (&mut self.rates, &other.rates);
        all.reads_per_s = all.reads_per_s.saturating_add(one.reads_per_s);
        all.writes_per_s = all.writes_per_s.saturating_add(one.writes_per_s);
        all.read_bytes_per_s = all.read_bytes_per_s.saturating_add(one.read_bytes_per_s);
        all.write_bytes_per_s = all.write_bytes_per_s.saturating_add(one.write_bytes_per_s);
        self.requests = self.requests.saturating_add(other.requests);
        self.busy_ns = self.busy_ns.saturating_add(other.busy_ns);
    }

    fn load(&self) -> StorageLoad {
        let latency_us = self.busy_ns.checked_div(self.requests).map(|ns| ns / 1000);
        StorageLoad { latency_us, ..self.rates }
    }
}

/// Returns how much a counter has grown. One that went back has begun again: what it counted before
/// is unknown, so it counts as unchanged.
fn since(before: u64, now: u64) -> u64 {
    now.saturating_sub(before)
}

/// Returns what a count in that time is in a second, rounded.
fn a_second(count: u64, time: Duration) -> u64 {
    let time_ns = time.as_nanos().max(1);
    narrow((u128::from(count) * 1_000_000_000 + time_ns / 2) / time_ns)
}

/// Returns processor time in that time as thousandths of a processor.
fn millicores(processor_ns: u64, time: Duration) -> u64 {
    narrow(u128::from(processor_ns) * 1000 / time.as_nanos().max(1))
}

fn narrow(number: u128) -> u64 {
    u64::try_from(number).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests;
