//! Requests about high availability.

use std::time::Duration;

use bytes::Bytes;
use http::Method;

use super::super::ha::{ConfirmOff, FencingTest, HaSettings, HaStatus};
use super::{ManagerClient, ManagerError};
use crate::client::segment;

/// Additional time for a test: devices that do not respond take theirs.
const TEST_LIMIT: Duration = Duration::from_secs(60);

impl ManagerClient {
    /// Returns the settings, hosts and protected VMs.
    pub async fn ha(&self) -> Result<HaStatus, ManagerError> {
        self.get("/api/v1/ha").await
    }

    /// Sets all settings.
    pub async fn set_ha(&self, settings: &HaSettings) -> Result<HaStatus, ManagerError> {
        self.ask(Method::PUT, "/api/v1/ha", settings).await
    }

    /// Confirms that a host has no power. Its protected VMs start elsewhere.
    pub async fn confirm_off(&self, host: &str, term: u64) -> Result<HaStatus, ManagerError> {
        let path = format!("/api/v1/ha/hosts/{}/confirm-off", segment(host));
        self.ask(Method::POST, &path, &ConfirmOff { term }).await
    }

    /// Asks every fencing device for the state of its host's power.
    pub async fn test_fencing(&self) -> Result<FencingTest, ManagerError> {
        let patient = self.with_patience(TEST_LIMIT);
        let response = patient.send(Method::POST, "/api/v1/ha/fencing/test", Bytes::new()).await?;
        self.json(response).await
    }
}
