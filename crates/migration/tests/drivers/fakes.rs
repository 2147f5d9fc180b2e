//! A guest, its hypervisors and the tracking of its memory that exist only here.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use godwit_lanes::Stream;
use godwit_migration::Failure;
use godwit_migration::drive::page_in::Faults;
use godwit_migration::drive::{
    CpuQuota, DestinationHypervisor, HypervisorEvent, Inbox, Noted, SourceHypervisor, Tracking,
};
use godwit_ram::{
    CHUNK_PAGES, DirtyCount, PAGE_SIZE, PageRange, Region, ThrottleFigures, TrackError,
};
use godwit_types::FailureCode;
use godwit_wire::BlockRun;
use parking_lot::Mutex;

use super::faults::FakeFaults;

/// Pages written, as (block, page).
pub(crate) type Dirty = Arc<Mutex<BTreeSet<(usize, u64)>>>;

pub(crate) struct FakeTracking {
    pub(super) dirty: Dirty,
    /// Streams that are cut at the second look at the memory.
    pub(super) cut: Arc<Mutex<Vec<Stream>>>,
    /// Number of those streams.
    pub(super) cuts: usize,
    pub(super) looks: u32,
    /// Memory that the guest writes between rounds, and how often it still does.
    pub(super) memory: Vec<Arc<Region>>,
    pub(super) writes: AtomicU32,
    /// Shares of CPU time: the guest does not write with less than [`IDLE_SHARE`].
    pub(super) shares: Shares,
}

/// Shares of its CPUs that a guest was given, in order.
pub(crate) type Shares = Arc<Mutex<Vec<Option<f64>>>>;

/// Share below which the guest does nothing.
const IDLE_SHARE: f64 = 0.3;

pub(crate) struct FakeQuota(pub(super) Shares);

impl CpuQuota for FakeQuota {
    fn set_share(&mut self, share: Option<f64>) -> std::io::Result<()> {
        self.0.lock().push(share);
        Ok(())
    }
}

impl FakeTracking {
    /// Writes a little to every page except each fourth.
    fn guest_writes(&self, time: u32) {
        let byte = u8::try_from(time % 200 + 1).unwrap();
        let mut dirty = self.dirty.lock();
        for (block, region) in self.memory.iter().enumerate() {
            for page in (0..region.pages()).filter(|page| page % 4 != 0) {
                region.copy_in(page * PAGE_SIZE + (page * 64 + 7) % 4000, &[byte; 24]).unwrap();
                dirty.insert((block, page));
            }
        }
    }
}

impl FakeTracking {
    /// Notes a look at the memory: the second one cuts the streams that are to be cut.
    fn looked(&mut self) {
        self.looks += 1;
        if self.looks == 2 {
            // Not before all of them exist: a later one would remain.
            while self.cut.lock().len() < self.cuts {
                std::thread::yield_now();
            }
            self.cut.lock().drain(..).for_each(|stream| stream.close());
        }
    }
}

impl Tracking for FakeTracking {
    fn start(&mut self) -> Result<(), TrackError> {
        self.dirty.lock().clear();
        Ok(())
    }

    fn take_dirty(
        &mut self,
        block: usize,
        within: PageRange,
        max_pages: u64,
        out: &mut Vec<PageRange>,
    ) -> Result<u64, TrackError> {
        self.looked();
        let mut dirty = self.dirty.lock();
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

    fn peek_dirty(
        &mut self,
        block: usize,
        within: PageRange,
        out: &mut Vec<PageRange>,
    ) -> Result<(), TrackError> {
        self.looked();
        let dirty = self.dirty.lock();
        let found = dirty.range((block, within.first)..(block, within.end()));
        out.extend(found.map(|entry| PageRange { first: entry.1, count: 1 }));
        Ok(())
    }

    fn count_dirty(&self) -> Result<DirtyCount, TrackError> {
        let share = self.shares.lock().last().copied().flatten();
        let may = share.is_none_or(|share| share > IDLE_SHARE);
        let next = |left: u32| left.checked_sub(1).filter(|_| may);
        let left = self.writes.fetch_update(Ordering::SeqCst, Ordering::SeqCst, next);
        left.into_iter().for_each(|left| self.guest_writes(left));
        let pages = self.dirty.lock().len() as u64;
        Ok(DirtyCount {
            pages,
            fullest_chunk_pages: pages.min(CHUNK_PAGES),
            ..DirtyCount::default()
        })
    }

    fn throttle(&mut self, _: Option<f64>) -> Result<(), TrackError> {
        Ok(())
    }

    fn let_change(&mut self, _: bool) {}

    fn changed_over(&self) -> Vec<PageRange> {
        Vec::new()
    }

    fn let_stop(&mut self) {}

    fn throttle_figures(&self) -> ThrottleFigures {
        ThrottleFigures::default()
    }
}

/// A test's view of the source's guest.
#[derive(Default)]
pub(crate) struct Guest {
    pub(crate) resumed: AtomicU32,
    pub(crate) released: AtomicBool,
}

pub(crate) struct FakeSource {
    pub(super) guest: Arc<Guest>,
    pub(super) inbox: Option<Inbox>,
    pub(super) memory: Arc<Region>,
    pub(super) dirty: Dirty,
    pub(super) cancels_itself: bool,
    /// Whether its device state is endless.
    pub(super) writes_without_end: bool,
    /// Bytes of device state that the destination has taken: the last part is written only when the
    /// one before has arrived. `None`: all of it is written at once.
    pub(super) overlaps: Option<Arc<AtomicU64>>,
    /// Condition that must hold before the guest stops.
    pub(super) after: Option<Arc<AtomicBool>>,
    /// How often it puts the stop off; 0: nothing moves with the guest.
    pub(super) puts_off: u32,
}

impl SourceHypervisor for FakeSource {
    fn settles(&self) -> bool {
        self.puts_off > 0
    }

    fn settle(&mut self) -> Result<bool, Failure> {
        let left = self.puts_off.checked_sub(1);
        self.puts_off = left.unwrap_or_default();
        Ok(left.is_none())
    }

    fn begin_switchover(&mut self, events: &Inbox, _page_in: bool) -> Result<(), Failure> {
        while self.after.as_ref().is_some_and(|after| !after.load(Ordering::SeqCst)) {
            std::thread::yield_now();
        }
        events.device_state(&[1; 500])?;
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
        self.dirty.lock().insert((0, 5));
        if self.writes_without_end {
            // Until the source refuses it.
            while inbox.device_state(&[3; 1 << 16]).is_ok() {}
            return Ok(());
        }
        if let Some(taken) = &self.overlaps {
            let (inbox, taken) = (inbox.clone(), Arc::clone(taken));
            let (memory, dirty) = (Arc::clone(&self.memory), Arc::clone(&self.dirty));
            std::thread::spawn(move || {
                inbox.device_state(&vec![2; 100_000]).unwrap();
                inbox.hypervisor(Instant::now(), HypervisorEvent::DevicesStopped);
                let limit = Instant::now() + OVERLAP_LIMIT;
                while taken.load(Ordering::SeqCst) < 100_500 {
                    if Instant::now() > limit {
                        let late = "the state does not arrive while it is written";
                        let late = Failure::new(FailureCode::HypervisorFailed, late);
                        return inbox.hypervisor(Instant::now(), HypervisorEvent::Failed(late));
                    }
                    std::thread::yield_now();
                }
                // A device that writes memory with its state.
                memory.copy_in(6 * PAGE_SIZE, &[0xee; 64]).unwrap();
                dirty.lock().insert((0, 6));
                inbox.device_state(&vec![2; 200_000]).unwrap();
                inbox.hypervisor(Instant::now(), HypervisorEvent::DeviceStateEnded);
            });
            return Ok(());
        }
        inbox.device_state(&vec![2; 300_000])?;
        inbox.hypervisor(Instant::now(), HypervisorEvent::DeviceStateEnded);
        Ok(())
    }

    fn resume(&mut self) -> Result<(), Failure> {
        self.guest.resumed.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }

    fn release(&mut self, _hot: Vec<BlockRun>) {
        self.guest.released.store(true, Ordering::SeqCst);
    }
}

/// Device state of a guest here, in bytes.
const STATE_BYTES: u64 = 300_500;
/// Bytes of it that are written before the stop.
const EARLY_BYTES: u64 = 500;
/// Longest wait until the first part of the device state has arrived.
const OVERLAP_LIMIT: Duration = Duration::from_secs(60);

pub(crate) struct FakeDestination {
    /// Bytes of device state that have arrived.
    pub(crate) state_bytes: Arc<AtomicU64>,
    /// Memory that must hold a device's last write when the state of the stopped guest begins.
    pub(crate) memory: Option<Arc<Region>>,
    pub(crate) load_fails: bool,
    /// Requirements of a guest that lacks pages; `None`: it cannot run without them here.
    pub(crate) page_in: Option<(FakeFaults, PathBuf)>,
    /// Whether the guest runs.
    pub(crate) runs: Arc<AtomicBool>,
    pub(crate) log: mpsc::Sender<&'static str>,
}

impl DestinationHypervisor for FakeDestination {
    fn feed(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        let before = self.state_bytes.fetch_add(bytes.len() as u64, Ordering::SeqCst);
        if let Some(memory) = self.memory.as_ref().filter(|_| before == EARLY_BYTES) {
            let mut written = [0; 64];
            memory.copy_out(5 * PAGE_SIZE, &mut written).unwrap();
            assert_eq!(written, [0xdd; 64], "it loads queues that are old");
        }
        Ok(())
    }

    fn note_take_over(&mut self, noted: Noted) {
        noted(Ok(()));
    }

    fn finish_load(&mut self) -> Result<(), Failure> {
        assert_eq!(self.state_bytes.load(Ordering::SeqCst), STATE_BYTES);
        if self.load_fails {
            return Err(Failure::new(FailureCode::HypervisorFailed, "no such device"));
        }
        Ok(())
    }

    fn prepare_page_in(&mut self) -> Result<(Box<dyn Faults>, PathBuf), Failure> {
        let none = || Failure::new(FailureCode::MemoryFailed, "the kernel is too old");
        let (faults, path) = self.page_in.take().ok_or_else(none)?;
        Ok((Box::new(faults), path))
    }

    fn run(&mut self, run: bool) -> Result<(), Failure> {
        self.runs.store(true, Ordering::SeqCst);
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
