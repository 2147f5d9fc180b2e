//! Probes of the lanes to another host (`/v1/probes`), and by another host (`/v1/incoming-probes`). A host takes part in one
//! at a time, and in none while a VM leaves or arrives: each would spoil the other. A VM that begins to move ends it.

mod incoming;
mod outgoing;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
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

/// How long the end of a probe may take: its threads are woken at once.
const END_LIMIT: Duration = Duration::from_secs(5);

/// What probes of this host there are.
#[derive(Debug, Default)]
pub(crate) struct Probes {
    under_way: Arc<Mutex<Option<String>>>,
    /// Ends the probe that leaves from this host.
    outgoing: Mutex<Option<Arc<Cancel>>>,
    /// The probe that comes from another host.
    incoming: Mutex<Option<Expected>>,
}

/// A probe that comes from another host.
#[derive(Clone, Debug)]
struct Expected {
    id: String,
    session: Arc<ProbeSession>,
    /// Its other end is gone when the next probe may come.
    over: watch::Receiver<()>,
}

/// The right to be this host's only probe, given back when dropped.
#[derive(Debug)]
struct Turn(Arc<Mutex<Option<String>>>);

impl Drop for Turn {
    fn drop(&mut self) {
        *lock(&self.0) = None;
    }
}

impl Probes {
    /// `what` says what the probe is, for whoever comes second.
    fn take_turn(&self, agent: &Agent, what: String) -> Result<Turn, ApiError> {
        let host = &agent.config().name;
        let busy = |message, remedy| Err(ApiError::new(ErrorCode::Busy, message, remedy));
        if let Some(vm) = agent.migrations().under_way().or_else(|| agent.incoming().under_way()) {
            let message = format!(
                "VM \"{vm}\" is on the move from or to host {host}: a probe would slow it down"
            );
            return busy(message, "probe when it has moved, see `godwit migration list`");
        }
        let mut under_way = lock(&self.under_way);
        if let Some(other) = &*under_way {
            return busy(
                format!("{other} already"),
                "wait until it is over: a probe takes some seconds",
            );
        }
        *under_way = Some(what);
        Ok(Turn(Arc::clone(&self.under_way)))
    }

    /// Whether a probe leaves from this host or comes to it.
    pub(crate) fn runs(&self) -> bool {
        lock(&self.under_way).is_some()
    }

    /// A VM begins to leave or to arrive, and waits for no probe: one that is under way ends, since both would tell and do less.
    pub(crate) fn give_way(&self, vm: &str) {
        if let Some(cancel) = &*lock(&self.outgoing) {
            cancel.ask(&format!("the probe gave way to VM \"{vm}\", which begins to move"));
        }
        if let Some(expected) = &*lock(&self.incoming) {
            tracing::info!(vm, "a probe of this host gives way to a VM");
            expected.session.end();
        }
    }

    fn find(&self, id: &str) -> Result<Expected, ApiError> {
        lock(&self.incoming).as_ref().filter(|known| known.id == id).cloned().ok_or_else(|| {
            let message = format!("no probe {id} comes to this host");
            ApiError::new(
                ErrorCode::NotFound,
                message,
                "it took too long, or was ended: probe again",
            )
        })
    }
}

/// What is behind these locks is replaced whole.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What the lanes to a host carry, by a short probe; with so many streams of each lane, where they are given.
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
    // Answered when the next may come; whoever ends it does not wait long.
    let _ = tokio::time::timeout(END_LIMIT, expected.over.changed()).await;
    Ok(StatusCode::NO_CONTENT)
}
