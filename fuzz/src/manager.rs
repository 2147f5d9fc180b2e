//! What hosts send to the manager: what they report, what they answer, and who asks to join.

use std::sync::LazyLock;

use godwit_api::control::{JoinRequest, JoinTokenText, ManagedVm, PreflightReport};
use godwit_api::{EventParser, HostEvent, HostInfo, Told, VmInfo};
use godwit_control::cluster::inventory::{HostPlan, Inventory};
use godwit_control::preflight::with_dry_run;
use godwit_migration::DryRun;
use serde_json::json;

/// The longest event that the manager reads.
const MOST_EVENT_BYTES: usize = 2 << 20;
const VMS: [&str; 3] = ["db", "web", "web-2"];

/// A host of the cluster; `a` has all VMs.
fn host(name: &str) -> HostInfo {
    let info = json!({
        "name": name, "version": "0.8.0", "kernel": "6.18", "memory_available_bytes": 1_u64 << 36,
        "memory_committed_bytes": 0, "huge_pages": true, "migration_addresses": ["10.0.0.1"],
        "networks": {}, "peers": {}, "vms": 0,
    });
    serde_json::from_value(info).expect("a host")
}

fn vm(name: &str) -> VmInfo {
    let info = json!({
        "name": name, "host": "a", "state": "running", "epoch": 3, "memory_bytes": 1_u64 << 30, "vcpus": 1,
        "incarnation": "6f1c0a52b7d94e0f8a3c5d7e9b1f2a40", "accel": "kvm", "machine": "pc-q35-10.0",
        "addresses": [], "spec": { "name": name, "kernel": "/k", "uuid": "5b0e2c84-6a1f-4d17-9a53-0c6f7d1e2b34" },
    });
    serde_json::from_value(info).expect("a VM")
}

/// Hosts that tell the truth, and one that is about to be heard.
fn cluster() -> Inventory {
    let mut inventory = Inventory::default();
    for name in ["a", "b", "liar"] {
        inventory.plan_host(name, HostPlan { address: format!("http://{name}:1"), ..HostPlan::default() });
        inventory.reached(name);
        inventory.heard(name, HostEvent::Host(Box::new(host(name))), 1);
        if name == "a" {
            VMS.iter().for_each(|vm| drop(inventory.heard(name, HostEvent::Vm(Box::new(self::vm(vm))), 1)));
        }
        if name != "liar" {
            inventory.heard(name, HostEvent::Known, 1);
        }
    }
    inventory
}

/// VMs as everybody is told of them, without who else claims them.
fn seen(inventory: &Inventory) -> Vec<Option<ManagedVm>> {
    let of = |name: &&str| {
        let mut vm = inventory.vm(name)?;
        vm.also_at.clear();
        vm.summary.conflicts.clear();
        vm.summary.also_runs_at.clear();
        Some(vm)
    };
    VMS.iter().map(of).collect()
}

static BEFORE: LazyLock<Vec<Option<ManagedVm>>> = LazyLock::new(|| seen(&cluster()));

/// A stream of events of one host, through all that the manager does with them: nothing of other hosts changes.
pub fn run_reports(data: &[u8]) {
    let mut inventory = cluster();
    let mut parser = EventParser::with_events_of_at_most(MOST_EVENT_BYTES);
    for event in parser.push(data).into_iter().flatten() {
        if let Ok(Some(event)) = HostEvent::read(&event.name, &event.data) {
            inventory.heard("liar", event, 2);
        }
    }
    assert_eq!(seen(&inventory), *BEFORE);
    assert!(inventory.vms_of("a").count() == VMS.len() && inventory.vms_of("b").count() == 0);
    // What everybody asks can be answered.
    drop((inventory.host("liar"), inventory.tally(), inventory.unstored_bindings()));
    inventory.forget_host("liar");
    assert_eq!(seen(&inventory), *BEFORE);
}

/// An agent's answer to a dry run, in the report that the manager makes of it.
pub fn run_answers(data: &[u8]) {
    let Ok(dry_run) = serde_json::from_slice::<DryRun>(data) else { return };
    let report = json!({
        "vm": "web", "from": "a", "to": "b", "verdict": "unknown", "prediction": null,
        "checks": [
            { "name": "agents", "verdict": "unknown", "evidence": "not asked", "mend": "" },
            { "name": "disks", "verdict": "warn", "evidence": "not seen", "mend": "" },
        ],
    });
    let mut report: PreflightReport = serde_json::from_value(report).expect("a report");
    with_dry_run(&mut report, dry_run);
    let written = serde_json::to_vec(&report).expect("it can be written");
    assert!(serde_json::from_slice::<PreflightReport>(&written).is_ok(), "what was written can't be read");
}

/// A request to join, its token and its signing request.
pub fn run_joins(data: &[u8]) {
    if let Ok(text) = std::str::from_utf8(data) {
        let _ = godwit_pki::requested_key(text);
    }
    let Ok(request) = serde_json::from_slice::<JoinRequest>(data) else { return };
    let _ = request.token.parse::<JoinTokenText>();
    let _ = godwit_pki::requested_key(&request.request);
}
