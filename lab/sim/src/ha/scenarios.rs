//! Single failures, step by step, with the default durations.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use std::time::Duration;

use godwit_ha::{Facts, Term, Timing};

use super::{Choice, Limits, Options, World};

const TICKS_PER_S: u32 = 4;

/// Returns a cluster whose clocks differ as much as allowed.
fn world(facts: Facts) -> World {
    let options = Options {
        timing: Timing::default(),
        tick: Duration::from_millis(250),
        ticks: u32::MAX,
        hosts: vec![(-1000, facts), (0, facts)],
        manager_drift_ppm: 1000,
        calm_from: 0,
        letters: 0,
        has_late_start: false,
        without: None,
    };
    World::new(options, Limits::default())
}

const FACTS: Facts = Facts { datastores: 1, watchdog: true, fencing: true };

/// Lets time pass, and returns after how many seconds the guest ran on the second host. Hosts that
/// are off stay off.
fn pass(world: &mut World, seconds: u32) -> Option<f64> {
    let mut moved = None;
    for tick in 1..=seconds * TICKS_PER_S {
        world.apply(Choice::Tick);
        if world.hosts_being_fenced(0).is_some() {
            world.apply(Choice::Fence(0));
        }
        assert_eq!(world.violation(), None);
        if world.hosts[1].runs_guest() && moved.is_none() {
            moved = Some(f64::from(tick) / f64::from(TICKS_PER_S));
        }
    }
    moved
}

#[test]
fn one_cut_network_restarts_nothing() {
    for (manager, storage) in [(true, false), (false, true)] {
        let mut world = world(FACTS);
        (world.hosts[0].is_cut_off, world.hosts[0].lacks_storage) = (manager, storage);
        assert_eq!(pass(&mut world, 600), None);
        assert_eq!((world.hosts[0].runs, world.restarts()), (Some(Term(1)), 0));
        (world.hosts[0].is_cut_off, world.hosts[0].lacks_storage) = (false, false);
        pass(&mut world, 60);
        assert_eq!(world.hosts[0].runs, Some(Term(1)));
    }
}

#[test]
fn both_networks_cut_move_the_guest_within_17_s() {
    let mut world = world(FACTS);
    pass(&mut world, 60);
    (world.hosts[0].is_cut_off, world.hosts[0].lacks_storage) = (true, true);
    let moved = pass(&mut world, 60).unwrap();
    assert!((14.0..17.0).contains(&moved), "{moved} s");
    assert_eq!(world.restarts(), 1);
}

#[test]
fn a_host_without_power_loses_its_guest_within_17_s() {
    for facts in [FACTS, Facts { fencing: false, ..FACTS }, Facts { watchdog: false, ..FACTS }] {
        let mut world = world(facts);
        pass(&mut world, 60);
        world.apply(Choice::PowerOff(0));
        let moved = pass(&mut world, 60).unwrap();
        assert!((14.0..17.0).contains(&moved), "{moved} s");
    }
}

#[test]
fn a_host_that_boots_gets_a_new_term_at_once_and_its_guest_back() {
    let mut world = world(FACTS);
    pass(&mut world, 60);
    world.apply(Choice::PowerOff(0));
    world.apply(Choice::PowerOn(0));
    assert_eq!(pass(&mut world, 1), None);
    assert_eq!(world.hosts[0].runs, Some(Term(2)));
}

#[test]
fn a_frozen_host_that_is_released_runs_nothing() {
    for facts in [FACTS, Facts { fencing: false, ..FACTS }, Facts { watchdog: false, ..FACTS }] {
        let mut world = world(facts);
        pass(&mut world, 10);
        world.apply(Choice::Freeze(0));
        assert!(pass(&mut world, 60).is_some());
        world.apply(Choice::Release(0));
        assert_eq!(world.violation(), None);
        pass(&mut world, 60);
        assert_eq!((world.hosts[0].runs, world.restarts()), (None, 1));
    }
}

#[test]
fn a_killed_agent_costs_the_host_its_power_unless_it_starts_again_in_time() {
    let mut world = world(FACTS);
    world.apply(Choice::KillAgent(0));
    pass(&mut world, 5);
    world.apply(Choice::StartAgent(0));
    assert_eq!(pass(&mut world, 60), None);
    world.apply(Choice::KillAgent(0));
    assert!(pass(&mut world, 60).is_some());
    assert!(!world.hosts[0].is_on);
}

#[test]
fn a_new_leader_restarts_nothing_and_takes_one_silence_more_for_a_dead_host() {
    let mut world = world(FACTS);
    pass(&mut world, 10);
    world.apply(Choice::TakeOver);
    assert_eq!(pass(&mut world, 60), None);
    world.apply(Choice::PowerOff(0));
    pass(&mut world, 10);
    world.apply(Choice::TakeOver);
    let moved = pass(&mut world, 60).unwrap();
    assert!((14.0..17.0).contains(&moved), "{moved} s");
}

#[test]
fn a_host_with_neither_watchdog_nor_fencing_waits_for_an_operator() {
    let mut world = world(Facts { datastores: 1, watchdog: false, fencing: false });
    world.apply(Choice::PowerOff(0));
    assert_eq!(pass(&mut world, 600), None);
    assert!(world.is_doubtful(0));
    world.apply(Choice::Confirmed(0));
    assert!(pass(&mut world, 1).is_some());
}
