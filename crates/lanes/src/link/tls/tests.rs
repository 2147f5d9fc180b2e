//! The streams' TLS against rustls's own.

use std::net::TcpListener;
use std::time::Duration;

use godwit_pki::Identity;
use rustls::{ClientConnection, ConnectionCommon, ServerConnection, SideData, StreamOwned};

use super::*;
use crate::test_hosts::hosts;

const BYTES: usize = 3 << 20;
/// Room of a reader, for records that are copied and for those that are opened in place.
const ROOMS: [usize; 2] = [9, LEAST_READ_BYTES];

fn sockets() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let far = listener.accept().unwrap().0;
    for socket in [&near, &far] {
        socket.set_nodelay(true).unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    }
    (near, far)
}

/// Returns a stream of this module as the connecting side, and rustls's as the accepting one.
fn to_server(a: &Identity, b: &Identity) -> (Tls, StreamOwned<ServerConnection, TcpStream>) {
    let (near, far) = sockets();
    std::thread::scope(|scope| {
        let theirs = scope.spawn(|| {
            let connection = ServerConnection::new(Arc::clone(b.server())).unwrap();
            let mut theirs = StreamOwned::new(connection, far);
            // They may send before this side reads.
            theirs.write_all(b"early").unwrap();
            theirs
        });
        let name = Identity::server_name("b").unwrap();
        let ours = Tls::connect(near, a.client(), name).unwrap();
        let mut early = [0; 5];
        read_exactly(&ours, &mut early);
        assert_eq!(&early, b"early");
        (ours, theirs.join().unwrap())
    })
}

/// Returns a stream of this module as the accepting side, and rustls's as the connecting one.
fn to_client(a: &Identity, b: &Identity) -> (Tls, StreamOwned<ClientConnection, TcpStream>) {
    let (near, far) = sockets();
    std::thread::scope(|scope| {
        let theirs = scope.spawn(|| {
            let name = Identity::server_name("b").unwrap();
            let connection = ClientConnection::new(Arc::clone(a.client()), name).unwrap();
            let mut theirs = StreamOwned::new(connection, near);
            theirs.write_all(b"early").unwrap();
            theirs
        });
        let (ours, peer) = Tls::accept(far, b.server()).unwrap();
        assert_eq!(peer.name, "a");
        let mut early = [0; 5];
        read_exactly(&ours, &mut early);
        assert_eq!(&early, b"early");
        (ours, theirs.join().unwrap())
    })
}

fn read_exactly(tls: &Tls, mut into: &mut [u8]) {
    while !into.is_empty() {
        match tls.read(into) {
            Ok(0) => panic!("the stream ended"),
            Ok(read) => into = &mut into[read..],
            // A record with another key.
            Err(error) => assert_eq!(error.kind(), io::ErrorKind::Interrupted, "{error}"),
        }
    }
}

/// Reads once, with so much room, after all records without bytes and parts of records.
fn read_once(tls: &Tls, room: usize) -> io::Result<usize> {
    let mut into = vec![0; room];
    loop {
        match tls.read(&mut into) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            read => return read,
        }
    }
}

fn noise() -> Vec<u8> {
    let next = |word: &u64| Some(word.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1));
    std::iter::successors(Some(1_u64), next).flat_map(u64::to_le_bytes).take(BYTES).collect()
}

/// Sends both ways, in pieces of all lengths, with new keys at times.
fn exchange<C, S: SideData>(ours: &Tls, theirs: &mut StreamOwned<C, TcpStream>)
where
    C: std::ops::DerefMut<Target = ConnectionCommon<S>>,
{
    let content = noise();
    let pieces = [1, 5, 16_384, 16_385, 200_000, 300_001, BYTES];
    let mut start = 0;
    for (number, length) in pieces.into_iter().enumerate() {
        let piece = &content[start..(start + length).min(BYTES)];
        start += piece.len();
        if number % 2 == 1 {
            ours.is_key_requested.store(true, Ordering::Relaxed);
            // Requests another key of this side, too.
            theirs.conn.refresh_traffic_keys().unwrap();
        }
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let sealed = ours.write(&mut piece.to_vec()).unwrap();
                assert!(sealed >= piece.len() as u64 + 22);
            });
            let mut received = vec![0; piece.len()];
            theirs.read_exact(&mut received).unwrap();
            assert!(received == piece);
        });
        std::thread::scope(|scope| {
            let mut received = vec![0; piece.len()];
            let reading = scope.spawn(move || {
                read_exactly(ours, &mut received);
                received
            });
            theirs.write_all(piece).unwrap();
            theirs.flush().unwrap();
            assert!(reading.join().unwrap() == piece);
        });
        assert!(!ours.holds_bytes());
    }
}

#[test]
fn rustls_understands_either_side() {
    let (_authority, [a, b]) = hosts();
    let (ours, mut theirs) = to_server(&a, &b);
    exchange(&ours, &mut theirs);
    let (ours, mut theirs) = to_client(&a, &b);
    exchange(&ours, &mut theirs);
    // Either side's end is the end for the other.
    theirs.conn.send_close_notify();
    theirs.flush().unwrap();
    assert_eq!(ours.read(&mut [0; 9]).unwrap(), 0);
    ours.finish();
    assert_eq!(theirs.read(&mut [0; 9]).unwrap(), 0);
}

#[test]
fn bytes_that_were_not_sealed_end_the_stream_with_the_reason() {
    let (_authority, [a, b]) = hosts();
    let sealed_by_nobody = [&[23, 3, 3, 0, 40][..], &[5; 40]].concat();
    let cases: [(&[u8], AlertDescription); 3] = [
        (&sealed_by_nobody, AlertDescription::BadRecordMac),
        (&[23, 3, 3, 0x50, 0], AlertDescription::RecordOverflow),
        (&[22, 3, 3, 0, 5, 24, 0, 0, 1, 0], AlertDescription::UnexpectedMessage),
    ];
    for ((bytes, reason), room) in cases.into_iter().flat_map(|case| ROOMS.map(|room| (case, room)))
    {
        let (ours, mut theirs) = to_client(&a, &b);
        // What came before is not lost.
        theirs.write_all(b"page").unwrap();
        theirs.sock.write_all(bytes).unwrap();
        let mut page = [0; 4];
        read_exactly(&ours, &mut page);
        assert_eq!(&page, b"page");
        let error = read_once(&ours, room).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        let error = theirs.read(&mut [0; 9]).unwrap_err();
        assert!(error.to_string().contains(&format!("{reason:?}")), "{error}, not {reason:?}");
    }
}

#[test]
fn records_without_bytes_do_not_keep_a_reader() {
    let (_authority, [a, b]) = hosts();
    let (ours, mut theirs) = to_client(&a, &b);
    for room in ROOMS {
        theirs.conn.refresh_traffic_keys().unwrap();
        theirs.flush().unwrap();
        let error = ours.read(&mut vec![0; room]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::Interrupted);
    }
    theirs.write_all(b"page").unwrap();
    let mut page = [0; 4];
    read_exactly(&ours, &mut page);
    assert_eq!(&page, b"page");
}

#[test]
fn a_stream_that_is_cut_within_a_record_ends() {
    let (_authority, [a, b]) = hosts();
    for room in ROOMS {
        let (ours, theirs) = to_client(&a, &b);
        (&theirs.sock).write_all(&[23, 3, 3, 0, 40, 1, 2, 3]).unwrap();
        assert!(!ours.holds_bytes());
        theirs.sock.shutdown(std::net::Shutdown::Both).unwrap();
        assert_eq!(read_once(&ours, room).unwrap(), 0);
    }
}

/// Checks that bytes, a changed record behind them, and the end are returned in this order, however
/// they arrive.
#[test]
fn bytes_before_a_changed_record_are_returned() {
    let (_authority, [a, b]) = hosts();
    let (ours, mut theirs) = to_client(&a, &b);
    let content = noise();
    let sent = &content[..40_000];
    theirs.conn.writer().write_all(sent).unwrap();
    let mut records = Vec::new();
    while theirs.conn.wants_write() {
        theirs.conn.write_tls(&mut records).unwrap();
    }
    records.extend([&[23, 3, 3, 0, 40][..], &[5; 40]].concat());
    theirs.sock.write_all(&records).unwrap();
    let mut received = Vec::new();
    let error = loop {
        let mut room = vec![0; LEAST_READ_BYTES];
        match ours.read(&mut room) {
            Ok(read) => received.extend_from_slice(&room[..read]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => break error,
        }
    };
    assert_eq!(error.kind(), io::ErrorKind::InvalidData);
    assert!(received == sent);
    assert_eq!(ours.read(&mut [0; 9]).unwrap(), 0);
}

#[test]
fn bytes_behind_the_end_are_not_read() {
    let (_authority, [a, b]) = hosts();
    for room in [9, READ_BYTES] {
        let (ours, mut theirs) = to_client(&a, &b);
        theirs.conn.send_close_notify();
        let mut records = Vec::new();
        while theirs.conn.wants_write() {
            theirs.conn.write_tls(&mut records).unwrap();
        }
        // More than a record has, as somebody on the path may append it.
        records.resize(records.len() + 2 * OPEN_BYTES, 5);
        theirs.sock.write_all(&records).unwrap();
        assert_eq!(read_once(&ours, room).unwrap(), 0);
        assert_eq!(read_once(&ours, room).unwrap(), 0);
    }
}

#[test]
fn a_frame_of_pages_is_sent_in_two_calls() {
    let frame = 36 + 2 * SEAL_BYTES;
    assert_eq!(piece_bytes(frame), SEAL_BYTES);
    assert_eq!(piece_bytes(frame - SEAL_BYTES), frame - SEAL_BYTES);
    assert_eq!(piece_bytes(SEAL_BYTES + MOST_PLAIN_BYTES), SEAL_BYTES);
    assert_eq!([1, SEAL_BYTES].map(piece_bytes), [1, SEAL_BYTES]);
}
