//! Requests of other agents to this host as a destination, and as the other host of a hand-over.

use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::{Path, Query, State};
use axum::routing::{get, post};
use axum::{Extension, Json, Router};
use godwit_api::{
    ApiError, ErrorCode, IncomingAccepted, IncomingChecked, IncomingRequest, IncomingResume,
    IncomingRun, IncomingStatus, PageInAnswer, PageInRequest,
};
use godwit_migration::handover::Known;
use godwit_pki::Peer;
use godwit_qemu::Uuid;
use godwit_types::Incarnation;
use http::StatusCode;

use crate::agent::Agent;
use crate::migration;
use crate::server::answers::{Refusal, body};
use crate::server::named::Named;

/// Returns the routes that other agents use at the destination: `/v1/incoming`.
pub(super) fn routes() -> Router<Arc<Agent>> {
    Router::new()
        .route("/v1/incoming", post(prepare))
        .route("/v1/incoming/checks", post(check))
        .route("/v1/incoming/{id}", get(show).delete(cancel))
        .route("/v1/incoming/{id}/run", post(run_incoming))
        .route("/v1/incoming/{id}/resume", post(resume_incoming))
        .route("/v1/page-ins/{name}", post(page_in_session))
        .route("/v1/hand-overs/{name}", get(known).delete(forget))
}

async fn prepare(
    State(agent): State<Arc<Agent>>,
    peer: Option<Extension<Peer>>,
    bytes: Bytes,
) -> Result<(StatusCode, Json<IncomingAccepted>), Refusal> {
    let request: IncomingRequest = body(&bytes)?;
    check_name(peer, &request.from)?;
    // In its own task: a source that disconnects must not leave a shadow that nothing waits for.
    let prepared = tokio::spawn(async move { migration::prepare(&agent, request).await });
    let accepted = prepared.await.map_err(|error| crate::failure::task_failed(&error))??;
    Ok((StatusCode::CREATED, Json(accepted)))
}

/// Checks whether a VM could arrive; creates nothing.
async fn check(
    State(agent): State<Arc<Agent>>,
    peer: Option<Extension<Peer>>,
    bytes: Bytes,
) -> Result<Json<IncomingChecked>, Refusal> {
    let request: IncomingRequest = body(&bytes)?;
    check_name(peer, &request.from)?;
    Ok(Json(migration::could_arrive(&agent, &request).await?))
}

pub(super) fn check_name(peer: Option<Extension<Peer>>, from: &str) -> Result<(), ApiError> {
    match peer {
        Some(Extension(peer)) if peer.name != from => {
            let message = format!("cannot accept a VM of host {from} from host {}", peer.name);
            let remedy = "give the host the same name in its configuration and in its certificate";
            Err(ApiError::new(ErrorCode::Forbidden, message, remedy))
        }
        _ => Ok(()),
    }
}

async fn page_in_session(
    State(agent): State<Arc<Agent>>,
    Named(name): Named,
    peer: Option<Extension<Peer>>,
    bytes: Bytes,
) -> Result<Json<PageInAnswer>, Refusal> {
    let request: PageInRequest = body(&bytes)?;
    check_name(peer, &request.from)?;
    Ok(Json(migration::page_in_session(&agent, &name, request).await?))
}

#[derive(Debug, serde::Deserialize)]
struct KnownQuery {
    uuid: Uuid,
    /// Omitted by releases without incarnations.
    #[serde(default)]
    incarnation: Incarnation,
}

/// Returns this host's record of a VM's ownership.
async fn known(
    State(agent): State<Arc<Agent>>,
    Named(name): Named,
    Query(query): Query<KnownQuery>,
) -> Result<Json<Known>, Refusal> {
    Ok(Json(agent.known(&name, query.uuid, query.incarnation)?))
}

async fn show(
    State(agent): State<Arc<Agent>>,
    Path(id): Path<String>,
) -> Result<Json<IncomingStatus>, Refusal> {
    Ok(Json(agent.incoming().status(&id)?))
}

async fn run_incoming(
    State(agent): State<Arc<Agent>>,
    Path(id): Path<String>,
    bytes: Bytes,
) -> Result<Json<IncomingStatus>, Refusal> {
    let request: IncomingRun = body(&bytes)?;
    Ok(Json(agent.incoming().run(&id, request.run).await?))
}

async fn resume_incoming(
    State(agent): State<Arc<Agent>>,
    Path(id): Path<String>,
    peer: Option<Extension<Peer>>,
    bytes: Bytes,
) -> Result<Json<IncomingAccepted>, Refusal> {
    let request: IncomingResume = body(&bytes)?;
    check_name(peer, &agent.incoming().source_of(&id)?)?;
    Ok(Json(migration::resume(&agent, &id, request)?))
}

#[derive(Debug, serde::Deserialize)]
struct ForgetQuery {
    from: String,
    /// Omitted by older releases, like the incarnation.
    uuid: Option<Uuid>,
    #[serde(default)]
    incarnation: Incarnation,
}

/// Removes what is arriving of a VM: a restarted source has no migration of it.
async fn forget(
    State(agent): State<Arc<Agent>>,
    Named(name): Named,
    Query(query): Query<ForgetQuery>,
    peer: Option<Extension<Peer>>,
) -> Result<StatusCode, Refusal> {
    check_name(peer, &query.from)?;
    agent.incoming().cancel_of(&name, &query.from, query.uuid, query.incarnation);
    Ok(StatusCode::NO_CONTENT)
}

async fn cancel(
    State(agent): State<Arc<Agent>>,
    Path(id): Path<String>,
) -> Result<StatusCode, Refusal> {
    agent.incoming().cancel(&id)?;
    Ok(StatusCode::NO_CONTENT)
}
