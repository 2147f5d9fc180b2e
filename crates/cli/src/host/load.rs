//! Implements `godwit host load`: the newest sample of the load of hosts and their VMs.

use godwit_api::{Client, HostLoad, LoadSample, StorageLoad, VmLoad};
use serde::Serialize;

use crate::exit::{Exit, Failure};
use crate::hosts::Hosts;
use crate::output::{Output, table};
use crate::units::byte_count;

/// Load of a host as JSON.
#[derive(Debug, Serialize)]
struct LoadedHost {
    name: String,
    load: LoadSample,
}

pub(super) async fn show(
    hosts: &Hosts,
    name: Option<&str>,
    output: Output,
) -> Result<Exit, Failure> {
    let (answers, silent) = hosts.ask_all(name, output, Client::load).await?;
    let all: Vec<LoadedHost> = answers
        .into_iter()
        .map(|(name, load)| LoadedHost { name: name.to_owned(), load })
        .collect();
    output.result(&all, || shown(&all))?;
    Ok(if silent.is_empty() { Exit::Ok } else { Exit::Unreachable })
}

/// Returns a table: each host, and its VMs below it.
fn shown(all: &[LoadedHost]) -> String {
    let rows = all.iter().flat_map(|LoadedHost { name, load }| {
        let vms = load.vms.iter().map(|vm| of_vm(name, vm));
        std::iter::once(of_host(name, &load.host)).chain(vms)
    });
    let heads =
        ["host", "vm", "cpu", "ready", "memory", "read", "written", "latency", "received", "sent"];
    table(&heads, &rows.collect::<Vec<_>>())
}

fn of_host(name: &str, host: &HostLoad) -> Vec<String> {
    let sum = |of: fn(&StorageLoad) -> u64| {
        rate(host.directories.values().map(of).fold(0, u64::saturating_add))
    };
    vec![
        name.to_owned(),
        "-".to_owned(),
        format!("{} of {}", cores(host.cpu_used_millicores), host.cores),
        "-".to_owned(),
        of(host.memory_used_bytes, host.memory_total_bytes),
        sum(|load| load.read_bytes_per_s),
        sum(|load| load.write_bytes_per_s),
        "-".to_owned(),
        rate(host.rx_bytes_per_s),
        rate(host.tx_bytes_per_s),
    ]
}

fn of_vm(host: &str, vm: &VmLoad) -> Vec<String> {
    let unknown = || "-".to_owned();
    let sum = |of: fn(&StorageLoad) -> u64| {
        let disks = vm.disks.as_ref()?.iter().map(|disk| of(&disk.load));
        Some(rate(disks.fold(0, u64::saturating_add)))
    };
    // The slowest disk.
    let latency_us = vm.disks.iter().flatten().filter_map(|disk| disk.load.latency_us).max();
    vec![
        host.to_owned(),
        vm.name.clone(),
        format!("{} of {}", cores(vm.cpu_used_millicores), vm.vcpus),
        vm.cpu_ready_millicores.map_or_else(unknown, cores),
        of(vm.memory_used_bytes, vm.memory_total_bytes),
        sum(|load| load.read_bytes_per_s).unwrap_or_else(unknown),
        sum(|load| load.write_bytes_per_s).unwrap_or_else(unknown),
        latency_us.map_or_else(unknown, |us| format!("{}.{} ms", us / 1000, us % 1000 / 100)),
        rate(vm.rx_bytes_per_s),
        rate(vm.tx_bytes_per_s),
    ]
}

fn cores(thousandths: u64) -> String {
    format!("{}.{:02}", thousandths / 1000, thousandths % 1000 / 10)
}

fn of(used: u64, total: u64) -> String {
    format!("{} of {}", byte_count(used), byte_count(total))
}

fn rate(bytes_per_s: u64) -> String {
    format!("{}/s", byte_count(bytes_per_s))
}

#[cfg(test)]
mod tests {
    use godwit_api::DiskLoad;

    use super::*;

    #[test]
    fn a_host_is_followed_by_its_vms() {
        let load = StorageLoad {
            read_bytes_per_s: 1 << 20,
            latency_us: Some(1_290),
            ..StorageLoad::default()
        };
        let disk = DiskLoad { path: "/srv/a.raw".to_owned(), load };
        let web = VmLoad {
            name: "web".to_owned(),
            vcpus: 2,
            cpu_used_millicores: 1_250,
            cpu_ready_millicores: Some(40),
            disks: Some(vec![disk.clone(), disk]),
            ..VmLoad::default()
        };
        let silent = VmLoad { name: "db".to_owned(), ..VmLoad::default() };
        let host = HostLoad { cores: 8, cpu_used_millicores: 3_999, ..HostLoad::default() };
        let sample = LoadSample { host, vms: vec![web, silent], ..LoadSample::default() };
        let text = shown(&[LoadedHost { name: "a".to_owned(), load: sample }]);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 4, "{text}");
        assert!(lines[1].contains("3.99 of 8"), "{text}");
        for part in ["web", "1.25 of 2", "0.04", "2.0 MiB/s", "1.2 ms"] {
            assert!(lines[2].contains(part), "{part}\n{text}");
        }
        assert!(lines[3].contains("db") && !lines[3].contains("ms"), "{text}");
    }
}
