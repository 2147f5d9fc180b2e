use godwit_api::control::{CheckName, PreflightRanking, ProblemCode, Verdict};
use godwit_api::{HostInfo, VmInfo};
use godwit_planner::queue::Limits;
use serde_json::{Value, json};

use super::ranking::first;
use super::*;
use crate::cluster::planner_input::{Arriving, placement_hosts};
use crate::rig::put_host;

const GIB: u64 = 1 << 30;

fn cpu(features: &[&str]) -> Value {
    let holds = json!(["aes", "lm", "pni"]);
    let missing: Vec<&str> =
        ["aes", "lm", "pni"].into_iter().filter(|name| !features.contains(name)).collect();
    let models: Vec<&str> =
        if missing.is_empty() { vec!["Westmere-v1", "max"] } else { vec!["max"] };
    json!({
        "vendor": "GenuineIntel", "name": "Xeon", "accel": "kvm", "features": features,
        "models": models,
        "generations": { "Westmere-v1": { "features": holds, "missing": missing } },
    })
}

/// Returns a suitable host for the VM, with changes.
fn host(name: &str, change: &Value) -> HostInfo {
    let mut info = json!({
        "name": name, "version": "0.5.0", "kernel": "6.18", "qemu_version": "10.0.2",
        "machines": ["pc-q35-7.2", "pc-q35-10.0"],
        "kvm": true, "cpu": cpu(&["aes", "lm", "pni"]), "memory_available_bytes": 64 * GIB,
        "memory_committed_bytes": 0,
        "huge_pages": true, "migration_addresses": ["10.0.0.1"],
        "networks": { "prod": { "bridge": "br0" } },
        "vm_dirs": ["/vms"], "peers": { "a": "http://a:7700", "b": "http://b:7700" }, "vms": 1,
    });
    merge(&mut info, change);
    serde_json::from_value(info).unwrap()
}

fn vm(change: &Value) -> VmInfo {
    let mut info = json!({
        "name": "web", "host": "a", "state": "running", "epoch": 3, "memory_bytes": 8 * GIB,
        "vcpus": 2, "accel": "kvm",
        "machine": "pc-q35-7.2", "addresses": [],
        "spec": {
            "name": "web", "memory": [{ "size": "8GiB" }], "cpu_model": "Westmere-v1",
            "machine": "pc-q35-7.2",
            "disks": [{ "path": "/vms/web.qcow2", "format": "qcow2" }],
            "nics": [{ "network": "prod" }],
        },
    });
    merge(&mut info, change);
    serde_json::from_value(info).unwrap()
}

/// Applies the changes that `from` names; an empty map replaces the existing one.
fn merge(into: &mut Value, from: &Value) {
    let Value::Object(from) = from else { return };
    for (key, value) in from {
        match value {
            Value::Object(nested) if !nested.is_empty() => merge(&mut into[key], value),
            value => into[key] = value.clone(),
        }
    }
}

/// Returns hosts a and b, and a VM `web` on a, each with changes.
fn cluster(of_vm: &Value, of_a: &Value, of_b: &Value) -> Inventory {
    let mut inventory = Inventory::default();
    put_host(&mut inventory, host("a", of_a), &[], vec![vm(of_vm)]);
    put_host(&mut inventory, host("b", of_b), &[], Vec::new());
    inventory
}

fn report(inventory: &Inventory) -> PreflightReport {
    let subject = Subject::of(inventory, "web", EngineKind::default()).unwrap();
    subject.report(inventory.seen_host("b").unwrap(), subject.rules_check("b", &[], &[]))
}

fn check(inventory: &Inventory, name: CheckName) -> Check {
    report(inventory).checks.into_iter().find(|check| check.name == name).unwrap()
}

#[test]
fn a_suitable_target_passes_all_checks_except_those_only_hosts_can_answer() {
    let inventory = cluster(&json!({}), &json!({}), &json!({}));
    let report = report(&inventory);
    for check in &report.checks {
        let expected =
            if check.name == CheckName::Disks { Verdict::Unknown } else { Verdict::Pass };
        assert_eq!(check.verdict, expected, "{check:?}");
        assert!(!check.evidence.is_empty());
    }
    assert_eq!(report.checks.len(), vm::CHECKS.len() + pair::CHECKS.len() + 1);
    assert_eq!(report.verdict, Verdict::Unknown);
    assert!(obstacles(&inventory, "web").is_empty());
    assert_eq!(immovable(&inventory, "web"), None);
}

#[test]
fn disks_travel_to_hosts_that_do_not_share_them() {
    use Verdict::{Fail, Pass, Unknown};
    let dir = |wanted: Option<&str>| TravellingDisks {
        to: wanted.map(Into::into),
        ..TravellingDisks::default()
    };
    let stores = |dir: &str, identity: &str| {
        let store = json!({ "total_bytes": 8 * GIB, "free_bytes": 3 * GIB, "identity": identity });
        json!({ "vm_dirs": [dir], "datastores": { dir: store } })
    };
    let devices = |entry: &str| json!({ "block_devices": [entry] });
    let thin = json!({ "vm_dirs": ["lvm:vg0/thin0"] });
    let (one, two) =
        ("6d1f1a52-5a0f-4c3f-8a5e-000000000001", "6d1f1a52-5a0f-4c3f-8a5e-000000000002");
    let at_a = stores("/vms", one);
    for (at_b, wanted, verdict, words, travels) in [
        (stores("/vms", two), None, Unknown, "/vms has 3 GiB left", true),
        (stores("/vms", one), None, Pass, "stay where they are", false),
        (stores("/vms", one), Some("/vms/new"), Unknown, "/vms/new has 3 GiB left", true),
        (stores("/ssd", two), None, Fail, "/vms is below none", true),
        (stores("/ssd", two), Some("/ssd"), Unknown, "/ssd has 3 GiB left", true),
        (json!({ "vm_dirs": ["rbd:vms"] }), Some("rbd:vms"), Unknown, "host b: rbd:vms", true),
        (json!({ "vm_dirs": ["rbd:vms"] }), Some("rbd:vms/shop"), Fail, "has no pool", true),
        (thin.clone(), Some("lvm:vg0/thin0"), Unknown, "host b: lvm:vg0/thin0", true),
        (thin.clone(), Some("lvm:vg0/thin1"), Fail, "has no thin pool lvm:vg0/thin1", true),
        (devices("/dev/vg0"), Some("/dev/vg0"), Unknown, "host b: /dev/vg0", true),
        (devices("/dev/vg0/web"), Some("/dev/vg0"), Unknown, "host b: /dev/vg0", true),
        (devices("/dev/vg1"), Some("/dev/vg0"), Fail, "/dev/vg0 is below none", true),
        // An older agent reports no identity.
        (json!({}), None, Unknown, "its disks travel to host b: /vms", true),
    ] {
        let inventory = cluster(&json!({}), &at_a, &at_b);
        let wanted = dir(wanted);
        let subject = Subject::of(&inventory, "web", EngineKind::default()).unwrap();
        let subject = subject.with_disks(Some(&wanted));
        let mut checks = subject.checks_at(inventory.seen_host("b").unwrap());
        let check = checks.find(|check| check.name == CheckName::Disks).unwrap();
        assert_eq!(check.verdict, verdict, "{check:?}");
        assert!(check.evidence.contains(words), "{words} is missing in {check:?}");
        let info = inventory.vm_info("web").unwrap();
        assert_eq!(travelling(&inventory, info, "b", Some(&wanted)).is_some(), travels);
        assert_eq!(travelling(&inventory, info, "b", None), None);
        let found = obstacles_with_disks(&inventory, "web", Some(&wanted));
        assert_eq!(found.contains_key("b"), verdict == Fail, "{found:?}");
    }
}

/// Changes of the VM, of host a and of host b; then the check, its verdict and a part of its
/// evidence.
type Case = (Value, Value, Value, CheckName, Verdict, &'static str);

fn cases_of_vm_and_cpu() -> Vec<Case> {
    use CheckName as N;
    use Verdict::{Fail, Unknown, Warn};
    let no = || json!({});
    vec![
        (json!({ "state": "stopped" }), no(), no(), N::VmState, Fail, "does not run (stopped)"),
        (json!({ "in_doubt": true, "state": "paused" }), no(), no(), N::VmState, Fail, "in doubt"),
        (json!({ "state": "migrating-out" }), no(), no(), N::VmState, Fail, "migration of it"),
        (
            json!({ "page_in": { "missing_pages": 7, "connected": true } }),
            no(),
            no(),
            N::VmState,
            Fail,
            "7 of its pages are still on the host that it left",
        ),
        (
            json!({ "spec": { "protect_by_agents": true } }),
            no(),
            no(),
            N::VmState,
            Fail,
            "agents restart it among themselves",
        ),
        (
            json!({ "spec": { "extra_devices": ["vfio-pci,host=1:00.0"] } }),
            no(),
            no(),
            N::Devices,
            Fail,
            "device vfio-pci",
        ),
        (
            no(),
            json!({ "tracking_problem": "kernel 5.10 is too old" }),
            no(),
            N::Tracking,
            Fail,
            "5.10",
        ),
        (json!({ "spec": { "refuses_page_in": true } }), no(), no(), N::PageIn, Warn, "refuses"),
        (no(), no(), json!({ "cpu": cpu(&["lm", "pni"]) }), N::Cpu, Fail, "aes"),
        (
            json!({ "spec": { "cpu_model": "Icelake-Server-v7" } }),
            no(),
            no(),
            N::Cpu,
            Fail,
            "Icelake-Server-v7",
        ),
        (json!({ "spec": { "cpu_model": "max" } }), no(), no(), N::Cpu, Warn, "differs by host"),
        (
            no(),
            no(),
            json!({ "cpu": null, "cpu_problem": "QEMU did not answer" }),
            N::Cpu,
            Unknown,
            "did not answer",
        ),
        (json!({ "accel": "tcg" }), no(), no(), N::Cpu, Unknown, "uses tcg"),
    ]
}

fn cases_of_hosts() -> Vec<Case> {
    use CheckName as N;
    use Verdict::{Fail, Unknown, Warn};
    let no = || json!({});
    vec![
        (
            no(),
            no(),
            json!({ "kvm": false, "kvm_reason": "no /dev/kvm" }),
            N::Accelerator,
            Fail,
            "no /dev/kvm",
        ),
        (
            json!({ "machine": "pc-q35-9.9" }),
            no(),
            no(),
            N::MachineType,
            Fail,
            "pc-q35-9.9 is not supported by QEMU 10.0.2",
        ),
        (no(), no(), json!({ "machines": [] }), N::MachineType, Unknown, "does not report"),
        (
            json!({ "spec": { "firmware": "uefi" } }),
            no(),
            json!({ "firmware": ["bios"] }),
            N::Firmware,
            Fail,
            "no image of firmware uefi",
        ),
        (
            json!({ "spec": { "firmware": "uefi" } }),
            no(),
            no(),
            N::Firmware,
            Unknown,
            "does not report",
        ),
        (
            json!({ "spec": { "tpm": true } }),
            no(),
            json!({ "tpm": false }),
            N::Firmware,
            Fail,
            "no swtpm for its TPM",
        ),
        (json!({ "spec": { "tpm": true } }), no(), no(), N::Firmware, Unknown, "swtpm"),
        (
            json!({ "spec": { "tpm": true } }),
            json!({ "tpm": true, "tpm_version": "0.10.0" }),
            json!({ "tpm": true, "tpm_version": "0.7.1" }),
            N::Firmware,
            Warn,
            "swtpm 0.10.0 on host",
        ),
        (no(), no(), json!({ "qemu_version": "7.2.1" }), N::QemuVersion, Warn, "to an older QEMU"),
        (no(), no(), json!({ "qemu_problem": "not found" }), N::QemuVersion, Fail, "not found"),
        (no(), no(), json!({ "huge_pages": false }), N::HugePages, Warn, "slower"),
        (
            no(),
            no(),
            json!({ "vm_dirs": ["/other"] }),
            N::Disks,
            Warn,
            "/vms/web.qcow2 is below none",
        ),
        (no(), no(), json!({ "networks": {} }), N::Networks, Fail, "no network prod"),
        (
            no(),
            no(),
            json!({ "migration_addresses": [] }),
            N::Lanes,
            Fail,
            "no address for migrations",
        ),
        (no(), no(), json!({ "migration_addresses": ["fd00::1"] }), N::Lanes, Warn, "IPv6"),
        (no(), no(), json!({ "version": "0.4.0" }), N::Protocol, Warn, "0.4.0"),
    ]
}

fn cases_of_memory_and_networks() -> Vec<Case> {
    use CheckName as N;
    use Verdict::{Fail, Warn};
    let no = || json!({});
    vec![
        (
            no(),
            no(),
            json!({ "memory_available_bytes": 4 * GIB }),
            N::Memory,
            Fail,
            "it needs 8 GiB, host b has 4 GiB left",
        ),
        (
            no(),
            no(),
            json!({ "memory_available_bytes": 12 * GIB, "memory_total_bytes": 128 * GIB }),
            N::Memory,
            Warn,
            "has 12 GiB left of 128 GiB: it would be nearly full",
        ),
        (
            json!({ "spec": { "nics": [{ "network": "prod", "vlan": 20 }] } }),
            no(),
            json!({ "networks": { "prod": { "vlans": false } } }),
            N::Networks,
            Fail,
            "its bridge br0 of network prod does not filter VLANs",
        ),
        (
            json!({ "spec": { "nics": [{ "network": "prod", "filter": "mac" }] } }),
            no(),
            json!({ "nic_filters": false }),
            N::Networks,
            Fail,
            "nft is not installed",
        ),
    ]
}

#[test]
fn each_check_detects_its_obstacle() {
    use Verdict::Fail;
    let cases = [cases_of_vm_and_cpu(), cases_of_hosts(), cases_of_memory_and_networks()];
    for (of_vm, of_a, of_b, name, verdict, words) in cases.concat() {
        let inventory = cluster(&of_vm, &of_a, &of_b);
        let seen = check(&inventory, name);
        assert_eq!(seen.verdict, verdict, "{seen:?}");
        assert!(seen.evidence.contains(words), "{words} is missing in {seen:?}");
        assert!(seen.verdict == Verdict::Pass || !seen.remedy.is_empty(), "{seen:?}");
        assert_eq!(report(&inventory).verdict == Fail, verdict == Fail);
        let is_of_vm = vm::CHECKS.iter().any(|(of_vm, _)| *of_vm == name);
        assert_eq!(immovable(&inventory, "web").is_some(), is_of_vm && verdict == Fail, "{seen:?}");
        let found = obstacles(&inventory, "web");
        let keeps = verdict == Fail && !is_of_vm && name != CheckName::Memory;
        assert_eq!(
            found.get("b").is_some_and(|all| all[0].code == name.name()),
            keeps,
            "{found:?}"
        );
    }
}

fn ranking(inventory: &Inventory) -> PreflightRanking {
    let hosts = placement_hosts(&Arriving::new(), &Limits::default(), inventory);
    Subject::of(inventory, "web", EngineKind::default()).unwrap().ranking(&hosts, &[])
}

#[test]
fn the_best_host_is_chosen_or_the_reason_is_returned() {
    let no = json!({});
    let good = ranking(&cluster(&no, &no, &no));
    assert!(good.immovable.is_empty() && good.fits[0].score.total > 0.0);
    let (host, why) = first(good).unwrap();
    assert!(host == "b" && why.starts_with("best: "), "{why}");
    let none = ranking(&cluster(&no, &no, &json!({ "networks": {} })));
    let all: Vec<_> =
        none.ruled_out.iter().map(|out| (out.host.as_str(), out.why.as_str())).collect();
    assert_eq!(all, [("a", "it runs there"), ("b", "host b has no network prod (networks)")]);
    let problem = first(none).unwrap_err();
    assert_eq!(problem.code, ProblemCode::NoHost);
    assert!(problem.detail.contains("b: host b has no network prod"), "{problem}");
    let stopped = first(ranking(&cluster(&json!({ "state": "stopped" }), &no, &no))).unwrap_err();
    assert_eq!(
        (stopped.code, stopped.checks[0].name),
        (ProblemCode::Preflight, CheckName::VmState)
    );
}

#[test]
fn a_vm_that_agents_restart_moves_with_no_engine_and_to_no_host() {
    let no = json!({});
    let own = json!({ "spec": { "protect_by_agents": true } });
    let inventory = cluster(&own, &no, &no);
    for engine in [EngineKind::Godwit, EngineKind::Qemu] {
        let found = immovable_by(&inventory, "web", engine).unwrap();
        assert_eq!(found.code, CheckName::VmState.name());
        assert!(found.message.contains("vm set web --unset protect-by-agents"), "{found:?}");
    }
    let refused = first(ranking(&inventory)).unwrap_err();
    assert_eq!(refused.code, ProblemCode::Preflight);
    assert!(refused.remedy.contains("vm set web --unset protect-by-agents"), "{refused}");
    // One that does not run stays for that, protected or not.
    let own = json!({ "state": "stopped", "spec": { "protect_by_agents": true } });
    let found = immovable(&cluster(&own, &no, &no), "web").unwrap();
    assert!(found.message.contains("does not run"), "{found:?}");
}
