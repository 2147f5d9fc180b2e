//! Every order of steps, crashes, losses and delays of one or two migrations, checked by stateright
//! on the production state machines: the guest runs on at most one host, with its newest memory,
//! and every state has a way out.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use std::sync::atomic::{AtomicUsize, Ordering};

use godwit_migration::PageIn;
use godwit_migration::handover::{self, OfDestination, Recovery};
use godwit_sim::{Choice, Limits, Options, Rules, World};
use godwit_types::Ownership;
use stateright::{Checker, Model, Property};

/// Number of states examined in all cases; states are distinct within a case.
static ALL: AtomicUsize = AtomicUsize::new(0);

/// The world as stateright sees it.
#[derive(Clone, Debug)]
struct HandOver {
    options: Options,
    limits: Limits,
}

impl Model for HandOver {
    type State = World;
    type Action = Choice;

    fn init_states(&self) -> Vec<World> {
        vec![World::new(self.options, self.limits)]
    }

    fn actions(&self, state: &World, actions: &mut Vec<Choice>) {
        actions.extend(state.choices());
    }

    fn next_state(&self, state: &World, action: Choice) -> Option<World> {
        let mut next = state.clone();
        next.apply(action);
        Some(next)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always("one guest, with its newest memory", |_, world: &World| {
                world.violation().is_none()
            }),
            Property::always("a way out", |_, world: &World| world.heals().is_ok()),
            Property::sometimes("a migration completes", |_, world: &World| world.completed() > 0),
        ]
    }
}

fn check(options: Options, limits: Limits) -> impl Checker<HandOver> {
    HandOver { options, limits }.checker().threads(2).spawn_bfs().join()
}

/// Checks the properties in every state, and prints the number of states.
fn holds(what: &str, options: Options, limits: Limits) {
    let checker = check(options, limits);
    let (states, unlike) = (checker.state_count(), checker.unique_state_count());
    let all = ALL.fetch_add(unlike, Ordering::Relaxed) + unlike;
    println!("{what}: {states} states, {unlike} of them unlike; so far {all} in all");
    for property in ["one guest, with its newest memory", "a way out"] {
        if let Some(path) = checker.discovery(property) {
            let last = path.last_state();
            let why = last.heals().err().or_else(|| last.violation().map(str::to_owned));
            panic!("{what}: {property}: {why:?}\n{:#?}", path.into_actions());
        }
    }
    checker.assert_any_discovery("a migration completes");
}

fn one() -> Limits {
    Limits { migrations: 1, ..Limits::default() }
}

#[test]
fn an_agent_is_killed_at_any_step() {
    holds("two crashes of agents", Options::default(), Limits { agent_crashes: 2, ..one() });
}

#[test]
fn a_host_loses_power_at_any_step() {
    let limits = Limits { host_crashes: 1, agent_crashes: 1, ..one() };
    holds("a host and an agent", Options::default(), limits);
}

#[test]
fn the_lane_is_cut_at_any_step() {
    let limits = Limits { cuts: 1, agent_crashes: 1, give_ups: 1, cancels: 1, ..one() };
    holds("a cut, a crash, a cancel", Options::default(), limits);
}

#[test]
fn the_lane_is_cut_while_disks_settle() {
    let options = Options { moves_disks: true, ..Options::default() };
    holds("disks, a cut", options, Limits { cuts: 1, agent_crashes: 1, cancels: 1, ..one() });
}

#[test]
fn words_are_lost_doubled_and_late() {
    let options = Options { ordered: false, ..Options::default() };
    holds("in any order", options, Limits { losses: 1, cuts: 1, give_ups: 1, ..one() });
}

#[test]
fn disks_are_full_at_any_step() {
    let limits = Limits { full_disks: 1, cuts: 1, agent_crashes: 1, ..one() };
    holds("a full disk", Options::default(), limits);
}

#[test]
fn pages_are_missing_while_anything_breaks() {
    let options = Options { page_in: PageIn::Now, pages: 2, ..Options::default() };
    holds("page-in", options, Limits { cuts: 1, agent_crashes: 1, give_ups: 1, ..one() });
}

#[test]
fn a_guest_that_comes_back() {
    let options = Options { first_epoch: 3, has_history: true, ..Options::default() };
    holds("with a history", options, Limits { cuts: 1, agent_crashes: 1, ..one() });
    holds(
        "two migrations",
        Options::default(),
        Limits { migrations: 2, cuts: 1, ..Limits::default() },
    );
}

#[test]
fn a_vm_is_deleted_and_created_again_under_its_name_and_uuid() {
    let limits = Limits { migrations: 2, lives: 1, agent_crashes: 1, ..Limits::default() };
    holds("two lives, an agent", Options::default(), limits);
    let options = Options { first_epoch: 3, has_history: true, ..Options::default() };
    holds("two lives, a cut", options, Limits { lives: 1, cuts: 1, ..one() });
    let limits = Limits { lives: 1, host_crashes: 1, ..one() };
    holds("two lives, a host", Options::default(), limits);
    let options = Options { page_in: PageIn::Now, pages: 2, ..Options::default() };
    holds("two lives, page-in", options, Limits { lives: 1, agent_crashes: 1, ..one() });
}

#[test]
fn another_vm_has_the_name_and_the_uuid() {
    let limits = Limits { strangers: 1, agent_crashes: 1, cuts: 1, ..one() };
    holds("two of one uuid", Options::default(), limits);
    let limits = Limits { strangers: 1, lives: 1, agent_crashes: 1, ..one() };
    holds("two of one uuid, two lives", Options::default(), limits);
}

#[test]
fn any_write_fails() {
    let limits = Limits { failed_writes: 2, agent_crashes: 1, ..one() };
    holds("two writes, an agent", Options::default(), limits);
    let limits = Limits { failed_writes: 1, host_crashes: 1, ..one() };
    holds("a write, a host", Options::default(), limits);
    let limits = Limits { failed_writes: 1, lives: 1, agent_crashes: 1, ..one() };
    holds("a write, two lives", Options::default(), limits);
    let limits = Limits { failed_writes: 2, host_crashes: 1, cuts: 1, ..one() };
    holds("two writes, a host, a cut", Options::default(), limits);
    let options = Options { page_in: PageIn::Now, pages: 2, ..Options::default() };
    holds("a write, page-in", options, Limits { failed_writes: 1, agent_crashes: 1, ..one() });
}

/// Checks that a wrong rule breaks a property.
fn finds(what: &str, rules: Rules, options: Options, limits: Limits) {
    let checker = check(Options { rules, ..options }, limits);
    let found = ["one guest, with its newest memory", "a way out"]
        .into_iter()
        .find_map(|property| checker.discovery(property).map(|path| (property, path)));
    let (property, path) = found.unwrap_or_else(|| panic!("{what} is not found"));
    println!("{what} breaks \"{property}\" in {} steps", path.into_actions().len());
}

#[test]
fn planted_faults_are_found() {
    let history = Options { first_epoch: 3, has_history: true, ..Options::default() };
    let faults = Limits { cuts: 1, agent_crashes: 1, ..one() };

    // Takes whatever the destination has ever had for the guest that was offered to it.
    let no_epoch: fn(_, _) -> OfDestination =
        |known, offered| handover::of_destination(known, Ownership { epoch: 0, ..offered });
    let rules = Rules { of_destination: no_epoch, ..Rules::default() };
    finds("an epoch that nobody looks at", rules, history, faults);

    let lets_go: fn(_, _) -> Recovery = |role, found| match handover::recover(role, found) {
        Recovery::AskDestination => Recovery::TakeBack,
        other => other,
    };
    let rules = Rules { recover: lets_go, ..Rules::default() };
    finds("a source that runs again without asking", rules, Options::default(), faults);

    let rules = Rules { notes_hand_over: false, ..Rules::default() };
    finds("a hand-over that is not written down", rules, Options::default(), faults);

    // Takes a host's record of a deleted VM for the VM that was created after it.
    let rules = Rules { incarnations: false, ..Rules::default() };
    let lives = Limits { migrations: 2, lives: 1, agent_crashes: 1, ..Limits::default() };
    finds("incarnations ignored", rules, history, lives);
    let strangers = Limits { strangers: 1, agent_crashes: 1, ..one() };
    finds("another VM of the uuid taken for the guest", rules, Options::default(), strangers);

    let rules = Rules { heeds_failed_writes: false, ..Rules::default() };
    let writes = Limits { failed_writes: 1, lives: 1, agent_crashes: 1, ..one() };
    finds("a gone record that failed to be written is ignored", rules, Options::default(), writes);

    let rules = Rules { notes_take_over: false, ..Rules::default() };
    let power = Limits { host_crashes: 1, ..one() };
    finds("a take-over that is not written down", rules, Options::default(), power);
}
