//! Peers that violate the protocol never harm the other end.

use std::sync::atomic::Ordering;
use std::sync::{Arc, mpsc};

use godwit_lanes::{Stream, connect};
use godwit_migration::Failure;
use godwit_migration::destination::Ending;
use godwit_migration::drive::{
    DestinationHypervisor, DestinationJob, Hello, MOST_DEVICE_STATE_BYTES, Offer, receive,
    say_hello, welcome,
};
use godwit_types::{FailureCode, Lane, Outcome};
use godwit_wire::{
    Begin, BlockRun, Codec, Encoding, MAX_DEVICE_STATE_CHUNK, Message, MigrationId, PageRun,
    PagesHeader, SUPPORTED, VersionRange, checksum,
};

use crate::fakes::FakeDestination;
use crate::ways::path;
use crate::world::{
    BLOCKS, HELLO, ID, LIMIT, SECOND, Twist, accept_one, loopback, lying_destination, migrate,
    regions, stream,
};

/// Runs a destination against a fake peer of this file.
pub(crate) fn lying_peer(speak: impl FnOnce(&Stream, Lane)) -> (Ending, Vec<&'static str>) {
    lying_peer_offered(Offer::default(), speak)
}

/// Runs such a destination that has other memory to offer.
pub(crate) fn lying_peer_offered(
    offer: Offer,
    speak: impl FnOnce(&Stream, Lane),
) -> (Ending, Vec<&'static str>) {
    let folder = tempfile::tempdir().unwrap();
    let (listener, lane) = path(loopback());
    let (peer, far) = stream(&listener, lane);
    let (log, logged) = mpsc::channel();
    let regions = regions(&folder, "to");
    let mut hypervisor = FakeDestination {
        state_bytes: Arc::default(),
        memory: None,
        load_fails: false,
        page_in: None,
        runs: Arc::default(),
        log,
    };
    let (_keep, cancel) = mpsc::channel();
    let ending = std::thread::scope(|scope| {
        let receiving = scope.spawn(|| {
            let (regions, cancel, offer) = (regions, cancel, offer);
            match welcome(far, ID, LIMIT) {
                Ok(control) => {
                    let accept = &|| accept_one(&listener);
                    let shadow = &mut hypervisor;
                    let job = DestinationJob {
                        control,
                        accept,
                        ownership: SECOND,
                        regions,
                        offer,
                        hypervisor: shadow,
                    };
                    match receive(job, &cancel).0 {
                        // Nothing continues it.
                        Ending::Cut(failure) => {
                            hypervisor.discard(&failure);
                            Ending::Discarded(failure)
                        }
                        other => other,
                    }
                }
                Err(failure) => Ending::Discarded(failure),
            }
        });
        speak(&peer, lane);
        peer.finish_sending();
        let ending = receiving.join().unwrap();
        peer.close();
        ending
    });
    // Whatever a source sends, its hypervisor reads one piece beyond the bound at most.
    let most = MOST_DEVICE_STATE_BYTES + u64::from(MAX_DEVICE_STATE_CHUNK);
    let read = hypervisor.state_bytes.load(Ordering::SeqCst);
    assert!(read <= most, "{read} bytes were read");
    (ending, logged.try_iter().collect())
}

pub(crate) fn refused_with(ending: Ending, code: FailureCode) {
    match ending {
        Ending::Discarded(failure) => assert_eq!(failure.code, code, "{failure}"),
        Ending::Cut(failure) => panic!("it waits: {failure}"),
        Ending::Runs => panic!("it runs"),
    }
}

#[test]
fn compressed_pages_that_hold_something_else_end_the_migration() {
    let (ending, logged) = lying_peer(|peer, lane| {
        say_hello(&mut peer.sender(), &mut peer.receiver(), HELLO).unwrap();
        let data = connect(lane, LIMIT).unwrap();
        let mut sender = data.sender();
        say_hello(&mut sender, &mut data.receiver(), Hello { stream: 1, ..HELLO }).unwrap();
        // The fields of four pages, and as their content the message that follows.
        let run = PageRun { block: 0, first: 0, count: 4 };
        let ping = Message::Ping { sent_ns: 0 };
        let mut content = Vec::new();
        ping.encode(&mut content);
        let encoding = Encoding::Compressed {
            codec: Codec::Zstd,
            bytes: u32::try_from(content.len()).unwrap(),
        };
        let sum = checksum(&content);
        sender.send(&Message::Pages(PagesHeader { round: 0, run, encoding, sum })).unwrap();
        sender.send(&ping).unwrap();
        let _ = peer.receiver().receive();
    });
    refused_with(ending, FailureCode::ProtocolBroken);
    assert_eq!(logged, ["discarded"]);
}

#[test]
fn a_peer_of_another_version_gets_an_error() {
    let (ending, logged) = lying_peer(|peer, _| {
        let versions = VersionRange { oldest: 900, newest: 901 };
        let answer =
            say_hello(&mut peer.sender(), &mut peer.receiver(), Hello { versions, ..HELLO })
                .unwrap_err();
        assert_eq!(answer.code, FailureCode::VersionMismatch);
        assert!(answer.detail.contains("900 to 901"), "{answer}");
    });
    refused_with(ending, FailureCode::VersionMismatch);
    assert_eq!(logged, [""; 0]);
}

#[test]
fn a_peer_with_another_migration_gets_an_error() {
    let (ending, _) = lying_peer(|peer, _| {
        let other = MigrationId([9; 16]);
        let answer = say_hello(
            &mut peer.sender(),
            &mut peer.receiver(),
            Hello { migration: other, ..HELLO },
        );
        assert_eq!(answer.unwrap_err().code, FailureCode::UnknownMigration);
    });
    refused_with(ending, FailureCode::UnknownMigration);
}

#[test]
fn pages_that_the_vm_does_not_have_end_the_lane() {
    for message in [
        Message::Zeros(godwit_wire::Zeros {
            round: 0,
            runs: vec![BlockRun { block: 0, first: BLOCKS[0] - 1, count: 2 }],
        }),
        Message::Zeros(godwit_wire::Zeros {
            round: 0,
            runs: vec![BlockRun { block: 7, first: 0, count: 1 }],
        }),
    ] {
        let (ending, logged) = lying_peer(|peer, lane| {
            say_hello(&mut peer.sender(), &mut peer.receiver(), HELLO).unwrap();
            let data = connect(lane, LIMIT).unwrap();
            let mut sender = data.sender();
            say_hello(&mut sender, &mut data.receiver(), Hello { stream: 1, ..HELLO }).unwrap();
            sender.send(&message).unwrap();
            // Until the peer has received it.
            let _ = peer.receiver().receive();
        });
        refused_with(ending, FailureCode::ProtocolBroken);
        assert_eq!(logged, ["discarded"]);
    }
}

/// Returns what the destination was prepared for.
fn begin() -> Begin {
    Begin {
        epoch: SECOND.epoch,
        incarnation: SECOND.incarnation.bits(),
        run: true,
        block_pages: BLOCKS.to_vec(),
    }
}

#[test]
fn a_lane_that_ends_before_the_commit_leaves_nothing() {
    let (ending, logged) = lying_peer(|peer, _| {
        let mut sender = peer.sender();
        say_hello(&mut sender, &mut peer.receiver(), HELLO).unwrap();
        sender.send(&Message::Begin(begin())).unwrap();
    });
    refused_with(ending, FailureCode::LaneLost);
    assert_eq!(logged, ["discarded"]);
}

#[test]
fn a_source_that_sends_device_state_without_end_is_refused_at_the_bound() {
    let (ending, logged) = lying_peer(|peer, _| {
        let mut sender = peer.sender();
        say_hello(&mut sender, &mut peer.receiver(), HELLO).unwrap();
        sender.send(&Message::Begin(begin())).unwrap();
        let piece = Message::DeviceState(vec![0; MAX_DEVICE_STATE_CHUNK as usize]);
        // After it has refused, the destination drops what comes for a while, or closes the stream.
        for _ in 0..2 * MOST_DEVICE_STATE_BYTES / u64::from(MAX_DEVICE_STATE_CHUNK) {
            if sender.send(&piece).is_err() {
                break;
            }
        }
    });
    refused_with(ending, FailureCode::ProtocolBroken);
    assert_eq!(logged, ["discarded"]);
}

#[test]
fn an_endless_device_state_ends_the_migration_and_keeps_the_guest() {
    let moved = migrate(Twist { writes_without_end: true, ..Twist::default() });
    assert_eq!(moved.result.outcome, Outcome::Failed);
    let failure = moved.result.failure.unwrap();
    assert_eq!(failure.code, FailureCode::HypervisorFailed, "{failure}");
    assert!(failure.detail.contains("device state"), "{failure}");
    assert_eq!(moved.guest.resumed.load(Ordering::SeqCst), 1, "the guest is paused");
    assert!(!moved.guest.released.load(Ordering::SeqCst));
    assert_eq!(moved.logged, ["discarded"]);
}

#[test]
fn a_peer_that_is_not_a_lane_is_recognized() {
    let (ending, _) = lying_peer(|peer, _| {
        let mut sender = peer.sender();
        sender.send(&Message::Ready).unwrap();
    });
    refused_with(ending, FailureCode::ProtocolBroken);
}

#[test]
fn an_unrequested_answer_ends_the_migration_and_keeps_the_guest() {
    let pong = Message::Pong { sent_ns: 0, answered_ns: 0 };
    for (flood, what) in [(pong, "Pong"), (Message::Ready, "Ready")] {
        let result = lying_destination(|control| {
            let (mut sender, mut receiver) = (control.sender(), control.receiver());
            receiver.receive().unwrap();
            sender.send(&Message::Welcome { version: SUPPORTED.newest }).unwrap();
            // Until the source closes the stream.
            while sender.send(&flood).is_ok() {}
        });
        assert_eq!(result.outcome, Outcome::Failed);
        let failure = result.failure.unwrap();
        assert_eq!(failure.code, FailureCode::ProtocolBroken, "{failure}");
        assert!(failure.detail.contains(what), "{failure}");
    }
}

#[test]
fn a_refusal_by_the_destination_is_reported_once() {
    let result = lying_destination(|control| {
        let (mut sender, mut receiver) = (control.sender(), control.receiver());
        receiver.receive().unwrap();
        sender.send(&Message::Welcome { version: SUPPORTED.newest }).unwrap();
        let refusal = Failure::new(FailureCode::MemoryFailed, "no memory is left").to_reason();
        while sender.send(&Message::Refused(refusal.clone())).is_ok() {}
    });
    assert_eq!(result.outcome, Outcome::Failed);
    assert_eq!(result.failure.unwrap().code, FailureCode::MemoryFailed);
}

#[test]
fn a_destination_that_misses_more_pages_than_there_are_numbers_ends_the_migration() {
    let result = lying_destination(|control| {
        let (mut sender, mut receiver) = (control.sender(), control.receiver());
        receiver.receive().unwrap();
        sender.send(&Message::Welcome { version: SUPPORTED.newest }).unwrap();
        // The protocol allows each of them; together they exceed a u64.
        let all = BlockRun { block: 0, first: 0, count: u64::MAX };
        sender.send(&Message::Missing { runs: vec![all, all] }).unwrap();
        // A source that ignores them pings forever.
        let limit = std::time::Instant::now() + LIMIT;
        while std::time::Instant::now() < limit && receiver.receive().is_ok() {}
    });
    assert_eq!(result.outcome, Outcome::Failed);
    assert_eq!(result.failure.unwrap().code, FailureCode::ProtocolBroken);
}
