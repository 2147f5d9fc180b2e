//! The choice of a VM's video device.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::spec::error::SpecError;

/// Video device of a VM. With one, the VM has a screen, a keyboard and a pointer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub enum Video {
    /// No screen: the guest has its serial console only.
    #[default]
    None,
    /// A VGA adapter (Bochs VBE), which every guest and every firmware can use.
    Vga,
    /// A virtio adapter, which is also a VGA adapter until the guest has loaded its driver.
    Virtio,
}

impl Video {
    /// Names, in the order of the variants.
    pub const NAMES: [&str; 3] = ["none", "vga", "virtio"];

    #[must_use]
    pub fn name(self) -> &'static str {
        Video::NAMES[self as usize]
    }

    /// Whether it is the default. Definitions leave the default out, so that agents of earlier
    /// releases read them.
    #[must_use]
    pub fn is_none(&self) -> bool {
        *self == Video::None
    }

    /// Checks that a versioned machine type can have this video device.
    ///
    /// # Errors
    /// [`SpecError::Video`] if it cannot.
    pub fn check_machine(self, machine: &str) -> Result<(), SpecError> {
        // The machine types with a PCI bus, a keyboard controller and USB on that bus.
        let is_pc = machine.starts_with("pc-q35-") || machine.starts_with("pc-i440fx-");
        if self.is_none() || is_pc {
            return Ok(());
        }
        Err(SpecError::Video { video: self, machine: machine.to_owned() })
    }
}

impl fmt::Display for Video {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
