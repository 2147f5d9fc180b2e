//! Requests of a manager about the heartbeats of other hosts on this host's datastores.

use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::State;
use axum::routing::post;
use axum::{Json, Router};
use godwit_api::{HeartbeatReading, OpenHeartbeat, ReadHeartbeats};
use http::StatusCode;

use crate::agent::Agent;
use crate::server::answers::{Refusal, body};

pub(super) fn routes() -> Router<Arc<Agent>> {
    Router::new()
        .route("/v1/ha/heartbeats/open", post(open))
        .route("/v1/ha/heartbeats/read", post(read))
}

async fn open(State(agent): State<Arc<Agent>>, bytes: Bytes) -> Result<StatusCode, Refusal> {
    let request: OpenHeartbeat = body(&bytes)?;
    agent.open_heartbeat(request).await?;
    Ok(StatusCode::NO_CONTENT)
}

async fn read(
    State(agent): State<Arc<Agent>>,
    bytes: Bytes,
) -> Result<Json<Vec<HeartbeatReading>>, Refusal> {
    let request: ReadHeartbeats = body(&bytes)?;
    Ok(Json(agent.read_heartbeats(&request.slots).await?))
}
