//! Requests about clones, templates, snapshots, and the images that belong to a VM.

use bytes::Bytes;
use http::Method;

use super::{ManagerClient, ManagerError};
use crate::client::{STORAGE_LIMIT, segment};
use crate::control::vms::{CloneManagedVm, HostedVm};
use crate::{CreateSnapshot, SetTemplate, SnapshotInfo, VmImages};

impl ManagerClient {
    /// Clones a VM without a process; a full clone takes as long as its disks.
    pub async fn clone_vm(
        &self,
        source: &str,
        request: &CloneManagedVm,
    ) -> Result<HostedVm, ManagerError> {
        let path = format!("/api/v1/vms/{}/clone", segment(source));
        self.with_patience(STORAGE_LIMIT).ask(Method::POST, &path, request).await
    }

    /// Makes a stopped VM a template, or a template an ordinary VM.
    pub async fn set_template(
        &self,
        name: &str,
        request: SetTemplate,
    ) -> Result<HostedVm, ManagerError> {
        self.ask(Method::PUT, &format!("/api/v1/vms/{}/template", segment(name)), &request).await
    }

    /// Lists the snapshots of a VM, the oldest first.
    pub async fn snapshots(&self, name: &str) -> Result<Vec<SnapshotInfo>, ManagerError> {
        self.get(&format!("/api/v1/vms/{}/snapshots", segment(name))).await
    }

    /// Takes a snapshot of a VM; one that runs is paused meanwhile.
    pub async fn create_snapshot(
        &self,
        name: &str,
        request: &CreateSnapshot,
    ) -> Result<SnapshotInfo, ManagerError> {
        let path = format!("/api/v1/vms/{}/snapshots", segment(name));
        self.with_patience(STORAGE_LIMIT).ask(Method::POST, &path, request).await
    }

    /// Reverts a VM that does not run to a snapshot.
    pub async fn revert_to_snapshot(
        &self,
        name: &str,
        snapshot: &str,
    ) -> Result<HostedVm, ManagerError> {
        let path = format!("/api/v1/vms/{}/snapshots/{}/revert", segment(name), segment(snapshot));
        self.ask(Method::POST, &path, &()).await
    }

    /// Deletes a snapshot; of a VM that does not run, its layers are merged.
    pub async fn delete_snapshot(&self, name: &str, snapshot: &str) -> Result<(), ManagerError> {
        let path = format!("/api/v1/vms/{}/snapshots/{}", segment(name), segment(snapshot));
        self.with_patience(STORAGE_LIMIT).delete(&path).await
    }

    /// Lists the images of a VM that belong to it alone, and those that do not.
    pub async fn images_of_vm(&self, name: &str) -> Result<VmImages, ManagerError> {
        self.get(&format!("/api/v1/vms/{}/images", segment(name))).await
    }

    /// Deletes a VM with the images that are its own. Returns what became of them.
    pub async fn delete_vm_with_disks(
        &self,
        name: &str,
        force: bool,
    ) -> Result<VmImages, ManagerError> {
        let path = format!("/api/v1/vms/{}?force={force}&delete_disks=true", segment(name));
        let response = self.send(Method::DELETE, &path, Bytes::new()).await?;
        self.json(response).await
    }
}
