//! Requests about limits of moves.

use axum::Json;
use axum::extract::{FromRef, State};
use godwit_api::control::{MoveLimits, UpdateLimits};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::LimitsOfMoves;
use crate::answers::{Body, Failed, Refusal};

pub(crate) fn routes<S>() -> OpenApiRouter<S>
where
    S: Clone + Send + Sync + 'static,
    LimitsOfMoves: FromRef<S>,
{
    OpenApiRouter::new().routes(routes!(show, update))
}

/// Shows how many moves may run at a time.
#[utoipa::path(get, path = "/api/v1/limits", operation_id = "show_limits", tag = "moves", responses(
    (status = 200, description = "The limits", body = MoveLimits),
))]
async fn show(State(limits): State<LimitsOfMoves>) -> Json<MoveLimits> {
    Json(limits.show())
}

/// Changes how many moves may run at a time.
///
/// The limits apply from now on, also to waiting moves; running moves continue. `PATCH
/// /api/v1/hosts/{host}` sets the limits of a host.
#[utoipa::path(patch, path = "/api/v1/limits", operation_id = "update_limits",
    tag = "moves", request_body = UpdateLimits, responses(
    (status = 200, description = "The new limits", body = MoveLimits),
    Failed,
))]
async fn update(
    State(limits): State<LimitsOfMoves>,
    Body(request): Body<UpdateLimits>,
) -> Result<Json<MoveLimits>, Refusal> {
    Ok(Json(limits.update(request).await?))
}
