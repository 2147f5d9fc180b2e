//! The requests about VMs.

#![allow(unused_qualifications, reason = "utoipa's macro writes them")]

use axum::extract::{FromRef, State};
use axum::{Extension, Json};
use godwit_api::VmState;
use godwit_api::control::{
    BindVm, CreateManagedVm, HostedVm, ManagedVm, NameConflict, Page, Problem, ProblemCode,
    StartManagedVm, StopManagedVm, VmSummary,
};
use http::StatusCode;
use serde::Deserialize;
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::access::Caller;
use crate::answers::{Body, Making, MaybeBody, Path, Query, Refusal, cursor, label, made};
use crate::cluster::inventory::VmFilter;
use crate::vms::Vms;

pub(crate) fn routes<S>() -> OpenApiRouter<S>
where
    S: Clone + Send + Sync + 'static,
    Vms: FromRef<S>,
{
    OpenApiRouter::new()
        .routes(routes!(list, create))
        .routes(routes!(show, delete))
        .routes(routes!(start))
        .routes(routes!(stop))
        .routes(routes!(bind))
        .routes(routes!(list_conflicts))
}

/// Which VMs, and which page of them.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct ListVms {
    /// Those of this host.
    host: Option<String>,
    /// Those in this state.
    state: Option<VmState>,
    /// Those with this in their name.
    search: Option<String>,
    /// Those with this label, `key=value`.
    #[param(pattern = "=")]
    label: Option<String>,
    /// Those with an interface in this network.
    network: Option<String>,
    /// Those with a disk in this directory.
    datastore: Option<String>,
    /// Where the page begins: `next` of the page before.
    cursor: Option<String>,
    /// Items of the page.
    #[param(minimum = 1, maximum = 1000, default = 100)]
    limit: Option<u32>,
}

/// VMs by name.
#[utoipa::path(get, path = "/api/v1/vms", operation_id = "list_vms", tag = "vms", params(ListVms), responses(
    (status = 200, description = "A page of VMs", body = Page<VmSummary>),
    (status = "4XX", description = "The reason for the refusal", body = Problem,
        content_type = "application/problem+json"),
))]
async fn list(
    State(vms): State<Vms>,
    Query(query): Query<ListVms>,
) -> Result<Json<Page<VmSummary>>, Refusal> {
    let filter = VmFilter {
        host: query.host,
        state: query.state,
        search: query.search,
        label: label(query.label.as_deref())?,
        network: query.network,
        datastore: query.datastore,
    };
    Ok(Json(vms.state().inventory().vms(&filter, &cursor(query.cursor, query.limit)?)))
}

/// One VM: what is planned, and what its host tells.
#[utoipa::path(get, path = "/api/v1/vms/{vm}", operation_id = "show_vm", tag = "vms", params(("vm" = String, Path, description = "Its name")), responses(
    (status = 200, description = "The VM", body = ManagedVm),
    (status = "4XX", description = "The reason for the refusal", body = Problem,
        content_type = "application/problem+json"),
))]
async fn show(State(vms): State<Vms>, Path(vm): Path<String>) -> Result<Json<ManagedVm>, Refusal> {
    let found = vms.state().inventory().vm(&vm);
    let missing = || {
        let detail = format!("no host has a VM \"{vm}\"");
        Refusal(Problem::new(ProblemCode::NotFound, detail, "see `godwit vm list`"))
    };
    Ok(Json(found.ok_or_else(missing)?))
}

/// Makes a VM on the host that is named, or on one of the manager's choice, which the answer gives the reason of. Where that fails nothing
/// remains of it. A VM that names no CPU model gets the cluster's baseline; one whose model is more than that is refused.
#[utoipa::path(post, path = "/api/v1/vms", operation_id = "create_vm", tag = "vms", request_body = CreateManagedVm, responses(
    (status = 201, description = "It is made, and runs if that was asked for", body = HostedVm),
    (status = "4XX", description = "The reason for the refusal", body = Problem,
        content_type = "application/problem+json"),
    (status = "5XX", description = "The reason for the failure", body = Problem,
        content_type = "application/problem+json"),
))]
async fn create(
    State(vms): State<Vms>,
    Extension(caller): Extension<Caller>,
    Body(request): Body<CreateManagedVm>,
) -> Result<Making<HostedVm>, Refusal> {
    let vm = vms.create_vm(request, &caller).await?;
    Ok(made(StatusCode::CREATED, format!("vm {} on host {}", vm.info.name, vm.info.host), vm))
}

/// Starts a stopped VM, or lets a paused one go on.
#[utoipa::path(post, path = "/api/v1/vms/{vm}/start", operation_id = "start_vm", tag = "vms", params(("vm" = String, Path, description = "Its name")),
    request_body = StartManagedVm, responses(
    (status = 200, description = "The VM as its host tells it", body = HostedVm),
    (status = "4XX", description = "The reason for the refusal", body = Problem,
        content_type = "application/problem+json"),
    (status = "5XX", description = "The reason for the failure", body = Problem,
        content_type = "application/problem+json"),
))]
async fn start(
    State(vms): State<Vms>,
    Path(vm): Path<String>,
    MaybeBody(request): MaybeBody<StartManagedVm>,
) -> Result<Json<HostedVm>, Refusal> {
    Ok(Json(HostedVm { info: vms.start_vm(&vm, request).await?, host_reason: None }))
}

/// Stops a VM: by its power button and, after the grace, by ending its hypervisor. The answer comes when it is stopped. A VM under way is not
/// stopped; one in doubt only with `force`.
#[utoipa::path(post, path = "/api/v1/vms/{vm}/stop", operation_id = "stop_vm", tag = "vms", params(("vm" = String, Path, description = "Its name")),
    request_body = StopManagedVm, responses(
    (status = 200, description = "The VM as its host tells it", body = HostedVm),
    (status = "4XX", description = "The reason for the refusal", body = Problem,
        content_type = "application/problem+json"),
    (status = "5XX", description = "The reason for the failure", body = Problem,
        content_type = "application/problem+json"),
))]
async fn stop(
    State(vms): State<Vms>,
    Path(vm): Path<String>,
    MaybeBody(request): MaybeBody<StopManagedVm>,
) -> Result<Json<HostedVm>, Refusal> {
    Ok(Json(HostedVm { info: vms.stop_vm(&vm, request).await?, host_reason: None }))
}

/// How a VM is deleted.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct DeleteVm {
    /// One that runs is ended first, at once; of one in doubt what is at its host is given up, which may be all that there is of its guest.
    #[serde(default)]
    force: bool,
}

/// Deletes a stopped VM and what its host keeps of it; disks are left alone. A VM with a move is not deleted.
#[utoipa::path(delete, path = "/api/v1/vms/{vm}", operation_id = "delete_vm", tag = "vms",
    params(("vm" = String, Path, description = "Its name"), DeleteVm), responses(
    (status = 204, description = "It is deleted"),
    (status = "4XX", description = "The reason for the refusal", body = Problem,
        content_type = "application/problem+json"),
    (status = "5XX", description = "The reason for the failure", body = Problem,
        content_type = "application/problem+json"),
))]
async fn delete(
    State(vms): State<Vms>,
    Path(vm): Path<String>,
    Query(how): Query<DeleteVm>,
) -> Result<StatusCode, Refusal> {
    vms.delete_vm(&vm, how.force).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Which page of a list.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct ListConflicts {
    /// Where the page begins: `next` of the page before.
    cursor: Option<String>,
    /// Items of the page.
    #[param(minimum = 1, maximum = 1000, default = 100)]
    limit: Option<u32>,
}

/// Names of VMs that other hosts than their own claim, without a move that explains it, by name. Such a claim changes
/// nothing: operations on the VM go to the host that holds its name.
#[utoipa::path(get, path = "/api/v1/name-conflicts", operation_id = "list_name_conflicts", tag = "vms",
    params(ListConflicts), responses(
    (status = 200, description = "A page of conflicts", body = Page<NameConflict>),
    (status = "4XX", description = "The reason for the refusal", body = Problem,
        content_type = "application/problem+json"),
))]
async fn list_conflicts(
    State(vms): State<Vms>,
    Query(query): Query<ListConflicts>,
) -> Result<Json<Page<NameConflict>>, Refusal> {
    Ok(Json(vms.state().inventory().name_conflicts(&cursor(query.cursor, query.limit)?)))
}

/// Gives a VM's name to the VM that this host reports. For a name whose host is gone for good, or that the wrong one of
/// two VMs has: what other hosts have of that name stays as it is.
#[utoipa::path(post, path = "/api/v1/vms/{vm}/binding", operation_id = "bind_vm", tag = "vms",
    params(("vm" = String, Path, description = "Its name")), request_body = BindVm, responses(
    (status = 200, description = "The VM that has the name now", body = ManagedVm),
    (status = "4XX", description = "The reason for the refusal", body = Problem,
        content_type = "application/problem+json"),
    (status = "5XX", description = "The reason for the failure", body = Problem,
        content_type = "application/problem+json"),
))]
async fn bind(
    State(vms): State<Vms>,
    Path(vm): Path<String>,
    Body(request): Body<BindVm>,
) -> Result<Json<ManagedVm>, Refusal> {
    Ok(Json(vms.bind_vm(&vm, &request.host).await?))
}
