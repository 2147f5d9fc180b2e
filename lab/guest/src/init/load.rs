//! Fills the memory, then runs the workload that is set, forever.

use std::{
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

use godwit_guest::{
    memory::Memory,
    options::Options,
    pattern::{self, PAGE_BYTES},
    workload::{Dirty, Order, Workload},
};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use crate::{
    boot,
    guest::{Guest, print},
    user_space,
};

/// Wake-up interval of a paced workload.
const SLICE: Duration = Duration::from_millis(1);
/// Most that a paced workload makes up for after falling behind (the VM was paused, or the vCPU is
/// too slow).
const LARGEST_DEBT: Duration = Duration::from_millis(100);
/// Work between two checks for a change of the workload: pages, and rounds of arithmetic.
const BATCH_PAGES: u64 = 64;
const BATCH_ROUNDS: u64 = 10_000;
/// Memory that stays free for the kernel and init if the fill is as large as the guest.
const RESERVE_BYTES: u64 = 48 << 20;

/// Allocates and fills the memory at the first call, then runs workloads.
pub(crate) fn run(guest: &Arc<Guest>, options: &Options) -> anyhow::Result<()> {
    if !guest.ready.load(Ordering::Acquire) {
        let bytes = fill_bytes(guest, options.fill_bytes);
        let memory = guest.memory.get_or_init(|| Memory::new(bytes, options.seed()));
        let started = Instant::now();
        memory.fill(options.fill_mix());
        let fill_ms = started.elapsed().as_millis();
        if options.root.is_some() {
            user_space::wait_booted(guest);
        }
        if let Some(folder) = &options.read {
            user_space::read_files(guest, folder.as_ref())?;
        }
        guest.set_workload(options.workload);
        guest.ready.store(true, Ordering::Release);
        print(&format!(
            "READY pages={} fill={}MiB fill_ms={fill_ms} workload={}",
            memory.pages(),
            bytes >> 20,
            options.workload
        ));
    }
    let mut draw = options.seed() | 1;
    loop {
        let (workload, epoch) = guest.workload();
        match workload {
            Workload::Idle => guest.wait_for_workload(epoch, Duration::from_secs(3600)),
            Workload::Compute => compute(guest, epoch),
            Workload::Dirty(dirty) => {
                if let Some(memory) = guest.memory.get() {
                    Writer::new(guest, memory, dirty, &mut draw).run(epoch);
                }
            }
        }
    }
}

/// Computes beside a workload that writes, if that includes it.
pub(crate) fn run_beside(guest: &Arc<Guest>) -> anyhow::Result<()> {
    stay_on_last_vcpu();
    loop {
        let (workload, epoch) = guest.workload();
        match workload {
            Workload::Dirty(Dirty { computes: true, .. }) => compute(guest, epoch),
            _ => guest.wait_for_workload(epoch, Duration::from_secs(3600)),
        }
    }
}

/// Keeps this thread on the last vCPU, so that a benchmark knows where the guest computes.
fn stay_on_last_vcpu() {
    let Ok(all) = sched_getaffinity(None) else { return };
    if let Some(last) = (0..CpuSet::MAX_CPU).rfind(|cpu| all.is_set(*cpu)) {
        let mut set = CpuSet::new();
        set.set(last);
        // It computes nevertheless.
        let _ = sched_setaffinity(None, &set);
    }
}

/// Returns how many bytes can be filled without running the guest out of memory.
fn fill_bytes(guest: &Guest, wanted: Option<u64>) -> u64 {
    let available = boot::available_bytes(guest);
    // The table of entries takes 24 bytes per page, so 1/128 of the memory is enough for it.
    let most = available.saturating_sub(RESERVE_BYTES) / 129 * 128;
    match wanted {
        Some(bytes) if bytes > most => {
            guest.report(&format!(
                "fill={}M does not fit, taking {}M: give the VM more memory",
                bytes >> 20,
                most >> 20
            ));
            most
        }
        Some(bytes) => bytes,
        None => (available / 2).min(most),
    }
}

/// Does integer arithmetic in registers until the workload changes.
fn compute(guest: &Guest, epoch: u64) {
    let mut x = epoch;
    while guest.workload_epoch.load(Ordering::Relaxed) == epoch {
        for _ in 0..BATCH_ROUNDS {
            x = std::hint::black_box(pattern::mix(x));
        }
        guest.iterations.fetch_add(BATCH_ROUNDS, Ordering::Relaxed);
    }
}

/// Workload that writes pages.
struct Writer<'a> {
    guest: &'a Guest,
    memory: &'a Memory,
    dirty: Dirty,
    working_set_pages: u64,
    next: u64,
    draw: &'a mut u64,
}

impl<'a> Writer<'a> {
    fn new(guest: &'a Guest, memory: &'a Memory, dirty: Dirty, draw: &'a mut u64) -> Writer<'a> {
        let wanted_pages =
            dirty.working_set_bytes.map_or(u64::MAX, |bytes| bytes / PAGE_BYTES as u64);
        let working_set_pages = wanted_pages.clamp(1, memory.pages());
        Writer { guest, memory, dirty, working_set_pages, next: 0, draw }
    }

    fn run(&mut self, epoch: u64) {
        match self.dirty.rate_pages_per_s {
            Some(rate) => self.run_paced(epoch, rate),
            None => {
                while self.guest.workload_epoch.load(Ordering::Relaxed) == epoch {
                    self.write(BATCH_PAGES);
                }
            }
        }
    }

    /// Writes the pages due by the clock, then waits for the next slice.
    #[allow(clippy::cast_possible_truncation, reason = "whole pages of a small, positive number")]
    fn run_paced(&mut self, epoch: u64, rate_pages_per_s: u64) {
        let mut owed_pages = 0.0;
        let mut last = Instant::now();
        while self.guest.workload_epoch.load(Ordering::Relaxed) == epoch {
            let now = Instant::now();
            owed_pages += (now - last).min(LARGEST_DEBT).as_secs_f64() * rate_pages_per_s as f64;
            last = now;
            let due = (owed_pages as u64).min(BATCH_PAGES);
            self.write(due);
            owed_pages =
                (owed_pages - due as f64).min(LARGEST_DEBT.as_secs_f64() * rate_pages_per_s as f64);
            if owed_pages < 1.0 {
                self.guest.wait_for_workload(epoch, SLICE);
            }
        }
    }

    fn write(&mut self, pages: u64) {
        for _ in 0..pages {
            // xorshift64: cheap, and the table, not this, determines what a page holds.
            *self.draw ^= *self.draw << 13;
            *self.draw ^= *self.draw >> 7;
            *self.draw ^= *self.draw << 17;
            let index = match self.dirty.order {
                Order::Random => pattern::below(self.working_set_pages, *self.draw),
                Order::Sequential => self.next,
            };
            self.next = (self.next + 1) % self.working_set_pages;
            // A different number from the one that chose the page, so that a page's kind changes
            // from write to write.
            let kind = self.dirty.mix.pick(self.draw.wrapping_mul(0x9e37_79b9_7f4a_7c15));
            self.memory.write(index, kind, self.dirty.touch);
        }
    }
}
