//! The requests about moves.

#![allow(unused_qualifications, reason = "utoipa's macro writes them")]

use axum::extract::{FromRef, State};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use godwit_api::control::{CreateMove, Move, MoveSamples, MoveState, Page, Problem, ProblemCode};
use godwit_types::Report;
use http::header::CONTENT_DISPOSITION;
use http::{HeaderValue, StatusCode};
use serde::Deserialize;
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::access::Caller;
use crate::answers::{Body, Making, Path, Query, Refusal, cursor, made};
use crate::cluster::inventory::Cursor;
use crate::moves::requests::MoveRequests;

pub(crate) fn routes<S>() -> OpenApiRouter<S>
where
    S: Clone + Send + Sync + 'static,
    MoveRequests: FromRef<S>,
{
    OpenApiRouter::new()
        .routes(routes!(create))
        .routes(routes!(list))
        .routes(routes!(show, cancel))
        .routes(routes!(samples))
        .routes(routes!(report))
}

/// The latest time that a filter names: what every JSON number holds exactly.
const MOST_UNIX_MS: u64 = (1 << 53) - 1;

/// In which order moves are listed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
enum MoveOrder {
    /// As they were asked for.
    #[default]
    OldestFirst,
    /// The other way round.
    NewestFirst,
}

/// Which moves, and which page of them.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct ListMoves {
    /// Those in this state.
    state: Option<MoveState>,
    /// Those that are over, or those that are not.
    over: Option<bool>,
    /// Those of this VM.
    vm: Option<String>,
    /// Those from or to this host.
    host: Option<String>,
    /// Those of this drain.
    drain: Option<String>,
    /// Those asked for at this time or later, milliseconds since 1970.
    #[param(maximum = 9_007_199_254_740_991_u64)]
    since_unix_ms: Option<u64>,
    /// Those asked for before this time, milliseconds since 1970.
    #[param(maximum = 9_007_199_254_740_991_u64)]
    before_unix_ms: Option<u64>,
    /// Which come first.
    #[serde(default)]
    #[param(inline)]
    order: MoveOrder,
    /// Where the page begins: `next` of the page before.
    cursor: Option<String>,
    /// Items of the page.
    #[param(minimum = 1, maximum = 1000, default = 100)]
    limit: Option<u32>,
}

impl ListMoves {
    fn lets_through(&self, one: &Move) -> bool {
        fn is<T: PartialEq>(wanted: Option<&T>, has: Option<&T>) -> bool {
            wanted.is_none() || wanted == has
        }
        let at_host = |host: &String| one.from == *host || one.to.as_ref() == Some(host);
        is(self.state.as_ref(), Some(&one.state))
            && is(self.over.as_ref(), Some(&one.state.is_over()))
            && is(self.vm.as_ref(), Some(&one.vm))
            && is(self.drain.as_ref(), one.drain.as_ref())
            && self.host.as_ref().is_none_or(at_host)
            && self.since_unix_ms.is_none_or(|since| one.asked_unix_ms >= since)
            && self.before_unix_ms.is_none_or(|before| one.asked_unix_ms < before)
    }

    /// The page of these moves, which are in the order of their ids and so of time.
    fn page<'m>(
        &self,
        all: impl DoubleEndedIterator<Item = &'m Move>,
        Cursor { behind, limit }: &Cursor,
    ) -> Page<Move> {
        let is_before = |id: &String, behind: &String| match self.order {
            MoveOrder::OldestFirst => id <= behind,
            MoveOrder::NewestFirst => id >= behind,
        };
        let ordered: &mut dyn Iterator<Item = &Move> = match self.order {
            MoveOrder::OldestFirst => &mut { all },
            MoveOrder::NewestFirst => &mut all.rev(),
        };
        let (mut items, mut total, mut next) = (Vec::new(), 0, None);
        for one in ordered.filter(|one| self.lets_through(one)) {
            total += 1;
            if behind.as_ref().is_some_and(|behind| is_before(&one.id, behind)) {
                continue;
            }
            if items.len() < *limit {
                items.push(one.clone());
            } else if next.is_none() {
                next = items.last().map(|last: &Move| last.id.clone());
            }
        }
        Page { items, total, next }
    }
}

/// Asks for a VM's move. It waits for its turn, and is carried out also when nobody looks.
#[utoipa::path(post, path = "/api/v1/vms/{vm}/moves", operation_id = "create_move", tag = "moves", params(("vm" = String, Path, description = "The VM")),
    request_body = CreateMove, responses(
    (status = 202, description = "It waits, or starts", body = Move),
    (status = "4XX", description = "Why not", body = Problem, content_type = "application/problem+json"),
    (status = "5XX", description = "Why not", body = Problem, content_type = "application/problem+json"),
))]
async fn create(
    State(moves): State<MoveRequests>,
    Extension(caller): Extension<Caller>,
    Path(vm): Path<String>,
    Body(request): Body<CreateMove>,
) -> Result<Making<Move>, Refusal> {
    let one = moves.create(&vm, request, &caller).await?;
    Ok(made(StatusCode::ACCEPTED, format!("move {}", one.id), one))
}

/// Moves, without their reports. The last 10,000 that are over are remembered.
#[utoipa::path(get, path = "/api/v1/moves", operation_id = "list_moves", tag = "moves", params(ListMoves), responses(
    (status = 200, description = "A page of moves", body = Page<Move>),
    (status = "4XX", description = "Why not", body = Problem, content_type = "application/problem+json"),
))]
async fn list(
    State(moves): State<MoveRequests>,
    Query(mut query): Query<ListMoves>,
) -> Result<Json<Page<Move>>, Refusal> {
    let cursor = cursor(query.cursor.take(), query.limit)?;
    if query.since_unix_ms.max(query.before_unix_ms).is_some_and(|ms| ms > MOST_UNIX_MS) {
        let detail = format!("no time is later than {MOST_UNIX_MS} ms since 1970 here");
        return Err(Problem::new(ProblemCode::InvalidRequest, detail, "give an earlier one").into());
    }
    let moves = moves.moves()?;
    let all = moves.all();
    Ok(Json(query.page(all.values(), &cursor)))
}

/// One move, with the report of its migration, where a manager has heard how it ended.
#[utoipa::path(get, path = "/api/v1/moves/{id}", operation_id = "show_move", tag = "moves", params(("id" = String, Path, description = "Its id")), responses(
    (status = 200, description = "The move", body = Move),
    (status = "4XX", description = "Why not", body = Problem, content_type = "application/problem+json"),
))]
async fn show(
    State(moves): State<MoveRequests>,
    Path(id): Path<String>,
) -> Result<Json<Move>, Refusal> {
    let found = find(&moves, &id)?;
    let report = if found.state.is_over() { moves.moves()?.report(&id).await? } else { None };
    Ok(Json(Move { report, ..found }))
}

fn find(moves: &MoveRequests, id: &str) -> Result<Move, Problem> {
    let found = moves.moves()?.all().get(id).cloned();
    found.ok_or_else(|| {
        Problem::new(
            ProblemCode::NotFound,
            format!("no move {id}"),
            "see `godwit control move list --all`",
        )
    })
}

/// How far a move was at times of its migration: for a picture of one that runs, to who comes in the middle, and of one that is over. Kept in memory,
/// of the last 300 moves.
#[utoipa::path(get, path = "/api/v1/moves/{id}/samples", operation_id = "show_move_samples", tag = "moves", params(("id" = String, Path, description = "Its id")), responses(
    (status = 200, description = "What is kept; nothing of a move that has not begun, or is forgotten", body = MoveSamples),
    (status = "4XX", description = "Why not", body = Problem, content_type = "application/problem+json"),
))]
async fn samples(
    State(moves): State<MoveRequests>,
    Path(id): Path<String>,
) -> Result<Json<MoveSamples>, Refusal> {
    find(&moves, &id)?;
    Ok(Json(moves.moves()?.samples(&id)))
}

/// The report of a move's migration as a file, where a manager has heard how it ended.
#[utoipa::path(get, path = "/api/v1/moves/{id}/report", operation_id = "show_move_report", tag = "moves", params(("id" = String, Path, description = "Its id")), responses(
    (status = 200, description = "The report", body = Report, example = json!({
        "outcome": "completed", "engine": "godwit", "vm": "web", "from": "host-a", "to": "host-b", "migration_time_ms": 4812.5,
        "switchover_ms": 11.2, "blackout_ms": null, "wire_bytes": 4_311_744_512_u64, "guest_bytes": 4_294_967_296_u64, "bandwidth_limit": null,
        "round_trip_ms": 0.2, "rounds": [], "phases": [{ "phase": "pre-copy", "duration_ms": 3912.0 }], "switchover": null, "error": null
    })),
    (status = "4XX", description = "Why not", body = Problem, content_type = "application/problem+json"),
))]
async fn report(
    State(moves): State<MoveRequests>,
    Path(id): Path<String>,
) -> Result<Response, Refusal> {
    let found = find(&moves, &id)?;
    let missing = || {
        let detail =
            format!("move {id} has no report: it is not over, or its end was not heard of");
        Problem::new(ProblemCode::NotFound, detail, "the logs of its hosts' agents have one")
    };
    let mut response = Json(moves.moves()?.report(&id).await?.ok_or_else(missing)?).into_response();
    // Names of VMs and ids of moves are letters, digits, - _ and . alone.
    let name = format!("attachment; filename=\"godwit-{}-{id}.json\"", found.vm);
    if let Ok(name) = HeaderValue::from_str(&name) {
        response.headers_mut().insert(CONTENT_DISPOSITION, name);
    }
    Ok(response)
}

/// Calls a move off. Its state says whether it is cancelled, or came through all the same.
#[utoipa::path(delete, path = "/api/v1/moves/{id}", operation_id = "cancel_move", tag = "moves", params(("id" = String, Path, description = "Its id")), responses(
    (status = 202, description = "It is being called off", body = Move),
    (status = "4XX", description = "Why not", body = Problem, content_type = "application/problem+json"),
    (status = "5XX", description = "Why not", body = Problem, content_type = "application/problem+json"),
))]
async fn cancel(
    State(moves): State<MoveRequests>,
    Path(id): Path<String>,
) -> Result<(StatusCode, Json<Move>), Refusal> {
    Ok((StatusCode::ACCEPTED, Json(moves.moves()?.cancel(&id).await?)))
}

#[cfg(test)]
mod tests {
    use godwit_api::control::MovePriority;

    use super::*;

    fn one(number: u64, vm: &str, to: &str, state: MoveState) -> Move {
        Move {
            id: format!("v{number}"),
            vm: vm.into(),
            from: "a".into(),
            to: Some(to.into()),
            to_reason: None,
            state,
            waits: None,
            priority: MovePriority::Normal,
            drain: (number == 1).then(|| "d1".into()),
            asked_by: "ana".into(),
            asked_unix_ms: 1000 * number,
            started_unix_ms: None,
            ended_unix_ms: None,
            attempts: 0,
            migration: None,
            progress: None,
            failure: None,
            report: None,
        }
    }

    fn listed(
        query: &str,
        behind: Option<&str>,
        limit: usize,
    ) -> (Vec<String>, u64, Option<String>) {
        let all = [
            one(1, "web", "b", MoveState::Done),
            one(2, "db", "c", MoveState::Failed),
            one(3, "web", "c", MoveState::Running),
        ];
        let query: ListMoves =
            axum::extract::Query::try_from_uri(&format!("/?{query}").parse().unwrap()).unwrap().0;
        let page = query.page(all.iter(), &Cursor { behind: behind.map(str::to_owned), limit });
        (page.items.into_iter().map(|one| one.id).collect(), page.total, page.next)
    }

    #[test]
    fn moves_are_filtered_and_the_newest_come_first_where_that_is_asked() {
        for (query, ids) in [
            ("", vec!["v1", "v2", "v3"]),
            ("over=true", vec!["v1", "v2"]),
            ("over=false", vec!["v3"]),
            ("state=failed", vec!["v2"]),
            ("vm=web&order=newest-first", vec!["v3", "v1"]),
            ("host=c", vec!["v2", "v3"]),
            ("host=a&drain=d1", vec!["v1"]),
            ("since_unix_ms=2000&before_unix_ms=3000", vec!["v2"]),
        ] {
            assert_eq!(listed(query, None, 100).0, ids, "{query}");
        }
    }

    #[test]
    fn pages_follow_each_other_in_both_orders() {
        let text = |id: &str| Some(id.to_owned());
        assert_eq!(listed("", None, 2), (vec!["v1".into(), "v2".into()], 3, text("v2")));
        assert_eq!(listed("", Some("v2"), 2), (vec!["v3".into()], 3, None));
        let newest = "order=newest-first";
        assert_eq!(listed(newest, None, 2), (vec!["v3".into(), "v2".into()], 3, text("v2")));
        assert_eq!(listed(newest, Some("v2"), 2), (vec!["v1".into()], 3, None));
    }
}
