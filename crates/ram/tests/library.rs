//! The tracker library as it behaves towards peers that are not this agent.
#![allow(
    unsafe_code,
    clippy::expect_used,
    clippy::panic,
    reason = "starts processes and mount namespaces; helpers of tests fail the test"
)]

mod support;

use godwit_ram::DirtyTracker;
use godwit_ram::tracking::protocol::{MESSAGE_LEN, Origin, Request, parse_answer, request};
use rustix::fd::OwnedFd;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketType};
use support::{Bench, Start, Writer};

fn connect(writer: &Writer) -> OwnedFd {
    let connection = rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).expect("a socket");
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
    let refused = (Origin::None, u16::try_from(rustix::io::Errno::PROTO.raw_os_error()).expect("small"));
    assert_eq!(answer(&nonsense), Some(refused));

    let hung_up = connect(&writer);
    send(&hung_up, b"GWT");
    drop(hung_up);

    // A process of nobody, and no device sent along: what the system call gives is what it has.
    let pieces = connect(&writer);
    let request = request(Request::New);
    send(&pieces, &request[..3]);
    send(&pieces, &request[3..]);
    let (origin, errno) = answer(&pieces).expect("an answer");
    assert!(matches!(origin, Origin::Syscall | Origin::UserModeOnly), "{origin:?}");
    assert_eq!(errno, 0);

    // A peer that says nothing is given up after a while, and the agent has its turn.
    let _silent = connect(&writer);
    let tracker = DirtyTracker::attach(&writer.socket, writer.pid(), &regions);
    assert!(tracker.is_ok(), "{:?}", tracker.err());
}
