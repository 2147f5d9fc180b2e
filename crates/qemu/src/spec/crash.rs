//! What a host does about a crash of a VM.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::spec::checks::{check_panic_device, is_pc};
use crate::spec::error::SpecError;

/// Restarts of a VM after crashes: its QEMU ended by itself, or its guest panicked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub enum OnCrash {
    /// It stays down.
    #[default]
    Never,
    /// It is restarted at most this many times within an hour, 1 to 100.
    Times(u32),
    /// It is restarted every time.
    Always,
}

impl OnCrash {
    /// Most restarts within an hour that a VM may ask for.
    pub const MOST_TIMES: u32 = 100;

    /// Whether it is the default, which no definition spells out.
    #[must_use]
    #[allow(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
    pub fn is_never(&self) -> bool {
        *self == OnCrash::Never
    }

    /// Checks the number of restarts.
    ///
    /// # Errors
    /// It is out of range.
    pub(super) fn check(self) -> Result<(), SpecError> {
        match self {
            OnCrash::Times(times) if !(1..=OnCrash::MOST_TIMES).contains(&times) => {
                Err(SpecError::Setting {
                    what: "on_crash",
                    why: "the number of restarts is out of range",
                    remedy: "give a number of restarts from 1 to 100, `never` or `always`",
                })
            }
            OnCrash::Never | OnCrash::Times(_) | OnCrash::Always => Ok(()),
        }
    }

    /// Returns whether a VM with this policy gets the device by which its guest reports a panic.
    /// `choice`: what the specification says of it; `is_adopted`: the VM has the devices that it
    /// came with.
    ///
    /// # Errors
    /// The versioned machine type has no place for it.
    pub(super) fn gives_panic_device(
        self,
        (choice, is_adopted): (Option<bool>, bool),
        machine: &str,
        extra_devices: &[String],
    ) -> Result<bool, SpecError> {
        let has_device = choice.unwrap_or_else(|| {
            let is_known = |device: &String| device.contains("pvpanic");
            let has_place = is_pc(machine) && !is_adopted;
            !self.is_never() && has_place && !extra_devices.iter().any(is_known)
        });
        check_panic_device(has_device, machine).map(|()| has_device)
    }
}

impl fmt::Display for OnCrash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            OnCrash::Never => f.write_str("never"),
            OnCrash::Times(times) => write!(f, "up to {times} within an hour"),
            OnCrash::Always => f.write_str("always"),
        }
    }
}
