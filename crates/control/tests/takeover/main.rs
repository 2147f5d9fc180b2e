//! Takeover after the death of a manager. Real managers run as processes that are killed, over a
//! real etcd or SQLite; the agents are simulated (`lab/fleet`).

// Test helpers may fail the test.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
#![cfg(feature = "etcd")]

#[allow(dead_code, reason = "the store's tests use more of it")]
#[path = "../../../store/tests/shared/etcd_server.rs"]
mod etcd_server;
mod managers;

use std::path::Path;
use std::time::Instant;

use etcd_server::EtcdServer;
use godwit_api::control::{
    AddHost, AuditEntry, CreateToken, CreatedToken, Drain, DrainState, Move, MoveState, Page,
    ProblemCode, Role,
};
use godwit_control::Config;
use godwit_fleet::{Fleet, FleetPlan};
use godwit_pki::{Authority, Grant};
use http::{Method, StatusCode};
use managers::{CONFIG_VARIABLE, ManagerProcess, leader_of, until};
use serde_json::json;
use tempfile::TempDir;

/// Most concurrent moves out of a host with a 1 Gb/s link, and into one.
const AT_ONCE: u32 = 4;
const VMS: usize = 20;

/// Not a test: the program that the tests run as separate processes.
#[test]
#[ignore = "the other tests run it"]
fn manager_process() {
    let Some(config) = std::env::var_os(CONFIG_VARIABLE) else { return };
    let config = Config::load(Path::new(&config)).unwrap();
    tracing_subscriber::fmt().with_writer(std::io::stderr).with_ansi(false).init();
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(godwit_control::run(config)).unwrap();
}

/// Starts four hosts, with all VMs on the first.
async fn fleet() -> Fleet {
    let plan = FleetPlan {
        hosts: 4,
        vms: VMS,
        hosts_with_vms: 1,
        vm_memory_bytes: vec![64 << 20],
        ..FleetPlan::default()
    };
    Fleet::begin(plan).await.unwrap()
}

/// Adds the hosts to the leading manager. Returns an operator's token.
async fn set_up(leader: &ManagerProcess, fleet: &Fleet) -> String {
    for (name, address) in fleet.agents() {
        let host = AddHost {
            name: name.clone(),
            address: address.clone(),
            labels: std::collections::BTreeMap::default(),
            link_bits_per_s: Some(1_000_000_000),
            most_moves: None,
        };
        leader.root().add_host(&host).await.unwrap();
    }
    let token = CreateToken { name: "ada".into(), role: Role::Operator, days: 1 };
    leader.root().create_token(&token).await.unwrap().token
}

/// Waits until every host has reported to a manager.
async fn wait_for_all_hosts(manager: &ManagerProcess, fleet: &Fleet) {
    let (hosts, vms) = (fleet.agents().len() as u64, VMS as u64);
    until("every host has reported", async || {
        manager
            .cluster()
            .await
            .is_some_and(|cluster| (cluster.hosts_up, cluster.vms) == (hosts, vms))
    })
    .await;
}

/// Requests a move of every VM from the first host to the others.
async fn move_all(manager: &ManagerProcess, token: &str) {
    for number in 0..VMS {
        let to = json!({ "to": format!("host-{:04}", 1 + number % 3) });
        let path = format!("/api/v1/vms/vm-{number:05}/moves");
        let asked = manager.ask(Method::POST, &path, token, Some(to)).await;
        let asked: Move = asked.read();
        assert_eq!(asked.vm, format!("vm-{number:05}"));
    }
}

async fn moves(manager: &ManagerProcess) -> Vec<Move> {
    let page = manager.ask_as_root(Method::GET, "/api/v1/moves", None).await;
    page.read::<Page<Move>>().items
}

/// Waits until some moves are over while others run and wait.
async fn wait_for_some_moves(fleet: &Fleet) {
    until("some moves are over", async || {
        let counts = fleet.counts();
        counts.completed >= 3 && counts.begun.len() < VMS
    })
    .await;
}

/// Checks that every VM moved once, and that the limit of concurrent moves held.
async fn assert_all_moved_once(manager: &ManagerProcess, fleet: &Fleet) {
    until("every move is over", async || {
        moves(manager).await.iter().all(|one| one.state.is_over())
    })
    .await;
    let all = moves(manager).await;
    assert_eq!(all.len(), VMS);
    assert!(all.iter().all(|one| one.state == MoveState::Done && one.attempts == 1), "{all:?}");
    let counts = fleet.counts();
    assert_eq!(counts.begun.len(), VMS);
    assert_eq!(counts.begun_more_than(1), Vec::<&str>::new());
    assert_eq!(
        (counts.completed, counts.failed, counts.cancelled),
        (VMS as u64, 0, 0),
        "{counts:?}"
    );
    assert_eq!((counts.double_begins, counts.not_there), (0, 0), "{counts:?}");
    let most = (counts.most_out_of_one(), counts.most_into_one());
    assert!(most.0 <= AT_ONCE && most.1 <= AT_ONCE, "{most:?}");
    assert!(fleet.vms_of("host-0000").is_empty());
}

fn three(dir: &TempDir, etcd: &EtcdServer) -> Vec<ManagerProcess> {
    // Long enough that a machine that stalls for seconds loses no leader.
    let more = format!("[etcd]\nendpoints = [\"{}\"]\nlease_s = 15\n", etcd.endpoint());
    ["m1", "m2", "m3"].map(|name| ManagerProcess::start(dir.path(), name, false, &more)).into()
}

/// Three managers to which every host has reported.
struct Cluster {
    /// Directory of the managers' state.
    dir: TempDir,
    fleet: Fleet,
    managers: Vec<ManagerProcess>,
    /// Index of the leader.
    first: usize,
    /// Token of an operator.
    token: String,
}

impl Cluster {
    async fn of_three(etcd: &EtcdServer) -> Cluster {
        let (dir, fleet) = (tempfile::tempdir().unwrap(), fleet().await);
        let managers = three(&dir, etcd);
        let first = leader_of(&managers).await;
        let token = set_up(&managers[first], &fleet).await;
        for manager in &managers {
            wait_for_all_hosts(manager, &fleet).await;
        }
        Cluster { dir, fleet, managers, first, token }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_manager_replaces_a_killed_leader_and_every_move_completes_once() {
    let Some(etcd) = EtcdServer::start() else { return };
    let Cluster { dir: _dir, fleet, mut managers, first, token } = Cluster::of_three(&etcd).await;
    // A follower passes requests on.
    move_all(&managers[(first + 1) % 3], &token).await;
    wait_for_some_moves(&fleet).await;

    let killed = Instant::now();
    managers[first].kill();
    let second = leader_of(&managers).await;
    let led_ms = killed.elapsed().as_millis();
    let begun = fleet.counts().begun.len();
    until("another move begins", async || fleet.counts().begun.len() > begun.min(VMS - 1)).await;
    println!("taken over after {led_ms} ms; moves go on after {} ms", killed.elapsed().as_millis());
    assert_ne!(first, second);
    assert_all_moved_once(&managers[second], &fleet).await;
    // All managers share the token, the hosts and the log.
    let third = 3 - first - second;
    let seen = managers[third].ask(Method::GET, "/api/v1/moves?limit=1000", &token, None).await;
    assert_eq!(seen.read::<Page<Move>>().items.len(), VMS);
    // It names none if etcd does not answer in time.
    until("the third manager names the leader", async || {
        let leader = managers[third].cluster().await.and_then(|cluster| cluster.leader);
        leader.is_some_and(|leader| leader.name == managers[second].name && !leader.is_self)
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_drain_continues_when_the_leader_is_killed() {
    let Some(etcd) = EtcdServer::start() else { return };
    let Cluster { dir: _dir, fleet, mut managers, first, token } = Cluster::of_three(&etcd).await;
    let follower = &managers[(first + 1) % 3];
    let asked =
        follower.ask(Method::POST, "/api/v1/hosts/host-0000/drain", &token, Some(json!({}))).await;
    let path = format!("/api/v1/drains/{}", asked.read::<Drain>().id);
    wait_for_some_moves(&fleet).await;
    managers[first].kill();
    let second = leader_of(&managers).await;
    until("the drain is done", async || {
        let drain = managers[second].ask_as_root(Method::GET, &path, None).await;
        drain.read::<Drain>().state == DrainState::Done
    })
    .await;
    assert_all_moved_once(&managers[second], &fleet).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_single_killed_manager_continues_after_a_restart() {
    let (dir, fleet) = (tempfile::tempdir().unwrap(), fleet().await);
    let mut managers = [ManagerProcess::start(dir.path(), "m1", false, "")];
    leader_of(&managers).await;
    let token = set_up(&managers[0], &fleet).await;
    wait_for_all_hosts(&managers[0], &fleet).await;
    move_all(&managers[0], &token).await;
    wait_for_some_moves(&fleet).await;
    managers[0].kill();
    managers[0].run();
    leader_of(&managers).await;
    assert_all_moved_once(&managers[0], &fleet).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_manager_that_shuts_down_gives_up_the_leadership() {
    let Some(etcd) = EtcdServer::start() else { return };
    let dir = tempfile::tempdir().unwrap();
    // A lease too long to wait for.
    let more = format!("[etcd]\nendpoints = [\"{}\"]\nlease_s = 60\n", etcd.endpoint());
    let mut managers =
        ["m1", "m2"].map(|name| ManagerProcess::start(dir.path(), name, false, &more));
    let first = leader_of(&managers).await;
    let stopped = Instant::now();
    managers[first].stop();
    let second = leader_of(&managers).await;
    println!("taken over after {} ms", stopped.elapsed().as_millis());
    assert_ne!(first, second);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_etcd_managers_serve_their_state_and_continue_when_it_returns() {
    let Some(mut etcd) = EtcdServer::start() else { return };
    let Cluster { dir: _dir, fleet, managers, first, token } = Cluster::of_three(&etcd).await;
    etcd.kill();
    until("no manager leads", async || !managers[first].leads().await).await;
    for manager in &managers {
        let cluster = manager.cluster().await.unwrap();
        assert_eq!((cluster.leader, cluster.hosts_up, cluster.vms), (None, 4, VMS as u64));
        let path = "/api/v1/vms/vm-00000/moves";
        let refused =
            manager.ask(Method::POST, path, &token, Some(json!({ "to": "host-0001" }))).await;
        assert_eq!(refused.status, StatusCode::SERVICE_UNAVAILABLE);
        assert!(!refused.problem().remedy.is_empty());
    }
    assert!(etcd.run());
    let next = leader_of(&managers).await;
    move_all(&managers[(next + 1) % 3], &token).await;
    assert_all_moved_once(&managers[next], &fleet).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn root_is_identified_by_the_certificate_of_the_forwarding_manager() {
    let Some(etcd) = EtcdServer::start() else { return };
    let dir = tempfile::tempdir().unwrap();
    let authority = Authority::create(&dir.path().join("pki"), "test", 1).unwrap();
    let managers = ["m1", "m2"].map(|name| {
        let grant = Grant {
            name: name.to_owned(),
            role: godwit_pki::Role::Operator,
            addresses: vec![std::net::IpAddr::from([127, 0, 0, 1])],
            days: 1,
        };
        let issued = authority.issue(&grant).unwrap();
        let (ca, certificate, key) = (authority.certificate(), issued.certificate, issued.key);
        let (ca, certificate, key) = (ca.display(), certificate.display(), key.display());
        let more = format!(
            "[tls]\nauthority = \"{ca}\"\ncertificate = \"{certificate}\"\nkey = \"{key}\"\n\
             [etcd]\nendpoints = [\"{}\"]\nlease_s = 60\n",
            etcd.endpoint()
        );
        ManagerProcess::start(dir.path(), name, true, &more)
    });
    let first = leader_of(&managers).await;
    let follower = &managers[1 - first];
    until("the follower answers", async || follower.cluster().await.is_some()).await;
    let token = json!({ "name": "ada", "role": "viewer" });
    let made = follower.ask_as_root(Method::POST, "/api/v1/tokens", Some(token)).await;
    assert_eq!(made.status, StatusCode::CREATED);
    let made: CreatedToken = made.read();
    assert_eq!(made.info.made_by, format!("root@{}", follower.name));
    let mut noted = Vec::new();
    until("the request is audited", async || {
        noted = follower
            .ask_as_root(Method::GET, "/api/v1/audit", None)
            .await
            .read::<Page<AuditEntry>>()
            .items;
        !noted.is_empty()
    })
    .await;
    assert_eq!(
        (noted[0].who.as_str(), noted[0].what.as_str()),
        (made.info.made_by.as_str(), "POST /api/v1/tokens")
    );
    assert!(!format!("{noted:?}{}{}", managers[0].log(), managers[1].log()).contains(&made.token));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_certificates_root_is_referred_to_the_leader_which_checks_tokens() {
    let Some(etcd) = EtcdServer::start() else { return };
    let dir = tempfile::tempdir().unwrap();
    let managers = three(&dir, &etcd);
    let first = leader_of(&managers).await;
    let (leader, follower) = (&managers[first], &managers[(first + 1) % 3]);
    until("the follower answers", async || follower.cluster().await.is_some()).await;
    let token = json!({ "name": "ada", "role": "viewer" });
    let refused =
        follower.ask_as_root(Method::POST, "/api/v1/tokens", Some(token.clone())).await.problem();
    assert_eq!(refused.code, ProblemCode::NoLeader);
    assert!(refused.remedy.contains(&leader.address), "{}", refused.remedy);
    // A token is valid at every manager at once, and refusals are audited.
    let made: CreatedToken =
        leader.ask_as_root(Method::POST, "/api/v1/tokens", Some(token)).await.read();
    let read = follower.ask(Method::GET, "/api/v1/hosts", &made.token, None).await;
    assert_eq!(read.status, StatusCode::OK);
    let weak = follower.ask(Method::DELETE, "/api/v1/hosts/a", &made.token, None).await;
    assert_eq!(weak.problem().code, ProblemCode::Forbidden);
    let wrong = follower.ask(Method::GET, "/api/v1/hosts", "godwit_00_11", None).await;
    assert_eq!(wrong.problem().code, ProblemCode::Unauthenticated);
    until("both are audited", async || {
        let page =
            leader.ask_as_root(Method::GET, "/api/v1/audit", None).await.read::<Page<AuditEntry>>();
        let noted = |status| page.items.iter().any(|entry| entry.status == status);
        noted(401) && noted(403)
    })
    .await;
}
