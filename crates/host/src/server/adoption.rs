//! Requests about guests of other programs and their adoption.

use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::{Path, State};
use axum::routing::{get, post};
use axum::{Json, Router};
use godwit_api::{AdoptGuest, Adoption, ForeignGuest};
use http::StatusCode;

use crate::agent::Agent;
use crate::server::answers::{Refusal, body};

pub(super) fn routes() -> Router<Arc<Agent>> {
    Router::new()
        .route("/v1/foreign-guests", get(found))
        .route("/v1/adoptions", get(list).post(adopt))
        .route("/v1/adoptions/checks", post(check))
        .route("/v1/adoptions/{id}", get(show).delete(cancel))
}

async fn found(State(agent): State<Arc<Agent>>) -> Json<Vec<ForeignGuest>> {
    Json(agent.foreign_guests().await)
}

async fn list(State(agent): State<Arc<Agent>>) -> Json<Vec<Adoption>> {
    Json(agent.adoptions())
}

async fn check(
    State(agent): State<Arc<Agent>>,
    bytes: Bytes,
) -> Result<Json<ForeignGuest>, Refusal> {
    let request: AdoptGuest = body(&bytes)?;
    Ok(Json(agent.check_adoption(&request).await?))
}

async fn adopt(
    State(agent): State<Arc<Agent>>,
    bytes: Bytes,
) -> Result<(StatusCode, Json<Adoption>), Refusal> {
    let request: AdoptGuest = body(&bytes)?;
    Ok((StatusCode::ACCEPTED, Json(agent.adopt_guest(request)?)))
}

async fn show(
    State(agent): State<Arc<Agent>>,
    Path(id): Path<String>,
) -> Result<Json<Adoption>, Refusal> {
    Ok(Json(agent.adoption(&id)?))
}

async fn cancel(
    State(agent): State<Arc<Agent>>,
    Path(id): Path<String>,
) -> Result<StatusCode, Refusal> {
    agent.cancel_adoption(&id)?;
    Ok(StatusCode::ACCEPTED)
}
