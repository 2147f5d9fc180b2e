//! Probes of the lanes to another host (`/v1/probes`), and by another host (`/v1/incoming-probes`).
//! A host takes part in one probe at a time, and in none during a migration: each would distort the
//! other. A migration that begins ends a running probe.

mod incoming;
mod outgoing;

use parking_lot::Mutex;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Bytes;
use axum::extract::{Path, Query, State};
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::routing::{get, post};
use axum::{Extension, Json, Router};
use futures::Stream;
use godwit_api::{
    ApiError, ErrorCode, IncomingProbeAccepted, IncomingProbeRequest, IncomingProbeStatus,
    ProbeRequest,
};
use godwit_migration::probe::{Cancel, ProbeSession};
use godwit_pki::Peer;
use godwit_types::probe::ProbeReport;
use http::StatusCode;
use serde::Deserialize;
use tokio::sync::watch;

use crate::agent::Agent;
use crate::server::routes::{Refusal, body};

/// Time for a probe to end; its threads are woken at once.
const END_LIMIT: Duration = Duration::from_secs(5);

/// Probes that this host takes part in.
#[derive(Debug, Default)]
pub(crate) struct Probes {
    under_way: Arc<Mutex<Option<String>>>,
    /// Cancels the outgoing probe.
    outgoing: Mutex<Option<Arc<Cancel>>>,
    /// The incoming probe.
    incoming: Mutex<Option<Expected>>,
}

/// A probe by another host.
#[derive(Clone, Debug)]
struct Expected {
    id: String,
    session: Arc<ProbeSession>,
    /// Closed when the probe has ended and the next one may begin.
    over: watch::Receiver<()>,
}

/// Right to be this host's only probe; released when dropped.
#[derive(Debug)]
struct Turn(Arc<Mutex<Option<String>>>);

impl Drop for Turn {
    fn drop(&mut self) {
        *self.0.lock() = None;
    }
}

impl Probes {
    /// Takes the turn. `what` describes the probe in the error of a second one.
    fn take_turn(&self, agent: &Agent, what: String) -> Result<Turn, ApiError> {
        let host = &agent.config().name;
        let busy = |message, remedy| Err(ApiError::new(ErrorCode::Busy, message, remedy));
        if let Some(vm) = agent.migrations().under_way().or_else(|| agent.incoming().under_way()) {
            let message = format!("cannot probe: VM \"{vm}\" is migrating from or to host {host}");
            return busy(message, "retry after its migration, see `godwit migration list`");
        }
        let mut under_way = self.under_way.lock();
        if let Some(other) = &*under_way {
            return busy(
                format!("cannot probe: {other}"),
                "wait until that probe ends, in a few seconds",
            );
        }
        *under_way = Some(what);
        Ok(Turn(Arc::clone(&self.under_way)))
    }

    /// Whether an outgoing or incoming probe is running.
    pub(crate) fn runs(&self) -> bool {
        self.under_way.lock().is_some()
    }

    /// Ends a running probe because a migration begins, which does not wait: each would distort and
    /// slow the other.
    pub(crate) fn give_way(&self, vm: &str) {
        if let Some(cancel) = &*self.outgoing.lock() {
            cancel.ask(&format!("the probe gave way to a migration of VM \"{vm}\""));
        }
        if let Some(expected) = &*self.incoming.lock() {
            tracing::info!(vm, "incoming probe ended: a migration begins");
            expected.session.end();
        }
    }

    fn find(&self, id: &str) -> Result<Expected, ApiError> {
        self.incoming.lock().as_ref().filter(|known| known.id == id).cloned().ok_or_else(|| {
            let message = format!("no incoming probe {id} on this host");
            ApiError::new(ErrorCode::NotFound, message, "it timed out or was ended: probe again")
        })
    }
}

/// Measures the lanes to a host with a short probe; `streams`: fixed number of streams for each
/// lane.
pub(crate) async fn brief(
    agent: &Arc<Agent>,
    to: &str,
    streams: Option<u32>,
) -> Result<ProbeReport, ApiError> {
    outgoing::brief(Arc::clone(agent), to, streams).await
}

pub(crate) fn routes() -> Router<Arc<Agent>> {
    Router::new()
        .route("/v1/probes", post(begin))
        .route("/v1/incoming-probes", post(expect))
        .route("/v1/incoming-probes/{id}", get(show).delete(end))
}

async fn begin(
    State(agent): State<Arc<Agent>>,
    bytes: Bytes,
) -> Result<Sse<impl Stream<Item = Result<Event, std::convert::Infallible>>>, Refusal> {
    let request: ProbeRequest = body(&bytes)?;
    let events = outgoing::begin(agent, request).await?;
    Ok(Sse::new(tokio_stream::wrappers::ReceiverStream::new(events))
        .keep_alive(KeepAlive::default()))
}

async fn expect(
    State(agent): State<Arc<Agent>>,
    peer: Option<Extension<Peer>>,
    bytes: Bytes,
) -> Result<(StatusCode, Json<IncomingProbeAccepted>), Refusal> {
    let request: IncomingProbeRequest = body(&bytes)?;
    let from = peer.map_or(request.from, |Extension(peer)| peer.name);
    let accepted = incoming::expect(&agent, from, Duration::from_millis(request.limit_ms))?;
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
