//! Requests for imports, exports and moves of disks, which are jobs of hosts, and about the images
//! that hosts keep after moves.

use std::path::Path;

use http::Method;

use super::{ManagerClient, ManagerError};
use crate::client::segment;
use crate::{ExportVm, ImportVm, JobStatus, JobSummary, KeepDisk, KeptDisk, KeptDisks, MoveDisk};

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

    /// Lists the images that a host keeps after moves.
    pub async fn kept_disks(&self, host: &str) -> Result<KeptDisks, ManagerError> {
        self.get(&format!("/api/v1/hosts/{}/disks/kept", segment(host))).await
    }

    /// Keeps an image that its host would remove.
    pub async fn keep_disk(&self, host: &str, path: &Path) -> Result<KeptDisk, ManagerError> {
        let request = KeepDisk { path: path.to_owned() };
        let path = format!("/api/v1/hosts/{}/disks/kept", segment(host));
        self.ask(Method::PUT, &path, &request).await
    }

    /// Removes an image now that its host keeps.
    pub async fn remove_kept_disk(&self, host: &str, path: &Path) -> Result<(), ManagerError> {
        let path = segment(&path.to_string_lossy());
        self.delete(&format!("/api/v1/hosts/{}/disks/kept?path={path}", segment(host))).await
    }
}
