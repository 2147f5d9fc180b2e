//! Tests of the real manager, through its real API, with simulated agents and QEMU.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::path::PathBuf;
use std::time::Duration;

use godwit_api::control::{
    Cluster, Drain, DrainState, DrainVmState, LoadHistory, LoadTop, Move, MoveState, Page,
};
use godwit_api::{VmInfo, VmState};
use godwit_control::{Config, run};
use godwit_fleet::{Asker, Fleet, FleetPlan, InjectedFault, Liar, Looks, lie};
use serde_json::json;
use tokio::task::JoinHandle;

/// Limit of every wait, enough for a slow machine.
const LIMIT: Duration = Duration::from_secs(120);
/// Maximum simultaneous moves out of a host and into it, at 1 Gb/s.
const MOST_MOVES: u32 = 4;

/// Manager with simulated hosts.
struct Managed {
    fleet: Fleet,
    asker: Asker,
    manager: JoinHandle<()>,
    _dir: tempfile::TempDir,
}

impl Drop for Managed {
    fn drop(&mut self) {
        self.manager.abort();
    }
}

impl Managed {
    async fn begin(plan: FleetPlan) -> Managed {
        let dir = tempfile::tempdir().unwrap();
        let socket: PathBuf = dir.path().join("control.sock");
        let config = format!(
            "name = \"m1\"\ninsecure = true\nsocket = \"{}\"\nstate_dir = \"{}\"",
            socket.display(),
            dir.path().join("state").display()
        );
        let config = Config::parse(&config, dir.path()).unwrap();
        let manager = tokio::spawn(async move { run(config).await.unwrap() });
        let vms = plan.vms as u64;
        let fleet = Fleet::begin(plan).await.unwrap();
        let mut managed = Managed { fleet, asker: Asker::new(&socket), manager, _dir: dir };
        managed.until(|cluster| cluster.leader.is_some()).await;
        let agents = managed.fleet.agents().clone();
        let hosts = agents.len() as u64;
        for (name, address) in agents {
            let host =
                json!({ "name": name, "address": address, "link_bits_per_s": 1_000_000_000 });
            let _: serde_json::Value = managed.asker.post("/api/v1/hosts", &host).await.unwrap();
        }
        managed.until(|cluster| (cluster.hosts_up, cluster.vms) == (hosts, vms)).await;
        managed
    }

    /// Waits until the cluster satisfies a condition.
    async fn until(&mut self, is_so: impl Fn(&Cluster) -> bool) {
        let wait = async {
            loop {
                if self
                    .asker
                    .get::<Cluster>("/api/v1/cluster")
                    .await
                    .is_ok_and(|cluster| is_so(&cluster))
                {
                    return;
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        tokio::time::timeout(LIMIT, wait).await.unwrap();
    }

    /// Waits for the end of a drain. The drain learns of its last move a little later than others
    /// do.
    async fn drained(&mut self, id: &str) -> Drain {
        let wait = async {
            loop {
                let drain: Drain = self.asker.get(&format!("/api/v1/drains/{id}")).await.unwrap();
                if drain.state != DrainState::Running {
                    return drain;
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        tokio::time::timeout(LIMIT, wait).await.unwrap()
    }

    /// Waits until the only move of a VM satisfies a condition.
    async fn move_of(&mut self, vm: &str, is_so: impl Fn(&Move) -> bool) -> Move {
        let path = format!("/api/v1/moves?vm={vm}");
        let wait = async {
            loop {
                let page: Page<Move> = self.asker.get(&path).await.unwrap();
                if let Some(found) = page.items.into_iter().find(&is_so) {
                    return found;
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        tokio::time::timeout(LIMIT, wait).await.unwrap()
    }

    /// Waits until no VM leaves a host, according to its agent.
    async fn until_still(&self, host: &str) {
        let is_leaving = |vm: &VmInfo| vm.state == VmState::MigratingOut;
        let wait = async {
            while self.fleet.vms_of(host).iter().any(is_leaving) {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        tokio::time::timeout(LIMIT, wait).await.unwrap();
    }

    async fn until_over(&mut self) -> Looks {
        let mut looks = Looks::default();
        looks.until_over(&mut self.asker, LIMIT).await.unwrap();
        looks
    }

    /// Checks that no move was started twice, none exceeded a limit, and none waited without a
    /// reason.
    fn check(&self, looks: &Looks) {
        let counts = self.fleet.counts();
        assert_eq!((counts.double_begins, counts.not_there), (0, 0), "{counts:?}");
        assert!(
            counts.most_out_of_one() <= MOST_MOVES && counts.most_into_one() <= MOST_MOVES,
            "{counts:?}"
        );
        assert_eq!(looks.unexplained, 0, "{looks:?}");
    }
}

fn plan() -> FleetPlan {
    FleetPlan { speed: 40.0, ..FleetPlan::default() }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_load_of_hosts_and_vms_is_shown_and_kept() {
    let mut managed = Managed::begin(plan()).await;
    let wait = async {
        loop {
            let top: LoadTop = managed.asker.get("/api/v1/top?by=cpu&limit=3").await.unwrap();
            let cluster: LoadHistory =
                managed.asker.get("/api/v1/load?object=cluster").await.unwrap();
            if !cluster.series.is_empty() && top.vms.len() == 3 {
                return (top, cluster);
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let (top, cluster) = tokio::time::timeout(LIMIT, wait).await.unwrap();
    let used = top.vms.iter().map(|vm| vm.load.cpu_used_millicores);
    assert!(used.is_sorted_by(|more, less| more >= less), "{top:?}");
    assert!(cluster.capacity.memory_bytes.is_some());
    let path = format!("/api/v1/load?object=vm:{}&resolution=1min", top.vms[0].load.name);
    let of_vm: LoadHistory = managed.asker.get(&path).await.unwrap();
    assert!(!of_vm.series.is_empty(), "{of_vm:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_is_drained_within_all_limits_and_every_wait_is_explained() {
    // Slow enough that polls see waiting moves.
    let mut managed = Managed::begin(FleetPlan { speed: 15.0, ..plan() }).await;
    let asked: Drain =
        managed.asker.post("/api/v1/hosts/host-0000/drain", &json!({})).await.unwrap();
    assert_eq!(asked.vms.len(), 25);
    let looks = managed.until_over().await;
    let drain = managed.drained(&asked.id).await;
    assert!(drain.vms.iter().all(|vm| vm.state == DrainVmState::Gone), "{drain:?}");
    assert_eq!(drain.state, DrainState::Done);
    assert!(managed.fleet.vms_of("host-0000").is_empty());
    managed.check(&looks);
    assert_eq!(managed.fleet.counts().begun_more_than(1), Vec::<&str>::new());
    assert!(looks.waiting > 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn many_moves_keep_to_the_limits_and_those_that_fail_are_tried_again() {
    let mut managed = Managed::begin(plan()).await;
    managed.fleet.fault("vm-00001", InjectedFault::FailHalfWay, 1);
    let mut moves = Vec::new();
    for vm in 0..80 {
        // All to the first two hosts.
        let (from, to) = (vm % 8, if vm % 2 == 0 { 1 } else { 0 });
        if from != to {
            let path = format!("/api/v1/vms/vm-{vm:05}/moves");
            let asked: Move =
                managed.asker.post(&path, &json!({ "to": format!("host-{to:04}") })).await.unwrap();
            moves.push((asked.id, to));
        }
    }
    // The retry of a failed move comes later than the test waits, so the drain is cancelled.
    let looks = {
        let failed = async {
            loop {
                let page: Page<Move> =
                    managed.asker.get("/api/v1/moves?vm=vm-00001").await.unwrap();
                let tried = page.items.first().filter(|one| one.failure.is_some()).cloned();
                if let Some(tried) = tried {
                    return tried;
                }
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        let tried = tokio::time::timeout(LIMIT, failed).await.unwrap();
        assert_eq!(
            tried.waits.as_ref().map(|waits| waits.code.as_str()),
            Some("retry-at"),
            "{tried:?}"
        );
        let path = format!("/api/v1/moves/{}", tried.id);
        managed.asker.ask(http::Method::DELETE, &path, None).await.unwrap();
        managed.until_over().await
    };
    managed.check(&looks);
    let counts = managed.fleet.counts();
    assert_eq!((counts.completed, counts.failed), (moves.len() as u64 - 1, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn moves_that_end_while_their_host_is_away_are_known_when_it_is_back() {
    let mut managed = Managed::begin(plan()).await;
    let asked: Drain =
        managed.asker.post("/api/v1/hosts/host-0000/drain", &json!({})).await.unwrap();
    managed.until(|cluster| cluster.moves_running > 0).await;
    managed.fleet.silence("host-0000", true);
    managed.until_still("host-0000").await;
    managed.fleet.silence("host-0000", false);
    let looks = managed.until_over().await;
    let drain = managed.drained(&asked.id).await;
    assert_eq!(drain.state, DrainState::Done);
    assert!(drain.vms.iter().all(|vm| vm.state == DrainVmState::Gone), "{drain:?}");
    managed.check(&looks);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_move_whose_agent_was_restarted_is_no_longer_taken_for_running() {
    // So slow that it does not end by itself.
    let mut managed = Managed::begin(FleetPlan { speed: 0.01, ..FleetPlan::default() }).await;
    let asked: Move = managed
        .asker
        .post("/api/v1/vms/vm-00000/moves", &json!({ "to": "host-0001" }))
        .await
        .unwrap();
    assert_eq!(asked.from, "host-0000");
    managed.move_of("vm-00000", |one| one.state == MoveState::Running).await;
    managed.fleet.restart("host-0000");
    let waits = managed.move_of("vm-00000", |one| one.state == MoveState::Waiting).await;
    assert_eq!(waits.failure.map(|failure| failure.code).as_deref(), Some("lost-track"));
    managed
        .asker
        .ask(http::Method::DELETE, &format!("/api/v1/moves/{}", asked.id), None)
        .await
        .unwrap();
    managed.move_of("vm-00000", |one| one.state == MoveState::Cancelled).await;
    assert_eq!(managed.fleet.counts().double_begins, 0);
}

/// Allowed memory growth of manager, agents and liar in one process, in bytes.
const MOST_GROWTH_BYTES: u64 = 64 << 20;

fn resident_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let kib = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    kib.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_lies_in_every_field_changes_nothing_of_others_and_each_lie_is_shown() {
    let plan = FleetPlan { hosts: 3, vms: 30, hosts_with_vms: 3, ..plan() };
    let mut managed = Managed::begin(plan.clone()).await;
    let before = resident_bytes();
    let mut liar = Liar::begin("liar", 19, plan).await.unwrap();
    let lied = lie(&mut managed.asker, &mut liar, 500).await.unwrap();
    assert_eq!((&lied.unshown, &lied.changed), (&vec![], &vec![]), "{lied:?}");
    assert_eq!((lied.messages, lied.shown), (500, lied.claims + lied.impossible));
    let grown = resident_bytes().saturating_sub(before);
    assert!(grown <= MOST_GROWTH_BYTES, "{grown} bytes");
}
