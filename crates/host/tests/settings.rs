//! Settings of VMs on a host: description, tags and the start with the host; filters of NICs; what
//! is checked when a VM is made or changed.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

#[allow(dead_code, reason = "these tests use only a part of it")]
mod support;

use std::fs;
use std::process::Command;

use godwit_api::{ApiError, ChangeVm, ClientError, CreateVm, ErrorCode, StopVm, VmState};
use godwit_qemu::{Autostart, Nic, NicFilter, OnCrash, VmName, VmSpec};
use serde_json::{Value, json};
use support::{TestHost, until};

const FORCE: StopVm = StopVm { force: true, grace_ms: None };

fn refusal<T: std::fmt::Debug>(answer: Result<T, ClientError>) -> ApiError {
    match answer.unwrap_err() {
        ClientError::Refused(error) => error,
        error => panic!("{error}"),
    }
}

fn change(spec: Value) -> ChangeVm {
    ChangeVm { spec: serde_json::from_value(spec).unwrap(), ..ChangeVm::default() }
}

#[test]
fn settings_change_while_the_vm_runs_and_survive_the_agent() {
    let Some(host) = TestHost::new() else { return };
    let settings = json!({
        "description": "The shop", "tags": ["prod"], "autostart": { "order": 2, "delay_ms": 10 }
    });
    let pid = host.with_agent(async |client| {
        let made = client.create_vm(&CreateVm::new(host.spec("web"), true)).await.unwrap();
        let changed = client.change_vm("web", &change(settings.clone())).await.unwrap();
        assert_eq!((changed.state, changed.pid), (VmState::Running, made.pid));
        let error = refusal(client.change_vm("web", &change(json!({ "rng": true }))).await);
        assert_eq!(error.code, ErrorCode::WrongState);
        for part in ["stop it first", "tags", "autostart"] {
            assert!(error.remedy.contains(part), "{error}");
        }
        for wrong in
            [json!({ "tags": ["a b"] }), json!({ "autostart": { "delay_ms": 9_000_000_000_u64 } })]
        {
            let error = refusal(client.change_vm("web", &change(wrong)).await);
            assert_eq!(error.code, ErrorCode::InvalidRequest);
        }
        client.reset_vm("web").await.unwrap();
        made.pid
    });
    host.with_agent(async |client| {
        let found = client.vm("web").await.unwrap();
        assert_eq!((found.state, found.pid), (VmState::Running, pid));
        assert_eq!(found.spec.description.as_deref(), Some("The shop"));
        let expected = Autostart { order: Some(2), delay_ms: 10, ..Autostart::default() };
        assert_eq!(found.spec.autostart, Some(expected));
        client.stop_vm("web", FORCE).await.unwrap();
        // The settings alone need nothing of the host.
        fs::remove_file(host.path().join("guest")).unwrap();
        let off = json!({ "autostart": null, "description": null });
        let changed = client.change_vm("web", &change(off)).await.unwrap();
        assert_eq!((changed.spec.autostart, changed.spec.tags.len()), (None, 1));
    });
}

#[test]
fn vms_start_with_the_host_once_for_each_boot() {
    let Some(mut host) = TestHost::new() else { return };
    let kernel = host.path().join("other");
    fs::copy(host.path().join("guest"), &kernel).unwrap();
    host.with_agent(async |client| {
        let spec = |name: &str, order: Option<u32>| {
            let autostart = Some(Autostart { order, delay_ms: 1, ..Autostart::default() });
            VmSpec { autostart, ..host.spec(name) }
        };
        let broken = VmSpec { kernel: Some(kernel.clone()), ..spec("broken", Some(1)) };
        for spec in [broken, spec("web", Some(2)), spec("app", None), host.spec("off")] {
            client.create_vm(&CreateVm::new(spec, false)).await.unwrap();
        }
    });
    fs::remove_file(kernel).unwrap();
    let progress = host.config.state_dir.join("autostart.json");
    let boot = fs::read_to_string(&progress).unwrap();
    host.with_agent(async |client| {
        // A VM that waits would be in this file.
        assert_eq!(fs::read_to_string(&progress).unwrap(), boot);
        assert!(client.vms().await.unwrap().iter().all(|vm| vm.state == VmState::Stopped));
    });
    let earlier = "{\"boot_id\":\"an earlier one\",\"waiting\":[]}";
    fs::write(&progress, earlier).unwrap();
    host.with_agent(async |client| {
        // The only other host is away, and may run them.
        until("the first VM waits", async || {
            let reason = client.vm("web").await.unwrap().reason;
            reason.is_some_and(|reason| reason.contains("no other host is reachable"))
        })
        .await;
    });
    host.config.peers.clear();
    fs::write(&progress, earlier).unwrap();
    host.with_agent(async |client| {
        let runs = async |name: &str| client.vm(name).await.unwrap().state == VmState::Running;
        until("the last VM runs", async || runs("app").await).await;
        assert!(runs("web").await, "started before the last");
        let broken = client.vm("broken").await.unwrap();
        assert_eq!(broken.state, VmState::Stopped);
        let reason = broken.reason.unwrap();
        assert!(reason.contains("not started with the host yet"), "{reason}");
        assert!(reason.contains("other"), "{reason}");
        assert_eq!(client.vm("off").await.unwrap().state, VmState::Stopped);
        let left = boot.replace("[]", "[\"broken\"]");
        until("progress is saved", async || fs::read_to_string(&progress).unwrap() == left).await;
    });
}

#[test]
fn vms_that_would_start_after_each_other_are_refused() {
    let Some(host) = TestHost::new() else { return };
    let after = |name: &str, others: &[&str]| {
        let after = others.iter().map(|other| VmName::new(*other).unwrap()).collect();
        let autostart = Some(Autostart { after, ..Autostart::default() });
        VmSpec { autostart, ..host.spec(name) }
    };
    host.with_agent(async |client| {
        for spec in [after("web", &["app", "gone"]), after("app", &["db"]), after("db", &[])] {
            client.create_vm(&CreateVm::new(spec, false)).await.unwrap();
        }
        let circle = json!({ "autostart": { "after": ["web"] } });
        let error = refusal(client.change_vm("db", &change(circle)).await);
        assert_eq!(error.code, ErrorCode::InvalidRequest);
        assert!(error.message.contains("cannot start after VM \"web\""), "{error}");
        let error = refusal(client.create_vm(&CreateVm::new(after("gone", &["web"]), false)).await);
        assert_eq!(error.code, ErrorCode::InvalidRequest);
        assert_eq!(client.vms().await.unwrap().len(), 3);
        let autostart = client.vm("db").await.unwrap().spec.autostart.unwrap();
        assert!(autostart.after.is_empty());
    });
}

#[test]
fn a_vm_that_crashed_is_restarted_up_to_its_limit() {
    let Some(mut host) = TestHost::new() else { return };
    let crash = || host.qemus().into_iter().for_each(support::kill);
    host.with_agent(async |client| {
        let spec = VmSpec { on_crash: OnCrash::Times(1), ..host.spec("web") };
        let first = client.create_vm(&CreateVm::new(spec, true)).await.unwrap();
        crash();
        until("the VM is restarted", async || {
            let vm = client.vm("web").await.unwrap();
            let restarts = vm.last_crash.map(|crash| (crash.restarts, crash.restarting));
            vm.state == VmState::Running && vm.pid != first.pid && restarts == Some((1, false))
        })
        .await;
        crash();
        until("the limit is reached", async || {
            let vm = client.vm("web").await.unwrap();
            let reason = vm.reason.unwrap_or_default();
            vm.state == VmState::Failed && reason.contains("allows 1 restarts")
        })
        .await;
        let more = change(json!({ "on_crash": "always" }));
        client.change_vm("web", &more).await.unwrap();
        client.start_vm("web").await.unwrap();
    });
    // No agent sees this one, and the only other host may run the VM.
    crash();
    host.with_agent(async |client| {
        until("the VM waits", async || {
            let vm = client.vm("web").await.unwrap();
            let reason = vm.reason.unwrap_or_default();
            vm.state == VmState::Failed && reason.contains("no other host is reachable")
        })
        .await;
        assert!(client.vm("web").await.unwrap().last_crash.unwrap().restarting);
    });
    host.config.peers.clear();
    host.with_agent(async |client| {
        until("the VM runs", async || client.vm("web").await.unwrap().state == VmState::Running)
            .await;
        client.stop_vm("web", FORCE).await.unwrap();
    });
}

#[test]
fn more_vcpus_than_the_machine_type_takes_are_refused() {
    let Some(host) = TestHost::new() else { return };
    host.with_agent(async |client| {
        let many = VmSpec { vcpus: 4000, ..host.spec("web") };
        let error = refusal(client.create_vm(&CreateVm::new(many, false)).await);
        assert_eq!(error.code, ErrorCode::InvalidRequest);
        assert!(error.message.contains("cannot have 4000 vCPUs: it takes up to"), "{error}");
        assert!(error.remedy.contains("or less"), "{error}");
        client.create_vm(&CreateVm::new(host.spec("web"), false)).await.unwrap();
        let error = refusal(client.change_vm("web", &change(json!({ "vcpus": 4000 }))).await);
        assert!(error.message.contains("4000"), "{error}");
        assert_eq!(client.vm("web").await.unwrap().vcpus, 1);
    });
}

#[test]
fn addresses_networks_and_vlans_are_checked() {
    let Some(host) = TestHost::new() else { return };
    let with = |name: &str, nic: Nic| VmSpec { nics: vec![nic], ..host.spec(name) };
    let lan = || Nic { network: "lan".into(), ..Nic::default() };
    host.with_agent(async |client| {
        client.create_vm(&CreateVm::new(host.spec("web"), false)).await.unwrap();
        let mac = client.vm("web").await.unwrap().spec.nics[0].mac.clone();
        let seed = json!({ "network": [{ "addresses": ["10.88.0.21/24"] }] });
        let of_seed =
            VmSpec { cloud_init: Some(serde_json::from_value(seed).unwrap()), ..with("db", lan()) };
        for (spec, parts) in [
            (with("db", Nic { mac, ..lan() }), ["VM \"web\" has the hardware address", "mac"]),
            (of_seed, ["VM \"web\" has the address 10.88.0.21", "cloud_init"]),
            (
                with("db", Nic { network: "wan".into(), ..lan() }),
                ["no network \"wan\"", "lan, lost"],
            ),
            (
                with("db", Nic { vlan: Some(20), ..lan() }),
                ["bridge br-test does not filter VLANs", "vlan_filtering 1"],
            ),
        ] {
            let error = refusal(client.create_vm(&CreateVm::new(spec, false)).await);
            for part in parts {
                assert!(error.to_string().contains(part), "{part}: {error}");
            }
        }
        assert_eq!(client.vms().await.unwrap().len(), 1);
        let networks = client.host().await.unwrap().networks;
        assert_eq!(networks["lan"].vlans, Some(false));
    });
}

/// Returns the names of the tables with filters in the host's network namespace.
fn tables() -> Vec<String> {
    let output = Command::new("nft").args(["list", "tables", "netdev"]).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.lines().filter_map(|line| line.strip_prefix("table netdev ").map(str::to_owned)).collect()
}

#[test]
fn a_filter_lives_as_long_as_its_tap() {
    if Command::new("nft").arg("--version").output().is_err() {
        eprintln!("skipped: the command nft is missing");
        return;
    }
    let Some(host) = TestHost::new() else { return };
    let nic = Nic { filter: Some(NicFilter::MacIp), ..host.spec("web").nics.remove(0) };
    let spec = VmSpec { nics: vec![nic], ..host.spec("web") };
    host.with_agent(async |client| {
        client.create_vm(&CreateVm::new(spec.clone(), true)).await.unwrap();
    });
    // The kernel filters while no agent runs.
    let [tap] = &tables()[..] else { panic!("{:?}", tables()) };
    assert!(host.taps()[0].contains(tap.as_str()), "{:?}", host.taps());
    assert!(Command::new("nft").args(["flush", "ruleset"]).status().unwrap().success());
    host.with_agent(async |client| {
        until("the filter is set again", async || tables() == [tap.clone()]).await;
        client.stop_vm("web", FORCE).await.unwrap();
        until("the filter is gone", async || tables().is_empty()).await;
        client.start_vm("web").await.unwrap();
        assert_eq!(tables(), std::slice::from_ref(tap));
    });
    // A QEMU that ends while no agent runs leaves a table, which the next agent removes.
    host.qemus().into_iter().for_each(support::kill);
    host.with_agent(async |client| {
        until("the filter is swept", async || tables().is_empty()).await;
        assert_eq!(client.vm("web").await.unwrap().state, VmState::Failed);
    });
}
