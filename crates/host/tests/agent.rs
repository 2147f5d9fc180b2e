//! The agent itself: its listeners, its locks, its shadows.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

mod support;

use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;

use axum::body::{Body, Bytes, to_bytes};
use godwit_api::{
    Client, ClientError, CreateVm, Endpoint, ErrorCode, HostInfo, LimitOf, Limits, MigrationEvent,
    MigrationRequest, Resolve, SetRevocations, VmState,
};
use godwit_host::{Agent, RunError, TlsConfig};
use godwit_migration::handover::Known;
use godwit_pki::{Authority, Grant, Identity, Issued, Role, describe};
use godwit_qemu::{AccelProbe, ResolvedSpec, VmName, VmSpec};
use godwit_types::{Outcome, RateLimit, Report};
use http::{HeaderMap, Method, StatusCode};
use support::{TestHost, arriving, until};

fn web() -> VmName {
    VmName::new("web").unwrap()
}

/// Opens an agent with a running VM "web".
async fn with_vm(host: &TestHost) -> Arc<Agent> {
    let agent = Agent::open(host.config.clone()).await.unwrap();
    agent.create(CreateVm::new(host.spec("web"), true)).await.unwrap();
    agent
}

async fn resolved(agent: &Arc<Agent>, host: &TestHost, name: &str) -> ResolvedSpec {
    agent.resolve(host.spec(name)).await.unwrap()
}

#[test]
fn a_second_agent_and_a_port_in_use_each_give_one_clear_error() {
    let Some(host) = TestHost::new() else { return };
    host.with_agent(async |_| {
        let same = godwit_host::run(host.config.clone()).await.unwrap_err();
        assert!(matches!(same, RunError::SocketInUse { .. }), "{same}");
        let mut other = host.config.clone();
        other.socket = host.path().join("other.sock");
        let error = godwit_host::run(other).await.unwrap_err();
        assert!(
            matches!(error, RunError::State(_)) && error.to_string().contains("another agent"),
            "{error}"
        );
        assert!(!host.path().join("other.sock").exists());
    });
    host.run(async {
        let taken = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut config = host.config.clone();
        config.listen = vec![taken.local_addr().unwrap()];
        let error = godwit_host::run(config).await.unwrap_err();
        assert!(
            matches!(error, RunError::Listen { .. }) && error.to_string().contains("listen"),
            "{error}"
        );
    });
}

#[test]
fn peers_reach_the_agent_over_tcp_and_get_typed_errors() {
    let Some(mut host) = TestHost::new() else { return };
    let address: SocketAddr = "127.0.0.1:7700".parse().unwrap();
    host.config.listen = vec![address];
    host.with_agent(async |_| {
        let client = Client::new(Endpoint::Tcp(address.to_string()));
        assert_eq!(client.host().await.unwrap().name, "a");
        let unknown = client.get::<serde_json::Value>("/v1/nonsense").await.unwrap_err();
        assert_eq!(unknown.code(), Some(ErrorCode::NotFound));
        let wrong = client
            .post::<_, serde_json::Value>("/v1/vms", &serde_json::json!({ "sepc": 1 }))
            .await
            .unwrap_err();
        assert_eq!(wrong.code(), Some(ErrorCode::InvalidRequest));
        assert!(wrong.to_string().contains("sepc"), "{wrong}");
        let long = serde_json::json!({ "sepc": "x".repeat(1 << 20) });
        let refused = client.post::<_, serde_json::Value>("/v1/vms", &long).await.unwrap_err();
        assert_eq!(refused.code(), Some(ErrorCode::InvalidRequest));
        assert!(refused.to_string().contains("more than 1048576 bytes"), "{refused}");
    });
}

/// Creates the host's authority, and puts its own certificate into the configuration.
fn protect(host: &mut TestHost) -> Authority {
    let authority = Authority::create(&host.path().join("pki"), "test", 30).unwrap();
    let own = issue(&authority, "a", Role::Host);
    host.config.insecure = false;
    host.config.peers.clear();
    host.config.tls = Some(TlsConfig {
        authority: authority.certificate(),
        certificate: own.certificate,
        key: own.key,
        revoked: None,
    });
    authority
}

fn issue(authority: &Authority, name: &str, role: Role) -> Issued {
    authority
        .issue(&Grant { name: name.to_owned(), role, addresses: Vec::new(), days: 30 })
        .unwrap()
}

fn client_of(authority: &Authority, shown: &Issued, to: SocketAddr, host: &str) -> Client {
    let identity =
        Identity::load(&authority.certificate(), &shown.certificate, &shown.key).unwrap();
    Client::secure(Endpoint::Tls(to.to_string()), &identity, host)
}

async fn metrics(client: &Client) -> (StatusCode, String) {
    let (headers, none) = (HeaderMap::new(), Bytes::new());
    let connection = client.connection().await.unwrap();
    let answer = client.pass_on(connection, Method::GET, "/metrics", headers, none).await.unwrap();
    let status = answer.status();
    let body = to_bytes(Body::new(answer.into_body()), 1 << 20).await.unwrap();
    (status, String::from_utf8(body.to_vec()).unwrap())
}

#[test]
fn a_certificate_tells_who_may_what() {
    let Some(mut host) = TestHost::new() else { return };
    let address: SocketAddr = "127.0.0.1:7700".parse().unwrap();
    host.config.listen = vec![address];
    let authority = protect(&mut host);
    let foreign = Authority::create(&host.path().join("foreign"), "test", 30).unwrap();
    let (b, admin) =
        (issue(&authority, "b", Role::Host), issue(&authority, "admin", Role::Operator));
    let monitor = issue(&authority, "prometheus", Role::Monitor);
    let stranger = issue(&foreign, "b", Role::Host);
    let spec = host.spec("web");
    host.with_agent(async |_| {
        let from_b = client_of(&authority, &b, address, "a");
        assert_eq!(from_b.host().await.unwrap().name, "a");
        let create = CreateVm::new(spec, false);
        assert_eq!(from_b.create_vm(&create).await.unwrap_err().code(), Some(ErrorCode::Forbidden));
        client_of(&authority, &admin, address, "a").create_vm(&create).await.unwrap();
        assert_eq!(from_b.vm("web").await.unwrap().name, "web");
        for refused in [
            client_of(&authority, &b, address, "c").host().await,
            client_of(&foreign, &stranger, address, "a").host().await,
            Client::new(Endpoint::Tcp(address.to_string())).host().await,
        ] {
            let refused = refused.unwrap_err();
            assert!(refused.code().is_none(), "{refused}");
        }
        // A monitor may read the metrics and nothing else; a host may not read them.
        let monitor = client_of(&authority, &monitor, address, "a");
        assert_eq!(monitor.host().await.unwrap_err().code(), Some(ErrorCode::Forbidden));
        let (status, text) = metrics(&monitor).await;
        assert_eq!(status, StatusCode::OK);
        let lines = [
            r#"godwit_host_vms{state="stopped"} 1"#,
            r#"godwit_host_migrations{phase="pre-copy"} 0"#,
        ];
        for line in lines {
            assert!(text.lines().any(|found| found == line), "{text}");
        }
        let has_memory = text.contains("godwit_host_memory_total_bytes ");
        assert!(has_memory && !text.contains("web"), "{text}");
        assert_eq!(metrics(&from_b).await.0, StatusCode::FORBIDDEN);
        // A host may speak only for itself.
        let qemu = godwit_qemu::inspect("/usr/bin/qemu-system-x86_64", None).await.unwrap();
        let accel = AccelProbe { kvm: false, reason: String::new() };
        let arriving = VmSpec { name: "db".to_owned(), ..create.spec };
        let arriving = arriving.resolve(&qemu, &accel).unwrap();
        for path in ["/v1/incoming", "/v1/incoming/checks"] {
            let incoming = serde_json::json!({
                "spec": arriving, "epoch": 2, "from": "c", "qemu_version": "7.2.0",
                "engine": "godwit",
            });
            let spoken = from_b.post::<_, serde_json::Value>(path, &incoming).await.unwrap_err();
            assert_eq!(spoken.code(), Some(ErrorCode::Forbidden), "{path}: {spoken}");
        }
    });
}

#[test]
fn a_revoked_certificate_opens_no_connection_and_loses_its_open_ones() {
    let Some(mut host) = TestHost::new() else { return };
    let address: SocketAddr = "127.0.0.1:7700".parse().unwrap();
    host.config.listen = vec![address];
    let authority = protect(&mut host);
    let foreign = Authority::create(&host.path().join("foreign"), "test", 30).unwrap();
    let (b, thief) =
        (issue(&authority, "b", Role::Host), issue(&authority, "thief", Role::Operator));
    let admin = issue(&authority, "admin", Role::Operator);
    let of = |issued: &Issued| describe(&issued.certificate).unwrap().serial;
    let list = |by: &Authority, number, revoked: &[&Issued]| SetRevocations {
        list: by
            .list(number, revoked.iter().map(|one| (of(one), 0)).collect())
            .unwrap()
            .pem()
            .to_owned(),
    };
    let refused = |answer: Result<HostInfo, ClientError>| answer.unwrap_err().code().is_none();
    let (from_b, from_thief, from_admin) = (
        client_of(&authority, &b, address, "a"),
        client_of(&authority, &thief, address, "a"),
        client_of(&authority, &admin, address, "a"),
    );
    host.with_agent(async |_| {
        let mut followed = from_thief.watch().await.unwrap();
        followed.next().await.unwrap();
        let newer = list(&authority, 2, &[&b, &thief]);
        assert_eq!(
            from_b.set_revocations(&newer).await.unwrap_err().code(),
            Some(ErrorCode::Forbidden)
        );
        let taken = from_admin.set_revocations(&newer).await.unwrap();
        assert_eq!((taken.number, taken.certificates), (2, 2));
        assert!(refused(from_b.host().await) && refused(from_thief.host().await));
        // The open connection has ended.
        while matches!(followed.next().await, Ok(Some(_))) {}
        // The same list again does no harm. An older list, or one of a foreign authority, changes
        // nothing.
        from_admin.set_revocations(&newer).await.unwrap();
        for (wrong, code) in [
            (list(&authority, 1, &[]), ErrorCode::WrongState),
            (list(&authority, 2, &[]), ErrorCode::WrongState),
            (list(&foreign, 3, &[]), ErrorCode::InvalidRequest),
            (SetRevocations { list: "nothing".to_owned() }, ErrorCode::InvalidRequest),
        ] {
            assert_eq!(from_admin.set_revocations(&wrong).await.unwrap_err().code(), Some(code));
        }
        assert!(refused(from_b.host().await));
    });
    // A restarted agent still has the list; with a configured file, it reads that too.
    let file = authority.revoke([of(&admin)]).unwrap();
    host.config.tls.as_mut().unwrap().revoked = Some(authority.list_file());
    assert_eq!(file.revoked().len(), 1);
    host.with_agent(async |_| {
        assert!(refused(from_b.host().await) && refused(from_thief.host().await));
        assert!(refused(from_admin.host().await));
        let next = issue(&authority, "next", Role::Operator);
        client_of(&authority, &next, address, "a").host().await.unwrap();
    });
}

#[test]
fn a_renewed_certificate_is_loaded_without_a_restart() {
    let Some(mut host) = TestHost::new() else { return };
    let address: SocketAddr = "127.0.0.1:7700".parse().unwrap();
    host.config.listen = vec![address];
    let authority = protect(&mut host);
    let admin = issue(&authority, "admin", Role::Operator);
    let (old_key, key) = (host.path().join("old.key"), host.path().join("pki/a.key"));
    host.with_agent(async |_| {
        let client = client_of(&authority, &admin, address, "a");
        client.host().await.unwrap();
        std::fs::copy(&key, &old_key).unwrap();
        authority.renew("a", 60).unwrap();
        client.host().await.unwrap();
        assert_ne!(std::fs::read(&old_key).unwrap(), std::fs::read(&key).unwrap());
    });
}

#[test]
fn the_socket_is_root_only() {
    use std::os::unix::fs::PermissionsExt;
    let Some(host) = TestHost::new() else { return };
    host.with_agent(async |_| {
        let mode = std::fs::metadata(&host.config.socket).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    });
}

#[test]
fn a_shadow_is_removed_completely() {
    let Some(host) = TestHost::new() else { return };
    host.run(async {
        let agent = Agent::open(host.config.clone()).await.unwrap();
        let spec = resolved(&agent, &host, "web").await;
        let shadow =
            agent.prepare_incoming(spec.clone(), arriving(7), "b", false, None).await.unwrap();
        let info = agent.vm_info("web").unwrap();
        assert_eq!((info.state, info.epoch), (VmState::MigratingIn, 7));
        assert_eq!(shadow.regions().len(), 2);
        let twice = agent.prepare_incoming(spec, arriving(7), "b", false, None).await.unwrap_err();
        assert_eq!(twice.code, ErrorCode::Busy);
        for refused in [
            agent.stop(&web(), Default::default()).await.err(),
            agent.start(&web()).await.err(),
            agent.delete(&web(), false).await.err(),
        ] {
            assert_eq!(refused.unwrap().code, ErrorCode::Busy);
        }
        agent.discard(&shadow).await;
        assert!(agent.vms().is_empty());
        assert_eq!(host.remains(), Vec::<String>::new());
    });
}

#[test]
fn a_shadow_does_not_outlive_its_agent() {
    let Some(host) = TestHost::new() else { return };
    host.run(async {
        let agent = Agent::open(host.config.clone()).await.unwrap();
        let spec = resolved(&agent, &host, "web").await;
        agent.prepare_incoming(spec, arriving(2), "b", false, None).await.unwrap();
    });
    assert_eq!(host.qemus().len(), 1);
    host.with_agent(async |client| assert!(client.vms().await.unwrap().is_empty()));
    assert_eq!(host.remains(), Vec::<String>::new());
}

#[test]
fn a_promoted_shadow_is_the_hosts_own() {
    let Some(host) = TestHost::new() else { return };
    host.run(async {
        let agent = Agent::open(host.config.clone()).await.unwrap();
        let spec = resolved(&agent, &host, "web").await;
        let shadow = agent.prepare_incoming(spec, arriving(2), "b", false, None).await.unwrap();
        agent.promote(&shadow).await;
        // Nothing has arrived, so its vCPUs are paused, and it is shown as paused.
        assert_eq!(agent.vm_info("web").unwrap().state, VmState::Paused);
        agent.discard(&shadow).await;
        assert_eq!(agent.vms().len(), 1, "only a shadow can be discarded");
        assert!(
            agent.release(&shadow, None).await.is_err(),
            "only a VM that has been handed over is released"
        );
        let saved = std::fs::read_to_string(host.path().join("state/vms/web/vm.json")).unwrap();
        assert!(saved.contains("\"owner\"") && saved.contains("\"epoch\": 2"), "{saved}");
    });
}

#[test]
fn the_source_is_marked_retained_and_released() {
    let Some(host) = TestHost::new() else { return };
    host.run(async {
        let agent = with_vm(&host).await;
        let vm = agent.begin_migration("web", "m1").unwrap();
        for refused in [
            agent.begin_migration("web", "m2").err(),
            agent.stop(&web(), Default::default()).await.err(),
        ] {
            let refused = refused.unwrap();
            assert!(refused.code == ErrorCode::Busy && refused.message.contains("m1"), "{refused}");
        }
        vm.process.qmp.stop().await.unwrap();
        vm.process.qmp.resume().await.unwrap();
        agent.end_migration(&web()).await;
        assert_eq!(agent.vm_info("web").unwrap().state, VmState::Running);
        agent.end_migration(&web()).await;

        let vm = agent.begin_migration("web", "m3").unwrap();
        agent.release(&vm, None).await.unwrap();
        assert!(agent.vms().is_empty());
        assert_eq!(host.remains(), Vec::<String>::new());
    });
}

#[test]
fn a_guest_in_doubt_stays_paused_across_a_restart() {
    let Some(host) = TestHost::new() else { return };
    host.run(async {
        let agent = with_vm(&host).await;
        let vm = agent.begin_migration("web", "m1").unwrap();
        agent.mark_hand_over(&vm, "b", false, true).unwrap();
        agent.hold_in_doubt(&web(), "b").await;
    });
    host.run(async {
        let agent = Agent::open(host.config.clone()).await.unwrap();
        let info = agent.vm_info("web").unwrap();
        assert_eq!((info.state, info.epoch), (VmState::Paused, 1));
        let refused = agent.start(&web()).await.unwrap_err();
        assert_eq!(refused.code, ErrorCode::InDoubt);
        let word = Resolve { runs_on: "a".to_owned(), keep_memory: true };
        let taken = agent.resolve_doubt(&web(), word).await.unwrap().vm.unwrap();
        assert_eq!(taken.state, VmState::Running);
        assert_eq!(agent.vm("web").unwrap().unwrap().is_running().await, Some(true));
        assert_eq!(taken.epoch, 3, "the other host's epoch is stale from here on");
        agent.stop(&web(), godwit_api::StopVm { force: true, grace_ms: None }).await.unwrap();
    });
}

#[test]
fn a_guest_that_was_never_offered_is_not_in_doubt() {
    let Some(host) = TestHost::new() else { return };
    host.run(async {
        let agent = with_vm(&host).await;
        agent.begin_migration("web", "m1").unwrap();
        agent.hold_in_doubt(&web(), "b").await;
        let info = agent.vm_info("web").unwrap();
        assert_eq!((info.state, info.in_doubt, info.epoch), (VmState::Running, false, 1));
        agent.stop(&web(), godwit_api::StopVm { force: true, grace_ms: None }).await.unwrap();
    });
}

#[test]
fn an_operator_decides_where_a_guest_in_doubt_runs() {
    let Some(host) = TestHost::new() else { return };
    let word = |runs_on: &str, keep_memory| Resolve { runs_on: runs_on.to_owned(), keep_memory };
    host.run(async {
        let agent = with_vm(&host).await;
        let refused = agent.resolve_doubt(&web(), word("a", false)).await.unwrap_err();
        assert_eq!(refused.code, ErrorCode::WrongState);
        let doubt = async || {
            let vm = agent.begin_migration("web", "m1").unwrap();
            agent.mark_hand_over(&vm, "b", false, true).unwrap();
            agent.hold_in_doubt(&web(), "b").await;
        };
        doubt().await;
        let refused = agent.resolve_doubt(&web(), word("c", false)).await.unwrap_err();
        assert!(
            refused.code == ErrorCode::InvalidRequest && refused.message.contains("and b"),
            "{refused}"
        );

        let name = agent.config().name.clone();
        let kept = agent.resolve_doubt(&web(), word(&name, true)).await.unwrap().vm.unwrap();
        assert_eq!((kept.state, kept.in_doubt, kept.epoch), (VmState::Running, false, 3));
        assert_eq!(agent.vm("web").unwrap().unwrap().is_running().await, Some(true));

        doubt().await;
        let ended = agent.resolve_doubt(&web(), word(&name, false)).await.unwrap().vm.unwrap();
        assert_eq!((ended.state, ended.in_doubt, ended.epoch), (VmState::Failed, false, 5));
        assert!(host.qemus().is_empty());
        agent.start(&web()).await.unwrap();

        doubt().await;
        let vm = agent.vm("web").unwrap().unwrap();
        let (uuid, ownership) = (vm.spec().uuid, vm.ownership());
        assert_eq!(agent.resolve_doubt(&web(), word("b", false)).await.unwrap().vm, None);
        assert_eq!(
            agent.known(&web(), uuid, ownership.incarnation).unwrap(),
            Known::Gone(ownership)
        );
        assert_eq!(ownership.epoch, 5);
        assert!(agent.vms().is_empty());
        assert_eq!(host.remains(), Vec::<String>::new());
    });
}

#[test]
fn retained_pages_are_served_after_each_doubt() {
    let Some(host) = TestHost::new() else { return };
    host.run(async {
        let agent = with_vm(&host).await;
        let vm = agent.begin_migration("web", "m1").unwrap();
        agent.mark_hand_over(&vm, "b", true, true).unwrap();
        agent.hold_in_doubt(&web(), "b").await;
        for refused in [
            agent.stop(&web(), Default::default()).await.unwrap_err(),
            agent.start(&web()).await.unwrap_err(),
        ] {
            assert_eq!(refused.code, ErrorCode::InDoubt);
            assert!(
                refused.message.contains("host b") && refused.remedy.contains("resolve"),
                "{refused}"
            );
        }
    });
    host.run(async {
        let agent = Agent::open(host.config.clone()).await.unwrap();
        let info = agent.vm_info("web").unwrap();
        assert_eq!((info.state, info.in_doubt), (VmState::Paused, false));
        assert!(info.reason.is_some_and(|reason| reason.contains("fetches its pages")));
        assert_eq!(agent.delete(&web(), false).await.unwrap_err().code, ErrorCode::Busy);
        // The retained pages end with their QEMU.
        for pid in host.qemus() {
            support::kill(pid);
        }
        until("the end of QEMU is noticed", async || agent.vm_info("web").unwrap().in_doubt).await;
        agent.delete(&web(), true).await.unwrap();
        assert_eq!(host.remains(), Vec::<String>::new());
    });
}

#[test]
fn a_guest_whose_missing_pages_cannot_be_fetched_does_not_run() {
    let Some(host) = TestHost::new() else { return };
    host.run(async { drop(with_vm(&host).await) });
    // The state that an agent leaves when it is killed during page-in, except that nothing holds
    // the guest back.
    let ram = host.path().join("run/ram");
    let missing = godwit_ram::MissingPages::create(&ram.join("web.missing"), &[4096, 4]).unwrap();
    missing.insert(0, godwit_ram::PageRange::new(7, 3));
    drop(missing);
    std::fs::write(ram.join("web.missing-from"), "b").unwrap();
    host.run(async {
        let agent = Agent::open(host.config.clone()).await.unwrap();
        until("the VM is paused", async || agent.vm_info("web").unwrap().state == VmState::Paused)
            .await;
        let info = agent.vm_info("web").unwrap();
        assert!(info.reason.is_some_and(|reason| reason.contains("missing")) && !info.in_doubt);
        let refused = agent.start(&web()).await.unwrap_err();
        assert_eq!(refused.code, ErrorCode::WrongState);
        assert!(
            refused.message.contains("host b") && refused.remedy.contains("restart"),
            "{refused}"
        );
        assert!(agent.delete(&web(), false).await.is_err());
        assert!(ram.join("web.missing").exists());
        agent.stop(&web(), godwit_api::StopVm { force: true, grace_ms: None }).await.unwrap();
        assert!(!ram.join("web.missing").exists());
        agent.delete(&web(), false).await.unwrap();
        assert_eq!(host.remains(), Vec::<String>::new());
    });
}

#[test]
fn a_stop_does_not_end_a_doubt_but_a_delete_does() {
    let Some(host) = TestHost::new() else { return };
    host.run(async {
        let agent = with_vm(&host).await;
        let vm = agent.begin_migration("web", "m1").unwrap();
        agent.mark_hand_over(&vm, "b", false, true).unwrap();
        agent.hold_in_doubt(&web(), "b").await;
        agent.stop(&web(), godwit_api::StopVm { force: true, grace_ms: None }).await.unwrap();
        let refused = agent.start(&web()).await.unwrap_err();
        assert_eq!(refused.code, ErrorCode::InDoubt);
    });
    assert!(host.qemus().is_empty());
    host.run(async {
        let agent = Agent::open(host.config.clone()).await.unwrap();
        let refused = agent.start(&web()).await.unwrap_err();
        assert_eq!(refused.code, ErrorCode::InDoubt);
        agent.delete(&web(), true).await.unwrap();
        assert_eq!(host.remains(), Vec::<String>::new());
    });
}

#[test]
fn a_qemu_that_answers_late_is_adopted_late() {
    let Some(host) = TestHost::new() else { return };
    host.run(async {
        let agent = with_vm(&host).await;
        let vm = agent.begin_migration("web", "m1").unwrap();
        agent.mark_hand_over(&vm, "b", true, true).unwrap();
        agent.hold_in_doubt(&web(), "b").await;
    });
    let (socket, aside) =
        (host.path().join("run/vms/web/qmp.sock"), host.path().join("aside.sock"));
    std::fs::rename(&socket, &aside).unwrap();
    host.run(async {
        let agent = Agent::open(host.config.clone()).await.unwrap();
        let info = agent.vm_info("web").unwrap();
        assert!(info.in_doubt && info.pid.is_none(), "{info:?}");
        std::fs::rename(&aside, &socket).unwrap();
        until("the VM is adopted", async || agent.vm_info("web").unwrap().pid.is_some()).await;
        let info = agent.vm_info("web").unwrap();
        assert_eq!((info.state, info.epoch), (VmState::Paused, 1), "pages are retained: {info:?}");
        let word = Resolve { runs_on: "a".to_owned(), keep_memory: true };
        let back = agent.resolve_doubt(&web(), word).await.unwrap().vm.unwrap();
        assert_eq!((back.state, back.epoch), (VmState::Running, 3));
        agent.stop(&web(), godwit_api::StopVm { force: true, grace_ms: None }).await.unwrap();
        agent.delete(&web(), true).await.unwrap();
        assert_eq!(host.remains(), Vec::<String>::new());
    });
}

#[test]
fn a_silent_shadow_is_removed_and_leaves_no_record() {
    let Some(host) = TestHost::new() else { return };
    let uuid = host.run(async {
        let agent = Agent::open(host.config.clone()).await.unwrap();
        let spec = resolved(&agent, &host, "web").await;
        let uuid = spec.uuid;
        agent.prepare_incoming(spec, arriving(2), "b", false, None).await.unwrap();
        uuid
    });
    std::fs::remove_file(host.path().join("run/vms/web/qmp.sock")).unwrap();
    host.run(async {
        let agent = Agent::open(host.config.clone()).await.unwrap();
        assert!(agent.vms().is_empty());
        // Its source still owns that epoch, and may offer it again.
        assert_eq!(agent.known(&web(), uuid, arriving(2).incarnation).unwrap(), Known::Never);
        assert_eq!(host.remains(), Vec::<String>::new());
    });
}

#[test]
fn a_vm_with_an_unreadable_record_is_not_created_again() {
    let Some(host) = TestHost::new() else { return };
    host.run(async {
        let agent = Agent::open(host.config.clone()).await.unwrap();
        agent.create(CreateVm::new(host.spec("web"), false)).await.unwrap();
    });
    let record = host.config.state_dir.join("vms/web/vm.json");
    std::fs::write(&record, "{").unwrap();
    host.run(async {
        let agent = Agent::open(host.config.clone()).await.unwrap();
        let refused = agent.create(CreateVm::new(host.spec("web"), false)).await.unwrap_err();
        assert!(
            refused.code == ErrorCode::AlreadyExists && refused.message.contains("vm.json"),
            "{refused}"
        );
        let spec = agent.resolve(host.spec("other")).await.unwrap();
        let spec = ResolvedSpec { name: web(), ..spec };
        let refused =
            agent.prepare_incoming(spec, arriving(2), "b", false, None).await.unwrap_err();
        assert_eq!(refused.code, ErrorCode::AlreadyExists);
        assert_eq!(std::fs::read_to_string(&record).unwrap(), "{");
    });
}

#[test]
fn a_qemu_that_does_not_answer_is_not_started_twice() {
    let Some(host) = TestHost::new() else { return };
    host.run(async { drop(with_vm(&host).await) });
    // Its monitor's socket is missing: no agent can adopt it, while its guest runs.
    std::fs::remove_file(host.path().join("run/vms/web/qmp.sock")).unwrap();
    host.run(async {
        let agent = Agent::open(host.config.clone()).await.unwrap();
        assert_eq!(agent.vm_info("web").unwrap().state, VmState::Failed);
        for refused in [agent.start(&web()).await.err(), agent.delete(&web(), false).await.err()] {
            let refused = refused.unwrap();
            assert!(
                refused.code == ErrorCode::WrongState && refused.remedy.contains("--force"),
                "{refused}"
            );
        }
        assert_eq!(host.qemus().len(), 1);
        agent.stop(&web(), godwit_api::StopVm { force: true, grace_ms: None }).await.unwrap();
        assert!(host.qemus().is_empty());
        agent.delete(&web(), false).await.unwrap();
        assert_eq!(host.remains(), Vec::<String>::new());
    });
}

#[test]
fn a_migration_is_followed_to_its_report() {
    let Some(host) = TestHost::new() else { return };
    host.with_agent(async |client| {
        client.create_vm(&CreateVm::new(host.spec("web"), true)).await.unwrap();
        // No agent listens there: with any engine this fails, and the guest continues here.
        let accepted = client.migrate("web", &MigrationRequest::to("b")).await.unwrap();
        let mut events = client.migration_events(&accepted.id).await.unwrap();
        let mut report: Option<Report> = None;
        while let Some(event) = events.next().await.unwrap() {
            match event {
                MigrationEvent::Progress(_) => {}
                MigrationEvent::Report(last) => report = Some(*last),
            }
        }
        let report = report.expect("the last event is the report");
        assert_eq!((report.outcome, report.to.as_str()), (Outcome::Failed, "b"));
        assert!(!report.error.unwrap().message.is_empty());
        until("the guest runs", async || client.vm("web").await.unwrap().state == VmState::Running)
            .await;
        let status = client.migration(&accepted.id).await.unwrap();
        assert_eq!(status.report.unwrap().outcome, Outcome::Failed);
        assert_eq!(
            client.cancel_migration(&accepted.id).await.unwrap_err().code(),
            Some(ErrorCode::WrongState)
        );
    });
}

#[test]
fn invalid_limits_are_refused_clearly() {
    let Some(mut host) = TestHost::new() else { return };
    host.config.migration_addresses = vec!["127.0.0.1".parse().unwrap()];
    host.with_agent(async |client| {
        client.create_vm(&CreateVm::new(host.spec("web"), true)).await.unwrap();
        let put = async |path: &str, limit: &str| {
            let body = serde_json::json!({ "limit": limit });
            client.put::<_, serde_json::Value>(path, &body).await
        };
        for (limit, why) in [
            ("0", "a limit of zero"),
            ("0mbit", "a limit of zero"),
            ("999kbit", "999kbit is too low"),
            ("fast", "`fast` is not a limit"),
        ] {
            for path in ["/v1/limits/host", "/v1/limits/migration", "/v1/migrations/m0/limit"] {
                let refused = put(path, limit).await.unwrap_err();
                assert_eq!(refused.code(), Some(ErrorCode::InvalidRequest), "{refused}");
                assert!(refused.to_string().contains(why), "{refused}");
            }
            let request = serde_json::json!({ "to": "b", "bandwidth_limit": limit });
            let refused =
                client.post::<_, serde_json::Value>("/v1/vms/web/migrations", &request).await;
            assert_eq!(refused.unwrap_err().code(), Some(ErrorCode::InvalidRequest));
        }
        for (path, code) in [
            ("/v1/migrations/m0/limit", ErrorCode::NotFound),
            ("/v1/limits/lanes/10.0.0.9", ErrorCode::NotFound),
            ("/v1/limits/lanes/eth0", ErrorCode::InvalidRequest),
            ("/v1/limits/nonsense", ErrorCode::NotFound),
        ] {
            assert_eq!(put(path, "1gbit").await.unwrap_err().code(), Some(code), "{path}");
        }
        let empty =
            client.put::<_, serde_json::Value>("/v1/limits/host", &serde_json::json!({})).await;
        assert_eq!(
            empty.unwrap_err().code(),
            Some(ErrorCode::InvalidRequest),
            "a missing limit does not mean no limit"
        );
        assert_eq!(client.limits().await.unwrap(), Limits::default(), "nothing was changed");
        assert!(client.migrations().await.unwrap().is_empty());
    });
}

#[test]
fn limits_are_set_shown_and_kept_by_migrations() {
    let Some(mut host) = TestHost::new() else { return };
    let lane = "127.0.0.1".parse().unwrap();
    host.config.migration_addresses = vec![lane];
    host.config.limits.host = "5gbit".parse().unwrap();
    host.with_agent(async |client| {
        let limit = |text: &str| -> RateLimit { text.parse().unwrap() };
        assert_eq!(client.limits().await.unwrap().host, limit("5gbit"));
        client.set_limit(LimitOf::Host, RateLimit::NONE).await.unwrap();
        client.set_limit(LimitOf::Lane(lane), limit("1gbit")).await.unwrap();
        let shown = client.set_limit(LimitOf::Migration, limit("2gbit")).await.unwrap();
        assert_eq!(
            (shown.host, shown.migration, shown.lanes[&lane]),
            (limit("none"), limit("2gbit"), limit("1gbit"))
        );
        client.create_vm(&CreateVm::new(host.spec("web"), true)).await.unwrap();
        for (asked, expected) in
            [(None, "2gbit"), (Some(limit("300mbit")), "300mbit"), (Some(RateLimit::NONE), "none")]
        {
            // No agent listens there: the migration ends soon, and its limit can no longer be
            // changed.
            let request = MigrationRequest { bandwidth_limit: asked, ..MigrationRequest::to("b") };
            let id = client.migrate("web", &request).await.unwrap().id;
            until("the migration ends", async || {
                client.migration(&id).await.unwrap().report.is_some()
            })
            .await;
            assert_eq!(client.migration(&id).await.unwrap().bandwidth_limit, limit(expected));
            let over = client.limit_migration(&id, limit("1gbit")).await.unwrap_err();
            assert_eq!(over.code(), Some(ErrorCode::WrongState), "{over}");
            until("the guest runs", async || {
                client.vm("web").await.unwrap().state == VmState::Running
            })
            .await;
        }
    });
}

#[test]
fn a_guest_with_an_unavailable_cpu_is_refused_by_its_features() {
    let Some(mut host) = TestHost::new() else { return };
    host.config.migration_addresses = vec!["127.0.0.1".parse().unwrap()];
    let spec = host.spec("web");
    let ask = async |client: &Client, path: &str, cpu_model: &str| {
        let own = godwit_qemu::inspect("qemu-system-x86_64", None).await.unwrap();
        let spec = VmSpec { cpu_model: Some(cpu_model.to_owned()), ..spec.clone() };
        let resolved =
            spec.resolve(&own, &AccelProbe { kvm: false, reason: String::new() }).unwrap();
        let incoming = serde_json::json!({
            "spec": resolved, "epoch": 2, "from": "b", "qemu_version": "7.2.0", "engine": "godwit",
        });
        client.post::<_, serde_json::Value>(path, &incoming).await
    };
    host.with_agent(async |client| {
        // TCG has no AVX-512 (7.2 to 10.0).
        for path in ["/v1/incoming/checks", "/v1/incoming"] {
            let refused =
                ask(&client, path, "Westmere-v1,+avx512f,+avx2,+avx512bw").await.unwrap_err();
            assert_eq!(refused.code(), Some(ErrorCode::Preflight), "{refused}");
            assert!(refused.to_string().contains(": avx512bw, avx512f"), "{refused}");
        }
        assert_eq!(host.remains(), Vec::<String>::new());
        ask(&client, "/v1/incoming/checks", "Westmere-v1,+avx2").await.unwrap();
    });
}

#[test]
fn a_host_reports_the_cpu_of_its_guests() {
    let Some(host) = TestHost::new() else { return };
    host.with_agent(async |client| {
        until("QEMU has answered", async || client.host().await.unwrap().cpu.is_some()).await;
        let info = client.host().await.unwrap();
        let cpu = info.cpu.unwrap();
        assert!(
            cpu.features.contains("lm") && cpu.models.iter().any(|model| model == "max"),
            "{cpu:?}"
        );
        assert!(info.logical_cores > 0 && info.memory_total_bytes >= info.memory_available_bytes);
    });
}
