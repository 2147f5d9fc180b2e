//! What the parts of an adoption share.

use std::time::Duration;

use godwit_api::{ApiError, ErrorCode};
use godwit_types::Fault;

/// A finding as the error of a request.
pub(super) fn refusal(fault: Fault) -> ApiError {
    ApiError::new(ErrorCode::Preflight, fault.message, fault.remedy)
}

/// Waits between two questions to a monitor.
pub(super) async fn pause() {
    tokio::time::sleep(Duration::from_millis(10)).await;
}
