//! Crashes of VMs, as a host reports them.

use std::fmt;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// What crashed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum CrashCause {
    /// The guest's kernel panicked.
    Panic,
    /// The guest's watchdog ran out, and did what the VM's `watchdog` says.
    Watchdog,
    /// The hypervisor ended by itself.
    QemuEnded,
}

impl fmt::Display for CrashCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            CrashCause::Panic => "the guest panicked",
            CrashCause::Watchdog => "the watchdog ran out",
            CrashCause::QemuEnded => "QEMU ended by itself",
        })
    }
}

/// Last crash of a VM on its host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LastCrash {
    /// When the host noticed it, in milliseconds since 1970.
    pub at_unix_ms: u64,
    pub how: CrashCause,
    /// Restarts by the VM's `on_crash` within an hour, the one after this crash included.
    pub restarts: u32,
    /// Whether the VM waits to be restarted.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub restarting: bool,
}
