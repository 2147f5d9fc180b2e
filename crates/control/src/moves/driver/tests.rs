use parking_lot::Mutex;

use async_trait::async_trait;
use godwit_api::HostEvent;
use godwit_api::control::{CreateMove, MoveState};
use godwit_planner::queue::lifecycle::{Answer, Ended, Whereabouts};
use godwit_store::{Candidate, MemoryStore, Store};
use godwit_types::{Outcome, Report};

use super::*;
use crate::moves::{Moves, Wanted};
use crate::rig;

/// Agents that carry out each request at once and record it.
#[derive(Default)]
struct FakeAgents {
    actions: Mutex<Vec<Action>>,
    /// Answer to queries about a migration.
    knows: Mutex<Option<Answer>>,
    /// Whether they leave requests to begin unanswered.
    silent: bool,
    /// Migrations that they remember.
    ended: Mutex<Vec<MigrationStatus>>,
}

impl FakeAgents {
    fn begun(&self) -> Vec<String> {
        let actions = self.actions.lock();
        actions
            .iter()
            .filter_map(|action| match action {
                Action::Begin { migration, .. } => Some(migration.clone()),
                _ => None,
            })
            .collect()
    }
}

#[async_trait]
impl Agents for FakeAgents {
    async fn carry_out(&self, _job: &Job, action: Action) -> Option<AgentAnswer> {
        self.actions.lock().push(action.clone());
        match action {
            Action::Begin { .. } if self.silent => std::future::pending().await,
            Action::Begin { migration, .. } => Some(JobEvent::Accepted { migration }.into()),
            Action::Ask { migration } => {
                let answer = self.knows.lock().clone().unwrap_or(Answer::UnderWay);
                let report =
                    matches!(answer, Answer::Ended(_)).then(|| Box::new(report(&migration)));
                Some(AgentAnswer { event: JobEvent::Reported { migration, answer }, report })
            }
            Action::CancelMigration { migration } => {
                Some(JobEvent::Ended { migration, how: Ended::Cancelled }.into())
            }
            Action::Save => None,
        }
    }

    async fn migrations(&self, _host: &str) -> Vec<MigrationStatus> {
        self.ended.lock().clone()
    }
}

/// Hosts a and b, and a VM `web` on a.
fn cluster() -> Arc<State> {
    let state = Arc::<State>::default();
    state.change(|inventory| {
        rig::put_host(inventory, rig::host("a", None), &[], vec![rig::vm("web", "a", None)]);
        rig::put_host(inventory, rig::host("b", None), &[], Vec::new());
        None
    });
    state
}

/// Returns the report of a completed migration.
pub(in crate::moves) fn report(vm: &str) -> Report {
    Report {
        migration_time_ms: 1.0,
        switchover_ms: Some(1.0),
        wire_bytes: 1,
        guest_bytes: 1,
        ..Report::blank(Outcome::Completed, vm, "a", "b")
    }
}

/// Begins a manager that takes over from an earlier one, which may not have noticed.
async fn begin(store: &Arc<MemoryStore>, agents: Arc<FakeAgents>) -> Moves {
    begin_with(store, agents, mpsc::channel(64).1).await
}

/// Begins a manager that also receives news of hosts.
async fn begin_with(
    store: &Arc<MemoryStore>,
    agents: Arc<FakeAgents>,
    news: mpsc::Receiver<News>,
) -> Moves {
    store.end_leadership_silently();
    let candidate = Candidate { name: "m1".into(), address: "http://m1:7800".into() };
    let leadership = Arc::new(store.lead(&candidate).await.unwrap());
    let keeper = Arc::new(Keeper::new(Arc::clone(store) as _, leadership, candidate));
    Moves::begin(keeper, cluster(), agents, news).await.unwrap()
}

fn to_b() -> Wanted {
    let request = CreateMove { to: Some("b".into()), ..CreateMove::default() };
    let (vm, from, asked_by) = ("web".into(), "a".into(), "root".into());
    Wanted { vm, from, asked_by, request, ..Wanted::default() }
}

/// Waits until the move is in that state.
async fn when(moves: &Moves, id: &str, state: MoveState) -> Move {
    loop {
        let found = moves.all().get(id).cloned();
        match found {
            Some(found) if found.state == state => return found,
            Some(found) => assert!(!found.state.is_over(), "{found:?}"),
            None => {}
        }
        tokio::task::yield_now().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_move_starts_once_and_is_published() {
    let store = Arc::new(MemoryStore::new());
    let agents = Arc::<FakeAgents>::default();
    let moves = begin(&store, Arc::clone(&agents)).await;
    let asked = moves.submit(to_b()).await.unwrap();
    let running = when(&moves, &asked.id, MoveState::Running).await;
    assert_eq!(agents.begun(), [running.migration.unwrap()]);
    let twice = moves.submit(to_b()).await.unwrap_err();
    assert_eq!(twice.code, ProblemCode::WrongState);
    moves.cancel(&asked.id).await.unwrap();
    when(&moves, &asked.id, MoveState::Cancelled).await;
    assert_eq!(moves.cancel(&asked.id).await.unwrap_err().code, ProblemCode::WrongState);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_new_leader_queries_agents_first_and_begins_nothing_twice() {
    let store = Arc::new(MemoryStore::new());
    let silent = Arc::new(FakeAgents { silent: true, ..FakeAgents::default() });
    let moves = begin(&store, Arc::clone(&silent)).await;
    let asked = moves.submit(to_b()).await.unwrap();
    when(&moves, &asked.id, MoveState::Starting).await;
    drop(moves);
    // The agent began the migration, which has ended since.
    let agents = Arc::new(FakeAgents {
        knows: Mutex::new(Some(Answer::Ended(Ended::Completed))),
        ..FakeAgents::default()
    });
    let moves = begin(&store, Arc::clone(&agents)).await;
    when(&moves, &asked.id, MoveState::Done).await;
    assert_eq!(agents.begun(), Vec::<String>::new());
    // The report of its end is stored, also for the next manager.
    assert!(moves.report(&asked.id).await.unwrap().is_some());
    drop(moves);
    let moves = begin(&store, agents).await;
    assert!(moves.report(&asked.id).await.unwrap().is_some());
    assert_eq!(moves.report("v0").await.unwrap(), None);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_next_manager_begins_a_pending_migration_under_the_same_id() {
    let store = Arc::new(MemoryStore::new());
    let silent = Arc::new(FakeAgents { silent: true, ..FakeAgents::default() });
    let moves = begin(&store, Arc::clone(&silent)).await;
    let asked = moves.submit(to_b()).await.unwrap();
    let starting = when(&moves, &asked.id, MoveState::Starting).await;
    drop(moves);
    let never = Answer::NotKnown(Whereabouts::AtSource { epoch: 3 });
    let agents = Arc::new(FakeAgents { knows: Mutex::new(Some(never)), ..FakeAgents::default() });
    let moves = begin(&store, Arc::clone(&agents)).await;
    when(&moves, &asked.id, MoveState::Running).await;
    assert_eq!(agents.begun(), [starting.migration.unwrap()]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_move_to_an_unreachable_host_waits_and_shows_the_reason() {
    let store = Arc::new(MemoryStore::new());
    let agents = Arc::<FakeAgents>::default();
    let candidate = Candidate { name: "m1".into(), address: "http://m1:7800".into() };
    let leadership = Arc::new(store.lead(&candidate).await.unwrap());
    let keeper = Arc::new(Keeper::new(Arc::clone(&store) as _, leadership, candidate));
    let state = cluster();
    state.lost("b", "no answer");
    let news = mpsc::channel(64).1;
    let moves =
        Moves::begin(keeper, Arc::clone(&state), Arc::clone(&agents) as _, news).await.unwrap();
    let asked = moves.submit(to_b()).await.unwrap();
    assert!(asked.waits.is_some_and(|waits| waits.text.contains('b')));
    assert!(agents.begun().is_empty());
    state.reached("b");
    state.apply("b", HostEvent::Known);
    when(&moves, &asked.id, MoveState::Running).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_move_that_ended_at_an_unreachable_host_is_queried_on_reconnection() {
    let store = Arc::new(MemoryStore::new());
    let agents = Arc::<FakeAgents>::default();
    let (sender, news) = mpsc::channel(64);
    let moves = begin_with(&store, Arc::clone(&agents), news).await;
    let asked = moves.submit(to_b()).await.unwrap();
    when(&moves, &asked.id, MoveState::Running).await;
    *agents.knows.lock() = Some(Answer::Ended(Ended::Completed));
    // No query goes to another host.
    sender.send(News::Synchronized("b".into())).await.unwrap();
    sender.send(News::Synchronized("a".into())).await.unwrap();
    when(&moves, &asked.id, MoveState::Done).await;
    let questions = agents.actions.lock();
    assert_eq!(questions.iter().filter(|action| matches!(action, Action::Ask { .. })).count(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn events_are_not_lost_while_the_store_is_not_writable() {
    let store = Arc::new(MemoryStore::new());
    let agents = Arc::<FakeAgents>::default();
    let moves = begin(&store, Arc::clone(&agents)).await;
    let asked = moves.submit(to_b()).await.unwrap();
    let running = when(&moves, &asked.id, MoveState::Running).await;
    store.set_unavailable(true);
    let ended = JobEvent::Ended { migration: running.migration.unwrap(), how: Ended::Completed };
    let answer = AgentAnswer { event: ended, report: Some(Box::new(report("web"))) };
    moves.orders.send(Order::Answered(asked.id.clone(), answer)).await.unwrap();
    // This order follows the answer above.
    let refused = moves.cancel(&asked.id).await.unwrap_err();
    assert_eq!(refused.code, ProblemCode::StoreAway);
    assert_eq!(moves.all().get(&asked.id).unwrap().state, MoveState::Running);
    store.set_unavailable(false);
    let done = when(&moves, &asked.id, MoveState::Done).await;
    assert_eq!(done.attempts, 1);
    assert!(moves.report(&asked.id).await.unwrap().is_some());
}

/// Returns a driver without tasks that knows many finished moves of one VM.
async fn driver_with_history(over: usize) -> Driver {
    let store = Arc::new(MemoryStore::new());
    let candidate = Candidate { name: "m1".into(), address: "http://m1:7800".into() };
    let leadership = Arc::new(store.lead(&candidate).await.unwrap());
    let shared = Shared {
        keeper: Arc::new(Keeper::new(store, leadership, candidate)),
        state: cluster(),
        agents: Arc::<FakeAgents>::default(),
        orders: mpsc::channel(1).0,
        shown: Arc::default(),
        samples: Arc::default(),
    };
    let mut driver = Driver::new(shared, Jobs::default());
    driver.is_changed = false;
    for number in 0..over {
        let wanted = Wanted { drain: Some(format!("d{}", number % 100)), ..to_b() };
        let mut job = Job::new(format!("v0{number:06}"), wanted, 0);
        job.state = step(JobState::submitted(), JobEvent::Cancel, &RetryPolicy::default(), 0).state;
        assert!(job.state.is_over());
        driver.shared.shown.write().put(job.to_move());
        driver.jobs.put(job);
    }
    driver
}

#[tokio::test]
async fn a_long_history_adds_no_work_to_a_new_move_and_its_progress() {
    const OVER: usize = 100_000;
    let mut driver = driver_with_history(OVER).await;
    let counts = |driver: &Driver| (driver.jobs.visited(), driver.shared.shown.read().visited());
    let before = counts(&driver);
    driver
        .submit(Job::new("v1".into(), Wanted { drain: Some("d7".into()), ..to_b() }, 1))
        .await
        .unwrap();
    let migration = driver.jobs.get("v1").unwrap().state.migration().unwrap().to_owned();
    for _ in 0..10 {
        let status = MigrationStatus::begun(&migration, "web", "a", "b", 1 << 30);
        driver.carry_out(Order::News(News::Migration("a".into(), Box::new(status)))).await;
        driver.start_moves().await;
    }
    assert_eq!(driver.shared.shown.read().get("v1").unwrap().state, MoveState::Running);
    driver.carry_out(Order::News(News::Synchronized("a".into()))).await;
    driver.schedule().await;
    assert_eq!(driver.shared.shown.read().open().count(), 1);
    let after = counts(&driver);
    assert!(after.0 - before.0 < 200, "{} jobs were visited", after.0 - before.0);
    assert_eq!(after.1 - before.1, 1);
    // A drain visits its own moves.
    assert_eq!(driver.shared.shown.read().of_drain("d7").count(), OVER / 100 + 1);
    assert_eq!(driver.shared.shown.read().visited() - after.1, (OVER / 100 + 1) as u64);
}

fn ended_at_agent(id: &str, outcome: Outcome) -> MigrationStatus {
    MigrationStatus {
        started_unix_ms: now_unix_ms(),
        report: Some(Report { outcome, ..report("web") }),
        ..MigrationStatus::begun(id, "web", "a", "b", 1 << 30)
    }
}

/// Returns the texts of the journal's entries of moves, oldest first.
async fn journal(moves: &Moves) -> Vec<String> {
    let (entries, _) = moves.keeper.journal_page(None, 256).await.unwrap();
    entries.into_iter().rev().map(|entry| entry.text).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_migration_that_an_agent_was_asked_for_is_in_the_history_and_in_the_journal_once() {
    let store = Arc::new(MemoryStore::new());
    let agents = Arc::<FakeAgents>::default();
    let (sender, news) = mpsc::channel(64);
    let moves = begin_with(&store, Arc::clone(&agents), news).await;
    let running = MigrationStatus::begun("m1", "web", "a", "b", 1 << 30);
    let done = ended_at_agent("m1", Outcome::Completed);
    for status in [running, done.clone(), done.clone()] {
        sender.send(News::Migration("a".into(), Box::new(status))).await.unwrap();
    }
    // It is listed after a new connection, with another one that ended meanwhile.
    let cancelled = ended_at_agent("m2", Outcome::Cancelled);
    *agents.ended.lock() = vec![cancelled, done];
    sender.send(News::Synchronized("a".into())).await.unwrap();
    while moves.all().of_vm("web").count() < 2 {
        tokio::task::yield_now().await;
    }
    let listed: Vec<Move> = moves.all().of_vm("web").cloned().collect();
    let shown = |one: &Move| (one.asked_by.clone(), one.state, one.migration.clone());
    assert_eq!(shown(&listed[0]), ("agent".into(), MoveState::Done, Some("m1".into())));
    assert_eq!(shown(&listed[1]), ("agent".into(), MoveState::Cancelled, Some("m2".into())));
    assert_eq!(moves.report(&listed[0].id).await.unwrap(), Some(report("web")));
    let expected = [
        "VM web moved from a to b in 0.0 s: paused for 1 ms, 0 MiB sent",
        "the move of VM web from a was cancelled",
    ];
    assert_eq!(journal(&moves).await, expected);
    // The next manager knows it, too.
    drop(moves);
    let (sender, news) = mpsc::channel(64);
    let moves = begin_with(&store, Arc::clone(&agents), news).await;
    sender.send(News::Synchronized("a".into())).await.unwrap();
    let again = ended_at_agent("m1", Outcome::Completed);
    sender.send(News::Migration("a".into(), Box::new(again))).await.unwrap();
    let last = ended_at_agent("m3", Outcome::Completed);
    sender.send(News::Migration("a".into(), Box::new(last))).await.unwrap();
    while moves.all().of_vm("web").count() < 3 {
        tokio::task::yield_now().await;
    }
    assert_eq!(moves.all().of_vm("web").count(), 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_invents_migrations_fills_neither_the_history_nor_the_journal() {
    let store = Arc::new(MemoryStore::new());
    let (sender, news) = mpsc::channel(64);
    let moves = begin_with(&store, Arc::default(), news).await;
    for n in 0..2_000 {
        let status = ended_at_agent(&format!("m{n}"), Outcome::Completed);
        sender.send(News::Migration("a".into(), Box::new(status))).await.unwrap();
    }
    // This migration of another host follows the others.
    let last = MigrationStatus { from: "b".into(), ..ended_at_agent("last", Outcome::Completed) };
    sender.send(News::Migration("b".into(), Box::new(last))).await.unwrap();
    while !moves.all().values().any(|one| one.from == "b") {
        tokio::task::yield_now().await;
    }
    let of_agents = moves.all().values().filter(|one| one.asked_by == "agent").count();
    // 500 of host a, some more in the minutes that a slow machine takes, and one of host b.
    assert!((501..=520).contains(&of_agents), "{of_agents}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_move_is_in_the_journal_with_the_transactions_of_its_request_and_its_end() {
    let store = Arc::new(MemoryStore::new());
    let agents = Arc::<FakeAgents>::default();
    let moves = begin(&store, Arc::clone(&agents)).await;
    let asked = moves.submit(to_b()).await.unwrap();
    let running = when(&moves, &asked.id, MoveState::Running).await;
    let ended = JobEvent::Ended { migration: running.migration.unwrap(), how: Ended::Completed };
    let answer = AgentAnswer { event: ended, report: Some(Box::new(report("web"))) };
    moves.orders.send(Order::Answered(asked.id.clone(), answer)).await.unwrap();
    when(&moves, &asked.id, MoveState::Done).await;
    let (entries, _) = moves.keeper.journal_page(None, 256).await.unwrap();
    let texts: Vec<&str> = entries.iter().map(|entry| entry.text.as_str()).collect();
    let expected = [
        "VM web moved from a to b in 0.0 s: paused for 1 ms, 0 MiB sent",
        "a move of VM web from a to b was requested",
    ];
    assert_eq!(texts, expected);
    assert!(entries.iter().all(|entry| entry.who.as_deref() == Some("root")));
    assert!(entries[0].objects.contains(&"host:b".to_owned()));
}
