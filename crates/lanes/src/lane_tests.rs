//! Lanes over loopback: pages of all shapes arrive in the right places.

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use godwit_pki::Identity;
use godwit_ram::{PAGE_SIZE, PageRange, Region};
use godwit_wire::{
    Codec, Encoding, HEADER_LEN, Message, PageHash, PageRun, PagesHeader, Place, checksum,
};

use crate::test_hosts::{TestAuthority, hosts};
use crate::{
    Incoming, Knowledge, LaneError, Near, Packing, Referring, Stream, UnitPages, accept, connect,
    listen, pair,
};
use godwit_types::Lane;

const LIMIT: Duration = Duration::from_secs(60);

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
fn neither_end_of_a_near_way_is_under_a_control_that_paces() {
    let listener = listen((Ipv4Addr::LOCALHOST, 0).into()).unwrap();
    let near = connect(lane_to(listener.local_addr().unwrap()), LIMIT).unwrap();
    let far = accept(&[listener], LIMIT).unwrap().unwrap();
    for stream in [near, far] {
        let congestion = rustix::net::sockopt::tcp_congestion(stream.socket()).unwrap();
        assert!(!congestion.starts_with("bbr"), "{congestion}");
    }
}

#[test]
fn pages_of_all_shapes_arrive_among_messages() {
    let (near, far) = streams();
    pages_of_all_shapes_arrive(&near, &far);
}

#[test]
fn nothing_follows_a_message_that_could_not_be_sent() {
    for (near, far) in [streams(), secure_streams()] {
        near.limit_sending(Duration::from_millis(20)).unwrap();
        let mut sender = near.sender();
        let chunk = Message::DeviceState(vec![7; 60_000]);
        // The peer reads nothing, so the socket fills up after a while.
        let failed = (0..10_000).find_map(|_| sender.send(&chunk).err());
        assert!(matches!(failed, Some(LaneError::Silent)), "{failed:?}");
        // There is room again.
        let (sent, mut receiver) = (near.sent_bytes(), far.receiver());
        std::thread::scope(|scope| {
            scope.spawn(|| while receiver.receive().is_ok() {});
            assert!(sender.send(&Message::Commit { epoch: 2, incarnation: 0 }).is_err());
            assert_eq!(near.sent_bytes(), sent);
            near.close();
        });
    }
}

/// Returns both ends of a stream, with certificates of one authority.
fn secure_streams() -> (Stream, Stream) {
    let (_authority, [a, b]) = hosts();
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
    let (near, far) = secure_streams();
    pages_of_all_shapes_arrive(&near, &far);
}

/// A new connection over a long path hands out its bytes packet by packet.
#[test]
fn pages_of_all_shapes_arrive_packet_by_packet() {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let connected = || {
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (near, listener.accept().unwrap().0)
    };
    let ((near, mut relay_in), (mut relay_out, far)) = (connected(), connected());
    relay_out.set_nodelay(true).unwrap();
    let waiting = far.try_clone().unwrap();
    let relay = std::thread::spawn(move || {
        let mut packet = [0; 1448];
        while let Ok(length @ 1..) = relay_in.read(&mut packet) {
            while rustix::io::ioctl_fionread(&waiting).unwrap() > 0 {
                std::thread::yield_now();
            }
            relay_out.write_all(&packet[..length]).unwrap();
        }
    });
    let near = Stream::new(near).unwrap();
    pages_of_all_shapes_arrive(&near, &Stream::new(far).unwrap());
    near.close();
    relay.join().unwrap();
}

#[test]
fn a_secure_stream_carries_both_ways_at_once() {
    let (near, far) = secure_streams();
    const WORDS: u64 = 2000;
    let send = |stream: &Stream| {
        let mut sender = stream.sender();
        for word in 0..WORDS {
            sender.send(&Message::Ping { sent_ns: word }).unwrap();
        }
    };
    let receive = |stream: &Stream| {
        let mut receiver = stream.receiver();
        for word in 0..WORDS {
            assert_eq!(
                receiver.receive().unwrap(),
                Incoming::Message(Message::Ping { sent_ns: word })
            );
        }
        assert!(receiver.is_idle());
    };
    std::thread::scope(|scope| {
        for stream in [&near, &far] {
            scope.spawn(move || send(stream));
            scope.spawn(move || receive(stream));
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
    let shapes =
        [(0, 1), (3, 1), (5, 2), (10, 17), (40, 1), (50, 600), (700, 1), (702, 64), (800, 1200)];
    let (lz4, zstd) = (Some(Codec::Lz4), Some(Codec::Zstd));
    let packings = [(None, None), (lz4, None), (None, lz4), (zstd, None), (lz4, zstd)]
        .map(|(codec, probe)| Packing { codec, probe, ..Packing::default() });
    let runs: Vec<_> = shapes.iter().map(|&(first, count)| PageRange { first, count }).collect();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut sender = near.sender();
            for (round, packing) in (0..).zip(packings) {
                sender.send(&Message::Ping { sent_ns: 1 }).unwrap();
                let unit = UnitPages { round, block: 0, region: &from, pages: &runs, zeros: &[] };
                sender.unit(&unit, packing, None).unwrap();
                sender.send(&Message::Padding { bytes: 700_000 }).unwrap();
            }
            near.finish_sending();
        });
        let (mut receiver, mut pages) = (far.receiver(), 0);
        loop {
            match receiver.receive() {
                Ok(Incoming::Pages(header)) => {
                    receiver.pages(&to, header).unwrap();
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
        assert_eq!(
            pages,
            packings.len() as u64 * shapes.iter().map(|(_, count)| count).sum::<u64>()
        );
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
        for encoding in [Encoding::Raw, Encoding::Compressed { codec: Codec::Zstd, bytes: 9 }] {
            let run = PageRun { block: 0, first, count };
            let refused = receiver.pages(&to, PagesHeader { round: 0, run, encoding, sum: 0 });
            assert!(matches!(refused, Err(LaneError::OutOfBounds { .. })));
        }
    }
}

#[test]
fn pages_that_do_not_pay_go_raw_and_each_is_counted() {
    let folder = tempfile::tempdir().unwrap();
    let (from, to) = (region(&folder, "from", 192), region(&folder, "to", 192));
    // Two pieces that shrink, and between them one that does not.
    let mut noise = 1u64;
    for page in 0..from.pages() {
        let words = std::iter::repeat_with(|| {
            noise = noise
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            if (64..128).contains(&page) { noise ^ noise >> 32 } else { page }
        });
        let bytes: Vec<u8> = words.take(512).flat_map(u64::to_le_bytes).collect();
        from.copy_in(page * PAGE_SIZE, &bytes).unwrap();
    }
    let (near, far) = streams();
    let zeros = [PageRange { first: 0, count: 1 }];
    let pages = [PageRange { first: 1, count: 191 }];
    let sent = std::thread::scope(|scope| {
        let sending = scope.spawn(|| {
            let packing =
                Packing { codec: Some(Codec::Zstd), probe: Some(Codec::Lz4), ..Packing::default() };
            let unit =
                UnitPages { round: 7, block: 0, region: &from, pages: &pages, zeros: &zeros };
            let sent = near.sender().unit(&unit, packing, None).unwrap();
            near.finish_sending();
            sent
        });
        let mut receiver = far.receiver();
        loop {
            match receiver.receive() {
                Ok(Incoming::Pages(header)) => receiver.pages(&to, header).unwrap(),
                Ok(Incoming::Message(message)) => {
                    assert!(matches!(message, Message::Zeros(_) | Message::UnitEnd));
                }
                Err(LaneError::Closed) => break,
                Err(error) => panic!("{error}"),
            }
        }
        sending.join().unwrap()
    });
    // The probe takes the first 64 pages. The pieces after it begin one page off the noise, which
    // stays raw nevertheless.
    let pages = [sent.zero.pages, sent.raw.pages, sent.lz4.pages, sent.zstd.pages];
    assert_eq!(pages, [1, 64, 64, 63]);
    assert_eq!(
        (sent.lz4_effort.raw_bytes, sent.zstd_effort.raw_bytes),
        (64 * PAGE_SIZE, 127 * PAGE_SIZE)
    );
    assert!(sent.lz4.wire_bytes < 20 * PAGE_SIZE && sent.zstd.wire_bytes < 20 * PAGE_SIZE);
    // The codec in use packed the probe's pages too, which were sent once.
    let probed = sent.probed.unwrap();
    assert_eq!(probed.probe_bytes, sent.lz4_effort.packed_bytes);
    assert!((1..20 * PAGE_SIZE).contains(&probed.in_use_bytes));
    let frames = [sent.zero, sent.raw, sent.lz4, sent.zstd].map(|tally| tally.wire_bytes);
    assert_eq!(sent.wire_bytes, frames.iter().sum::<u64>() + HEADER_LEN as u64);
    let read = |region: &Region| {
        let mut bytes = vec![0; 192 * 4096];
        region.copy_out(0, &mut bytes).unwrap();
        bytes
    };
    assert!(read(&from)[4096..] == read(&to)[4096..]);
}

/// Returns what a receiver makes of a compressed frame.
fn received(header: PagesHeader, content: &[u8]) -> Result<(), LaneError> {
    let folder = tempfile::tempdir().unwrap();
    let to = region(&folder, "to", 64);
    let (near, far) = streams();
    let mut frame = header.to_bytes().to_vec();
    frame.extend_from_slice(content);
    near.write_all(&frame);
    near.finish_sending();
    let mut receiver = far.receiver();
    let Incoming::Pages(header) = receiver.receive()? else { panic!("no pages") };
    receiver.pages(&to, header)
}

#[test]
fn compressed_pages_that_are_not_what_they_claim_are_refused() {
    let page = [7u8; 4096];
    let zstd = zstd::bulk::compress(&page.repeat(4), 1).unwrap();
    let lz4 = lz4_flex::block::compress(&page.repeat(4));
    let header = |codec, count: u32, content: &[u8]| PagesHeader {
        round: 0,
        run: PageRun { block: 0, first: 1, count },
        encoding: Encoding::Compressed { codec, bytes: u32::try_from(content.len()).unwrap() },
        sum: checksum(content),
    };
    for (codec, content) in [(Codec::Zstd, &zstd), (Codec::Lz4, &lz4)] {
        received(header(codec, 4, content), content).unwrap();
        // Fewer pages than it holds, more pages, the other codec, cut, lengthened, damaged.
        let other = if codec == Codec::Zstd { Codec::Lz4 } else { Codec::Zstd };
        let cut = &content[..content.len() - 1];
        let longer = [content.as_slice(), &[0; 3]].concat();
        let noise = vec![0xa5; 40];
        for (header, content) in [
            (header(codec, 3, content), content.as_slice()),
            (header(codec, 5, content), content),
            (header(other, 4, content), content),
            (header(codec, 4, cut), cut),
            (header(codec, 4, &longer), &longer),
            (header(codec, 4, &noise), &noise),
        ] {
            let refused = received(header, content);
            assert!(matches!(refused, Err(LaneError::Garbled { .. })), "{header:?}: {refused:?}");
        }
    }
    // The stream ends within the compressed bytes.
    let cut = received(header(Codec::Zstd, 4, &zstd), &zstd[..5]);
    assert!(matches!(cut, Err(LaneError::Closed)), "{cut:?}");
}

#[test]
fn no_peer_connects() {
    let listener = listen((Ipv4Addr::LOCALHOST, 0).into()).unwrap();
    assert!(accept(&[listener], Duration::from_millis(1)).unwrap().is_none());
}

#[test]
fn an_address_without_a_listener_is_named() {
    let free = listen((Ipv4Addr::LOCALHOST, 0).into()).unwrap().local_addr().unwrap();
    let error = connect(lane_to(free), LIMIT).unwrap_err().to_string();
    assert!(error.contains(&free.to_string()) && error.contains("migration_addresses"), "{error}");
}

/// Parses `address/prefix`, or an address that no interface has.
fn near(text: &&str) -> Near {
    let (address, prefix) =
        text.split_once('/').map_or((*text, None), |(address, prefix)| (address, Some(prefix)));
    Near { address: address.parse().unwrap(), prefix: prefix.map(|prefix| prefix.parse().unwrap()) }
}

fn paired<const N: usize>(ours: &[&str], theirs: [&str; N]) -> Vec<String> {
    let ours: Vec<Near> = ours.iter().map(near).collect();
    let theirs = theirs.map(|address| SocketAddr::new(address.parse().unwrap(), 7));
    pair(&ours, &theirs).iter().map(Lane::to_string).collect()
}

#[test]
fn addresses_pair_by_family_and_order() {
    let lanes = paired(
        &["10.0.0.1", "fd00::1", "10.0.1.1"],
        ["fd00::2", "10.0.0.2", "10.0.1.2", "10.0.2.2"],
    );
    assert_eq!(
        lanes,
        ["fd00::1 → [fd00::2]:7", "10.0.0.1 → 10.0.0.2:7", "10.0.1.1 → 10.0.1.2:7", "→ 10.0.2.2:7"]
    );
}

#[test]
fn addresses_of_one_network_pair_whatever_is_missing() {
    // The destination's first address is down.
    assert_eq!(paired(&["10.0.0.1/24", "10.0.1.1/24"], ["10.0.1.2"]), ["10.0.1.1 → 10.0.1.2:7"]);
    // The source's first address is down: the addresses left over on both sides make a lane that
    // cannot connect.
    assert_eq!(
        paired(&["10.0.0.1", "10.0.1.1/24"], ["10.0.0.2", "10.0.1.2"]),
        ["10.0.0.1 → 10.0.0.2:7", "10.0.1.1 → 10.0.1.2:7"]
    );
    assert_eq!(
        paired(&["fd00:0:0:1::1/64", "fd00:0:0:2::1/64"], ["fd00:0:0:2::2", "fd00:0:0:3::2"]),
        ["fd00:0:0:2::1 → [fd00:0:0:2::2]:7", "fd00:0:0:1::1 → [fd00:0:0:3::2]:7"]
    );
    // Several addresses in one network, and a host route: in order.
    assert_eq!(
        paired(&["10.0.0.1/8", "10.0.1.1/8", "10.9.9.9/32"], ["10.7.0.1", "10.7.0.2", "10.7.0.3"]),
        ["10.0.0.1 → 10.7.0.1:7", "10.0.1.1 → 10.7.0.2:7", "10.9.9.9 → 10.7.0.3:7"]
    );
}

#[test]
fn a_stream_leaves_from_its_lanes_address() {
    let listener = listen((Ipv4Addr::LOCALHOST, 0).into()).unwrap();
    let from: IpAddr = "127.0.0.9".parse().unwrap();
    let near =
        connect(Lane { from: Some(from), to: listener.local_addr().unwrap() }, LIMIT).unwrap();
    let far = accept(&[listener], LIMIT).unwrap().unwrap();
    assert_eq!((far.peer().ip(), near.peer().ip()), (from, Ipv4Addr::LOCALHOST.into()));
    let refused = connect(Lane { from: Some(from), to: near.peer() }, LIMIT).unwrap_err();
    assert!(matches!(refused, LaneError::Connect { .. }), "{refused}");
}

#[test]
fn an_expired_certificate_keeps_open_streams_and_refuses_new_ones() {
    let authority = TestAuthority::new();
    let since_1970 = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    let days_ahead = Arc::new(AtomicU64::new(0));
    let identity = |name: &str| {
        let ahead = Arc::clone(&days_ahead);
        authority.host(name).with_clock(move || {
            since_1970 + Duration::from_secs(86_400 * ahead.load(Ordering::SeqCst))
        })
    };
    let (a, b) = (identity("a"), identity("b"));
    let secured = || {
        let (near, far) = streams();
        std::thread::scope(|scope| {
            let accepting = scope.spawn(|| far.secure_accepted(&b));
            let near = near.secure(&a, "b");
            (near, accepting.join().unwrap().map(|(far, _)| far))
        })
    };
    let (near, far) = secured();
    let (near, far) = (near.unwrap(), far.unwrap());
    days_ahead.store(2, Ordering::SeqCst);
    near.sender().send(&Message::UnitEnd).unwrap();
    assert_eq!(far.receiver().receive().unwrap(), Incoming::Message(Message::UnitEnd));
    // The side that looks first reports it: both certificates have expired.
    let (near, far) = secured();
    let (near, far) = (near.unwrap_err().to_string(), far.unwrap_err().to_string());
    assert!(near.contains("expired") && far.contains("CertificateExpired"), "{near}; {far}");
}

/// Checks that a revocation list applies only to streams opened after it, since cutting a stream of
/// a migration could lose the guest.
#[test]
fn a_revoked_certificate_opens_no_new_stream_and_ends_none() {
    let (authority, [a, b]) = hosts();
    let secured = |from: &Identity, to: &Identity| {
        let (near, far) = streams();
        std::thread::scope(|scope| {
            let accepting = scope.spawn(|| far.secure_accepted(to));
            // TLS 1.3: the connecting side learns of the refusal from the first answer.
            let near = near.secure(from, to.name());
            let accepted = accepting.join().unwrap().map(|(far, _)| far);
            (near, accepted)
        })
    };
    let (near, far) = secured(&a, &b);
    let (near, far) = (near.unwrap(), far.unwrap());
    let list = authority.authority().list(1, [(a.serial().clone(), 0)].into()).unwrap();
    b.revocations().accept(list).unwrap();
    near.sender().send(&Message::UnitEnd).unwrap();
    assert_eq!(far.receiver().receive().unwrap(), Incoming::Message(Message::UnitEnd));
    // Refused as a source and as a destination.
    let refused = secured(&a, &b).1.unwrap_err().to_string();
    assert!(refused.contains("Revoked"), "{refused}");
    let refused = secured(&b, &a).0.unwrap_err().to_string();
    assert!(refused.contains("Revoked") || refused.contains("revoked"), "{refused}");
}

/// Knows the pages from a number on.
struct KnowsFrom(u64);

impl Knowledge for KnowsFrom {
    fn find(&self, _: &PageHash, block: u16, page: u64) -> Option<Place> {
        (page >= self.0).then_some(Place { content: 1, block, page })
    }

    fn sent(&self, _: &PageHash, _: u16, _: u64) {}

    fn sent_before(&self, _: u16, _: u64, _: &mut [u8]) -> bool {
        false
    }

    fn sends(&self, _: u16, _: u64, _: &[u8]) {}
}

#[test]
fn a_unit_is_looked_up_as_a_whole_if_enough_of_its_beginning_is_found() {
    let folder = tempfile::tempdir().unwrap();
    let region = region(&folder, "web.0.ram", 200);
    let pages = [PageRange::new(0, 200)];
    let unit = UnitPages { round: 0, block: 0, region: &region, pages: &pages, zeros: &[] };
    let packing = Packing { reference: Referring::ProbeFirst, ..Packing::default() };
    let arrived = self::region(&folder, "arrived", 200);
    let (near, far) = streams();
    let (mut sender, mut receiver) = (near.sender(), far.receiver());
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while let Ok(got) = receiver.receive() {
                if let Incoming::Pages(header) = got {
                    receiver.pages(&arrived, header).unwrap();
                }
            }
        });
        // 48 of 64 pages are found, then 47.
        for (known_from, looked_up, found) in [(16, 200, 184), (17, 64, 47)] {
            let known = KnowsFrom(known_from);
            let sent = sender.unit(&unit, packing, Some(&known)).unwrap();
            assert_eq!((sent.hashing.pages, sent.hashing.found), (looked_up, found));
            assert_eq!(sent.reference.pages, found);
        }
        let few = [PageRange::new(100, 3)];
        let sent = sender.unit(&UnitPages { pages: &few, ..unit }, packing, Some(&KnowsFrom(0)));
        assert_eq!(sent.unwrap().reference.pages, 3);
        let sent = sender.unit(&unit, packing, None).unwrap();
        assert_eq!((sent.hashing.pages, sent.raw.pages), (0, 200));
        near.close();
    });
}
