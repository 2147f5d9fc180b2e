//! Requests about disk images of this host.

use std::path::PathBuf;
use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::{Query, State};
use axum::routing::{get, post};
use axum::{Json, Router};
use godwit_api::{
    CreateDisk, DiskInfo, DiskList, JobStatus, KeepDisk, KeptDisk, KeptDisks, MoveDisk, ResizeDisk,
};
use http::StatusCode;
use serde::Deserialize;

use crate::agent::Agent;
use crate::server::answers::{Refusal, body};
use crate::server::named::Named;

pub(super) fn routes() -> Router<Arc<Agent>> {
    Router::new()
        .route("/v1/disks", get(list).post(create).delete(delete))
        .route("/v1/disks/info", get(show))
        .route("/v1/disks/kept", get(list_kept).put(keep).delete(remove_kept))
        .route("/v1/disks/resize", post(resize))
        .route("/v1/vms/{name}/drives/move", post(move_disk))
}

#[derive(Debug, Deserialize)]
struct ImageQuery {
    path: PathBuf,
}

async fn list(State(agent): State<Arc<Agent>>) -> Json<DiskList> {
    Json(agent.disks().await)
}

async fn show(
    State(agent): State<Arc<Agent>>,
    Query(query): Query<ImageQuery>,
) -> Result<Json<DiskInfo>, Refusal> {
    Ok(Json(agent.disk_info(&query.path).await?))
}

async fn list_kept(State(agent): State<Arc<Agent>>) -> Json<KeptDisks> {
    Json(agent.kept_disks())
}

async fn keep(State(agent): State<Arc<Agent>>, bytes: Bytes) -> Result<Json<KeptDisk>, Refusal> {
    let request: KeepDisk = body(&bytes)?;
    Ok(Json(agent.keep_disk(&request.path)?))
}

async fn remove_kept(
    State(agent): State<Arc<Agent>>,
    Query(query): Query<ImageQuery>,
) -> Result<StatusCode, Refusal> {
    agent.remove_kept_disk(&query.path).await?;
    Ok(StatusCode::NO_CONTENT)
}

async fn create(
    State(agent): State<Arc<Agent>>,
    bytes: Bytes,
) -> Result<(StatusCode, Json<DiskInfo>), Refusal> {
    let request: CreateDisk = body(&bytes)?;
    Ok((StatusCode::CREATED, Json(agent.create_disk(request).await?)))
}

async fn resize(State(agent): State<Arc<Agent>>, bytes: Bytes) -> Result<Json<DiskInfo>, Refusal> {
    let request: ResizeDisk = body(&bytes)?;
    Ok(Json(agent.resize_disk(request).await?))
}

async fn move_disk(
    State(agent): State<Arc<Agent>>,
    Named(name): Named,
    bytes: Bytes,
) -> Result<(StatusCode, Json<JobStatus>), Refusal> {
    let request: MoveDisk = body(&bytes)?;
    Ok((StatusCode::ACCEPTED, Json(agent.move_disk(&name, request)?)))
}

async fn delete(
    State(agent): State<Arc<Agent>>,
    Query(query): Query<ImageQuery>,
) -> Result<StatusCode, Refusal> {
    agent.delete_disk(&query.path).await?;
    Ok(StatusCode::NO_CONTENT)
}
