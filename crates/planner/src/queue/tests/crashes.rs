//! Tests of a job through crashes of the manager, lost responses, failed and cancelled migrations:
//! the VM is moved once or not at all.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::lifecycle::{Action, Answer, Ended, JobEvent, JobState, Whereabouts, step};
use super::retry::RetryPolicy;
use godwit_types::Fault;

const EPOCH: u64 = 7;

fn failure(code: &str) -> Fault {
    Fault::new(code, "", "")
}

#[derive(Clone, Copy, Debug)]
enum Op {
    /// The queue starts it, if it waits.
    Start,
    /// The manager does its next action.
    Act,
    /// The manager does its next action, but the response is lost.
    ActUnanswered,
    /// An earlier request to begin arrives only now, or once more.
    Late,
    /// The agent's migration ends, successfully or not.
    Complete,
    Fail(bool),
    /// The agent reports the state of its migration.
    Report,
    AgentRestarts,
    ManagerCrashes,
    Cancel,
}

fn ops() -> impl Strategy<Value = Op> {
    prop_oneof![
        3 => Just(Op::Start),
        8 => Just(Op::Act),
        2 => Just(Op::ActUnanswered),
        1 => Just(Op::Late),
        2 => Just(Op::Complete),
        2 => any::<bool>().prop_map(Op::Fail),
        2 => Just(Op::Report),
        1 => Just(Op::AgentRestarts),
        2 => Just(Op::ManagerCrashes),
        1 => Just(Op::Cancel),
    ]
}

/// What the agent knows of a migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum MigrationState {
    UnderWay,
    Completed,
    Failed,
    Cancelled,
}

/// A sequence of managers, the store, and the source's agent.
struct World {
    state: JobState,
    stored: JobState,
    actions: Vec<Action>,
    known: BTreeMap<String, MigrationState>,
    sent: Vec<String>,
    at_source: bool,
    epoch: u64,
    begun: u32,
    moves: u32,
    ids: u32,
}

impl World {
    fn new() -> World {
        World {
            state: JobState::submitted(),
            stored: JobState::submitted(),
            actions: Vec::new(),
            known: BTreeMap::new(),
            sent: Vec::new(),
            at_source: true,
            epoch: EPOCH,
            begun: 0,
            moves: 0,
            ids: 0,
        }
    }

    fn on(&mut self, event: JobEvent) {
        let next = step(self.state.clone(), event, &RetryPolicy::default(), 0);
        self.state = next.state;
        self.actions.extend(next.actions);
    }

    fn is_moving(&self) -> bool {
        self.known.values().any(|known| *known == MigrationState::UnderWay)
    }

    /// Begins a migration at the agent, if allowed: each ID once, one migration per VM.
    fn begin(&mut self, migration: &str) -> JobEvent {
        let migration = migration.to_owned();
        if self.known.contains_key(&migration) {
            return JobEvent::Accepted { migration };
        }
        let code = if !self.at_source {
            "not-found"
        } else if self.is_moving() {
            "busy"
        } else {
            ""
        };
        if !code.is_empty() {
            return JobEvent::Refused { migration, failure: failure(code) };
        }
        self.begun += 1;
        self.known.insert(migration.clone(), MigrationState::UnderWay);
        JobEvent::Accepted { migration }
    }

    fn answer(&self, migration: &str) -> Answer {
        match self.known.get(migration) {
            Some(MigrationState::UnderWay) => Answer::UnderWay,
            Some(MigrationState::Completed) => Answer::Ended(Ended::Completed),
            Some(MigrationState::Failed) => Answer::Ended(Ended::Failed(failure("lane-lost"))),
            Some(MigrationState::Cancelled) => Answer::Ended(Ended::Cancelled),
            None if self.at_source => Answer::NotKnown(Whereabouts::AtSource { epoch: self.epoch }),
            None => Answer::NotKnown(Whereabouts::AtTarget),
        }
    }

    fn end(&mut self, how: MigrationState) {
        for known in self.known.values_mut().filter(|known| **known == MigrationState::UnderWay) {
            *known = how;
            if how == MigrationState::Completed {
                (self.at_source, self.moves) = (false, self.moves + 1);
            }
            // Each attempted hand-over changes the epoch.
            self.epoch += 2;
        }
    }

    fn act(&mut self, answers: bool) {
        if self.actions.is_empty() {
            return;
        }
        let action = self.actions.remove(0);
        if !action.still_applies(&self.state) {
            return;
        }
        match action {
            Action::Save => self.stored = self.state.clone(),
            Action::Begin { migration, .. } => {
                assert_eq!(
                    self.stored.migration(),
                    Some(migration.as_str()),
                    "begun before it was saved"
                );
                self.sent.push(migration.clone());
                let answer = self.begin(&migration);
                self.on(if answers { answer } else { JobEvent::Unanswered { migration } });
            }
            Action::Ask { migration } => {
                let answer = if answers { self.answer(&migration) } else { Answer::NoAnswer };
                self.on(JobEvent::Reported { migration, answer });
            }
            Action::CancelMigration { migration } => {
                if self.known.get(&migration) == Some(&MigrationState::UnderWay) {
                    self.end(MigrationState::Cancelled);
                }
            }
        }
    }

    fn apply(&mut self, op: Op) {
        match op {
            Op::Start => {
                self.ids += 1;
                let (migration, target) = (format!("m{}", self.ids), "b".to_owned());
                if matches!(self.state, JobState::Waiting { .. }) && self.actions.is_empty() {
                    self.on(JobEvent::Start { migration, target, epoch: self.epoch });
                }
            }
            Op::Act => self.act(true),
            Op::ActUnanswered => self.act(false),
            Op::Late => {
                if let Some(migration) = self.sent.last().cloned() {
                    self.begin(&migration);
                }
            }
            Op::Complete => self.end(MigrationState::Completed),
            Op::Fail(true) => self.end(MigrationState::Failed),
            Op::Fail(false) => self.end(MigrationState::Cancelled),
            Op::Report => {
                if let Some(migration) = self.state.migration().map(ToOwned::to_owned) {
                    let answer = self.answer(&migration);
                    if !matches!(answer, Answer::NotKnown(_)) {
                        self.on(JobEvent::Reported { migration, answer });
                    }
                }
            }
            Op::AgentRestarts => {
                self.end(MigrationState::Failed);
                self.known.clear();
                self.on(JobEvent::Resumed);
            }
            Op::ManagerCrashes => {
                (self.state, self.actions) = (self.stored.clone(), Vec::new());
                self.on(JobEvent::Resumed);
            }
            Op::Cancel => self.on(JobEvent::Cancel),
        }
    }

    /// Lets everything come to its end, without further faults.
    fn settle(&mut self) -> bool {
        for _ in 0..200 {
            self.apply(Op::Act);
            self.apply(Op::Report);
            if self.state.is_over() && self.actions.is_empty() && !self.is_moving() {
                self.apply(Op::Report);
                while !self.actions.is_empty() {
                    self.act(true);
                }
                return true;
            }
            if self.actions.is_empty() {
                self.apply(Op::Start);
                self.apply(if self.is_moving() { Op::Complete } else { Op::Act });
            }
        }
        false
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn a_vm_is_moved_once_or_not_at_all(ops in prop::collection::vec(ops(), 1..60)) {
        let mut world = World::new();
        for op in ops {
            world.apply(op);
            prop_assert!(world.moves <= 1, "moved twice");
            let is_under_way = |known: &&MigrationState| **known == MigrationState::UnderWay;
            prop_assert!(world.known.values().filter(is_under_way).count() <= 1);
            if let JobState::Done { .. } = world.state {
                prop_assert!(!world.at_source, "done, but the VM is still at its source");
            }
        }
        prop_assert!(world.settle(), "no end: {:?} {:?}", world.state, world.actions);
        prop_assert_eq!(&world.state, &world.stored);
        if let JobState::Done { .. } = world.state {
            prop_assert_eq!(world.moves, 1);
        }
    }
}

#[test]
fn a_new_manager_begins_an_unbegun_migration_with_the_stored_id() {
    let mut world = World::new();
    world.apply(Op::Start);
    world.apply(Op::Act);
    world.apply(Op::ManagerCrashes);
    assert_eq!(world.actions, [Action::Ask { migration: "m1".into() }]);
    world.apply(Op::Act);
    assert_eq!(world.actions, [Action::Begin { migration: "m1".into(), target: "b".into() }]);
    world.apply(Op::Act);
    assert!(matches!(&world.state, JobState::Running(attempt) if attempt.migration == "m1"));
}

#[test]
fn a_cancel_waits_for_the_result_of_the_request_to_begin() {
    let mut world = World::new();
    for op in [Op::Start, Op::Act, Op::ActUnanswered, Op::Cancel] {
        world.apply(op);
    }
    assert!(matches!(&world.state, JobState::Starting(attempt) if attempt.cancel));
    assert!(world.settle());
    assert!(matches!(world.state, JobState::Cancelled { .. }), "{:?}", world.state);
    assert!(world.at_source && world.begun == 1);
}

#[test]
fn a_forgotten_attempt_is_retried_as_another_migration() {
    let mut world = World::new();
    for op in [Op::Start, Op::Act, Op::ActUnanswered, Op::AgentRestarts, Op::Act] {
        world.apply(op);
    }
    assert!(
        matches!(&world.state, JobState::Waiting { failed_attempts: 1, failure: Some(failure), .. }
            if failure.code == "lost-track"),
        "{:?}",
        world.state
    );
}

#[test]
fn a_doubt_resolved_at_the_target_completes_the_job() {
    let policy = RetryPolicy::default();
    let mut state = JobState::submitted();
    let migration = || "m1".to_owned();
    for event in [
        JobEvent::Start { migration: migration(), target: "b".into(), epoch: 1 },
        JobEvent::Accepted { migration: migration() },
        JobEvent::Ended { migration: migration(), how: Ended::InDoubt(failure("in-doubt")) },
    ] {
        state = step(state, event, &policy, 0).state;
    }
    assert!(matches!(&state, JobState::Failed { failure, .. } if failure.code == "in-doubt"));
    let completed = JobEvent::Ended { migration: migration(), how: Ended::Completed };
    let state = step(state, completed, &policy, 0).state;
    assert!(matches!(state, JobState::Done { cancelled_too_late: false, .. }));
}
