//! Lives of a VM that occurred on running systems, step by step.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use godwit_migration::destination::Action;

use crate::world::{Step, World};
use crate::{Choice, Limits, Options, Rules};

/// Applies events in order, without faults, until `is_reached`.
fn until(world: &mut World, what: &str, is_reached: impl Fn(&World) -> bool) {
    for _ in 0..1_000 {
        if is_reached(world) {
            return;
        }
        let choices = world.choices().into_iter();
        let ordinary = choices.filter(|choice| {
            let is_asked_for = matches!(choice, Choice::Migrate(..) | Choice::Create(..));
            !choice.is_rare() && !is_asked_for
        });
        let choice = ordinary.min_by_key(|choice| world.urgency(*choice));
        world.apply(choice.unwrap_or_else(|| panic!("{what}: nothing is left to do")));
    }
    panic!("{what} is not reached");
}

fn migrate(world: &mut World, from: usize, to: usize) {
    let before = world.completed();
    world.apply(Choice::Migrate(from, to));
    until(world, "the end of a migration", |world| {
        world.completed() > before && world.hosts.iter().all(|host| host.steps.is_empty())
    });
}

/// Moves a VM that was created again to a host that once had its older life, and whose agent is
/// killed before the guest is loaded.
fn moves_after_its_creation(rules: Rules) -> Result<(), String> {
    let limits = Limits { migrations: 3, lives: 1, agent_crashes: 1, ..Limits::default() };
    let mut world = World::new(Options { rules, ..Options::default() }, limits);
    migrate(&mut world, 0, 1);
    migrate(&mut world, 1, 0);
    world.apply(Choice::Delete(0));
    until(&mut world, "its deletion", |world| world.deleted);
    world.apply(Choice::Create(0));
    world.apply(Choice::Migrate(0, 1));
    until(&mut world, "the load of the guest", |world| {
        matches!(world.hosts[1].steps.front(), Some(Step::Destination(Action::FinishLoad)))
    });
    world.apply(Choice::CrashAgent(1, false, false));
    world.heals()
}

#[test]
fn a_vm_created_again_survives_the_record_of_the_older_vm() {
    moves_after_its_creation(Rules::default()).unwrap();
    let why =
        moves_after_its_creation(Rules { incarnations: false, ..Rules::default() }).unwrap_err();
    assert!(why.contains("ended the only copy"), "{why}");
}
