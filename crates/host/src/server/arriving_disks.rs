//! Requests of other agents for disks that travel to this host with a VM: `/v1/arriving-disks`.

use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::{Path, State};
use axum::routing::{delete, post};
use axum::{Extension, Json, Router};
use godwit_api::{ArrivingDisks, ArrivingDisksAccepted, ArrivingDisksChecked};
use godwit_pki::Peer;
use http::StatusCode;

use crate::agent::Agent;
use crate::migration;
use crate::server::answers::{Refusal, body};
use crate::server::incoming::check_name;

pub(super) fn routes() -> Router<Arc<Agent>> {
    Router::new()
        .route("/v1/arriving-disks", post(accept))
        .route("/v1/arriving-disks/checks", post(check))
        .route("/v1/arriving-disks/{id}", delete(remove))
}

async fn accept(
    State(agent): State<Arc<Agent>>,
    peer: Option<Extension<Peer>>,
    bytes: Bytes,
) -> Result<(StatusCode, Json<ArrivingDisksAccepted>), Refusal> {
    let request: ArrivingDisks = body(&bytes)?;
    check_name(peer, &request.from)?;
    // In its own task: a source that disconnects must not leave images that nothing waits for.
    let accepted = tokio::spawn(async move { migration::accept_disks(&agent, request).await });
    let accepted = accepted.await.map_err(|error| crate::failure::task_failed(&error))??;
    Ok((StatusCode::CREATED, Json(accepted)))
}

/// Checks whether disks could arrive; creates nothing.
async fn check(
    State(agent): State<Arc<Agent>>,
    peer: Option<Extension<Peer>>,
    bytes: Bytes,
) -> Result<Json<ArrivingDisksChecked>, Refusal> {
    let request: ArrivingDisks = body(&bytes)?;
    check_name(peer, &request.from)?;
    let disks = migration::could_disks_arrive(&agent, &request).await?;
    Ok(Json(ArrivingDisksChecked { disks }))
}

/// Removes a transfer with its images. Those of a shadow go with it.
async fn remove(
    State(agent): State<Arc<Agent>>,
    Path(id): Path<String>,
    peer: Option<Extension<Peer>>,
) -> Result<StatusCode, Refusal> {
    let (id, from) = agent.transfer_with_source(&id)?;
    check_name(peer, &from)?;
    // In its own task: it goes on if the source does not wait for it.
    let removed = tokio::spawn(async move { agent.give_up_disks(id, &from).await });
    removed.await.map_err(|error| crate::failure::task_failed(&error))??;
    Ok(StatusCode::NO_CONTENT)
}
