//! `GET /api/v1/events`: every change of the cluster, as server-sent events.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::Extension;
use axum::extract::State;
use axum::response::sse::{Event, KeepAlive, Sse};
use futures::{Stream, StreamExt, stream};
use godwit_api::control::{ClusterEvent, Problem, ProblemCode, StreamedEvent};
use http::{HeaderMap, HeaderValue};
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::access::Caller;
use crate::answers::Refusal;
use crate::journal::events::{Listener, Next};
use crate::manager::Manager;

/// So often something is said, if only that the manager lives.
const KEEP_ALIVE: Duration = Duration::from_secs(5);

/// Where the caller goes on.
#[derive(IntoParams)]
#[into_params(parameter_in = Header)]
#[expect(dead_code, reason = "it is read as a header; this describes it")]
struct LastEvent {
    /// The number of the last event that came.
    #[param(rename = "last-event-id", minimum = 0, required = false)]
    last_event_id: i64,
}

pub(crate) fn routes() -> OpenApiRouter<Arc<Manager>> {
    OpenApiRouter::new().routes(routes!(follow))
}

/// Changes as they come: each event's name is its kind, its data a ClusterEvent, its id the number to go on behind (`Last-Event-ID`). An
/// event `missed` says that changes were missed that are kept no more: ask for everything anew. It ends when the caller's token is revoked or
/// has expired.
#[utoipa::path(get, path = "/api/v1/events", operation_id = "follow_events", tag = "cluster", params(
    LastEvent
), responses(
    (status = 200, description = "Changes", body = StreamedEvent, content_type = "text/event-stream"),
    (status = "4XX", description = "Why not", body = Problem, content_type = "application/problem+json"),
))]
async fn follow(
    State(manager): State<Arc<Manager>>,
    Extension(caller): Extension<Caller>,
    headers: HeaderMap,
) -> Result<Sse<impl Stream<Item = Result<Event, Infallible>>>, Refusal> {
    let behind = headers.get("last-event-id").map(number).transpose()?;
    let listener = manager.state.events().listen(behind);
    let batches = stream::unfold(listener, async |mut listener: Listener| {
        let next = listener.next().await?;
        Some((stream::iter(told(next)), listener))
    });
    // Who may look no more is told no more; asking again is refused with the reason.
    let events = batches
        .flatten()
        .map(Ok)
        .take_until(async move { manager.tokens.is_good_no_more(&caller).await });
    Ok(Sse::new(events).keep_alive(KeepAlive::new().interval(KEEP_ALIVE)))
}

/// An event's number, as who was cut off tells it.
fn number(id: &HeaderValue) -> Result<u64, Refusal> {
    let number =
        id.to_str().ok().and_then(|id| id.parse().ok()).and_then(|id: i64| u64::try_from(id).ok());
    number.ok_or_else(|| {
        let detail = "Last-Event-ID is no event's number";
        Refusal(Problem::new(
            ProblemCode::InvalidRequest,
            detail,
            "leave it out, and ask for everything anew",
        ))
    })
}

fn told(next: Next) -> Vec<Event> {
    match next {
        Next::Missed(number) => {
            vec![Event::default().event("missed").id(number.to_string()).data("null")]
        }
        Next::Events(events) => events.iter().filter_map(|event| one(event).ok()).collect(),
    }
}

fn one(event: &ClusterEvent) -> Result<Event, axum::Error> {
    let value = serde_json::to_value(event).map_err(axum::Error::new)?;
    let kind = value["kind"].as_str().unwrap_or("change").to_owned();
    Event::default().event(kind).id(event.number.to_string()).json_data(value)
}
