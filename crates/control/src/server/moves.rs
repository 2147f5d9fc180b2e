//! The requests about moves.

use std::sync::Arc;

use axum::extract::State;
use axum::{Extension, Json};
use godwit_api::control::{CreateMove, Move, MoveState, Page, Problem, ProblemCode};
use http::StatusCode;
use serde::Deserialize;
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::answer::{Body, Path, Query, Refusal, cursor};
use crate::access::Caller;
use crate::manager::Manager;

pub(super) fn routes() -> OpenApiRouter<Arc<Manager>> {
    OpenApiRouter::new().routes(routes!(create)).routes(routes!(list)).routes(routes!(show, cancel))
}

/// Which moves, and which page of them.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct ListMoves {
    /// Those in this state.
    state: Option<MoveState>,
    /// Those of this VM.
    vm: Option<String>,
    /// Where the page begins: `next` of the page before.
    cursor: Option<String>,
    /// Items of the page.
    #[param(minimum = 1, maximum = 1000, default = 100)]
    limit: Option<u32>,
}

/// Asks for a VM's move. It waits for its turn, and is carried out also when nobody looks.
#[utoipa::path(post, path = "/api/v1/vms/{vm}/moves", tag = "moves", params(("vm" = String, Path, description = "The VM")),
    request_body = CreateMove, responses(
    (status = 202, description = "It waits, or starts", body = Move),
    (status = "4XX", description = "Why not", body = Problem, content_type = "application/problem+json"),
    (status = "5XX", description = "Why not", body = Problem, content_type = "application/problem+json"),
))]
async fn create(
    State(manager): State<Arc<Manager>>,
    Extension(caller): Extension<Caller>,
    Path(vm): Path<String>,
    Body(request): Body<CreateMove>,
) -> Result<(StatusCode, Json<Move>), Refusal> {
    Ok((StatusCode::ACCEPTED, Json(manager.create_move(&vm, request, &caller).await?)))
}

/// Moves, the oldest first; without their reports.
#[utoipa::path(get, path = "/api/v1/moves", tag = "moves", params(ListMoves), responses(
    (status = 200, description = "A page of moves", body = Page<Move>),
    (status = "4XX", description = "Why not", body = Problem, content_type = "application/problem+json"),
))]
async fn list(
    State(manager): State<Arc<Manager>>,
    Query(query): Query<ListMoves>,
) -> Result<Json<Page<Move>>, Refusal> {
    let cursor = cursor(query.cursor, query.limit)?;
    let leading = manager.leading()?;
    let all = leading.moves.all();
    let wanted = all.values().filter(|one| {
        query.state.is_none_or(|state| one.state == state) && query.vm.as_ref().is_none_or(|vm| one.vm == *vm)
    });
    let (mut items, mut total, mut next) = (Vec::new(), 0, None);
    for one in wanted {
        total += 1;
        if cursor.behind.as_ref().is_some_and(|behind| one.id <= *behind) {
            continue;
        }
        if items.len() < cursor.limit {
            items.push(Move { report: None, ..one.clone() });
        } else if next.is_none() {
            next = items.last().map(|last| last.id.clone());
        }
    }
    Ok(Json(Page { items, total, next }))
}

/// One move, with the report of its migration, where this manager has seen it end.
#[utoipa::path(get, path = "/api/v1/moves/{id}", tag = "moves", params(("id" = String, Path, description = "Its id")), responses(
    (status = 200, description = "The move", body = Move),
    (status = "4XX", description = "Why not", body = Problem, content_type = "application/problem+json"),
))]
async fn show(State(manager): State<Arc<Manager>>, Path(id): Path<String>) -> Result<Json<Move>, Refusal> {
    let found = manager.leading()?.moves.all().get(&id).cloned();
    let missing = || Problem::new(ProblemCode::NotFound, format!("no move {id}"), "see /api/v1/moves");
    Ok(Json(found.ok_or_else(missing)?))
}

/// Calls a move off. Its state says whether it is cancelled, or came through all the same.
#[utoipa::path(delete, path = "/api/v1/moves/{id}", tag = "moves", params(("id" = String, Path, description = "Its id")), responses(
    (status = 202, description = "It is being called off", body = Move),
    (status = "4XX", description = "Why not", body = Problem, content_type = "application/problem+json"),
    (status = "5XX", description = "Why not", body = Problem, content_type = "application/problem+json"),
))]
async fn cancel(
    State(manager): State<Arc<Manager>>,
    Path(id): Path<String>,
) -> Result<(StatusCode, Json<Move>), Refusal> {
    Ok((StatusCode::ACCEPTED, Json(manager.leading()?.moves.cancel(&id).await?)))
}
