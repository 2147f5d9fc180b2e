//! Data of hosts for the manager: reports, responses, and requests to join.

use std::sync::LazyLock;

use godwit_api::control::{JoinRequest, JoinTokenText, ManagedVm, PreflightReport, Problem};
use godwit_api::{
    ApiError, EventParser, HostEvent, HostInfo, MigrationAccepted, MigrationStatus,
    RevocationsTaken, SetPeers, StreamEvent, VmInfo,
};
use godwit_control::cluster::inventory::{HostPlan, Inventory};
use godwit_control::fuzzing::{MOST_TEXT_BYTES, kept_of_migration, rows_of_load};
use godwit_control::preflight::with_dry_run;
use godwit_types::{DryRun, Report};
use serde::de::DeserializeOwned;
use serde_json::json;

/// Longest event that the manager reads, in bytes.
const MOST_EVENT_BYTES: usize = 2 << 20;
/// Longest stored report of a migration, in bytes (`crates/control/src/moves/reports.rs`).
const MOST_REPORT_BYTES: usize = 128 << 10;
const VMS: [&str; 3] = ["db", "web", "web-2"];

/// Returns a host of the cluster. Host `a` has all VMs.
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
        "name": name, "host": "a", "state": "running", "epoch": 3,
        "memory_bytes": 1_u64 << 30, "vcpus": 1,
        "incarnation": "6f1c0a52b7d94e0f8a3c5d7e9b1f2a40", "accel": "kvm", "machine": "pc-q35-10.0",
        "addresses": [], "spec": {
            "name": name, "kernel": "/k", "uuid": "5b0e2c84-6a1f-4d17-9a53-0c6f7d1e2b34",
        },
    });
    serde_json::from_value(info).expect("a VM")
}

/// Returns a cluster of honest hosts and one that has not reported yet.
fn cluster() -> Inventory {
    let mut inventory = Inventory::default();
    for name in ["a", "b", "liar"] {
        inventory.plan_host(
            name,
            HostPlan { address: format!("http://{name}:1"), ..HostPlan::default() },
        );
        inventory.reached(name);
        inventory.apply(name, HostEvent::Host(Box::new(host(name))), 1);
        if name == "a" {
            VMS.iter().for_each(|vm| {
                drop(inventory.apply(name, HostEvent::Vm(Box::new(self::vm(vm))), 1))
            });
        }
        if name != "liar" {
            inventory.apply(name, HostEvent::Known, 1);
        }
    }
    inventory
}

/// Returns the VMs as clients see them, without other claims to them.
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

/// Runs one host's event stream through everything that the manager does with it. Nothing of other
/// hosts may change.
pub fn run_reports(data: &[u8]) {
    let mut inventory = cluster();
    let mut parser = EventParser::with_events_of_at_most(MOST_EVENT_BYTES);
    for event in parser.push(data).into_iter().flatten() {
        if let Ok(Some(event)) = HostEvent::read(&event.name, &event.data) {
            inventory.apply("liar", event, 2);
        }
    }
    assert_eq!(seen(&inventory), *BEFORE);
    assert!(inventory.vms_of("a").count() == VMS.len() && inventory.vms_of("b").count() == 0);
    // Usual requests can be answered.
    drop((inventory.host("liar"), inventory.tally(), inventory.unstored_bindings()));
    inventory.forget_host("liar");
    assert_eq!(seen(&inventory), *BEFORE);
}

/// Runs an agent's response to a dry run through the manager's report of it.
pub fn run_answers(data: &[u8]) {
    let Ok(dry_run) = serde_json::from_slice::<DryRun>(data) else { return };
    let report = json!({
        "vm": "web", "from": "a", "to": "b", "verdict": "unknown", "prediction": null,
        "checks": [
            { "name": "agents", "verdict": "unknown", "evidence": "not asked", "remedy": "" },
            { "name": "disks", "verdict": "warn", "evidence": "not seen", "remedy": "" },
        ],
    });
    let mut report: PreflightReport = serde_json::from_value(report).expect("a report");
    with_dry_run(&mut report, dry_run);
    let written = serde_json::to_vec(&report).expect("serialisable");
    assert!(
        serde_json::from_slice::<PreflightReport>(&written).is_ok(),
        "cannot read what was written"
    );
}

/// Runs an agent's response to any other request of the manager, by the first byte of the input:
/// the result of a migration, an accepted migration, a refusal, a VM that was created, started or
/// stopped, the host itself, its peers, its revocations.
pub fn run_outcomes(data: &[u8]) {
    let Some((&which, body)) = data.split_first() else { return };
    match which % 7 {
        0 => migration(body),
        1 => read::<MigrationAccepted>(body),
        2 => refusal(body),
        3 => answered(body, |vm| HostEvent::Vm(Box::new(vm))),
        4 => answered(body, |host| HostEvent::Host(Box::new(host))),
        5 => read::<SetPeers>(body),
        _ => read::<RevocationsTaken>(body),
    }
}

/// Checks that the stored report of an ended migration is bounded and readable.
fn migration(body: &[u8]) {
    let Ok(status) = serde_json::from_slice::<MigrationStatus>(body) else { return };
    let (texts, report) = kept_of_migration(&status);
    assert!(texts.iter().all(|text| text.len() <= MOST_TEXT_BYTES), "{texts:?}");
    let Some(report) = report else { return };
    assert!(report.len() <= MOST_REPORT_BYTES, "{} bytes are stored", report.len());
    assert!(serde_json::from_slice::<Report>(&report).is_ok(), "cannot read the stored report");
}

/// Checks that a refusal can be shown to the client.
fn refusal(body: &[u8]) {
    let Ok(error) = serde_json::from_slice::<ApiError>(body) else { return };
    let problem = serde_json::to_vec(&Problem::from(error)).expect("serialisable");
    assert!(serde_json::from_slice::<Problem>(&problem).is_ok(), "cannot read the shown problem");
}

/// Checks that a host's response about itself or its VM is treated like its report.
fn answered<T: DeserializeOwned>(body: &[u8], event: impl Fn(T) -> HostEvent) {
    let Ok(answer) = serde_json::from_slice::<T>(body) else { return };
    let mut inventory = cluster();
    inventory.apply("liar", event(answer), 2);
    assert_eq!(seen(&inventory), *BEFORE);
}

fn read<T: DeserializeOwned>(body: &[u8]) {
    let _ = serde_json::from_slice::<T>(body);
}

/// Parses a request to join, its token and its signing request.
pub fn run_joins(data: &[u8]) {
    if let Ok(text) = std::str::from_utf8(data) {
        let _ = godwit_pki::requested_key(text);
    }
    let Ok(request) = serde_json::from_slice::<JoinRequest>(data) else { return };
    let _ = request.token.parse::<JoinTokenText>();
    let _ = godwit_pki::requested_key(&request.request);
}

/// Most records and hours of a file with the history of load.
const MOST_LOAD_ROWS: usize = 720 + 1_440 + 24;

/// Reads rings and days of a file with the history of load.
pub fn run_loads(data: &[u8]) {
    assert!(rows_of_load(data) <= MOST_LOAD_ROWS);
}
