//! Requests about clones, templates, snapshots, and the images that belong to a VM.

use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::{Query, State};
use axum::routing::{get, post, put};
use axum::{Json, Router};
use godwit_api::{CloneVm, CreateSnapshot, RevertVm, SetTemplate, SnapshotInfo, VmImages, VmInfo};
use http::StatusCode;

use crate::agent::Agent;
use crate::server::answers::{Refusal, body};
use crate::server::named::Named;

pub(super) fn routes() -> Router<Arc<Agent>> {
    Router::new()
        .route("/v1/vms/{name}/clone", post(clone))
        .route("/v1/vms/{name}/images", get(images))
        .route("/v1/vms/{name}/snapshots", get(snapshots).post(snapshot).delete(delete_snapshot))
        .route("/v1/vms/{name}/snapshots/revert", post(revert))
        .route("/v1/vms/{name}/template", put(set_template))
}

async fn clone(
    State(agent): State<Arc<Agent>>,
    Named(name): Named,
    bytes: Bytes,
) -> Result<(StatusCode, Json<VmInfo>), Refusal> {
    let request: CloneVm = body(&bytes)?;
    Ok((StatusCode::CREATED, Json(agent.clone_vm(&name, request).await?)))
}

async fn set_template(
    State(agent): State<Arc<Agent>>,
    Named(name): Named,
    bytes: Bytes,
) -> Result<Json<VmInfo>, Refusal> {
    let request: SetTemplate = body(&bytes)?;
    Ok(Json(agent.set_template(&name, request).await?))
}

async fn snapshots(
    State(agent): State<Arc<Agent>>,
    Named(name): Named,
) -> Result<Json<Vec<SnapshotInfo>>, Refusal> {
    Ok(Json(agent.snapshots(&name)?))
}

async fn snapshot(
    State(agent): State<Arc<Agent>>,
    Named(name): Named,
    bytes: Bytes,
) -> Result<(StatusCode, Json<SnapshotInfo>), Refusal> {
    let request: CreateSnapshot = body(&bytes)?;
    Ok((StatusCode::CREATED, Json(agent.create_snapshot(&name, request).await?)))
}

async fn revert(
    State(agent): State<Arc<Agent>>,
    Named(name): Named,
    bytes: Bytes,
) -> Result<Json<VmInfo>, Refusal> {
    let request: RevertVm = body(&bytes)?;
    Ok(Json(agent.revert_to_snapshot(&name, request).await?))
}

async fn delete_snapshot(
    State(agent): State<Arc<Agent>>,
    Named(name): Named,
    Query(query): Query<CreateSnapshot>,
) -> Result<StatusCode, Refusal> {
    agent.delete_snapshot(&name, &query.name).await?;
    Ok(StatusCode::NO_CONTENT)
}

async fn images(
    State(agent): State<Arc<Agent>>,
    Named(name): Named,
) -> Result<Json<VmImages>, Refusal> {
    Ok(Json(agent.images_of_vm(&name).await?))
}
