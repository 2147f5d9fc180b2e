//! API requests for drains.

#![allow(unused_qualifications, reason = "utoipa's macro writes them")]

use std::sync::Arc;

use axum::extract::{FromRef, State};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use godwit_api::control::{CreateDrain, Drain, Page};
use http::StatusCode;
use serde::Deserialize;
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::access::Caller;
use crate::answers::OnlyLooked;
use crate::answers::{Body, Failed, Path, Query, Refusal, cursor, made};
use crate::drains::{Drains, no_drain};
use crate::moves::requests::{check_disks, check_qemu};
use crate::storage::term::Term;

/// Access to drains while this manager leads.
#[derive(Clone)]
pub(crate) struct DrainRequests(pub(crate) Arc<Term<Drains>>);

pub(crate) fn routes<S>() -> OpenApiRouter<S>
where
    S: Clone + Send + Sync + 'static,
    DrainRequests: FromRef<S>,
{
    OpenApiRouter::new()
        .routes(routes!(create))
        .routes(routes!(list))
        .routes(routes!(show, cancel))
        .routes(routes!(undo))
}

/// Filter and page of a list of drains.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct ListDrains {
    /// Only drains of this host.
    host: Option<String>,
    /// Start of the page: `next` of the previous page.
    cursor: Option<String>,
    /// Largest number of items on the page.
    #[param(minimum = 1, maximum = 1000, default = 100)]
    limit: Option<u32>,
}

/// Drains a host: the host goes into maintenance, and each VM that can leave gets a target and a
/// move. The response lists VMs that must stay with the reason. If a drain of the host is already
/// running, the request returns that drain.
#[utoipa::path(post, path = "/api/v1/hosts/{host}/drain", operation_id = "create_drain",
    tag = "drains", params(("host" = String, Path, description = "Name of the host")),
    request_body = CreateDrain, responses(
    (status = 202, description = "The drain, with a plan for every VM", body = Drain),
    Failed,
))]
async fn create(
    State(drains): State<DrainRequests>,
    Extension(caller): Extension<Caller>,
    Path(host): Path<String>,
    Body(request): Body<CreateDrain>,
) -> Result<Response, Refusal> {
    check_qemu(&request.qemu)?;
    check_disks(request.disks.as_ref(), request.engine)?;
    let plan_only = request.plan_only;
    let drain = drains.0.get()?.create(&host, request, &caller.name).await?;
    if plan_only {
        return Ok((StatusCode::ACCEPTED, Extension(OnlyLooked), Json(drain)).into_response());
    }
    Ok(made(StatusCode::ACCEPTED, format!("drain {}", drain.id), drain).into_response())
}

/// Lists drains, the oldest first.
#[utoipa::path(get, path = "/api/v1/drains", operation_id = "list_drains", tag = "drains",
    params(ListDrains), responses(
    (status = 200, description = "A page of drains", body = Page<Drain>),
    Failed,
))]
async fn list(
    State(drains): State<DrainRequests>,
    Query(query): Query<ListDrains>,
) -> Result<Json<Page<Drain>>, Refusal> {
    let cursor = cursor(query.cursor, query.limit)?;
    let drains = drains.0.get()?;
    let all = drains.all();
    let wanted: Vec<&Drain> = all
        .values()
        .filter(|one| query.host.as_ref().is_none_or(|host| one.host == *host))
        .collect();
    let behind = |one: &&&Drain| cursor.behind.as_ref().is_none_or(|behind| one.id > *behind);
    let mut items: Vec<Drain> =
        wanted.iter().filter(behind).take(cursor.limit + 1).map(|one| (*one).clone()).collect();
    let has_more = items.len() > cursor.limit;
    items.truncate(cursor.limit);
    let next = items.last().filter(|_| has_more).map(|last| last.id.clone());
    Ok(Json(Page { items, total: wanted.len() as u64, next }))
}

/// Returns a drain with the state of each VM and the predicted end.
#[utoipa::path(get, path = "/api/v1/drains/{id}", operation_id = "show_drain", tag = "drains",
    params(("id" = String, Path, description = "ID of the drain")), responses(
    (status = 200, description = "The drain", body = Drain),
    Failed,
))]
async fn show(
    State(drains): State<DrainRequests>,
    Path(id): Path<String>,
) -> Result<Json<Drain>, Refusal> {
    let found = drains.0.get()?.all().get(&id).cloned();
    Ok(Json(found.ok_or_else(|| no_drain(&id))?))
}

/// Cancels a drain. Waiting moves are cancelled, running moves continue, and finished moves stay as
/// they are.
#[utoipa::path(delete, path = "/api/v1/drains/{id}", operation_id = "cancel_drain", tag = "drains",
    params(("id" = String, Path, description = "ID of the drain")), responses(
    (status = 202, description = "The cancelled drain", body = Drain),
    Failed,
))]
async fn cancel(
    State(drains): State<DrainRequests>,
    Path(id): Path<String>,
) -> Result<(StatusCode, Json<Drain>), Refusal> {
    Ok((StatusCode::ACCEPTED, Json(drains.0.get()?.cancel(&id).await?)))
}

/// Undoes a drain: ends the host's maintenance and moves its VMs back.
#[utoipa::path(post, path = "/api/v1/drains/{id}/undo", operation_id = "undo_drain", tag = "drains",
    params(("id" = String, Path, description = "ID of the drain")), responses(
    (status = 202, description = "The drain, whose VMs are moved back", body = Drain),
    Failed,
))]
async fn undo(
    State(drains): State<DrainRequests>,
    Path(id): Path<String>,
) -> Result<(StatusCode, Json<Drain>), Refusal> {
    Ok((StatusCode::ACCEPTED, Json(drains.0.get()?.undo(&id).await?)))
}
