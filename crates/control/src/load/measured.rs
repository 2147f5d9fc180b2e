//! Figures of the objects that agents' samples describe. Pure.

use std::collections::BTreeMap;
use std::path::Path;

use godwit_api::{HostInfo, LoadSample, StorageLoad, VmLoad};

use super::figures::{FIGURES, Figures, LATENCY, READ_BYTES, READS, USED, WRITE_BYTES, WRITES};

/// Returns the figures of a VM.
pub(crate) fn of_vm(load: &VmLoad) -> Figures {
    let storage = storage_of_vm(load);
    let of = |figure: fn(&StorageLoad) -> u64| storage.as_ref().map(figure);
    [
        Some(load.cpu_used_millicores),
        load.cpu_ready_millicores,
        Some(load.memory_used_bytes),
        load.memory_ballooned_bytes,
        load.dirty_bytes_per_s,
        of(|storage| storage.reads_per_s),
        of(|storage| storage.writes_per_s),
        of(|storage| storage.read_bytes_per_s),
        of(|storage| storage.write_bytes_per_s),
        storage.and_then(|storage| storage.latency_us),
        Some(load.rx_bytes_per_s),
        Some(load.tx_bytes_per_s),
    ]
}

/// Returns the figures of a host. What only VMs have is the sum of its VMs.
pub(crate) fn of_host(sample: &LoadSample) -> Figures {
    let storage = storage_of_host(sample);
    let sum = |figure: fn(&VmLoad) -> Option<u64>| {
        sample.vms.iter().filter_map(figure).reduce(u64::saturating_add)
    };
    let host = &sample.host;
    [
        Some(host.cpu_used_millicores),
        sum(|vm| vm.cpu_ready_millicores),
        Some(host.memory_used_bytes),
        sum(|vm| vm.memory_ballooned_bytes),
        sum(|vm| vm.dirty_bytes_per_s),
        Some(storage.reads_per_s),
        Some(storage.writes_per_s),
        Some(storage.read_bytes_per_s),
        Some(storage.write_bytes_per_s),
        storage.latency_us,
        Some(host.rx_bytes_per_s),
        Some(host.tx_bytes_per_s),
    ]
}

/// Returns all disks of a VM together; none: they are unknown.
pub(crate) fn storage_of_vm(load: &VmLoad) -> Option<StorageLoad> {
    let disks = load.disks.as_ref()?;
    Some(disks.iter().map(|disk| disk.load).fold(StorageLoad::default(), together))
}

/// Returns all directories of a host together.
pub(crate) fn storage_of_host(sample: &LoadSample) -> StorageLoad {
    sample.host.directories.values().copied().fold(StorageLoad::default(), together)
}

/// Adds the requests of two disks. The latency is the mean over the requests of both.
fn together(one: StorageLoad, other: StorageLoad) -> StorageLoad {
    let requests = |load: &StorageLoad| load.reads_per_s.saturating_add(load.writes_per_s);
    StorageLoad {
        reads_per_s: one.reads_per_s.saturating_add(other.reads_per_s),
        writes_per_s: one.writes_per_s.saturating_add(other.writes_per_s),
        read_bytes_per_s: one.read_bytes_per_s.saturating_add(other.read_bytes_per_s),
        write_bytes_per_s: one.write_bytes_per_s.saturating_add(other.write_bytes_per_s),
        latency_us: mean_latency(
            (one.latency_us, requests(&one)),
            (other.latency_us, requests(&other)),
        ),
    }
}

/// Returns the mean of two latencies, weighted by their numbers of requests.
fn mean_latency(one: (Option<u64>, u64), other: (Option<u64>, u64)) -> Option<u64> {
    match (one, other) {
        ((None, _), (latency, _)) | ((latency, _), (None, _)) => latency,
        ((Some(one), requests), (Some(other), more)) => {
            // A disk with less than a request a second counts, too.
            let weight = |requests: u64| u128::from(requests.min(1 << 40)) + 1;
            let (requests, more) = (weight(requests), weight(more));
            let sum = u128::from(one) * requests + u128::from(other) * more;
            u64::try_from(sum / (requests + more)).ok()
        }
    }
}

/// Adds the figures of two objects.
pub(crate) fn add(one: &Figures, other: &Figures) -> Figures {
    let mut sum = *one;
    for (own, more) in sum.iter_mut().zip(other) {
        *own = match (*own, *more) {
            (None, known) | (known, None) => known,
            (Some(one), Some(other)) => Some(one.saturating_add(other)),
        };
    }
    let weighted = |figures: &Figures| {
        let requests = |place: usize| figures.get(place).copied().flatten().unwrap_or(0);
        let latency = figures.get(LATENCY).copied().flatten();
        (latency, requests(READS).saturating_add(requests(WRITES)))
    };
    if let Some(latency) = sum.get_mut(LATENCY) {
        *latency = mean_latency(weighted(one), weighted(other));
    }
    sum
}

/// What the hosts that have a datastore report of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct DatastoreTotal {
    storage: StorageLoad,
    used_bytes: u64,
}

impl DatastoreTotal {
    pub(crate) fn figures(&self) -> Figures {
        let DatastoreTotal { storage, used_bytes } = self;
        let mut figures = [None; FIGURES];
        let known = [
            (USED, Some(*used_bytes)),
            (READS, Some(storage.reads_per_s)),
            (WRITES, Some(storage.writes_per_s)),
            (READ_BYTES, Some(storage.read_bytes_per_s)),
            (WRITE_BYTES, Some(storage.write_bytes_per_s)),
            (LATENCY, storage.latency_us),
        ];
        for (place, known) in known {
            if let Some(figure) = figures.get_mut(place) {
                *figure = known;
            }
        }
        figures
    }
}

/// Adds a host's sample to those of datastores. `id_of` returns the ID of the one that contains a
/// directory of the host. Directories that the host does not report otherwise are left out.
pub(crate) fn add_datastores(
    all: &mut BTreeMap<String, DatastoreTotal>,
    sample: &LoadSample,
    info: &HostInfo,
    id_of: impl Fn(&Path) -> String,
) {
    for (path, datastore) in &info.datastores {
        let load = path.to_str().and_then(|path| sample.host.directories.get(path));
        let used = datastore.total_bytes.saturating_sub(datastore.free_bytes);
        let total = all.entry(id_of(path)).or_default();
        total.storage = together(total.storage, load.copied().unwrap_or_default());
        total.used_bytes = total.used_bytes.max(used);
    }
}

#[cfg(test)]
mod tests {
    use godwit_api::{DatastoreInfo, DiskLoad, HostLoad};

    use super::*;
    use crate::rig;

    fn storage(reads_per_s: u64, latency_us: Option<u64>) -> StorageLoad {
        StorageLoad { reads_per_s, latency_us, ..StorageLoad::default() }
    }

    fn vm(disks: Option<Vec<StorageLoad>>) -> VmLoad {
        let disk = |load| DiskLoad { path: "/srv/a.raw".into(), load };
        VmLoad {
            cpu_used_millicores: 500,
            cpu_ready_millicores: Some(3),
            disks: disks.map(|disks| disks.into_iter().map(disk).collect()),
            ..VmLoad::default()
        }
    }

    #[test]
    fn the_figures_of_a_vm_are_the_sum_of_its_disks() {
        let figures = of_vm(&vm(Some(vec![storage(10, Some(100)), storage(32, None)])));
        assert_eq!((figures[READS], figures[WRITES]), (Some(42), Some(0)));
        assert_eq!((figures[0], figures[1], figures[LATENCY]), (Some(500), Some(3), Some(100)));
        // What was not measured is unknown, not zero.
        let figures = of_vm(&vm(None));
        assert_eq!((figures[READS], figures[LATENCY], figures[3]), (None, None, None));
    }

    #[test]
    fn latencies_are_weighted_by_requests() {
        let both = together(storage(98, Some(100)), storage(0, Some(1_100)));
        assert_eq!(both.latency_us, Some(110));
        let most = storage(u64::MAX, Some(u64::MAX));
        assert_eq!(together(most, most), most);
        let (one, other) = (of_vm(&vm(Some(vec![both]))), of_vm(&vm(None)));
        let sum = add(&one, &other);
        assert_eq!((sum[0], sum[READS], sum[LATENCY]), (Some(1_000), Some(98), Some(110)));
    }

    #[test]
    fn a_host_has_what_its_vms_have() {
        let directories = BTreeMap::from([("/srv".to_owned(), storage(5, None))]);
        let host = HostLoad { cpu_used_millicores: 900, directories, ..HostLoad::default() };
        let sample = LoadSample { host, vms: vec![vm(None), vm(None)], ..LoadSample::default() };
        let figures = of_host(&sample);
        assert_eq!((figures[0], figures[1], figures[READS]), (Some(900), Some(6), Some(5)));
        assert_eq!(figures[4], None);
    }

    #[test]
    fn a_shared_datastore_has_the_requests_of_all_hosts_and_its_space_once() {
        let mut info = rig::host("a", None);
        let space = DatastoreInfo { total_bytes: 100, free_bytes: 40, ..DatastoreInfo::default() };
        info.datastores.insert("/srv".into(), space);
        let directories = ["/srv", "/elsewhere"].map(|at| (at.to_owned(), storage(5, None)));
        let host = HostLoad { directories: directories.into(), ..HostLoad::default() };
        let sample = LoadSample { host, ..LoadSample::default() };
        let mut all = BTreeMap::new();
        for _ in 0..2 {
            add_datastores(&mut all, &sample, &info, |_| "shared".to_owned());
        }
        let figures = all["shared"].figures();
        assert_eq!((all.len(), figures[USED], figures[READS]), (1, Some(60), Some(10)));
        assert_eq!(figures[0], None);
    }
}
