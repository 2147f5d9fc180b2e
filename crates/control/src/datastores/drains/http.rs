//! API requests for drains of datastores.

#![allow(unused_qualifications, reason = "utoipa's macro writes them")]

use std::sync::Arc;

use axum::extract::{FromRef, State};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use godwit_api::control::{CreateDatastoreDrain, DatastoreDrain, Page};
use http::StatusCode;
use serde::Deserialize;
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::{DatastoreDrains, no_drain};
use crate::access::Caller;
use crate::answers::{Body, Failed, OnlyLooked, Path, Query, Refusal, cursor, made};
use crate::cluster::inventory::Cursor;
use crate::storage::term::Term;

/// Access to drains of datastores while this manager leads.
#[derive(Clone)]
pub(crate) struct DatastoreDrainRequests(pub(crate) Arc<Term<DatastoreDrains>>);

pub(crate) fn routes<S>() -> OpenApiRouter<S>
where
    S: Clone + Send + Sync + 'static,
    DatastoreDrainRequests: FromRef<S>,
{
    OpenApiRouter::new()
        .routes(routes!(create))
        .routes(routes!(list))
        .routes(routes!(show, cancel))
        .routes(routes!(undo))
}

/// Page of a list of drains.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct PageOfDrains {
    /// Start of the page: `next` of the previous page.
    cursor: Option<String>,
    /// Largest number of items on the page.
    #[param(minimum = 1, maximum = 1000, default = 100)]
    limit: Option<u32>,
}

/// Drains a datastore: it goes into maintenance, and each disk in it that can move goes to another
/// datastore of its VM's host, also while the guest runs. Disks that stay have the reason. If a
/// drain of the datastore is already running, the request returns that drain.
#[utoipa::path(post, path = "/api/v1/datastores/{datastore}/drain",
    operation_id = "create_datastore_drain", tag = "datastores",
    params(("datastore" = String, Path, description = "ID, name or path of the datastore")),
    request_body = CreateDatastoreDrain, responses(
    (status = 202, description = "The drain, with a plan for every disk", body = DatastoreDrain),
    Failed,
))]
async fn create(
    State(drains): State<DatastoreDrainRequests>,
    Extension(caller): Extension<Caller>,
    Path(datastore): Path<String>,
    Body(request): Body<CreateDatastoreDrain>,
) -> Result<Response, Refusal> {
    let plan_only = request.plan_only;
    let drain = drains.0.get()?.create(&datastore, request, &caller.name).await?;
    if plan_only {
        return Ok((StatusCode::ACCEPTED, Extension(OnlyLooked), Json(drain)).into_response());
    }
    Ok(made(StatusCode::ACCEPTED, format!("drain {}", drain.id), drain).into_response())
}

/// Lists drains of datastores, the oldest first.
#[utoipa::path(get, path = "/api/v1/datastore-drains", operation_id = "list_datastore_drains",
    tag = "datastores", params(PageOfDrains), responses(
    (status = 200, description = "A page of drains", body = Page<DatastoreDrain>),
    Failed,
))]
async fn list(
    State(drains): State<DatastoreDrainRequests>,
    Query(query): Query<PageOfDrains>,
) -> Result<Json<Page<DatastoreDrain>>, Refusal> {
    let Cursor { behind, limit } = cursor(query.cursor, query.limit)?;
    let drains = drains.0.get()?;
    let all = drains.all();
    let is_behind = |id: &&String| behind.as_ref().is_none_or(|behind| *id > behind);
    let mut ids: Vec<&String> = all.keys().filter(is_behind).take(limit + 1).collect();
    let has_more = ids.len() > limit;
    ids.truncate(limit);
    let next = ids.last().filter(|_| has_more).map(|last| (*last).clone());
    let items = ids.into_iter().filter_map(|id| all.get(id).cloned()).collect();
    Ok(Json(Page { items, total: all.len() as u64, next }))
}

/// Returns a drain of a datastore, with the state of each disk.
#[utoipa::path(get, path = "/api/v1/datastore-drains/{id}", operation_id = "show_datastore_drain",
    tag = "datastores", params(("id" = String, Path, description = "ID of the drain")), responses(
    (status = 200, description = "The drain", body = DatastoreDrain),
    Failed,
))]
async fn show(
    State(drains): State<DatastoreDrainRequests>,
    Path(id): Path<String>,
) -> Result<Json<DatastoreDrain>, Refusal> {
    let found = drains.0.get()?.all().get(&id).cloned();
    Ok(Json(found.ok_or_else(|| no_drain(&id))?))
}

/// Cancels a drain of a datastore. Disks that wait stay, disks that move keep their old images, and
/// disks that have moved stay where they are.
#[utoipa::path(delete, path = "/api/v1/datastore-drains/{id}",
    operation_id = "cancel_datastore_drain", tag = "datastores",
    params(("id" = String, Path, description = "ID of the drain")), responses(
    (status = 202, description = "The cancelled drain", body = DatastoreDrain),
    Failed,
))]
async fn cancel(
    State(drains): State<DatastoreDrainRequests>,
    Path(id): Path<String>,
) -> Result<(StatusCode, Json<DatastoreDrain>), Refusal> {
    Ok((StatusCode::ACCEPTED, Json(drains.0.get()?.cancel(&id).await?)))
}

/// Undoes a drain of a datastore: ends its maintenance and moves its disks back.
#[utoipa::path(post, path = "/api/v1/datastore-drains/{id}/undo",
    operation_id = "undo_datastore_drain", tag = "datastores",
    params(("id" = String, Path, description = "ID of the drain")), responses(
    (status = 202, description = "The drain, whose disks are moved back", body = DatastoreDrain),
    Failed,
))]
async fn undo(
    State(drains): State<DatastoreDrainRequests>,
    Path(id): Path<String>,
) -> Result<(StatusCode, Json<DatastoreDrain>), Refusal> {
    Ok((StatusCode::ACCEPTED, Json(drains.0.get()?.undo(&id).await?)))
}
