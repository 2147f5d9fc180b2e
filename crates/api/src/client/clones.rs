//! Requests about clones, templates, and the images that belong to a VM.

use http::Method;

use super::{Client, STORAGE_LIMIT, segment};
use crate::{ClientError, CloneVm, SetTemplate, VmImages, VmInfo};

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
