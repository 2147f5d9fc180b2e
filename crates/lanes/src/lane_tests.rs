//! Lanes over loopback: pages of all shapes arrive where they belong.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use godwit_pki::{Authority, Grant, Identity, Role};
use godwit_ram::{PAGE_SIZE, PageRange, Region};
use godwit_wire::{Message, PageRun};

use crate::{Incoming, Lane, LaneError, Stream, accept, connect, listen, pair};

const LIMIT: Duration = Duration::from_secs(5);

fn lane_to(to: SocketAddr) -> Lane {
    Lane { from: None, to }
}

fn streams() -> (Stream, Stream) {
    let listener = listen((Ipv4Addr::LOCALHOST, 0).into()).unwrap();
    let near = connect(lane_to(listener.local_addr().unwrap()), LIMIT).unwrap();
    (near, accept(&[listener], LIMIT).unwrap().unwrap())
}

fn region(folder: &tempfile::TempDir, name: &str, pages: u64) -> Region {
    Region::create(&folder.path().join(name), pages * PAGE_SIZE, None).unwrap()
}

#[test]
fn pages_of_all_shapes_arrive_among_messages() {
    let (near, far) = streams();
    pages_of_all_shapes_arrive(&near, &far);
}

/// Both ends of a stream under certificates of one authority.
fn secure_streams(folder: &tempfile::TempDir) -> (Stream, Stream) {
    let authority = Authority::create(folder.path(), "test", 1).unwrap();
    let identity = |name: &str| {
        let grant = Grant { name: name.to_owned(), role: Role::Host, addresses: Vec::new(), days: 1 };
        let issued = authority.issue(&grant).unwrap();
        Identity::load(&authority.certificate(), &issued.certificate, &issued.key).unwrap()
    };
    let (a, b) = (identity("a"), identity("b"));
    let (near, far) = streams();
    std::thread::scope(|scope| {
        let accepting = scope.spawn(|| far.secure_accepted(&b).unwrap());
        let near = near.secure(&a, "b").unwrap();
        let (far, who) = accepting.join().unwrap();
        assert_eq!(who.name, "a");
        (near, far)
    })
}

#[test]
fn pages_of_all_shapes_arrive_sealed() {
    let folder = tempfile::tempdir().unwrap();
    let (near, far) = secure_streams(&folder);
    pages_of_all_shapes_arrive(&near, &far);
}

#[test]
fn a_secure_stream_carries_both_ways_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let (near, far) = secure_streams(&folder);
    const WORDS: u64 = 2000;
    let say = |stream: &Stream| {
        let mut sender = stream.sender();
        for word in 0..WORDS {
            sender.send(&Message::Ping { sent_ns: word }).unwrap();
        }
    };
    let hear = |stream: &Stream| {
        let mut receiver = stream.receiver();
        for word in 0..WORDS {
            assert_eq!(receiver.receive().unwrap(), Incoming::Message(Message::Ping { sent_ns: word }));
        }
        assert!(receiver.is_idle());
    };
    std::thread::scope(|scope| {
        for stream in [&near, &far] {
            scope.spawn(move || say(stream));
            scope.spawn(move || hear(stream));
        }
    });
    near.finish_sending();
    assert!(matches!(far.receiver().receive(), Err(LaneError::Closed)));
}

fn pages_of_all_shapes_arrive(near: &Stream, far: &Stream) {
    let folder = tempfile::tempdir().unwrap();
    let (from, to) = (region(&folder, "from", 2000), region(&folder, "to", 2000));
    for page in 0..from.pages() {
        from.copy_in(page * PAGE_SIZE, &page.to_le_bytes().repeat(512)).unwrap();
    }
    let shapes = [(0, 1), (3, 1), (5, 2), (10, 17), (40, 1), (50, 600), (700, 1), (702, 64), (800, 1200)];
    let runs: Vec<_> = shapes.iter().map(|&(first, count)| PageRange { first, count }).collect();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut sender = near.sender();
            for round in 0..3 {
                sender.send(&Message::Ping { sent_ns: 1 }).unwrap();
                sender.unit(round, 0, &from, &runs, &[]).unwrap();
                sender.send(&Message::Padding { bytes: 700_000 }).unwrap();
            }
            near.finish_sending();
        });
        let (mut receiver, mut pages) = (far.receiver(), 0);
        loop {
            match receiver.receive() {
                Ok(Incoming::Pages(header)) => {
                    receiver.pages(&to, header.run).unwrap();
                    pages += u64::from(header.run.count);
                }
                Ok(Incoming::Message(message)) => {
                    assert!(matches!(
                        message,
                        Message::Ping { .. } | Message::Padding { .. } | Message::UnitEnd
                    ));
                }
                Err(LaneError::Closed) => break,
                Err(error) => panic!("{error}"),
            }
        }
        assert_eq!(pages, 3 * shapes.iter().map(|(_, count)| count).sum::<u64>());
    });
    for page in 0..to.pages() {
        let sent = shapes.iter().any(|&(first, count)| (first..first + count).contains(&page));
        let mut bytes = [0; 4096];
        to.copy_out(page * PAGE_SIZE, &mut bytes).unwrap();
        let expected = if sent { page } else { 0 };
        assert!(bytes.chunks(8).all(|word| word == expected.to_le_bytes()), "page {page}");
    }
}

#[test]
fn pages_beyond_the_block_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let to = region(&folder, "to", 4);
    let (_near, far) = streams();
    let mut receiver = far.receiver();
    for (first, count) in [(3, 2), (4, 1), (u64::MAX, 2)] {
        let refused = receiver.pages(&to, PageRun { block: 0, first, count });
        assert!(matches!(refused, Err(LaneError::OutOfBounds { .. })));
    }
}

#[test]
fn nobody_comes() {
    let listener = listen((Ipv4Addr::LOCALHOST, 0).into()).unwrap();
    assert!(accept(&[listener], Duration::from_millis(1)).unwrap().is_none());
}

#[test]
fn an_address_without_a_listener_is_named() {
    let free = listen((Ipv4Addr::LOCALHOST, 0).into()).unwrap().local_addr().unwrap();
    let error = connect(lane_to(free), LIMIT).unwrap_err().to_string();
    assert!(error.contains(&free.to_string()) && error.contains("migration_addresses"), "{error}");
}

#[test]
fn addresses_pair_by_family_and_order() {
    let ours: Vec<IpAddr> = ["10.0.0.1", "fd00::1", "10.0.1.1"].map(|text| text.parse().unwrap()).into();
    let theirs: Vec<SocketAddr> =
        ["[fd00::2]:7", "10.0.0.2:7", "10.0.1.2:7", "10.0.2.2:7"].map(|text| text.parse().unwrap()).into();
    let lanes: Vec<String> = pair(&ours, &theirs).iter().map(Lane::to_string).collect();
    assert_eq!(
        lanes,
        ["fd00::1 → [fd00::2]:7", "10.0.0.1 → 10.0.0.2:7", "10.0.1.1 → 10.0.1.2:7", "→ 10.0.2.2:7"]
    );
}

#[test]
fn a_stream_leaves_from_its_lanes_address() {
    let listener = listen((Ipv4Addr::LOCALHOST, 0).into()).unwrap();
    let from: IpAddr = "127.0.0.9".parse().unwrap();
    let near = connect(Lane { from: Some(from), to: listener.local_addr().unwrap() }, LIMIT).unwrap();
    let far = accept(&[listener], LIMIT).unwrap().unwrap();
    assert_eq!((far.peer().ip(), near.peer().ip()), (from, Ipv4Addr::LOCALHOST.into()));
    let refused = connect(Lane { from: Some(from), to: near.peer() }, LIMIT).unwrap_err();
    assert!(matches!(refused, LaneError::Connect { .. }), "{refused}");
}
