//! Requests about high availability.

#![allow(unused_qualifications, reason = "utoipa's macro writes them")]

use std::sync::Arc;

use axum::Json;
use axum::extract::{FromRef, State};
use godwit_api::control::{ConfirmOff, FencingTest, HaSettings, HaStatus};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::judges::Judges;
use crate::answers::{Body, Failed, Path, Refusal};
use crate::storage::term::Term;

/// Access to the judges while this manager leads.
#[derive(Clone)]
pub(crate) struct HaRequests(pub(crate) Arc<Term<Judges>>);

pub(crate) fn routes<S>() -> OpenApiRouter<S>
where
    S: Clone + Send + Sync + 'static,
    HaRequests: FromRef<S>,
{
    OpenApiRouter::new()
        .routes(routes!(show, set))
        .routes(routes!(confirm_off))
        .routes(routes!(test_fencing))
}

/// Shows the settings, the term of each host, and the protected VMs.
#[utoipa::path(get, path = "/api/v1/ha", operation_id = "show_ha", tag = "ha", responses(
    (status = 200, description = "The high availability", body = HaStatus),
    Failed,
))]
async fn show(State(ha): State<HaRequests>) -> Result<Json<HaStatus>, Refusal> {
    Ok(Json(ha.0.get()?.status()))
}

/// Sets all settings. It cannot be disabled while a VM is protected.
#[utoipa::path(put, path = "/api/v1/ha", operation_id = "set_ha", tag = "ha",
    request_body = HaSettings, responses(
    (status = 200, description = "The high availability after the change", body = HaStatus),
    Failed,
))]
async fn set(
    State(ha): State<HaRequests>,
    Body(settings): Body<HaSettings>,
) -> Result<Json<HaStatus>, Refusal> {
    Ok(Json(ha.0.get()?.set(settings).await?))
}

/// Confirms that a host has no power. Its protected VMs start elsewhere.
///
/// A wrong confirmation can let a VM run twice and damage its disks. It is refused unless the term
/// is in doubt.
#[utoipa::path(post, path = "/api/v1/ha/hosts/{host}/confirm-off", operation_id = "confirm_off",
    tag = "ha", params(("host" = String, Path, description = "Name of the host")),
    request_body = ConfirmOff, responses(
    (status = 200, description = "The high availability after that", body = HaStatus),
    Failed,
))]
async fn confirm_off(
    State(ha): State<HaRequests>,
    Path(host): Path<String>,
    Body(ConfirmOff { term }): Body<ConfirmOff>,
) -> Result<Json<HaStatus>, Refusal> {
    Ok(Json(ha.0.get()?.confirm_off(&host, term).await?))
}

/// Asks every fencing device for the state of its host's power. Nothing is switched.
#[utoipa::path(post, path = "/api/v1/ha/fencing/test", operation_id = "test_fencing", tag = "ha",
    responses(
    (status = 200, description = "The answer of each device", body = FencingTest),
    Failed,
))]
async fn test_fencing(State(ha): State<HaRequests>) -> Result<Json<FencingTest>, Refusal> {
    Ok(Json(ha.0.get()?.test_fencing().await))
}
