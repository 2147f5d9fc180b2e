//! Conversion of errors of the lower crates into API errors.

use godwit_api::{ApiError, ClientError, ErrorCode};
use godwit_qemu::{FileError, InspectError, SpecError, StartError};
use godwit_ram::RamError;

use crate::network::NetworkError;
use crate::store::StoreError;

/// A failure of the host itself.
pub(crate) fn host_failed(what: &str, why: &dyn std::error::Error) -> ApiError {
    ApiError::new(
        ErrorCode::HostFailed,
        format!("{what}: {why}"),
        "see the agent's log and the host's disk space",
    )
}

/// The failure of an agent task that ended without a result.
pub(crate) fn task_failed(why: &tokio::task::JoinError) -> ApiError {
    ApiError::new(
        ErrorCode::HostFailed,
        format!("cannot finish this operation: a task of the agent failed: {why}"),
        "this is a defect of the agent: see its log; a restarted agent adopts the running VMs",
    )
}

pub(crate) fn ram_failed(error: &RamError) -> ApiError {
    let code = match error {
        RamError::NoSpace { .. } => ErrorCode::InsufficientMemory,
        RamError::Exists { .. } => ErrorCode::AlreadyExists,
        _ => ErrorCode::HostFailed,
    };
    ApiError::new(code, format!("guest memory: {error}"), "")
}

/// The failure to find a free user for a QEMU.
pub(crate) fn no_user(error: &std::io::Error) -> ApiError {
    let message = format!("cannot assign a user to the VM's QEMU: {error}");
    ApiError::new(ErrorCode::HostFailed, message, "add users to qemu_users in the configuration")
}

pub(crate) fn file_unusable(vm: &str, error: &FileError) -> ApiError {
    // A wrong format is a mistake of the request: the file is there.
    let code = match error {
        FileError::Image { .. } | FileError::TooDeep { .. } => ErrorCode::InvalidRequest,
        _ => ErrorCode::NotFound,
    };
    ApiError::new(code, format!("VM \"{vm}\": {error}"), error.remedy())
}

/// An image that cannot be used, of no VM in particular.
pub(crate) fn image_unusable(error: &FileError) -> ApiError {
    ApiError { message: error.to_string(), ..file_unusable("", error) }
}

pub(crate) fn spec_refused(error: &SpecError) -> ApiError {
    ApiError::new(ErrorCode::InvalidRequest, error.to_string(), error.remedy())
}

pub(crate) fn qemu_unusable(error: &InspectError) -> ApiError {
    ApiError::new(ErrorCode::HypervisorFailed, error.to_string(), error.remedy())
}

pub(crate) fn start_failed(error: &StartError) -> ApiError {
    ApiError::new(ErrorCode::HypervisorFailed, error.to_string(), error.remedy())
}

impl From<NetworkError> for ApiError {
    fn from(error: NetworkError) -> Self {
        let code = match error {
            NetworkError::NoBridge { .. }
            | NetworkError::NoVhost { .. }
            | NetworkError::NoVlans { .. }
            | NetworkError::NoFilters { .. } => ErrorCode::NotFound,
            _ => ErrorCode::HostFailed,
        };
        ApiError::new(code, error.to_string(), "")
    }
}

impl From<StoreError> for ApiError {
    fn from(error: StoreError) -> Self {
        ApiError::new(ErrorCode::HostFailed, error.to_string(), "")
    }
}

/// Converts a failed request to another agent; `refused` converts a refusal by that agent.
pub(crate) fn of_peer(
    host: &str,
    error: ClientError,
    refused: impl FnOnce(ApiError) -> ApiError,
) -> ApiError {
    let failed = |code, remedy: &str| ApiError::new(code, format!("host {host}: {error}"), remedy);
    match error {
        ClientError::Refused(error) => refused(error),
        ClientError::Unreachable { .. } => failed(
            ErrorCode::PeerUnreachable,
            "start the agent there, and check [peers] in this agent's configuration",
        ),
        ClientError::Protocol { .. } => {
            failed(ErrorCode::PeerVersion, "install compatible releases of the agent on both hosts")
        }
    }
}
