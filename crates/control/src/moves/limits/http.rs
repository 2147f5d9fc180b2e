//! The requests about limits of moves.

use axum::Json;
use axum::extract::{FromRef, State};
use godwit_api::control::{MoveLimits, Problem, UpdateLimits};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::LimitsOfMoves;
use crate::answers::{Body, Refusal};

pub(crate) fn routes<S>() -> OpenApiRouter<S>
where
    S: Clone + Send + Sync + 'static,
    LimitsOfMoves: FromRef<S>,
{
    OpenApiRouter::new().routes(routes!(show, update))
}

/// How many moves may run at a time, as it holds now.
#[utoipa::path(get, path = "/api/v1/limits", operation_id = "show_limits", tag = "moves", responses(
    (status = 200, description = "The limits", body = MoveLimits),
    (status = "4XX", description = "Why not", body = Problem, content_type = "application/problem+json"),
))]
async fn show(State(limits): State<LimitsOfMoves>) -> Json<MoveLimits> {
    Json(limits.show())
}

/// Changes how many moves may run at a time: from now on, also for those that wait. What runs runs on. Hosts' own numbers are set by
/// `PATCH /api/v1/hosts/{host}`.
#[utoipa::path(patch, path = "/api/v1/limits", operation_id = "update_limits", tag = "moves", request_body = UpdateLimits, responses(
    (status = 200, description = "The limits as they are now", body = MoveLimits),
    (status = "4XX", description = "Why not", body = Problem, content_type = "application/problem+json"),
    (status = "5XX", description = "Why not", body = Problem, content_type = "application/problem+json"),
))]
async fn update(
    State(limits): State<LimitsOfMoves>,
    Body(request): Body<UpdateLimits>,
) -> Result<Json<MoveLimits>, Refusal> {
    Ok(Json(limits.update(request).await?))
}
