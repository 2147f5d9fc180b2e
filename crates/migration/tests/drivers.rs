//! Both drivers against each other over a real lane, with memory in files and hypervisors that exist in this file alone.

#![allow(clippy::unwrap_used, clippy::panic)] // a helper of tests may fail the test

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use godwit_lanes::pacing::{MigrationPace, Pacing};
use godwit_lanes::{Lane, RateLimit, Stream, accept, connect, listen};
use godwit_migration::destination::Ending;
use godwit_migration::drive::{
    DestinationHypervisor, DestinationJob, Hello, HypervisorEvent, Inbox, SourceHypervisor, SourceJob,
    SourceResult, Tracking, WelcomedStream, inbox, receive, say_hello, send, welcome,
};
use godwit_migration::source::Verdict;
use godwit_migration::{Compression, EncodingName, Failure, FailureCode, Outcome, Phase, Policy, Progress};
use godwit_ram::{PAGE_SIZE, PageRange, Region, TrackError};
use godwit_wire::{
    CONTROL_STREAM, Codec, Encoding, Message, MigrationId, PageRun, PagesHeader, SUPPORTED, VersionRange,
};

const ID: MigrationId = MigrationId(*b"a migration's id");
const BLOCKS: [u64; 2] = [700, 133];
const LIMIT: Duration = Duration::from_secs(5);
const HELLO: Hello = Hello { migration: ID, stream: CONTROL_STREAM, versions: SUPPORTED };

/// Pages written, as (block, page).
type Dirty = Arc<Mutex<BTreeSet<(usize, u64)>>>;

struct FakeTracking {
    dirty: Dirty,
    /// Streams that are cut at the second look at the memory.
    cut: Arc<Mutex<Vec<Stream>>>,
    /// How many those are.
    cuts: usize,
    looks: u32,
}

impl Tracking for FakeTracking {
    fn start(&mut self) -> Result<(), TrackError> {
        self.dirty.lock().unwrap().clear();
        Ok(())
    }

    fn take_dirty(
        &mut self,
        block: usize,
        within: PageRange,
        max_pages: u64,
        out: &mut Vec<PageRange>,
    ) -> Result<u64, TrackError> {
        self.looks += 1;
        if self.looks == 2 {
            // Not before all of them are there: one that came later would stay.
            while self.cut.lock().unwrap().len() < self.cuts {
                std::thread::yield_now();
            }
            self.cut.lock().unwrap().drain(..).for_each(|stream| stream.close());
        }
        let mut dirty = self.dirty.lock().unwrap();
        let found: Vec<_> = dirty
            .range((block, within.first)..(block, within.end()))
            .take(usize::try_from(max_pages).unwrap_or(usize::MAX))
            .copied()
            .collect();
        for entry in &found {
            dirty.remove(entry);
            out.push(PageRange { first: entry.1, count: 1 });
        }
        let stopped_early = found.len() as u64 == max_pages;
        Ok(if stopped_early { found.last().unwrap().1 + 1 } else { within.end() })
    }

    fn count_dirty(&self) -> Result<u64, TrackError> {
        Ok(self.dirty.lock().unwrap().len() as u64)
    }
}

/// What a test sees of the source's guest.
#[derive(Default)]
struct Guest {
    resumed: AtomicU32,
    released: AtomicBool,
}

struct FakeSource {
    guest: Arc<Guest>,
    inbox: Option<Inbox>,
    memory: Arc<Region>,
    dirty: Dirty,
    cancels_itself: bool,
}

impl SourceHypervisor for FakeSource {
    fn begin_switchover(&mut self, events: &Inbox) -> Result<(), Failure> {
        events.hypervisor(Instant::now(), HypervisorEvent::DeviceState(vec![1; 500]));
        events.hypervisor(Instant::now(), HypervisorEvent::Stopped);
        self.inbox = Some(events.clone());
        Ok(())
    }

    fn write_device_state(&mut self) -> Result<(), Failure> {
        let inbox = self.inbox.as_ref().unwrap();
        if self.cancels_itself {
            inbox.cancel();
            return Ok(());
        }
        self.memory.copy_in(5 * PAGE_SIZE, &[0xdd; 64]).unwrap();
        self.dirty.lock().unwrap().insert((0, 5));
        inbox.hypervisor(Instant::now(), HypervisorEvent::DeviceState(vec![2; 300_000]));
        inbox.hypervisor(Instant::now(), HypervisorEvent::DeviceStateEnded);
        Ok(())
    }

    fn resume(&mut self) -> Result<(), Failure> {
        self.guest.resumed.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }

    fn release(&mut self) {
        self.guest.released.store(true, Ordering::SeqCst);
    }
}

struct FakeDestination {
    state: Vec<u8>,
    load_fails: bool,
    log: mpsc::Sender<&'static str>,
}

impl DestinationHypervisor for FakeDestination {
    fn feed(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        self.state.extend_from_slice(bytes);
        Ok(())
    }

    fn finish_load(&mut self) -> Result<(), Failure> {
        assert_eq!(self.state.len(), 300_500);
        if self.load_fails {
            return Err(Failure::new(FailureCode::HypervisorFailed, "no such device"));
        }
        Ok(())
    }

    fn run(&mut self, run: bool) -> Result<(), Failure> {
        self.log.send(if run { "runs" } else { "stays paused" }).unwrap();
        Ok(())
    }

    fn discard(&mut self, _failure: &Failure) {
        self.log.send("discarded").unwrap();
    }

    fn promote(&mut self) {
        self.log.send("promoted").unwrap();
    }
}

fn regions(folder: &tempfile::TempDir, name: &str) -> Vec<Arc<Region>> {
    BLOCKS
        .iter()
        .enumerate()
        .map(|(block, pages)| {
            let path = folder.path().join(format!("{name}{block}"));
            Arc::new(Region::create(&path, pages * PAGE_SIZE, None).unwrap())
        })
        .collect()
}

fn content(regions: &[Arc<Region>]) -> Vec<Vec<u8>> {
    regions
        .iter()
        .map(|region| {
            let mut bytes = vec![0; usize::try_from(region.size_bytes()).unwrap()];
            region.copy_out(0, &mut bytes).unwrap();
            bytes
        })
        .collect()
}

fn fill(regions: &[Arc<Region>]) {
    for (block, region) in regions.iter().enumerate() {
        for page in (0..region.pages()).filter(|page| page % 3 != 0) {
            let byte = u8::try_from((page * 7 + block as u64) % 251 + 1).unwrap();
            region.copy_in(page * PAGE_SIZE + page % 4000, &[byte; 96]).unwrap();
        }
    }
}

/// A listener and the lane that leads to it.
fn path(address: SocketAddr) -> (TcpListener, Lane) {
    let listener = listen(address).unwrap();
    let to = listener.local_addr().unwrap();
    (listener, Lane { from: None, to })
}

/// One stream of a lane, both ends.
fn stream(listener: &TcpListener, lane: Lane) -> (Stream, Stream) {
    let near = connect(lane, LIMIT).unwrap();
    (near, accept(std::slice::from_ref(listener), LIMIT).unwrap().unwrap())
}

/// Waits a moment for a data stream, as the host's agent does.
fn accept_one(listener: &TcpListener) -> Option<WelcomedStream> {
    let stream = accept(std::slice::from_ref(listener), Duration::from_millis(10)).unwrap()?;
    welcome(stream, ID, LIMIT).ok()
}

fn loopback() -> SocketAddr {
    (Ipv4Addr::LOCALHOST, 0).into()
}

/// A way to an address that carries a hello and then nothing more; the answers it carries all. The sockets are kept open.
fn stalling_lane<'scope>(
    scope: &'scope std::thread::Scope<'scope, '_>,
    to: SocketAddr,
    keep: &mut Vec<TcpStream>,
) -> Lane {
    let (listener, lane) = path(loopback());
    let far = TcpStream::connect(to).unwrap();
    keep.push(far.try_clone().unwrap());
    scope.spawn(move || {
        let (near, _) = listener.accept().unwrap();
        let mut hello = [0; 38];
        (&near).read_exact(&mut hello).unwrap();
        (&far).write_all(&hello).unwrap();
        // Until the destination closes it.
        let _ = std::io::copy(&mut &far, &mut &near);
    });
    lane
}

#[derive(Clone, Copy, Default)]
struct Twist {
    load_fails: bool,
    cancels_itself: bool,
    paused: bool,
    ipv6: bool,
    other_epoch: bool,
    compression: Compression,
    /// Data streams; 0 means 1.
    streams: usize,
    /// Data streams whose connection is cut when they have carried a little.
    cut: usize,
    /// The first data stream carries its hello and then nothing more.
    stalls: bool,
}

struct Moved {
    result: SourceResult,
    ending: Ending,
    guest: Arc<Guest>,
    said: Vec<&'static str>,
    same_memory: bool,
}

fn migrate(twist: Twist) -> Moved {
    migrate_paced(twist, &Pacing::default().migration(RateLimit::NONE), &|_, _| {})
}

/// The same under limits; `watch` sees each word of progress, and may change them or cancel.
fn migrate_paced(twist: Twist, pace: &MigrationPace, watch: &(dyn Fn(&Inbox, Progress) + Sync)) -> Moved {
    let folder = tempfile::tempdir().unwrap();
    let (from, to) = (regions(&folder, "from"), regions(&folder, "to"));
    fill(&from);
    let address = if twist.ipv6 { (Ipv6Addr::LOCALHOST, 0).into() } else { loopback() };
    let (listener, lane) = path(address);
    let (control, far_control) = stream(&listener, lane);
    let guest = Arc::new(Guest::default());
    let dirty = Dirty::default();
    let (log, said) = mpsc::channel();
    let hypervisor = FakeSource {
        guest: Arc::clone(&guest),
        inbox: None,
        memory: Arc::clone(&from[0]),
        dirty: Arc::clone(&dirty),
        cancels_itself: twist.cancels_itself,
    };
    let (regions, load_fails) = (to.clone(), twist.load_fails);
    let hypervisor_there = FakeDestination { state: Vec::new(), load_fails, log };
    let (_keep, cancel) = mpsc::channel();
    let cut: Arc<Mutex<Vec<Stream>>> = Arc::default();
    let stalled = Mutex::new(twist.stalls.then_some(Vec::new()));
    let (result, ending) = std::thread::scope(|scope| {
        let receiving = scope.spawn(|| {
            let job = DestinationJob {
                control: welcome(far_control, ID, LIMIT).unwrap(),
                accept: &|| accept_one(&listener),
                epoch: 2 + u64::from(twist.other_epoch),
                regions,
                hypervisor: hypervisor_there,
            };
            let cancel = cancel;
            receive(job, &cancel)
        });
        let (inbox, events) = inbox();
        let watcher = inbox.clone();
        let job = SourceJob {
            control,
            connect: &|_| {
                let mut stalled = stalled.lock().unwrap();
                let lane = match stalled.as_mut().filter(|sockets| sockets.is_empty()) {
                    Some(sockets) => stalling_lane(scope, lane.to, sockets),
                    None => lane,
                };
                let stream = connect(lane, LIMIT)
                    .map_err(|error| Failure::new(FailureCode::LaneLost, error.to_string()))?;
                let mut cut = cut.lock().unwrap();
                if cut.len() < twist.cut {
                    cut.push(stream.clone());
                }
                drop(cut);
                let near = stream.local().unwrap().ip();
                Ok(stream.paced(pace.stream(near)))
            },
            lanes: 1,
            streams: Some(twist.streams.max(1)),
            pace: pace.clone(),
            migration: ID,
            epoch: 2,
            runs: !twist.paused,
            policy: Policy::default(),
            compression: twist.compression,
            preflight: Duration::ZERO,
            regions: from.clone(),
            tracker: FakeTracking { dirty, cut: Arc::clone(&cut), cuts: twist.cut, looks: 0 },
            hypervisor,
            begun: Instant::now(),
            progress: &|progress| watch(&watcher, progress),
            ask_verdict: &|| Verdict::Unknown,
        };
        let result = send(job, &inbox, events);
        (result, receiving.join().unwrap())
    });
    let same_memory = content(&from) == content(&to);
    Moved { result, ending, guest, said: said.try_iter().collect(), same_memory }
}

#[test]
fn a_guest_moves_whole() {
    let moved = migrate(Twist::default());
    assert_eq!(moved.result.outcome, Outcome::Completed, "{:?}", moved.result.failure);
    assert_eq!(moved.ending, Ending::Runs);
    assert!(moved.same_memory && moved.guest.released.load(Ordering::SeqCst));
    assert_eq!(moved.said, ["runs", "promoted"]);
    let pages: u64 = moved.result.rounds.iter().map(|round| round.pages).sum();
    assert_eq!(pages, BLOCKS.iter().sum::<u64>() + 1);
    assert!(moved.result.rounds[0].zero_pages > 200);
    assert!(moved.result.switchover.is_some() && moved.result.round_trip.is_some());
}

#[test]
fn a_guest_moves_whole_by_every_compression() {
    for (compression, name) in [
        (Compression::Auto, EncodingName::Raw),
        (Compression::None, EncodingName::Raw),
        (Compression::Lz4, EncodingName::Lz4),
        (Compression::Zstd, EncodingName::Zstd),
    ] {
        let moved = migrate(Twist { compression, streams: 2, ..Twist::default() });
        assert_eq!(moved.result.outcome, Outcome::Completed, "{compression:?}: {:?}", moved.result.failure);
        assert!(moved.same_memory, "{compression:?}");
        let encodings = &moved.result.encodings;
        let pages: u64 = encodings.iter().map(|encoding| encoding.pages).sum();
        assert_eq!(pages, BLOCKS.iter().sum::<u64>() + 1, "{encodings:?}");
        let used = encodings.iter().find(|encoding| encoding.name == name).unwrap();
        if compression != Compression::Auto {
            assert_eq!(encodings.len(), 2, "{encodings:?}");
        }
        let shrinks = !matches!(name, EncodingName::Raw);
        assert_eq!(used.wire_bytes < used.raw_bytes / 3, shrinks, "{used:?}");
    }
}

#[test]
fn compressed_pages_that_hold_something_else_end_the_migration() {
    let (ending, said) = lying_peer(|peer, lane| {
        say_hello(&mut peer.sender(), &mut peer.receiver(), HELLO).unwrap();
        let data = connect(lane, LIMIT).unwrap();
        let mut sender = data.sender();
        say_hello(&mut sender, &mut data.receiver(), Hello { stream: 1, ..HELLO }).unwrap();
        // The fields of four pages, and as their content the message that follows.
        let run = PageRun { block: 0, first: 0, count: 4 };
        let encoding = Encoding::Compressed { codec: Codec::Zstd, bytes: 16 };
        sender.send(&Message::Pages(PagesHeader { round: 0, run, encoding })).unwrap();
        sender.send(&Message::Ping { sent_ns: 0 }).unwrap();
        let _ = peer.receiver().receive();
    });
    refused_with(ending, FailureCode::ProtocolBroken);
    assert_eq!(said, ["discarded"]);
}

#[test]
fn ipv6_is_as_good() {
    let moved = migrate(Twist { ipv6: true, ..Twist::default() });
    assert_eq!(moved.result.outcome, Outcome::Completed);
    assert!(moved.same_memory);
}

#[test]
fn a_paused_guest_stays_paused() {
    let moved = migrate(Twist { paused: true, ..Twist::default() });
    assert_eq!(moved.result.outcome, Outcome::Completed);
    assert_eq!(moved.said, ["stays paused", "promoted"]);
}

#[test]
fn a_destination_that_can_not_load_gives_the_guest_back() {
    let moved = migrate(Twist { load_fails: true, ..Twist::default() });
    assert_eq!(moved.result.outcome, Outcome::Failed);
    assert_eq!(moved.result.failure.unwrap().code, FailureCode::HypervisorFailed);
    assert_eq!(moved.said, ["discarded"]);
    assert_eq!(moved.guest.resumed.load(Ordering::SeqCst), 1);
    assert!(!moved.guest.released.load(Ordering::SeqCst));
}

#[test]
fn a_cancel_while_the_guest_stands_still_resumes_it() {
    let moved = migrate(Twist { cancels_itself: true, ..Twist::default() });
    assert_eq!(moved.result.outcome, Outcome::Cancelled);
    assert_eq!(moved.guest.resumed.load(Ordering::SeqCst), 1);
    // Its users felt that: the report tells for how long.
    assert!(moved.result.stood_still_ms.is_some() && moved.result.switchover.is_none());
    assert_eq!(moved.said, ["discarded"]);
    assert!(matches!(moved.ending, Ending::Discarded(failure) if failure.code == FailureCode::Cancelled));
}

#[test]
fn another_epoch_is_refused() {
    let moved = migrate(Twist { other_epoch: true, ..Twist::default() });
    assert_eq!(moved.result.outcome, Outcome::Failed);
    assert_eq!(moved.result.failure.unwrap().code, FailureCode::StaleEpoch);
}

/// A destination that a peer of this file's own talks to.
fn lying_peer(speak: impl FnOnce(&Stream, Lane)) -> (Ending, Vec<&'static str>) {
    let folder = tempfile::tempdir().unwrap();
    let (listener, lane) = path(loopback());
    let (peer, far) = stream(&listener, lane);
    let (log, said) = mpsc::channel();
    let regions = regions(&folder, "to");
    let hypervisor = FakeDestination { state: Vec::new(), load_fails: false, log };
    let (_keep, cancel) = mpsc::channel();
    let ending = std::thread::scope(|scope| {
        let receiving = scope.spawn(|| {
            let (regions, hypervisor, cancel) = (regions, hypervisor, cancel);
            match welcome(far, ID, LIMIT) {
                Ok(control) => {
                    let accept = &|| accept_one(&listener);
                    receive(DestinationJob { control, accept, epoch: 2, regions, hypervisor }, &cancel)
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
    (ending, said.try_iter().collect())
}

fn refused_with(ending: Ending, code: FailureCode) {
    match ending {
        Ending::Discarded(failure) => assert_eq!(failure.code, code, "{failure}"),
        Ending::Runs => panic!("it runs"),
    }
}

#[test]
fn several_streams_bring_the_same_guest() {
    let moved = migrate(Twist { streams: 5, ..Twist::default() });
    assert_eq!(moved.result.outcome, Outcome::Completed, "{:?}", moved.result.failure);
    assert!(moved.same_memory);
}

#[test]
fn the_streams_that_are_left_do_the_work_of_those_that_break() {
    let moved = migrate(Twist { streams: 4, cut: 3, ..Twist::default() });
    assert_eq!(moved.result.outcome, Outcome::Completed, "{:?}", moved.result.failure);
    assert!(moved.same_memory);
}

/// Limits whose clock stands still: what their burst lets through goes, and nothing more.
fn held(limit: &str) -> MigrationPace {
    Pacing::with_clock(|| Duration::ZERO).migration(limit.parse().unwrap())
}

/// More than a burst at the least limit, less than the guest's memory.
const BURST_BYTES: u64 = 64 << 10;

#[test]
fn a_limit_holds_until_it_is_changed() {
    let pace = held("1mbit");
    let words = AtomicU32::new(0);
    let moved = migrate_paced(Twist { streams: 3, ..Twist::default() }, &pace, &|_, progress| {
        if progress.phase != Phase::PreCopy || pace.limit() == RateLimit::NONE {
            return;
        }
        assert_eq!(progress.bandwidth_limit, pace.limit().rate());
        assert!(progress.sent_bytes < BURST_BYTES, "{progress:?}");
        if words.fetch_add(1, Ordering::SeqCst) == 2 {
            pace.set_limit(RateLimit::NONE);
        }
    });
    assert_eq!(moved.result.outcome, Outcome::Completed, "{:?}", moved.result.failure);
    assert!(moved.same_memory);
    assert_eq!(pace.limit(), RateLimit::NONE, "it did not come to its end before");
    assert!(moved.result.wire_bytes > 10 * BURST_BYTES && moved.result.bandwidth_limit.is_none());
}

#[test]
fn a_cancel_does_not_wait_for_a_limit() {
    let pace = held("1mbit");
    let moved = migrate_paced(Twist { streams: 3, ..Twist::default() }, &pace, &|inbox, progress| {
        if progress.phase == Phase::PreCopy {
            inbox.cancel();
        }
    });
    assert_eq!(moved.result.outcome, Outcome::Cancelled);
    assert_eq!(moved.said, ["discarded"]);
    assert_eq!(moved.result.bandwidth_limit, pace.limit().rate());
}

#[test]
fn a_stream_that_stands_still_gives_its_work_back() {
    let moved = migrate(Twist { streams: 2, stalls: true, ..Twist::default() });
    assert_eq!(moved.result.outcome, Outcome::Completed, "{:?}", moved.result.failure);
    assert!(moved.same_memory);
    let [lane] = &moved.result.lanes[..] else { panic!("{:?}", moved.result.lanes) };
    assert_eq!((lane.streams, lane.broken.len()), (2, 1), "{lane:?}");
}

#[test]
fn without_a_stream_the_guest_stays() {
    let moved = migrate(Twist { streams: 2, cut: 2, ..Twist::default() });
    assert_eq!(moved.result.outcome, Outcome::Failed);
    assert_eq!(moved.result.failure.unwrap().code, FailureCode::LaneLost);
    assert_eq!(moved.said, ["discarded"]);
}

#[test]
fn a_peer_of_another_version_is_told_so() {
    let (ending, said) = lying_peer(|peer, _| {
        let versions = VersionRange { oldest: 900, newest: 901 };
        let answer =
            say_hello(&mut peer.sender(), &mut peer.receiver(), Hello { versions, ..HELLO }).unwrap_err();
        assert_eq!(answer.code, FailureCode::VersionMismatch);
        assert!(answer.detail.contains("900 to 901"), "{answer}");
    });
    refused_with(ending, FailureCode::VersionMismatch);
    assert_eq!(said, [""; 0]);
}

#[test]
fn a_peer_with_another_migration_is_told_so() {
    let (ending, _) = lying_peer(|peer, _| {
        let other = MigrationId([9; 16]);
        let answer = say_hello(&mut peer.sender(), &mut peer.receiver(), Hello { migration: other, ..HELLO });
        assert_eq!(answer.unwrap_err().code, FailureCode::UnknownMigration);
    });
    refused_with(ending, FailureCode::UnknownMigration);
}

#[test]
fn pages_that_the_vm_does_not_have_end_the_lane() {
    for message in [
        Message::Zeros(godwit_wire::Zeros {
            round: 0,
            runs: vec![godwit_wire::BlockRun { block: 0, first: BLOCKS[0] - 1, count: 2 }],
        }),
        Message::Zeros(godwit_wire::Zeros {
            round: 0,
            runs: vec![godwit_wire::BlockRun { block: 7, first: 0, count: 1 }],
        }),
    ] {
        let (ending, said) = lying_peer(|peer, lane| {
            say_hello(&mut peer.sender(), &mut peer.receiver(), HELLO).unwrap();
            let data = connect(lane, LIMIT).unwrap();
            let mut sender = data.sender();
            say_hello(&mut sender, &mut data.receiver(), Hello { stream: 1, ..HELLO }).unwrap();
            sender.send(&message).unwrap();
            // Until it is heard there.
            let _ = peer.receiver().receive();
        });
        refused_with(ending, FailureCode::ProtocolBroken);
        assert_eq!(said, ["discarded"]);
    }
}

#[test]
fn a_lane_that_ends_before_the_commit_leaves_nothing() {
    let (ending, said) = lying_peer(|peer, _| {
        let mut sender = peer.sender();
        say_hello(&mut sender, &mut peer.receiver(), HELLO).unwrap();
        let begin = godwit_wire::Begin { epoch: 2, run: true, block_pages: BLOCKS.to_vec() };
        sender.send(&Message::Begin(begin)).unwrap();
    });
    refused_with(ending, FailureCode::LaneLost);
    assert_eq!(said, ["discarded"]);
}

#[test]
fn something_that_is_no_lane_is_told_apart() {
    let (ending, _) = lying_peer(|peer, _| {
        let mut sender = peer.sender();
        sender.send(&Message::Ready).unwrap();
    });
    refused_with(ending, FailureCode::ProtocolBroken);
}
