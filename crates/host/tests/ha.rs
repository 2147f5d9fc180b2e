//! Protected VMs on a host, with an agent, QEMU and a manager that the test plays.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

#[allow(dead_code, reason = "these tests use only a part of it")]
mod support;

use std::fs;
use std::path::Path;
use std::time::Duration;

use godwit_api::{
    ApiError, ChangeVm, Client, ClientError, CreateVm, ErrorCode, HaAnswer, HaForward, HaStanding,
    HaVerdict, ReleaseVms, ReleasedVm, StartProtected, StopVm, TermHolder, VmState,
};
use godwit_host::Agent;
use godwit_qemu::{Autostart, OnCrash, RestartPriority, Uuid, VmSpec};
use serde_json::{Value, json};
use support::{TestHost, kill, until};

const FORCE: StopVm = StopVm { force: true, grace_ms: None };
const HOLDER: TermHolder =
    TermHolder { cluster: Uuid::from_u128(0xc1), host: Uuid::from_u128(0xa) };
const UUID: Uuid = Uuid::from_u128(0x5eed);

fn refusal<T: std::fmt::Debug>(answer: Result<T, ClientError>) -> ApiError {
    match answer.unwrap_err() {
        ClientError::Refused(error) => error,
        error => panic!("{error}"),
    }
}

fn change(spec: Value) -> ChangeVm {
    ChangeVm { spec: serde_json::from_value(spec).unwrap(), ..ChangeVm::default() }
}

async fn answer(client: &Client, verdict: HaVerdict) {
    let nonce = client.ha_renewal().await.unwrap().nonce;
    client.ha_answer(&HaAnswer { nonce, holder: HOLDER, verdict }).await.unwrap();
}

fn granted(term: u64) -> HaVerdict {
    HaVerdict::Granted { term, datastores: Vec::new() }
}

async fn grant(client: &Client, term: u64) {
    answer(client, granted(term)).await;
    let ha = client.ha().await.unwrap();
    assert_eq!((ha.standing, ha.term), (HaStanding::Held, term));
}

/// Answers renewals without end.
async fn keep_answering(client: &Client, verdict: HaVerdict) {
    let mut turns = tokio::time::interval(Duration::from_millis(50));
    loop {
        turns.tick().await;
        answer(client, verdict.clone()).await;
    }
}

/// Does work while a manager renews the lease, which a slow machine would outlast.
async fn renewing<T>(client: &Client, term: u64, work: impl Future<Output = T>) -> T {
    tokio::select! {
        done = work => done,
        () = keep_answering(client, granted(term)) => panic!("it answers without end"),
    }
}

async fn until_over(client: &Client, term: u64) {
    until("the term is over", async || {
        let renewal = client.ha_renewal().await.unwrap();
        renewal.over && renewal.term == term
    })
    .await;
}

/// Changes a file of JSON of an agent that has ended.
fn edit(path: &Path, edit: impl FnOnce(&mut Value)) {
    let mut saved: Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    edit(&mut saved);
    fs::write(path, saved.to_string()).unwrap();
}

/// Lets no lease run out from here on, however slow the machine is.
fn lengthen_lease(host: &TestHost) {
    edit(&host.path().join("run/ha.json"), |saved| {
        let counts_from = saved["counts_from"]["secs"].as_u64().unwrap();
        saved["counts_from"]["secs"] = json!(counts_from + 3600);
    });
}

fn protected(host: &TestHost, name: &str) -> VmSpec {
    VmSpec { protect: Some(RestartPriority::High), ..host.spec(name) }
}

#[test]
fn a_protected_vm_runs_only_while_the_host_holds_a_term() {
    let Some(host) = TestHost::new() else { return };
    host.with_agent(async |client| {
        until_over(&client, 0).await;
        let error = refusal(client.create_vm(&CreateVm::new(protected(&host, "web"), true)).await);
        assert_eq!(error.code, ErrorCode::WrongState);
        assert_eq!(error.message, "cannot start VM \"web\": this host holds no term of HA");
        assert_eq!(host.remains(), Vec::<String>::new());
        assert!(!host.path().join("state/ha.json").exists());
        assert!(!host.path().join("run/ha.json").exists());

        // Without protection it runs, and gets none while it runs.
        let plain = CreateVm::new(host.spec("db"), true);
        let pid = client.create_vm(&plain).await.unwrap().pid;
        let protect = change(json!({ "protect": "low" }));
        let error = refusal(client.change_vm("db", &protect).await);
        assert!(error.message.contains("cannot protect VM \"db\""), "{error}");

        grant(&client, 1).await;
        let spec = VmSpec { on_crash: OnCrash::Times(3), ..protected(&host, "web") };
        let both_are_guarded = async {
            client.create_vm(&CreateVm::new(spec, true)).await.unwrap();
            client.change_vm("db", &protect).await.unwrap();
            until("both are guarded", async || client.ha().await.unwrap().vms == ["db", "web"])
                .await;
        };
        renewing(&client, 1, both_are_guarded).await;
        let off = change(json!({ "protect": null }));
        renewing(&client, 1, client.change_vm("db", &off)).await.unwrap();

        answer(&client, HaVerdict::Ended { term: 1 }).await;
        until_over(&client, 1).await;
        until("the VM is shown as failed", async || {
            client.vm("web").await.unwrap().state == VmState::Failed
        })
        .await;
        let web = client.vm("web").await.unwrap();
        let reason = "stopped: the host lost its lease of HA (term 1)";
        assert_eq!((web.reason.as_deref(), web.last_crash), (Some(reason), None));
        assert_eq!(client.vm("db").await.unwrap().pid, pid, "not protected any more");
        assert_eq!(refusal(client.start_vm("web").await).code, ErrorCode::WrongState);
        // It may run elsewhere, and must not run here without a term.
        let error = refusal(client.change_vm("web", &off).await);
        assert!(error.message.contains("cannot end the protection of VM \"web\""), "{error}");

        grant(&client, 2).await;
        renewing(&client, 2, client.start_vm("web")).await.unwrap();
    });
}

#[test]
fn a_host_that_rests_has_protected_vms_that_do_not_run() {
    let Some(host) = TestHost::new() else { return };
    host.with_agent(async |client| {
        grant(&client, 1).await;
        let request = CreateVm::new(protected(&host, "web"), true);
        renewing(&client, 1, client.create_vm(&request)).await.unwrap();
        answer(&client, HaVerdict::Rest { term: 1 }).await;
        assert_eq!(client.ha().await.unwrap().standing, HaStanding::Held, "a VM runs");
        client.stop_vm("web", FORCE).await.unwrap();
        until("the host rests", async || {
            answer(&client, HaVerdict::Rest { term: 1 }).await;
            client.ha_renewal().await.unwrap().over
        })
        .await;
        client.create_vm(&CreateVm::new(protected(&host, "db"), false)).await.unwrap();
        for vm in ["web", "db"] {
            assert_eq!(refusal(client.start_vm(vm).await).code, ErrorCode::WrongState);
            let off = change(json!({ "protect": null }));
            tokio::select! {
                changed = client.change_vm(vm, &off) => drop(changed.unwrap()),
                () = keep_answering(&client, HaVerdict::Rest { term: 1 }) => {
                    panic!("it answers without end")
                }
            }
        }
        client.start_vm("db").await.unwrap();
    });
}

#[test]
fn a_restarted_agent_holds_its_lease_and_a_boot_ends_protected_vms() {
    let Some(host) = TestHost::new() else { return };
    let pid = host.with_agent(async |client| {
        grant(&client, 1).await;
        let request = CreateVm::new(protected(&host, "web"), true);
        let made = renewing(&client, 1, client.create_vm(&request)).await.unwrap();
        // The lease must not run out between the two agents.
        grant(&client, 1).await;
        made.pid.unwrap()
    });
    let saved = host.path().join("run/ha.json");
    host.with_agent(async |client| {
        let renewal = client.ha_renewal().await.unwrap();
        assert_eq!((renewal.holder, renewal.term, renewal.over), (Some(HOLDER), 1, false));
        answer(&client, granted(1)).await;
        assert_eq!(client.vm("web").await.unwrap().pid, Some(pid));
    });
    // As after a boot: nothing says that the term is held.
    fs::remove_file(&saved).unwrap();
    host.with_agent(async |client| {
        until_over(&client, 1).await;
        assert!(host.qemus().is_empty());
        let web = client.vm("web").await.unwrap();
        assert_eq!((web.state, web.pid), (VmState::Failed, None));
        grant(&client, 2).await;
        renewing(&client, 2, client.start_vm("web")).await.unwrap();
    });
}

#[test]
fn an_agent_that_starts_after_its_lease_ends_the_vm() {
    let Some(host) = TestHost::new() else { return };
    host.with_agent(async |client| {
        grant(&client, 1).await;
        let request = CreateVm::new(protected(&host, "web"), true);
        renewing(&client, 1, client.create_vm(&request)).await.unwrap();
    });
    // As if the lease had begun with the host's boot.
    let path = host.path().join("run/ha.json");
    let mut saved: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    saved["counts_from"] = json!({ "secs": 0, "nanos": 0 });
    fs::write(&path, saved.to_string()).unwrap();
    host.with_agent(async |client| {
        until_over(&client, 1).await;
        assert!(host.qemus().is_empty());
        let reason = client.vm("web").await.unwrap().reason.unwrap();
        assert_eq!(reason, "stopped: the host lost its lease of HA (term 1)");
    });
}

#[test]
fn the_manager_starts_and_releases_vms_by_terms() {
    let Some(host) = TestHost::new() else { return };
    host.with_agent(async |client| {
        let spec = VmSpec { uuid: Some(UUID), ..protected(&host, "web") };
        let request = |term, attempt| StartProtected {
            spec: spec.clone(),
            term,
            attempt: Uuid::from_u128(attempt),
        };
        let release = |incarnation| ReleaseVms {
            vms: vec![ReleasedVm { name: "web".into(), incarnation, to: "b".into() }],
        };
        grant(&client, 3).await;
        let starts = async {
            for term in [2, 4] {
                let error = refusal(client.ha_start(&request(term, 1)).await);
                assert_eq!(error.code, ErrorCode::WrongState);
            }
            let bare = VmSpec { protect: None, ..spec.clone() };
            let bare = StartProtected { spec: bare, ..request(3, 1) };
            assert_eq!(refusal(client.ha_start(&bare).await).code, ErrorCode::InvalidRequest);
            assert_eq!(host.remains(), Vec::<String>::new());

            let made = client.ha_start(&request(3, 1)).await.unwrap();
            assert_eq!((made.state, made.spec.uuid), (VmState::Running, Some(UUID)));
            for attempt in [1, 2] {
                let again = client.ha_start(&request(3, attempt)).await.unwrap();
                assert_eq!((again.pid, again.incarnation), (made.pid, made.incarnation));
            }
            client.stop_vm("web", FORCE).await.unwrap();
            let stopped = client.ha_start(&request(3, 1)).await.unwrap();
            assert_eq!(stopped.state, VmState::Stopped, "it was stopped since the attempt");
            let third = client.ha_start(&request(3, 3)).await.unwrap();
            assert_eq!((third.state, third.incarnation), (VmState::Running, made.incarnation));
            let mut other = request(3, 4);
            other.spec.uuid = Some(Uuid::from_u128(7));
            assert_eq!(refusal(client.ha_start(&other).await).code, ErrorCode::AlreadyExists);
            let error = refusal(client.ha_release(&release(made.incarnation)).await);
            assert!(error.message.contains("it has a process here"), "{error}");
            made
        };
        let made = renewing(&client, 3, starts).await;

        answer(&client, HaVerdict::Ended { term: 3 }).await;
        until_over(&client, 3).await;
        until("the VM has failed", async || {
            client.vm("web").await.unwrap().state == VmState::Failed
        })
        .await;
        client.ha_release(&release(support::arriving(1).incarnation)).await.unwrap();
        assert_eq!(client.vm("web").await.unwrap().incarnation, made.incarnation);
        for _ in 0..2 {
            client.ha_release(&release(made.incarnation)).await.unwrap();
            assert_eq!(client.vm("web").await.unwrap_err().code(), Some(ErrorCode::NotFound));
        }
    });
}

#[test]
fn an_attempt_is_not_carried_out_again_when_its_vm_has_left() {
    let Some(host) = TestHost::new() else { return };
    host.with_agent(async |client| {
        let spec = VmSpec { uuid: Some(UUID), ..protected(&host, "web") };
        let request = StartProtected { spec, term: 1, attempt: Uuid::from_u128(1) };
        grant(&client, 1).await;
        let attempts = async {
            client.ha_start(&request).await.unwrap();
            client.stop_vm("web", FORCE).await.unwrap();
            // As a move does.
            client.delete_vm("web").await.unwrap();
            let error = refusal(client.ha_start(&request).await);
            assert_eq!(error.code, ErrorCode::WrongState);
            assert!(error.message.contains("it has left since"), "{error}");
            assert!(host.qemus().is_empty());
            let next = StartProtected { attempt: Uuid::from_u128(2), ..request.clone() };
            assert_eq!(client.ha_start(&next).await.unwrap().state, VmState::Running);
        };
        renewing(&client, 1, attempts).await;
    });
}

#[test]
fn a_restarted_agent_carries_no_attempt_out_again() {
    let Some(host) = TestHost::new() else { return };
    let spec = VmSpec { uuid: Some(UUID), ..protected(&host, "web") };
    let request = StartProtected { spec, term: 1, attempt: Uuid::from_u128(1) };
    host.with_agent(async |client| {
        grant(&client, 1).await;
        let starts_and_leaves = async {
            client.ha_start(&request).await.unwrap();
            client.stop_vm("web", FORCE).await.unwrap();
            client.delete_vm("web").await.unwrap();
        };
        tokio::select! {
            () = starts_and_leaves => {}
            () = keep_answering(&client, granted(1)) => panic!("it answers without end"),
        }
    });
    lengthen_lease(&host);
    host.with_agent(async |client| {
        let error = refusal(client.ha_start(&request).await);
        assert!(error.message.contains("it has left since"), "{error}");
        assert!(host.qemus().is_empty());
        let next = StartProtected { attempt: Uuid::from_u128(2), ..request.clone() };
        assert_eq!(client.ha_start(&next).await.unwrap().state, VmState::Running);
    });
}

#[test]
fn a_start_that_an_earlier_agent_has_not_finished_is_finished() {
    let Some(host) = TestHost::new() else { return };
    let spec = VmSpec { uuid: Some(UUID), ..protected(&host, "web") };
    let request = StartProtected { spec, term: 1, attempt: Uuid::from_u128(1) };
    host.with_agent(async |client| {
        grant(&client, 1).await;
        let starts_and_stops = async {
            client.ha_start(&request).await.unwrap();
            client.stop_vm("web", FORCE).await.unwrap();
        };
        renewing(&client, 1, starts_and_stops).await;
    });
    lengthen_lease(&host);
    host.with_agent(async |client| {
        let stopped = client.ha_start(&request).await.unwrap();
        assert_eq!(stopped.state, VmState::Stopped, "it was stopped since");
    });
    // As when the agent ends between the definition and the process.
    edit(&host.path().join("state/ha-attempts.json"), |saved| {
        saved["unfinished"] = saved["attempts"].clone();
    });
    lengthen_lease(&host);
    host.with_agent(async |client| {
        assert_eq!(client.ha_start(&request).await.unwrap().state, VmState::Running);
    });
}

#[test]
fn protected_vms_wait_for_the_manager_after_a_boot_and_a_crash() {
    let Some(mut host) = TestHost::new() else { return };
    host.with_agent(async |client| {
        grant(&client, 1).await;
        for (name, protect) in [("db", None), ("web", Some(RestartPriority::Normal))] {
            let autostart = Some(Autostart::default());
            let request = CreateVm::new(VmSpec { protect, autostart, ..host.spec(name) }, true);
            renewing(&client, 1, client.create_vm(&request)).await.unwrap();
        }
    });
    for pid in host.qemus() {
        kill(pid);
    }
    // As after a boot.
    fs::remove_file(host.path().join("state/autostart.json")).unwrap();
    fs::remove_file(host.path().join("run/ha.json")).unwrap();
    host.config.peers.clear();
    host.with_agent(async |client| {
        until("the VM without protection starts", async || {
            client.vm("db").await.unwrap().state == VmState::Running
        })
        .await;
        assert_eq!(client.vm("web").await.unwrap().state, VmState::Failed);
    });
}

#[test]
fn a_protected_vm_does_not_arrive_without_a_term() {
    let Some(host) = TestHost::new() else { return };
    host.run(async {
        let agent = Agent::open(host.config.clone()).await.unwrap();
        let spec = agent.resolve(protected(&host, "web")).await.unwrap();
        let arrived = agent.prepare_incoming(spec, support::arriving(2), "b", false, None).await;
        assert_eq!(arrived.unwrap_err().code, ErrorCode::WrongState);
        assert_eq!(host.remains(), Vec::<String>::new());
    });
}

#[test]
fn a_peer_that_does_not_answer_fails_a_forwarded_request() {
    let Some(host) = TestHost::new() else { return };
    host.with_agent(async |client| {
        let forward = |host: &str| HaForward { host: host.to_owned(), answer: None };
        let error = refusal(client.ha_forward(&forward("b")).await);
        assert_eq!(error.code, ErrorCode::PeerUnreachable);
        let error = refusal(client.ha_forward(&forward("nobody")).await);
        assert_eq!(error.code, ErrorCode::NotFound);
    });
}
