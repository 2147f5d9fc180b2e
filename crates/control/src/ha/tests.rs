//! Judges over simulated hosts, whose guards are the production ones, with short durations.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use godwit_api::VmState;
use godwit_api::control::{
    AlarmKind, HaHostStatus, HaPhase, HaSettings, HaStatus, Problem, ProblemCode,
};
use godwit_fleet::{FleetPlan, HeldClock};
use godwit_ha::{Answer, Facts, Grant, Judge, Record, Renewal, Term, Timing};
use godwit_qemu::Uuid;
use http::Method;
use parking_lot::Mutex;
use serde_json::json;
use tokio::task::JoinSet;

use super::fencing::Devices;
use super::fencing::tests::{hanging_device_of, is_alive, until_gone, working_device_of};
use super::judges::{self, Judges};
use super::record::{HA, HA_HOSTS, OF_CLUSTER, SavedJudge};
use super::seat::{Judged, Judging, Means};
use super::troubles::Troubles;
use crate::cluster::inventory::HostPlan;
use crate::http::tests::Managed;
use crate::vms::tests::Cluster;

/// Path of the API.
const HA_PATH: &str = "/api/v1/ha";

fn timing() -> Timing {
    Timing {
        interval: Duration::from_millis(200),
        lease: Duration::from_millis(2000),
        grace: Duration::from_millis(500),
        drift_ppm: 1000,
    }
}

fn plan(hosts: usize) -> FleetPlan {
    FleetPlan { hosts, vms: 0, datastores: true, ..FleetPlan::default() }
}

/// Services of a manager; the judges' troubles and clock are apart.
fn means(managed: &Managed, troubles: &Arc<Troubles>, clock: &HeldClock) -> Means {
    let clock = clock.clone();
    let manager = &managed.manager;
    let leading = manager.leading().unwrap();
    Means {
        keeper: Arc::clone(&leading.keeper),
        state: Arc::clone(&manager.state),
        agents: Arc::clone(&manager.agents),
        devices: Arc::new(Devices::default()),
        restarts: leading.judges.restarts(),
        own: leading.judges.own(),
        terms: Arc::clone(&manager.ha.terms),
        troubles: Arc::clone(troubles),
        admission: manager.ha.admission.clone(),
        clock: Arc::new(move || clock.now()),
    }
}

/// Judges with short durations, in place of a manager's own ones: these have no settings and do
/// nothing. Their clock and that of the guards stands still until every host that is not silent was
/// heard, so that a slow machine is no silence.
struct Rig {
    judges: Arc<Judges>,
    troubles: Arc<Troubles>,
    silent: Arc<Mutex<BTreeSet<String>>>,
    clock: HeldClock,
    _tasks: JoinSet<()>,
}

impl Rig {
    /// Begins the first judges of hosts.
    async fn of(cluster: &Cluster) -> Rig {
        Rig::with_devices(cluster, Devices::default()).await
    }

    async fn with_devices(cluster: &Cluster, devices: Devices) -> Rig {
        let clock = HeldClock::default();
        cluster.fleet.set_ha_timing(timing(), clock.clone());
        Rig::begin(&cluster.managed, devices, clock).await
    }

    async fn begin(managed: &Managed, devices: Devices, clock: HeldClock) -> Rig {
        let troubles = Arc::<Troubles>::default();
        let means = Means { devices: Arc::new(devices), ..means(managed, &troubles, &clock) };
        let judges = Judges::begin(means, timing()).await.unwrap();
        let silent = Arc::default();
        let mut tasks = JoinSet::new();
        tasks.spawn(judges::run(Arc::clone(&judges)));
        tasks.spawn(keep_time(Arc::clone(&judges), Arc::clone(&silent), clock.clone()));
        Rig { judges, troubles, silent, clock, _tasks: tasks }
    }

    /// Makes a host hang, or continue.
    fn silence(&self, cluster: &Cluster, host: &str, silent: bool) {
        if silent {
            self.silent.lock().insert(host.to_owned());
        }
        cluster.fleet.silence(host, silent);
        if !silent {
            self.silent.lock().remove(host);
        }
    }

    async fn enable(&self) {
        self.judges.set(HaSettings { enabled: true, ..HaSettings::default() }).await.unwrap();
    }

    fn hosts(&self) -> BTreeMap<String, HaHostStatus> {
        let hosts = self.judges.status().hosts.into_iter();
        hosts.map(|host| (host.host.clone(), host)).collect()
    }

    /// Waits until the hosts are so.
    async fn until(&self, is_so: impl Fn(&BTreeMap<String, HaHostStatus>) -> bool) {
        until(|| is_so(&self.hosts())).await;
    }

    fn raises(&self, kind: AlarmKind) -> bool {
        self.troubles.all().iter().any(|trouble| trouble.kind == kind)
    }

    async fn until_all_hold(&self, hosts: usize) {
        self.until(|all| {
            let hold = all.values().filter(|host| is_watched(host, 1));
            hold.count() == hosts
        })
        .await;
    }
}

/// Moves the clock on by an interval whenever all hosts that are not silent were heard.
async fn keep_time(judges: Arc<Judges>, silent: Arc<Mutex<BTreeSet<String>>>, clock: HeldClock) {
    let step = timing().interval;
    loop {
        tokio::time::sleep(step).await;
        let hosts = judges.status().hosts;
        let silent = silent.lock();
        let mut others = hosts.iter().filter(|host| !silent.contains(&host.host));
        if others.all(|host| host.heard_ms_ago == Some(0)) {
            clock.advance(step);
        }
    }
}

/// Waits until a condition holds.
async fn until(is_so: impl Fn() -> bool) {
    while !is_so() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

fn is_watched(host: &HaHostStatus, term: u64) -> bool {
    host.phase == HaPhase::Watching && host.term == term
}

fn name(number: usize) -> String {
    FleetPlan::default().host_name(number)
}

async fn cluster(hosts: usize) -> (Cluster, Rig) {
    let cluster = Cluster::of(plan(hosts)).await;
    let rig = Rig::of(&cluster).await;
    rig.enable().await;
    rig.until_all_hold(hosts).await;
    (cluster, rig)
}

/// Creates and starts a protected VM at a host.
async fn make(cluster: &Cluster, rig: &Rig, vm: &str, host: &str) {
    let spec = json!({
        "name": vm, "memory": "1GiB", "protect": "high",
        "disks": [{ "path": format!("/srv/shared/{vm}.qcow2"), "format": "qcow2" }],
    });
    let request = json!({ "spec": spec, "host": host });
    let made = cluster.root(Method::POST, "/api/v1/vms", Some(request)).await;
    assert_eq!(made.status, 201, "{}", made.body);
    until(|| rig.judges.status().vms.iter().any(|known| known.vm == vm)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dead_host_loses_its_term_and_gets_another_when_it_is_back() {
    let (cluster, rig) = cluster(2).await;
    let all = rig.hosts();
    assert!(all.values().all(|host| host.watchdog && !host.fencing), "{all:?}");
    // The datastore of one host alone has no reader.
    assert!(all.values().all(|host| host.datastores == ["/srv/shared"]), "{all:?}");
    let dead = name(0);
    rig.silence(&cluster, &dead, true);
    rig.until(|all| all[&dead].phase == HaPhase::Over).await;
    assert!(is_watched(&rig.hosts()[&name(1)], 1));
    let keeper = Arc::clone(&cluster.managed.manager.leading().unwrap().keeper);
    let saved = keeper.find(HA_HOSTS, &dead).await.unwrap().unwrap().record;
    assert!(saved.record().over && saved.record().term.0 == 1, "{saved:?}");
    rig.silence(&cluster, &dead, false);
    rig.until(|all| is_watched(&all[&dead], 2)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_protected_vm_of_a_dead_host_starts_elsewhere_and_is_released_there() {
    let (cluster, rig) = cluster(2).await;
    let (dead, other) = (name(0), name(1));
    make(&cluster, &rig, "web", &dead).await;
    let refused = rig.judges.set(HaSettings::default()).await.unwrap_err();
    assert_eq!(refused.code, ProblemCode::Conflict);
    rig.silence(&cluster, &dead, true);
    let runs = |host: &str| {
        let vms = cluster.fleet.vms_of(host);
        vms.iter().any(|vm| vm.name == "web" && vm.state == VmState::Running)
    };
    until(|| runs(&other)).await;
    assert_eq!(rig.hosts()[&dead].phase, HaPhase::Over);
    rig.silence(&cluster, &dead, false);
    rig.until(|all| is_watched(&all[&dead], 2)).await;
    let released = cluster.fleet.released_at(&dead);
    assert!(released.iter().any(|vm| vm.name == "web" && vm.to == other), "{released:?}");
    assert!(cluster.fleet.vms_of(&dead).is_empty() && runs(&other));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vm_whose_protection_was_confirmed_to_end_does_not_restart() {
    let (cluster, rig) = cluster(2).await;
    let (dead, other) = (name(0), name(1));
    for vm in ["db", "web"] {
        make(&cluster, &rig, vm, &dead).await;
    }
    let of_dead = cluster.fleet.vms_of(&dead);
    let web = of_dead.iter().find(|vm| vm.name == "web").unwrap();
    cluster.fleet.end_protection(&dead, vec![web.spec.uuid.unwrap()]);
    until(|| cluster.fleet.is_ending_confirmed(&dead)).await;
    rig.silence(&cluster, &dead, true);
    let has = |vm: &str| cluster.fleet.vms_of(&other).iter().any(|known| known.name == vm);
    until(|| has("db")).await;
    rig.until(|all| all[&dead].phase == HaPhase::Over).await;
    assert!(!has("web"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_peers_or_datastores_hear_keeps_its_term() {
    let (cluster, rig) = cluster(3).await;
    let (cut, dead) = (name(0), name(2));
    cluster.fleet.cut_off(&cut, true);
    rig.silence(&cluster, &dead, true);
    // The other one is the clock: its silence is as long.
    rig.until(|all| all[&dead].phase == HaPhase::Over).await;
    assert!(is_watched(&rig.hosts()[&cut], 1), "{:?}", rig.hosts());
    cluster.fleet.cut_off(&cut, false);
    rig.silence(&cluster, &dead, false);
    rig.until(|all| is_watched(&all[&dead], 2)).await;
    assert!(is_watched(&rig.hosts()[&cut], 1), "{:?}", rig.hosts());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_without_guarantee_needs_an_operator() {
    let cluster = Cluster::of(plan(2)).await;
    let doubtful = name(0);
    let rig = Rig::of(&cluster).await;
    cluster.fleet.set_watchdog(&doubtful, false);
    rig.enable().await;
    rig.until_all_hold(2).await;
    assert!(rig.hosts()[&doubtful].problem.as_ref().unwrap().contains("neither a watchdog"));
    let refused = |outcome: Result<HaStatus, Problem>| outcome.unwrap_err().code;
    let early = rig.judges.confirm_off(&doubtful, 1).await;
    assert_eq!(refused(early), ProblemCode::WrongState);
    rig.silence(&cluster, &doubtful, true);
    rig.until(|all| all[&doubtful].phase == HaPhase::Doubtful).await;
    until(|| rig.raises(AlarmKind::HaDoubtful)).await;
    let other = rig.judges.confirm_off(&doubtful, 2).await;
    assert_eq!(refused(other), ProblemCode::WrongState);
    assert_eq!(refused(rig.judges.confirm_off("x", 1).await), ProblemCode::NotFound);
    rig.judges.confirm_off(&doubtful, 1).await.unwrap();
    assert_eq!(rig.hosts()[&doubtful].phase, HaPhase::Over);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_in_maintenance_without_protected_vms_keeps_its_power() {
    for in_maintenance in [true, false] {
        let cluster = Cluster::of(plan(2)).await;
        let silent = name(0);
        let (devices, folder) = working_device_of(&silent);
        let rig = Rig::with_devices(&cluster, devices).await;
        rig.enable().await;
        rig.until_all_hold(2).await;
        set_maintenance(&cluster, &silent, in_maintenance);
        rig.silence(&cluster, &silent, true);
        rig.until(|all| all[&silent].phase == HaPhase::Over).await;
        let log = folder.path().join("ipmitool.log");
        let cuts = || std::fs::read_to_string(&log).is_ok_and(|log| log.contains("power off"));
        if in_maintenance {
            assert!(!cuts());
        } else {
            // The watchdog's silence may be over before the command has begun.
            until(cuts).await;
        }
    }
}

/// Begins or ends the maintenance of a host.
fn set_maintenance(cluster: &Cluster, host: &str, maintenance: bool) {
    let state = &cluster.managed.manager.state;
    let planned = state.inventory().host_plan(host).cloned().unwrap();
    state.change(|inventory| [inventory.plan_host(host, HostPlan { maintenance, ..planned })]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_in_maintenance_rests_until_that_ends() {
    let cluster = Cluster::of(plan(3)).await;
    let (resting, other) = (name(0), name(1));
    let rig = Rig::of(&cluster).await;
    cluster.fleet.set_watchdog(&resting, false);
    rig.enable().await;
    rig.until_all_hold(3).await;
    set_maintenance(&cluster, &resting, true);
    rig.until(|all| all[&resting].phase == HaPhase::Over).await;
    for host in [&resting, &other] {
        rig.silence(&cluster, host, true);
    }
    // The other one is the clock: its silence is as long.
    rig.until(|all| all[&other].phase == HaPhase::Over).await;
    let shown = rig.hosts().remove(&resting).unwrap();
    assert_eq!((shown.term, shown.phase, shown.problem), (1, HaPhase::Over, None));
    assert!(shown.rests);
    assert!(!rig.raises(AlarmKind::HaDoubtful));
    rig.silence(&cluster, &resting, false);
    rig.silence(&cluster, &other, false);
    rig.until(|all| is_watched(&all[&other], 2)).await;
    assert_eq!(rig.hosts()[&resting].term, 1);
    set_maintenance(&cluster, &resting, false);
    rig.until(|all| is_watched(&all[&resting], 2)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_rests_gives_up_the_vms_that_started_elsewhere() {
    let (cluster, rig) = cluster(2).await;
    let (dead, other) = (name(0), name(1));
    make(&cluster, &rig, "web", &dead).await;
    rig.silence(&cluster, &dead, true);
    rig.until(|all| all[&dead].phase == HaPhase::Over).await;
    let has_it = || rig.judges.status().vms.iter().any(|vm| vm.host == other);
    until(has_it).await;
    set_maintenance(&cluster, &dead, true);
    rig.silence(&cluster, &dead, false);
    rig.until(|all| all[&dead].rests).await;
    until(|| cluster.fleet.released_at(&dead).iter().any(|vm| vm.name == "web")).await;
    assert_eq!(rig.hosts()[&dead].term, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_in_maintenance_keeps_its_term_while_a_protected_vm_runs() {
    let (cluster, rig) = cluster(2).await;
    let (kept, other) = (name(0), name(1));
    make(&cluster, &rig, "web", &kept).await;
    set_maintenance(&cluster, &kept, true);
    rig.silence(&cluster, &other, true);
    rig.until(|all| all[&other].phase == HaPhase::Over).await;
    assert!(is_watched(&rig.hosts()[&kept], 1), "{:?}", rig.hosts());
    assert!(cluster.fleet.vms_of(&kept).iter().all(|vm| vm.state == VmState::Running));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_watchdog_does_not_wait_for_a_device_that_hangs() {
    let cluster = Cluster::of(plan(2)).await;
    let silent = name(0);
    let (devices, folder) = hanging_device_of(&silent);
    let rig = Rig::with_devices(&cluster, devices).await;
    rig.enable().await;
    rig.until_all_hold(2).await;
    rig.silence(&cluster, &silent, true);
    rig.until(|all| all[&silent].phase == HaPhase::Over).await;
    // The cut goes on: its host is still to lose its power.
    let path = folder.path().join("ipmitool.pid");
    let pid = || std::fs::read_to_string(&path).unwrap_or_default();
    until(|| pid().ends_with('\n')).await;
    let pid = pid();
    assert!(is_alive(pid.trim()));
    // It ends when the host responds.
    rig.silence(&cluster, &silent, false);
    rig.until(|all| is_watched(&all[&silent], 2)).await;
    until_gone(pid.trim()).await;
}

#[tokio::test]
async fn a_cut_of_power_has_ended_before_its_host_gets_a_term() {
    let managed = Managed::begin().await;
    let judging = Judging::new(means(&managed, &Arc::default(), &HeldClock::default()), timing());
    let saved = SavedJudge::new(Uuid::from_u128(1));
    let judged = Judged::new("a", Uuid::from_u128(2), saved, &judging);
    judged.keep_power().await;
    let cutting = Arc::clone(&judged.cutting).lock_owned().await;
    let cut = tokio::spawn(async move {
        let _cutting = cutting;
        std::future::pending::<()>().await;
    });
    *judged.cut.lock() = Some(cut.abort_handle());
    judged.keep_power().await;
    assert!(judged.cutting.try_lock().is_ok());
    assert!(cut.await.unwrap_err().is_cancelled());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_has_just_begun_may_report_its_watchdog_before_its_term() {
    let cluster = Cluster::of(plan(2)).await;
    let late = name(0);
    let rig = Rig::of(&cluster).await;
    cluster.fleet.set_watchdog(&late, false);
    rig.enable().await;
    rig.until(|all| {
        let problem = all.get(&late).and_then(|host| host.problem.as_deref());
        problem.is_some_and(|problem| problem.contains("has just begun to respond"))
    })
    .await;
    assert_eq!(rig.hosts()[&late].term, 0);
    cluster.fleet.set_watchdog(&late, true);
    rig.until_all_hold(2).await;
    assert!(rig.hosts()[&late].watchdog);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_watchdog_that_ends_or_begins_in_a_term_counts() {
    let (cluster, rig) = cluster(2).await;
    let changing = name(0);
    for has_watchdog in [false, true] {
        cluster.fleet.set_watchdog(&changing, has_watchdog);
        rig.until(|all| all[&changing].watchdog == has_watchdog).await;
        assert!(is_watched(&rig.hosts()[&changing], 1), "{:?}", rig.hosts());
    }
    cluster.fleet.set_watchdog(&changing, false);
    rig.until(|all| !all[&changing].watchdog).await;
    rig.silence(&cluster, &changing, true);
    rig.until(|all| all[&changing].phase == HaPhase::Doubtful).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_doubtful_host_that_is_back_needs_no_operator() {
    let cluster = Cluster::of(plan(2)).await;
    let silent = name(0);
    let rig = Rig::of(&cluster).await;
    cluster.fleet.set_watchdog(&silent, false);
    rig.enable().await;
    rig.until_all_hold(2).await;
    rig.silence(&cluster, &silent, true);
    rig.until(|all| all[&silent].phase == HaPhase::Doubtful).await;
    rig.silence(&cluster, &silent, false);
    // Its guard has ended the term by itself meanwhile.
    rig.until(|all| is_watched(&all[&silent], 2)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_of_another_cluster_gets_no_term() {
    let (first, _rig) = cluster(1).await;
    let second = Managed::begin().await;
    for (name, address) in first.fleet.agents() {
        let host = json!({ "name": name, "address": address });
        second.root(Method::POST, "/api/v1/hosts", Some(host)).await;
    }
    let other = Rig::begin(&second, Devices::default(), HeldClock::default()).await;
    other.enable().await;
    let held = |all: &BTreeMap<String, HaHostStatus>| {
        let problem = all.get(&name(0)).and_then(|host| host.problem.as_deref());
        problem.is_some_and(|problem| problem.contains("held by another cluster"))
    };
    other.until(held).await;
    assert_eq!(other.hosts()[&name(0)].term, 0);
    until(|| other.raises(AlarmKind::HaTrouble)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_new_leader_continues_with_the_terms_and_the_identity() {
    let (cluster, rig) = cluster(2).await;
    let keeper = Arc::clone(&cluster.managed.manager.leading().unwrap().keeper);
    let before = keeper.find(HA, OF_CLUSTER).await.unwrap().unwrap().record;
    let clock = rig.clock.clone();
    drop(rig);
    let next = Rig::begin(&cluster.managed, Devices::default(), clock).await;
    next.until(|all| all.len() == 2 && all.values().all(|host| host.heard_ms_ago.is_some())).await;
    assert!(next.hosts().values().all(|host| is_watched(host, 1)), "{:?}", next.hosts());
    assert_eq!(keeper.find(HA, OF_CLUSTER).await.unwrap().unwrap().record, before);
}

#[tokio::test(flavor = "multi_thread")]
async fn judges_end_with_the_setting_and_with_the_host() {
    let (cluster, rig) = cluster(2).await;
    rig.judges.set(HaSettings::default()).await.unwrap();
    assert!(rig.hosts().is_empty(), "no old states are shown while HA is off");
    let dead = name(1);
    rig.silence(&cluster, &dead, true);
    rig.enable().await;
    rig.until(|all| all[&dead].phase == HaPhase::Over).await;
    let path = format!("/api/v1/hosts/{dead}");
    let removed = cluster.root(Method::DELETE, &path, None).await;
    assert_eq!(removed.status, 204, "{}", removed.body);
    rig.until(|all| !all.contains_key(&dead)).await;
    let keeper = Arc::clone(&cluster.managed.manager.leading().unwrap().keeper);
    assert!(keeper.find(HA_HOSTS, &dead).await.unwrap().is_none());
}

#[tokio::test(flavor = "multi_thread")]
async fn settings_are_shown_checked_and_saved() {
    let managed = Managed::begin().await;
    let shown: HaStatus = managed.root(Method::GET, HA_PATH, None).await.read();
    assert_eq!(shown.settings, HaSettings::default());
    for failures in [0, 9] {
        let wrong = json!({ "enabled": true, "failures": failures });
        let refused = managed.root(Method::PUT, HA_PATH, Some(wrong)).await;
        assert_eq!(refused.problem(), ProblemCode::InvalidRequest);
    }
    let wanted = json!({ "enabled": true, "failures": 2, "admission": "refuse" });
    let set: HaStatus = managed.root(Method::PUT, HA_PATH, Some(wanted.clone())).await.read();
    assert_eq!(serde_json::to_value(set.settings).unwrap(), wanted);
    // The next leader has them.
    let next = Managed::with(Arc::clone(&managed.store)).await;
    let shown: HaStatus = next.root(Method::GET, HA_PATH, None).await.read();
    assert_eq!(serde_json::to_value(shown.settings).unwrap(), wanted);
    let path = format!("{HA_PATH}/hosts/x/confirm-off");
    let refused = next.root(Method::POST, &path, Some(json!({ "term": 1 }))).await;
    assert_eq!(refused.problem(), ProblemCode::NotFound);
    let path = format!("{HA_PATH}/fencing/test");
    assert_eq!(next.root(Method::POST, &path, None).await.status, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_never_responds_gets_no_term() {
    let managed = Managed::begin().await;
    let host = json!({ "name": "a", "address": "http://127.0.0.1:1" });
    managed.root(Method::POST, "/api/v1/hosts", Some(host)).await;
    let rig = Rig::begin(&managed, Devices::default(), HeldClock::default()).await;
    rig.enable().await;
    rig.until(|all| all.get("a").is_some_and(|host| host.problem.is_some())).await;
    let host = rig.hosts().remove("a").unwrap();
    assert_eq!((host.term, host.phase), (0, HaPhase::Over));
    assert!(host.problem.unwrap().starts_with("no renewal: "));
}

#[tokio::test]
async fn an_end_whose_answer_is_missing_does_not_outlive_a_grant() {
    let managed = Managed::begin().await;
    let judging = Judging::new(means(&managed, &Arc::default(), &HeldClock::default()), timing());
    let open = Record { term: Term(1), over: false, facts: Facts::default() };
    let saved = SavedJudge::of(Uuid::from_u128(1), open, Vec::new());
    let judged = Judged::new("a", Uuid::from_u128(2), saved, &judging);
    let mut seat = judged.seat.lock().await;
    let now = judging.now();
    managed.store.lose_answer_and_be_away();
    judged.reported_over(&judging, &mut seat, now, Term(1)).await.unwrap_err();
    managed.store.set_unavailable(false);
    let renewal = Renewal { term: Term(1), over: false };
    let renew = |judge: &mut Judge| judge.renewal(now, renewal, Facts::default());
    let answer = judged.change(&judging, &mut seat, None, "", renew).await.unwrap();
    assert_eq!(answer, Answer::Granted(Grant { term: Term(1), datastores: 0 }));
    let found = judging.means.keeper.find(HA_HOSTS, "a").await.unwrap().unwrap();
    assert_eq!(found.record.record(), open);
}
