//! API requests for tokens and the audit log.

#![allow(unused_qualifications, reason = "utoipa's macro writes them")]

use axum::extract::{FromRef, State};
use axum::{Extension, Json};
use godwit_api::control::{
    AuditEntry, CreateToken, CreatedToken, Me, Page, Problem, ProblemCode, TokenInfo,
};
use http::StatusCode;
use serde::Deserialize;
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::access::Caller;
use crate::access::requests::AccessRequests;
use crate::answers::{Body, Failed, Making, Path, Query, Refusal, cursor, made};

/// Longest lifetime of a token, days.
const LONGEST_DAYS: u32 = 3650;

pub(crate) fn routes<S>() -> OpenApiRouter<S>
where
    S: Clone + Send + Sync + 'static,
    AccessRequests: FromRef<S>,
{
    OpenApiRouter::new()
        .routes(routes!(list_tokens, create_token))
        .routes(routes!(revoke_token))
        .routes(routes!(list_audit))
        .routes(routes!(show_me))
}

/// Selection of a page.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct PageOf {
    /// Start of the page: `next` of the previous page.
    cursor: Option<String>,
    /// Largest number of items on the page.
    #[param(minimum = 1, maximum = 1000, default = 100)]
    limit: Option<u32>,
}

/// Returns the caller and its role. A client can use this to hide actions that the role does not
/// permit.
#[utoipa::path(get, path = "/api/v1/me", tag = "access", responses(
    (status = 200, description = "The caller and its role", body = Me),
))]
async fn show_me(Extension(caller): Extension<Caller>) -> Json<Me> {
    Json(Me { name: caller.name, role: caller.role })
}

/// Lists all tokens, without their secrets.
#[utoipa::path(get, path = "/api/v1/tokens", tag = "access", responses(
    (status = 200, description = "Tokens", body = Vec<TokenInfo>),
))]
async fn list_tokens(State(access): State<AccessRequests>) -> Json<Vec<TokenInfo>> {
    Json(access.tokens())
}

/// Creates a token. The secret is only in this response and cannot be read later.
#[utoipa::path(post, path = "/api/v1/tokens", tag = "access", request_body = CreateToken, responses(
    (status = 201, description = "The token", body = CreatedToken),
    Failed,
))]
async fn create_token(
    State(access): State<AccessRequests>,
    Extension(caller): Extension<Caller>,
    Body(request): Body<CreateToken>,
) -> Result<Making<CreatedToken>, Refusal> {
    if !(1..=LONGEST_DAYS).contains(&request.days) {
        let detail = format!("cannot create a token for {} days", request.days);
        let remedy = "set a lifetime of 1 to 3650 days";
        return Err(Problem::new(ProblemCode::InvalidRequest, detail, remedy).into());
    }
    let token = access.create_token(request, &caller).await?;
    let named =
        format!("token {} of {}, {}", token.info.id, token.info.name, token.info.role.name());
    Ok(made(StatusCode::CREATED, named, token))
}

/// Revokes a token. From then on it is treated like an unknown token.
#[utoipa::path(delete, path = "/api/v1/tokens/{id}", tag = "access",
    params(("id" = String, Path, description = "ID of the token")), responses(
    (status = 204, description = "The token is revoked"),
    Failed,
))]
async fn revoke_token(
    State(access): State<AccessRequests>,
    Path(id): Path<String>,
) -> Result<StatusCode, Refusal> {
    access.revoke_token(&id).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Lists the audit log, the newest entry first.
#[utoipa::path(get, path = "/api/v1/audit", tag = "access", params(PageOf), responses(
    (status = 200, body = Page<AuditEntry>,
        description = "A page of entries; `total` counts only the entries of this page"),
    Failed,
))]
async fn list_audit(
    State(access): State<AccessRequests>,
    Query(query): Query<PageOf>,
) -> Result<Json<Page<AuditEntry>>, Refusal> {
    let cursor = cursor(query.cursor, query.limit)?;
    let (items, next) = access.audit_page(cursor.behind.as_deref(), cursor.limit).await?;
    Ok(Json(Page { total: items.len() as u64, items, next }))
}
