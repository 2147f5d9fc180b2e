//! Requests about clones, templates, snapshots, and the images that belong to a VM.

use http::Method;

use super::{Client, STORAGE_LIMIT, segment};
use crate::{
    ClientError, CloneVm, CreateSnapshot, RevertVm, SetTemplate, SnapshotInfo, VmImages, VmInfo,
};

impl Client {
    /// Clones a VM without a process; a full clone takes as long as its disks.
    pub async fn clone_vm(&self, source: &str, request: &CloneVm) -> Result<VmInfo, ClientError> {
        let patient = self.with_patience(STORAGE_LIMIT);
        patient.post(&format!("/v1/vms/{}/clone", segment(source)), request).await
    }

    /// Makes a stopped VM a template, or a template an ordinary VM.
    pub async fn set_template(
        &self,
        name: &str,
        request: SetTemplate,
    ) -> Result<VmInfo, ClientError> {
        self.ask(Method::PUT, &format!("/v1/vms/{}/template", segment(name)), &request).await
    }

    /// Lists the snapshots of a VM, the oldest first.
    pub async fn snapshots(&self, name: &str) -> Result<Vec<SnapshotInfo>, ClientError> {
        self.get(&format!("/v1/vms/{}/snapshots", segment(name))).await
    }

    /// Takes a snapshot of a VM; one that runs is paused meanwhile.
    pub async fn create_snapshot(
        &self,
        name: &str,
        request: &CreateSnapshot,
    ) -> Result<SnapshotInfo, ClientError> {
        let patient = self.with_patience(STORAGE_LIMIT);
        patient.post(&format!("/v1/vms/{}/snapshots", segment(name)), request).await
    }

    /// Reverts a VM without a process to a snapshot.
    pub async fn revert_to_snapshot(
        &self,
        name: &str,
        request: &RevertVm,
    ) -> Result<VmInfo, ClientError> {
        self.post(&format!("/v1/vms/{}/snapshots/revert", segment(name)), request).await
    }

    /// Deletes a snapshot; of a VM without a process, its layers are merged.
    pub async fn delete_snapshot(&self, name: &str, snapshot: &str) -> Result<(), ClientError> {
        let path = format!("/v1/vms/{}/snapshots?name={}", segment(name), segment(snapshot));
        self.with_patience(STORAGE_LIMIT).delete(&path).await
    }

    /// Lists the images of a VM that belong to it alone, and those that do not.
    pub async fn images_of_vm(&self, name: &str) -> Result<VmImages, ClientError> {
        self.get(&format!("/v1/vms/{}/images", segment(name))).await
    }

    /// Deletes images of a VM that is gone. Returns what is left of them with the reasons.
    pub async fn delete_images(&self, images: VmImages) -> VmImages {
        let mut done = VmImages { deleted: Vec::new(), kept: images.kept };
        for path in images.deleted {
            match self.delete_disk(&path).await {
                Ok(()) => done.deleted.push(path),
                Err(error) => done.keep([path], &error.detail()),
            }
        }
        done
    }
}
