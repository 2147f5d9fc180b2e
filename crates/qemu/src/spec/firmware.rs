//! The choice of a VM's firmware.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::spec::error::SpecError;

/// Firmware that starts a VM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub enum Firmware {
    /// SeaBIOS, which is part of QEMU.
    #[default]
    Bios,
    /// UEFI (OVMF) with variables of the VM's own.
    Uefi,
    /// UEFI that starts only what is signed (Secure Boot, with Microsoft's keys). Machine type q35
    /// only.
    UefiSecure,
}

impl Firmware {
    /// Names, in the order of the variants.
    pub const NAMES: [&str; 3] = ["bios", "uefi", "uefi-secure"];

    #[must_use]
    pub fn name(self) -> &'static str {
        Firmware::NAMES[self as usize]
    }

    /// Whether it is the default. Definitions leave the default out, so that agents of earlier
    /// releases read them.
    #[must_use]
    pub fn is_bios(&self) -> bool {
        *self == Firmware::Bios
    }

    /// Checks that a versioned machine type can have this firmware.
    ///
    /// # Errors
    /// [`SpecError::Firmware`] if it cannot.
    pub fn check_machine(self, machine: &str) -> Result<(), SpecError> {
        let fits = match self {
            Firmware::Bios => true,
            Firmware::Uefi => machine.starts_with("pc-q35-") || machine.starts_with("pc-i440fx-"),
            Firmware::UefiSecure => machine.starts_with("pc-q35-"),
        };
        if fits {
            return Ok(());
        }
        Err(SpecError::Firmware { firmware: self, machine: machine.to_owned() })
    }
}

impl fmt::Display for Firmware {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
