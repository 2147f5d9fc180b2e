//! Pages sent as deltas: the guest arrives unchanged, whatever is lost on the way.

use godwit_lanes::connect;
use godwit_lanes::pacing::{MigrationPace, Pacing};
use godwit_migration::drive::{Deltas, Hello, References, say_hello};
use godwit_ram::PAGE_SIZE;
use godwit_types::{Compression, EncodingName, FailureCode, Outcome, RateLimit, ReferenceUse};
use godwit_wire::{Delta, Message};

use crate::lying::{lying_peer, refused_with};
use crate::world::{BLOCKS, HELLO, LIMIT, Moved, SECOND, Twist, migrate_paced};

const ALWAYS: Deltas = Deltas { cache_bytes: 16 << 20, always: true };

/// Returns a lane so slow that the guest's writes between rounds take longer than a switchover may.
fn slow() -> MigrationPace {
    Pacing::default().migration("48mbit".parse::<RateLimit>().unwrap())
}

fn moved_with(twist: Twist) -> Moved {
    let moved = migrate_paced(twist, &slow(), &|_, _| {});
    assert_eq!(moved.result.outcome, Outcome::Completed, "{:?}", moved.result.failure);
    assert!(moved.same_memory);
    moved
}

/// Returns the pages of an encoding, and the bytes that they took.
fn sent_as(moved: &Moved, name: EncodingName) -> (u64, u64) {
    let of_it = moved.result.encodings.iter().filter(|encoding| encoding.name == name);
    of_it.fold((0, 0), |sum, it| (sum.0 + it.pages, sum.1 + it.wire_bytes))
}

fn written_pages() -> u64 {
    BLOCKS.iter().map(|pages| pages - pages.div_ceil(4)).sum()
}

#[test]
fn slightly_changed_pages_are_sent_as_deltas() {
    for streams in [1, 3] {
        let moved = moved_with(Twist { deltas: ALWAYS, writes: 4, streams, ..Twist::default() });
        let (pages, bytes) = sent_as(&moved, EncodingName::Delta);
        // The first round after round 0 keeps what it sends; later rounds send deltas.
        assert!(pages >= 2 * written_pages(), "{pages} pages, {:?}", moved.result.rounds);
        assert!(bytes < pages * PAGE_SIZE / 20, "{bytes} bytes of {pages} pages");
        assert_eq!(moved.result.missing_pages, 0);
    }
}

#[test]
fn it_goes_together_with_references_and_codecs() {
    let own =
        References { by: ReferenceUse::Own, always: true, known_bytes: References::KNOWN_BYTES };
    for (references, compression) in [
        (own, Compression::Auto),
        (own, Compression::Lz4),
        (References::default(), Compression::Zstd),
    ] {
        let twist = Twist {
            references,
            compression,
            repeats: true,
            writes: 3,
            streams: 2,
            ..Twist::default()
        };
        let moved = moved_with(Twist { deltas: ALWAYS, ..twist });
        assert!(sent_as(&moved, EncodingName::Delta).0 > 0, "{:?}", moved.result.encodings);
    }
}

#[test]
fn too_small_a_cache_serves_the_pages_that_it_holds() {
    let deltas = Deltas { cache_bytes: 1 << 20, ..ALWAYS };
    let moved = moved_with(Twist { deltas, writes: 4, ..Twist::default() });
    let (pages, _) = sent_as(&moved, EncodingName::Delta);
    assert!(pages > 0 && pages < 2 * written_pages(), "{pages}");
    assert_eq!(moved.result.missing_pages, 0);
    let off = Deltas { cache_bytes: 0, ..ALWAYS };
    assert_eq!(
        sent_as(
            &moved_with(Twist { deltas: off, writes: 2, ..Twist::default() }),
            EncodingName::Delta
        )
        .0,
        0
    );
}

#[test]
fn pages_of_a_broken_stream_still_arrive() {
    for cut in [1, 2] {
        moved_with(Twist { deltas: ALWAYS, writes: 4, streams: 3, cut, ..Twist::default() });
    }
}

#[test]
fn a_delta_of_what_is_not_there_leaves_the_page_missing() {
    let (ending, logged) = lying_peer(|peer, lane| {
        let mut control = peer.sender();
        let mut answers = peer.receiver();
        say_hello(&mut control, &mut answers, HELLO).unwrap();
        let begin = godwit_wire::Begin {
            epoch: 2,
            incarnation: SECOND.incarnation.bits(),
            run: true,
            block_pages: BLOCKS.to_vec(),
        };
        control.send(&Message::Begin(begin)).unwrap();
        let data = connect(lane, LIMIT).unwrap();
        let mut sender = data.sender();
        say_hello(&mut sender, &mut data.receiver(), Hello { stream: 1, ..HELLO }).unwrap();
        // LZ4: a literal zero, then a match that repeats it to the page's end.
        let mut packed = vec![0x1f, 0, 1, 0];
        let (mut left, last) = (4096 - 1 - 19 - 5, [0x50, 0, 0, 0, 0, 0]);
        while left >= 255 {
            packed.push(255);
            left -= 255;
        }
        packed.push(u8::try_from(left).unwrap());
        packed.extend(last);
        let delta = Delta { round: 1, block: 0, first: 5, bases: vec![77], packed };
        sender.send(&Message::Delta(delta)).unwrap();
        sender.send(&Message::UnitEnd).unwrap();
        control
            .send(&Message::PagesEnd(godwit_wire::PagesEnd { pages: 1, units: vec![1] }))
            .unwrap();
        while let Ok(godwit_lanes::Incoming::Message(message)) = answers.receive() {
            match message {
                Message::Missing { runs } => {
                    assert_eq!((runs[0].block, runs[0].first, runs[0].count), (0, 5, 1));
                }
                Message::Refused(_) => break,
                _ => {}
            }
        }
    });
    refused_with(ending, FailureCode::ProtocolBroken);
    assert_eq!(logged, ["discarded"]);
}

#[test]
fn deltas_beyond_the_guest_or_of_garbage_end_the_migration() {
    for (first, packed) in [(BLOCKS[0] - 1, vec![0; 8]), (3, vec![0xff; 100])] {
        let (ending, _) = lying_peer(|peer, lane| {
            say_hello(&mut peer.sender(), &mut peer.receiver(), HELLO).unwrap();
            let data = connect(lane, LIMIT).unwrap();
            let mut sender = data.sender();
            say_hello(&mut sender, &mut data.receiver(), Hello { stream: 1, ..HELLO }).unwrap();
            let delta =
                Delta { round: 0, block: 0, first, bases: vec![1; 2], packed: packed.clone() };
            sender.send(&Message::Delta(delta)).unwrap();
            let _ = peer.receiver().receive();
        });
        refused_with(ending, FailureCode::ProtocolBroken);
    }
}
