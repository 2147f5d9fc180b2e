//! Both ends of a migration over real lanes, with memory in files and hypervisors that exist only
//! here.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use godwit_lanes::pacing::{MigrationPace, Pacing};
use godwit_lanes::{Carries, Interrupt, LaneError, Stream, accept, connect, hash_page};
use godwit_migration::destination::Ending;
use godwit_migration::drive::lane_failure;
use godwit_migration::drive::page_in::{Again, PagingIn, open_session};
use godwit_migration::drive::{
    Course, Deltas, DescribedContent, DestinationHypervisor, DestinationJob, Hello, Inbox, Kept,
    Offer, References, SourceJob, SourceResult, Throttled, Throttling, WelcomedStream, inbox,
    receive, send, welcome,
};
use godwit_migration::reference::Content;
use godwit_migration::source::Verdict;
use godwit_migration::{Failure, MeansUse, PageIn, Policy};
use godwit_ram::{PAGE_SIZE, Region};
use godwit_types::{
    Compression, ContentKind, FailureCode, Incarnation, Lane, Outcome, Ownership, Progress,
    RateLimit,
};
use godwit_wire::{CONTROL_STREAM, MigrationId, SUPPORTED, prefix};
use parking_lot::Mutex;

use super::fakes::{Dirty, FakeDestination, FakeQuota, FakeSource, FakeTracking, Guest, Shares};
use super::faults::FakeFaults;
use super::secure::Secure;
use super::ways::{Corrupted, Corruption, path, stalling_lane, unanswering};

/// The ownership that the destination receives.
pub(crate) const SECOND: Ownership = Ownership { incarnation: Incarnation::new(7), epoch: 2 };

pub(crate) const ID: MigrationId = MigrationId(*b"a migration's id");
pub(crate) const BLOCKS: [u64; 2] = [700, 133];
pub(crate) const LIMIT: Duration = Duration::from_secs(60);
pub(crate) const HELLO: Hello =
    Hello { migration: ID, stream: CONTROL_STREAM, versions: SUPPORTED };

pub(crate) fn regions(folder: &tempfile::TempDir, name: &str) -> Vec<Arc<Region>> {
    BLOCKS
        .iter()
        .enumerate()
        .map(|(block, pages)| {
            let path = folder.path().join(format!("{name}{block}"));
            Arc::new(Region::create(&path, pages * PAGE_SIZE, None).unwrap())
        })
        .collect()
}

pub(crate) fn content(regions: &[Arc<Region>]) -> Vec<Vec<u8>> {
    regions
        .iter()
        .map(|region| {
            let mut bytes = vec![0; usize::try_from(region.size_bytes()).unwrap()];
            region.copy_out(0, &mut bytes).unwrap();
            bytes
        })
        .collect()
}

pub(crate) fn fill(regions: &[Arc<Region>]) {
    for (block, region) in regions.iter().enumerate() {
        for page in (0..region.pages()).filter(|page| page % 3 != 0) {
            let byte = u8::try_from((page * 7 + block as u64) % 251 + 1).unwrap();
            region.copy_in(page * PAGE_SIZE + page % 4000, &[byte; 96]).unwrap();
        }
    }
}

fn repeat(regions: &[Arc<Region>]) {
    let mut page = [0; 4096];
    for region in regions {
        for number in (1..region.pages()).step_by(5) {
            region.copy_out((number - 1) * PAGE_SIZE, &mut page).unwrap();
            region.copy_in(number * PAGE_SIZE, &page).unwrap();
        }
    }
}

/// Returns both ends of one stream of a lane.
pub(crate) fn stream(listener: &TcpListener, lane: Lane) -> (Stream, Stream) {
    let near = connect(lane, LIMIT).unwrap();
    (near, accept(std::slice::from_ref(listener), LIMIT).unwrap().unwrap())
}

/// Waits a moment for a data stream, as the host's agent does.
pub(crate) fn accept_one(listener: &TcpListener) -> Option<WelcomedStream> {
    let stream = accept(std::slice::from_ref(listener), Duration::from_millis(10)).unwrap()?;
    welcome(stream, ID, LIMIT).ok()
}

pub(crate) fn loopback() -> SocketAddr {
    (Ipv4Addr::LOCALHOST, 0).into()
}

#[derive(Clone, Copy, Default)]
pub(crate) struct Twist {
    /// Set if the guest is handed over after the first round; the number of times that its page
    /// streams are cut.
    pub(crate) page_in: Option<usize>,
    /// Whether the destination is unable to do page-in.
    pub(crate) no_page_in: bool,
    pub(crate) load_fails: bool,
    pub(crate) cancels_itself: bool,
    /// Whether the source's hypervisor writes endless device state.
    pub(crate) writes_without_end: bool,
    /// Whether it writes the last part of its device state when the one before has arrived.
    pub(crate) overlaps: bool,
    pub(crate) paused: bool,
    pub(crate) ipv6: bool,
    pub(crate) other_epoch: bool,
    /// Whether the destination was prepared for another life of the VM.
    pub(crate) other_incarnation: bool,
    pub(crate) compression: Compression,
    pub(crate) references: References,
    /// What the destination says that its first content is.
    pub(crate) describes: Option<ContentKind>,
    /// Whether every fifth page equals the one before.
    pub(crate) repeats: bool,
    pub(crate) deltas: Deltas,
    /// How often, between rounds, the guest writes a little to most pages.
    pub(crate) writes: u32,
    /// Number of data streams; 0 means 1.
    pub(crate) streams: usize,
    /// Number of data streams whose connection is cut after they have carried a little.
    pub(crate) cut: usize,
    /// Whether the first data stream carries its hello and then nothing more.
    pub(crate) stalls: bool,
    /// If set, streams use TLS, and the source's certificate expires when so many data streams
    /// exist.
    pub(crate) certificate_ends_after: Option<usize>,
    /// Whether the connection of the first data stream is never answered.
    pub(crate) hangs: bool,
    /// Whether its writers are slowed by a quota.
    pub(crate) quota: bool,
    /// Whether both ends continue on another lane after a cut.
    pub(crate) reconnects: bool,
    /// How often the stop of the guest is put off; 0: nothing moves with the guest.
    pub(crate) puts_off: u32,
    /// Byte that changes in transit.
    pub(crate) corrupts: Option<Corrupted>,
}

pub(crate) type FakeTracker = Throttled<FakeTracking, FakeQuota>;

pub(crate) struct Moved {
    pub(crate) result: SourceResult,
    pub(crate) ending: Ending,
    pub(crate) guest: Arc<Guest>,
    pub(crate) logged: Vec<&'static str>,
    pub(crate) same_memory: bool,
    pub(crate) shares: Vec<Option<f64>>,
    /// Number of pages that the destination lacked after each cut.
    pub(crate) unsent: Vec<u64>,
    /// Number of pages whose hashes the source knows after the migration.
    pub(crate) hashed_pages: usize,
}

pub(crate) fn migrate(twist: Twist) -> Moved {
    migrate_paced(twist, &Pacing::default().migration(RateLimit::NONE), &|_, _| {})
}

impl Twist {
    fn policy(self) -> Policy {
        match self.page_in {
            None => Policy::default(),
            Some(_) => {
                let switchover_budget = Duration::from_micros(1);
                Policy { page_in: PageIn::Now, switchover_budget, ..Policy::default() }
            }
        }
    }
}

/// State shared by both ends of a migration in a test.
pub(crate) struct World {
    from: Vec<Arc<Region>>,
    /// The source's memory with the hashes that it computes.
    departing: Arc<Content>,
    to: Vec<Arc<Region>>,
    /// Other memory of the destination.
    offer: Offer,
    pub(crate) listener: TcpListener,
    pub(crate) lane: Lane,
    guest: Arc<Guest>,
    dirty: Dirty,
    shares: Shares,
    /// `None`: the streams are unencrypted.
    secure: Option<Secure>,
    /// Streams that are cut at the second look at the memory.
    cut: Arc<Mutex<Vec<Stream>>>,
    /// Sockets of the stalling lane, once it exists; `None`: no lane stalls.
    stalled: Mutex<Option<Vec<TcpStream>>>,
    /// Whether the stalling lane has data to carry.
    stalled_has_work: Arc<AtomicBool>,
    /// Whether the connection that is never answered has been begun.
    hung: AtomicBool,
    corruption: Corruption,
    /// All streams of the source except the control stream.
    streams: Arc<Mutex<Vec<Stream>>>,
    paging_in: Mutex<Option<Arc<PagingIn>>>,
    /// Whether the guest runs at the destination.
    runs: Arc<AtomicBool>,
    /// Bytes of device state that the destination has taken.
    state_bytes: Arc<AtomicU64>,
    folder: tempfile::TempDir,
}

impl World {
    pub(crate) fn new(twist: Twist) -> World {
        let folder = tempfile::tempdir().unwrap();
        let (from, to) = (regions(&folder, "from"), regions(&folder, "to"));
        fill(&from);
        if twist.repeats {
            repeat(&from);
        }
        let address = if twist.ipv6 { (Ipv6Addr::LOCALHOST, 0).into() } else { loopback() };
        let (listener, lane) = path(address);
        let runs = Arc::default();
        World {
            departing: Arc::new(Content::of(&from).unwrap()),
            from,
            to,
            offer: Offer::default(),
            listener,
            lane,
            guest: Arc::default(),
            dirty: Dirty::default(),
            shares: Shares::default(),
            secure: twist.certificate_ends_after.map(|_| Secure::new(&folder)),
            cut: Arc::default(),
            stalled: Mutex::new(twist.stalls.then_some(Vec::new())),
            stalled_has_work: Arc::default(),
            hung: AtomicBool::new(false),
            corruption: Corruption::new(twist.corrupts, &runs),
            streams: Arc::default(),
            paging_in: Mutex::default(),
            runs,
            state_bytes: Arc::default(),
            folder,
        }
    }

    fn tracking(&self, twist: Twist) -> FakeTracker {
        let means = if twist.quota { MeansUse::Quota } else { MeansUse::Auto };
        let tracking = FakeTracking {
            dirty: Arc::clone(&self.dirty),
            cut: Arc::clone(&self.cut),
            cuts: twist.cut,
            looks: 0,
            memory: self.from.clone(),
            writes: AtomicU32::new(twist.writes),
            shares: Arc::clone(&self.shares),
        };
        let quota = FakeQuota(Arc::clone(&self.shares));
        Throttled::new(tracking, quota, Throttling { means, vcpus: 2, pid: 1 })
    }

    fn source(&self, twist: Twist) -> FakeSource {
        FakeSource {
            guest: Arc::clone(&self.guest),
            inbox: None,
            memory: Arc::clone(&self.from[0]),
            dirty: Arc::clone(&self.dirty),
            cancels_itself: twist.cancels_itself,
            writes_without_end: twist.writes_without_end,
            overlaps: twist.overlaps.then(|| Arc::clone(&self.state_bytes)),
            after: self.secure.as_ref().map(|secure| Arc::clone(&secure.refused)),
            puts_off: twist.puts_off,
        }
    }

    /// Returns the destination's hypervisor.
    fn destination(&self, twist: Twist, log: mpsc::Sender<&'static str>) -> FakeDestination {
        FakeDestination {
            state_bytes: Arc::clone(&self.state_bytes),
            memory: twist.overlaps.then(|| Arc::clone(&self.to[0])),
            load_fails: twist.load_fails,
            runs: Arc::clone(&self.runs),
            page_in: twist.page_in.filter(|_| !twist.no_page_in).map(|cuts| self.page_in(cuts)),
            log,
        }
    }

    /// Runs the destination until the migration or the lane ends.
    fn receive(&self, control: Stream, twist: Twist, hypervisor: &mut FakeDestination) -> Ending {
        let control = match &self.secure {
            Some(secure) => control.secure_accepted(&secure.destination).unwrap().0,
            None => control,
        };
        let job = DestinationJob {
            control: welcome(control, ID, LIMIT).unwrap(),
            accept: &|| self.accept(),
            ownership: Ownership {
                epoch: 2 + u64::from(twist.other_epoch),
                incarnation: Incarnation::new(7 + u128::from(twist.other_incarnation)),
            },
            regions: self.to.clone(),
            offer: self.offer.clone(),
            hypervisor,
        };
        let (_keep, cancel) = mpsc::channel();
        let (ending, page_in) = receive(job, &cancel);
        if let Some(page_in) = page_in {
            *self.paging_in.lock() = Some(Arc::clone(&page_in));
            page_in.until_complete().unwrap();
            page_in.close();
        }
        ending
    }

    /// Waits a moment for a data stream.
    fn accept(&self) -> Option<WelcomedStream> {
        let Some(secure) = &self.secure else { return accept_one(&self.listener) };
        let stream =
            accept(std::slice::from_ref(&self.listener), Duration::from_millis(10)).unwrap()?;
        let secured = stream.secure_accepted(&secure.destination);
        secure.refused.fetch_or(secured.is_err(), Ordering::SeqCst);
        let (stream, _) = secured.ok()?;
        let welcomed = welcome(stream, ID, LIMIT).ok()?;
        secure.let_in.fetch_add(1, Ordering::SeqCst);
        Some(welcomed)
    }

    /// Connects a data stream, with the twist requested.
    fn connect<'scope>(
        &self,
        scope: &'scope std::thread::Scope<'scope, '_>,
        twist: Twist,
        pace: &MigrationPace,
        carries: Carries,
        interrupt: &Interrupt,
    ) -> Result<Stream, Failure> {
        let lost = |error: LaneError| Failure::new(FailureCode::LaneLost, error.to_string());
        if twist.hangs && !self.hung.swap(true, Ordering::SeqCst) {
            let (_full, _first, lane) = unanswering();
            return interrupt
                .connect(lane, Duration::from_secs(3600), Carries::Pages)
                .map_err(lost);
        }
        let mut stalled = self.stalled.lock();
        let lane = match stalled.as_mut() {
            Some(sockets) if sockets.is_empty() => {
                stalling_lane(scope, self.lane.to, sockets, &self.stalled_has_work)
            }
            Some(_) => {
                // It would do all the work.
                while !self.stalled_has_work.load(Ordering::SeqCst) {
                    std::thread::yield_now();
                }
                self.lane
            }
            None => self.corruption.lane(scope, self.lane, carries == Carries::Urgent),
        };
        drop(stalled);
        if let (Some(secure), Some(last)) = (&self.secure, twist.certificate_ends_after) {
            secure.data_stream_comes(last);
        }
        let stream = connect(lane, LIMIT).map_err(lost)?;
        let stream = match &self.secure {
            Some(secure) => stream.secure(&secure.source, "b").map_err(lost)?,
            None => stream,
        };
        let mut cut = self.cut.lock();
        if cut.len() < twist.cut {
            cut.push(stream.clone());
        }
        drop(cut);
        self.streams.lock().push(stream.clone());
        let near = stream.local().unwrap().ip();
        Ok(stream.paced(pace.stream(near)))
    }

    fn page_in(&self, cuts: usize) -> (FakeFaults, PathBuf) {
        let faults = FakeFaults {
            from: self.from.clone(),
            to: self.to.clone(),
            cuts: AtomicUsize::new(cuts),
            streams: Arc::clone(&self.streams),
            watched: Mutex::default(),
            reported: AtomicBool::new(false),
            runs: Arc::clone(&self.runs),
        };
        (faults, self.folder.path().join("missing"))
    }

    /// Negotiates another session, as the agents do after a cut.
    fn another_session(&self, is_over: &dyn Fn() -> bool) -> Again {
        let paging_in = loop {
            if let Some(paging_in) = self.paging_in.lock().clone() {
                break paging_in;
            }
            if is_over() {
                return Again::Refused(Failure::new(FailureCode::Cancelled, "over"));
            }
            std::thread::yield_now();
        };
        if paging_in.missing_pages() == 0 {
            return Again::Complete;
        }
        let session = paging_in.new_session();
        let open = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !open.load(Ordering::SeqCst) {
                    if let Some(stream) = accept_one(&self.listener) {
                        paging_in.admit(session, stream);
                    }
                }
            });
            let connect = |_: usize, _: Carries, _: &Interrupt| {
                let stream = connect(self.lane, LIMIT).map_err(|error| lane_failure(&error))?;
                self.streams.lock().push(stream.clone());
                Ok(stream)
            };
            let opened = open_session(&connect, 1, &Interrupt::default(), HELLO, Carries::Pages);
            open.store(true, Ordering::SeqCst);
            Again::Session(opened.unwrap())
        })
    }

    /// Runs the source until the migration or the lane ends; `kept`: the state left by an earlier
    /// lane.
    pub(crate) fn send<'scope>(
        &self,
        scope: &'scope std::thread::Scope<'scope, '_>,
        control: Stream,
        twist: Twist,
        pace: &MigrationPace,
        watch: &(dyn Fn(&Inbox, Progress) + Sync),
        kept: Option<Kept<FakeTracker>>,
    ) -> (SourceResult, Option<Kept<FakeTracker>>) {
        let (tracker, resumes) = match kept {
            Some(kept) => (kept.tracker, Some(kept.unsent)),
            None => (self.tracking(twist), None),
        };
        let control = match &self.secure {
            Some(secure) => control.secure(&secure.source, "b").unwrap(),
            None => control,
        };
        let (inbox, events) = inbox();
        let watcher = inbox.clone();
        let job = SourceJob {
            control,
            connect: &|_, carries, interrupt| self.connect(scope, twist, pace, carries, interrupt),
            lanes: 1,
            streams: Some(twist.streams.max(1)),
            pace: pace.clone(),
            migration: ID,
            ownership: SECOND,
            runs: !twist.paused,
            policy: twist.policy(),
            compression: twist.compression,
            references: twist.references,
            contents: twist.describes.iter().map(described).collect(),
            deltas: twist.deltas,
            experience: Arc::default(),
            course: Course { begin_at: 0.3, backwards: true },
            preflight: Duration::ZERO,
            regions: self.from.clone(),
            departing: Some(Arc::clone(&self.departing)),
            tracker,
            resumes,
            hypervisor: self.source(twist),
            begun: Instant::now(),
            progress: &|progress| watch(&watcher, progress),
            ask_verdict: &|| Verdict::Unknown,
            page_in_again: &|is_over| self.another_session(is_over),
        };
        send(job, &inbox, events)
    }
}

fn described(kind: &ContentKind) -> DescribedContent {
    DescribedContent { kind: *kind, read_bytes_per_s: None }
}

/// Migrates under limits. `watch` sees each progress report, and may change the limits or cancel.
pub(crate) fn migrate_paced(
    twist: Twist,
    pace: &MigrationPace,
    watch: &(dyn Fn(&Inbox, Progress) + Sync),
) -> Moved {
    migrate_offered(twist, pace, watch, Offer::default())
}

/// Migrates to a destination that has other memory.
pub(crate) fn migrate_offered(
    twist: Twist,
    pace: &MigrationPace,
    watch: &(dyn Fn(&Inbox, Progress) + Sync),
    offer: Offer,
) -> Moved {
    let world = World { offer, ..World::new(twist) };
    let (log, logged) = mpsc::channel();
    let mut there = world.destination(twist, log);
    let (mut kept, mut unsent) = (None, Vec::new());
    let (result, ending) = loop {
        let (result, ending, left) = std::thread::scope(|scope| {
            let lane = world.corruption.control_lane(scope, world.lane);
            let (control, far_control) = stream(&world.listener, lane);
            let receiving = scope.spawn(|| world.receive(far_control, twist, &mut there));
            let (result, left) = world.send(scope, control, twist, pace, watch, kept.take());
            (result, receiving.join().unwrap(), left)
        });
        let goes_on = left.filter(|_| twist.reconnects && matches!(ending, Ending::Cut(_)));
        let Some(left) = goes_on else { break (result, ending) };
        unsent.push(left.unsent.pages());
        kept = Some(left);
    };
    let ending = match ending {
        Ending::Cut(failure) => {
            there.discard(&failure);
            Ending::Discarded(failure)
        }
        other => other,
    };
    drop(there);
    let same_memory = content(&world.from) == content(&world.to);
    let shares = world.shares.lock().clone();
    let logged = logged.try_iter().collect();
    let is_over = result.outcome == Outcome::Completed;
    let hashed_pages = if is_over { hashed_pages(&world.departing, &world.from) } else { 0 };
    Moved { result, ending, guest: world.guest, logged, same_memory, shares, unsent, hashed_pages }
}

/// Checks that what is known of a guest's memory is true, and returns the number of pages whose
/// hashes are known. All pages are overwritten for that: a hash that is not of what they held was
/// computed now.
fn hashed_pages(departing: &Content, from: &[Arc<Region>]) -> usize {
    const NEW: [u8; 4096] = [0xee; 4096];
    let before: Vec<u64> = content(from)
        .iter()
        .flat_map(|block| block.chunks_exact(NEW.len()).map(|page| prefix(&hash_page(page))))
        .collect();
    for region in from {
        for page in 0..region.pages() {
            region.copy_in(page * PAGE_SIZE, &NEW).unwrap();
        }
    }
    let digests =
        departing.pieces().flat_map(|(block, piece)| departing.digests(block, piece).unwrap());
    let known: Vec<u64> = digests.collect();
    assert_eq!(known.len(), before.len());
    let new = prefix(&hash_page(&NEW));
    let hashed = known.iter().zip(&before).filter(|(known, _)| **known != new);
    hashed.inspect(|(known, before)| assert_eq!(known, before, "not what the page held")).count()
}

/// Runs a source against a test's fake destination and returns the result. `speak` gets the control
/// stream.
pub(crate) fn lying_destination(speak: impl FnOnce(Stream) + Send) -> SourceResult {
    let (twist, pace) = (Twist::default(), Pacing::default().migration(RateLimit::NONE));
    let world = World::new(twist);
    let (control, far_control) = stream(&world.listener, world.lane);
    std::thread::scope(|scope| {
        scope.spawn(|| speak(far_control));
        world.send(scope, control, twist, &pace, &|_, _| {}, None).0
    })
}
