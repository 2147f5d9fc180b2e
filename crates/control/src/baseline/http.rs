//! API requests for the cluster's CPU baseline.

#![allow(unused_qualifications, reason = "utoipa's macro writes them")]

use axum::extract::{FromRef, State};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use godwit_api::control::{BaselineVm, CpuBaselineChange, CpuBaselineInfo, Page, SetCpuBaseline};
use http::StatusCode;
use serde::Deserialize;
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::CpuBaselines;
use crate::access::Caller;
use crate::answers::OnlyLooked;
use crate::answers::{Body, Failed, Query, Refusal, cursor};

pub(crate) fn routes<S>() -> OpenApiRouter<S>
where
    S: Clone + Send + Sync + 'static,
    CpuBaselines: FromRef<S>,
{
    OpenApiRouter::new().routes(routes!(show, set, clear)).routes(routes!(list_vms))
}

/// Returns the baseline, whether each host meets it and what it lacks, the features that all hosts
/// have in common, and the baseline names that all hosts support.
#[utoipa::path(get, path = "/api/v1/cpu-baseline", operation_id = "show_cpu_baseline",
    tag = "cpu-baseline", responses(
    (status = 200, body = CpuBaselineInfo,
        description = "The baseline, if there is one, and the hosts"),
    Failed,
))]
async fn show(State(baseline): State<CpuBaselines>) -> Result<Json<CpuBaselineInfo>, Refusal> {
    Ok(Json(baseline.show().await?))
}

/// Mode of the request.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct Set {
    /// Dry run: sets nothing and returns the effects.
    #[serde(default)]
    plan: bool,
}

/// Sets the baseline. New VMs get it, and no VM goes to a host that falls short of it. Running VMs
/// keep their CPU; the response lists those with another CPU. The request is refused if a host in
/// use falls short and is not named in `without`.
#[utoipa::path(put, path = "/api/v1/cpu-baseline", operation_id = "set_cpu_baseline",
    tag = "cpu-baseline", params(Set), request_body = SetCpuBaseline, responses(
    (status = 200, description = "The effects", body = CpuBaselineChange),
    Failed,
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

/// Removes the baseline. New VMs get the CPU of their specifications, and hosts that fell short
/// take VMs again.
#[utoipa::path(delete, path = "/api/v1/cpu-baseline", operation_id = "clear_cpu_baseline",
    tag = "cpu-baseline", responses(
    (status = 204, description = "The baseline is removed"),
    Failed,
))]
async fn clear(State(baseline): State<CpuBaselines>) -> Result<StatusCode, Refusal> {
    baseline.clear().await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Selection of a page.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct ListVms {
    /// Start of the page: `next` of the previous page.
    cursor: Option<String>,
    /// Largest number of items on the page.
    #[param(minimum = 1, maximum = 1000, default = 100)]
    limit: Option<u32>,
}

/// Lists running VMs whose CPU differs from the baseline, by name. Each gets the baseline at its
/// next start.
#[utoipa::path(get, path = "/api/v1/cpu-baseline/vms", operation_id = "list_cpu_baseline_vms",
    tag = "cpu-baseline", params(ListVms), responses(
    (status = 200, description = "A page of VMs", body = Page<BaselineVm>),
    Failed,
))]
async fn list_vms(
    State(baseline): State<CpuBaselines>,
    Query(query): Query<ListVms>,
) -> Result<Json<Page<BaselineVm>>, Refusal> {
    Ok(Json(baseline.vms(cursor(query.cursor, query.limit)?).await?))
}
