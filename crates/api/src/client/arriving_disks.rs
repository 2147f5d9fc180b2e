//! Requests about disks that travel with a VM: those of the source's agent, and those about the
//! images that stay at the source.

use std::path::Path;

use serde::de::IgnoredAny;

use super::{Client, STORAGE_LIMIT, segment};
use crate::{ArrivingDisks, ArrivingDisksAccepted, ClientError, KeepDisk, KeptDisk, KeptDisks};

impl Client {
    /// Requests images for disks that travel. The response arrives when they are made, and their
    /// backing files were read.
    pub async fn receive_disks(
        &self,
        request: &ArrivingDisks,
    ) -> Result<ArrivingDisksAccepted, ClientError> {
        self.with_patience(STORAGE_LIMIT).post("/v1/arriving-disks", request).await
    }

    /// Asks whether images could be made for disks that travel. Makes nothing.
    pub async fn could_receive_disks(&self, request: &ArrivingDisks) -> Result<(), ClientError> {
        let patient = self.with_patience(STORAGE_LIMIT);
        let checked: Result<IgnoredAny, _> =
            patient.post("/v1/arriving-disks/checks", request).await;
        checked.map(|IgnoredAny| ())
    }

    /// Has the images of a transfer removed.
    pub async fn forget_disks(&self, transfer: &str) -> Result<(), ClientError> {
        self.delete(&format!("/v1/arriving-disks/{}", segment(transfer))).await
    }

    /// Lists the images that the host keeps after moves.
    pub async fn kept_disks(&self) -> Result<KeptDisks, ClientError> {
        self.get("/v1/disks/kept").await
    }

    /// Keeps an image that the host would remove.
    pub async fn keep_disk(&self, path: &Path) -> Result<KeptDisk, ClientError> {
        self.put("/v1/disks/kept", &KeepDisk { path: path.to_owned() }).await
    }

    /// Removes an image now that the host keeps.
    pub async fn remove_kept_disk(&self, path: &Path) -> Result<(), ClientError> {
        self.delete(&format!("/v1/disks/kept?path={}", segment(&path.to_string_lossy()))).await
    }
}
