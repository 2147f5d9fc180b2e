//! `GET /api/v1/events`: every change of the cluster, as server-sent events.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::response::sse::{Event, KeepAlive, Sse};
use futures::{Stream, StreamExt, stream};
use godwit_api::control::{ClusterEvent, Problem};
use http::HeaderMap;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::events::{Listener, Next};
use crate::manager::Manager;

/// So often something is said, if only that the manager lives.
const KEEP_ALIVE: Duration = Duration::from_secs(5);

pub(super) fn routes() -> OpenApiRouter<Arc<Manager>> {
    OpenApiRouter::new().routes(routes!(follow))
}

/// Changes as they come: each event's name is its kind, its data a ClusterEvent, its id the number to go on behind (`Last-Event-ID`). An
/// event `missed` says that changes were missed that are kept no more: ask for everything anew.
#[utoipa::path(get, path = "/api/v1/events", tag = "cluster", params(
    ("last-event-id" = Option<u64>, Header, description = "The last event that came")
), responses(
    (status = 200, description = "Changes", body = ClusterEvent, content_type = "text/event-stream"),
    (status = "4XX", description = "Why not", body = Problem, content_type = "application/problem+json"),
))]
async fn follow(
    State(manager): State<Arc<Manager>>,
    headers: HeaderMap,
) -> Sse<impl Stream<Item = Result<Event, Infallible>>> {
    let behind = headers.get("last-event-id").and_then(|id| id.to_str().ok()?.parse().ok());
    let listener = manager.state.events().listen(behind);
    let batches = stream::unfold(listener, async |mut listener: Listener| {
        let next = listener.next().await?;
        Some((stream::iter(told(next)), listener))
    });
    Sse::new(batches.flatten().map(Ok)).keep_alive(KeepAlive::new().interval(KEEP_ALIVE))
}

fn told(next: Next) -> Vec<Event> {
    match next {
        Next::Missed(number) => vec![Event::default().event("missed").id(number.to_string()).data("null")],
        Next::Events(events) => events.iter().filter_map(|event| one(event).ok()).collect(),
    }
}

fn one(event: &ClusterEvent) -> Result<Event, axum::Error> {
    let value = serde_json::to_value(event).map_err(axum::Error::new)?;
    let kind = value["kind"].as_str().unwrap_or("change").to_owned();
    Event::default().event(kind).id(event.number.to_string()).json_data(value)
}
