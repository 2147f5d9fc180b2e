//! Work between the stop and the hand-over: it follows what the guest has written, not its size.

use std::net::TcpListener;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use godwit_lanes::pacing::{MigrationPace, Pacing};
use godwit_lanes::{Stream, connect};
use godwit_migration::destination::Ending;
use godwit_migration::drive::page_in::Again;
use godwit_migration::drive::{
    Course, Deltas, DestinationJob, HypervisorEvent, Inbox, Offer, References, SourceHypervisor,
    SourceJob, SourceResult, Tracking, inbox, lane_failure, receive, send, welcome,
};
use godwit_migration::source::Verdict;
use godwit_migration::{Failure, Policy};
use godwit_ram::{
    CHUNK_PAGES, DirtyCount, FaultFigures, PAGE_SIZE, PageRange, Region, ThrottleFigures,
    TrackError,
};
use godwit_types::{Compression, Lane, Outcome, RateLimit};
use godwit_wire::BlockRun;

use crate::fakes::{Dirty, FakeDestination};
use crate::ways::path;
use crate::world::{ID, LIMIT, SECOND, accept_one, loopback, stream};

/// Memory of the smaller and of the larger guest.
const SIZES_GIB: [u64; 2] = [1, 64];
/// Pages that either guest writes before it stops, spread over the first GiB.
const WRITTEN_PAGES: u64 = 200;
const DISTANCE_PAGES: u64 = 1291;
const _: () = assert!(WRITTEN_PAGES * DISTANCE_PAGES * PAGE_SIZE < 1 << 30);
/// Looks at the memory of a paused guest: one sweep at once, one after the device state. A third
/// would be one while devices have stopped, which no hypervisor here announces.
const LOOKS: u64 = 2;

fn written() -> impl Iterator<Item = u64> {
    (0..WRITTEN_PAGES).map(|number| number * DISTANCE_PAGES)
}

/// Looks at the memory since the stop was announced.
#[derive(Default)]
struct Looks {
    is_stopping: AtomicBool,
    looks: AtomicU64,
    pages: AtomicU64,
}

impl Looks {
    fn note(&self, pages: u64) {
        if self.is_stopping.load(Ordering::SeqCst) {
            self.looks.fetch_add(1, Ordering::SeqCst);
            self.pages.fetch_add(pages, Ordering::SeqCst);
        }
    }
}

/// Tracking of one block that counts the pages a look goes over: by faults the dirty ones, by scans
/// all.
struct Counting {
    dirty: Dirty,
    memory_pages: u64,
    by_faults: bool,
    looks: Arc<Looks>,
}

impl Counting {
    fn looked(&self, scanned_pages: u64, found_pages: u64) {
        self.looks.note(if self.by_faults { found_pages } else { scanned_pages });
    }

    fn find(&self, block: usize, within: PageRange, most: u64) -> Vec<u64> {
        let most = usize::try_from(most).unwrap_or(usize::MAX);
        let dirty = self.dirty.lock();
        let found = dirty.range((block, within.first)..(block, within.end())).take(most);
        found.map(|(_, page)| *page).collect()
    }
}

impl Tracking for Counting {
    fn start(&mut self) -> Result<(), TrackError> {
        self.dirty.lock().clear();
        self.looked(self.memory_pages, self.memory_pages);
        Ok(())
    }

    fn check_notes(&mut self) -> Result<(), TrackError> {
        self.looked(self.memory_pages, self.memory_pages);
        Ok(())
    }

    fn take_dirty(
        &mut self,
        block: usize,
        within: PageRange,
        max_pages: u64,
        out: &mut Vec<PageRange>,
    ) -> Result<u64, TrackError> {
        let found = self.find(block, within, max_pages);
        let is_full = found.len() as u64 == max_pages;
        let last = found.last().filter(|_| is_full);
        let next = last.map_or(within.end(), |page| page + 1);
        self.looked(next - within.first, found.len() as u64);
        for page in found {
            self.dirty.lock().remove(&(block, page));
            out.push(PageRange::new(page, 1));
        }
        Ok(next)
    }

    fn peek_dirty(
        &mut self,
        block: usize,
        within: PageRange,
        out: &mut Vec<PageRange>,
    ) -> Result<(), TrackError> {
        let found = self.find(block, within, u64::MAX);
        self.looked(within.count, found.len() as u64);
        out.extend(found.into_iter().map(|page| PageRange::new(page, 1)));
        Ok(())
    }

    fn count_dirty(&self) -> Result<DirtyCount, TrackError> {
        let pages = self.dirty.lock().len() as u64;
        self.looked(self.memory_pages, pages);
        let fullest_chunk_pages = pages.min(CHUNK_PAGES);
        Ok(DirtyCount { pages, fullest_chunk_pages, ..DirtyCount::default() })
    }

    fn throttle(&mut self, _: Option<f64>) -> Result<(), TrackError> {
        Ok(())
    }

    fn let_change(&mut self, _: bool) {}

    fn changed_over(&self) -> Vec<PageRange> {
        Vec::new()
    }

    fn let_stop(&mut self) {
        self.looks.is_stopping.store(true, Ordering::SeqCst);
    }

    fn throttle_figures(&self) -> ThrottleFigures {
        ThrottleFigures::default()
    }

    fn fault_figures(&self) -> FaultFigures {
        FaultFigures { by_faults: self.by_faults, ..FaultFigures::default() }
    }
}

/// Hypervisor of a guest that writes all of its pages right before it stops.
struct LateWriter {
    memory: Arc<Region>,
    dirty: Dirty,
    inbox: Option<Inbox>,
}

impl SourceHypervisor for LateWriter {
    fn begin_switchover(&mut self, events: &Inbox, _page_in: bool) -> Result<(), Failure> {
        for page in written() {
            self.memory.copy_in(page * PAGE_SIZE, &[0xee; 64]).unwrap();
            self.dirty.lock().insert((0, page));
        }
        events.device_state(&[1; 500])?;
        events.hypervisor(Instant::now(), HypervisorEvent::Stopped);
        self.inbox = Some(events.clone());
        Ok(())
    }

    fn write_device_state(&mut self) -> Result<(), Failure> {
        let inbox = self.inbox.as_ref().unwrap();
        inbox.device_state(&vec![2; 300_000])?;
        inbox.hypervisor(Instant::now(), HypervisorEvent::DeviceStateEnded);
        Ok(())
    }

    fn resume(&mut self) -> Result<(), Failure> {
        panic!("the switchover was undone")
    }

    fn release(&mut self, _hot: Vec<BlockRun>) {}
}

/// Work of a pause.
#[derive(Debug, PartialEq, Eq)]
struct Pause {
    looks: u64,
    looked_pages: u64,
    /// Pages sent after the stop.
    sent_pages: u64,
    /// Bytes that the memory's files take at both ends afterwards: reading a hole fills it.
    filled_bytes: [u64; 2],
}

/// Memory at both ends, and the path between them.
struct Ends {
    from: Arc<Region>,
    to: Arc<Region>,
    listener: TcpListener,
    lane: Lane,
    pace: MigrationPace,
}

impl Ends {
    fn new(folder: &Path, gib: u64) -> Ends {
        let region =
            |name: &str| Arc::new(Region::create(&folder.join(name), gib << 30, None).unwrap());
        let (listener, lane) = path(loopback());
        let pace = Pacing::default().migration(RateLimit::NONE);
        Ends { from: region("from"), to: region("to"), listener, lane, pace }
    }

    fn receive(&self, control: Stream) -> Ending {
        let (log, _logged) = mpsc::channel();
        let mut hypervisor = FakeDestination {
            state_bytes: Arc::default(),
            memory: None,
            load_fails: false,
            page_in: None,
            runs: Arc::default(),
            log,
        };
        let job = DestinationJob {
            control: welcome(control, ID, LIMIT).unwrap(),
            accept: &|| accept_one(&self.listener),
            ownership: SECOND,
            regions: vec![Arc::clone(&self.to)],
            offer: Offer::default(),
            hypervisor: &mut hypervisor,
        };
        let (_keep, cancel) = mpsc::channel();
        receive(job, &cancel).0
    }

    fn send(&self, control: Stream, tracker: Counting) -> SourceResult {
        let (inbox, events) = inbox();
        let (from, dirty) = (Arc::clone(&self.from), Arc::clone(&tracker.dirty));
        let job = SourceJob {
            control,
            connect: &|_, _, _| {
                let stream = connect(self.lane, LIMIT).map_err(|error| lane_failure(&error))?;
                let near = stream.local().unwrap().ip();
                Ok(stream.paced(self.pace.stream(near)))
            },
            lanes: 1,
            streams: Some(1),
            pace: self.pace.clone(),
            migration: ID,
            ownership: SECOND,
            runs: true,
            policy: Policy::default(),
            compression: Compression::None,
            references: References::default(),
            contents: Vec::new(),
            deltas: Deltas::default(),
            experience: Arc::default(),
            course: Course::default(),
            preflight: Duration::ZERO,
            regions: vec![Arc::clone(&self.from)],
            departing: None,
            tracker,
            resumes: None,
            hypervisor: LateWriter { memory: from, dirty, inbox: None },
            begun: Instant::now(),
            progress: &|_| {},
            ask_verdict: &|| Verdict::Unknown,
            page_in_again: &|_| Again::Complete,
        };
        send(job, &inbox, events).0
    }
}

/// Moves a guest whose memory is a hole but for what it writes last.
fn pause(gib: u64, by_faults: bool) -> Pause {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let ends = Ends::new(folder.path(), gib);
    let looks = Arc::<Looks>::default();
    let tracker = Counting {
        dirty: Dirty::default(),
        memory_pages: ends.from.pages(),
        by_faults,
        looks: Arc::clone(&looks),
    };
    let (control, far_control) = stream(&ends.listener, ends.lane);
    let (result, ending) = std::thread::scope(|scope| {
        let receiving = scope.spawn(|| ends.receive(far_control));
        let result = ends.send(control, tracker);
        (result, receiving.join().unwrap())
    });
    assert_eq!(result.outcome, Outcome::Completed, "{:?}", result.failure);
    assert_eq!(ending, Ending::Runs);
    let mut bytes = [0; 64];
    for page in written() {
        ends.to.copy_out(page * PAGE_SIZE, &mut bytes).unwrap();
        assert_eq!(bytes, [0xee; 64], "page {page}");
    }
    let filled = |region: &Region| region.path().metadata().unwrap().blocks() * 512;
    Pause {
        looks: looks.looks.load(Ordering::SeqCst),
        looked_pages: looks.pages.load(Ordering::SeqCst),
        sent_pages: result.rounds.last().unwrap().pages,
        filled_bytes: [filled(&ends.from), filled(&ends.to)],
    }
}

#[test]
fn the_pause_of_a_guest_tracked_by_faults_does_not_depend_on_its_size() {
    let [small, large] = SIZES_GIB.map(|gib| pause(gib, true));
    assert_eq!((small.looks, small.looked_pages), (LOOKS, WRITTEN_PAGES));
    assert_eq!(small.sent_pages, WRITTEN_PAGES);
    assert_eq!(large, small);
}

/// Scans read the page tables of all memory, once each, and nothing else grows with it.
#[test]
fn the_pause_of_a_guest_tracked_by_scans_has_its_scans_and_no_other_work_of_its_size() {
    let [small, large] = SIZES_GIB.map(|gib| pause(gib, false));
    let pages = |gib: u64| (gib << 30) / PAGE_SIZE;
    assert_eq!((small.looks, small.looked_pages), (LOOKS, LOOKS * pages(SIZES_GIB[0])));
    let but_scans = |pause: Pause, gib: u64| Pause {
        looked_pages: pause.looked_pages - LOOKS * pages(gib),
        ..pause
    };
    let [small_gib, large_gib] = SIZES_GIB;
    assert_eq!(but_scans(large, large_gib), but_scans(small, small_gib));
}
