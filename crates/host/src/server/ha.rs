//! Requests about high availability: the manager's about this host's lease, and those that it has
//! another host make. docs/ha.md explains them.

use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::Response;
use axum::routing::{get, post};
use axum::{Json, Router};
use godwit_api::{
    HaAnswer, HaForward, HaForwarded, HaHost, HaRenewal, ReleaseVms, StartProtected, VmInfo,
};
use http::StatusCode;

use crate::agent::Agent;
use crate::server::answers::{Refusal, body};

/// Requests that are answered before the agent knows its VMs: those that keep a lease.
const EARLY: [&str; 6] = [
    "/v1/ha",
    "/v1/ha/renewal",
    "/v1/ha/answer",
    "/v1/ha/forward",
    "/v1/ha/heartbeats/open",
    "/v1/ha/heartbeats/read",
];

/// Lets a request wait until the agent knows its VMs, unless it concerns the lease.
pub(super) async fn until_vms_known(
    State(agent): State<Arc<Agent>>,
    request: Request,
    next: Next,
) -> Response {
    if !EARLY.contains(&request.uri().path()) {
        agent.until_vms_known().await;
    }
    next.run(request).await
}

pub(super) fn routes() -> Router<Arc<Agent>> {
    Router::new()
        .route("/v1/ha", get(show))
        .route("/v1/ha/renewal", post(renew))
        .route("/v1/ha/answer", post(take_answer))
        .route("/v1/ha/forward", post(forward))
        .route("/v1/ha/start", post(start))
        .route("/v1/ha/release", post(release))
}

async fn show(State(agent): State<Arc<Agent>>) -> Json<HaHost> {
    Json(agent.ha().state())
}

async fn renew(State(agent): State<Arc<Agent>>) -> Json<HaRenewal> {
    Json(agent.ha().renewal())
}

async fn take_answer(State(agent): State<Arc<Agent>>, bytes: Bytes) -> Result<StatusCode, Refusal> {
    let answer: HaAnswer = body(&bytes)?;
    tokio::task::block_in_place(|| agent.ha().answer(&answer))?;
    Ok(StatusCode::NO_CONTENT)
}

async fn forward(
    State(agent): State<Arc<Agent>>,
    bytes: Bytes,
) -> Result<Json<HaForwarded>, Refusal> {
    let request: HaForward = body(&bytes)?;
    Ok(Json(agent.forward_ha(request).await?))
}

async fn start(State(agent): State<Arc<Agent>>, bytes: Bytes) -> Result<Json<VmInfo>, Refusal> {
    let request: StartProtected = body(&bytes)?;
    Ok(Json(agent.start_protected(request).await?))
}

async fn release(State(agent): State<Arc<Agent>>, bytes: Bytes) -> Result<StatusCode, Refusal> {
    let request: ReleaseVms = body(&bytes)?;
    agent.release_vms(request).await?;
    Ok(StatusCode::NO_CONTENT)
}
