//! Streams that stall, over loopback: what counts as progress.

use std::net::Ipv4Addr;

use godwit_lanes::pacing::Pacing;
use godwit_lanes::{Carries, accept, connect, listen};
use godwit_ram::PageRange;
use godwit_types::Lane;
use godwit_wire::Message;

use super::*;
use crate::drive::inbox::MOST_UNANSWERED_PINGS;

const LIMIT: Duration = Duration::from_secs(60);
/// Burst of the lowest limit.
const BURST_BYTES: u64 = 32 << 10;

/// Returns both ends of a stream.
fn ends() -> (Stream, Stream) {
    let listener = listen((Ipv4Addr::LOCALHOST, 0).into()).unwrap();
    let near = connect(Lane { from: None, to: listener.local_addr().unwrap() }, LIMIT).unwrap();
    (near, accept(&[listener], LIMIT).unwrap().unwrap())
}

fn open(dispatch: &Dispatch, stream: &Stream) -> usize {
    let number = dispatch.open(0, Carries::Pages);
    dispatch.connected(number, stream);
    dispatch.ready(number);
    number
}

/// Creates work with a stream that has taken a unit, and one that has nothing to do.
fn one_of_two_busy(busy: &Stream, idle: &Stream) -> Dispatch {
    let dispatch = Dispatch::default();
    let (busy, _) = (open(&dispatch, busy), open(&dispatch, idle));
    dispatch.push(Unit {
        block: 0,
        pages: vec![PageRange { first: 0, count: 1 }],
        zeros: Vec::new(),
    });
    assert!(matches!(dispatch.next_work(busy), Work::Unit { .. }));
    assert_eq!(dispatch.break_stalled(Duration::ZERO), [0; 0], "the first look only remembers");
    dispatch
}

#[test]
fn a_stalled_stream_is_closed() {
    let ((busy, _far), (idle, _other)) = (ends(), ends());
    let dispatch = one_of_two_busy(&busy, &idle);
    assert_eq!(dispatch.break_stalled(LIMIT), [0; 0], "not before its time");
    while dispatch.break_stalled(Duration::ZERO) != [0] {}
    let [figures] = &dispatch.lane_figures(1)[..] else { panic!("one lane") };
    assert_eq!(figures.broken, ["it carried nothing for 0 ms"]);
}

#[test]
fn any_arriving_byte_counts_even_if_unread() {
    let ((busy, _far), (idle, _other)) = (ends(), ends());
    let dispatch = one_of_two_busy(&busy, &idle);
    for _ in 0..3 {
        let before = busy.carried_bytes();
        busy.sender().send(&Message::UnitEnd).unwrap();
        while busy.carried_bytes() == before {
            std::thread::yield_now();
        }
        assert_eq!(dispatch.break_stalled(Duration::ZERO), [0; 0]);
    }
}

#[test]
fn waiting_for_a_limit_is_not_a_stall() {
    let ((busy, _far), (idle, _other)) = (ends(), ends());
    // A clock that stands still: the burst passes, and nothing more.
    let pace = Pacing::with_clock(|| Duration::ZERO).migration("1mbit".parse().unwrap());
    let busy = busy.paced(pace.stream(Ipv4Addr::LOCALHOST.into()));
    let dispatch = one_of_two_busy(&busy, &idle);
    std::thread::scope(|scope| {
        let held = scope.spawn(|| busy.sender().pad(1 << 20));
        // After the burst it waits forever.
        while busy.carried_bytes() < BURST_BYTES || !busy.is_held() {
            std::thread::yield_now();
        }
        for _ in 0..3 {
            assert_eq!(dispatch.break_stalled(Duration::ZERO), [0; 0]);
        }
        busy.close();
        assert!(held.join().unwrap().is_err());
    });
}

#[test]
fn only_streams_that_are_there_owe_padding() {
    let (ready, _far) = ends();
    let dispatch = Dispatch::default();
    let number = open(&dispatch, &ready);
    let connecting = dispatch.open(0, Carries::Pages);
    dispatch.pad(1000);
    let Work::Padding(bytes) = dispatch.next_work(number) else { panic!("no padding") };
    assert_eq!(bytes, 1000);
    assert!(dispatch.written(number, bytes), "{connecting} is not waited for");
}

#[test]
fn streams_closed_while_sealed_return_nothing_and_are_recorded_once() {
    let (stream, _far) = ends();
    let dispatch = Dispatch::default();
    open(&dispatch, &stream);
    assert!(dispatch.seal().is_some());
    for _ in 0..3 {
        // A destination that repeats itself, and reports streams that do not exist.
        assert_eq!(dispatch.closed(0, 0), Ok(Closing::Nothing));
        assert_eq!(dispatch.closed(7, 0), Ok(Closing::Nothing));
    }
    assert_eq!(dispatch.lock().closed_meanwhile, [(0, 0)]);
    assert_eq!(dispatch.unseal(), Ok(0), "the last stream is gone");
    assert_eq!(dispatch.closed(0, 0), Ok(Closing::Nothing));
}

#[test]
fn only_pings_that_were_sent_are_answered() {
    let dispatch = Dispatch::default();
    assert!(dispatch.pings.asks());
    assert!(dispatch.pings.answered());
    assert!(!dispatch.pings.answered());
}

#[test]
fn returned_work_is_tracked_until_it_is_sent_again() {
    let ((busy, _far), (idle, _other)) = (ends(), ends());
    let dispatch = one_of_two_busy(&busy, &idle);
    assert!(!dispatch.reads_taken_pages());
    assert_eq!(dispatch.closed(0, 0), Ok(Closing::GivenBack { live: 1 }));
    dispatch.set_round(1);
    assert!(dispatch.reads_taken_pages(), "it has not been sent again");
    assert!(matches!(dispatch.next_work(1), Work::Unit { .. }));
    assert!(dispatch.written(1, 4096));
    assert!(dispatch.reads_taken_pages(), "its round goes on");
    dispatch.set_round(2);
    assert!(!dispatch.reads_taken_pages());
}

#[test]
fn unanswered_pings_are_bounded_by_the_room_for_answers() {
    let dispatch = Dispatch::default();
    let sent = (0..2 * MOST_UNANSWERED_PINGS).filter(|_| dispatch.pings.asks()).count();
    assert_eq!(sent as u64, MOST_UNANSWERED_PINGS);
    // An answer that waits in the inbox makes no room; one that the driver has taken does.
    assert!(dispatch.pings.answered());
    assert!(!dispatch.pings.asks());
    dispatch.pings.took_answer();
    assert!(dispatch.pings.asks() && !dispatch.pings.asks());
}

#[test]
fn a_driver_that_waits_for_room_learns_of_it_once() {
    let (stream, _far) = ends();
    let dispatch = Dispatch::default();
    let number = open(&dispatch, &stream);
    let unit = |first| Unit { pages: vec![PageRange { first, count: 1 }], ..Unit::default() };
    let fill = || (0..9).take_while(|_| dispatch.has_room()).for_each(|at| dispatch.push(unit(at)));
    let makes_room =
        || matches!(dispatch.next_work(number), Work::Unit { makes_room, .. } if makes_room);
    fill();
    assert!(makes_room());
    assert!(!makes_room(), "nobody waits any more");
    fill();
    assert!(makes_room());
}
