//! A few hundred lives of a guest; `make sim` has thousands, `make soak` hours of them.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use godwit_migration::handover::{self, KeptPagesFate, Known, OfDestination};
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
    // Whose guest ran there and has gone on has not been refused there.
    let fate_of_kept_pages: fn(_, _) -> KeptPagesFate = |known, offered| match known {
        Known::Gone { .. } => KeptPagesFate::Refused,
        known => handover::fate_of_kept_pages(known, offered),
    };
    let rules = Rules { fate_of_kept_pages, ..Rules::default() };
    let found = (0..10_000).find_map(|seed| simulate(Plan { seed, rules }).err());
    assert!(found.is_some(), "a source that resumes what ran elsewhere is not found");
}
