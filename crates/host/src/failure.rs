//! Errors of the crates below, as the API tells them.

use godwit_api::{ApiError, ClientError, ErrorCode};
use godwit_qemu::{FileError, InspectError, SpecError, StartError};
use godwit_ram::RamError;

use crate::network::NetworkError;
use crate::store::StoreError;

/// Something of the host itself failed.
pub(crate) fn host_failed(what: &str, why: &dyn std::error::Error) -> ApiError {
    ApiError::new(
        ErrorCode::HostFailed,
        format!("{what}: {why}"),
        "see the agent's log and the host's disk space",
    )
}

/// A task of the agent ended without a result.
pub(crate) fn task_failed(why: &tokio::task::JoinError) -> ApiError {
    ApiError::new(
        ErrorCode::HostFailed,
        format!("the agent failed at this operation: {why}"),
        "this is a defect of the agent: its log tells more; restarting it adopts the running VMs",
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

/// No user is to be had for a QEMU.
pub(crate) fn no_user(error: &std::io::Error) -> ApiError {
    let message = format!("there is no user for the VM's QEMU: {error}");
    ApiError::new(
        ErrorCode::HostFailed,
        message,
        "name more of them in qemu_users of the configuration",
    )
}

pub(crate) fn file_unusable(vm: &str, error: &FileError) -> ApiError {
    ApiError::new(ErrorCode::NotFound, format!("VM \"{vm}\": {error}"), error.remedy())
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
            NetworkError::NoBridge { .. } | NetworkError::NoVhost { .. } => ErrorCode::NotFound,
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

/// Why another agent did not do what it was asked; `refused` puts its own word into those of this host.
pub(crate) fn of_peer(
    host: &str,
    error: ClientError,
    refused: impl FnOnce(ApiError) -> ApiError,
) -> ApiError {
    let told = |code, remedy: &str| ApiError::new(code, format!("host {host}: {error}"), remedy);
    match error {
        ClientError::Refused(error) => refused(error),
        ClientError::Unreachable { .. } => told(
            ErrorCode::PeerUnreachable,
            "start the agent there, and check [peers] in this agent's configuration",
        ),
        ClientError::Protocol { .. } => {
            told(ErrorCode::PeerVersion, "both agents must run releases that know each other")
        }
    }
}
