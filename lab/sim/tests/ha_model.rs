//! Every order of messages, writes and faults while a host fails, checked by stateright on the
//! production guards and judges: the guest never runs twice, and no term ends while it may run.
//!
//! Clocks are far apart, so that a few ticks are enough: a lease of two ticks, a grace of one.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use std::time::Duration;

use godwit_ha::{Facts, Timing};
use godwit_sim::ha::{Choice, Limits, Options, Rule, World};
use stateright::{Checker, Model, Property};

const SAFE: &str = "one guest, in a term that has not ended";
/// Errors of the clocks of the failing host and of the manager.
const CLOCKS: [(i32, i32); 3] = [(-250_000, 250_000), (250_000, -250_000), (0, 0)];

/// The world as stateright sees it.
#[derive(Clone, Debug)]
struct Failure {
    options: Options,
    limits: Limits,
}

impl Model for Failure {
    type State = World;
    type Action = Choice;

    fn init_states(&self) -> Vec<World> {
        let world = |(host, manager)| {
            let mut options = self.options.clone();
            options.hosts[0].0 = host;
            options.manager_drift_ppm = manager;
            World::new(options, self.limits)
        };
        CLOCKS.into_iter().map(world).collect()
    }

    fn actions(&self, state: &World, actions: &mut Vec<Choice>) {
        if state.violation().is_none() {
            actions.extend(state.choices());
        }
    }

    fn next_state(&self, state: &World, action: Choice) -> Option<World> {
        let mut next = state.clone();
        next.apply(action);
        Some(next)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always(SAFE, |_, world: &World| world.violation().is_none()),
            Property::sometimes("a restart", |_, world: &World| world.restarts() > 0),
        ]
    }
}

/// Returns a failing host with these facts and a calm one.
fn options(facts: Facts, ticks: u32) -> Options {
    Options {
        timing: Timing {
            interval: Duration::from_secs(1),
            lease: Duration::from_secs(2),
            grace: Duration::from_secs(1),
            drift_ppm: 250_000,
        },
        tick: Duration::from_secs(1),
        ticks,
        hosts: vec![(0, facts), (0, Facts { datastores: 0, ..GUARDED })],
        manager_drift_ppm: 0,
        calm_from: 1,
        letters: 1,
        has_late_start: false,
        without: None,
    }
}

const GUARDED: Facts = Facts { datastores: 1, watchdog: true, fencing: false };
const FENCED: Facts = Facts { datastores: 0, watchdog: false, fencing: true };
const BOTH: Facts = Facts { datastores: 0, watchdog: true, fencing: true };

fn check(options: Options, limits: Limits) -> impl Checker<Failure> {
    Failure { options, limits }.checker().threads(2).spawn_bfs().join()
}

fn holds(what: &str, options: Options, limits: Limits) {
    let checker = check(options, limits);
    let (states, unlike) = (checker.state_count(), checker.unique_state_count());
    println!("{what}: {states} states, {unlike} of them unlike");
    if let Some(path) = checker.discovery(SAFE) {
        let why = path.last_state().violation();
        panic!("{what}: {why:?}\n{:#?}", path.into_actions());
    }
    checker.assert_any_discovery("a restart");
}

#[test]
fn a_host_with_a_watchdog_fails() {
    // The clocks that are furthest apart end the term in the fourth tick.
    let (none, freeze) = (Limits::default(), Limits { freezes: 1, ..Limits::default() });
    holds("a datastore, renewals", options(GUARDED, 3), none);
    holds("a datastore alone, a freeze", Options { letters: 0, ..options(GUARDED, 5) }, freeze);
}

#[test]
fn a_host_with_a_fencing_device_fails() {
    let limits = Limits { freezes: 1, agent_kills: 1, power_cuts: 1, ..Limits::default() };
    holds("a device that works or fails", options(FENCED, 6), limits);
    let limits = Limits { freezes: 1, lies: 1, ..Limits::default() };
    holds("a device that lies", options(BOTH, 7), limits);
}

#[test]
fn the_leader_changes_while_a_host_fails() {
    let options = Options { letters: 2, ..options(BOTH, 6) };
    holds("a takeover", options, Limits { takeovers: 1, ..Limits::default() });
}

#[test]
fn requests_arrive_late() {
    let options = Options { has_late_start: true, ..options(BOTH, 7) };
    holds("a late start", options, Limits { freezes: 1, ..Limits::default() });
}

/// Checks that the world is unsafe without a rule.
fn finds(rule: Rule, options: Options, limits: Limits) {
    let checker = check(Options { without: Some(rule), ..options }, limits);
    let path = checker.discovery(SAFE).unwrap_or_else(|| panic!("{rule:?} is not needed"));
    println!("without {rule:?}: violated in {} steps", path.into_actions().len());
}

#[test]
fn each_rule_is_needed() {
    for rule in Rule::ALL {
        let (guarded, fenced, both) = (options(GUARDED, 6), options(FENCED, 6), options(BOTH, 7));
        let guarded = Options { letters: 0, ..guarded };
        let none = Limits::default();
        let freeze = Limits { freezes: 1, ..none };
        let takeover = Limits { takeovers: 1, ..none };
        let (options, limits) = match rule {
            Rule::CountsFromSending
            | Rule::WatchdogWaits
            | Rule::OverAfterVms
            | Rule::WaitsForDrift
            | Rule::WaitsForGrace => (both, none),
            Rule::DeadlineIsFinal
            | Rule::ReadsHeartbeats
            | Rule::FailedReadingProvesNothing
            | Rule::ReadingCountsFromStart => (guarded, none),
            Rule::Majority => {
                let hosts = vec![(0, Facts { datastores: 2, ..GUARDED }), guarded.hosts[1]];
                (Options { hosts, ..guarded }, none)
            }
            Rule::NeedsAssurance => (fenced, freeze),
            Rule::FencingShortensNoWait => (both, Limits { lies: 1, ..none }),
            Rule::CountsFromTakeover => (both, takeover),
            Rule::OnlyLeaderGrants => (both, takeover),
            Rule::StartsInTerm => (Options { has_late_start: true, ..both }, none),
            Rule::PlacementIsRecorded => (both, takeover),
        };
        finds(rule, options, limits);
    }
}
