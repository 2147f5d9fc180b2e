//! Extractor of the VM name in a request's path; it checks the name before a handler sees it.

use axum::extract::{FromRequestParts, Path};
use godwit_api::{ApiError, ErrorCode};
use godwit_qemu::VmName;
use http::request::Parts;

use crate::failure::spec_refused;
use crate::server::answers::Refusal;

/// Name of the VM that a request is about: the only parameter of its path. Decoding has already
/// turned `%2F` into a slash, so an invalid name is refused here and never becomes a file path.
#[derive(Debug)]
pub(crate) struct Named(pub(crate) VmName);

impl<S: Send + Sync> FromRequestParts<S> for Named {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Named, Refusal> {
        let Path(name) =
            Path::<String>::from_request_parts(parts, state).await.map_err(|error| {
                ApiError::new(ErrorCode::InvalidRequest, error.body_text(), "see docs/api.md")
            })?;
        VmName::new(name).map(Named).map_err(|error| spec_refused(&error).into())
    }
}
