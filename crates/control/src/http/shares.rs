//! Requests about networks, which hosts share.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use godwit_api::control::{ManagedNetwork, Page};
use serde::Deserialize;
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::answers::{Query, Refusal, cursor};
use crate::manager::Manager;

pub(crate) fn routes() -> OpenApiRouter<Arc<Manager>> {
    OpenApiRouter::new().routes(routes!(networks))
}

/// Page to return.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct PageOf {
    /// Start of the page: `next` of the page before.
    cursor: Option<String>,
    /// Most items on the page.
    #[param(minimum = 1, maximum = 1000, default = 100)]
    limit: Option<u32>,
}

/// Lists networks by name, with the hosts that have them and the number of VMs in each.
#[utoipa::path(get, path = "/api/v1/networks", operation_id = "list_networks",
    tag = "hosts", params(PageOf), responses(
    (status = 200, description = "A page of networks", body = Page<ManagedNetwork>),
))]
async fn networks(
    State(manager): State<Arc<Manager>>,
    Query(query): Query<PageOf>,
) -> Result<Json<Page<ManagedNetwork>>, Refusal> {
    Ok(Json(manager.state.inventory().networks(&cursor(query.cursor, query.limit)?)))
}
