//! What an agent answers when it does not do what it was asked: a code for programs, a message and the remedy for
//! people.

use std::fmt;

use godwit_types::Fault;
use http::StatusCode;
use serde::{Deserialize, Serialize};

/// Why a request was not carried out. Stable: programs may match on the kebab-case names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ErrorCode {
    /// The request itself makes no sense (a field, a value, a combination).
    InvalidRequest,
    /// No VM, migration, network or file of that name.
    NotFound,
    /// Something of that name exists already.
    AlreadyExists,
    /// The VM is in a state that does not allow it.
    WrongState,
    /// Another operation on the same VM is under way.
    Busy,
    /// The sender's certificate does not allow it.
    Forbidden,
    /// The host has not enough memory left.
    InsufficientMemory,
    /// A check before the migration says that this VM can't move there, or not by this engine.
    Preflight,
    /// The hypervisor did not start, or stopped by itself.
    HypervisorFailed,
    /// Another host does not answer.
    PeerUnreachable,
    /// Another host speaks another version of the protocol.
    PeerVersion,
    /// A migration ended without moving the VM.
    MigrationFailed,
    /// A migration was cancelled.
    Cancelled,
    /// It is not known on which host the guest may run.
    InDoubt,
    /// The host itself fails (disk, kernel, permission).
    HostFailed,
    /// A code of a later version than this client's.
    #[serde(other)]
    Unknown,
}

impl ErrorCode {
    /// The HTTP status that carries this code.
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

    /// The code of a name as it stands in reports; [`ErrorCode::Unknown`] for names that are none.
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

/// The body of every answer that is not a success.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ApiError {
    /// Stable code for programs.
    pub code: ErrorCode,
    /// What failed and why, one line.
    pub message: String,
    /// What to do about it; empty where the message says it all.
    #[serde(default, alias = "mend")]
    pub remedy: String,
}

impl ApiError {
    /// An error of the given code.
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
    fn a_code_is_kebab_case_and_a_later_one_is_read_as_unknown() {
        assert_eq!(serde_json::to_value(ErrorCode::PeerUnreachable).unwrap(), "peer-unreachable");
        assert_eq!(ErrorCode::PeerUnreachable.to_string(), "peer-unreachable");
        assert_eq!(ErrorCode::from_name("in-doubt"), ErrorCode::InDoubt);
        assert_eq!(ErrorCode::from_name("from-the-future"), ErrorCode::Unknown);
    }

    #[test]
    fn the_mend_follows_the_message() {
        let error =
            ApiError::new(ErrorCode::NotFound, "no VM \"web\" on host a", "see `godwit vm list`");
        assert_eq!(error.to_string(), "no VM \"web\" on host a (see `godwit vm list`)");
    }
}
