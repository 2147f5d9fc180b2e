//! Requests about alarms.

use std::time::Duration;

use bytes::Bytes;
use http::Method;

use super::super::alarms::{AcknowledgeAlarm, Alarm, AlarmTest};
use super::{ManagerClient, ManagerError};
use crate::client::segment;

/// Additional time for a test: receivers that do not answer take theirs.
const TEST_LIMIT: Duration = Duration::from_secs(20);

impl ManagerClient {
    /// Lists every alarm that is raised, the oldest first.
    pub async fn alarms(&self) -> Result<Vec<Alarm>, ManagerError> {
        self.all("/api/v1/alarms").await
    }

    /// Acknowledges an alarm.
    pub async fn acknowledge_alarm(
        &self,
        id: &str,
        request: &AcknowledgeAlarm,
    ) -> Result<Alarm, ManagerError> {
        let path = format!("/api/v1/alarms/{}/acknowledge", segment(id));
        self.ask(Method::POST, &path, request).await
    }

    /// Sends a test notice to every receiver.
    pub async fn test_alarms(&self) -> Result<AlarmTest, ManagerError> {
        let patient = self.with_patience(TEST_LIMIT);
        let response = patient.send(Method::POST, "/api/v1/alarms/test", Bytes::new()).await?;
        self.json(response).await
    }
}
