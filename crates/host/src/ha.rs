//! High availability on this host: the guard of its lease ([`HaGuard`]), which decides whether
//! protected VMs may run here. docs/ha-terms.md explains terms and leases.
//!
//! [`crate::agent`] asks it before a protected VM starts, and ends these VMs when it says so.

mod ending;
mod guarding;
pub(crate) mod heartbeats;
mod here;
mod named;
pub(crate) mod own;
mod state;
mod term_gate;

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use godwit_api::TermHolder;
use godwit_ha::Term;
use godwit_qemu::Uuid;

pub(crate) use ending::Ending;
pub(crate) use guarding::{HaGuard, Protected};
pub(crate) use term_gate::Starting;

/// Returns the time since the host's boot, which also counts the time that it was suspended.
pub(crate) fn boot_clock() -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    // That clock is never negative; a lease ends before that.
    Duration::try_from(now).unwrap_or(Duration::MAX)
}

/// Heartbeats that this host writes while it holds a term.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct HeartbeatDuty {
    pub(crate) holder: TermHolder,
    pub(crate) term: Term,
    /// Datastores of the term. Their order is that of the grant.
    pub(crate) datastores: Vec<Uuid>,
}

/// What a watchdog has to end, and when.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Guarded {
    /// Moment on the boot clock from which none of the processes may run; `None`: no term is held,
    /// and nothing is guarded. A term that is lost already has the deadline 0.
    pub(crate) deadline: Option<Duration>,
    /// Number and start time of each QEMU of a protected VM.
    pub(crate) pids: Vec<(i32, u64)>,
}

/// What the watchdog process last said. All is false without one.
#[derive(Debug, Default)]
pub(crate) struct WatchdogStatus {
    /// Whether the process answers.
    process: AtomicBool,
    /// Whether it guards terms with a watchdog of the kernel or the hardware.
    kernel: AtomicBool,
    /// Whether it guards those of VMs that agents restart, too: one of an earlier version does not.
    kernel_of_own: AtomicBool,
}

impl WatchdogStatus {
    /// Takes an answer of the process. `of_own`: it guards terms of VMs that agents restart.
    pub(crate) fn answered(&self, kernel: bool, of_own: bool) {
        self.process.store(true, Ordering::Relaxed);
        self.kernel.store(kernel, Ordering::Relaxed);
        self.kernel_of_own.store(kernel && of_own, Ordering::Relaxed);
    }

    /// Notes that there is no answer.
    pub(crate) fn lost(&self) {
        for status in [&self.process, &self.kernel, &self.kernel_of_own] {
            status.store(false, Ordering::Relaxed);
        }
    }

    pub(crate) fn process(&self) -> bool {
        self.process.load(Ordering::Relaxed)
    }

    pub(crate) fn kernel(&self) -> bool {
        self.kernel.load(Ordering::Relaxed)
    }

    pub(crate) fn kernel_of_own(&self) -> bool {
        self.kernel_of_own.load(Ordering::Relaxed)
    }
}
