//! High availability on this host: the guard of its lease ([`HaGuard`]), which decides whether
//! protected VMs may run here. docs/ha.md explains terms, leases and the watchdog.
//!
//! [`crate::agent`] asks it before a protected VM starts, and ends these VMs when it says so.

pub(crate) mod heartbeats;

use std::time::Duration;

use godwit_api::TermHolder;
use godwit_ha::Term;
use godwit_qemu::Uuid;

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
