//! Findings of imports and exports that refuse them.

use godwit_api::{ApiError, ErrorCode, ImportFinding};

/// Fails if findings refuse the operation.
pub(super) fn refuse(
    operation: &str,
    findings: &[ImportFinding],
    remedy: &str,
) -> Result<(), ApiError> {
    let refusing = findings.iter().filter(|found| found.refuses);
    let refusals: Vec<_> = refusing.map(|found| format!("{}: {}", found.what, found.why)).collect();
    if refusals.is_empty() {
        return Ok(());
    }
    let message = format!("cannot {operation}: {}", refusals.join("; "));
    Err(ApiError::new(ErrorCode::Preflight, message, remedy))
}
