//! The requests about limits of moves.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use godwit_api::control::{MoveLimits, Problem, UpdateLimits};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::answers::{Body, Refusal};
use crate::manager::Manager;

pub(crate) fn routes() -> OpenApiRouter<Arc<Manager>> {
    OpenApiRouter::new().routes(routes!(show, update))
}

/// How many moves may run at a time, as it holds now.
#[utoipa::path(get, path = "/api/v1/limits", operation_id = "show_limits", tag = "moves", responses(
    (status = 200, description = "The limits", body = MoveLimits),
    (status = "4XX", description = "Why not", body = Problem, content_type = "application/problem+json"),
))]
async fn show(State(manager): State<Arc<Manager>>) -> Json<MoveLimits> {
    Json(manager.state.inventory().move_limits())
}

/// Changes how many moves may run at a time: from now on, also for those that wait. What runs runs on. Hosts' own numbers are set by
/// `PATCH /api/v1/hosts/{host}`.
#[utoipa::path(patch, path = "/api/v1/limits", operation_id = "update_limits", tag = "moves", request_body = UpdateLimits, responses(
    (status = 200, description = "The limits as they are now", body = MoveLimits),
    (status = "4XX", description = "Why not", body = Problem, content_type = "application/problem+json"),
    (status = "5XX", description = "Why not", body = Problem, content_type = "application/problem+json"),
))]
async fn update(
    State(manager): State<Arc<Manager>>,
    Body(request): Body<UpdateLimits>,
) -> Result<Json<MoveLimits>, Refusal> {
    Ok(Json(manager.update_limits(request).await?))
}
