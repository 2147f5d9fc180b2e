//! The watchdog of a VM.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Action of a VM's watchdog when its guest no longer resets the timer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub enum Watchdog {
    /// Reset the guest.
    Reset,
    /// End the VM, which then shows as failed.
    Poweroff,
    /// Pause the VM, for an operator to look at.
    Pause,
    /// Only write it to the log of QEMU.
    None,
}

impl Watchdog {
    /// Returns the name that specifications and QEMU use.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Watchdog::Reset => "reset",
            Watchdog::Poweroff => "poweroff",
            Watchdog::Pause => "pause",
            Watchdog::None => "none",
        }
    }
}

impl fmt::Display for Watchdog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
