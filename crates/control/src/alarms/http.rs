//! Requests about alarms.

#![allow(unused_qualifications, reason = "utoipa's macro writes them")]

use std::sync::Arc;

use axum::extract::{FromRef, State};
use axum::{Extension, Json};
use godwit_api::control::{AcknowledgeAlarm, Alarm, AlarmKind, AlarmSeverity, AlarmTest, Page};
use serde::Deserialize;
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::Alarms;
use crate::access::Caller;
use crate::answers::{Body, Failed, Path, Query, Refusal, cursor};
use crate::cluster::inventory::Cursor;
use crate::storage::term::Term;

/// Access to the alarms while this manager leads.
#[derive(Clone)]
pub(crate) struct AlarmRequests(pub(crate) Arc<Term<Alarms>>);

pub(crate) fn routes<S>() -> OpenApiRouter<S>
where
    S: Clone + Send + Sync + 'static,
    AlarmRequests: FromRef<S>,
{
    OpenApiRouter::new().routes(routes!(list)).routes(routes!(acknowledge)).routes(routes!(test))
}

/// Filter for alarms, and the page to return.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct ListAlarms {
    /// Alarms of this kind.
    kind: Option<AlarmKind>,
    /// Alarms of this severity.
    severity: Option<AlarmSeverity>,
    /// Alarms about this object, such as `vm:web`.
    object: Option<String>,
    /// Whether somebody has acknowledged them.
    acknowledged: Option<bool>,
    /// Start of the page: `next` of the page before.
    cursor: Option<String>,
    /// Most items on the page.
    #[param(minimum = 1, maximum = 1000, default = 100)]
    limit: Option<u32>,
}

impl ListAlarms {
    fn lets_through(&self, alarm: &Alarm) -> bool {
        self.kind.is_none_or(|kind| alarm.kind == kind)
            && self.severity.is_none_or(|severity| alarm.severity == severity)
            && self.object.as_ref().is_none_or(|object| alarm.object == *object)
            && self.acknowledged.is_none_or(|wanted| alarm.acknowledged.is_some() == wanted)
    }
}

/// Lists the alarms that are raised, the oldest first.
#[utoipa::path(get, path = "/api/v1/alarms", operation_id = "list_alarms", tag = "alarms",
    params(ListAlarms), responses(
    (status = 200, description = "A page of alarms", body = Page<Alarm>),
    Failed,
))]
async fn list(
    State(alarms): State<AlarmRequests>,
    Query(query): Query<ListAlarms>,
) -> Result<Json<Page<Alarm>>, Refusal> {
    let Cursor { behind, limit } = cursor(query.cursor.clone(), query.limit)?;
    let alarms = alarms.0.get()?;
    let all = alarms.all();
    let found: Vec<&Alarm> = all.values().filter(|alarm| query.lets_through(alarm)).collect();
    let is_behind = |alarm: &&&Alarm| behind.as_ref().is_none_or(|behind| alarm.id > *behind);
    let mut rest = found.iter().filter(is_behind);
    let items: Vec<Alarm> = rest.by_ref().take(limit).map(|alarm| (*alarm).clone()).collect();
    let next = rest.next().and_then(|_| items.last().map(|last| last.id.clone()));
    Ok(Json(Page { items, total: found.len() as u64, next }))
}

/// Acknowledges an alarm.
///
/// The other operators see that somebody attends to it. It stays in the list until it is cleared.
/// A later acknowledgement replaces an earlier one.
#[utoipa::path(post, path = "/api/v1/alarms/{id}/acknowledge", operation_id = "acknowledge_alarm",
    tag = "alarms", params(("id" = String, Path, description = "ID of the alarm")),
    request_body = AcknowledgeAlarm, responses(
    (status = 200, description = "The acknowledged alarm", body = Alarm),
    Failed,
))]
async fn acknowledge(
    State(alarms): State<AlarmRequests>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
    Body(request): Body<AcknowledgeAlarm>,
) -> Result<Json<Alarm>, Refusal> {
    let alarms = alarms.0.get()?;
    Ok(Json(alarms.acknowledge(&id, &request.note, &caller.name).await?))
}

/// Sends a test notice to every configured receiver, and returns which of them accepted it.
#[utoipa::path(post, path = "/api/v1/alarms/test", operation_id = "test_alarms", tag = "alarms",
    responses(
    (status = 200, description = "The outcome for each receiver", body = AlarmTest),
    Failed,
))]
async fn test(
    State(alarms): State<AlarmRequests>,
    Extension(caller): Extension<Caller>,
) -> Result<Json<AlarmTest>, Refusal> {
    let alarms = alarms.0.get()?;
    Ok(Json(alarms.test(&caller.name).await))
}
