//! The HTTP API: one function for each request, each a few lines over [`Agent`].

use std::convert::Infallible;
use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, Path, Query, State};
use axum::response::Response;
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::routing::{get, post, put};
use axum::{Json, Router};
use futures::Stream;
use godwit_api::{
    ApiError, ChangeDrive, ChangeVm, CreateVm, ErrorCode, FreezeVm, GuestInfo, HostInfo, LogSource,
    MigrationAccepted, MigrationRequest, MigrationStatus, NicChange, RenameVm, Resolve, Resolved,
    SetNicLink, StopVm, VmInfo,
};
use godwit_types::DryRun;
use http::StatusCode;
use serde::Deserialize;
use tokio::sync::mpsc;

use crate::agent::Agent;
use crate::migration;
use crate::migrations::MigrationWatch;
use crate::server::answers::{MAX_BODY_BYTES, Refusal, body, explain_too_long, json_event};
use crate::server::named::Named;
use crate::server::{
    adoption, arriving_disks, clones, console, disks, follow, ha, ha_heartbeats, imports, incoming,
    limits, log, metrics, probes, screen,
};

/// Returns the routes of all requests that the agent serves.
pub fn router(agent: Arc<Agent>) -> Router {
    Router::new()
        .route("/metrics", get(metrics::show))
        .route("/v1/host", get(host))
        .route("/v1/vms", get(list_vms).post(create_vm))
        .route("/v1/vms/{name}", get(show_vm).patch(change_vm).delete(delete_vm))
        .route("/v1/vms/{name}/start", post(start_vm))
        .route("/v1/vms/{name}/stop", post(stop_vm))
        .route("/v1/vms/{name}/restart", post(restart_vm))
        .route("/v1/vms/{name}/suspend", post(suspend_vm))
        .route("/v1/vms/{name}/rename", post(rename_vm))
        .route("/v1/vms/{name}/reset", post(reset_vm))
        .route("/v1/vms/{name}/guest", get(show_guest))
        .route("/v1/vms/{name}/freeze", post(freeze_vm))
        .route("/v1/vms/{name}/thaw", post(thaw_vm))
        .route("/v1/vms/{name}/link", put(set_link))
        .route("/v1/vms/{name}/drives", post(change_drive))
        .route("/v1/vms/{name}/nics", post(change_nic))
        .route("/v1/vms/{name}/resolve", post(resolve))
        .route("/v1/vms/{name}/log", get(vm_log))
        .route("/v1/vms/{name}/console", get(console::open))
        .route("/v1/vms/{name}/screen", get(screen::open))
        .route("/v1/vms/{name}/screenshot", get(screen::picture))
        .route("/v1/vms/{name}/migrations", post(migrate))
        .route("/v1/vms/{name}/migrations/dry-run", post(dry_run))
        .route("/v1/migrations", get(list_migrations))
        .route("/v1/migrations/{id}", get(show_migration).delete(cancel_migration))
        .route("/v1/migrations/{id}/events", get(follow_migration))
        .merge(disks::routes())
        .merge(clones::routes())
        .merge(imports::routes())
        .merge(adoption::routes())
        .merge(incoming::routes())
        .merge(arriving_disks::routes())
        .merge(probes::routes())
        .merge(limits::routes())
        .merge(follow::routes())
        .merge(ha::routes())
        .merge(ha_heartbeats::routes())
        .fallback(async || {
            let remedy = "see docs/api.md; another version of the agent may support it";
            Refusal(ApiError::new(ErrorCode::NotFound, "no such request", remedy))
        })
        .layer(DefaultBodyLimit::max(MAX_BODY_BYTES))
        .layer(axum::middleware::map_response(explain_too_long))
        .layer(axum::middleware::from_fn_with_state(Arc::clone(&agent), metrics::time))
        .layer(axum::middleware::from_fn_with_state(Arc::clone(&agent), ha::until_vms_known))
        .with_state(agent)
}

type Answer<T> = Result<Json<T>, Refusal>;

async fn host(State(agent): State<Arc<Agent>>) -> Answer<HostInfo> {
    Ok(Json(agent.host_info().await?))
}

async fn list_vms(State(agent): State<Arc<Agent>>) -> Json<Vec<VmInfo>> {
    Json(agent.vms())
}

async fn create_vm(
    State(agent): State<Arc<Agent>>,
    bytes: Bytes,
) -> Result<(StatusCode, Json<VmInfo>), Refusal> {
    let request: CreateVm = body(&bytes)?;
    Ok((StatusCode::CREATED, Json(agent.create(request).await?)))
}

async fn show_vm(State(agent): State<Arc<Agent>>, Named(name): Named) -> Answer<VmInfo> {
    Ok(Json(agent.vm_info(&name)?))
}

#[derive(Debug, Deserialize)]
struct DeleteQuery {
    #[serde(default)]
    force: bool,
}

async fn delete_vm(
    State(agent): State<Arc<Agent>>,
    Named(name): Named,
    Query(query): Query<DeleteQuery>,
) -> Result<StatusCode, Refusal> {
    agent.delete(&name, query.force).await?;
    Ok(StatusCode::NO_CONTENT)
}

async fn start_vm(State(agent): State<Arc<Agent>>, Named(name): Named) -> Answer<VmInfo> {
    Ok(Json(agent.start(&name).await?))
}

async fn stop_vm(
    State(agent): State<Arc<Agent>>,
    Named(name): Named,
    bytes: Bytes,
) -> Answer<VmInfo> {
    let request: StopVm = body(&bytes)?;
    Ok(Json(agent.stop(&name, request).await?))
}

async fn restart_vm(
    State(agent): State<Arc<Agent>>,
    Named(name): Named,
    bytes: Bytes,
) -> Answer<VmInfo> {
    let request: StopVm = body(&bytes)?;
    Ok(Json(agent.restart(&name, request).await?))
}

async fn reset_vm(State(agent): State<Arc<Agent>>, Named(name): Named) -> Answer<VmInfo> {
    Ok(Json(agent.reset(&name).await?))
}

async fn suspend_vm(State(agent): State<Arc<Agent>>, Named(name): Named) -> Answer<VmInfo> {
    Ok(Json(agent.suspend(&name).await?))
}

async fn rename_vm(
    State(agent): State<Arc<Agent>>,
    Named(name): Named,
    bytes: Bytes,
) -> Answer<VmInfo> {
    let request: RenameVm = body(&bytes)?;
    Ok(Json(agent.rename(&name, request).await?))
}

async fn show_guest(State(agent): State<Arc<Agent>>, Named(name): Named) -> Answer<GuestInfo> {
    Ok(Json(agent.guest_info(&name).await?))
}

async fn freeze_vm(
    State(agent): State<Arc<Agent>>,
    Named(name): Named,
    bytes: Bytes,
) -> Answer<VmInfo> {
    let request: FreezeVm = body(&bytes)?;
    Ok(Json(agent.freeze(&name, request).await?))
}

async fn thaw_vm(State(agent): State<Arc<Agent>>, Named(name): Named) -> Answer<VmInfo> {
    Ok(Json(agent.thaw(&name).await?))
}

async fn set_link(
    State(agent): State<Arc<Agent>>,
    Named(name): Named,
    bytes: Bytes,
) -> Answer<VmInfo> {
    let request: SetNicLink = body(&bytes)?;
    Ok(Json(agent.set_link(&name, request).await?))
}

async fn change_vm(
    State(agent): State<Arc<Agent>>,
    Named(name): Named,
    bytes: Bytes,
) -> Answer<VmInfo> {
    let request: ChangeVm = body(&bytes)?;
    Ok(Json(agent.change(&name, request).await?))
}

async fn change_drive(
    State(agent): State<Arc<Agent>>,
    Named(name): Named,
    bytes: Bytes,
) -> Answer<VmInfo> {
    let request: ChangeDrive = body(&bytes)?;
    Ok(Json(agent.change_drive(&name, request).await?))
}

async fn change_nic(
    State(agent): State<Arc<Agent>>,
    Named(name): Named,
    bytes: Bytes,
) -> Answer<VmInfo> {
    let request: NicChange = body(&bytes)?;
    Ok(Json(agent.change_nic(&name, request).await?))
}

async fn resolve(
    State(agent): State<Arc<Agent>>,
    Named(name): Named,
    bytes: Bytes,
) -> Answer<Resolved> {
    let request: Resolve = body(&bytes)?;
    Ok(Json(agent.resolve_doubt(&name, request).await?))
}

#[derive(Debug, Deserialize)]
struct LogQuery {
    #[serde(default)]
    source: LogSource,
    #[serde(default)]
    follow: bool,
    /// Number of bytes from the end at which the stream begins; `None`: the whole log.
    tail_bytes: Option<u64>,
    /// Serial port whose output is read, from 1.
    #[serde(default = "console::first_port")]
    port: u32,
}

async fn vm_log(
    State(agent): State<Arc<Agent>>,
    Named(name): Named,
    Query(query): Query<LogQuery>,
) -> Result<Response, Refusal> {
    let source = (query.source, query.port);
    Ok(log::stream(&agent, &name, source, query.follow, query.tail_bytes)?)
}

async fn migrate(
    State(agent): State<Arc<Agent>>,
    Named(name): Named,
    bytes: Bytes,
) -> Result<(StatusCode, Json<MigrationAccepted>), Refusal> {
    let request: MigrationRequest = body(&bytes)?;
    Ok((StatusCode::ACCEPTED, Json(migration::migrate(&agent, &name, request)?)))
}

async fn dry_run(
    State(agent): State<Arc<Agent>>,
    Named(name): Named,
    bytes: Bytes,
) -> Answer<DryRun> {
    let request: MigrationRequest = body(&bytes)?;
    Ok(Json(migration::dry_run(&agent, &name, request).await?))
}

async fn list_migrations(State(agent): State<Arc<Agent>>) -> Json<Vec<MigrationStatus>> {
    Json(agent.migrations().list())
}

async fn show_migration(
    State(agent): State<Arc<Agent>>,
    Path(id): Path<String>,
) -> Answer<MigrationStatus> {
    Ok(Json(agent.migrations().status(&id)?))
}

async fn cancel_migration(
    State(agent): State<Arc<Agent>>,
    Path(id): Path<String>,
) -> Result<StatusCode, Refusal> {
    agent.migrations().cancel(&id)?;
    Ok(StatusCode::ACCEPTED)
}

async fn follow_migration(
    State(agent): State<Arc<Agent>>,
    Path(id): Path<String>,
) -> Result<Sse<impl Stream<Item = Result<Event, Infallible>>>, Refusal> {
    let watch = agent.migrations().watch(&id)?;
    let (events, stream) = mpsc::channel(16);
    tokio::spawn(send_events(watch, events));
    let stream = tokio_stream::wrappers::ReceiverStream::new(stream);
    Ok(Sse::new(stream).keep_alive(KeepAlive::default()))
}

/// Sends the current progress, each later one, and finally the report. Ends early when the reader
/// is gone.
async fn send_events(mut watch: MigrationWatch, events: mpsc::Sender<Result<Event, Infallible>>) {
    let mut in_progress = true;
    watch.progress.mark_changed();
    loop {
        let report = watch.report.borrow_and_update().clone();
        if let Some(report) = report {
            let _ = events.send(Ok(json_event("report", &report))).await;
            return;
        }
        tokio::select! {
            // The report is the last event; no progress follows it.
            biased;
            report = watch.report.changed() => if report.is_err() { return },
            progress = watch.progress.changed(), if in_progress => {
                in_progress = progress.is_ok();
                let progress = watch.progress.borrow_and_update().clone();
                if events.send(Ok(json_event("progress", &progress))).await.is_err() {
                    return;
                }
            }
            () = events.closed() => return,
        }
    }
}
