//! How much device state a migration carries, and where a source keeps it until the last page has
//! gone.

use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::failure::{Failure, FailureCode};

/// Most device state of a guest that a source reads from its hypervisor, or a destination takes
/// from a source. A usual VM has 0.2 MiB; what has most is the memory of an emulated graphics card.
/// The source holds all of it while it sends the last pages, so this bounds what a hypervisor that
/// a guest controls can make its agent hold.
pub const MOST_DEVICE_STATE_BYTES: u64 = 256 << 20;

/// The failure of a migration whose guest has more.
fn too_long() -> Failure {
    let most = MOST_DEVICE_STATE_BYTES >> 20;
    let detail = format!("cannot move the device state: the source's hypervisor wrote more than {most} MiB");
    Failure::new(FailureCode::HypervisorFailed, detail)
}

/// A piece was not added: it is more than [`MOST_DEVICE_STATE_BYTES`].
pub(super) struct Refused {
    pub(super) failure: Failure,
    /// None was refused before.
    pub(super) is_first: bool,
}

/// Device state between the hypervisor and the driver.
#[derive(Debug, Default)]
pub(super) struct HeldDeviceState {
    held: Mutex<Held>,
}

#[derive(Debug, Default)]
struct Held {
    bytes: Vec<u8>,
    /// All that has come.
    total: u64,
    /// The driver has been notified, and has not taken it since.
    is_notified: bool,
}

impl HeldDeviceState {
    /// Adds a piece. True: the driver is to be notified.
    ///
    /// # Errors
    /// It is too much. Refuses all that follows, and holds nothing any more.
    pub(super) fn add(&self, piece: &[u8]) -> Result<bool, Refused> {
        let mut held = self.lock();
        let is_first = held.total <= MOST_DEVICE_STATE_BYTES;
        held.total = held.total.saturating_add(piece.len() as u64);
        if held.total > MOST_DEVICE_STATE_BYTES {
            held.bytes = Vec::new();
            return Err(Refused { failure: too_long(), is_first });
        }
        held.bytes.extend_from_slice(piece);
        Ok(!std::mem::replace(&mut held.is_notified, true))
    }

    pub(super) fn take(&self) -> Vec<u8> {
        let mut held = self.lock();
        held.is_notified = false;
        std::mem::take(&mut held.bytes)
    }

    fn lock(&self) -> MutexGuard<'_, Held> {
        // Whole whatever its last holder did.
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
