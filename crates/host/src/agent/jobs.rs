//! The agent's imports and exports.

use std::sync::Arc;

use godwit_api::{ApiError, JobStatus};

use crate::agent::Agent;
use crate::jobs::Job;

impl Agent {
    /// Begins a job.
    ///
    /// # Errors
    /// Too many run.
    pub(super) fn begin_job<F>(
        self: &Arc<Self>,
        work: impl FnOnce(Arc<Self>, Arc<Job>) -> F,
    ) -> Result<JobStatus, ApiError>
    where
        F: Future<Output = Result<(), ApiError>> + Send + 'static,
    {
        self.jobs.begin(|job| work(self.clone(), job))
    }

    /// Returns the state of a job.
    pub fn job(&self, id: &str) -> Result<JobStatus, ApiError> {
        self.jobs.status(id)
    }

    /// Ends a job; returns when nothing of it remains, or it was done before.
    pub async fn cancel_job(&self, id: &str) -> Result<(), ApiError> {
        self.jobs.cancel(id).await
    }
}
