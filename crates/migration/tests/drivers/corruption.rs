//! A byte that changes in transit costs a stream, and never a guest.

use std::sync::atomic::Ordering;

use godwit_lanes::pacing::Pacing;
use godwit_migration::destination::Ending;
use godwit_types::{Compression, FailureCode, Outcome};
use godwit_wire::{HEADER_LEN, PagesHeader};

use super::ways::Corrupted;
use super::world::{Moved, Twist, migrate, migrate_paced};

/// In a frame's header, in the fields of a frame of pages or of runs, among pages, and far into
/// what follows.
const PLACES: [usize; 6] =
    [0, 2, HEADER_LEN + 5, PagesHeader::LEN + 3, PagesHeader::LEN + 5000, 100_000];

#[test]
fn a_data_stream_that_carries_another_byte_is_lost_and_the_others_do_its_work() {
    for compression in [Compression::None, Compression::Lz4] {
        for place in
            PLACES.into_iter().filter(|place| compression == Compression::None || *place < 5000)
        {
            let corrupts = Some(Corrupted::Data(place));
            let moved = migrate(Twist { streams: 2, corrupts, compression, ..Twist::default() });
            assert_eq!(
                moved.result.outcome,
                Outcome::Completed,
                "{place}: {:?}",
                moved.result.failure
            );
            assert!(moved.same_memory && moved.ending == Ending::Runs, "{place}");
            let [lane] = &moved.result.lanes[..] else { panic!("{:?}", moved.result.lanes) };
            assert_eq!((lane.streams, lane.broken.len()), (2, 1), "{place}: {lane:?}");
        }
    }
}

#[test]
fn the_only_data_stream_is_a_lane_that_is_lost() {
    let moved = migrate(Twist { corrupts: Some(Corrupted::Data(100)), ..Twist::default() });
    given_back(moved, "100");
}

#[test]
fn a_control_stream_that_carries_another_byte_is_a_lane_that_is_lost() {
    // The source's first message describes the guest, and the first answer is that the destination
    // is ready.
    let begin = HEADER_LEN + 8;
    for place in [0, 5, begin, begin + 9] {
        given_back(
            migrate(Twist { corrupts: Some(Corrupted::Control(place)), ..Twist::default() }),
            "to",
        );
    }
    for place in [0, 9] {
        given_back(
            migrate(Twist { corrupts: Some(Corrupted::Answer(place)), ..Twist::default() }),
            "from",
        );
    }
}

/// Checks that the guest runs where it ran before.
fn given_back(moved: Moved, what: &str) {
    assert_eq!(moved.result.outcome, Outcome::Failed, "{what}");
    let failure = moved.result.failure.unwrap();
    assert_eq!(failure.code, FailureCode::LaneLost, "{what}: {failure}");
    assert_eq!(moved.logged, ["discarded"], "{what}");
    assert!(!moved.guest.released.load(Ordering::SeqCst));
}

/// Moves a guest that is handed over while most of its pages are at the source.
fn page_in(corrupts: Corrupted) -> Moved {
    let pace = Pacing::default().migration("100mbit".parse().unwrap());
    let compression = Compression::None;
    let twist = Twist { writes: 5, streams: 2, compression, page_in: Some(0), ..Twist::default() };
    migrate_paced(Twist { corrupts: Some(corrupts), ..twist }, &pace, &|_, _| {})
}

#[test]
fn a_page_in_stream_that_carries_another_byte_is_a_cut() {
    for place in PLACES.into_iter().filter(|place| *place < 5000) {
        let moved = page_in(Corrupted::Unasked(place));
        assert_eq!(moved.result.outcome, Outcome::Completed, "{place}: {:?}", moved.result.failure);
        assert!(moved.same_memory && moved.guest.released.load(Ordering::SeqCst), "{place}");
        let report = moved.result.page_in.unwrap();
        assert!(report.cuts >= 1, "{place}: {report:?}");
    }
}

#[test]
fn a_page_that_must_be_there_before_the_guest_runs_and_is_another_leaves_the_guest() {
    given_back(page_in(Corrupted::Request(PagesHeader::LEN + 3)), "page-in");
}
