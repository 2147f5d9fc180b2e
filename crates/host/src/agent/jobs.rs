//! The agent's long work: imports, exports, moves of disks, and adoptions.

use std::sync::Arc;

use godwit_api::{Adoption, ApiError, JobState, JobStatus, JobSummary};

use crate::agent::Agent;
use crate::jobs::{Job, JobRequest};

impl Agent {
    /// Begins an import, an export, or the move of a disk.
    ///
    /// # Errors
    /// Too many run.
    pub(super) fn begin_job<F>(
        self: &Arc<Self>,
        about: JobRequest,
        work: impl FnOnce(Arc<Self>, Arc<Job>) -> F,
    ) -> Result<JobStatus, ApiError>
    where
        F: Future<Output = Result<(), ApiError>> + Send + 'static,
    {
        let status = |id| JobStatus {
            id,
            state: JobState::Running,
            done_bytes: 0,
            total_bytes: 0,
            written_bytes: 0,
            findings: Vec::new(),
            plan: None,
            vm: None,
            files: Vec::new(),
            error: None,
        };
        self.jobs.begin(about, status, |job| work(self.clone(), job))
    }

    /// Lists jobs and adoptions, running and ended, the oldest first.
    #[must_use]
    pub fn jobs(&self) -> Vec<JobSummary> {
        let mut all = self.jobs.summaries();
        all.extend(self.adoptions.summaries());
        all.sort_by_key(|job| job.begun_unix_ms);
        all
    }

    /// Returns the state of such a job.
    pub fn job(&self, id: &str) -> Result<JobStatus, ApiError> {
        self.jobs.status(id)
    }

    /// Ends such a job; returns when nothing of it remains, or it was done before.
    pub async fn cancel_job(&self, id: &str) -> Result<(), ApiError> {
        self.jobs.cancel(id)?;
        self.jobs.ended(id).await
    }

    /// Returns the adoptions of this host, running and ended, the oldest first.
    #[must_use]
    pub fn adoptions(&self) -> Vec<Adoption> {
        self.adoptions.list()
    }

    /// Returns the state of an adoption.
    pub fn adoption(&self, id: &str) -> Result<Adoption, ApiError> {
        self.adoptions.status(id)
    }

    /// Requests the end of an adoption; no error if the guest runs on where it was.
    pub fn cancel_adoption(&self, id: &str) -> Result<(), ApiError> {
        self.adoptions.cancel(id)
    }
}
