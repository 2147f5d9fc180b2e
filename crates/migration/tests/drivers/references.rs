//! Pages sent by reference: the guest arrives unchanged, whatever the destination holds or claims.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use godwit_lanes::pacing::Pacing;
use godwit_lanes::{Incoming, accept, connect};
use godwit_migration::drive::{Beside, Hello, Offer, References, SourceResult, say_hello, welcome};
use godwit_migration::reference::{Arrivals, Content, DIGEST_PAGES};
use godwit_ram::{PAGE_SIZE, Region};
use godwit_types::{Compression, EncodingName, FailureCode, Outcome, RateLimit, ReferenceUse};
use godwit_wire::{BlockRun, Digests, Message, Place, prefix};

use crate::lying::{lying_peer, lying_peer_offered, refused_with};
use crate::world::{
    BLOCKS, HELLO, ID, LIMIT, Moved, SECOND, Twist, World, fill, migrate_offered, regions, stream,
};

pub(crate) const ALL: References =
    References { by: ReferenceUse::All, always: true, known_bytes: References::KNOWN_BYTES };

/// Returns the memory of an earlier guest at the destination, with its digests.
fn content(regions: &[Arc<Region>]) -> Arc<Content> {
    let content = Content::of(regions).unwrap();
    for (block, piece) in content.pieces() {
        content.digests(block, piece).unwrap();
    }
    Arc::new(content)
}

pub(crate) fn offer(contents: Vec<Arc<Content>>) -> Offer {
    let most = 1 << 20;
    Offer { contents, most_pages: most, most_disk_pages: most, first_pages: most, beside: None }
}

pub(crate) fn migrate_to(twist: Twist, offer: &Offer) -> Moved {
    let pace = Pacing::default().migration(RateLimit::NONE);
    let moved = migrate_offered(twist, &pace, &|_, _| {}, offer.clone());
    assert_eq!(moved.result.outcome, Outcome::Completed, "{:?}", moved.result.failure);
    assert!(moved.same_memory);
    let pages: u64 = moved.result.encodings.iter().map(|encoding| encoding.pages).sum();
    assert!(pages > BLOCKS.iter().sum::<u64>());
    moved
}

pub(crate) fn pages_by(moved: &Moved, name: EncodingName) -> u64 {
    moved
        .result
        .encodings
        .iter()
        .filter(|encoding| encoding.name == name)
        .map(|encoding| encoding.pages)
        .sum()
}

/// Returns the number of the guest's pages that hold data, each different.
pub(crate) fn guests_pages() -> u64 {
    BLOCKS.iter().map(|pages| pages - pages.div_ceil(3)).sum()
}

#[test]
fn the_return_path_carries_almost_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let before = regions(&folder, "before");
    fill(&before);
    for streams in [1, 3] {
        let twist = Twist { references: ALL, streams, ..Twist::default() };
        let moved = migrate_to(twist, &offer(vec![content(&before)]));
        // All except the page that a device wrote while the guest was paused.
        assert_eq!(pages_by(&moved, EncodingName::Reference), guests_pages());
        assert_eq!((pages_by(&moved, EncodingName::Raw), moved.result.missing_pages), (1, 0));
        // For the next return.
        assert_eq!(moved.hashed_pages as u64, guests_pages() - 1);
        let sent: u64 = moved.result.encodings.iter().map(|encoding| encoding.wire_bytes).sum();
        assert!(sent < guests_pages() * PAGE_SIZE / 20, "{:?}", moved.result.encodings);
    }
}

#[test]
fn another_guests_memory_serves_as_well() {
    let folder = tempfile::tempdir().unwrap();
    let before = regions(&folder, "before");
    fill(&before);
    // Another guest: of another size, with the same pages elsewhere, and the second of two.
    let path = folder.path().join("other");
    let other = [Arc::new(Region::create(&path, 3000 * PAGE_SIZE, None).unwrap())];
    let mut page = [0; 4096];
    for number in 0..BLOCKS[0] {
        before[0].copy_out(number * PAGE_SIZE, &mut page).unwrap();
        other[0].copy_in((2000 + number) * PAGE_SIZE, &page).unwrap();
    }
    let empty = regions(&folder, "empty");
    let moved = migrate_to(
        Twist { references: ALL, compression: Compression::Lz4, ..Twist::default() },
        &offer(vec![content(&empty), content(&other)]),
    );
    let found = pages_by(&moved, EncodingName::Reference);
    assert!(found >= BLOCKS[0] - BLOCKS[0].div_ceil(3) && found < guests_pages(), "{found}");
    assert!(pages_by(&moved, EncodingName::Lz4) > 0);
}

#[test]
fn content_that_has_changed_is_asked_for() {
    let folder = tempfile::tempdir().unwrap();
    let before = regions(&folder, "before");
    fill(&before);
    let content = content(&before);
    // Written by its guest, which runs on, since then: whole pages, and one byte of a page.
    before[0].copy_in(100 * PAGE_SIZE, &[9; 30 * 4096]).unwrap();
    before[1].copy_in(44 * PAGE_SIZE + 17, &[1]).unwrap();
    for streams in [1, 4] {
        let twist = Twist { references: ALL, streams, ..Twist::default() };
        let moved = migrate_to(twist, &offer(vec![Arc::clone(&content)]));
        assert_eq!(moved.result.missing_pages, 21);
        assert_eq!(pages_by(&moved, EncodingName::Reference), guests_pages());
        assert_eq!(
            pages_by(&moved, EncodingName::Raw),
            22,
            "what was missing, and the device's page"
        );
    }
}

#[test]
fn content_that_is_gone_is_requested() {
    let folder = tempfile::tempdir().unwrap();
    let before = regions(&folder, "before");
    fill(&before);
    let content = content(&before);
    content.empty(1 << 20).unwrap();
    for cut in [0, 3] {
        let twist = Twist { references: ALL, streams: 4, cut, ..Twist::default() };
        let moved = migrate_to(twist, &offer(vec![Arc::clone(&content)]));
        assert!(moved.result.missing_pages >= guests_pages());
    }
}

/// Checks the way back to memory of which only a part was retained.
#[test]
fn pages_that_were_not_retained_are_sent() {
    let folder = tempfile::tempdir().unwrap();
    let before = regions(&folder, "before");
    fill(&before);
    let last_block = BLOCKS.len() - 1;
    let last = BLOCKS[last_block] - BLOCKS[last_block].div_ceil(3);
    let content = content(&before);
    content.shrink(content.taken_bytes() - 1).unwrap();
    let moved = migrate_to(Twist { references: ALL, ..Twist::default() }, &offer(vec![content]));
    assert_eq!(moved.result.missing_pages, 0, "nothing is known of what was given up");
    let found = pages_by(&moved, EncodingName::Reference);
    assert!(found > 0 && found <= guests_pages() - last, "{found}");
    let by_content = [EncodingName::Raw, EncodingName::Lz4, EncodingName::Zstd];
    assert!(by_content.map(|name| pages_by(&moved, name)).iter().sum::<u64>() >= last);
}

#[test]
fn a_guests_own_pages_are_sent_once() {
    for streams in [1, 3] {
        let own = References { by: ReferenceUse::Own, ..ALL };
        let moved = migrate_to(
            Twist { references: own, repeats: true, streams, ..Twist::default() },
            &Offer::default(),
        );
        let found = pages_by(&moved, EncodingName::Reference);
        assert!(found > BLOCKS.iter().sum::<u64>() / 20, "{found}");
        assert_eq!(
            moved.result.missing_pages, 0,
            "what is on its way elsewhere is not referred to"
        );
    }
}

#[test]
fn all_offers_are_sent_before_the_begin_or_after() {
    const PIECES: u64 = 40;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("large");
    let region =
        [Arc::new(Region::create(&path, PIECES * DIGEST_PAGES * PAGE_SIZE, None).unwrap())];
    for piece in 0..PIECES {
        region[0].copy_in((piece * DIGEST_PAGES + piece) * PAGE_SIZE, &[7; 4096]).unwrap();
    }
    let digest = prefix(&godwit_lanes::hash_page(&[7; 4096]));
    for (first_pages, most_pages) in
        [(0, 1 << 20), (3 * DIGEST_PAGES, 1 << 20), (0, 30 * DIGEST_PAGES)]
    {
        let offer = Offer { most_pages, first_pages, ..offer(vec![content(&region)]) };
        let expected = PIECES.min(most_pages / DIGEST_PAGES);
        lying_peer_offered(offer, |peer, _| {
            let (mut sender, mut answers) = (peer.sender(), peer.receiver());
            say_hello(&mut sender, &mut answers, HELLO).unwrap();
            let begin = godwit_wire::Begin {
                epoch: 2,
                incarnation: SECOND.incarnation.bits(),
                run: true,
                block_pages: BLOCKS.to_vec(),
            };
            sender.send(&Message::Begin(begin)).unwrap();
            let (mut announced, mut before) = (Vec::new(), None);
            while (announced.len() as u64) < expected || before.is_none() {
                match answers.receive().unwrap() {
                    Incoming::Message(Message::Ready) => before = Some(announced.len() as u64),
                    Incoming::Message(Message::Digests(Digests { place, prefixes })) => {
                        assert_eq!((place.content, place.block), (1, 0));
                        let found: Vec<_> =
                            (place.page..).zip(prefixes).filter(|(_, it)| *it != 0).collect();
                        announced.extend(found);
                    }
                    other => panic!("{other:?}"),
                }
            }
            let at = |piece: u64| (piece * DIGEST_PAGES + piece, digest);
            assert_eq!(announced, (0..expected).map(at).collect::<Vec<_>>());
            assert_eq!(before, Some(first_pages / DIGEST_PAGES));
        });
    }
}

/// Checks the announcement of another guest's content that arrives at the same time, before this
/// one begins and after.
#[test]
fn arrivals_of_other_guests_are_reported_as_they_come() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("other");
    let region = [Arc::new(Region::create(&path, 8 * DIGEST_PAGES * PAGE_SIZE, None).unwrap())];
    let arriving = || Arc::new(Content::of_arriving(&region).unwrap());
    let (early, late, own) = (arriving(), arriving(), arriving());
    let arrivals = Arc::new(Arrivals::default());
    arrivals.begin(&early);
    let come = |content: &Content, piece: u64| {
        region[0].copy_in(piece * DIGEST_PAGES * PAGE_SIZE, &[9; 4096]).unwrap();
        content.note_arrival(0, piece * DIGEST_PAGES + 5, false);
        // It arrives once.
        content.note_arrival(0, piece * DIGEST_PAGES, false);
    };
    come(&early, 3);
    let before = content(&region);
    let beside = Some(Beside::begin(&arrivals, Arc::clone(&own)));
    let offer = Offer { first_pages: 0, beside, ..offer(vec![before]) };
    lying_peer_offered(offer, |peer, _| {
        let (mut sender, mut answers) = (peer.sender(), peer.receiver());
        say_hello(&mut sender, &mut answers, HELLO).unwrap();
        let begin = godwit_wire::Begin {
            epoch: 2,
            incarnation: SECOND.incarnation.bits(),
            run: true,
            block_pages: BLOCKS.to_vec(),
        };
        sender.send(&Message::Begin(begin)).unwrap();
        let mut next = || loop {
            match answers.receive().unwrap() {
                Incoming::Message(Message::Digests(Digests { place, .. })) if place.content > 1 => {
                    return (place.content, place.page / DIGEST_PAGES);
                }
                Incoming::Message(Message::Digests(_) | Message::Ready) => {}
                other => panic!("{other:?}"),
            }
        };
        assert_eq!(next(), (2, 3));
        come(&early, 6);
        assert_eq!(next(), (2, 6));
        arrivals.begin(&late);
        come(&own, 1);
        come(&late, 0);
        assert_eq!(next(), (3, 0), "what the guest has brought itself is its source's own");
    });
}

/// Checks a guest that refers to another guest's content, whatever that has become meanwhile: it
/// may have changed since, or be gone.
#[test]
fn a_guest_arrives_whole_beside_another_one() {
    let arrivals = Arc::new(Arrivals::default());
    let folder = tempfile::tempdir().unwrap();
    let shadow = regions(&folder, "shadow");
    let other = Arc::new(Content::of_arriving(&shadow).unwrap());
    arrivals.begin(&other);
    fill(&shadow);
    for (block, piece) in other.pieces() {
        other.note_arrival(block, piece.first, false);
    }
    let own = Arc::new(Content::of(&regions(&folder, "own")).unwrap());
    let beside = Some(Beside::begin(&arrivals, own));
    for change in [false, true] {
        if change {
            other.pieces().for_each(|(block, piece)| drop(other.digests(block, piece).unwrap()));
            other.empty(1 << 20).unwrap();
        }
        migrate_to(
            Twist { references: ALL, ..Twist::default() },
            &Offer { beside: beside.clone(), ..offer(Vec::new()) },
        );
    }
}

/// Runs a source against a fake destination. That one welcomes all streams, sends `answers` before
/// it is ready, and then answers each unit with the result of `after_a_unit`.
fn lied_to(answers: &[Message], after_a_unit: impl Fn(u64) -> Vec<Message> + Sync) -> SourceResult {
    let (twist, folder) =
        (Twist { references: ALL, ..Twist::default() }, tempfile::tempdir().unwrap());
    let world = World::new(twist);
    let (control, far) = stream(&world.listener, world.lane);
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let control = far.clone();
            welcome(far, ID, LIMIT).unwrap();
            let (mut sender, mut receiver) = (control.sender(), control.receiver());
            assert!(matches!(receiver.receive().unwrap(), Incoming::Message(Message::Begin(_))));
            answers
                .iter()
                .chain([&Message::Ready])
                .for_each(|message| sender.send(message).unwrap());
            // A source that has already given up opens no stream, or closes it.
            let data = loop {
                match accept(std::slice::from_ref(&world.listener), Duration::from_millis(10)) {
                    Ok(Some(data)) => break data,
                    Ok(None) if !over.load(Ordering::SeqCst) => {}
                    _ => return,
                }
            };
            if welcome(data.clone(), ID, LIMIT).is_err() {
                return;
            }
            let mut data = data.receiver();
            let sink = regions(&folder, "sink");
            let mut units = 0;
            // Until the source closes it.
            while let Ok(incoming) = data.receive() {
                match incoming {
                    Incoming::Pages(header) => {
                        if data.pages(&sink[usize::from(header.run.block)], header).is_err() {
                            return;
                        }
                    }
                    Incoming::Message(Message::UnitEnd) => {
                        units += 1;
                        for message in after_a_unit(units) {
                            let _ = sender.send(&message);
                        }
                    }
                    Incoming::Message(_) => {}
                }
            }
        });
        let pace = Pacing::default().migration(RateLimit::NONE);
        let result = world.send(scope, control, twist, &pace, &|_, _| {}, None).0;
        over.store(true, Ordering::SeqCst);
        result
    })
}

fn broken_by(result: &SourceResult, what: &str) {
    let failure = result.failure.as_ref().unwrap();
    assert_eq!(
        (result.outcome, failure.code),
        (Outcome::Failed, FailureCode::ProtocolBroken),
        "{failure}"
    );
    assert!(failure.detail.contains(what), "{failure}");
}

#[test]
fn a_destination_that_misses_pages_outside_the_guest_is_refused() {
    for (block, first, count) in
        [(0, BLOCKS[0] - 1, 2), (2, 0, 1), (0, u64::MAX - 3, 3), (0, 0, 1 << 40)]
    {
        let result = lied_to(&[], |_| {
            vec![Message::Missing { runs: vec![BlockRun { block, first, count }] }]
        });
        broken_by(&result, "misses pages");
    }
}

#[test]
fn a_destination_cannot_miss_unsent_pages() {
    let result = lied_to(
        &[Message::Missing { runs: vec![BlockRun { block: 0, first: 1, count: 1 }] }],
        |_| vec![],
    );
    broken_by(&result, "misses pages");
}

#[test]
fn a_destination_that_claims_the_guests_own_pages_is_refused() {
    let place = Place { content: 0, block: 0, page: 0 };
    let result = lied_to(&[Message::Digests(Digests { place, prefixes: vec![7] })], |_| vec![]);
    broken_by(&result, "content");
}

#[test]
fn a_source_that_never_sends_missing_pages_starts_no_guest() {
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
        for place in
            [Place { content: 9, block: 0, page: 0 }, Place { content: 0, block: 1, page: 1 << 60 }]
        {
            let hashes = vec![[3; 32]; 2];
            let references =
                godwit_wire::References { round: 0, block: 0, first: 5, place, hashes };
            sender.send(&Message::References(references)).unwrap();
        }
        sender.send(&Message::UnitEnd).unwrap();
        let end = godwit_wire::PagesEnd { pages: 4, units: vec![1] };
        control.send(&Message::PagesEnd(end)).unwrap();
        let mut missing = Vec::new();
        while let Ok(Incoming::Message(message)) = answers.receive() {
            match message {
                Message::Missing { runs } => missing.extend(runs),
                Message::Refused(_) => break,
                _ => {}
            }
        }
        assert!(
            missing.iter().all(|run| (run.block, run.first, run.count) == (0, 5, 2)),
            "{missing:?}"
        );
    });
    refused_with(ending, FailureCode::ProtocolBroken);
    assert_eq!(logged, ["discarded"]);
}

#[test]
fn references_beyond_the_guest_end_the_migration() {
    let (ending, _) = lying_peer(|peer, lane| {
        say_hello(&mut peer.sender(), &mut peer.receiver(), HELLO).unwrap();
        let data = connect(lane, LIMIT).unwrap();
        let mut sender = data.sender();
        say_hello(&mut sender, &mut data.receiver(), Hello { stream: 1, ..HELLO }).unwrap();
        let place = Place { content: 1, block: 0, page: 0 };
        let hashes = vec![[3; 32]; 2];
        let references =
            godwit_wire::References { round: 0, block: 0, first: BLOCKS[0] - 1, place, hashes };
        sender.send(&Message::References(references)).unwrap();
        let _ = peer.receiver().receive();
    });
    refused_with(ending, FailureCode::ProtocolBroken);
}

#[test]
fn a_false_digest_costs_only_one_page() {
    // The destination claims to hold a page of the guest's in content with another hash.
    let folder = tempfile::tempdir().unwrap();
    let from = regions(&folder, "from");
    fill(&from);
    let mut page = [0; 4096];
    from[0].copy_out(PAGE_SIZE, &mut page).unwrap();
    let place = Place { content: 1, block: 0, page: 3 };
    let digests = Message::Digests(Digests {
        place,
        prefixes: vec![prefix(&godwit_lanes::hash_page(&page))],
    });
    let result = lied_to(&[digests], |units| match units {
        1 => vec![
            Message::Missing { runs: vec![BlockRun { block: 0, first: 1, count: 1 }] },
            Message::UnitsApplied { stream: 1, units },
            Message::Abort(godwit_wire::Reason { code: 1, detail: String::new() }),
        ],
        _ => vec![],
    });
    assert_eq!(result.missing_pages, 1);
}
