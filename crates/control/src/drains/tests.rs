use parking_lot::Mutex;

use async_trait::async_trait;
use godwit_api::control::DrainVmState;
use godwit_api::{HostEvent, HostInfo, MigrationStatus, VmInfo, VmState};
use godwit_planner::queue::lifecycle::{self, Action, Ended, JobEvent, Whereabouts};
use godwit_store::{Candidate, MemoryStore, Store, Transaction};
use godwit_types::Fault;

use super::*;
use crate::moves::{AgentAnswer, Agents, Job};

const GIB: u64 = 1 << 30;

/// Agents that complete each move at once, or refuse moves to some hosts. If `refused` has
/// [`SLOW`], moves never end.
struct QuickAgents {
    state: Arc<State>,
    refused: Vec<&'static str>,
    begun: Begun,
}

const SLOW: &str = "slow";

/// VMs and their targets, by migration. An agent starts each migration once, regardless of the
/// requesting manager.
type Begun = Arc<Mutex<BTreeMap<String, (String, String)>>>;

#[async_trait]
impl Agents for QuickAgents {
    async fn carry_out(&self, job: &Job, action: Action) -> Option<AgentAnswer> {
        let mut begun = self.begun.lock();
        let (vm, from, epoch) = {
            let inventory = self.state.inventory();
            let info = inventory.vm_info(&job.vm)?;
            (job.vm.clone(), info.host.clone(), info.epoch)
        };
        let (migration, target) = match action {
            Action::Begin { migration, target } => (migration, target),
            Action::Ask { migration } => {
                let answer = if from == "a" {
                    lifecycle::Answer::NotKnown(Whereabouts::AtSource { epoch })
                } else {
                    lifecycle::Answer::Ended(Ended::Completed)
                };
                return Some(JobEvent::Reported { migration, answer }.into());
            }
            Action::Save | Action::CancelMigration { .. } => return None,
        };
        if self.refused.contains(&SLOW) {
            return None;
        }
        if begun.insert(migration.clone(), (vm.clone(), target.clone())).is_some() {
            return Some(JobEvent::Ended { migration, how: Ended::Completed }.into());
        }
        if self.refused.contains(&target.as_str()) {
            let failure = Fault {
                code: "preflight".into(),
                message: format!("{target} refuses"),
                remedy: "none".into(),
            };
            return Some(JobEvent::Refused { migration, failure }.into());
        }
        let info = (**self.state.inventory().vm_info(&vm)?).clone();
        let info = VmInfo { host: target.clone(), epoch: info.epoch + 1, ..info };
        self.state.apply(&target, HostEvent::Vm(Box::new(info)));
        self.state.apply(&from, HostEvent::VmGone(vm));
        Some(JobEvent::Ended { migration, how: Ended::Completed }.into())
    }

    async fn migrations(&self, _host: &str) -> Vec<MigrationStatus> {
        Vec::new()
    }
}

const VMS: [&str; 4] = ["db", "off", "web-1", "web-2"];

/// Returns a cluster of three hosts; the first has all VMs, one of them stopped.
fn cluster() -> Arc<State> {
    let state = Arc::<State>::default();
    for name in ["a", "b", "c"] {
        let plan = HostPlan { address: format!("http://{name}:1"), ..HostPlan::default() };
        state.change(|inventory| Some(inventory.plan_host(name, plan)));
        state.reached(name);
        state.apply(name, HostEvent::Host(Box::new(host(name))));
        if name == "a" {
            for vm in VMS {
                state.apply(name, vm_report(info(vm)));
            }
        }
        state.apply(name, HostEvent::Known);
    }
    state
}

fn host(name: &str) -> HostInfo {
    let host = crate::rig::host(name, None);
    HostInfo { memory_available_bytes: 640 * GIB, logical_cores: 8, ..host }
}

/// Returns the report of a VM on host a.
fn info(name: &str) -> VmInfo {
    let state = if name == "off" { VmState::Stopped } else { VmState::Running };
    VmInfo { state, epoch: 1, ..crate::rig::vm(name, "a", None) }
}

fn vm_report(info: VmInfo) -> HostEvent {
    HostEvent::Vm(Box::new(info))
}

/// A leading manager with its store and agents.
struct Rig {
    state: Arc<State>,
    agents: Arc<QuickAgents>,
    drains: Drains,
    moves: Arc<Moves>,
    store: Arc<MemoryStore>,
}

impl Rig {
    async fn begin(refused: Vec<&'static str>) -> Rig {
        Rig::with(Arc::new(MemoryStore::new()), cluster(), refused, None).await
    }

    async fn with(
        store: Arc<MemoryStore>,
        state: Arc<State>,
        refused: Vec<&'static str>,
        before: Option<Begun>,
    ) -> Rig {
        store.end_leadership_silently();
        let candidate = Candidate { name: "m1".into(), address: "http://m1:7800".into() };
        let leadership = Arc::new(store.lead(&candidate).await.unwrap());
        let keeper = Arc::new(Keeper::new(Arc::clone(&store) as _, leadership, candidate));
        if before.is_none() {
            for (name, plan) in state.inventory().plans() {
                let kept = Arc::clone(&keeper);
                let (name, saved) = (name.to_owned(), SavedHost::from(plan));
                tokio::spawn(async move { kept.insert(HOSTS, &name, &saved).await.unwrap() });
            }
            while keeper.read_all(HOSTS).await.unwrap().len() < 3 {
                tokio::task::yield_now().await;
            }
        } else {
            keeper.read_all(HOSTS).await.unwrap();
        }
        let agents = Arc::new(QuickAgents {
            state: Arc::clone(&state),
            refused,
            begun: before.unwrap_or_default(),
        });
        let news = mpsc::channel(64).1;
        let begun =
            Moves::begin(Arc::clone(&keeper), Arc::clone(&state), Arc::clone(&agents) as _, news);
        let moves = Arc::new(begun.await.unwrap());
        let means = Means { keeper, state: Arc::clone(&state), moves: Arc::clone(&moves) };
        let drains = Drains::begin(means).await.unwrap();
        Rig { state, agents, drains, moves, store }
    }

    /// Waits until a drain is in a state, and returns it.
    async fn when(&self, id: &str, state: DrainState) -> Drain {
        loop {
            let found = self.drains.all().get(id).cloned();
            if let Some(found) = found.filter(|found| found.state == state) {
                return found;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    fn host_of(&self, vm: &str) -> String {
        self.state.inventory().vm_info(vm).unwrap().host.clone()
    }
}

fn of<'a>(drain: &'a Drain, vm: &str) -> &'a godwit_api::control::DrainVm {
    drain.vms.iter().find(|one| one.vm == vm).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_is_drained_remaining_vms_are_named_and_all_can_be_moved_back() {
    let rig = Rig::begin(Vec::new()).await;
    let asked = rig.drains.create("a", CreateDrain::default(), "root").await.unwrap();
    assert_eq!(asked.vms.len(), 4);
    assert!(rig.state.inventory().host_plan("a").unwrap().maintenance);
    let done = rig.when(&asked.id, DrainState::Done).await;
    assert_eq!(of(&done, "off").state, DrainVmState::Stays);
    assert!(of(&done, "off").reason.contains("does not run"), "{done:?}");
    for vm in ["db", "web-1", "web-2"] {
        assert_eq!(of(&done, vm).state, DrainVmState::Gone, "{done:?}");
        assert_ne!(rig.host_of(vm), "a");
        assert!(!of(&done, vm).reason.is_empty());
    }
    rig.drains.undo(&asked.id).await.unwrap();
    let undone = rig.when(&asked.id, DrainState::Undone).await;
    assert_eq!(of(&undone, "db").state, DrainVmState::Back, "{undone:?}");
    assert!(["db", "web-1", "web-2"].iter().all(|vm| rig.host_of(vm) == "a"));
    assert!(!rig.state.inventory().host_plan("a").unwrap().maintenance);
    assert_eq!(rig.drains.undo(&asked.id).await.unwrap_err().code, ProblemCode::WrongState);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vm_that_one_host_refuses_goes_to_another() {
    let rig = Rig::begin(vec!["b"]).await;
    let asked = rig.drains.create("a", CreateDrain::default(), "root").await.unwrap();
    let done = rig.when(&asked.id, DrainState::Done).await;
    assert!(["db", "web-1", "web-2"].iter().all(|vm| rig.host_of(vm) == "c"), "{done:?}");
    assert!(rig.agents.begun.lock().values().any(|(_, target)| target == "b"));
}

#[tokio::test(flavor = "multi_thread")]
async fn vms_refused_by_all_hosts_stay_with_the_reason() {
    let rig = Rig::begin(vec!["b", "c"]).await;
    let asked = rig.drains.create("a", CreateDrain::default(), "root").await.unwrap();
    let done = rig.when(&asked.id, DrainState::Done).await;
    assert_eq!(of(&done, "db").state, DrainVmState::Stays);
    assert!(of(&done, "db").reason.contains("failed already"), "{done:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vm_that_agents_restart_stays_and_no_move_of_it_is_tried() {
    let rig = Rig::begin(Vec::new()).await;
    let mut own = info("db");
    own.spec.protect_by_agents = true;
    rig.state.apply("a", vm_report(own));
    let asked = rig.drains.create("a", CreateDrain::default(), "root").await.unwrap();
    assert_eq!(of(&asked, "db").state, DrainVmState::Stays, "{asked:?}");
    let done = rig.when(&asked.id, DrainState::Done).await;
    assert_eq!(of(&done, "db").state, DrainVmState::Stays);
    let reason = &of(&done, "db").reason;
    assert!(reason.contains("vm set db --unset protect-by-agents"), "{reason}");
    assert!(["web-1", "web-2"].iter().all(|vm| rig.host_of(vm) != "a"), "{done:?}");
    assert!(rig.agents.begun.lock().values().all(|(vm, _)| vm != "db"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dry_run_moves_nothing() {
    let rig = Rig::begin(Vec::new()).await;
    let request = CreateDrain { plan_only: true, ..CreateDrain::default() };
    let planned = rig.drains.create("a", request, "root").await.unwrap();
    assert_eq!(planned.state, DrainState::Planned);
    assert_eq!(planned.vms.iter().filter(|vm| vm.state == DrainVmState::Going).count(), 3);
    assert!(planned.eta_unix_ms.is_some());
    assert!(rig.moves.all().len() == 0 && rig.drains.all().is_empty());
    assert!(!rig.state.inventory().host_plan("a").unwrap().maintenance);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unreachable_host_is_not_drained_and_not_changed() {
    let rig = Rig::begin(Vec::new()).await;
    rig.state.lost("a", "no answer");
    let refused = rig.drains.create("a", CreateDrain::default(), "root").await.unwrap_err();
    assert_eq!(refused.code, ProblemCode::HostAway);
    assert!(rig.drains.all().is_empty() && rig.moves.all().len() == 0);
    assert!(!rig.state.inventory().host_plan("a").unwrap().maintenance);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cancelled_drain_leaves_the_remaining_vms() {
    let rig = Rig::begin(Vec::new()).await;
    rig.state.lost("b", "no answer");
    rig.state.lost("c", "no answer");
    let asked = rig.drains.create("a", CreateDrain::default(), "root").await.unwrap();
    let cancelled = match rig.drains.cancel(&asked.id).await {
        Ok(cancelled) => cancelled,
        // No VM could leave, so the drain was over at once.
        Err(_) => rig.when(&asked.id, DrainState::Done).await,
    };
    assert!(cancelled.vms.iter().all(|vm| vm.state == DrainVmState::Stays), "{cancelled:?}");
    assert_eq!(rig.host_of("db"), "a");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_next_manager_continues_a_drain() {
    let rig = Rig::begin(Vec::new()).await;
    let asked = rig.drains.create("a", CreateDrain::default(), "root").await.unwrap();
    let Rig { state, agents, drains, moves, store } = rig;
    drop((drains, moves));
    let next = Rig::with(store, state, Vec::new(), Some(Arc::clone(&agents.begun))).await;
    let done = next.when(&asked.id, DrainState::Done).await;
    assert!(["db", "web-1", "web-2"].iter().all(|vm| next.host_of(vm) != "a"), "{done:?}");
    let mut begun: Vec<String> = agents.begun.lock().values().map(|(vm, _)| vm.clone()).collect();
    begun.sort();
    assert_eq!(begun, ["db", "web-1", "web-2"], "nothing is moved twice");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drain_waits_for_vms_that_migrate_or_lack_pages() {
    let page_in = Some(godwit_api::PageInState { missing_pages: 7, connected: true });
    let lacks_pages = vm_report(VmInfo { page_in, ..info("db") });
    let leaves = vm_report(VmInfo { state: VmState::MigratingOut, ..info("db") });
    for passing in [lacks_pages, leaves] {
        let rig = Rig::begin(Vec::new()).await;
        rig.state.apply("a", passing);
        let asked = rig.drains.create("a", CreateDrain::default(), "root").await.unwrap();
        while ["web-1", "web-2"].iter().any(|vm| rig.host_of(vm) == "a") {
            tokio::task::yield_now().await;
        }
        assert_eq!((rig.host_of("db"), asked.state), ("a".to_owned(), DrainState::Running));
        // Now the VM has all its pages, or its migration has failed.
        rig.state.apply("a", vm_report(info("db")));
        rig.when(&asked.id, DrainState::Done).await;
        assert_ne!(rig.host_of("db"), "a");
    }
}

/// Waits until a manager's tasks have ended.
async fn ended(drains: Drains, moves: Arc<Moves>) {
    let alive = Arc::downgrade(&moves);
    drop((drains, moves));
    while alive.strong_count() > 0 {
        tokio::task::yield_now().await;
    }
}

/// Changes the store as an earlier manager could have left it.
async fn rewrite(store: &MemoryStore, transaction: Transaction) {
    store.end_leadership_silently();
    let candidate = Candidate { name: "m0".into(), address: "http://m0:7800".into() };
    let leadership = store.lead(&candidate).await.unwrap();
    store.commit(&leadership, transaction).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drain_its_host_and_all_its_moves_are_written_together() {
    let rig = Rig::begin(vec![SLOW]).await;
    let since = rig.store.read("").await.unwrap().revision;
    let mut watch = rig.store.watch("", since).await.unwrap();
    rig.drains.create("a", CreateDrain::default(), "root").await.unwrap();
    let written = watch.next().await.unwrap().changes;
    let of = |prefix: &str| written.iter().filter(|change| change.key.starts_with(prefix)).count();
    assert_eq!(
        (of("drains/"), of("hosts/a"), of("moves/"), of("journal/"), written.len()),
        (1, 1, 3, 1, 6),
        "{written:?}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn moves_missing_after_a_split_transaction_follow_the_plan() {
    let state = cluster();
    for number in 0..130 {
        state.apply("a", vm_report(info(&format!("vm{number:03}"))));
    }
    let rig = Rig::with(Arc::new(MemoryStore::new()), state, vec![SLOW], None).await;
    let asked = rig.drains.create("a", CreateDrain::default(), "root").await.unwrap();
    let going = |vm: &&godwit_api::control::DrainVm| vm.state == DrainVmState::Going;
    let planned: BTreeMap<String, String> =
        asked.vms.iter().filter(going).map(|vm| (vm.vm.clone(), vm.to.clone().unwrap())).collect();
    assert_eq!(planned.len(), 133);
    let Rig { state, agents, drains, moves, store } = rig;
    let waiting: Vec<String> = {
        let all = moves.all();
        all.values()
            .filter(|one| one.state == MoveState::Waiting)
            .map(|one| one.id.clone())
            .collect()
    };
    ended(drains, moves).await;
    // The next manager only knows the moves in the store. The second transaction was not written.
    state.change(|inventory| {
        planned.keys().flat_map(|vm| inventory.plan_move(vm, None, None)).collect::<Vec<_>>()
    });
    let lost = waiting
        .iter()
        .rev()
        .take(14)
        .fold(Transaction::new(), |all, id| all.delete(format!("moves/{id}")));
    rewrite(&store, lost).await;
    let next = Rig::with(store, state, Vec::new(), Some(Arc::clone(&agents.begun))).await;
    let done = next.when(&asked.id, DrainState::Done).await;
    for (vm, target) in &planned {
        assert_eq!(&next.host_of(vm), target, "{:?}", of(&done, vm));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_stays_in_maintenance_during_its_drain() {
    let rig = Rig::begin(vec![SLOW]).await;
    rig.drains.create("a", CreateDrain::default(), "root").await.unwrap();
    let opened =
        HostPlan { maintenance: false, ..rig.state.inventory().host_plan("a").cloned().unwrap() };
    rig.state.change(|inventory| Some(inventory.plan_host("a", opened)));
    while !rig.state.inventory().host_plan("a").unwrap().maintenance {
        tokio::task::yield_now().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn drain_and_moves_of_a_removed_host_end() {
    for undone in [false, true] {
        let rig = Rig::begin(if undone { Vec::new() } else { vec![SLOW] }).await;
        let asked = rig.drains.create("a", CreateDrain::default(), "root").await.unwrap();
        if undone {
            rig.when(&asked.id, DrainState::Done).await;
            rig.state.change(|inventory| inventory.forget_host("a"));
            let refused = rig.drains.undo(&asked.id).await.unwrap_err();
            assert_eq!(refused.code, ProblemCode::NotFound, "{refused}");
            continue;
        }
        assert_eq!(rig.drains.of_host("a"), Some((asked.id.clone(), DrainState::Running)));
        rig.state.change(|inventory| inventory.forget_host("a"));
        rig.when(&asked.id, DrainState::Cancelled).await;
        assert_eq!(rig.drains.of_host("a"), None);
        let moves = rig.moves.all();
        let is_failed = |one: &Move| {
            one.failure.as_ref().is_some_and(|failure| failure.code == "host-forgotten")
        };
        assert!(moves.len() == 3 && moves.values().all(is_failed), "{moves:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_with_hundreds_of_vms_is_drained_and_refilled() {
    const MANY: usize = 700;
    let state = cluster();
    for number in 0..MANY {
        let info = info(&format!("vm{number:03}"));
        state.apply("a", vm_report(VmInfo { memory_bytes: GIB / 8, ..info }));
    }
    let rig = Rig::with(Arc::new(MemoryStore::new()), state, Vec::new(), None).await;
    let asked = rig.drains.create("a", CreateDrain::default(), "root").await.unwrap();
    let done = rig.when(&asked.id, DrainState::Done).await;
    let are = |drain: &Drain, state| drain.vms.iter().filter(|vm| vm.state == state).count();
    assert_eq!(are(&done, DrainVmState::Gone), MANY + 3);
    rig.drains.undo(&asked.id).await.unwrap();
    let undone = rig.when(&asked.id, DrainState::Undone).await;
    assert_eq!(are(&undone, DrainVmState::Back), MANY + 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drain_of_thousands_of_vms_survives_a_change_of_the_leader_and_shows_its_progress() {
    const MANY: usize = 5_000;
    let state = cluster();
    for name in ["a", "b", "c"] {
        let plan = state.inventory().host_plan(name).cloned().unwrap();
        let plan = HostPlan { most_moves: Some(400), ..plan };
        state.change(|inventory| Some(inventory.plan_host(name, plan)));
    }
    for number in 0..MANY {
        let info = info(&format!("vm{number:060}"));
        state.apply("a", vm_report(VmInfo { memory_bytes: GIB / 8, ..info }));
    }
    let rig = Rig::with(Arc::new(MemoryStore::new()), state, Vec::new(), None).await;
    let asked = rig.drains.create("a", CreateDrain::default(), "root").await.unwrap();
    assert_eq!(asked.vms.len(), MANY + 4);
    assert!(asked.eta_unix_ms.is_some());
    while rig.agents.begun.lock().len() < MANY / 3 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let Rig { state, agents, drains, moves, store } = rig;
    ended(drains, moves).await;
    let next = Rig::with(store, state, Vec::new(), Some(Arc::clone(&agents.begun))).await;
    let count = |drain: &Drain, state| drain.vms.iter().filter(|vm| vm.state == state).count();
    let taken_over = next.drains.all().get(&asked.id).cloned().unwrap();
    assert_eq!(taken_over.vms.len(), MANY + 4);
    assert!(count(&taken_over, DrainVmState::Gone) > 0);
    let done = next.when(&asked.id, DrainState::Done).await;
    assert_eq!(count(&done, DrainVmState::Gone), MANY + 3);
    let mut begun: Vec<String> = agents.begun.lock().values().map(|(vm, _)| vm.clone()).collect();
    begun.sort();
    begun.dedup();
    assert_eq!(begun.len(), agents.begun.lock().len(), "nothing is moved twice");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_next_manager_completes_an_interrupted_cancellation() {
    let rig = Rig::begin(vec![SLOW]).await;
    let asked = rig.drains.create("a", CreateDrain::default(), "root").await.unwrap();
    let Rig { state, agents, drains, moves, store } = rig;
    ended(drains, moves).await;
    let kept = DRAINS.read_all(&*store).await.unwrap().records.remove(0);
    let mut cancelled = kept.record;
    (cancelled.state, cancelled.ended_unix_ms) = (DrainState::Cancelled, Some(1));
    let write = DRAINS.replace(Transaction::new(), &kept.id, kept.revision, &cancelled).unwrap();
    rewrite(&store, write).await;
    let next = Rig::with(store, state, vec![SLOW], Some(Arc::clone(&agents.begun))).await;
    // Started moves arrive.
    while !next.moves.all().values().any(|one| one.state == MoveState::Cancelled) {
        tokio::task::yield_now().await;
    }
    assert_eq!(next.when(&asked.id, DrainState::Cancelled).await.vms.len(), 4);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vm_whose_missing_pages_are_lost_stays_and_the_drain_ends() {
    let lacks = |host: &str, state: VmState, epoch: u64, missing: Option<u64>| {
        let page_in = missing
            .map(|missing_pages| godwit_api::PageInState { missing_pages, connected: false });
        vm_report(VmInfo { host: host.into(), state, epoch, page_in, ..info("db") })
    };
    let rig = Rig::begin(Vec::new()).await;
    rig.state.apply("a", lacks("a", VmState::Running, 2, Some(7)));
    rig.state.apply("b", lacks("b", VmState::MigratingOut, 1, None));
    let asked = rig.drains.create("a", CreateDrain::default(), "root").await.unwrap();
    while ["web-1", "web-2"].iter().any(|vm| rig.host_of(vm) == "a") {
        tokio::task::yield_now().await;
    }
    // Its source is connected and keeps the missing pages.
    assert_eq!(rig.drains.all()[&asked.id].state, DrainState::Running);
    rig.state.apply("b", HostEvent::VmGone("db".into()));
    let done = rig.when(&asked.id, DrainState::Done).await;
    let db = of(&done, "db");
    assert_eq!((db.state, rig.host_of("db").as_str()), (DrainVmState::Stays, "a"));
    assert!(
        db.reason.contains("7 of its pages") && db.reason.contains("not connected"),
        "{}",
        db.reason
    );
}

/// Returns the report of a second guest with the name of one on host a.
fn second(name: &str, epoch: u64) -> HostEvent {
    let mut info = VmInfo { epoch, ..info(name) };
    info.spec.uuid = Some(godwit_qemu::Uuid::from_u128(u128::from(epoch)));
    vm_report(info)
}

/// Regression: the guest with the lower epoch was invisible, and the drain of its host ended while
/// it ran there.
#[tokio::test(flavor = "multi_thread")]
async fn a_second_guest_with_the_same_name_stays_and_is_reported() {
    for epoch in [0, 9] {
        let rig = Rig::begin(Vec::new()).await;
        rig.state.apply("b", second("web-1", epoch));
        let asked = rig.drains.create("b", CreateDrain::default(), "root").await.unwrap();
        let done = rig.when(&asked.id, DrainState::Done).await;
        let stays = of(&done, "web-1");
        assert_eq!(stays.state, DrainVmState::Stays);
        assert!(stays.reason.contains("2 running VMs are named web-1"), "{}", stays.reason);
        // The guest that holds the name is not moved instead.
        assert_eq!((rig.host_of("web-1"), rig.moves.all().len()), ("a".to_owned(), 0));
        // The other guest still leaves its host.
        rig.state.apply("b", HostEvent::VmGone("nothing".into()));
        let asked = rig.drains.create("a", CreateDrain::default(), "root").await.unwrap();
        let done = rig.when(&asked.id, DrainState::Done).await;
        assert_eq!(of(&done, "db").state, DrainVmState::Gone, "{done:?}");
        let left: Vec<String> =
            rig.state.inventory().vms_of("a").map(|info| info.name.clone()).collect();
        assert!(
            done.vms.iter().all(|vm| left.contains(&vm.vm) == (vm.state == DrainVmState::Stays)),
            "{done:?}"
        );
    }
}
