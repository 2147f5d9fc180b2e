//! The requests about hosts.

#![allow(unused_qualifications, reason = "utoipa's macro writes them")]

use axum::extract::{FromRef, State};
use axum::{Extension, Json};
use godwit_api::control::{
    AddHost, HostState, HostSummary, ManagedHost, Page, Problem, Role, UpdateHost,
};
use http::StatusCode;
use serde::Deserialize;
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::access::Caller;
use crate::answers::{Body, Making, Path, Query, Refusal, cursor, label, made};
use crate::cluster::inventory::HostFilter;
use crate::hosts::HostRequests;

pub(crate) fn routes<S>() -> OpenApiRouter<S>
where
    S: Clone + Send + Sync + 'static,
    HostRequests: FromRef<S>,
{
    OpenApiRouter::new().routes(routes!(list, add)).routes(routes!(show, update, forget))
}

/// Which hosts, and which page of them.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct ListHosts {
    /// Those in this state.
    state: Option<HostState>,
    /// Those in maintenance, or those that are not.
    maintenance: Option<bool>,
    /// Those with this in their name.
    search: Option<String>,
    /// Those with this label, `key=value`.
    #[param(pattern = "=")]
    label: Option<String>,
    /// Where the page begins: `next` of the page before.
    cursor: Option<String>,
    /// Items of the page.
    #[param(minimum = 1, maximum = 1000, default = 100)]
    limit: Option<u32>,
}

/// Hosts by name.
#[utoipa::path(get, path = "/api/v1/hosts", operation_id = "list_hosts", tag = "hosts", params(ListHosts), responses(
    (status = 200, description = "A page of hosts", body = Page<HostSummary>),
    (status = "4XX", description = "Why not", body = Problem, content_type = "application/problem+json"),
))]
async fn list(
    State(hosts): State<HostRequests>,
    Query(query): Query<ListHosts>,
) -> Result<Json<Page<HostSummary>>, Refusal> {
    let filter = HostFilter {
        state: query.state,
        maintenance: query.maintenance,
        search: query.search,
        label: label(query.label.as_deref())?,
    };
    Ok(Json(hosts.state.inventory().hosts(&filter, &cursor(query.cursor, query.limit)?)))
}

/// Takes a host in whose agent has a certificate already.
#[utoipa::path(post, path = "/api/v1/hosts", operation_id = "add_host", tag = "hosts", request_body = AddHost, responses(
    (status = 201, description = "It is followed from now on", body = ManagedHost),
    (status = "4XX", description = "Why not", body = Problem, content_type = "application/problem+json"),
    (status = "5XX", description = "Why not", body = Problem, content_type = "application/problem+json"),
))]
async fn add(
    State(hosts): State<HostRequests>,
    Body(request): Body<AddHost>,
) -> Result<Making<ManagedHost>, Refusal> {
    let named = format!("host {} at {}", request.name, request.address);
    Ok(made(StatusCode::CREATED, named, hosts.add_host(request).await?))
}

/// One host, with what its agent told last.
#[utoipa::path(get, path = "/api/v1/hosts/{host}", operation_id = "show_host", tag = "hosts", params(("host" = String, Path, description = "Its name")), responses(
    (status = 200, description = "The host", body = ManagedHost),
    (status = "4XX", description = "Why not", body = Problem, content_type = "application/problem+json"),
))]
async fn show(
    State(hosts): State<HostRequests>,
    Path(host): Path<String>,
) -> Result<Json<ManagedHost>, Refusal> {
    Ok(Json(hosts.host(&host)?))
}

/// Changes what is planned of a host. `maintenance` alone needs the role operator, everything else admin. A host that is being emptied is not taken
/// out of maintenance.
#[utoipa::path(patch, path = "/api/v1/hosts/{host}", operation_id = "update_host", tag = "hosts", params(("host" = String, Path, description = "Its name")),
    request_body = UpdateHost, responses(
    (status = 200, description = "As it is now", body = ManagedHost),
    (status = "4XX", description = "Why not", body = Problem, content_type = "application/problem+json"),
    (status = "5XX", description = "Why not", body = Problem, content_type = "application/problem+json"),
))]
async fn update(
    State(hosts): State<HostRequests>,
    Extension(caller): Extension<Caller>,
    Path(host): Path<String>,
    Body(request): Body<UpdateHost>,
) -> Result<Json<ManagedHost>, Refusal> {
    let beside = UpdateHost { maintenance: None, ..request.clone() };
    if beside != UpdateHost::default() {
        caller.check(Role::Admin)?;
    }
    Ok(Json(hosts.update_host(&host, request).await?))
}

/// How a host is forgotten.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct ForgetHost {
    /// Also one in use: moves from it, and those that wait to go there, end as failed, and its drain ends.
    #[serde(default)]
    force: bool,
}

/// Forgets a host. What runs there runs on; the manager does not know of it any more. A host that is emptied or filled again, has moves, or
/// answers and runs VMs is forgotten with `force` alone.
#[utoipa::path(delete, path = "/api/v1/hosts/{host}", operation_id = "forget_host", tag = "hosts",
    params(("host" = String, Path, description = "Its name"), ForgetHost), responses(
    (status = 204, description = "It is not known any more"),
    (status = "4XX", description = "Why not", body = Problem, content_type = "application/problem+json"),
    (status = "5XX", description = "Why not", body = Problem, content_type = "application/problem+json"),
))]
async fn forget(
    State(hosts): State<HostRequests>,
    Path(host): Path<String>,
    Query(how): Query<ForgetHost>,
) -> Result<StatusCode, Refusal> {
    hosts.forget_host(&host, how.force).await?;
    Ok(StatusCode::NO_CONTENT)
}
