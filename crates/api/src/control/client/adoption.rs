//! Requests about guests of other programs and their adoption.

use http::Method;

use super::{ManagerClient, ManagerError};
use crate::client::{STORAGE_LIMIT, segment};
use crate::{AdoptGuest, Adoption, ForeignGuest};

impl ManagerClient {
    /// Lists the guests of a host that another program runs.
    pub async fn foreign_guests(&self, host: &str) -> Result<Vec<ForeignGuest>, ManagerError> {
        self.get(&format!("/api/v1/hosts/{}/foreign-guests", segment(host))).await
    }

    /// Checks whether a guest of a host could be adopted; changes nothing.
    pub async fn check_adoption(
        &self,
        host: &str,
        request: &AdoptGuest,
    ) -> Result<ForeignGuest, ManagerError> {
        let path = format!("/api/v1/hosts/{}/adoptions/checks", segment(host));
        self.with_patience(STORAGE_LIMIT).ask(Method::POST, &path, request).await
    }

    /// Begins the adoption of a guest of a host.
    pub async fn adopt(&self, host: &str, request: &AdoptGuest) -> Result<Adoption, ManagerError> {
        let path = format!("/api/v1/hosts/{}/adoptions", segment(host));
        self.ask(Method::POST, &path, request).await
    }

    pub async fn adoption(&self, host: &str, id: &str) -> Result<Adoption, ManagerError> {
        self.get(&format!("/api/v1/hosts/{}/adoptions/{}", segment(host), segment(id))).await
    }

    /// Cancels an adoption; the guest stays where it is if it was not handed over yet.
    pub async fn cancel_adoption(&self, host: &str, id: &str) -> Result<(), ManagerError> {
        let path = format!("/api/v1/hosts/{}/adoptions/{}", segment(host), segment(id));
        self.delete(&path).await
    }
}
