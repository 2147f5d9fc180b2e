//! Limits of the reports that the manager accepts from a host: the number of VMs, the size of a
//! report, and the range of values. Pure.
//!
//! A host's certificate proves who reports, not that the report is true. The limits bound the
//! memory that a host can use in the manager. A report outside of them is refused: the host is
//! shown as faulty and away, with the reason.

use std::collections::BTreeSet;

use godwit_api::{
    DatastoreInfo, HostInfo, LoadSample, MOST_SAMPLED_DIRECTORIES, MOST_SAMPLED_DISKS,
    MOST_SAMPLED_PATH_BYTES, MOST_SAMPLED_VMS, MigrationStatus, StorageLoad, VmInfo, VmLoad,
};
use serde::Serialize;
use serde_json::Value;

use crate::cluster::names::check_name;
use crate::cluster::text::beginning;

/// Most VMs of a host.
pub(crate) const MOST_VMS: usize = 8_192;
/// Most bytes of all VMs of a host, as JSON.
pub(crate) const MOST_VM_BYTES_OF_HOST: usize = 16 << 20;
/// Longest reason or message that is kept, bytes; longer ones are cut.
pub(crate) const MOST_REASON_BYTES: usize = 1_024;
/// Longest answer that is read from an agent, bytes.
pub(crate) const MOST_ANSWER_BYTES: usize = 4 << 20;
/// Most other hosts that an agent may know.
const MOST_PEERS: usize = 16_384;
/// Most bytes of a migration's progress, which is kept while its move runs.
const MOST_PROGRESS_BYTES: usize = 64 << 10;
/// Longest name of a migration, bytes.
const MOST_ID_BYTES: usize = 128;
/// Longest identity of a datastore, bytes: agents send UUIDs.
const MOST_IDENTITY_BYTES: usize = 64;
/// Longest name of the kind of a file system, bytes.
const MOST_KIND_BYTES: usize = 32;
/// Highest epoch. A migration increases it by two at most.
const MOST_EPOCH: u64 = 1 << 48;
/// Most memory of a VM or a host, bytes.
const MOST_MEMORY_BYTES: u64 = 1 << 56;
/// Most virtual CPUs of a VM, and processors of a host.
const MOST_CPUS: u32 = 1 << 20;
/// Highest load average.
const MOST_LOAD: f64 = 1e9;
/// Highest figure of a sample of load: bytes or requests a second, millicores, microseconds.
const MOST_FIGURE: u64 = 1 << 56;

/// Highest absolute value of any number: above that of any 64-bit integer.
const MOST_NUMBER: f64 = 2e19;

/// Limits of the size of a value.
struct Bounds {
    what: &'static str,
    /// Most bytes of the whole value, as JSON.
    bytes: usize,
    /// Longest text in it, bytes; names of fields count as texts.
    text_bytes: usize,
    /// Most items of a list or map in it.
    items: usize,
}

const OF_VM: Bounds = Bounds { what: "a VM", bytes: 64 << 10, text_bytes: 8 << 10, items: 256 };
const OF_HOST: Bounds =
    Bounds { what: "a host", bytes: 512 << 10, text_bytes: 4 << 10, items: 4_096 };
const OF_PROGRESS: Bounds = Bounds {
    what: "a migration's progress",
    bytes: MOST_PROGRESS_BYTES,
    text_bytes: 4 << 10,
    items: 1_024,
};

/// Reason why a host's report is refused: no correct agent sends it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Misreport(pub(crate) String);

impl Misreport {
    pub(crate) fn new(text: impl Into<String>) -> Misreport {
        Misreport(beginning(&text.into(), MOST_REASON_BYTES))
    }
}

/// Checks a reported VM and shortens its reason. Returns the VM's bytes as JSON.
pub(crate) fn check_vm(info: &mut VmInfo) -> Result<usize, Misreport> {
    check_reported_name(&info.name)?;
    if info.spec.name != info.name {
        return Err(Misreport::new(format!(
            "VM {} has the specification of another VM",
            info.name
        )));
    }
    cut(&mut info.reason);
    let of_vm = |what: &str| Misreport::new(format!("invalid {what} of VM {}", info.name));
    check(info.epoch <= MOST_EPOCH, || of_vm(&format!("epoch {}", info.epoch)))?;
    check(info.memory_bytes <= MOST_MEMORY_BYTES, || {
        of_vm(&format!("memory size {}", info.memory_bytes))
    })?;
    check(info.vcpus <= MOST_CPUS, || of_vm(&format!("number {} of virtual CPUs", info.vcpus)))?;
    let migration = info.migration.as_deref().unwrap_or_default();
    check(migration.len() <= MOST_ID_BYTES, || of_vm("name of a migration"))?;
    measure(info, &OF_VM)
}

/// Checks a host's report of itself and shortens its reasons. Of `peers` only the number is
/// checked:
/// they are not kept.
pub(crate) fn check_host(info: &mut HostInfo) -> Result<(), Misreport> {
    check(info.peers.len() <= MOST_PEERS, || {
        Misreport::new(format!(
            "its report lists {} other hosts: at most {MOST_PEERS} are accepted",
            info.peers.len()
        ))
    })?;
    for reason in [
        &mut info.qemu_problem,
        &mut info.kvm_reason,
        &mut info.tracking_problem,
        &mut info.cpu_problem,
    ] {
        cut(reason);
    }
    for datastore in info.datastores.values_mut() {
        check_datastore(datastore)?;
    }
    let memory =
        [info.memory_total_bytes, info.memory_available_bytes, info.memory_committed_bytes];
    for bytes in memory {
        let impossible =
            || Misreport::new(format!("invalid memory size of the host: {bytes} bytes"));
        check(bytes <= MOST_MEMORY_BYTES, impossible)?;
    }
    let cores = info.logical_cores;
    check(cores <= MOST_CPUS, || Misreport::new(format!("invalid number of processors: {cores}")))?;
    let load = info.load_average_1min;
    check((0.0..=MOST_LOAD).contains(&load), || {
        Misreport::new(format!("invalid load average: {load}"))
    })?;
    let peers = std::mem::take(&mut info.peers);
    let measured = measure(info, &OF_HOST);
    info.peers = peers;
    measured.map(drop)
}

/// Checks what a host reports of a directory with disks, and shortens its problem.
fn check_datastore(info: &mut DatastoreInfo) -> Result<(), Misreport> {
    cut(&mut info.problem);
    let is_word = |text: &str| text.chars().all(|part| part.is_ascii_alphanumeric() || part == '-');
    let is_identity = info
        .identity
        .as_deref()
        .is_none_or(|text| (1..=MOST_IDENTITY_BYTES).contains(&text.len()) && is_word(text));
    check(is_identity, || Misreport::new("it reports an invalid identity of a datastore"))?;
    let kind = info.kind.as_deref().unwrap_or_default();
    check(kind.len() <= MOST_KIND_BYTES && is_word(kind), || {
        Misreport::new("it reports an invalid kind of a datastore")
    })
}

/// Checks a reported migration: its source must be the host that reports it.
pub(crate) fn check_migration(host: &str, status: &MigrationStatus) -> Result<(), Misreport> {
    check_reported_name(&status.vm)?;
    let names = [&status.id, &status.from, &status.to];
    let are_short = names.iter().all(|name| name.len() <= MOST_ID_BYTES);
    check(are_short, || {
        Misreport::new(format!("a name in a migration of VM {} is too long", status.vm))
    })?;
    check(status.from == host, || {
        Misreport::new(format!(
            "it reports migration {}, which leaves host {}",
            status.id, status.from
        ))
    })?;
    measure(&status.progress, &OF_PROGRESS).map(drop)
}

/// Checks a host's sample of its load.
pub(crate) fn check_load(sample: &LoadSample) -> Result<(), Misreport> {
    let host = &sample.host;
    let wrong = |what: &str| Misreport::new(format!("its sample of load has {what}"));
    check(sample.vms.len() <= MOST_SAMPLED_VMS, || wrong("too many VMs"))?;
    check(host.directories.len() <= MOST_SAMPLED_DIRECTORIES, || wrong("too many directories"))?;
    check(host.cores <= MOST_CPUS, || wrong("an invalid number of processors"))?;
    let figures = [
        host.cpu_used_millicores,
        host.memory_total_bytes,
        host.memory_used_bytes,
        host.rx_bytes_per_s,
        host.tx_bytes_per_s,
    ];
    let mut storage = host.directories.iter();
    let is_valid = figures.iter().all(|figure| *figure <= MOST_FIGURE)
        && storage.all(|(path, load)| is_storage_load(path, load));
    check(is_valid, || wrong("an invalid figure of the host"))?;
    let mut names = BTreeSet::new();
    for vm in &sample.vms {
        check_reported_name(&vm.name)?;
        check(names.insert(&vm.name), || wrong(&format!("VM {} twice", vm.name)))?;
        check(is_vm_load(vm), || wrong(&format!("an invalid figure of VM {}", vm.name)))?;
    }
    Ok(())
}

fn is_vm_load(vm: &VmLoad) -> bool {
    let figures = [
        vm.cpu_used_millicores,
        vm.cpu_ready_millicores.unwrap_or(0),
        vm.memory_total_bytes,
        vm.memory_used_bytes,
        vm.memory_ballooned_bytes.unwrap_or(0),
        vm.dirty_bytes_per_s.unwrap_or(0),
        vm.rx_bytes_per_s,
        vm.tx_bytes_per_s,
    ];
    let disks = vm.disks.as_deref().unwrap_or_default();
    vm.vcpus <= MOST_CPUS
        && figures.iter().all(|figure| *figure <= MOST_FIGURE)
        && disks.len() <= MOST_SAMPLED_DISKS
        && disks.iter().all(|disk| is_storage_load(&disk.path, &disk.load))
}

fn is_storage_load(path: &str, load: &StorageLoad) -> bool {
    let figures = [
        load.reads_per_s,
        load.writes_per_s,
        load.read_bytes_per_s,
        load.write_bytes_per_s,
        load.latency_us.unwrap_or(0),
    ];
    path.len() <= MOST_SAMPLED_PATH_BYTES && figures.iter().all(|figure| *figure <= MOST_FIGURE)
}

/// Checks the name of a reported VM.
pub(crate) fn check_reported_name(name: &str) -> Result<(), Misreport> {
    check_name(name)
        .map_err(|_| Misreport::new(format!("it reports a VM with the invalid name {name:?}")))
}

fn check(holds: bool, fault: impl FnOnce() -> Misreport) -> Result<(), Misreport> {
    if holds { Ok(()) } else { Err(fault()) }
}

fn cut(reason: &mut Option<String>) {
    if let Some(text) = reason.as_mut().filter(|text| text.len() > MOST_REASON_BYTES) {
        *text = beginning(text, MOST_REASON_BYTES);
    }
}

/// Checks the size of a value. Returns its bytes as JSON.
fn measure(value: &impl Serialize, bounds: &Bounds) -> Result<usize, Misreport> {
    let what = bounds.what;
    let value = serde_json::to_value(value)
        .map_err(|error| Misreport::new(format!("cannot store its report of {what}: {error}")))?;
    let bytes = bytes_of(&value, bounds)?;
    let too_large = || {
        Misreport::new(format!("it reports {bytes} bytes of {what}: the most is {}", bounds.bytes))
    };
    check(bytes <= bounds.bytes, too_large)?;
    Ok(bytes)
}

fn bytes_of(value: &Value, bounds: &Bounds) -> Result<usize, Misreport> {
    let Bounds { what, text_bytes, items, .. } = bounds;
    let text = |text: &str| {
        let too_long = || {
            Misreport::new(format!(
                "its report of {what} has a text of {} bytes: the most is {text_bytes}",
                text.len()
            ))
        };
        check(text.len() <= *text_bytes, too_long).map(|()| text.len() + 2)
    };
    let list = |len: usize| {
        let too_long = || {
            Misreport::new(format!(
                "its report of {what} has a list of {len}: the most is \
                {items}"
            ))
        };
        check(len <= *items, too_long)
    };
    match value {
        Value::Null | Value::Bool(_) => Ok(8),
        Value::Number(number) => {
            let is_possible = number.as_f64().is_some_and(|number| number.abs() <= MOST_NUMBER);
            check(is_possible, || {
                Misreport::new(format!("its report of {what} has the invalid number {number}"))
            })?;
            Ok(8)
        }
        Value::String(string) => text(string),
        Value::Array(values) => {
            list(values.len())?;
            values.iter().try_fold(2, |sum, value| Ok(sum + 1 + bytes_of(value, bounds)?))
        }
        Value::Object(fields) => {
            list(fields.len())?;
            fields.iter().try_fold(2, |sum, (name, value)| {
                Ok(sum + 2 + text(name)? + bytes_of(value, bounds)?)
            })
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::rig;

    fn fault(change: impl FnOnce(&mut VmInfo)) -> String {
        let mut info = rig::vm("web", "a", None);
        change(&mut info);
        check_vm(&mut info).unwrap_err().to_string()
    }

    #[test]
    fn a_vm_is_bounded_in_every_field() {
        assert!(check_vm(&mut rig::vm("web", "a", None)).is_ok());
        assert!(fault(|vm| vm.name = "../web".into()).contains("name"));
        assert!(fault(|vm| vm.name = "w".repeat(64)).contains("name"));
        assert!(fault(|vm| vm.spec.name = "db".into()).contains("another"));
        assert!(fault(|vm| vm.epoch = u64::MAX).contains("epoch"));
        assert!(fault(|vm| vm.memory_bytes = u64::MAX).contains("memory"));
        assert!(fault(|vm| vm.vcpus = u32::MAX).contains("virtual CPUs"));
        assert!(fault(|vm| vm.machine = "q".repeat(9 << 10)).contains("text"));
        assert!(fault(|vm| vm.migration = Some("m".repeat(200))).contains("migration"));
        let many = || std::net::IpAddr::from([10, 0, 0, 1]);
        assert!(fault(|vm| vm.addresses = vec![many(); 257]).contains("list of 257"));
        let disk = json!({ "path": format!("/{}", "d".repeat(4_000)), "format": "raw" });
        let disks: Vec<_> = vec![serde_json::from_value(disk).unwrap(); 20];
        assert!(fault(|vm| vm.spec.disks = disks).contains("bytes of a VM"));
    }

    #[test]
    fn long_reasons_are_shortened_and_not_refused() {
        let mut info = rig::vm("web", "a", None);
        info.reason = Some("why ".repeat(10_000));
        check_vm(&mut info).unwrap();
        assert!(info.reason.unwrap().len() <= MOST_REASON_BYTES + "…".len());
    }

    #[test]
    fn a_migration_is_bounded_and_leaves_the_host_that_reports_it() {
        let status = |from: &str| MigrationStatus::begun("m1", "web", from, "b", 1);
        assert!(check_migration("a", &status("a")).is_ok());
        let fault =
            |status: &MigrationStatus| check_migration("a", status).unwrap_err().to_string();
        assert!(fault(&status("b")).contains("leaves host b"));
        let mut late = status("a");
        late.progress.elapsed_ms = -1.5e300;
        assert!(fault(&late).contains("invalid number"));
        assert!(
            fault(&MigrationStatus { to: "t".repeat(200), ..status("a") }).contains("too long")
        );
        assert!(fault(&MigrationStatus { vm: "a/b".into(), ..status("a") }).contains("name"));
    }

    #[test]
    fn a_sample_of_load_is_bounded_in_every_field() {
        let vm = |name: &str| VmLoad { name: name.to_owned(), ..VmLoad::default() };
        let valid = || LoadSample { vms: vec![vm("web"), vm("db")], ..LoadSample::default() };
        assert!(check_load(&valid()).is_ok());
        let fault = |change: &dyn Fn(&mut LoadSample)| {
            let mut sample = valid();
            change(&mut sample);
            check_load(&sample).unwrap_err().to_string()
        };
        let many = |count: usize| -> Vec<VmLoad> {
            (0..count).map(|number| vm(&format!("vm{number}"))).collect()
        };
        let too_long = "/".repeat(MOST_SAMPLED_PATH_BYTES + 1);
        let large = StorageLoad { latency_us: Some(u64::MAX), ..StorageLoad::default() };
        let disk = |path: &str, load| godwit_api::DiskLoad { path: path.to_owned(), load };
        assert!(fault(&|sample| sample.vms = many(MOST_SAMPLED_VMS + 1)).contains("too many VMs"));
        assert!(fault(&|sample| sample.vms[1] = vm("web")).contains("twice"));
        assert!(fault(&|sample| sample.vms[1] = vm("../x")).contains("name"));
        assert!(fault(&|sample| sample.vms[0].tx_bytes_per_s = u64::MAX).contains("VM web"));
        assert!(fault(&|sample| sample.vms[0].vcpus = u32::MAX).contains("VM web"));
        for disks in [
            vec![disk("/d", large)],
            vec![disk(&too_long, StorageLoad::default())],
            vec![disk("/d", StorageLoad::default()); MOST_SAMPLED_DISKS + 1],
        ] {
            assert!(fault(&|sample| sample.vms[0].disks = Some(disks.clone())).contains("VM web"));
        }
        assert!(fault(&|sample| sample.host.cores = u32::MAX).contains("processors"));
        assert!(fault(&|sample| sample.host.memory_used_bytes = u64::MAX).contains("the host"));
        let put = |path: &str, load| {
            fault(&|sample| {
                sample.host.directories.insert(path.to_owned(), load);
            })
        };
        assert!(put("/srv", large).contains("the host"));
        assert!(put(&too_long, StorageLoad::default()).contains("the host"));
        let many = (0..=MOST_SAMPLED_DIRECTORIES).map(|number| (format!("/{number}"), large));
        let many: std::collections::BTreeMap<_, _> = many.collect();
        let of_many = fault(&|sample| sample.host.directories.clone_from(&many));
        assert!(of_many.contains("directories"));
    }

    #[test]
    fn a_host_is_bounded_in_every_field() {
        let fault = |change: &dyn Fn(&mut HostInfo)| {
            let mut info = rig::host("a", None);
            change(&mut info);
            check_host(&mut info).unwrap_err().to_string()
        };
        assert!(check_host(&mut rig::host("a", Some(&rig::cpu(&["aes"])))).is_ok());
        assert!(fault(&|host| host.memory_available_bytes = u64::MAX).contains("memory"));
        assert!(fault(&|host| host.logical_cores = u32::MAX).contains("processors"));
        assert!(fault(&|host| host.load_average_1min = -1.0).contains("load"));
        assert!(fault(&|host| host.load_average_1min = f64::MAX).contains("load"));
        assert!(fault(&|host| host.machines = vec!["pc".into(); 5_000]).contains("list of 5000"));
        assert!(fault(&|host| host.kernel = "6".repeat(5_000)).contains("text"));
        assert!(
            fault(&|host| host.vm_dirs = vec!["/d".repeat(1_000).into(); 400])
                .contains("bytes of a host")
        );
        let datastore = |change: &dyn Fn(&mut DatastoreInfo)| {
            fault(&|host| {
                let mut info = DatastoreInfo::default();
                change(&mut info);
                host.datastores.insert("/srv".into(), info);
            })
        };
        assert!(datastore(&|info| info.identity = Some("../x".into())).contains("identity"));
        assert!(datastore(&|info| info.kind = Some("n".repeat(33))).contains("kind"));
        let peers = (0..=MOST_PEERS).map(|number| (number.to_string(), String::new()));
        let peers: std::collections::BTreeMap<String, String> = peers.collect();
        assert!(fault(&|host| host.peers.clone_from(&peers)).contains("other hosts"));
    }
}
