//! The agent's metrics over HTTP, and the duration of its requests.

use std::sync::Arc;

use axum::extract::{MatchedPath, Request, State};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use http::header::CONTENT_TYPE;
use tokio::time::Instant;

use crate::agent::Agent;
use crate::metrics::HostNow;

/// `GET /metrics`.
pub(super) async fn show(State(agent): State<Arc<Agent>>) -> Response {
    // Memory figures come from blocking system calls, so this runs off the async threads.
    let rendered = tokio::task::spawn_blocking(move || {
        let lanes = agent.peer_names().filter_map(|host| {
            let lanes = agent.lanes_seen().to(&host)?;
            Some((host, lanes))
        });
        agent.metrics().render(&HostNow {
            vms: agent.vms(),
            memory: agent.memory_figures().ok(),
            migrations: agent.migrations().running(),
            probes: agent.probes().runs(),
            lanes: lanes.collect(),
            load: agent.newest_load(),
            ha: agent.ha().state(),
        })
    })
    .await;
    match rendered {
        Ok(Ok(text)) => {
            ([(CONTENT_TYPE, "application/openmetrics-text; version=1.0.0; charset=utf-8")], text)
                .into_response()
        }
        _ => http::StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

/// Measures the duration of a request, by its route. A streamed answer counts until it begins.
pub(super) async fn time(
    State(agent): State<Arc<Agent>>,
    route: Option<MatchedPath>,
    request: Request,
    next: Next,
) -> Response {
    let route = route.map_or_else(|| "none".to_owned(), |route| route.as_str().to_owned());
    // Clients can invent methods, so unknown ones share a label.
    let method = match request.method().as_str() {
        known @ ("GET" | "HEAD" | "POST" | "PUT" | "PATCH" | "DELETE" | "OPTIONS") => {
            known.to_owned()
        }
        _ => "other".to_owned(),
    };
    let began = Instant::now();
    let response = next.run(request).await;
    agent.metrics().request(&method, &route, response.status().as_u16(), began.elapsed());
    response
}
