//! Threads that never end, and the heartbeat on the console.

use std::{
    any::Any,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, atomic::Ordering},
    thread,
    time::{Duration, Instant},
};

use anyhow::Context;
use godwit_guest::memory::Memory;
use rustix::{
    fd::OwnedFd,
    time::{Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec},
};

use crate::guest::{Guest, print};

/// Delay before a failed task is restarted.
const RESTART_AFTER: Duration = Duration::from_secs(1);

/// Starts a thread that restarts `task` whenever it ends, fails or panics.
pub(crate) fn forever<F>(guest: &Arc<Guest>, name: &'static str, niceness: i32, task: F)
where
    F: Fn(&Arc<Guest>) -> anyhow::Result<()> + Send + 'static,
{
    let shared = guest.clone();
    let run = move || {
        set_niceness(niceness);
        loop {
            match catch_unwind(AssertUnwindSafe(|| task(&shared))) {
                Ok(Ok(())) => shared.report(&format!("{name}: ended, starting it again")),
                Ok(Err(error)) => shared.report(&format!("{name}: {error:#}")),
                Err(panic) => shared.report(&format!("{name}: panic: {}", panic_text(&*panic))),
            }
            if let Ok(mut timer) = Ticks::every(RESTART_AFTER) {
                timer.next().ok();
            }
        }
    };
    if let Err(error) = thread::Builder::new().name(name.to_owned()).spawn(run) {
        guest.report(&format!("{name}: no thread for it: {error}"));
    }
}

/// Returns the text of a panic.
pub(crate) fn panic_text(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no text")
}

/// Sets the calling thread's niceness. Linux takes a thread's ID where POSIX specifies a process.
pub(crate) fn set_niceness(niceness: i32) {
    // If it fails, the guest works, only less evenly.
    let _ = rustix::process::setpriority_process(Some(rustix::thread::gettid()), niceness);
}

/// Timer that ticks at an even pace.
pub(crate) struct Ticks(OwnedFd);

impl Ticks {
    pub(crate) fn every(interval: Duration) -> anyhow::Result<Ticks> {
        let timer = rustix::time::timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC)?;
        let interval = Timespec::try_from(interval).context("interval of a timer")?;
        let setting = Itimerspec { it_interval: interval, it_value: interval };
        rustix::time::timerfd_settime(&timer, TimerfdTimerFlags::empty(), &setting)?;
        Ok(Ticks(timer))
    }

    /// Waits for the next tick.
    pub(crate) fn next(&mut self) -> anyhow::Result<()> {
        rustix::io::retry_on_intr(|| rustix::io::read(&self.0, &mut [0u8; 8]))?;
        Ok(())
    }
}

/// Prints a line each second and computes the rates that `status` reports.
#[allow(clippy::cast_possible_truncation, reason = "a count a second, rounded")]
pub(crate) fn heartbeat(guest: &Arc<Guest>) -> anyhow::Result<()> {
    let mut ticks = Ticks::every(Duration::from_secs(1))?;
    let counts = || {
        (
            guest.memory.get().map_or(0, Memory::writes),
            guest.iterations.load(Ordering::Relaxed),
            Instant::now(),
        )
    };
    let mut before = counts();
    loop {
        ticks.next()?;
        let now = counts();
        let seconds = (now.2 - before.2).as_secs_f64().max(f64::MIN_POSITIVE);
        let rate = |count: u64, earlier: u64| {
            (count.saturating_sub(earlier) as f64 / seconds).round() as u64
        };
        guest.writes_per_s.store(rate(now.0, before.0), Ordering::Relaxed);
        guest.iterations_per_s.store(rate(now.1, before.1), Ordering::Relaxed);
        before = now;
        print(&format!(
            "HEARTBEAT t={:.1} writes/s={} iterations/s={}",
            guest.uptime().as_secs_f64(),
            guest.writes_per_s.load(Ordering::Relaxed),
            guest.iterations_per_s.load(Ordering::Relaxed),
        ));
    }
}
