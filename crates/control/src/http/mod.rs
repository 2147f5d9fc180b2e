//! The manager's API: `/api/v1`, described by `/api/openapi.json`, which is made of the same functions.

#![allow(unused_qualifications, reason = "utoipa's macro writes them")]

mod admit;
mod bodies;
pub(crate) mod connections;
mod events;
mod examples;
mod forward;
pub(crate) mod metrics;
#[cfg(test)]
mod oidc_tests;
mod repeat;
#[cfg(test)]
mod repeat_tests;
mod shares;
#[cfg(test)]
pub(crate) mod tests;
mod web;

use std::sync::Arc;

use axum::extract::{DefaultBodyLimit, State};
use axum::middleware::{from_fn, from_fn_with_state};
use axum::routing::get;
use axum::{Extension, Json, Router};
use godwit_api::control::{Cluster, ClusterEvent, Problem};
use utoipa::OpenApi;
use utoipa::openapi::security::{HttpAuthScheme, HttpBuilder, SecurityScheme};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::answers;
use crate::manager::Manager;

/// The longest body of a request that is read.
const MAX_BODY_BYTES: usize = 1 << 20;

#[derive(OpenApi)]
#[openapi(
    info(title = "Godwit's manager", description = "Moves running virtual machines between hosts without stopping them."),
    modifiers(&BearerTokens),
    components(schemas(ClusterEvent)),
    security(("token" = [])),
    tags(
        (name = "cluster", description = "All of it"),
        (name = "hosts", description = "Hosts, and what is planned of them"),
        (name = "vms", description = "VMs, wherever they run"),
        (name = "moves", description = "Moves: what was asked for, what waits for what, what became of it"),
        (name = "drains", description = "Hosts that are emptied: a target for each VM, an ETA, what stays and why"),
        (name = "rules", description = "Rules about where VMs may be, and whether they are kept"),
        (name = "cpu-baseline", description = "The CPU that guests of the cluster get, so that each of them can go to each host"),
        (name = "access", description = "Tokens, and who did what"),
    )
)]
struct Document;

struct BearerTokens;

impl utoipa::Modify for BearerTokens {
    fn modify(&self, document: &mut utoipa::openapi::OpenApi) {
        let scheme = HttpBuilder::new().scheme(HttpAuthScheme::Bearer).build();
        let components = document.components.get_or_insert_default();
        components.add_security_scheme("token", SecurityScheme::Http(scheme));
    }
}

/// What the document describes, with the document.
fn described() -> (Router<Arc<Manager>>, utoipa::openapi::OpenApi) {
    let (router, mut document) = OpenApiRouter::with_openapi(Document::openapi())
        .routes(routes!(show_cluster))
        .merge(crate::hosts::http::routes())
        .merge(crate::vms::http::routes())
        .merge(crate::vms::consoles::http::routes())
        .merge(shares::routes())
        .merge(crate::moves::limits::http::routes())
        .merge(crate::moves::http::routes())
        .merge(crate::moves::preflight_http::routes())
        .merge(crate::drains::http::routes())
        .merge(crate::rules::http::routes())
        .merge(crate::baseline::http::routes())
        .merge(crate::access::http::routes())
        .merge(crate::hosts::join::http::routes())
        .merge(crate::access::certificates::http::routes())
        .merge(events::routes())
        .split_for_parts();
    repeat::describe(&mut document);
    examples::describe(&mut document);
    (router, document)
}

/// The document that `/api/openapi.json` answers with, without a manager that runs.
#[must_use]
pub fn openapi() -> utoipa::openapi::OpenApi {
    described().1
}

/// Everything the manager serves, to those who come by the network.
pub(crate) fn router(manager: Arc<Manager>) -> Router {
    let (router, document) = described();
    let document = Arc::new(document);
    router
        .route("/api/openapi.json", get(async move || Json(document.as_ref().clone())))
        .route("/metrics", get(self::metrics::show))
        .route("/healthz", get(async || "ok\n"))
        .fallback(answers::no_such_path)
        .method_not_allowed_fallback(answers::no_such_method)
        .layer(DefaultBodyLimit::max(MAX_BODY_BYTES))
        .layer(from_fn_with_state(Arc::clone(&manager), repeat::once))
        .layer(from_fn_with_state(Arc::clone(&manager), admit::admit))
        .layer(from_fn(bodies::read_out))
        .layer(from_fn(web::serve))
        .layer(from_fn(crate::metrics::time))
        .with_state(manager)
}

/// The same to those who come by the manager's own socket, which is root's.
pub(crate) fn local(router: Router) -> Router {
    router.layer(Extension(admit::Came::BySocket))
}

/// The cluster as a whole.
#[utoipa::path(get, path = "/api/v1/cluster", tag = "cluster", responses(
    (status = 200, description = "The cluster", body = Cluster),
    (status = "4XX", description = "Why not", body = Problem, content_type = "application/problem+json"),
))]
async fn show_cluster(State(manager): State<Arc<Manager>>) -> Json<Cluster> {
    Json(manager.cluster().await)
}
