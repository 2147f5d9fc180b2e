//! Limits as threads meet them, with a clock that only the test moves, so that no bucket fills by
//! itself.

use std::net::Ipv4Addr;
use std::sync::mpsc;

use super::*;

const LANE: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1));

fn limit(text: &str) -> RateLimit {
    text.parse().unwrap()
}

/// Returns pacing and its clock in milliseconds.
fn standing_still() -> (Pacing, Arc<AtomicU64>) {
    let clock = Arc::new(AtomicU64::new(0));
    let shown = Arc::clone(&clock);
    (Pacing::with_clock(move || Duration::from_millis(shown.load(Ordering::SeqCst))), clock)
}

fn silent() -> Result<(), LaneError> {
    Ok(())
}

/// Takes pieces until the next one would wait.
fn drain(stream: &StreamPace) {
    let piece = stream.piece_bytes().unwrap();
    let over = &stream.shared.over;
    for limiter in &stream.shared.limiters {
        let until = Instant::now() + Duration::from_secs(3600);
        let request = Request { migration: u64::MAX, over, again: false, until };
        while limiter.piece_bytes().is_some() && limiter.would_grant(piece) {
            assert_eq!(limiter.take(request, piece), Taken::Granted);
        }
    }
}

#[test]
fn without_a_limit_no_waiter_waits_and_nothing_is_cut() {
    let (pacing, _) = standing_still();
    let stream = pacing.migration(RateLimit::NONE).stream(LANE);
    assert_eq!(stream.piece_bytes(), None);
    stream.take(u64::MAX, silent).unwrap();
}

#[test]
fn the_least_limit_decides_how_much_goes_at_once() {
    let (pacing, _) = standing_still();
    let migration = pacing.migration(limit("10gbit"));
    let stream = migration.stream(LANE);
    assert_eq!(stream.piece_bytes(), Some(256 << 10));
    pacing.limit_lane(LANE, limit("100mbit"));
    let of_lane = stream.piece_bytes().unwrap();
    assert!((16 << 10..256 << 10).contains(&of_lane));
    pacing.limit_host(limit("1mbit"));
    assert_eq!(stream.piece_bytes(), Some(16 << 10));
    assert_eq!(migration.holding(), limit("1mbit").rate());
}

#[test]
fn the_lowest_applicable_limit_holds() {
    let (pacing, _) = standing_still();
    let other = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 2));
    let migration = pacing.migration(RateLimit::NONE);
    assert_eq!(migration.holding(), None);
    pacing.limit_lane(LANE, limit("1gbit"));
    assert_eq!(migration.holding(), None, "it does not use that lane");
    migration.uses(LANE);
    assert_eq!(migration.holding(), limit("1gbit").rate());
    migration.uses(other);
    assert_eq!(migration.holding(), None, "the other lane has no limit");
    pacing.limit_lane(other, limit("2gbit"));
    assert_eq!(migration.holding(), limit("3gbit").rate());
    migration.set_limit(limit("500mbit"));
    assert_eq!(migration.holding(), limit("500mbit").rate());
    assert_eq!(migration.data_bytes_per_s(), Some(490_000_000 / 8));
    assert_eq!(pacing.lane_limits().len(), 2);
    pacing.limit_lane(other, RateLimit::NONE);
    assert_eq!(pacing.lane_limits(), BTreeMap::from([(LANE, limit("1gbit"))]));
}

/// Starts streams that wait for an empty bucket. Each reports that it got its piece, or that it was
/// closed.
fn waiting(streams: &[StreamPace]) -> (Vec<thread::JoinHandle<()>>, mpsc::Receiver<bool>) {
    let (grants, granted) = mpsc::channel();
    let threads = streams.iter().map(|stream| {
        let (stream, grants) = (stream.clone(), grants.clone());
        thread::spawn(move || grants.send(stream.take(1 << 16, silent).is_ok()).unwrap())
    });
    (threads.collect(), granted)
}

#[test]
fn every_waiter_notices_a_change() {
    let (pacing, _) = standing_still();
    let migration = pacing.migration(limit("1mbit"));
    let streams: Vec<StreamPace> = (0..4).map(|_| migration.stream(LANE)).collect();
    drain(&streams[0]);
    let (threads, granted) = waiting(&streams);
    assert!(granted.try_recv().is_err());
    migration.set_limit(RateLimit::NONE);
    assert!(granted.iter().take(4).all(|is_granted| is_granted));
    threads.into_iter().for_each(|thread| thread.join().unwrap());
}

#[test]
fn a_paused_guest_waits_only_for_the_lane() {
    let (pacing, _) = standing_still();
    let migration = pacing.migration(limit("1mbit"));
    let stream = migration.stream(LANE);
    drain(&stream);
    let (threads, granted) = waiting(std::slice::from_ref(&stream));
    migration.let_go();
    assert_eq!(granted.recv(), Ok(true));
    // A limit set now is displayed, but does not apply.
    migration.set_limit(limit("2mbit"));
    assert_eq!((migration.limit(), stream.piece_bytes()), (limit("2mbit"), None));
    pacing.limit_lane(LANE, limit("1mbit"));
    assert!(stream.piece_bytes().is_some());
    threads.into_iter().for_each(|thread| thread.join().unwrap());
}

#[test]
fn a_closed_waiter_neither_waits_nor_blocks_others() {
    let (pacing, clock) = standing_still();
    pacing.limit_host(limit("1mbit"));
    let (one, other) = (pacing.migration(RateLimit::NONE), pacing.migration(RateLimit::NONE));
    let streams = [one.stream(LANE), other.stream(LANE)];
    drain(&streams[0]);
    let (threads, granted) = waiting(&streams[..1]);
    streams[0].close();
    assert_eq!(granted.recv(), Ok(false));
    let (more, granted) = waiting(&streams[1..]);
    clock.store(10_000, Ordering::SeqCst);
    assert_eq!(granted.recv(), Ok(true));
    threads.into_iter().chain(more).for_each(|thread| thread.join().unwrap());
    assert!(streams[0].take(1, silent).is_err(), "nor does it begin to");
}

#[test]
fn a_long_wait_reports_and_continues() {
    let (pacing, _) = standing_still();
    let migration = pacing.migration(limit("1mbit"));
    let stream = migration.stream(LANE);
    drain(&stream);
    let mut reports = 0;
    let waited = stream.take(1 << 16, || {
        reports += 1;
        migration.set_limit(RateLimit::NONE);
        Ok(())
    });
    assert!(waited.is_ok());
    assert_eq!(reports, 1);
}

#[test]
fn overhead_of_control_streams_is_charged_to_pages() {
    let (pacing, clock) = standing_still();
    pacing.limit_host(limit("10mbit"));
    let migration = pacing.migration(RateLimit::NONE);
    let stream = migration.stream(LANE);
    let piece = stream.piece_bytes().unwrap();
    let would_grant = || pacing.shared.host.would_grant(piece);
    assert!(would_grant());
    // Pages get 9 Mbit/s: this is a tenth of a second, in addition to the burst.
    migration.charge(LANE, 112_500);
    assert!(!would_grant());
    clock.store(100, Ordering::SeqCst);
    assert!(would_grant());
}
