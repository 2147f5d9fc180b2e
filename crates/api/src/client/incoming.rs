//! Requests to the destination of a migration.

use serde::de::DeserializeOwned;

use super::Client;
use crate::{ClientError, ErrorCode, IncomingRequest};

impl Client {
    /// Requests a shadow VM, or its checks, at this path. A host of an earlier release gets the
    /// request without the fields that it refuses and can do without.
    pub async fn post_incoming<A: DeserializeOwned>(
        &self,
        path: &str,
        request: &IncomingRequest,
    ) -> Result<A, ClientError> {
        let answer = self.post(path, request).await;
        let is_invalid =
            matches!(&answer, Err(error) if error.code() == Some(ErrorCode::InvalidRequest));
        match request.for_earlier_release().filter(|_| is_invalid) {
            Some(earlier) => self.post(path, &earlier).await,
            None => answer,
        }
    }
}
