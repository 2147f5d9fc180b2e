//! A guest whose vCPUs get less CPU time because it writes too much. It arrives complete, and has
//! all CPU time again, however the migration ends.

use std::sync::atomic::Ordering;

use godwit_lanes::pacing::Pacing;
use godwit_types::{Outcome, RateLimit, ThrottleMeans};

use crate::world::{Moved, Twist, migrate_paced};

/// Uses a lane that takes longer for the guest's constant writes than a switchover may.
fn slowed(twist: Twist) -> Moved {
    let slow = Pacing::default().migration("12mbit".parse::<RateLimit>().unwrap());
    migrate_paced(Twist { quota: true, writes: 10_000, ..twist }, &slow, &|_, _| {})
}

fn let_go_at_the_end(moved: &Moved) {
    let least = moved.shares.iter().flatten().copied().fold(1.0, f64::min);
    assert!(least < 0.5, "it was not slowed: {:?}", moved.shares);
    assert_eq!(moved.shares.last(), Some(&None), "it is slowed for ever: {:?}", moved.shares);
}

#[test]
fn a_guest_that_writes_too_much_gets_less_cpu_and_moves() {
    let moved = slowed(Twist::default());
    assert_eq!(moved.result.outcome, Outcome::Completed, "{:?}", moved.result.failure);
    assert!(moved.same_memory);
    let_go_at_the_end(&moved);
    let throttle = moved.result.throttle.unwrap();
    assert_eq!((throttle.means, throttle.faults), (ThrottleMeans::Quota, 0));
    assert!(throttle.least_cpu_percent.is_some_and(|percent| percent < 50.0), "{throttle:?}");
}

#[test]
fn a_guest_that_stays_has_its_cpus_again() {
    let moved = slowed(Twist { load_fails: true, ..Twist::default() });
    assert_eq!(moved.result.outcome, Outcome::Failed);
    assert_eq!(moved.guest.resumed.load(Ordering::SeqCst), 1);
    let_go_at_the_end(&moved);
}
