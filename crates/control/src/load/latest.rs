//! Latest sample of each host, and the VMs and hosts that use most. Pure.

use std::collections::BTreeMap;
use std::sync::Arc;

use godwit_api::control::{LoadTop, TopBy, TopHost, TopVm};
use godwit_api::{LoadSample, StorageLoad, VmLoad};

use super::measured::{of_host, storage_of_host, storage_of_vm};

/// Shortest time between two samples of a host that are taken, so that a host that reports all the
/// time leaves time for others.
const SHORTEST_MS: u64 = 2_000;
/// Age from which a sample no longer shows the present load.
const PRESENT_MS: u64 = 30_000;

/// Latest sample of each host, and when it arrived.
#[derive(Debug, Default)]
pub(crate) struct Latest(BTreeMap<String, (u64, Arc<LoadSample>)>);

impl Latest {
    /// Replaces a host's sample, and forgets all old ones. Returns false if it follows the previous
    /// one too soon.
    pub(crate) fn put(&mut self, host: &str, now_ms: u64, sample: Arc<LoadSample>) -> bool {
        let before = self.0.get(host);
        if before.is_some_and(|(arrived, _)| now_ms.abs_diff(*arrived) < SHORTEST_MS) {
            return false;
        }
        // Those of hosts that were removed.
        self.0.retain(|_, (arrived, _)| now_ms.abs_diff(*arrived) <= PRESENT_MS);
        self.0.insert(host.to_owned(), (now_ms, sample));
        true
    }

    /// Returns the samples that arrived at most `age_ms` before.
    pub(crate) fn within(
        &self,
        age_ms: u64,
        now_ms: u64,
    ) -> impl Iterator<Item = (&str, &LoadSample)> {
        let is_fresh = move |arrived: u64| now_ms.abs_diff(arrived) <= age_ms;
        let fresh = self.0.iter().filter(move |(_, (arrived, _))| is_fresh(*arrived));
        fresh.map(|(host, (_, sample))| (host.as_str(), &**sample))
    }

    /// Returns the VMs and hosts that use most. `has` returns whether a host has a VM.
    pub(crate) fn top(
        &self,
        by: TopBy,
        limit: usize,
        now_ms: u64,
        has: impl Fn(&str, &VmLoad) -> bool,
    ) -> LoadTop {
        let (mut vms, mut hosts) = (Vec::new(), Vec::new());
        for (host, sample) in self.within(PRESENT_MS, now_ms) {
            let own = sample.vms.iter().filter(|vm| has(host, vm));
            vms.extend(own.map(|vm| (used_by_vm(by, vm), vm.name.as_str(), (host, vm))));
            hosts.push((used_by_host(by, sample), host, (host, sample)));
        }
        LoadTop {
            at_unix_ms: now_ms,
            by,
            vms_total: vms.len() as u64,
            hosts_total: hosts.len() as u64,
            vms: largest(vms, limit).map(|(host, vm)| top_vm(host, vm)).collect(),
            hosts: largest(hosts, limit).map(|(host, sample)| top_host(host, sample)).collect(),
        }
    }
}

/// Returns the first ones by use, the largest first, and by name where it is equal.
fn largest<T>(mut all: Vec<(u64, &str, T)>, limit: usize) -> impl Iterator<Item = T> {
    all.sort_by(|one, other| other.0.cmp(&one.0).then(one.1.cmp(other.1)));
    all.into_iter().take(limit).map(|(.., what)| what)
}

fn top_vm(host: &str, load: &VmLoad) -> TopVm {
    TopVm { host: host.to_owned(), load: load.clone(), storage: storage_of_vm(load) }
}

fn top_host(host: &str, sample: &LoadSample) -> TopHost {
    TopHost {
        host: host.to_owned(),
        load: sample.host.clone(),
        storage: storage_of_host(sample),
        cpu_ready_millicores: ready(sample),
    }
}

fn ready(sample: &LoadSample) -> u64 {
    let [_, ready, ..] = of_host(sample);
    ready.unwrap_or(0)
}

fn transferred(storage: &StorageLoad) -> u64 {
    storage.read_bytes_per_s.saturating_add(storage.write_bytes_per_s)
}

fn used_by_vm(by: TopBy, load: &VmLoad) -> u64 {
    match by {
        TopBy::Cpu => load.cpu_used_millicores,
        TopBy::Ready => load.cpu_ready_millicores.unwrap_or(0),
        TopBy::Memory => load.memory_used_bytes,
        TopBy::Disk => storage_of_vm(load).as_ref().map_or(0, transferred),
        TopBy::Network => load.rx_bytes_per_s.saturating_add(load.tx_bytes_per_s),
    }
}

fn used_by_host(by: TopBy, sample: &LoadSample) -> u64 {
    let host = &sample.host;
    match by {
        TopBy::Cpu => host.cpu_used_millicores,
        TopBy::Ready => ready(sample),
        TopBy::Memory => host.memory_used_bytes,
        TopBy::Disk => transferred(&storage_of_host(sample)),
        TopBy::Network => host.rx_bytes_per_s.saturating_add(host.tx_bytes_per_s),
    }
}

#[cfg(test)]
mod tests {
    use godwit_api::{DiskLoad, HostLoad};

    use super::*;

    fn sample(vms: &[(&str, u64)]) -> Arc<LoadSample> {
        let vm = |&(name, used): &(&str, u64)| VmLoad {
            name: name.to_owned(),
            cpu_used_millicores: used,
            rx_bytes_per_s: 1_000 - used,
            disks: Some(vec![DiskLoad {
                path: "/d".into(),
                load: StorageLoad { write_bytes_per_s: used % 7, ..StorageLoad::default() },
            }]),
            ..VmLoad::default()
        };
        let vms: Vec<VmLoad> = vms.iter().map(vm).collect();
        let used = vms.iter().map(|vm| vm.cpu_used_millicores).sum();
        let host = HostLoad { cpu_used_millicores: used, ..HostLoad::default() };
        Arc::new(LoadSample { host, vms, ..LoadSample::default() })
    }

    fn names(top: &LoadTop) -> Vec<&str> {
        top.vms.iter().map(|vm| vm.load.name.as_str()).collect()
    }

    #[test]
    fn the_largest_are_first_and_equal_ones_are_sorted_by_name() {
        let mut latest = Latest::default();
        assert!(latest.put("a", 10_000, sample(&[("web", 8), ("db", 300), ("x", 8)])));
        assert!(latest.put("b", 10_000, sample(&[("mail", 500)])));
        let top = |by, limit| latest.top(by, limit, 12_000, |_, _| true);
        assert_eq!(names(&top(TopBy::Cpu, 10)), ["mail", "db", "web", "x"]);
        assert_eq!(names(&top(TopBy::Network, 2)), ["web", "x"]);
        assert_eq!(names(&top(TopBy::Disk, 2)), ["db", "mail"]);
        let first = top(TopBy::Cpu, 1);
        assert_eq!((first.vms_total, first.hosts_total, first.hosts.len()), (4, 2, 1));
        assert_eq!(first.hosts[0].host, "b");
        let own = latest.top(TopBy::Cpu, 10, 12_000, |host, vm| host == "a" && vm.name != "db");
        assert_eq!((names(&own), own.vms_total), (vec!["web", "x"], 2));
    }

    #[test]
    fn old_samples_are_left_out_and_hasty_ones_refused() {
        let mut latest = Latest::default();
        assert!(latest.put("a", 10_000, sample(&[("web", 8)])));
        assert!(!latest.put("a", 11_000, sample(&[("web", 9)])));
        assert!(latest.put("a", 15_000, sample(&[("web", 9)])));
        // The clock may go back.
        assert!(latest.put("a", 9_000, sample(&[("web", 9)])));
        assert_eq!(latest.top(TopBy::Cpu, 9, 39_000, |_, _| true).vms_total, 1);
        assert_eq!(latest.top(TopBy::Cpu, 9, 39_001, |_, _| true).vms_total, 0);
    }

    #[test]
    fn the_sample_of_a_host_that_was_removed_is_forgotten() {
        let mut latest = Latest::default();
        latest.put("removed", 10_000, sample(&[("web", 8)]));
        latest.put("a", 40_000, sample(&[("db", 8)]));
        assert_eq!(latest.0.len(), 2);
        latest.put("a", 45_000, sample(&[("db", 8)]));
        assert_eq!(latest.0.keys().collect::<Vec<_>>(), ["a"]);
    }
}
