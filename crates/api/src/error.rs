//! Errors of an agent: a code for programs, a message and a remedy for people.

use std::fmt;

use godwit_types::Fault;
use http::StatusCode;
use serde::{Deserialize, Serialize};

/// Reason why a request failed. Stable: programs may match on the kebab-case names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ErrorCode {
    /// The request is invalid: a field, a value or a combination of them.
    InvalidRequest,
    /// No VM, migration, network or file has that name.
    NotFound,
    /// An object with that name already exists.
    AlreadyExists,
    /// The state of the VM does not allow the operation.
    WrongState,
    /// Another operation on the same VM is in progress.
    Busy,
    /// The client's certificate does not allow the operation.
    Forbidden,
    /// The host does not have enough free memory.
    InsufficientMemory,
    /// A preflight check failed: the VM cannot move to that host, or not with this engine.
    Preflight,
    /// The hypervisor failed to start or exited unexpectedly.
    HypervisorFailed,
    /// Another host is unreachable.
    PeerUnreachable,
    /// Another host uses a different protocol version.
    PeerVersion,
    /// A migration ended without moving the VM.
    MigrationFailed,
    /// A migration was cancelled.
    Cancelled,
    /// It is unknown which host may run the guest.
    InDoubt,
    /// The host itself failed (disk, kernel, permission).
    HostFailed,
    /// A code that a later version added.
    #[serde(other)]
    Unknown,
}

impl ErrorCode {
    /// Returns the HTTP status that carries this code.
    #[must_use]
    pub fn status(self) -> StatusCode {
        match self {
            ErrorCode::InvalidRequest => StatusCode::BAD_REQUEST,
            ErrorCode::NotFound => StatusCode::NOT_FOUND,
            ErrorCode::AlreadyExists
            | ErrorCode::WrongState
            | ErrorCode::Busy
            | ErrorCode::Cancelled => StatusCode::CONFLICT,
            ErrorCode::Forbidden => StatusCode::FORBIDDEN,
            ErrorCode::InsufficientMemory => StatusCode::INSUFFICIENT_STORAGE,
            ErrorCode::Preflight => StatusCode::PRECONDITION_FAILED,
            ErrorCode::PeerUnreachable | ErrorCode::PeerVersion => StatusCode::BAD_GATEWAY,
            ErrorCode::HypervisorFailed
            | ErrorCode::MigrationFailed
            | ErrorCode::InDoubt
            | ErrorCode::HostFailed
            | ErrorCode::Unknown => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }

    /// Returns the code with the name used in reports, or [`ErrorCode::Unknown`] for any other
    /// name.
    #[must_use]
    pub fn from_name(name: &str) -> ErrorCode {
        serde_json::from_value(serde_json::Value::from(name)).unwrap_or(ErrorCode::Unknown)
    }
}

impl fmt::Display for ErrorCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

/// Body of every unsuccessful response.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ApiError {
    /// Stable code for programs.
    pub code: ErrorCode,
    /// What failed and why, in one line.
    pub message: String,
    /// How to fix it; empty if the message already says it.
    #[serde(default, alias = "mend")]
    pub remedy: String,
}

impl ApiError {
    /// Creates an error with the given code.
    pub fn new(code: ErrorCode, message: impl Into<String>, remedy: impl Into<String>) -> Self {
        ApiError { code, message: message.into(), remedy: remedy.into() }
    }
}

impl fmt::Display for ApiError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)?;
        if !self.remedy.is_empty() {
            write!(f, " ({})", self.remedy)?;
        }
        Ok(())
    }
}

impl std::error::Error for ApiError {}

impl From<ApiError> for Fault {
    fn from(error: ApiError) -> Fault {
        Fault::new(error.code.to_string(), error.message, error.remedy)
    }
}

impl From<&ApiError> for Fault {
    fn from(error: &ApiError) -> Fault {
        Fault::from(error.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_code_is_kebab_case_and_an_unknown_one_reads_as_unknown() {
        assert_eq!(serde_json::to_value(ErrorCode::PeerUnreachable).unwrap(), "peer-unreachable");
        assert_eq!(ErrorCode::PeerUnreachable.to_string(), "peer-unreachable");
        assert_eq!(ErrorCode::from_name("in-doubt"), ErrorCode::InDoubt);
        assert_eq!(ErrorCode::from_name("from-the-future"), ErrorCode::Unknown);
    }

    #[test]
    fn the_remedy_follows_the_message() {
        let error =
            ApiError::new(ErrorCode::NotFound, "no VM \"web\" on host a", "see `godwit vm list`");
        assert_eq!(error.to_string(), "no VM \"web\" on host a (see `godwit vm list`)");
    }
}
