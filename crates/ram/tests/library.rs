//! The tracker library's behaviour towards peers other than this agent.
#![allow(
    unsafe_code,
    clippy::expect_used,
    clippy::panic,
    reason = "starts processes and mount namespaces; helpers of tests fail the test"
)]

mod support;

use std::time::{Duration, Instant};

use godwit_ram::tracking::protocol::{
    MESSAGE_LEN, Origin, Request, answer as answer_of, parse_answer, request,
};
use godwit_ram::{DirtyTracker, PageIn, TrackError, tracker_listener};
use rustix::fd::OwnedFd;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketType};
use support::{Bench, Start, Writer};

fn connect(writer: &Writer) -> OwnedFd {
    let connection =
        rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).expect("a socket");
    let address = SocketAddrUnix::new(&writer.socket).expect("a short path");
    rustix::net::connect(&connection, &address).expect("the library listens");
    connection
}

fn answer(connection: &OwnedFd) -> Option<(Origin, u16)> {
    let mut bytes = [0u8; MESSAGE_LEN];
    let (_, len) = rustix::net::recv(connection, &mut bytes, RecvFlags::empty()).ok()?;
    (len == MESSAGE_LEN).then(|| parse_answer(&bytes)).flatten()
}

#[test]
fn answers_in_pieces_without_a_device_and_after_nonsense() {
    let Some(bench) = Bench::tracking() else { return };
    let regions = [bench.region("a", 10)];
    let writer = Writer::start(&bench, "tracker", &[regions[0].path()], Start::default());
    let send = |connection: &OwnedFd, bytes: &[u8]| {
        rustix::net::send(connection, bytes, SendFlags::NOSIGNAL).expect("sends");
    };

    let nonsense = connect(&writer);
    send(&nonsense, b"nonsense");
    let refused =
        (Origin::None, u16::try_from(rustix::io::Errno::PROTO.raw_os_error()).expect("small"));
    assert_eq!(answer(&nonsense), Some(refused));

    let hung_up = connect(&writer);
    send(&hung_up, b"GWT");
    drop(hung_up);

    // A process of the user nobody, without a device in the request: it has what the system call
    // gives.
    let pieces = connect(&writer);
    let request = request(Request::New);
    send(&pieces, &request[..3]);
    send(&pieces, &request[3..]);
    let (origin, errno) = answer(&pieces).expect("an answer");
    assert!(matches!(origin, Origin::Syscall | Origin::UserModeOnly), "{origin:?}");
    assert_eq!(errno, 0);

    // The library gives up on a silent peer after a while, and then serves the agent.
    let _silent = connect(&writer);
    let tracker = DirtyTracker::attach(&writer.socket, writer.pid(), &regions);
    assert!(tracker.is_ok(), "{:?}", tracker.err());
}

#[test]
fn one_userfaultfd_is_kept_and_no_descriptor_is_lost() {
    let Some(bench) = Bench::tracking() else { return };
    let regions = [bench.region("a", 10)];
    let writer = Writer::start(&bench, "tracker", &[regions[0].path()], Start::default());
    let ask = |wanted| {
        let connection = connect(&writer);
        rustix::net::send(&connection, &request(wanted), SendFlags::NOSIGNAL).expect("sends");
        answer(&connection)
    };
    // The library closes a connection after it has answered.
    let open = |expected: usize| {
        let end = Instant::now() + Duration::from_secs(60);
        while writer.descriptors() != expected && Instant::now() < end {
            std::thread::yield_now();
        }
        assert_eq!(writer.descriptors(), expected);
    };
    let before = writer.descriptors();
    let none_kept =
        (Origin::None, u16::try_from(rustix::io::Errno::NOENT.raw_os_error()).expect("small"));
    assert_eq!(ask(Request::Kept), Some(none_kept));
    assert_eq!(ask(Request::DropKept), Some((Origin::None, 0)), "there is none to drop");
    for _ in 0..20 {
        let (new, errno) = ask(Request::New).expect("an answer");
        assert_eq!((new != Origin::None, errno), (true, 0));
    }
    open(before);
    let kept = ask(Request::NewKept).expect("an answer");
    for _ in 0..20 {
        assert_eq!(ask(Request::NewKept), Some(kept), "the newer takes its place");
        assert_eq!(ask(Request::Kept), Some(kept), "and is given with where it came from");
    }
    open(before + 1);
    drop(PageIn::attach(&writer.socket, writer.pid(), &regions).expect("attaches"));
    open(before + 1);
    PageIn::attach_again(&writer.socket, writer.pid(), &regions)
        .expect("attaches")
        .end()
        .expect("ends");
    open(before);
    // A failed request leaves no descriptor behind.
    let tracker = DirtyTracker::attach(&writer.socket, writer.pid(), &regions).expect("attaches");
    assert!(PageIn::attach(&writer.socket, writer.pid(), &regions).is_err());
    open(before);
    drop(tracker);
}

/// Checks that a library of the first version, which compares only the version, is recognised.
#[test]
fn a_library_without_a_userfaultfd_is_distinguished_from_an_unknown_one() {
    let Some(bench) = Bench::tracking() else { return };
    let regions = [bench.region("a", 10)];
    let writer = Writer::start(&bench, "tracker", &[regions[0].path()], Start::default());
    let socket = bench.socket("old");
    let listener = tracker_listener(&socket).expect("a listener");
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..3 {
                let connection = rustix::net::accept(&listener).expect("a client connects");
                let mut bytes = [0u8; MESSAGE_LEN];
                rustix::net::recv(&connection, &mut bytes, RecvFlags::empty()).expect("a request");
                let errno =
                    if bytes[4] == 1 { rustix::io::Errno::PERM } else { rustix::io::Errno::PROTO };
                let errno = u16::try_from(errno.raw_os_error()).expect("small");
                let refused = answer_of(Origin::None, errno);
                rustix::net::send(&connection, &refused, SendFlags::NOSIGNAL).expect("sends");
            }
        });
        let too_old = PageIn::attach(&socket, writer.pid(), &regions).err();
        assert!(matches!(too_old, Some(TrackError::LibraryTooOld { .. })), "{too_old:?}");
        let too_old = PageIn::attach_again(&socket, writer.pid(), &regions).err();
        assert!(matches!(too_old, Some(TrackError::LibraryTooOld { .. })), "{too_old:?}");
        let other = DirtyTracker::attach(&socket, writer.pid(), &regions).err();
        assert!(matches!(other, Some(TrackError::NoUserfaultfd { .. })), "{other:?}");
    });
}
