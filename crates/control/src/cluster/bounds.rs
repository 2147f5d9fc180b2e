//! What the manager takes from a host: how many VMs, how large each report may be, and which values are possible. Pure.
//!
//! A host's certificate says who reports, not that it is true. So a host costs the manager a bounded amount of memory,
//! and a value that no agent reports ends the connection: the host is shown as faulty, with the reason.

use godwit_api::{HostInfo, MigrationStatus, VmInfo};
use serde::Serialize;
use serde_json::Value;

use crate::cluster::names::check_name;
use crate::cluster::text::beginning;

pub(crate) const MOST_VMS: usize = 4_096;
/// Bytes of all of a host's VMs, as JSON.
pub(crate) const MOST_VM_BYTES_OF_HOST: usize = 16 << 20;
/// The longest text that is kept of a reason or a message; a longer one is cut.
pub(crate) const MOST_REASON_BYTES: usize = 1_024;
/// The longest answer that is read from an agent.
pub(crate) const MOST_ANSWER_BYTES: usize = 4 << 20;
/// Other hosts that an agent may know.
const MOST_PEERS: usize = 16_384;
/// Bytes of a migration's progress, which is kept while its move runs.
const MOST_PROGRESS_BYTES: usize = 64 << 10;
/// Names of migrations.
const MOST_ID_BYTES: usize = 128;
/// Epochs grow by two in a migration at most.
const MOST_EPOCH: u64 = 1 << 48;
/// Memory of a VM or a host, bytes.
const MOST_MEMORY_BYTES: u64 = 1 << 56;
/// Virtual CPUs of a VM, and processors of a host.
const MOST_CPUS: u32 = 1 << 20;
/// Tasks that run or want to.
const MOST_LOAD: f64 = 1e9;

/// Any number: 64 bits.
const MOST_NUMBER: f64 = 2e19;

/// How large a value may be.
struct Bounds {
    what: &'static str,
    /// All of it, as JSON.
    bytes: usize,
    /// Each text in it, names of fields included.
    text_bytes: usize,
    /// Each list or map in it.
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

/// What a host reported that no agent reports.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Misreport(pub(crate) String);

impl Misreport {
    pub(crate) fn new(text: impl Into<String>) -> Misreport {
        Misreport(beginning(&text.into(), MOST_REASON_BYTES))
    }
}

/// Checks a VM that a host reports, and cuts its reason; its bytes as JSON.
pub(crate) fn check_vm(info: &mut VmInfo) -> Result<usize, Misreport> {
    check_reported_name(&info.name)?;
    if info.spec.name != info.name {
        return Err(Misreport::new(format!(
            "VM {} has the specification of another one",
            info.name
        )));
    }
    cut(&mut info.reason);
    let of_vm = |what: &str| Misreport::new(format!("{what} of VM {} is not possible", info.name));
    check(info.epoch <= MOST_EPOCH, || of_vm(&format!("epoch {}", info.epoch)))?;
    check(info.memory_bytes <= MOST_MEMORY_BYTES, || {
        of_vm(&format!("a memory of {} bytes", info.memory_bytes))
    })?;
    check(info.vcpus <= MOST_CPUS, || of_vm(&format!("a count of {} virtual CPUs", info.vcpus)))?;
    let migration = info.migration.as_deref().unwrap_or_default();
    check(migration.len() <= MOST_ID_BYTES, || of_vm("the name of a migration"))?;
    measure(info, &OF_VM)
}

/// Checks what a host reports of itself, and cuts its texts. `peers` are counted and not kept.
pub(crate) fn check_host(info: &mut HostInfo) -> Result<(), Misreport> {
    check(info.peers.len() <= MOST_PEERS, || {
        Misreport::new(format!(
            "it reports {} other hosts: {MOST_PEERS} are the most",
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
    let memory =
        [info.memory_total_bytes, info.memory_available_bytes, info.memory_committed_bytes];
    for bytes in memory {
        let impossible =
            || Misreport::new(format!("a host's memory of {bytes} bytes is not possible"));
        check(bytes <= MOST_MEMORY_BYTES, impossible)?;
    }
    let cores = info.logical_cores;
    check(cores <= MOST_CPUS, || {
        Misreport::new(format!("a count of {cores} processors is not possible"))
    })?;
    let load = info.load_average_1min;
    check((0.0..=MOST_LOAD).contains(&load), || {
        Misreport::new(format!("a load of {load} is not possible"))
    })?;
    let peers = std::mem::take(&mut info.peers);
    let measured = measure(info, &OF_HOST);
    info.peers = peers;
    measured.map(drop)
}

/// Checks a migration that a host reports as one that leaves it.
pub(crate) fn check_migration(host: &str, status: &MigrationStatus) -> Result<(), Misreport> {
    check_reported_name(&status.vm)?;
    let names = [&status.id, &status.from, &status.to];
    let are_short = names.iter().all(|name| name.len() <= MOST_ID_BYTES);
    check(are_short, || {
        Misreport::new(format!("a migration of VM {} has too long a name", status.vm))
    })?;
    check(status.from == host, || {
        Misreport::new(format!(
            "it reports migration {}, which leaves host {}",
            status.id, status.from
        ))
    })?;
    measure(&status.progress, &OF_PROGRESS).map(drop)
}

/// Checks the name of a VM that a host reports.
pub(crate) fn check_reported_name(name: &str) -> Result<(), Misreport> {
    check_name(name).map_err(|_| {
        Misreport::new(format!("it reports a VM by a name that none can have: {name:?}"))
    })
}

fn check(holds: bool, fault: impl FnOnce() -> Misreport) -> Result<(), Misreport> {
    if holds { Ok(()) } else { Err(fault()) }
}

fn cut(reason: &mut Option<String>) {
    if let Some(text) = reason.as_mut().filter(|text| text.len() > MOST_REASON_BYTES) {
        *text = beginning(text, MOST_REASON_BYTES);
    }
}

/// Checks how large a value is; its bytes as JSON.
fn measure(value: &impl Serialize, bounds: &Bounds) -> Result<usize, Misreport> {
    let what = bounds.what;
    let value = serde_json::to_value(value).map_err(|error| {
        Misreport::new(format!("what it reports of {what} can't be kept: {error}"))
    })?;
    let bytes = bytes_of(&value, bounds)?;
    let too_large = || {
        Misreport::new(format!("it reports {bytes} bytes of {what}: {} are the most", bounds.bytes))
    };
    check(bytes <= bounds.bytes, too_large)?;
    Ok(bytes)
}

fn bytes_of(value: &Value, bounds: &Bounds) -> Result<usize, Misreport> {
    let Bounds { what, text_bytes, items, .. } = bounds;
    let text = |text: &str| {
        let too_long = || {
            Misreport::new(format!(
                "it reports a text of {} bytes of {what}: {text_bytes} are the most",
                text.len()
            ))
        };
        check(text.len() <= *text_bytes, too_long).map(|()| text.len() + 2)
    };
    let list = |len: usize| {
        let too_long = || {
            Misreport::new(format!("it reports a list of {len} of {what}: {items} are the most"))
        };
        check(len <= *items, too_long)
    };
    match value {
        Value::Null | Value::Bool(_) => Ok(8),
        Value::Number(number) => {
            let is_possible = number.as_f64().is_some_and(|number| number.abs() <= MOST_NUMBER);
            check(is_possible, || {
                Misreport::new(format!("it reports {number} of {what}, which is not possible"))
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
    fn long_reasons_are_cut_and_no_fault() {
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
        assert!(fault(&late).contains("not possible"));
        assert!(
            fault(&MigrationStatus { to: "t".repeat(200), ..status("a") }).contains("too long")
        );
        assert!(fault(&MigrationStatus { vm: "a/b".into(), ..status("a") }).contains("name"));
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
        let peers = (0..=MOST_PEERS).map(|number| (number.to_string(), String::new()));
        let peers: std::collections::BTreeMap<String, String> = peers.collect();
        assert!(fault(&|host| host.peers.clone_from(&peers)).contains("other hosts"));
    }
}
