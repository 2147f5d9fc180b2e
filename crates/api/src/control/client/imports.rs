//! Requests for imports, exports and moves of disks, which are jobs of hosts.

use http::Method;

use super::{ManagerClient, ManagerError};
use crate::client::segment;
use crate::{ExportVm, ImportVm, JobStatus, JobSummary, MoveDisk};

impl ManagerClient {
    /// Begins an import at a host; returns the job.
    pub async fn import_vm(
        &self,
        host: &str,
        request: &ImportVm,
    ) -> Result<JobStatus, ManagerError> {
        let path = format!("/api/v1/hosts/{}/imports", segment(host));
        self.ask(Method::POST, &path, request).await
    }

    /// Begins an export of a stopped VM; returns the job of its host.
    pub async fn export_vm(&self, vm: &str, request: &ExportVm) -> Result<JobStatus, ManagerError> {
        self.ask(Method::POST, &format!("/api/v1/vms/{}/export", segment(vm)), request).await
    }

    /// Begins to move a disk of a VM; returns the job of its host.
    pub async fn move_disk(&self, vm: &str, request: &MoveDisk) -> Result<JobStatus, ManagerError> {
        let path = format!("/api/v1/vms/{}/drives/move", segment(vm));
        self.ask(Method::POST, &path, request).await
    }

    /// Lists the jobs and adoptions of a host, the oldest first.
    pub async fn jobs(&self, host: &str) -> Result<Vec<JobSummary>, ManagerError> {
        self.get(&format!("/api/v1/hosts/{}/jobs", segment(host))).await
    }

    /// Returns the state of a job of a host.
    pub async fn job(&self, host: &str, id: &str) -> Result<JobStatus, ManagerError> {
        self.get(&format!("/api/v1/hosts/{}/jobs/{}", segment(host), segment(id))).await
    }

    /// Cancels a job of a host.
    pub async fn cancel_job(&self, host: &str, id: &str) -> Result<(), ManagerError> {
        self.delete(&format!("/api/v1/hosts/{}/jobs/{}", segment(host), segment(id))).await
    }
}
