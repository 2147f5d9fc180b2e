//! Requests for imports, exports and moves of disks, which are jobs.

use super::{Client, segment};
use crate::{ClientError, ExportVm, ImportVm, JobStatus, JobSummary, MoveDisk};

impl Client {
    /// Begins an import; returns the job.
    pub async fn import_vm(&self, request: &ImportVm) -> Result<JobStatus, ClientError> {
        self.post("/v1/imports", request).await
    }

    /// Begins an export of a stopped VM; returns the job.
    pub async fn export_vm(&self, vm: &str, request: &ExportVm) -> Result<JobStatus, ClientError> {
        self.post(&format!("/v1/vms/{}/export", segment(vm)), request).await
    }

    /// Begins to move a disk of a VM; returns the job.
    pub async fn move_disk(&self, vm: &str, request: &MoveDisk) -> Result<JobStatus, ClientError> {
        self.post(&format!("/v1/vms/{}/drives/move", segment(vm)), request).await
    }

    /// Lists the jobs and adoptions since the agent's start, the oldest first.
    pub async fn jobs(&self) -> Result<Vec<JobSummary>, ClientError> {
        self.get("/v1/jobs").await
    }

    /// Returns the state of a job.
    pub async fn job(&self, id: &str) -> Result<JobStatus, ClientError> {
        self.get(&format!("/v1/jobs/{}", segment(id))).await
    }

    /// Cancels a job; the answer comes when nothing of it remains, or it is done.
    pub async fn cancel_job(&self, id: &str) -> Result<(), ClientError> {
        self.delete(&format!("/v1/jobs/{}", segment(id))).await
    }
}
