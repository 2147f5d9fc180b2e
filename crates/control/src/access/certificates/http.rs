//! API requests for host certificates and revocations.

use axum::Json;
use axum::extract::{FromRef, State};
use godwit_api::control::{CertificateInfo, RevokedCertificates};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::Certificates;
use crate::answers::{Failed, Path, Refusal};

pub(crate) fn routes<S>() -> OpenApiRouter<S>
where
    S: Clone + Send + Sync + 'static,
    Certificates: FromRef<S>,
{
    OpenApiRouter::new().routes(routes!(list)).routes(routes!(show_revoked)).routes(routes!(revoke))
}

/// Lists the host certificates that the manager has issued or seen, and all revoked certificates,
/// by serial number.
#[utoipa::path(get, path = "/api/v1/certificates", operation_id = "list_certificates",
    tag = "access", responses(
    (status = 200, description = "Certificates", body = Vec<CertificateInfo>),
    Failed,
))]
async fn list(
    State(certificates): State<Certificates>,
) -> Result<Json<Vec<CertificateInfo>>, Refusal> {
    Ok(Json(certificates.list().await?))
}

/// Returns the list of revoked certificates that every agent gets.
#[utoipa::path(get, path = "/api/v1/revocations", operation_id = "show_revocations", tag = "access",
    responses(
    (status = 200, description = "The list", body = RevokedCertificates),
))]
async fn show_revoked(
    State(certificates): State<Certificates>,
) -> Result<Json<RevokedCertificates>, Refusal> {
    Ok(Json(certificates.revoked()?))
}

/// Revokes a certificate of any holder. Agents and managers refuse it from the next connection on.
/// A revocation cannot be undone.
#[utoipa::path(put, path = "/api/v1/revocations/{serial}", operation_id = "revoke_certificate",
    tag = "access",
    params(("serial" = String, Path, description = "Serial number, hexadecimal digits",
        pattern = "^([0-9a-fA-F]{2}){1,20}$")), responses(
    (status = 200, description = "The new list", body = RevokedCertificates),
    Failed,
))]
async fn revoke(
    State(certificates): State<Certificates>,
    Path(serial): Path<String>,
) -> Result<Json<RevokedCertificates>, Refusal> {
    Ok(Json(certificates.revoke(&serial).await?))
}
