//! A lane that is cut while the guest runs, and another one in its place.

use godwit_migration::destination::Ending;
use godwit_types::Outcome;

use crate::world::{Twist, migrate};

#[test]
fn a_migration_continues_after_a_cut_lane() {
    // The only data stream breaks in the first round, while the guest writes.
    let moved =
        migrate(Twist { cut: 1, streams: 1, writes: 3, reconnects: true, ..Twist::default() });
    assert_eq!(
        (moved.result.outcome, &moved.ending),
        (Outcome::Completed, &Ending::Runs),
        "{:?}",
        moved.result
    );
    assert!(moved.same_memory);
    assert_eq!(moved.unsent.len(), 1, "the lane was not cut");
}

#[test]
fn a_guest_that_is_paged_in_after_a_cut() {
    let twist =
        Twist { cut: 1, streams: 1, reconnects: true, page_in: Some(1), ..Twist::default() };
    let moved = migrate(twist);
    assert_eq!(
        (moved.result.outcome, &moved.ending),
        (Outcome::Completed, &Ending::Runs),
        "{:?}",
        moved.result
    );
    assert!(moved.same_memory && moved.unsent.len() == 1, "{:?}", moved.unsent);
}

#[test]
fn a_permanent_cut_leaves_the_guest_at_the_source() {
    let moved = migrate(Twist { cut: 1, streams: 1, ..Twist::default() });
    assert_eq!(moved.result.outcome, Outcome::Failed);
    assert!(matches!(moved.ending, Ending::Discarded(_)), "{:?}", moved.ending);
    assert!(moved.logged.contains(&"discarded"));
}

#[test]
fn a_stop_that_is_put_off_comes_after_more_rounds() {
    for page_in in [None, Some(0)] {
        let moved = migrate(Twist { puts_off: 2, page_in, streams: 2, ..Twist::default() });
        assert_eq!(
            (moved.result.outcome, &moved.ending),
            (Outcome::Completed, &Ending::Runs),
            "{:?}",
            moved.result
        );
        assert!(moved.same_memory);
        // A page-in needs none.
        let rounds = moved.result.rounds.len();
        assert!(page_in.is_some() || rounds >= 3, "{rounds}");
    }
}
