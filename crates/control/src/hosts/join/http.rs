//! Requests about join tokens, and the request with which a host joins.

use axum::extract::{FromRef, State};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use godwit_api::control::{JoinGrant, JoinRequest, JoinToken, JoinTokenInfo, Joined};
use http::StatusCode;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::access::Caller;
use crate::answers::Joining;
use crate::answers::{Body, Failed, Making, Path, Refusal, made};
use crate::hosts::HostRequests;

pub(crate) fn routes<S>() -> OpenApiRouter<S>
where
    S: Clone + Send + Sync + 'static,
    HostRequests: FromRef<S>,
{
    OpenApiRouter::new()
        .routes(routes!(list_join_tokens, create_join_token))
        .routes(routes!(revoke_join_token))
        .routes(routes!(join))
}

/// Lists join tokens, without their secrets.
#[utoipa::path(get, path = "/api/v1/join-tokens", tag = "access", responses(
    (status = 200, description = "Join tokens", body = Vec<JoinTokenInfo>),
    Failed,
))]
async fn list_join_tokens(
    State(hosts): State<HostRequests>,
) -> Result<Json<Vec<JoinTokenInfo>>, Refusal> {
    Ok(Json(hosts.join_tokens().await?))
}

/// Creates a token with which one host can join once.
///
/// Only this answer contains the token's secret.
#[utoipa::path(post, path = "/api/v1/join-tokens", tag = "access", request_body = JoinGrant,
    responses(
    (status = 201, description = "The token", body = JoinToken),
    Failed,
))]
async fn create_join_token(
    State(hosts): State<HostRequests>,
    Extension(caller): Extension<Caller>,
    Body(request): Body<JoinGrant>,
) -> Result<Making<JoinToken>, Refusal> {
    let token = hosts.create_join_token(request, &caller).await?;
    let named = format!("join token {} for host {}", token.info.id, token.info.host);
    Ok(made(StatusCode::CREATED, named, token))
}

/// Revokes a join token.
///
/// A host that has joined with it stays.
#[utoipa::path(delete, path = "/api/v1/join-tokens/{id}", tag = "access",
    params(("id" = String, Path, description = "ID of the token")), responses(
    (status = 204, description = "The token is revoked"),
    Failed,
))]
async fn revoke_join_token(
    State(hosts): State<HostRequests>,
    Path(id): Path<String>,
) -> Result<StatusCode, Refusal> {
    hosts.revoke_join_token(&id).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Joins a host with its token.
///
/// The host gets a certificate for the key that it generated. The manager follows its agent from
/// then
/// on.
#[utoipa::path(post, path = "/api/v1/join", operation_id = "join_host", tag = "access",
    request_body = JoinRequest, security(()), responses(
    (status = 201, description = "The host's certificate", body = Joined),
    Failed,
))]
async fn join(
    State(hosts): State<HostRequests>,
    Body(request): Body<JoinRequest>,
) -> Result<Response, Refusal> {
    let host = request.host.clone();
    let joined = hosts.join(request).await?;
    Ok((StatusCode::CREATED, Extension(Joining(host)), Json(joined)).into_response())
}
