//! Requests about guests of other programs and their adoption.

use super::{Client, STORAGE_LIMIT, segment};
use crate::{AdoptGuest, Adoption, ClientError, ForeignGuest};

impl Client {
    /// Lists the guests of the host that another program runs.
    pub async fn foreign_guests(&self) -> Result<Vec<ForeignGuest>, ClientError> {
        self.get("/v1/foreign-guests").await
    }

    /// Checks whether a guest could be adopted; changes nothing.
    pub async fn check_adoption(&self, request: &AdoptGuest) -> Result<ForeignGuest, ClientError> {
        self.with_patience(STORAGE_LIMIT).post("/v1/adoptions/checks", request).await
    }

    /// Begins an adoption.
    pub async fn adopt(&self, request: &AdoptGuest) -> Result<Adoption, ClientError> {
        self.post("/v1/adoptions", request).await
    }

    /// Lists the adoptions since the agent's start.
    pub async fn adoptions(&self) -> Result<Vec<Adoption>, ClientError> {
        self.get("/v1/adoptions").await
    }

    pub async fn adoption(&self, id: &str) -> Result<Adoption, ClientError> {
        self.get(&format!("/v1/adoptions/{}", segment(id))).await
    }

    /// Cancels an adoption; the guest stays where it is if it was not handed over yet.
    pub async fn cancel_adoption(&self, id: &str) -> Result<(), ClientError> {
        self.delete(&format!("/v1/adoptions/{}", segment(id))).await
    }
}
