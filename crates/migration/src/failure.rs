//! Reasons why a migration failed: one code for the wire, for programs and for people.

use std::fmt;

use godwit_lanes::LaneError;
use godwit_wire::{Reason, WireError};

pub(crate) use godwit_types::FailureCode;
use godwit_types::Fault;

/// Failure with code and detail. The detail is one line for people, without guest data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The code of the failure.
    pub code: FailureCode,
    /// What happened, naming the host or thing.
    pub detail: String,
}

impl Failure {
    /// Creates a failure with this code and detail.
    pub fn new(code: FailureCode, detail: impl Into<String>) -> Self {
        Failure { code, detail: detail.into() }
    }

    /// Converts the reason that a peer sent.
    #[must_use]
    pub fn from_peer(reason: &Reason) -> Self {
        Failure::new(
            FailureCode::from_wire(reason.code),
            format!("the peer says: {}", reason.detail),
        )
    }

    /// Converts the failure to a reason for a peer.
    #[must_use]
    pub fn to_reason(&self) -> Reason {
        Reason { code: self.code as u16, detail: self.detail.clone() }
    }

    /// Converts the failure to its form in reports.
    #[must_use]
    pub fn to_fault(&self) -> Fault {
        Fault::new(self.code.name(), &self.detail, self.code.remedy())
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.detail, self.code.name())
    }
}

impl std::error::Error for Failure {}

/// Converts a lane's error to the failure of a migration. It distinguishes violations by the peer,
/// deficiencies of this host, and mere losses.
#[must_use]
pub fn lane_failure(error: &LaneError) -> Failure {
    let code = match error {
        // The bytes were altered on the way: another path, or another moment, may carry them
        // intact.
        LaneError::Wire(WireError::Corrupted { .. }) => FailureCode::LaneLost,
        LaneError::Wire(_)
        | LaneError::OutOfBounds { .. }
        | LaneError::Garbled { .. }
        | LaneError::GarbledBlocks { .. }
        | LaneError::OldRound { .. }
        | LaneError::Unexpected(_) => FailureCode::ProtocolBroken,
        LaneError::Memory(_) => FailureCode::MemoryFailed,
        _ => FailureCode::LaneLost,
    };
    Failure::new(code, error.to_string())
}

pub(crate) fn memory_failure(error: &impl ToString) -> Failure {
    Failure::new(FailureCode::MemoryFailed, error.to_string())
}
