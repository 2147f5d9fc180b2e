//! A manager that dies, and what becomes of what it had in hand: real managers, as processes that are killed, over a real etcd or SQLite;
//! simulated agents (`lab/fleet`).

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests may fail the test
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

/// Moves out of a host with a link of 1 Gb/s at once, and into one.
const AT_ONCE: u32 = 4;
const VMS: usize = 20;

/// Not a test: what the tests run as processes of their own.
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

/// Four hosts, and all VMs on the first of them.
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

/// Has a manager that leads take the hosts in; gives an operator's token.
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

/// Waits until a manager has heard every host.
async fn hears_all(manager: &ManagerProcess, fleet: &Fleet) {
    let (hosts, vms) = (fleet.agents().len() as u64, VMS as u64);
    until("every host is heard", async || {
        manager
            .cluster()
            .await
            .is_some_and(|cluster| (cluster.hosts_up, cluster.vms) == (hosts, vms))
    })
    .await;
}

/// Asks a manager to move every VM from the first host to the others.
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

/// Waits until some moves are over, and others run and wait.
async fn in_the_midst(fleet: &Fleet) {
    until("some moves are over", async || {
        let counts = fleet.counts();
        counts.completed >= 3 && counts.begun.len() < VMS
    })
    .await;
}

/// Every VM has moved, once, and never more at a time than may.
async fn came_through_once(manager: &ManagerProcess, fleet: &Fleet) {
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
    let more = format!("[etcd]\nendpoints = [\"{}\"]\n", etcd.endpoint());
    ["m1", "m2", "m3"].map(|name| ManagerProcess::start(dir.path(), name, false, &more)).into()
}

/// Three managers that have heard every host.
struct Cluster {
    /// What the managers keep.
    dir: TempDir,
    fleet: Fleet,
    managers: Vec<ManagerProcess>,
    /// Which of them leads.
    first: usize,
    /// An operator's.
    token: String,
}

impl Cluster {
    async fn of_three(etcd: &EtcdServer) -> Cluster {
        let (dir, fleet) = (tempfile::tempdir().unwrap(), fleet().await);
        let managers = three(&dir, etcd);
        let first = leader_of(&managers).await;
        let token = set_up(&managers[first], &fleet).await;
        for manager in &managers {
            hears_all(manager, &fleet).await;
        }
        Cluster { dir, fleet, managers, first, token }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_leader_is_followed_by_another_and_every_move_comes_through_once() {
    let Some(etcd) = EtcdServer::start() else { return };
    let Cluster { dir: _dir, fleet, mut managers, first, token } = Cluster::of_three(&etcd).await;
    // A manager that does not lead passes on what it is asked.
    move_all(&managers[(first + 1) % 3], &token).await;
    in_the_midst(&fleet).await;

    let killed = Instant::now();
    managers[first].kill();
    let second = leader_of(&managers).await;
    let led_ms = killed.elapsed().as_millis();
    let begun = fleet.counts().begun.len();
    until("another move begins", async || fleet.counts().begun.len() > begun.min(VMS - 1)).await;
    println!("taken over after {led_ms} ms; moves go on after {} ms", killed.elapsed().as_millis());
    assert_ne!(first, second);
    came_through_once(&managers[second], &fleet).await;
    // The token, the hosts and the log are everybody's.
    let third = 3 - first - second;
    let seen = managers[third].ask(Method::GET, "/api/v1/moves?limit=1000", &token, None).await;
    assert_eq!(seen.read::<Page<Move>>().items.len(), VMS);
    let cluster = managers[third].cluster().await.unwrap();
    assert_eq!(
        cluster.leader.map(|leader| (leader.name, leader.is_self)),
        Some((managers[second].name.clone(), false))
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_drain_goes_on_when_the_manager_that_leads_is_killed() {
    let Some(etcd) = EtcdServer::start() else { return };
    let Cluster { dir: _dir, fleet, mut managers, first, token } = Cluster::of_three(&etcd).await;
    let follower = &managers[(first + 1) % 3];
    let asked =
        follower.ask(Method::POST, "/api/v1/hosts/host-0000/drain", &token, Some(json!({}))).await;
    let path = format!("/api/v1/drains/{}", asked.read::<Drain>().id);
    in_the_midst(&fleet).await;
    managers[first].kill();
    let second = leader_of(&managers).await;
    until("the drain is done", async || {
        let drain = managers[second].ask_as_root(Method::GET, &path, None).await;
        drain.read::<Drain>().state == DrainState::Done
    })
    .await;
    came_through_once(&managers[second], &fleet).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lone_manager_that_was_killed_goes_on_when_it_is_started_again() {
    let (dir, fleet) = (tempfile::tempdir().unwrap(), fleet().await);
    let mut managers = [ManagerProcess::start(dir.path(), "m1", false, "")];
    leader_of(&managers).await;
    let token = set_up(&managers[0], &fleet).await;
    hears_all(&managers[0], &fleet).await;
    move_all(&managers[0], &token).await;
    in_the_midst(&fleet).await;
    managers[0].kill();
    managers[0].run();
    leader_of(&managers).await;
    came_through_once(&managers[0], &fleet).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_manager_that_ends_in_peace_gives_the_leadership_back() {
    let Some(etcd) = EtcdServer::start() else { return };
    let dir = tempfile::tempdir().unwrap();
    // A lease that nobody would live to see the end of.
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
async fn with_etcd_away_managers_answer_what_they_know_and_go_on_when_it_is_back() {
    let Some(mut etcd) = EtcdServer::start() else { return };
    let Cluster { dir: _dir, fleet, managers, first, token } = Cluster::of_three(&etcd).await;
    etcd.kill();
    until("nobody leads", async || !managers[first].leads().await).await;
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
    came_through_once(&managers[next], &fleet).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn root_is_known_by_the_certificate_of_the_manager_whose_socket_it_asked() {
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
            "[tls]\nauthority = \"{ca}\"\ncertificate = \"{certificate}\"\nkey = \"{key}\"\n[etcd]\nendpoints = [\"{}\"]\n",
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
    until("it is noted", async || {
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
async fn without_certificates_root_is_told_where_to_ask_and_tokens_are_judged_by_the_leader() {
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
    // A token is good at every manager at once, and what it may not do is noted.
    let made: CreatedToken =
        leader.ask_as_root(Method::POST, "/api/v1/tokens", Some(token)).await.read();
    let looked = follower.ask(Method::GET, "/api/v1/hosts", &made.token, None).await;
    assert_eq!(looked.status, StatusCode::OK);
    let weak = follower.ask(Method::DELETE, "/api/v1/hosts/a", &made.token, None).await;
    assert_eq!(weak.problem().code, ProblemCode::Forbidden);
    let wrong = follower.ask(Method::GET, "/api/v1/hosts", "godwit_00_11", None).await;
    assert_eq!(wrong.problem().code, ProblemCode::Unauthenticated);
    until("both are noted", async || {
        let page =
            leader.ask_as_root(Method::GET, "/api/v1/audit", None).await.read::<Page<AuditEntry>>();
        let noted = |status| page.items.iter().any(|entry| entry.status == status);
        noted(401) && noted(403)
    })
    .await;
}
