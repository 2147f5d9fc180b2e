//! Metrics of the newest sample of the load. VMs are labels: those with a process on this host, of
//! which a sample has a bounded number.

use godwit_api::{LoadSample, StorageLoad};
use prometheus_client::registry::{Registry, Unit};

use super::{Labels, Rates, add};

/// Metrics that are set at each scrape.
#[derive(Debug, Default)]
pub(super) struct LoadNow {
    cpu: Rates,
    memory: Rates,
    network: Rates,
    directory_bytes: Rates,
    directory_requests: Rates,
    directory_latency: Rates,
    vm_cpu: Rates,
    vm_cpu_ready: Rates,
    vm_memory: Rates,
    vm_ballooned: Rates,
    vm_network: Rates,
    vm_disk_bytes: Rates,
    vm_disk_requests: Rates,
    vm_disk_latency: Rates,
}

impl LoadNow {
    #[rustfmt::skip]
    pub(super) fn register(&self, to: &mut Registry) {
        let (bytes, seconds) = (|| Some(Unit::Bytes), || Some(Unit::Seconds));
        add(to, "load_cpu_cores", None, "Processors in use on the host", &self.cpu);
        add(to, "load_memory", bytes(), "Memory of the host in use", &self.memory);
        add(to, "load_network_bytes_per_second", None, "Traffic of the host's interfaces",
            &self.network);
        add(to, "directory_bytes_per_second", None,
            "Bytes that VMs read and write in a directory with disks", &self.directory_bytes);
        add(to, "directory_requests_per_second", None,
            "Requests of VMs in a directory with disks", &self.directory_requests);
        add(to, "directory_latency", seconds(),
            "Mean time of a request in a directory with disks", &self.directory_latency);
        add(to, "vm_cpu_cores", None, "Processors that a VM uses", &self.vm_cpu);
        add(to, "vm_cpu_ready_cores", None, "Processors that a VM waits for", &self.vm_cpu_ready);
        add(to, "vm_memory_used", bytes(), "Memory of a VM that the host holds", &self.vm_memory);
        add(to, "vm_memory_ballooned", bytes(), "Memory that a VM's balloon has taken",
            &self.vm_ballooned);
        add(to, "vm_network_bytes_per_second", None, "Traffic of a VM", &self.vm_network);
        add(to, "vm_disk_bytes_per_second", None, "Bytes that a VM reads and writes",
            &self.vm_disk_bytes);
        add(to, "vm_disk_requests_per_second", None, "Requests of a VM to its disks",
            &self.vm_disk_requests);
        add(to, "vm_disk_latency", seconds(), "Mean time of a request to one of a VM's disks",
            &self.vm_disk_latency);
    }

    /// Sets the gauges; removes those of VMs and directories that are not in the sample.
    pub(super) fn update(&self, sample: Option<&LoadSample>) {
        for family in self.all() {
            family.clear();
        }
        let Some(sample) = sample else { return };
        let host = &sample.host;
        // Families without labels: before the first sample there is no figure.
        set(&self.cpu, &[], thousandths(host.cpu_used_millicores));
        set(&self.memory, &[], number(host.memory_used_bytes));
        set_traffic(&self.network, &[], host.rx_bytes_per_s, host.tx_bytes_per_s);
        let of_directories =
            [&self.directory_bytes, &self.directory_requests, &self.directory_latency];
        for (directory, load) in &host.directories {
            set_storage(of_directories, &[("directory", directory.as_str())], load);
        }
        let of_disks = [&self.vm_disk_bytes, &self.vm_disk_requests, &self.vm_disk_latency];
        for vm in &sample.vms {
            let label = ("vm", vm.name.as_str());
            set(&self.vm_cpu, &[label], thousandths(vm.cpu_used_millicores));
            if let Some(ready) = vm.cpu_ready_millicores {
                set(&self.vm_cpu_ready, &[label], thousandths(ready));
            }
            set(&self.vm_memory, &[label], number(vm.memory_used_bytes));
            if let Some(bytes) = vm.memory_ballooned_bytes {
                set(&self.vm_ballooned, &[label], number(bytes));
            }
            set_traffic(&self.vm_network, &[label], vm.rx_bytes_per_s, vm.tx_bytes_per_s);
            for disk in vm.disks.iter().flatten() {
                set_storage(of_disks, &[label, ("disk", disk.path.as_str())], &disk.load);
            }
        }
    }

    fn all(&self) -> [&Rates; 14] {
        [
            &self.cpu,
            &self.memory,
            &self.network,
            &self.directory_bytes,
            &self.directory_requests,
            &self.directory_latency,
            &self.vm_cpu,
            &self.vm_cpu_ready,
            &self.vm_memory,
            &self.vm_ballooned,
            &self.vm_network,
            &self.vm_disk_bytes,
            &self.vm_disk_requests,
            &self.vm_disk_latency,
        ]
    }
}

fn set(family: &Rates, labels: &[(&'static str, &str)], value: f64) {
    let labels: Labels = labels.iter().map(|(key, label)| (*key, (*label).to_owned())).collect();
    family.get_or_create(&labels).set(value);
}

/// Sets a gauge with one more label.
fn set_by(
    family: &Rates,
    labels: &[(&'static str, &str)],
    by: (&'static str, &str),
    per_second: u64,
) {
    let labels: Vec<_> = labels.iter().copied().chain([by]).collect();
    set(family, &labels, number(per_second));
}

fn set_traffic(family: &Rates, labels: &[(&'static str, &str)], rx: u64, tx: u64) {
    set_by(family, labels, ("direction", "received"), rx);
    set_by(family, labels, ("direction", "sent"), tx);
}

fn set_storage(
    [bytes, requests, latency]: [&Rates; 3],
    labels: &[(&'static str, &str)],
    load: &StorageLoad,
) {
    set_by(bytes, labels, ("operation", "read"), load.read_bytes_per_s);
    set_by(bytes, labels, ("operation", "write"), load.write_bytes_per_s);
    set_by(requests, labels, ("operation", "read"), load.reads_per_s);
    set_by(requests, labels, ("operation", "write"), load.writes_per_s);
    if let Some(us) = load.latency_us {
        set(latency, labels, number(us) / 1e6);
    }
}

#[expect(clippy::cast_precision_loss, reason = "a metric is a float")]
fn number(count: u64) -> f64 {
    count as f64
}

fn thousandths(count: u64) -> f64 {
    number(count) / 1000.0
}

#[cfg(test)]
pub(super) mod tests {
    use std::collections::BTreeMap;

    use godwit_api::{DiskLoad, HostLoad, VmLoad};
    use prometheus_client::encoding::text::encode;

    use super::*;

    /// Returns a sample with every figure.
    pub(in crate::metrics) fn sample() -> LoadSample {
        let load = StorageLoad { reads_per_s: 7, latency_us: Some(1500), ..StorageLoad::default() };
        let host = HostLoad {
            cpu_used_millicores: 2500,
            directories: BTreeMap::from([("/srv".to_owned(), load)]),
            ..HostLoad::default()
        };
        let vm = VmLoad {
            name: "web".to_owned(),
            cpu_used_millicores: 500,
            cpu_ready_millicores: Some(1250),
            memory_ballooned_bytes: Some(64),
            tx_bytes_per_s: 9,
            disks: Some(vec![DiskLoad { path: "/srv/a.raw".to_owned(), load }]),
            ..VmLoad::default()
        };
        LoadSample { host, vms: vec![vm], ..LoadSample::default() }
    }

    #[test]
    fn the_newest_sample_is_shown_and_a_vm_that_left_is_not() {
        let (now, mut registry) = (LoadNow::default(), Registry::with_prefix("godwit_host"));
        now.register(&mut registry);
        let render = |sample: &LoadSample| {
            now.update(Some(sample));
            let mut text = String::new();
            encode(&mut text, &registry).unwrap();
            text
        };
        let text = render(&sample());
        for line in [
            "godwit_host_load_cpu_cores{} 2.5",
            r#"godwit_host_vm_cpu_cores{vm="web"} 0.5"#,
            r#"godwit_host_vm_cpu_ready_cores{vm="web"} 1.25"#,
            r#"godwit_host_vm_memory_ballooned_bytes{vm="web"} 64.0"#,
            r#"godwit_host_vm_network_bytes_per_second{vm="web",direction="sent"} 9.0"#,
            concat!(
                r#"godwit_host_vm_disk_requests_per_second{vm="web",disk="/srv/a.raw","#,
                r#"operation="read"} 7.0"#
            ),
            r#"godwit_host_vm_disk_latency_seconds{vm="web",disk="/srv/a.raw"} 0.0015"#,
            r#"godwit_host_directory_latency_seconds{directory="/srv"} 0.0015"#,
        ] {
            assert!(text.lines().any(|found| found == line), "{line}\n{text}");
        }
        let text = render(&LoadSample { vms: Vec::new(), ..sample() });
        assert!(
            text.contains("godwit_host_load_cpu_cores{} 2.5") && !text.contains("web"),
            "{text}"
        );
    }
}
