//! Requests of a source's agent for disks that travel with a VM.

use serde::de::IgnoredAny;

use super::{Client, STORAGE_LIMIT, segment};
use crate::{ArrivingDisks, ArrivingDisksAccepted, ClientError};

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
}
