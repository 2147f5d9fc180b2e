//! Transfers in memory over real sockets, with streams that break and sources that lie.

mod references;

use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Barrier};
use std::thread::JoinHandle;
use std::time::Duration;

use godwit_lanes::{Incoming, Stream, connect};
use godwit_types::{Compression, Lane};
use godwit_wire::{
    Codec, DiskBlocks, DiskBlocksHeader, DiskZeros, Message, MigrationId, Reason, SUPPORTED,
};
use parking_lot::Mutex;

use super::marks::MOST_UNMARKED_RANGES;
use super::range::{CHUNK_BYTES, merged, total_bytes};
use super::{
    DiskRange, DiskReader, DiskStreams, DiskWriter, ImageReader, Lookup, RoundCut, StreamEnd,
    receive_disks,
};
use crate::drive::welcome;
use crate::failure::{Failure, FailureCode};

const LIMIT: Duration = Duration::from_secs(60);
const TRANSFER: MigrationId = MigrationId([7; 16]);
const SIZES: [usize; 2] = [(17 << 20) + 4096, 5 << 20];
const NEVER: usize = usize::MAX;

/// Disks of the guest.
#[derive(Clone)]
struct Guest {
    disks: Arc<Mutex<Vec<Vec<u8>>>>,
    reads: Arc<AtomicUsize>,
    /// Read with which the disks fail, and read with which `interrupt` is set.
    fails_at: usize,
    interrupts_at: usize,
    interrupt: Arc<AtomicBool>,
    /// Makes the first read of each stream wait for those of the others.
    all_begin: Option<Arc<Barrier>>,
}

impl Guest {
    /// Creates disks with content that compresses, content that does not, and zeros.
    fn new() -> Guest {
        let mut noise = 1_u64;
        let disks = SIZES.map(|size| {
            let mut disk = vec![0; size];
            for (number, block) in disk.chunks_mut(96 << 10).enumerate() {
                for (place, byte) in block.iter_mut().enumerate() {
                    noise = noise.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    *byte = match number % 3 {
                        0 => (noise >> 56) as u8,
                        1 => (place / 500).to_le_bytes()[0],
                        _ => 0,
                    };
                }
            }
            disk
        });
        Guest::with(disks.into())
    }

    fn with(disks: Vec<Vec<u8>>) -> Guest {
        Guest {
            disks: Arc::new(Mutex::new(disks)),
            reads: Arc::default(),
            fails_at: NEVER,
            interrupts_at: NEVER,
            interrupt: Arc::default(),
            all_begin: None,
        }
    }

    fn write(&self, range: DiskRange, byte: u8) {
        let (from, to) = (place(range.offset), place(range.end()));
        self.disks.lock()[range.disk][from..to].fill(byte);
    }
}

fn place(offset: u64) -> usize {
    usize::try_from(offset).unwrap()
}

impl DiskReader for Guest {
    fn read_at(&mut self, disk: usize, at: u64, buffer: &mut [u8]) -> Result<(), Failure> {
        if let Some(barrier) = self.all_begin.take() {
            barrier.wait();
        }
        let read = self.reads.fetch_add(1, Ordering::SeqCst);
        if read >= self.fails_at {
            return Err(Failure::new(FailureCode::DiskFailed, "the image cannot be read"));
        }
        if read == self.interrupts_at {
            self.interrupt.store(true, Ordering::SeqCst);
        }
        let at = place(at);
        buffer.copy_from_slice(&self.disks.lock()[disk][at..at + buffer.len()]);
        Ok(())
    }
}

/// Disk whose cache is volatile until it is flushed.
struct Image {
    durable: Mutex<Vec<u8>>,
    cached: Mutex<Vec<(usize, Vec<u8>)>>,
    /// Bytes for which there is room.
    room: AtomicU64,
}

impl Image {
    fn new(size: usize) -> Image {
        Image::with(vec![0; size])
    }

    fn with(content: Vec<u8>) -> Image {
        Image {
            durable: Mutex::new(content),
            cached: Mutex::default(),
            room: AtomicU64::new(u64::MAX),
        }
    }
}

impl DiskWriter for Image {
    fn write_at(&self, at: u64, bytes: &[u8]) -> Result<(), Failure> {
        let length = bytes.len() as u64;
        let takes = |room: u64| room.checked_sub(length);
        if self.room.fetch_update(Ordering::SeqCst, Ordering::SeqCst, takes).is_err() {
            return Err(Failure::new(FailureCode::DiskFailed, "no space is left in /srv"));
        }
        self.cached.lock().push((place(at), bytes.to_vec()));
        Ok(())
    }

    fn write_zeros(&self, at: u64, bytes: u64) -> Result<(), Failure> {
        self.cached.lock().push((place(at), vec![0; place(bytes)]));
        Ok(())
    }

    fn flush(&self) -> Result<(), Failure> {
        let mut durable = self.durable.lock();
        for (at, bytes) in self.cached.lock().drain(..) {
            durable[at..at + bytes.len()].copy_from_slice(&bytes);
        }
        Ok(())
    }
}

impl ImageReader for Image {
    fn read_at(&self, at: u64, buffer: &mut [u8]) -> Result<(), Failure> {
        let (from, end) = (place(at), place(at) + buffer.len());
        let durable = self.durable.lock();
        let beyond = || Failure::new(FailureCode::DiskFailed, "beyond the end of the image");
        buffer.copy_from_slice(durable.get(from..end).ok_or_else(beyond)?);
        for (at, bytes) in self.cached.lock().iter() {
            let (first, behind) = (from.max(*at), end.min(at + bytes.len()));
            if first < behind {
                buffer[first - from..behind - from]
                    .copy_from_slice(&bytes[first - at..behind - at]);
            }
        }
        Ok(())
    }
}

/// Host to which the disks go.
struct Host {
    images: Vec<Arc<Image>>,
    /// What the source can refer to.
    lookup: Option<Lookup>,
    marked: Mutex<Vec<DiskRange>>,
    /// Marks of all streams after which the host breaks off.
    breaks_after: AtomicUsize,
}

impl Host {
    fn new() -> Arc<Host> {
        Arc::new(Host::of(SIZES.map(|size| Arc::new(Image::new(size))).to_vec(), None))
    }

    fn of(images: Vec<Arc<Image>>, lookup: Option<Lookup>) -> Host {
        Host { images, lookup, marked: Mutex::default(), breaks_after: AtomicUsize::new(NEVER) }
    }

    fn receive(&self, far: Stream) -> StreamEnd {
        let writers = self.images.iter().map(|image| Arc::clone(image) as Arc<dyn DiskWriter>);
        let sizes = self.images.iter().map(|image| image.durable.lock().len() as u64);
        let sizes: Vec<u64> = sizes.collect();
        let marked = |ranges: &[DiskRange]| {
            let left = |left: usize| left.checked_sub(1);
            if self.breaks_after.fetch_update(Ordering::SeqCst, Ordering::SeqCst, left).is_err() {
                return Err(Failure::new(FailureCode::LaneLost, "the host goes away"));
            }
            self.marked.lock().extend(ranges);
            Ok(())
        };
        let welcomed = welcome(far, TRANSFER, LIMIT).unwrap();
        let writers: Vec<_> = writers.collect();
        receive_disks(welcomed, &writers, &sizes, self.lookup.as_ref(), &marked)
    }

    /// Loses what was not flushed.
    fn crash(&self) {
        self.images.iter().for_each(|image| image.cached.lock().clear());
    }

    fn has_all_of(&self, guest: &Guest) -> bool {
        let disks = guest.disks.lock();
        self.images.iter().zip(&*disks).all(|(image, disk)| *image.durable.lock() == *disk)
    }
}

fn socket_pair() -> (Stream, TcpStream) {
    let listener = TcpListener::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).unwrap();
    let lane = Lane { from: None, to: listener.local_addr().unwrap() };
    (connect(lane, LIMIT).unwrap(), listener.accept().unwrap().0)
}

fn pair() -> (Stream, Stream) {
    let (near, far) = socket_pair();
    (near, Stream::new(far).unwrap())
}

type Receiving = Vec<JoinHandle<StreamEnd>>;

fn add_streams(
    streams: &mut DiskStreams,
    guest: &Guest,
    host: &Arc<Host>,
    numbers: std::ops::RangeInclusive<u16>,
) -> Receiving {
    let add = |number| {
        let ((near, far), host) = (pair(), Arc::clone(host));
        let receiving = std::thread::spawn(move || host.receive(far));
        streams.add(near, number, Box::new(guest.clone())).unwrap();
        receiving
    };
    numbers.map(add).collect()
}

fn all() -> Vec<DiskRange> {
    let range = |(disk, size): (usize, usize)| DiskRange { disk, offset: 0, bytes: size as u64 };
    SIZES.into_iter().enumerate().map(range).collect()
}

fn round(streams: &mut DiskStreams, ranges: &[DiskRange]) -> Result<u64, RoundCut> {
    let arrived = AtomicU64::new(0);
    let progress = |bytes| {
        arrived.fetch_add(bytes, Ordering::SeqCst);
    };
    streams.send_round(ranges, &progress, &AtomicBool::new(false))?;
    Ok(arrived.into_inner())
}

fn finish(streams: &mut DiskStreams, ranges: &[DiskRange], receiving: Receiving) {
    let live = u16::try_from(streams.live()).unwrap();
    streams.send_last(ranges).unwrap();
    streams.confirmed().unwrap();
    for one in receiving {
        assert_eq!(one.join().unwrap(), StreamEnd::Ended { streams: live });
    }
}

#[test]
fn disks_arrive_with_every_compression() {
    let all_of_them = [Compression::Auto, Compression::None, Compression::Lz4, Compression::Zstd];
    for compression in all_of_them {
        let (guest, host) = (Guest::new(), Host::new());
        let mut streams = DiskStreams::new(TRANSFER, compression);
        let receiving = add_streams(&mut streams, &guest, &host, 1..=3);
        assert_eq!(round(&mut streams, &all()).unwrap(), total_bytes(&all()));
        assert!(host.has_all_of(&guest), "{compression:?}");
        assert_eq!(merged(host.marked.lock().clone()), all());
        let later = [
            DiskRange { disk: 0, offset: 512, bytes: 100_000 },
            DiskRange { disk: 1, offset: 3 << 20, bytes: 2 << 20 },
        ];
        later.iter().for_each(|range| guest.write(*range, 9));
        assert_eq!(round(&mut streams, &later).unwrap(), total_bytes(&later));
        assert_eq!(round(&mut streams, &[]).unwrap(), 0);
        guest.write(later[1], 0);
        finish(&mut streams, &later[1..], receiving);
        assert!(host.has_all_of(&guest), "{compression:?}");
    }
}

#[test]
fn a_round_counts_what_it_sent() {
    let (guest, host) = (Guest::new(), Host::new());
    let mut streams = DiskStreams::new(TRANSFER, Compression::Zstd);
    let receiving = add_streams(&mut streams, &guest, &host, 1..=2);
    let sent = streams.send_round(&all(), &|_| {}, &AtomicBool::new(false)).unwrap();
    let sizes = SIZES.map(|size| size as u64);
    assert_eq!((sent.bytes, sent.resent_bytes), (sizes[0] + sizes[1], 0));
    assert_eq!(sent.by_disk.iter().map(|disk| disk.bytes).collect::<Vec<_>>(), sizes);
    assert_eq!(sent.by_disk.iter().map(|disk| disk.zero_bytes).sum::<u64>(), sent.zero_bytes);
    // A sixth is zero at least, and a third compresses.
    assert!(sent.zero_bytes > sent.bytes / 6, "{sent:?}");
    assert!(sent.wire_bytes < sent.bytes / 2, "{sent:?}");
    finish(&mut streams, &[], receiving);
}

#[test]
fn the_other_streams_do_the_work_of_one_that_the_host_gives_up() {
    let (mut guest, host) = (Guest::new(), Host::new());
    guest.all_begin = Some(Arc::new(Barrier::new(3)));
    let mut streams = DiskStreams::new(TRANSFER, Compression::None);
    let receiving = add_streams(&mut streams, &guest, &host, 1..=2);
    let (near, far) = pair();
    let giving_up = std::thread::spawn(move || {
        drop(welcome(far.clone(), TRANSFER, LIMIT).unwrap());
        // One of the bytes that were sent had changed, for example.
        let reason = Failure::new(FailureCode::LaneLost, "a checksum is wrong").to_reason();
        far.sender().send(&Message::Refused(reason)).unwrap();
        far.finish_sending();
        let mut receiver = far.receiver();
        while receiver.receive().is_ok() {}
    });
    streams.add(near, 3, Box::new(guest.clone())).unwrap();
    let sent = streams.send_round(&all(), &|_| {}, &AtomicBool::new(false)).unwrap();
    assert!(host.has_all_of(&guest));
    assert_eq!(sent.bytes, total_bytes(&all()) + sent.resent_bytes);
    assert_eq!(streams.live(), 2);
    finish(&mut streams, &[], receiving);
    giving_up.join().unwrap();
}

#[test]
fn a_stream_that_may_still_be_read_cuts_the_round() {
    let (mut guest, host) = (Guest::new(), Host::new());
    guest.all_begin = Some(Arc::new(Barrier::new(3)));
    let mut streams = DiskStreams::new(TRANSFER, Compression::None);
    let receiving = add_streams(&mut streams, &guest, &host, 1..=2);
    let (near, far) = socket_pair();
    let resetting = std::thread::spawn(move || {
        rustix::net::sockopt::set_socket_linger(&far, Some(Duration::ZERO)).unwrap();
        drop(welcome(Stream::new(far).unwrap(), TRANSFER, LIMIT).unwrap());
    });
    streams.add(near, 3, Box::new(guest.clone())).unwrap();
    resetting.join().unwrap();
    let cut = round(&mut streams, &all()).unwrap_err();
    // The others did all of it.
    assert_eq!((cut.failure.code, cut.unmarked), (FailureCode::LaneLost, Vec::new()));
    assert!(host.has_all_of(&guest));
    assert_eq!(streams.live(), 0);
    for one in receiving {
        assert!(matches!(one.join().unwrap(), StreamEnd::Broken(_)));
    }
}

#[test]
fn a_transfer_goes_on_where_all_streams_broke_and_the_cache_was_lost() {
    let (guest, host) = (Guest::new(), Host::new());
    host.breaks_after.store(2, Ordering::SeqCst);
    let mut streams = DiskStreams::new(TRANSFER, Compression::Lz4);
    let receiving = add_streams(&mut streams, &guest, &host, 1..=3);
    let cut = round(&mut streams, &all()).unwrap_err();
    assert_eq!(cut.failure.code, FailureCode::LaneLost, "{}", cut.failure);
    for one in receiving {
        assert!(matches!(one.join().unwrap(), StreamEnd::Broken(_)));
    }
    host.crash();
    let marked = host.marked.lock().clone();
    assert!(!marked.is_empty() && total_bytes(&cut.unmarked) < total_bytes(&all()));
    assert_eq!(merged([marked, cut.unmarked.clone()].concat()), all());
    assert!(round(&mut streams, &cut.unmarked).is_err(), "no stream is left");

    host.breaks_after.store(NEVER, Ordering::SeqCst);
    let mut streams = DiskStreams::new(TRANSFER, Compression::Lz4);
    let receiving = add_streams(&mut streams, &guest, &host, 1..=2);
    assert_eq!(round(&mut streams, &cut.unmarked).unwrap(), total_bytes(&cut.unmarked));
    finish(&mut streams, &[], receiving);
    assert!(host.has_all_of(&guest));
}

#[test]
fn a_full_file_system_is_reported_to_the_source() {
    let (guest, host) = (Guest::new(), Host::new());
    host.images[0].room.store(3 << 20, Ordering::SeqCst);
    let mut streams = DiskStreams::new(TRANSFER, Compression::None);
    let receiving = add_streams(&mut streams, &guest, &host, 1..=2);
    let cut = round(&mut streams, &all()).unwrap_err();
    assert_eq!(cut.failure.code, FailureCode::DiskFailed);
    assert!(cut.failure.detail.contains("no space is left in /srv"), "{}", cut.failure);
    assert!(!cut.unmarked.is_empty());
    assert_eq!(streams.live(), 0);
    let ends: Vec<_> = receiving.into_iter().map(|one| one.join().unwrap()).collect();
    let is_full = |end: &StreamEnd| {
        matches!(end, StreamEnd::Broken(failure)
        if failure.code == FailureCode::DiskFailed)
    };
    assert!(ends.iter().any(is_full), "{ends:?}");
}

#[test]
fn a_disk_that_cannot_be_read_ends_the_round() {
    let (mut guest, host) = (Guest::new(), Host::new());
    guest.fails_at = 5;
    let mut streams = DiskStreams::new(TRANSFER, Compression::None);
    let _receiving = add_streams(&mut streams, &guest, &host, 1..=2);
    let cut = round(&mut streams, &all()).unwrap_err();
    assert_eq!(cut.failure.code, FailureCode::DiskFailed);
    assert!(total_bytes(&cut.unmarked) > 0);
}

#[test]
fn an_interrupted_round_is_settled_and_the_last_one_sends_the_rest() {
    let (mut guest, host) = (Guest::new(), Host::new());
    guest.interrupts_at = 6;
    let mut streams = DiskStreams::new(TRANSFER, Compression::None);
    let receiving = add_streams(&mut streams, &guest, &host, 1..=2);
    let cut = streams.send_round(&all(), &|_| {}, &guest.interrupt).unwrap_err();
    assert_eq!((cut.failure.code, streams.live()), (FailureCode::Cancelled, 2));
    assert!(total_bytes(&cut.unmarked) < total_bytes(&all()));
    let marked = host.marked.lock().clone();
    assert_eq!(merged([marked, cut.unmarked.clone()].concat()), all());
    finish(&mut streams, &cut.unmarked, receiving);
    assert!(host.has_all_of(&guest));
}

#[test]
fn a_stream_that_breaks_in_the_last_round_is_a_failure() {
    let (guest, host) = (Guest::new(), Host::new());
    host.images[0].room.store(1 << 20, Ordering::SeqCst);
    let mut streams = DiskStreams::new(TRANSFER, Compression::None);
    let receiving = add_streams(&mut streams, &guest, &host, 1..=2);
    // Whether the source notices at once or only when it waits.
    let ended = streams.send_last(&all()).and_then(|_| streams.confirmed());
    assert!(ended.is_err());
    streams.close();
    let ends: Vec<_> = receiving.into_iter().map(|one| one.join().unwrap()).collect();
    assert!(ends.iter().any(|end| matches!(end, StreamEnd::Broken(_))), "{ends:?}");
}

#[test]
fn the_last_round_needs_a_stream() {
    let mut streams = DiskStreams::new(TRANSFER, Compression::Auto);
    assert_eq!(streams.send_last(&[]).unwrap_err().code, FailureCode::LaneLost);
}

/// Sends messages as a source and returns the stream's end, and the host's reason.
fn lies(number: u16, messages: &[Message]) -> (StreamEnd, Option<Reason>) {
    lies_to(&Host::new(), number, messages)
}

/// Implements [`lies`] for a host.
fn lies_to(host: &Arc<Host>, number: u16, messages: &[Message]) -> (StreamEnd, Option<Reason>) {
    let (near, far) = pair();
    let receiving = std::thread::spawn({
        let host = Arc::clone(host);
        move || host.receive(far)
    });
    let (mut sender, mut receiver) = (near.sender(), near.receiver());
    let hello = Message::Hello { versions: SUPPORTED, migration: TRANSFER, stream: number };
    sender.send(&hello).unwrap();
    for message in messages {
        // The host may have closed the stream.
        let _ = sender.send(message);
    }
    near.finish_sending();
    let mut reason = None;
    while let Ok(incoming) = receiver.receive() {
        if let Incoming::Message(Message::Refused(why)) = incoming {
            reason = Some(why);
        }
    }
    let end = receiving.join().unwrap();
    for image in &host.images {
        assert!(image.durable.lock().iter().all(|byte| *byte == 0), "a lie was believed");
    }
    (end, reason)
}

fn blocks(disk: u16, offset: u64, codec: Option<Codec>) -> Message {
    let header = DiskBlocksHeader { disk, codec, raw_bytes: 4096, offset };
    let content = if codec.is_some() { vec![3; 9] } else { vec![3; 4096] };
    Message::DiskBlocks(DiskBlocks { header, content })
}

#[test]
fn a_lying_source_is_refused() {
    let size = SIZES[1] as u64;
    let zeros = |disk, offset, bytes| Message::DiskZeros(DiskZeros { disk, offset, bytes });
    let mark = |mark| Message::DiskMark { mark };
    let end = |mark| Message::DiskEnd { streams: 2, mark };
    let lists: [(u16, Vec<Message>); 17] = [
        (1, vec![blocks(2, 0, None)]),
        (1, vec![blocks(31, 0, None)]),
        (1, vec![blocks(1, size - 4095, None)]),
        (1, vec![blocks(1, u64::MAX - 4096, None)]),
        (1, vec![blocks(0, 0, Some(Codec::Lz4))]),
        (1, vec![blocks(0, 0, Some(Codec::Zstd))]),
        (1, vec![zeros(1, 0, size + 1)]),
        (1, vec![zeros(2, 0, 1)]),
        (1, vec![zeros(1, 0, CHUNK_BYTES + 1)]),
        (1, vec![mark(0)]),
        (1, vec![mark(2)]),
        (1, vec![mark(1), mark(1)]),
        (1, vec![mark(1), end(1)]),
        (1, vec![end(7)]),
        (1, vec![Message::UnitEnd]),
        (1, vec![Message::DiskMarked { mark: 1 }]),
        (0, vec![]),
    ];
    for (number, messages) in lists {
        let (end, reason) = lies(number, &messages);
        let StreamEnd::Broken(failure) = end else { panic!("{messages:?} were accepted") };
        assert_eq!(failure.code, FailureCode::ProtocolBroken, "{messages:?}: {failure}");
        assert_eq!(reason, Some(failure.to_reason()));
    }
    let apart = (0..=MOST_UNMARKED_RANGES as u64).map(|at| zeros(0, at * 1024, 512));
    let (end, _) = lies(1, &apart.collect::<Vec<_>>());
    assert!(matches!(end, StreamEnd::Broken(failure) if failure.detail.contains("no mark")));
}

#[test]
fn a_stream_that_ends_without_its_end_is_broken() {
    let (end, reason) = lies(1, &[Message::Padding { bytes: 1 }]);
    let StreamEnd::Broken(failure) = end else { panic!("it has ended") };
    assert_eq!(failure.code, FailureCode::LaneLost);
    assert_eq!(reason.map(|reason| reason.code), Some(FailureCode::LaneLost as u16));
}
