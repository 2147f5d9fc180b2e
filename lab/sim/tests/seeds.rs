//! A few hundred lives of a guest; `make sim` runs thousands, and `make soak` hours of them.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use godwit_migration::handover::{self, OfDestination};
use godwit_sim::{Plan, Rules, simulate};
use godwit_types::Ownership;

#[test]
fn no_life_of_a_guest_loses_or_doubles_it() {
    let (mut completed, mut created) = (0, 0);
    for seed in 0..1_000 {
        match simulate(Plan { seed, rules: Rules::default() }) {
            Ok(figures) => {
                completed += figures.completed;
                created += figures.created;
            }
            Err(why) => {
                panic!("seed {seed}: {why}\nreplay it: godwit-sim --first {seed} --seeds 1")
            }
        }
    }
    assert!(created > 50, "{created} VMs were created again: the lives are too short");
    assert!(completed > 500, "{completed} migrations completed: the lives have nothing in them");
}

#[test]
fn a_life_by_a_wrong_rule_is_found() {
    let of_destination: fn(_, _) -> OfDestination =
        |known, offered| handover::of_destination(known, Ownership { epoch: 0, ..offered });
    for (what, rules) in [
        ("an epoch that nobody looks at", Rules { of_destination, ..Rules::default() }),
        ("a uuid without an incarnation", Rules { incarnations: false, ..Rules::default() }),
        (
            "a failed write that stops nothing",
            Rules { heeds_failed_writes: false, ..Rules::default() },
        ),
    ] {
        let found = (0..4_000).find_map(|seed| simulate(Plan { seed, rules }).err().map(|_| seed));
        let seed = found.unwrap_or_else(|| panic!("{what} is not found"));
        println!("{what}: found by seed {seed}");
    }
}
