//! Requests for imports and exports, and for their progress.

use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::{Path, State};
use axum::routing::{get, post};
use axum::{Json, Router};
use godwit_api::{ExportVm, ImportVm, JobStatus, JobSummary};
use http::StatusCode;

use crate::agent::Agent;
use crate::server::answers::{Refusal, body};
use crate::server::named::Named;

pub(super) fn routes() -> Router<Arc<Agent>> {
    Router::new()
        .route("/v1/imports", post(import))
        .route("/v1/jobs", get(list))
        .route("/v1/jobs/{id}", get(show).delete(cancel))
        .route("/v1/vms/{name}/export", post(export))
}

async fn import(
    State(agent): State<Arc<Agent>>,
    bytes: Bytes,
) -> Result<(StatusCode, Json<JobStatus>), Refusal> {
    let request: ImportVm = body(&bytes)?;
    Ok((StatusCode::ACCEPTED, Json(agent.import_vm(request)?)))
}

async fn export(
    State(agent): State<Arc<Agent>>,
    Named(name): Named,
    bytes: Bytes,
) -> Result<(StatusCode, Json<JobStatus>), Refusal> {
    let request: ExportVm = body(&bytes)?;
    Ok((StatusCode::ACCEPTED, Json(agent.export_vm(&name, request)?)))
}

async fn list(State(agent): State<Arc<Agent>>) -> Json<Vec<JobSummary>> {
    Json(agent.jobs())
}

async fn show(
    State(agent): State<Arc<Agent>>,
    Path(id): Path<String>,
) -> Result<Json<JobStatus>, Refusal> {
    Ok(Json(agent.job(&id)?))
}

async fn cancel(
    State(agent): State<Arc<Agent>>,
    Path(id): Path<String>,
) -> Result<StatusCode, Refusal> {
    agent.cancel_job(&id).await?;
    Ok(StatusCode::NO_CONTENT)
}
