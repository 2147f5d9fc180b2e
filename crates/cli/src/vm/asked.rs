//! Errors of commands that go through the manager.

use godwit_api::control::ManagerError;

use crate::exit::Failure;

/// Reason why there is no result.
pub(super) enum AskError {
    /// Error of the manager, or of the connection to it.
    Refused(ManagerError),
    /// Error of this command itself.
    Failed(Failure),
}

impl From<ManagerError> for AskError {
    fn from(error: ManagerError) -> AskError {
        AskError::Refused(error)
    }
}

impl From<Failure> for AskError {
    fn from(failure: Failure) -> AskError {
        AskError::Failed(failure)
    }
}
