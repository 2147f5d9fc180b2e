//! The thread that answers waiting writes.

use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;

use super::chunks::Chunks;
use super::dirty_pages::DirtyPages;
use super::pacer::{Pacer, Release};
use super::places::Places;
use crate::pages::{PAGE_SIZE, PageRange};
use crate::tracking::block::{Block, CHUNK_PAGES};
use crate::tracking::figures::FaultFigures;
use crate::tracking::uffd::{Fault, Userfaultfd};

/// Without a limit, 2 MiB of which so many pages are dirty become dirty as a whole: their other
/// pages are released with the last of them. A 16th.
const FULL_AT_PAGES: u64 = 32;
/// Limit as [`FULL_AT_PAGES`] for a guest that waits too often: a 64th.
const FULL_EARLY_AT_PAGES: u64 = 8;
/// Writes per second that may wait for an answer before [`FULL_EARLY_AT_PAGES`] applies. An answer
/// took 0.08 to 0.13 ms on two busy cores, so a guest with one vCPU loses about 2 % of its time.
const ALLOWED_FAULTS_PER_S: f64 = 200.0;
/// Number of writes that may wait at once in addition.
const ALLOWED_BURST: f64 = 500.0;
/// Pause between two attempts after a failure.
const FAILED_PAUSE: Duration = Duration::from_millis(10);
/// Maximum threads whose kind is remembered.
const MOST_THREADS: usize = 1024;

/// Statistics of a throttle.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ThrottleFigures {
    /// Writes that were answered.
    pub faults: u64,
    /// Pages released by the answers.
    pub pages: u64,
    /// Total time that vCPUs waited.
    pub held: Duration,
    /// Total time that the answering thread was busy.
    pub answering: Duration,
}

/// The thread and what it shares with the tracker. Dropping it lets every write go on.
pub(super) struct Handler {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    userfaultfd: Userfaultfd,
    places: Places,
    /// Whether 2 MiB become dirty as a whole at [`FULL_AT_PAGES`], without a limit.
    fills: bool,
    /// Synchronous memory by block. Locked while a page is noted and released, and while pages are
    /// taken and protected.
    blocks: Mutex<Vec<SyncBlock>>,
    /// Descriptor that ends a wait for faults.
    nudge: std::os::fd::OwnedFd,
    begun: Instant,
    pacer: Mutex<Pacer>,
    over: AtomicBool,
    /// Whether the thread cannot read faults any more: waiting threads wait until the userfaultfd
    /// is closed.
    failed: AtomicBool,
    paced: Counters,
    free: Counters,
    pages: AtomicU64,
    held_ns: AtomicU64,
}

/// Answers, with a limit or without.
#[derive(Default)]
struct Counters {
    faults: AtomicU64,
    answering_ns: AtomicU64,
}

impl Counters {
    fn faults(&self) -> u64 {
        self.faults.load(Ordering::Relaxed)
    }

    fn answering(&self) -> Duration {
        Duration::from_nanos(self.answering_ns.load(Ordering::Relaxed))
    }
}

/// Block's memory under synchronous protection, and what was written to it.
pub(super) struct SyncBlock {
    pub(super) chunks: Chunks,
    pub(super) dirty: DirtyPages,
}

impl Handler {
    /// Answers the faults of process `pid`, without a limit at first. `vcpus`: the threads that a
    /// limit holds; if empty, all threads. `fills`: whether 2 MiB become dirty as a whole, see
    /// [`FULL_AT_PAGES`].
    pub(super) fn start(
        userfaultfd: Userfaultfd,
        pid: i32,
        vcpus: &[u32],
        blocks: &[Block],
        fills: bool,
    ) -> Result<Handler, Errno> {
        let of_block = |block: &Block| SyncBlock {
            chunks: Chunks::new(block.pages, blocks.len()),
            dirty: DirtyPages::new(block.pages),
        };
        let shared = Arc::new(Shared {
            userfaultfd,
            places: Places::new(blocks),
            fills,
            blocks: Mutex::new(blocks.iter().map(of_block).collect()),
            nudge: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            begun: Instant::now(),
            pacer: Mutex::new(Pacer::new()),
            over: AtomicBool::new(false),
            failed: AtomicBool::new(false),
            paced: Counters::default(),
            free: Counters::default(),
            pages: AtomicU64::new(0),
            held_ns: AtomicU64::new(0),
        });
        let threads =
            Threads { pid, vcpus: vcpus.iter().copied().collect(), known: HashMap::new() };
        let thread = std::thread::Builder::new()
            .name("godwit-faults".to_owned())
            .spawn({
                let shared = Arc::clone(&shared);
                move || run(&shared, threads)
            })
            .map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::AGAIN))?;
        Ok(Handler { shared, thread: Some(thread) })
    }

    /// Sets the limit in pages per second; `None`: no limit.
    pub(super) fn set_limit(&self, pages_per_s: Option<f64>) {
        let now = self.shared.begun.elapsed();
        self.shared.lock().set_limit(now, pages_per_s);
        self.shared.nudge();
    }

    /// Announces that the guest is being stopped: from now on no write waits for long, until the
    /// next limit is set.
    pub(super) fn let_stop(&self) {
        self.shared.lock().let_stop();
        self.shared.nudge();
    }

    /// Locks what is known of the synchronous memory: no write to it goes on meanwhile.
    pub(super) fn blocks(&self) -> MutexGuard<'_, Vec<SyncBlock>> {
        self.shared.blocks.lock()
    }

    /// Returns the userfaultfd that governs the synchronous memory.
    pub(super) fn userfaultfd(&self) -> &Userfaultfd {
        &self.shared.userfaultfd
    }

    /// Returns whether faults are still answered.
    pub(super) fn is_well(&self) -> bool {
        !self.shared.failed.load(Ordering::Relaxed)
    }

    pub(super) fn figures(&self) -> ThrottleFigures {
        ThrottleFigures {
            faults: self.shared.paced.faults(),
            pages: self.shared.pages.load(Ordering::Relaxed),
            held: Duration::from_nanos(self.shared.held_ns.load(Ordering::Relaxed)),
            answering: self.shared.paced.answering(),
        }
    }

    pub(super) fn fault_figures(&self) -> FaultFigures {
        let free = &self.shared.free;
        FaultFigures {
            faults: free.faults(),
            answering: free.answering(),
            ..FaultFigures::default()
        }
    }
}

impl Drop for Handler {
    fn drop(&mut self) {
        self.shared.over.store(true, Ordering::SeqCst);
        self.shared.nudge();
        if let Some(thread) = self.thread.take() {
            // The thread has no result. With it goes the last use of the userfaultfd, which is
            // closed below.
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Pacer> {
        self.pacer.lock()
    }

    fn nudge(&self) {
        // The write fails only if the counter is full, and then the thread has been notified
        // already.
        let _ = rustix::io::write(&self.nudge, &1u64.to_ne_bytes());
    }

    /// Lets a write go on, together with its neighbours. Counts it first, so that an observer who
    /// sees the write go on sees it counted.
    fn release(&self, Release { fault, pages, held }: Release) {
        let held_ns = u64::try_from(held.as_nanos()).unwrap_or(u64::MAX);
        self.held_ns.fetch_add(held_ns, Ordering::Relaxed);
        self.paced.faults.fetch_add(1, Ordering::Relaxed);
        self.pages.fetch_add(u64::from(pages), Ordering::Relaxed);
        self.let_write(fault, pages.into(), None);
    }

    /// Lets a write go on without a limit, with the pages around it if enough of them are dirty.
    fn release_freely(&self, fault: Fault, full_at_pages: u64) {
        self.free.faults.fetch_add(1, Ordering::Relaxed);
        self.let_write(fault, 1, Some(full_at_pages).filter(|_| self.fills));
    }

    /// Releases the aligned `pages` pages that contain the fault, and notes that they are dirty.
    /// The 2 MiB around them follow if `full_at_pages` of them are dirty.
    fn let_write(&self, fault: Fault, pages: u64, full_at_pages: Option<u64>) {
        let page_address = fault.address & !(PAGE_SIZE - 1);
        let mut blocks = self.blocks.lock();
        let noted = self.places.find(page_address).and_then(|(number, mapping)| {
            let page = mapping.first + (page_address - mapping.address) / PAGE_SIZE;
            let block = blocks.get_mut(number).filter(|of| of.chunks.is_synchronous(page))?;
            let within = mapping.pages().intersect(block.chunks.chunk_of(page));
            let mut around = PageRange::new(page / pages * pages, pages).intersect(within);
            block.dirty.insert(around);
            if full_at_pages.is_some_and(|most| block.dirty.count_near(page) >= most) {
                let first = page / CHUNK_PAGES * CHUNK_PAGES;
                around = PageRange::new(first, CHUNK_PAGES).intersect(within);
                block.dirty.fill(around);
            }
            Some((mapping.address_of(around.first), around.len_bytes()))
        });
        let (first, len_bytes) = noted.unwrap_or((page_address, PAGE_SIZE));
        let released = self.userfaultfd.release(first, len_bytes);
        let released = released.or_else(|_| self.userfaultfd.release(page_address, PAGE_SIZE));
        if released.is_err() {
            // The memory is no longer synchronous: the write may be retried. A process that has
            // ended waits for nothing.
            let _ = self.userfaultfd.wake(page_address, PAGE_SIZE);
        }
    }

    fn wait(&self) -> Result<(), Errno> {
        let now = self.begun.elapsed();
        let until = self.lock().next_at(now);
        let timeout = until.map(|until| timespec(until.saturating_sub(now)));
        let (faults, nudge) = (self.userfaultfd.as_fd(), &self.nudge);
        let mut sources =
            [PollFd::from_borrowed_fd(faults, PollFlags::IN), PollFd::new(nudge, PollFlags::IN)];
        match poll(&mut sources, timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
        if sources.last().is_some_and(|nudge| !nudge.revents().is_empty()) {
            // Resets the counter, whatever its value.
            let _ = rustix::io::read(&self.nudge, &mut [0; 8]);
        }
        Ok(())
    }
}

/// Reports that no write is answered any more, should the thread end before the tracking does.
struct EndsEarly<'a>(&'a Shared);

impl Drop for EndsEarly<'_> {
    fn drop(&mut self) {
        if !self.0.over.load(Ordering::SeqCst) {
            self.0.failed.store(true, Ordering::Relaxed);
        }
    }
}

fn run(shared: &Shared, mut threads: Threads) {
    let _guard = EndsEarly(shared);
    let mut faults = Vec::new();
    let mut allowed = Allowed { faults: ALLOWED_BURST, refilled: Duration::ZERO };
    while !shared.over.load(Ordering::SeqCst) {
        let waited = shared.wait();
        let begun = Instant::now();
        if waited.and_then(|()| shared.userfaultfd.read_faults(&mut faults)).is_err() {
            // The tracker ends the throttle at its next call. Until then waiting threads are
            // answered as far as possible.
            shared.failed.store(true, Ordering::Relaxed);
            shared.lock().set_limit(shared.begun.elapsed(), None);
            let _ = poll(
                &mut [PollFd::new(&shared.nudge, PollFlags::IN)],
                Some(&timespec(FAILED_PAUSE)),
            );
        }
        let now = shared.begun.elapsed();
        let is_limited = shared.lock().is_limited();
        allowed.refill(now);
        for fault in faults.drain(..) {
            if !is_limited {
                shared.release_freely(fault, allowed.full_at_pages());
            } else if threads.are_held(fault.thread) {
                shared.lock().add(now, fault);
            } else {
                shared.lock().charge(now, 1);
                shared.release(Release { fault, pages: 1, held: Duration::ZERO });
            }
        }
        loop {
            // Not under the lock, so that a change of the limit does not wait for the kernel.
            let next = shared.lock().next(shared.begun.elapsed());
            let Some(release) = next else { break };
            shared.release(release);
        }
        let answering_ns = u64::try_from(begun.elapsed().as_nanos()).unwrap_or(u64::MAX);
        let counters = if is_limited { &shared.paced } else { &shared.free };
        counters.answering_ns.fetch_add(answering_ns, Ordering::Relaxed);
    }
}

/// Writes that may wait for an answer, as a bucket that fills at [`ALLOWED_FAULTS_PER_S`].
struct Allowed {
    faults: f64,
    refilled: Duration,
}

impl Allowed {
    fn refill(&mut self, now: Duration) {
        let passed = now.saturating_sub(self.refilled).as_secs_f64();
        self.refilled = now;
        self.faults = (self.faults + passed * ALLOWED_FAULTS_PER_S).min(ALLOWED_BURST);
    }

    /// Counts a write. Returns the number of dirty pages at which 2 MiB become dirty as a whole.
    fn full_at_pages(&mut self) -> u64 {
        let is_within = self.faults >= 1.0;
        self.faults = (self.faults - 1.0).max(0.0);
        if is_within { FULL_AT_PAGES } else { FULL_EARLY_AT_PAGES }
    }
}

/// Classification of threads. The guest's vCPUs are held. QEMU's other threads (devices, the
/// monitor, vhost) are not, because the whole guest would wait with them. A thread that does not
/// belong to the process is KVM's: it fetches a page on behalf of a vCPU while that runs another
/// task of the guest (asynchronous page faults).
struct Threads {
    pid: i32,
    vcpus: HashSet<u32>,
    known: HashMap<u32, bool>,
}

impl Threads {
    fn are_held(&mut self, thread: u32) -> bool {
        if self.vcpus.is_empty() || self.vcpus.contains(&thread) {
            return true;
        }
        if self.known.len() > MOST_THREADS {
            self.known.clear();
        }
        let pid = self.pid;
        let is_of_process = || Path::new(&format!("/proc/{pid}/task/{thread}")).exists();
        *self.known.entry(thread).or_insert_with(|| !is_of_process())
    }
}

fn timespec(duration: Duration) -> Timespec {
    Timespec {
        tv_sec: i64::try_from(duration.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: duration.subsec_nanos().into(),
    }
}
