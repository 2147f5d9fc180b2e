//! The requests about the cluster's CPU baseline.

#![allow(unused_qualifications, reason = "utoipa's macro writes them")]

use axum::extract::{FromRef, State};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use godwit_api::control::{
    BaselineVm, CpuBaselineChange, CpuBaselineInfo, Page, Problem, SetCpuBaseline,
};
use http::StatusCode;
use serde::Deserialize;
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::CpuBaselines;
use crate::access::Caller;
use crate::answers::OnlyLooked;
use crate::answers::{Body, Query, Refusal, cursor};

pub(crate) fn routes<S>() -> OpenApiRouter<S>
where
    S: Clone + Send + Sync + 'static,
    CpuBaselines: FromRef<S>,
{
    OpenApiRouter::new().routes(routes!(show, set, clear)).routes(routes!(list_vms))
}

/// The baseline, every host with whether it meets it and what it lacks, what the hosts have in
/// common, and which names all of them could have.
#[utoipa::path(get, path = "/api/v1/cpu-baseline", operation_id = "show_cpu_baseline", tag = "cpu-baseline", responses(
    (status = 200, description = "The baseline, or that there is none", body = CpuBaselineInfo),
    (status = "4XX", description = "Why not", body = Problem, content_type = "application/problem+json"),
    (status = "5XX", description = "Why not", body = Problem, content_type = "application/problem+json"),
))]
async fn show(State(baseline): State<CpuBaselines>) -> Result<Json<CpuBaselineInfo>, Refusal> {
    Ok(Json(baseline.show().await?))
}

/// Whether it is set, or looked at.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct Set {
    /// Nothing is set: what it would mean is told.
    #[serde(default)]
    plan: bool,
}

/// Sets the baseline: VMs that are made from now on get it, and none goes to a host that falls
/// short. VMs that run keep their CPU; those
/// that have another one than this are told. Refused where a host in use falls short that is not
/// named in `without`.
#[utoipa::path(put, path = "/api/v1/cpu-baseline", operation_id = "set_cpu_baseline", tag = "cpu-baseline", params(Set), request_body = SetCpuBaseline, responses(
    (status = 200, description = "What it means", body = CpuBaselineChange),
    (status = "4XX", description = "Why not", body = Problem, content_type = "application/problem+json"),
    (status = "5XX", description = "Why not", body = Problem, content_type = "application/problem+json"),
))]
async fn set(
    State(baseline): State<CpuBaselines>,
    Extension(caller): Extension<Caller>,
    Query(query): Query<Set>,
    Body(request): Body<SetCpuBaseline>,
) -> Result<Response, Refusal> {
    let change = baseline.set(request, query.plan, &caller).await?;
    let mut response = Json(change).into_response();
    if query.plan {
        response.extensions_mut().insert(OnlyLooked);
    }
    Ok(response)
}

/// The cluster has no baseline any more: VMs get what their specifications say, and hosts that fell
/// short take them again.
#[utoipa::path(delete, path = "/api/v1/cpu-baseline", operation_id = "clear_cpu_baseline", tag = "cpu-baseline", responses(
    (status = 204, description = "There is none any more"),
    (status = "4XX", description = "Why not", body = Problem, content_type = "application/problem+json"),
    (status = "5XX", description = "Why not", body = Problem, content_type = "application/problem+json"),
))]
async fn clear(State(baseline): State<CpuBaselines>) -> Result<StatusCode, Refusal> {
    baseline.clear().await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Which page.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct ListVms {
    /// Where the page begins: `next` of the page before.
    cursor: Option<String>,
    /// Items of the page.
    #[param(minimum = 1, maximum = 1000, default = 100)]
    limit: Option<u32>,
}

/// VMs that run with another CPU than the baseline's, by name: each has to be started with it to
/// have it.
#[utoipa::path(get, path = "/api/v1/cpu-baseline/vms", operation_id = "list_cpu_baseline_vms", tag = "cpu-baseline", params(ListVms), responses(
    (status = 200, description = "A page of VMs", body = Page<BaselineVm>),
    (status = "4XX", description = "Why not", body = Problem, content_type = "application/problem+json"),
    (status = "5XX", description = "Why not", body = Problem, content_type = "application/problem+json"),
))]
async fn list_vms(
    State(baseline): State<CpuBaselines>,
    Query(query): Query<ListVms>,
) -> Result<Json<Page<BaselineVm>>, Refusal> {
    Ok(Json(baseline.vms(cursor(query.cursor, query.limit)?).await?))
}
