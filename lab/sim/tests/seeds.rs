//! A few hundred lives of a guest; `make sim` has thousands, `make soak` hours of them.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use godwit_migration::handover::{self, OfDestination};
use godwit_sim::{Plan, Rules, simulate};

#[test]
fn no_life_of_a_guest_loses_or_doubles_it() {
    let mut completed = 0;
    for seed in 0..500 {
        match simulate(Plan { seed, rules: Rules::default() }) {
            Ok(figures) => completed += figures.completed,
            Err(why) => panic!("seed {seed}: {why}\nreplay it: godwit-sim --first {seed} --seeds 1"),
        }
    }
    assert!(completed > 500, "{completed} migrations completed: the lives have nothing in them");
}

#[test]
fn a_life_by_a_wrong_rule_is_found() {
    let of_destination: fn(_, _) -> OfDestination = |known, _| handover::of_destination(known, 0);
    let rules = Rules { of_destination, ..Rules::default() };
    let found = (0..2_000).find_map(|seed| simulate(Plan { seed, rules }).err());
    assert!(found.is_some(), "an epoch that nobody looks at is not found");
}
