//! Requests about clones, templates, and the images that belong to a VM.

use bytes::Bytes;
use http::Method;

use super::{ManagerClient, ManagerError};
use crate::client::{STORAGE_LIMIT, segment};
use crate::control::vms::{CloneManagedVm, HostedVm};
use crate::{SetTemplate, VmImages};

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
