//! The requests about rules.

#![allow(unused_qualifications, reason = "utoipa's macro writes them")]

use axum::Json;
use axum::extract::{FromRef, State};
use godwit_api::control::{CreateRule, Page, Problem, RuleInfo, RuleState};
use http::StatusCode;
use serde::Deserialize;
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::Rules;
use crate::answers::{Body, Making, Path, Query, Refusal, cursor, made};
use crate::cluster::inventory::RuleFilter;

pub(crate) fn routes<S>() -> OpenApiRouter<S>
where
    S: Clone + Send + Sync + 'static,
    Rules: FromRef<S>,
{
    OpenApiRouter::new().routes(routes!(list, create)).routes(routes!(show, delete))
}

/// Which rules, and which page of them.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct ListRules {
    /// Those that name this VM.
    vm: Option<String>,
    /// Those that are kept, or those that are broken.
    state: Option<RuleState>,
    /// Where the page begins: `next` of the page before.
    cursor: Option<String>,
    /// Items of the page.
    #[param(minimum = 1, maximum = 1000, default = 100)]
    limit: Option<u32>,
}

/// Rules by name, each with whether it is kept at present and the first of the VMs by which it is broken.
#[utoipa::path(get, path = "/api/v1/rules", operation_id = "list_rules", tag = "rules", params(ListRules), responses(
    (status = 200, description = "A page of rules", body = Page<RuleInfo>),
    (status = "4XX", description = "The reason for the refusal", body = Problem,
        content_type = "application/problem+json"),
))]
async fn list(
    State(rules): State<Rules>,
    Query(query): Query<ListRules>,
) -> Result<Json<Page<RuleInfo>>, Refusal> {
    let filter = RuleFilter { vm: query.vm, state: query.state };
    Ok(Json(rules.list(&filter, &cursor(query.cursor, query.limit)?)))
}

/// Makes a rule. VMs and hosts that it names may come later. No VM is moved by it: it holds for what is moved from now on.
#[utoipa::path(post, path = "/api/v1/rules", operation_id = "create_rule", tag = "rules", request_body = CreateRule, responses(
    (status = 201, description = "The rule, and whether it is kept", body = RuleInfo),
    (status = "4XX", description = "The reason for the refusal", body = Problem,
        content_type = "application/problem+json"),
    (status = "5XX", description = "The reason for the failure", body = Problem,
        content_type = "application/problem+json"),
))]
async fn create(
    State(rules): State<Rules>,
    Body(request): Body<CreateRule>,
) -> Result<Making<RuleInfo>, Refusal> {
    let rule = rules.create(request).await?;
    Ok(made(StatusCode::CREATED, format!("rule {}", rule.name), rule))
}

/// One rule, with every VM by which it is broken.
#[utoipa::path(get, path = "/api/v1/rules/{rule}", operation_id = "show_rule", tag = "rules", params(("rule" = String, Path, description = "Its name")), responses(
    (status = 200, description = "The rule", body = RuleInfo),
    (status = "4XX", description = "The reason for the refusal", body = Problem,
        content_type = "application/problem+json"),
))]
async fn show(
    State(rules): State<Rules>,
    Path(rule): Path<String>,
) -> Result<Json<RuleInfo>, Refusal> {
    Ok(Json(rules.show(&rule)?))
}

/// Removes a rule. No VM is moved by that.
#[utoipa::path(delete, path = "/api/v1/rules/{rule}", operation_id = "delete_rule", tag = "rules", params(("rule" = String, Path, description = "Its name")), responses(
    (status = 204, description = "It is no more"),
    (status = "4XX", description = "The reason for the refusal", body = Problem,
        content_type = "application/problem+json"),
    (status = "5XX", description = "The reason for the failure", body = Problem,
        content_type = "application/problem+json"),
))]
async fn delete(
    State(rules): State<Rules>,
    Path(rule): Path<String>,
) -> Result<StatusCode, Refusal> {
    rules.delete(&rule).await?;
    Ok(StatusCode::NO_CONTENT)
}
