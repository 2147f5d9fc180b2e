//! A guest that runs at the destination while some of its pages are still at the source.

use std::sync::atomic::Ordering;

use godwit_lanes::pacing::Pacing;
use godwit_migration::destination::Ending;
use godwit_migration::drive::References;
use godwit_types::{Compression, Outcome, Phase, ReferenceUse};

use super::world::{Moved, Twist, migrate_paced};

/// Moves a guest that writes all over its memory five times, on a wire so slow that its dirty pages
/// cannot be sent during the pause.
fn page_in(twist: Twist) -> Moved {
    let pace = Pacing::default().migration("100mbit".parse().unwrap());
    migrate_paced(
        Twist { writes: 5, streams: 2, compression: Compression::None, ..twist },
        &pace,
        &|_, _| {},
    )
}

#[test]
fn it_gets_every_page() {
    let moved = page_in(Twist { page_in: Some(0), ..Twist::default() });
    assert_eq!(moved.result.outcome, Outcome::Completed, "{:?}", moved.result.failure);
    assert_eq!(moved.ending, Ending::Runs);
    assert!(moved.same_memory && moved.guest.released.load(Ordering::SeqCst));
    assert_eq!(moved.logged, ["runs", "promoted"]);
    let report = moved.result.page_in.unwrap();
    assert!(report.pages > 500 && report.cuts == 0, "{report:?}");
    assert!(report.demanded_pages > 0, "{report:?}");
    assert!(moved.result.phases.iter().any(|phase| phase.phase == Phase::PageIn));
    assert!(moved.result.switchover.is_some());
}

#[test]
fn hashes_of_pages_that_are_fetched_later_are_forgotten() {
    let references = References { by: ReferenceUse::Own, always: true, ..References::default() };
    let moved = page_in(Twist { page_in: Some(0), references, ..Twist::default() });
    assert_eq!(moved.result.outcome, Outcome::Completed, "{:?}", moved.result.failure);
    assert!(moved.same_memory && moved.result.page_in.is_some());
}

#[test]
fn cuts_cost_time_but_no_page() {
    let moved = page_in(Twist { page_in: Some(3), ..Twist::default() });
    assert_eq!(moved.result.outcome, Outcome::Completed, "{:?}", moved.result.failure);
    assert!(moved.same_memory && moved.guest.released.load(Ordering::SeqCst));
    let report = moved.result.page_in.unwrap();
    assert!(report.cuts >= 1, "{report:?}");
}

#[test]
fn a_destination_without_support_gets_rounds() {
    let moved = page_in(Twist { page_in: Some(0), no_page_in: true, ..Twist::default() });
    assert_eq!(moved.result.outcome, Outcome::Completed, "{:?}", moved.result.failure);
    assert!(moved.same_memory && moved.result.page_in.is_none());
}

#[test]
fn a_destination_that_cannot_load_gives_the_guest_back() {
    let moved = page_in(Twist { page_in: Some(0), load_fails: true, ..Twist::default() });
    assert_eq!(moved.result.outcome, Outcome::Failed);
    assert_eq!(moved.logged, ["discarded"]);
    assert_eq!(moved.guest.resumed.load(Ordering::SeqCst), 1);
}
