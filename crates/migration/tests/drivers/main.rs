//! Both drivers against each other over a real lane, with memory in files and hypervisors that
//! exist only in this test.

#![allow(clippy::unwrap_used, clippy::panic)] // a helper of tests may fail the test

mod corruption;
mod deltas;
mod fakes;
mod faults;
mod files;
mod lying;
mod page_in;
mod pause;
mod quota;
mod references;
mod resume;
mod secure;
mod ways;
mod world;

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use godwit_lanes::pacing::{MigrationPace, Pacing};
use godwit_migration::destination::Ending;
use godwit_types::{Compression, EncodingName, FailureCode, Outcome, Phase, RateLimit};
use world::{BLOCKS, Twist, migrate, migrate_paced};

#[test]
fn a_guest_moves_whole() {
    let moved = migrate(Twist::default());
    assert_eq!(moved.result.outcome, Outcome::Completed, "{:?}", moved.result.failure);
    assert_eq!(moved.ending, Ending::Runs);
    assert!(moved.same_memory && moved.guest.released.load(Ordering::SeqCst));
    assert_eq!(moved.logged, ["runs", "promoted"]);
    let pages: u64 = moved.result.rounds.iter().map(|round| round.pages).sum();
    assert_eq!(pages, BLOCKS.iter().sum::<u64>() + 1);
    assert!(moved.result.rounds[0].zero_pages > 200);
    assert!(moved.result.switchover.is_some() && moved.result.round_trip.is_some());
}

#[test]
fn a_guest_moves_whole_by_every_compression() {
    for (compression, name) in [
        (Compression::Auto, EncodingName::Raw),
        (Compression::None, EncodingName::Raw),
        (Compression::Lz4, EncodingName::Lz4),
        (Compression::Zstd, EncodingName::Zstd),
    ] {
        let moved = migrate(Twist { compression, streams: 2, ..Twist::default() });
        assert_eq!(
            moved.result.outcome,
            Outcome::Completed,
            "{compression:?}: {:?}",
            moved.result.failure
        );
        assert!(moved.same_memory, "{compression:?}");
        let encodings = &moved.result.encodings;
        let pages: u64 = encodings.iter().map(|encoding| encoding.pages).sum();
        assert_eq!(pages, BLOCKS.iter().sum::<u64>() + 1, "{encodings:?}");
        let used = encodings.iter().find(|encoding| encoding.name == name).unwrap();
        if compression != Compression::Auto {
            assert_eq!(encodings.len(), 2, "{encodings:?}");
        }
        let shrinks = !matches!(name, EncodingName::Raw);
        assert_eq!(used.wire_bytes < used.raw_bytes / 3, shrinks, "{used:?}");
    }
}

#[test]
fn ipv6_is_as_good() {
    let moved = migrate(Twist { ipv6: true, ..Twist::default() });
    assert_eq!(moved.result.outcome, Outcome::Completed);
    assert!(moved.same_memory);
}

#[test]
fn the_device_state_arrives_while_it_is_written() {
    let moved = migrate(Twist { overlaps: true, streams: 2, ..Twist::default() });
    assert_eq!(moved.result.outcome, Outcome::Completed, "{:?}", moved.result.failure);
    // What a device wrote with its state is there as well.
    assert!(moved.same_memory);
    assert_eq!(moved.logged, ["runs", "promoted"]);
}

#[test]
fn a_paused_guest_stays_paused() {
    let moved = migrate(Twist { paused: true, ..Twist::default() });
    assert_eq!(moved.result.outcome, Outcome::Completed);
    assert_eq!(moved.logged, ["stays paused", "promoted"]);
}

#[test]
fn a_destination_that_can_not_load_gives_the_guest_back() {
    let moved = migrate(Twist { load_fails: true, ..Twist::default() });
    assert_eq!(moved.result.outcome, Outcome::Failed);
    assert_eq!(moved.result.failure.unwrap().code, FailureCode::HypervisorFailed);
    assert_eq!(moved.logged, ["discarded"]);
    assert_eq!(moved.guest.resumed.load(Ordering::SeqCst), 1);
    assert!(!moved.guest.released.load(Ordering::SeqCst));
}

#[test]
fn a_cancel_while_the_guest_is_paused_resumes_it() {
    let moved = migrate(Twist { cancels_itself: true, ..Twist::default() });
    assert_eq!(moved.result.outcome, Outcome::Cancelled);
    assert_eq!(moved.guest.resumed.load(Ordering::SeqCst), 1);
    // Its users noticed the pause, so the report states its length.
    assert!(moved.result.stood_still_ms.is_some() && moved.result.switchover.is_none());
    assert_eq!(moved.logged, ["discarded"]);
    assert!(
        matches!(moved.ending, Ending::Discarded(failure) if failure.code == FailureCode::Cancelled)
    );
}

#[test]
fn another_incarnation_is_refused() {
    let moved = migrate(Twist { other_incarnation: true, ..Twist::default() });
    assert_eq!(moved.result.outcome, Outcome::Failed);
    assert_eq!(moved.result.failure.unwrap().code, FailureCode::StaleEpoch);
}

#[test]
fn another_epoch_is_refused() {
    let moved = migrate(Twist { other_epoch: true, ..Twist::default() });
    assert_eq!(moved.result.outcome, Outcome::Failed);
    assert_eq!(moved.result.failure.unwrap().code, FailureCode::StaleEpoch);
}

#[test]
fn several_streams_bring_the_same_guest() {
    let moved = migrate(Twist { streams: 5, ..Twist::default() });
    assert_eq!(moved.result.outcome, Outcome::Completed, "{:?}", moved.result.failure);
    assert!(moved.same_memory);
}

#[test]
fn the_streams_that_are_left_do_the_work_of_those_that_break() {
    let moved = migrate(Twist { streams: 4, cut: 3, ..Twist::default() });
    assert_eq!(moved.result.outcome, Outcome::Completed, "{:?}", moved.result.failure);
    assert!(moved.same_memory);
}

/// Returns limits whose clock stands still: their burst passes, and nothing more.
fn held(limit: &str) -> MigrationPace {
    Pacing::with_clock(|| Duration::ZERO).migration(limit.parse().unwrap())
}

/// More than a burst at the lowest limit, and less than the guest's memory.
const BURST_BYTES: u64 = 64 << 10;

#[test]
fn a_limit_holds_until_it_is_changed() {
    let pace = held("1mbit");
    let words = AtomicU32::new(0);
    let moved = migrate_paced(Twist { streams: 3, ..Twist::default() }, &pace, &|_, progress| {
        if progress.phase != Phase::PreCopy || pace.limit() == RateLimit::NONE {
            return;
        }
        assert_eq!(progress.bandwidth_limit, pace.limit().rate());
        assert!(progress.sent_bytes < BURST_BYTES, "{progress:?}");
        if words.fetch_add(1, Ordering::SeqCst) == 2 {
            pace.set_limit(RateLimit::NONE);
        }
    });
    assert_eq!(moved.result.outcome, Outcome::Completed, "{:?}", moved.result.failure);
    assert!(moved.same_memory);
    assert_eq!(pace.limit(), RateLimit::NONE, "it did not come to its end before");
    assert!(moved.result.wire_bytes > 10 * BURST_BYTES && moved.result.bandwidth_limit.is_none());
}

#[test]
fn a_cancel_does_not_wait_for_a_limit() {
    let pace = held("1mbit");
    let moved =
        migrate_paced(Twist { streams: 3, ..Twist::default() }, &pace, &|inbox, progress| {
            if progress.phase == Phase::PreCopy {
                inbox.cancel();
            }
        });
    assert_eq!(moved.result.outcome, Outcome::Cancelled);
    assert_eq!(moved.logged, ["discarded"]);
    assert_eq!(moved.result.bandwidth_limit, pace.limit().rate());
}

#[test]
fn a_cancel_does_not_wait_for_an_unanswered_connection() {
    let twist = Twist { streams: 2, hangs: true, ..Twist::default() };
    let moved = migrate_paced(twist, &held("1mbit"), &|inbox, progress| {
        if progress.phase == Phase::PreCopy {
            inbox.cancel();
        }
    });
    assert_eq!(moved.result.outcome, Outcome::Cancelled);
    assert_eq!(moved.logged, ["discarded"]);
}

#[test]
fn a_completed_move_does_not_wait_for_an_unanswered_connection_either() {
    let moved = migrate(Twist { streams: 2, hangs: true, ..Twist::default() });
    assert_eq!(moved.result.outcome, Outcome::Completed, "{:?}", moved.result.failure);
    assert!(moved.same_memory);
}

#[test]
fn a_stalled_stream_returns_its_work() {
    let moved = migrate(Twist { streams: 2, stalls: true, ..Twist::default() });
    assert_eq!(moved.result.outcome, Outcome::Completed, "{:?}", moved.result.failure);
    assert!(moved.same_memory);
    let [lane] = &moved.result.lanes[..] else { panic!("{:?}", moved.result.lanes) };
    assert_eq!((lane.streams, lane.broken.len()), (2, 1), "{lane:?}");
}

#[test]
fn a_certificate_that_ends_leaves_the_streams_that_are_there() {
    let moved = migrate(Twist { streams: 3, certificate_ends_after: Some(2), ..Twist::default() });
    assert_eq!(moved.result.outcome, Outcome::Completed, "{:?}", moved.result.failure);
    assert!(moved.same_memory);
    let [lane] = &moved.result.lanes[..] else { panic!("{:?}", moved.result.lanes) };
    assert_eq!(lane.streams, 2);
    // On a busy machine the move completes before the source has read the refusal of the third.
    assert!(
        lane.broken.iter().all(|why| why.contains("this host's certificate has ended")),
        "{lane:?}"
    );
}

#[test]
fn a_certificate_that_ends_before_any_stream_is_there_leaves_the_guest() {
    let moved = migrate(Twist { streams: 2, certificate_ends_after: Some(0), ..Twist::default() });
    assert_eq!(moved.result.outcome, Outcome::Failed);
    let failure = moved.result.failure.unwrap();
    assert_eq!(failure.code, FailureCode::LaneLost);
    assert!(failure.detail.contains("this host's certificate has ended"), "{failure}");
    assert_eq!(moved.logged, ["discarded"]);
}

#[test]
fn without_a_stream_the_guest_stays() {
    let moved = migrate(Twist { streams: 2, cut: 2, ..Twist::default() });
    assert_eq!(moved.result.outcome, Outcome::Failed);
    assert_eq!(moved.result.failure.unwrap().code, FailureCode::LaneLost);
    assert_eq!(moved.logged, ["discarded"]);
}
