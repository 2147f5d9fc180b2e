//! State shared by the guest's threads: the checked memory, the current workload, counters and
//! problems.

use std::{
    io::Write,
    sync::{
        Condvar, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use godwit_guest::{control::Answer, memory::Memory, workload::Workload};

use crate::{boot, disks::Disks};

/// Number of problems kept for `status`; the console has them all.
const KEPT_PROBLEMS: usize = 16;

/// State shared by all threads of init.
pub(crate) struct Guest {
    /// The checked memory, after its allocation.
    pub(crate) memory: OnceLock<Memory>,
    /// Whether the first fill is complete.
    pub(crate) ready: AtomicBool,
    /// Rounds of the computing workload.
    pub(crate) iterations: AtomicU64,
    /// Page writes per second over the last whole second, set by the heartbeat.
    pub(crate) writes_per_s: AtomicU64,
    /// Rounds per second over the last whole second, set by the heartbeat.
    pub(crate) iterations_per_s: AtomicU64,
    /// Disks with content that can be checked, and their writers.
    pub(crate) disks: Disks,
    /// Changes with the workload, so that a loop can check it without a lock.
    pub(crate) workload_epoch: AtomicU64,
    workload: Mutex<Workload>,
    workload_changed: Condvar,
    problems: Mutex<Vec<String>>,
    started: Instant,
}

impl Guest {
    pub(crate) fn new() -> Guest {
        Guest {
            memory: OnceLock::new(),
            ready: AtomicBool::new(false),
            iterations: AtomicU64::new(0),
            writes_per_s: AtomicU64::new(0),
            iterations_per_s: AtomicU64::new(0),
            disks: Disks::default(),
            workload_epoch: AtomicU64::new(0),
            workload: Mutex::new(Workload::Idle),
            workload_changed: Condvar::new(),
            problems: Mutex::new(Vec::new()),
            started: Instant::now(),
        }
    }

    /// Reports a problem on the console and in `status`.
    pub(crate) fn report(&self, problem: &str) {
        print(&format!("PROBLEM {problem}"));
        let mut problems = lock(&self.problems);
        if problems.len() < KEPT_PROBLEMS {
            problems.push(problem.to_owned());
        }
    }

    /// Changes the workload. The thread that runs it notices within a millisecond or a few pages.
    pub(crate) fn set_workload(&self, workload: Workload) {
        *lock(&self.workload) = workload;
        self.workload_epoch.fetch_add(1, Ordering::Release);
        self.workload_changed.notify_all();
    }

    /// Returns the current workload and its epoch.
    pub(crate) fn workload(&self) -> (Workload, u64) {
        let workload = lock(&self.workload);
        (*workload, self.workload_epoch.load(Ordering::Acquire))
    }

    /// Waits until the workload differs from that of `epoch`, at most `limit`.
    pub(crate) fn wait_for_workload(&self, epoch: u64, limit: Duration) {
        let workload = lock(&self.workload);
        let unchanged = |_: &mut Workload| self.workload_epoch.load(Ordering::Acquire) == epoch;
        let _ = self.workload_changed.wait_timeout_while(workload, limit, unchanged);
    }

    /// Returns the answer to `status`.
    pub(crate) fn status(&self) -> Answer {
        Answer {
            ok: true,
            ready: self.ready.load(Ordering::Acquire),
            workload: self.workload().0.to_string(),
            pages: self.memory.get().map_or(0, Memory::pages),
            writes: self.memory.get().map_or(0, Memory::writes),
            writes_per_s: self.writes_per_s.load(Ordering::Relaxed),
            iterations: self.iterations.load(Ordering::Relaxed),
            iterations_per_s: self.iterations_per_s.load(Ordering::Relaxed),
            uptime_s: self.uptime().as_secs_f64(),
            stale_on_write: self.memory.get().map_or(0, Memory::stale_on_write),
            memory: boot::memory_use(),
            disks: self.disks.figures(),
            problems: lock(&self.problems).clone(),
            ..Answer::default()
        }
    }

    /// Returns the time since init began, by the guest's clock.
    pub(crate) fn uptime(&self) -> Duration {
        self.started.elapsed()
    }
}

/// Writes a line to the console. A failure to write is ignored.
pub(crate) fn print(line: &str) {
    // One write per line, so that threads do not interleave theirs.
    let _ = std::io::stdout().write_all(format!("{line}\n").as_bytes());
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
