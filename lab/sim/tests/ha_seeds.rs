//! Some hundred lives of a cluster; `godwit-sim ha` runs thousands.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use godwit_sim::ha::{Rule, simulate};

#[test]
fn no_life_of_a_cluster_runs_a_guest_twice_or_stops_it_needlessly() {
    let (mut stopped, mut restarts) = (0, 0);
    for seed in 0..500 {
        match simulate(seed, None) {
            Ok(figures) => {
                stopped += figures.stopped;
                restarts += figures.restarts;
            }
            Err(why) => {
                panic!("seed {seed}: {why}\nreplay it: godwit-sim ha --first {seed} --seeds 1")
            }
        }
    }
    assert!(stopped > 100 && restarts > 100, "{stopped} guards stopped, {restarts} restarts");
}

#[test]
fn a_life_without_a_rule_is_found() {
    for rule in [Rule::ReadsHeartbeats, Rule::NeedsAssurance, Rule::OverAfterVms] {
        let found = (0..4_000).find(|seed| simulate(*seed, Some(rule)).is_err());
        let seed = found.unwrap_or_else(|| panic!("{rule:?} is not found"));
        println!("without {rule:?}: found by seed {seed}");
    }
}
