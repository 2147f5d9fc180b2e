//! Bodies of requests, and answers: errors and events as JSON.

use axum::Json;
use axum::body::Bytes;
use axum::response::sse::Event;
use axum::response::{IntoResponse, Response};
use godwit_api::{ApiError, ErrorCode};
use http::StatusCode;
use serde::de::DeserializeOwned;

/// Longest request body that is read. The request for a VM with all the devices that QEMU accepts
/// has a tenth of this size. Parsed, a body may take twenty times its size in memory.
pub(super) const MAX_BODY_BYTES: usize = 1 << 20;

/// Replaces the plain-text refusal of axum's body extractor with an [`ApiError`].
pub(super) async fn explain_too_long(response: Response) -> Response {
    if response.status() != StatusCode::PAYLOAD_TOO_LARGE {
        return response;
    }
    let message = format!("cannot read the request's body: more than {MAX_BODY_BYTES} bytes");
    Refusal(ApiError::new(ErrorCode::InvalidRequest, message, "see docs/api.md")).into_response()
}

/// An [`ApiError`] as an HTTP response.
#[derive(Debug)]
pub(crate) struct Refusal(pub(crate) ApiError);

impl From<ApiError> for Refusal {
    fn from(error: ApiError) -> Self {
        Refusal(error)
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        (self.0.code.status(), Json(self.0)).into_response()
    }
}

/// Parses a request's JSON body; an empty body counts as `{}`. An error in it is returned as an
/// [`ApiError`].
pub(crate) fn body<T: DeserializeOwned>(bytes: &Bytes) -> Result<T, ApiError> {
    let bytes: &[u8] = if bytes.is_empty() { b"{}" } else { bytes };
    serde_json::from_slice(bytes).map_err(|error| {
        ApiError::new(
            ErrorCode::InvalidRequest,
            format!("cannot parse the request's body: {error}"),
            "see docs/api.md",
        )
    })
}

/// Creates an event with JSON data.
pub(crate) fn json_event(name: &str, data: &impl serde::Serialize) -> Event {
    Event::default()
        .event(name)
        .json_data(data)
        .unwrap_or_else(|_| Event::default().comment("not serialisable"))
}
