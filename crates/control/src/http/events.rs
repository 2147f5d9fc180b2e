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

/// Interval of keep-alive messages, which show that the manager is alive.
const KEEP_ALIVE: Duration = Duration::from_secs(5);

/// Position from which the caller continues.
#[derive(IntoParams)]
#[into_params(parameter_in = Header)]
#[expect(dead_code, reason = "the handler reads the header; this type only describes it")]
struct LastEvent {
    /// Number of the last event that was received.
    #[param(rename = "last-event-id", minimum = 0, required = false)]
    last_event_id: i64,
}

pub(crate) fn routes() -> OpenApiRouter<Arc<Manager>> {
    OpenApiRouter::new().routes(routes!(follow))
}

/// Streams changes of the cluster as server-sent events.
///
/// Each event has its kind as its name and a ClusterEvent as its data. Its id is the number to
/// continue from (`Last-Event-ID`). An event `missed` means that changes were missed that are no
/// longer retained: read all state again. The stream ends when the caller's token is revoked or
/// expires.
#[utoipa::path(get, path = "/api/v1/events", operation_id = "follow_events",
    tag = "cluster", params(
    LastEvent
), responses(
    (status = 200, description = "Changes", body = StreamedEvent,
        content_type = "text/event-stream"),
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
        Some((stream::iter(to_sse(next)), listener))
    });
    // The stream ends with the caller's right to read it. A new request is refused with the reason.
    let events = batches
        .flatten()
        .map(Ok)
        .take_until(async move { manager.tokens.is_good_no_more(&caller).await });
    Ok(Sse::new(events).keep_alive(KeepAlive::new().interval(KEEP_ALIVE)))
}

/// Reads the event number that a returning client sends.
fn number(id: &HeaderValue) -> Result<u64, Refusal> {
    let number =
        id.to_str().ok().and_then(|id| id.parse().ok()).and_then(|id: i64| u64::try_from(id).ok());
    number.ok_or_else(|| {
        let detail = "cannot read Last-Event-ID: not an event number";
        Refusal(Problem::new(
            ProblemCode::InvalidRequest,
            detail,
            "omit the header and read all state again",
        ))
    })
}

fn to_sse(next: Next) -> Vec<Event> {
    match next {
        Next::Missed(number) => {
            vec![Event::default().event("missed").id(number.to_string()).data("null")]
        }
        Next::Events(events) => events.iter().filter_map(|event| sse_event(event).ok()).collect(),
    }
}

fn sse_event(event: &ClusterEvent) -> Result<Event, axum::Error> {
    let value = serde_json::to_value(event).map_err(axum::Error::new)?;
    let kind = value["kind"].as_str().unwrap_or("change").to_owned();
    Event::default().event(kind).id(event.number.to_string()).json_data(value)
}
