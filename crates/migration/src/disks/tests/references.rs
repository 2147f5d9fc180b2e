//! References: what the host has, lacks and changes meanwhile, and liars at both ends.

use godwit_wire::{DISK_UNIT_BYTES, DiskMissing, DiskReferences};
use proptest::prelude::*;

use super::*;

const UNIT: usize = DISK_UNIT_BYTES as usize;

/// Returns a host whose own images, one for each disk, have this content.
fn host_with(sizes: &[usize], own: Vec<Vec<u8>>) -> Arc<Host> {
    let images: Vec<_> = sizes.iter().map(|size| Arc::new(Image::new(*size))).collect();
    let reader = |image: Arc<Image>| image as Arc<dyn ImageReader>;
    let own = own.into_iter().map(|content| vec![reader(Arc::new(Image::with(content)))]);
    let arriving = images.iter().map(|image| reader(Arc::clone(image)));
    let lookup = Lookup::new(own.collect(), arriving.collect());
    Arc::new(Host::of(images, Some(lookup)))
}

fn whole(guest: &Guest) -> Vec<DiskRange> {
    let range = |(disk, content): (usize, &Vec<u8>)| DiskRange {
        disk,
        offset: 0,
        bytes: content.len() as u64,
    };
    guest.disks.lock().iter().enumerate().map(range).collect()
}

#[test]
fn content_that_the_host_has_is_not_sent() {
    let guest = Guest::new();
    let host = host_with(&SIZES, guest.disks.lock().clone());
    let mut streams = DiskStreams::new(TRANSFER, Compression::None);
    let receiving = add_streams(&mut streams, &guest, &host, 1..=3);
    streams.refer();
    let arrived = AtomicU64::new(0);
    let progress = |bytes| {
        arrived.fetch_add(bytes, Ordering::SeqCst);
    };
    let sent = streams.send_round(&all(), &progress, &AtomicBool::new(false)).unwrap();
    assert!(host.has_all_of(&guest));
    assert_eq!((sent.bytes, sent.resent_bytes), (total_bytes(&all()), 0));
    assert_eq!(arrived.into_inner(), sent.bytes);
    assert!(sent.referenced_bytes > sent.bytes / 2, "{sent:?}");
    assert!(sent.wire_bytes < 100_000, "{sent:?}");
    let by_disk = sent.by_disk.iter().map(|disk| disk.referenced_bytes);
    assert_eq!(by_disk.sum::<u64>(), sent.referenced_bytes);
    // What the guest writes later goes with its content.
    let later = DiskRange { disk: 1, offset: 1 << 20, bytes: 1 << 20 };
    guest.write(later, 3);
    let sent = streams.send_round(&[later], &|_| {}, &AtomicBool::new(false)).unwrap();
    assert_eq!((sent.bytes, sent.referenced_bytes), (later.bytes, 0));
    finish(&mut streams, &[], receiving);
    assert!(host.has_all_of(&guest));
}

#[test]
fn what_the_host_lacks_is_sent_in_the_same_round() {
    let guest = Guest::new();
    let mut own = guest.disks.lock().clone();
    // A byte of every fourth MiB differs, and an image is shorter.
    own[0].chunks_mut(4 << 20).for_each(|part| part[5] ^= 1);
    own[1].truncate(1 << 20);
    let host = host_with(&SIZES, own);
    let mut streams = DiskStreams::new(TRANSFER, Compression::None);
    let receiving = add_streams(&mut streams, &guest, &host, 1..=2);
    streams.refer();
    let sent = streams.send_round(&all(), &|_| {}, &AtomicBool::new(false)).unwrap();
    assert!(host.has_all_of(&guest));
    assert_eq!((sent.bytes, sent.resent_bytes), (total_bytes(&all()), 0));
    assert!(sent.referenced_bytes > 0 && sent.by_disk[1].referenced_bytes < 3 << 20, "{sent:?}");
    assert_eq!(merged(host.marked.lock().clone()), all());
    finish(&mut streams, &[], receiving);
}

#[test]
fn a_host_that_misses_what_was_not_named_ends_the_round() {
    let missing = |units, offset| Message::DiskMissing(DiskMissing { disk: 0, units, offset });
    // The first frame names units 0 to 2. What it misses of them, it may say once.
    let lies: [&[Message]; 4] = [
        &[missing(1, 1 << 30)],
        &[missing(1 << 3, 0)],
        &[missing(1, UNIT as u64)],
        &[missing(1, 0), missing(1, 0)],
    ];
    for lie in lies {
        let guest = Guest::new();
        let mut streams = DiskStreams::new(TRANSFER, Compression::None);
        let (near, far) = pair();
        let said = lie.to_vec();
        let lying = std::thread::spawn(move || {
            drop(welcome(far.clone(), TRANSFER, LIMIT).unwrap());
            let (mut sender, mut receiver) = (far.sender(), far.receiver());
            for message in &said {
                // The source may have closed the stream.
                let _ = sender.send(message);
            }
            while receiver.receive().is_ok() {}
        });
        streams.add(near, 1, Box::new(guest.clone())).unwrap();
        streams.refer();
        let cut = round(&mut streams, &all()).unwrap_err();
        assert_eq!(cut.failure.code, FailureCode::ProtocolBroken, "{lie:?}: {}", cut.failure);
        assert_eq!(merged(cut.unmarked), all());
        lying.join().unwrap();
    }
}

#[test]
fn a_source_that_names_hashes_of_nothing_gets_nothing() {
    let host = host_with(&SIZES, vec![vec![0; SIZES[0]], Vec::new()]);
    let named = |disk, offset, hashes: usize| {
        Message::DiskReferences(DiskReferences { disk, offset, hashes: vec![[9; 32]; hashes] })
    };
    let end = Message::DiskEnd { streams: 1, mark: 1 };
    let (ended, _) = lies_to(&host, 1, &[named(0, 0, 16), named(1, UNIT as u64, 2), end]);
    assert_eq!(ended, StreamEnd::Ended { streams: 1 });
    assert!(host.marked.lock().is_empty(), "nothing was written");
    // Beyond the end of a disk; no such disk; to a host that has offered nothing.
    let last = (SIZES[1] - UNIT) as u64;
    for (host, message) in
        [(&host, named(1, last, 2)), (&host, named(2, 0, 1)), (&Host::new(), named(0, 0, 1))]
    {
        let (ended, _) = lies_to(host, 1, std::slice::from_ref(&message));
        let StreamEnd::Broken(failure) = ended else { panic!("{message:?} was accepted") };
        assert_eq!(failure.code, FailureCode::ProtocolBroken);
    }
}

/// Returns a disk of units of these bytes, with some bytes behind them.
fn disk_of(units: &[u8], more: usize) -> Vec<u8> {
    let mut content: Vec<u8> = units.iter().flat_map(|byte| [*byte; UNIT]).collect();
    content.resize(content.len() + more, 6);
    content
}

fn units(most: usize) -> impl Strategy<Value = Vec<u8>> {
    prop::collection::vec(0..5_u8, 0..most)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Whatever the host has of its own, and wherever it breaks off, all arrives and nothing else.
    #[test]
    fn references_and_content_make_up_the_disks(
        disks in [(units(40), 0..3 * 512_usize), (units(40), 0..3 * 512_usize)],
        own in [(units(50), 0..3 * 512_usize), (units(50), 0..3 * 512_usize)],
        breaks_after in 0..6_usize,
    ) {
        let content = |all: &[(Vec<u8>, usize); 2]| -> Vec<Vec<u8>> {
            all.iter().map(|(units, more)| disk_of(units, 512 + more)).collect()
        };
        let guest = Guest::with(content(&disks));
        let sizes: Vec<usize> = guest.disks.lock().iter().map(Vec::len).collect();
        let host = host_with(&sizes, content(&own));
        host.breaks_after.store(breaks_after, Ordering::SeqCst);
        let mut streams = DiskStreams::new(TRANSFER, Compression::Lz4);
        let mut receiving = add_streams(&mut streams, &guest, &host, 1..=2);
        streams.refer();
        if let Err(cut) = round(&mut streams, &whole(&guest)) {
            for one in receiving {
                prop_assert!(matches!(one.join().unwrap(), StreamEnd::Broken(_)));
            }
            host.crash();
            host.breaks_after.store(NEVER, Ordering::SeqCst);
            streams = DiskStreams::new(TRANSFER, Compression::Lz4);
            receiving = add_streams(&mut streams, &guest, &host, 1..=2);
            streams.refer();
            round(&mut streams, &cut.unmarked).unwrap();
        }
        host.breaks_after.store(NEVER, Ordering::SeqCst);
        finish(&mut streams, &[], receiving);
        prop_assert!(host.has_all_of(&guest));
    }
}
