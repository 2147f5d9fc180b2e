//! Buffer in which a source keeps the device state until the
//! last page has been sent.

use parking_lot::{Mutex, MutexGuard};

use crate::destination::MOST_DEVICE_STATE_BYTES;
use crate::failure::{Failure, FailureCode};

/// Returns the failure of a migration whose guest has more.
fn too_long() -> Failure {
    let most = MOST_DEVICE_STATE_BYTES >> 20;
    let detail =
        format!("cannot move the device state: the source's hypervisor wrote more than {most} MiB");
    Failure::new(FailureCode::HypervisorFailed, detail)
}

/// Refusal of a piece: the total exceeds [`MOST_DEVICE_STATE_BYTES`].
pub(super) struct Refused {
    pub(super) failure: Failure,
    /// Whether this is the first refusal.
    pub(super) is_first: bool,
}

/// Buffer of device state between the hypervisor and the driver.
#[derive(Debug, Default)]
pub(super) struct HeldDeviceState {
    held: Mutex<Held>,
}

#[derive(Debug, Default)]
struct Held {
    bytes: Vec<u8>,
    /// Total bytes that have arrived.
    total: u64,
    /// Whether the driver has been notified and has not taken the data since.
    is_notified: bool,
}

impl HeldDeviceState {
    /// Adds a piece. Returns true if the driver must be notified.
    ///
    /// # Errors
    /// The total is too large. The buffer then refuses all further pieces and holds nothing any
    /// more.
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
        // Consistent whatever its last holder did.
        self.held.lock()
    }
}
