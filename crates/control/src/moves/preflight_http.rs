//! The request for a preflight.

#![allow(unused_qualifications, reason = "utoipa's macro writes them")]

use axum::Json;
use axum::extract::{FromRef, State};
use godwit_api::control::{Preflight, Problem};
use serde::Deserialize;
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::answers::{Path, Query, Refusal};
use crate::moves::requests::MoveRequests;

pub(crate) fn routes<S>() -> OpenApiRouter<S>
where
    S: Clone + Send + Sync + 'static,
    MoveRequests: FromRef<S>,
{
    OpenApiRouter::new().routes(routes!(show))
}

/// Of what target, and who is asked.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct Ask {
    /// The target; none: all hosts are ranked.
    to: Option<String>,
    /// Whether the hosts are asked too, by a dry run to the target, or to the best one: it takes some seconds, costs the guest
    /// and the lanes a little, needs the role operator and stands in the audit log.
    #[serde(default)]
    predict: bool,
}

/// What stands in the way of a VM's move: to a target check by check, or a ranking of all hosts. Nothing is moved and nothing is made.
#[utoipa::path(get, path = "/api/v1/vms/{vm}/preflight", operation_id = "show_preflight", tag = "moves",
    params(("vm" = String, Path, description = "The VM"), Ask), responses(
    (status = 200, description = "The report, or the ranking", body = Preflight),
    (status = "4XX", description = "Why not", body = Problem, content_type = "application/problem+json"),
))]
async fn show(
    State(moves): State<MoveRequests>,
    Path(vm): Path<String>,
    Query(ask): Query<Ask>,
) -> Result<Json<Preflight>, Refusal> {
    Ok(Json(moves.preflight(&vm, ask.to.as_deref(), ask.predict).await?))
}
