//! Requests for probes of the lanes: by clients, and by other agents.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Bytes;
use axum::extract::{Path, Query, State};
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::routing::{get, post};
use axum::{Extension, Json, Router};
use futures::{Stream, StreamExt};
use godwit_api::{IncomingProbeAccepted, IncomingProbeRequest, IncomingProbeStatus, ProbeRequest};
use godwit_pki::Peer;
use http::StatusCode;
use serde::Deserialize;
use tokio_stream::wrappers::ReceiverStream;

use crate::agent::Agent;
use crate::probe::{self, ProbeEvent};
use crate::server::answers::{Refusal, body, json_event};

/// Time for a probe to end; its threads are woken at once.
const END_LIMIT: Duration = Duration::from_secs(5);

pub(super) fn routes() -> Router<Arc<Agent>> {
    Router::new()
        .route("/v1/probes", post(begin))
        .route("/v1/incoming-probes", post(expect))
        .route("/v1/incoming-probes/{id}", get(show).delete(end))
}

async fn begin(
    State(agent): State<Arc<Agent>>,
    bytes: Bytes,
) -> Result<Sse<impl Stream<Item = Result<Event, Infallible>>>, Refusal> {
    let request: ProbeRequest = body(&bytes)?;
    let events = probe::begin(agent, request).await?;
    let events = ReceiverStream::new(events).map(|event| {
        Ok(match event {
            ProbeEvent::Progress(progress) => json_event("progress", &progress),
            ProbeEvent::Report(report) => json_event("report", &report),
            ProbeEvent::Failed(error) => json_event("failed", &error),
        })
    });
    Ok(Sse::new(events).keep_alive(KeepAlive::default()))
}

async fn expect(
    State(agent): State<Arc<Agent>>,
    peer: Option<Extension<Peer>>,
    bytes: Bytes,
) -> Result<(StatusCode, Json<IncomingProbeAccepted>), Refusal> {
    let request: IncomingProbeRequest = body(&bytes)?;
    let from = peer.map_or(request.from, |Extension(peer)| peer.name);
    let accepted = probe::expect(&agent, from, Duration::from_millis(request.limit_ms))?;
    Ok((StatusCode::CREATED, Json(accepted)))
}

#[derive(Debug, Deserialize)]
struct Since {
    #[serde(default)]
    since_ns: u64,
}

async fn show(
    State(agent): State<Arc<Agent>>,
    Path(id): Path<String>,
    Query(Since { since_ns }): Query<Since>,
) -> Result<Json<IncomingProbeStatus>, Refusal> {
    let readings = agent.probes().find(&id)?.session.readings(since_ns);
    Ok(Json(IncomingProbeStatus { readings }))
}

async fn end(
    State(agent): State<Arc<Agent>>,
    Path(id): Path<String>,
) -> Result<StatusCode, Refusal> {
    let mut expected = agent.probes().find(&id)?;
    expected.session.end();
    // The answer comes when the next probe may begin; the wait is bounded.
    let _ = tokio::time::timeout(END_LIMIT, expected.over.changed()).await;
    Ok(StatusCode::NO_CONTENT)
}
