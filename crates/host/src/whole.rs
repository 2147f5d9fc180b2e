//! Operations that complete without the client that requested them.

use std::future::Future;

use godwit_api::ApiError;

use crate::failure::task_failed;

/// Runs an operation in its own task, so that it completes even if the client disconnects.
pub(crate) async fn whole<T: Send + 'static>(
    operation: impl Future<Output = Result<T, ApiError>> + Send + 'static,
) -> Result<T, ApiError> {
    tokio::spawn(operation).await.map_err(|error| task_failed(&error))?
}
