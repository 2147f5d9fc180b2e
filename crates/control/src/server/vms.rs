//! The requests about VMs.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use godwit_api::VmState;
use godwit_api::control::{ManagedVm, Page, Problem, ProblemCode, VmSummary};
use serde::Deserialize;
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::answer::{Path, Query, Refusal, cursor, label};
use crate::inventory::VmFilter;
use crate::manager::Manager;

pub(super) fn routes() -> OpenApiRouter<Arc<Manager>> {
    OpenApiRouter::new().routes(routes!(list)).routes(routes!(show))
}

/// Which VMs, and which page of them.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct ListVms {
    /// Those of this host.
    host: Option<String>,
    /// Those in this state.
    #[param(value_type = Option<String>)]
    state: Option<VmState>,
    /// Those with this in their name.
    search: Option<String>,
    /// Those with this label, `key=value`.
    label: Option<String>,
    /// Where the page begins: `next` of the page before.
    cursor: Option<String>,
    /// Items of the page.
    #[param(minimum = 1, maximum = 1000, default = 100)]
    limit: Option<u32>,
}

/// VMs by name.
#[utoipa::path(get, path = "/api/v1/vms", tag = "vms", params(ListVms), responses(
    (status = 200, description = "A page of VMs", body = Page<VmSummary>),
    (status = "4XX", description = "Why not", body = Problem, content_type = "application/problem+json"),
))]
async fn list(
    State(manager): State<Arc<Manager>>,
    Query(query): Query<ListVms>,
) -> Result<Json<Page<VmSummary>>, Refusal> {
    let filter = VmFilter {
        host: query.host,
        state: query.state,
        search: query.search,
        label: label(query.label.as_deref())?,
    };
    Ok(Json(manager.state.inventory().vms(&filter, &cursor(query.cursor, query.limit)?)))
}

/// One VM: what is planned, and what its host tells.
#[utoipa::path(get, path = "/api/v1/vms/{vm}", tag = "vms", params(("vm" = String, Path, description = "Its name")), responses(
    (status = 200, description = "The VM", body = ManagedVm),
    (status = "4XX", description = "Why not", body = Problem, content_type = "application/problem+json"),
))]
async fn show(
    State(manager): State<Arc<Manager>>,
    Path(vm): Path<String>,
) -> Result<Json<ManagedVm>, Refusal> {
    let found = manager.state.inventory().vm(&vm);
    let missing = || {
        let detail = format!("no host has a VM \"{vm}\"");
        Refusal(Problem::new(ProblemCode::NotFound, detail, "see `godwit vm list`"))
    };
    Ok(Json(found.ok_or_else(missing)?))
}
