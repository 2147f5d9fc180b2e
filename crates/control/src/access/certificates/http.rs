//! The requests about hosts' certificates and those that are revoked.

use axum::Json;
use axum::extract::{FromRef, State};
use godwit_api::control::{CertificateInfo, Problem, RevokedCertificates};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::Certificates;
use crate::answers::{Path, Refusal};

pub(crate) fn routes<S>() -> OpenApiRouter<S>
where
    S: Clone + Send + Sync + 'static,
    Certificates: FromRef<S>,
{
    OpenApiRouter::new().routes(routes!(list)).routes(routes!(show_revoked)).routes(routes!(revoke))
}

/// Hosts' certificates that the manager has issued or seen, and all that are revoked, by serial
/// number.
#[utoipa::path(get, path = "/api/v1/certificates", operation_id = "list_certificates", tag = "access", responses(
    (status = 200, description = "Certificates", body = Vec<CertificateInfo>),
    (status = "4XX", description = "Why not", body = Problem, content_type = "application/problem+json"),
    (status = "5XX", description = "Why not", body = Problem, content_type = "application/problem+json"),
))]
async fn list(
    State(certificates): State<Certificates>,
) -> Result<Json<Vec<CertificateInfo>>, Refusal> {
    Ok(Json(certificates.list().await?))
}

/// The list of revoked certificates, as every agent gets it.
#[utoipa::path(get, path = "/api/v1/revocations", operation_id = "show_revocations", tag = "access", responses(
    (status = 200, description = "The list", body = RevokedCertificates),
    (status = "4XX", description = "Why not", body = Problem, content_type = "application/problem+json"),
))]
async fn show_revoked(
    State(certificates): State<Certificates>,
) -> Result<Json<RevokedCertificates>, Refusal> {
    Ok(Json(certificates.revoked()?))
}

/// Revokes a certificate, of a host or anybody else: agents and managers refuse it from the next
/// connection on. It is never good again.
#[utoipa::path(put, path = "/api/v1/revocations/{serial}", operation_id = "revoke_certificate", tag = "access",
    params(("serial" = String, Path, description = "Its serial number, hexadecimal digits", pattern = "^([0-9a-fA-F]{2}){1,20}$")), responses(
    (status = 200, description = "The list as it is now", body = RevokedCertificates),
    (status = "4XX", description = "Why not", body = Problem, content_type = "application/problem+json"),
    (status = "5XX", description = "Why not", body = Problem, content_type = "application/problem+json"),
))]
async fn revoke(
    State(certificates): State<Certificates>,
    Path(serial): Path<String>,
) -> Result<Json<RevokedCertificates>, Refusal> {
    Ok(Json(certificates.revoke(&serial).await?))
}
