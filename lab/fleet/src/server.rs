//! Agents' API over the table, as far as a manager uses it.

mod adoption;
mod console;
pub(crate) mod ha;
mod imports;
mod screen;

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use axum::body::Bytes;
use axum::extract::{Path, Query, Request, State};
use axum::http::StatusCode;
use axum::middleware::{Next, from_fn_with_state};
use axum::response::sse::{Event, Sse};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post, put};
use axum::{Json, Router};
use futures::{Stream, stream};
use godwit_api::{
    ApiError, ChangeDrive, ChangeVm, CloneVm, CreateDisk, CreateVm, DiskInfo, DiskList, ErrorCode,
    GuestInfo, GuestNic, HostEvent, HostInfo, KeptDisks, LoadSample, MigrationAccepted,
    MigrationRequest, MigrationStatus, NicChange, RenameVm, RevocationsTaken, SetPeers,
    SetRevocations, SetTemplate, SnapshotInfo, StopVm, VmImages, VmInfo, VmState,
};
use godwit_qemu::DiskFormat;
use godwit_types::DryRun;
use parking_lot::{Mutex, MutexGuard};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::sync::{mpsc, watch};
use tokio::time::timeout;

use crate::HeldClock;
use crate::world::World;

/// Interval of keep-alive events of an agent.
const KEEP_ALIVE: Duration = Duration::from_secs(2);

#[derive(Debug)]
pub(crate) struct Shared {
    world: Mutex<World>,
    adoptions: Mutex<adoption::Adoptions>,
    imports: Mutex<imports::Imports>,
    guards: Mutex<ha::Guards>,
    began: Instant,
    clock_of_guards: OnceLock<HeldClock>,
    /// Hosts whose agents hang.
    silent: watch::Sender<BTreeSet<usize>>,
}

impl Shared {
    pub(crate) fn new(world: World) -> Shared {
        Shared {
            world: Mutex::new(world),
            adoptions: Mutex::default(),
            imports: Mutex::default(),
            guards: Mutex::default(),
            began: Instant::now(),
            clock_of_guards: OnceLock::new(),
            silent: watch::channel(BTreeSet::new()).0,
        }
    }

    pub(crate) fn world(&self) -> MutexGuard<'_, World> {
        self.world.lock()
    }

    pub(crate) fn guards(&self) -> MutexGuard<'_, ha::Guards> {
        self.guards.lock()
    }

    pub(crate) fn hold_disk_moves(&self, held: bool) {
        self.imports.lock().hold_moves(held);
    }

    /// Returns the milliseconds of the fleet's clock.
    pub(crate) fn now_ms(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    pub(crate) fn silence(&self, at: usize, silent: bool) {
        self.world().silence(at, silent);
        self.silent.send_modify(|hosts| {
            if silent {
                hosts.insert(at)
            } else {
                hosts.remove(&at)
            };
        });
    }

    /// Waits until the agent does not hang.
    async fn until_responsive(&self, at: usize) {
        // The sender lives as long as this object.
        let _ = self.silent.subscribe().wait_for(|hosts| !hosts.contains(&at)).await;
    }
}

#[derive(Clone, Debug)]
struct Agent {
    shared: Arc<Shared>,
    at: usize,
}

/// Returns the API of the agent on the host with this number.
pub(crate) fn router(shared: Arc<Shared>, at: usize) -> Router {
    let agent = Agent { shared, at };
    ha::routes(Router::new())
        .route("/v1/watch", get(follow))
        .route("/v1/load", get(load))
        .route("/v1/host", get(host))
        .route("/v1/peers", put(set_peers))
        .route("/v1/revocations", put(set_revocations))
        .route("/v1/disks", get(list_disks).post(create_disk).delete(no_disk))
        .route("/v1/disks/info", get(show_disk))
        .route("/v1/disks/kept", get(list_kept_disks).put(no_disk).delete(no_disk))
        .route("/v1/disks/resize", post(no_disk))
        .route("/v1/foreign-guests", get(adoption::found))
        .route("/v1/adoptions", get(adoption::list).post(adoption::adopt))
        .route("/v1/adoptions/checks", post(adoption::check))
        .route("/v1/adoptions/{id}", get(adoption::show).delete(adoption::cancel))
        .route("/v1/vms", get(list_vms).post(create_vm))
        .route("/v1/vms/{name}", get(show_vm).patch(change_vm).delete(delete_vm))
        .route("/v1/vms/{name}/console", get(console::open))
        .route("/v1/vms/{name}/log", get(console::log))
        .route("/v1/vms/{name}/screen", get(screen::open))
        .route("/v1/vms/{name}/screenshot", get(screen::picture))
        .route("/v1/vms/{name}/start", post(start_vm))
        .route("/v1/vms/{name}/stop", post(stop_vm))
        .route("/v1/vms/{name}/restart", post(start_vm))
        .route("/v1/vms/{name}/reset", post(start_vm))
        .route("/v1/vms/{name}/suspend", post(suspend_vm))
        .route("/v1/vms/{name}/rename", post(rename_vm))
        .route("/v1/imports", post(imports::begin))
        .route("/v1/jobs", get(imports::list))
        .route("/v1/jobs/{id}", get(imports::show).delete(imports::cancel))
        .route("/v1/vms/{name}/export", post(imports::export))
        .route("/v1/vms/{name}/clone", post(clone_vm))
        .route("/v1/vms/{name}/snapshots", get(no_snapshots).post(no_snapshot).delete(no_snapshot))
        .route("/v1/vms/{name}/snapshots/revert", post(no_snapshot))
        .route("/v1/vms/{name}/template", put(set_template))
        .route("/v1/vms/{name}/images", get(images_of_vm))
        .route("/v1/vms/{name}/guest", get(guest))
        .route("/v1/vms/{name}/freeze", post(show_vm))
        .route("/v1/vms/{name}/thaw", post(show_vm))
        .route("/v1/vms/{name}/link", put(show_vm))
        .route("/v1/vms/{name}/drives", post(change_drive))
        .route("/v1/vms/{name}/drives/move", post(imports::move_disk))
        .route("/v1/vms/{name}/nics", post(change_nic))
        .route("/v1/vms/{name}/migrations", post(migrate))
        .route("/v1/vms/{name}/migrations/dry-run", post(dry_run))
        .route("/v1/migrations", get(list_migrations))
        .route("/v1/migrations/{id}", get(show_migration).delete(cancel))
        .fallback(async || {
            let message = "unknown request to a simulated agent";
            Refusal(ApiError::new(
                ErrorCode::NotFound,
                message,
                "see lab/fleet for the supported requests",
            ))
        })
        .layer(from_fn_with_state(agent.clone(), hang))
        .with_state(agent)
}

async fn hang(State(agent): State<Agent>, request: Request, next: Next) -> Response {
    agent.shared.until_responsive(agent.at).await;
    next.run(request).await
}

struct Refusal(ApiError);

impl From<ApiError> for Refusal {
    fn from(error: ApiError) -> Self {
        Refusal(error)
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        (self.0.code.status(), Json(self.0)).into_response()
    }
}

type Answer<T> = Result<Json<T>, Refusal>;

fn body<T: DeserializeOwned>(bytes: &Bytes) -> Result<T, ApiError> {
    let bytes: &[u8] = if bytes.is_empty() { b"{}" } else { bytes };
    serde_json::from_slice(bytes).map_err(|error| {
        let message = format!("cannot parse the request body: {error}");
        ApiError::new(ErrorCode::InvalidRequest, message, "see docs/api.md")
    })
}

pub(crate) fn unix_ms() -> u64 {
    let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since_1970.as_millis()).unwrap_or(u64::MAX)
}

/// Every agent of the fleet has a host.
fn no_host() -> Refusal {
    Refusal(ApiError::new(ErrorCode::HostFailed, "unknown host", ""))
}

async fn host(State(agent): State<Agent>) -> Answer<HostInfo> {
    let world = agent.shared.world();
    Ok(Json(world.host(agent.at).ok_or_else(no_host)?.info.clone()))
}

async fn load(State(agent): State<Agent>) -> Answer<LoadSample> {
    let world = agent.shared.world();
    Ok(Json(world.host(agent.at).ok_or_else(no_host)?.sample(unix_ms())))
}

async fn set_peers(State(agent): State<Agent>, bytes: Bytes) -> Answer<SetPeers> {
    let peers = body(&bytes)?;
    Ok(Json(agent.shared.world().set_peers(agent.at, peers)))
}

async fn set_revocations(State(agent): State<Agent>, bytes: Bytes) -> Answer<RevocationsTaken> {
    let sent: SetRevocations = body(&bytes)?;
    agent.shared.world().set_revocations(agent.at, sent);
    Ok(Json(RevocationsTaken { number: 0, certificates: 0 }))
}

async fn list_vms(State(agent): State<Agent>) -> Answer<Vec<VmInfo>> {
    let world = agent.shared.world();
    Ok(Json(world.host(agent.at).ok_or_else(no_host)?.vms.values().cloned().collect()))
}

/// Returns a time of the past as milliseconds of Unix time.
fn unix_ms_of(at: Instant) -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.saturating_sub(at.elapsed()).as_millis()).unwrap_or(0)
}

async fn show_vm(State(agent): State<Agent>, Path(name): Path<String>) -> Answer<VmInfo> {
    let world = agent.shared.world();
    let host = world.host(agent.at).ok_or_else(no_host)?;
    let message = || format!("no VM \"{name}\" on host {}", host.info.name);
    let missing = || ApiError::new(ErrorCode::NotFound, message(), "see `godwit vm list`");
    Ok(Json(host.vms.get(&name).cloned().ok_or_else(missing)?))
}

/// A simulated guest has an agent, whose answer has the addresses of the VM.
async fn guest(State(agent): State<Agent>, Path(name): Path<String>) -> Answer<GuestInfo> {
    let vm = show_vm(State(agent), Path(name)).await?.0;
    let addresses = vm.addresses.iter().map(|address| format!("{address}/16")).collect();
    let mac = vm.spec.nics.first().and_then(|nic| nic.mac.clone());
    Ok(Json(GuestInfo {
        answers: true,
        agent_version: Some("7.2.22".to_owned()),
        host_name: Some(vm.name),
        os: Some("Debian GNU/Linux 12 (bookworm)".to_owned()),
        kernel: Some("6.1.0-28-amd64".to_owned()),
        interfaces: vec![GuestNic { name: "enp0s3".to_owned(), mac, addresses }],
        problem: None,
    }))
}

async fn create_vm(
    State(agent): State<Agent>,
    bytes: Bytes,
) -> Result<(StatusCode, Json<VmInfo>), Refusal> {
    let request: CreateVm = body(&bytes)?;
    Ok((StatusCode::CREATED, Json(agent.shared.world().create_vm(agent.at, request)?)))
}

async fn delete_vm(
    State(agent): State<Agent>,
    Path(name): Path<String>,
) -> Result<StatusCode, Refusal> {
    agent.shared.world().delete_vm(agent.at, &name)?;
    Ok(StatusCode::NO_CONTENT)
}

async fn start_vm(State(agent): State<Agent>, Path(name): Path<String>) -> Answer<VmInfo> {
    Ok(Json(agent.shared.world().power(agent.at, &name, VmState::Running)?))
}

async fn stop_vm(
    State(agent): State<Agent>,
    Path(name): Path<String>,
    bytes: Bytes,
) -> Answer<VmInfo> {
    let _: StopVm = body(&bytes)?;
    Ok(Json(agent.shared.world().power(agent.at, &name, VmState::Stopped)?))
}

async fn suspend_vm(State(agent): State<Agent>, Path(name): Path<String>) -> Answer<VmInfo> {
    Ok(Json(agent.shared.world().power(agent.at, &name, VmState::Suspended)?))
}

async fn rename_vm(
    State(agent): State<Agent>,
    Path(name): Path<String>,
    bytes: Bytes,
) -> Answer<VmInfo> {
    let request: RenameVm = body(&bytes)?;
    Ok(Json(agent.shared.world().rename_vm(agent.at, &name, &request)?))
}

async fn change_vm(
    State(agent): State<Agent>,
    Path(name): Path<String>,
    bytes: Bytes,
) -> Answer<VmInfo> {
    let request: ChangeVm = body(&bytes)?;
    ha::admit_change(&agent, &name, &request).await?;
    Ok(Json(agent.shared.world().change_vm(agent.at, &name, &request)?))
}

/// Clones the specification: a simulated host has no images.
async fn clone_vm(
    State(agent): State<Agent>,
    Path(name): Path<String>,
    bytes: Bytes,
) -> Result<(StatusCode, Json<VmInfo>), Refusal> {
    let request: CloneVm = body(&bytes)?;
    let mut world = agent.shared.world();
    Ok((StatusCode::CREATED, Json(world.clone_vm(agent.at, &name, request)?)))
}

async fn set_template(
    State(agent): State<Agent>,
    Path(name): Path<String>,
    bytes: Bytes,
) -> Answer<VmInfo> {
    let SetTemplate { template } = body(&bytes)?;
    let state = if template { VmState::Template } else { VmState::Stopped };
    Ok(Json(agent.shared.world().power(agent.at, &name, state)?))
}

/// A simulated VM has no snapshots.
async fn no_snapshots() -> Json<Vec<SnapshotInfo>> {
    Json(Vec::new())
}

async fn no_snapshot() -> Refusal {
    let message = "a simulated VM has no snapshots";
    ApiError::new(ErrorCode::NotFound, message, "see `godwit vm snapshot list`").into()
}

/// Says that each disk is the VM's own.
async fn images_of_vm(State(agent): State<Agent>, Path(name): Path<String>) -> Answer<VmImages> {
    let vm = show_vm(State(agent), Path(name)).await?.0;
    let deleted = vm.spec.disks.into_iter().map(|disk| disk.path).collect();
    Ok(Json(VmImages { deleted, kept: Vec::new() }))
}

/// A simulated host has no images.
async fn list_disks() -> Json<DiskList> {
    Json(DiskList::default())
}

async fn list_kept_disks() -> Json<KeptDisks> {
    Json(KeptDisks::default())
}

async fn create_disk(bytes: Bytes) -> Answer<DiskInfo> {
    let request: CreateDisk = body(&bytes)?;
    let virtual_bytes = request.size.map_or(0, godwit_qemu::ByteSize::bytes);
    let (path, format) = (request.path, request.format);
    Ok(Json(DiskInfo {
        path,
        format,
        virtual_bytes,
        used_bytes: 0,
        backing: None,
        vms: Vec::new(),
        placed: None,
    }))
}

/// An image of a disk.
#[derive(Debug, serde::Deserialize)]
struct ImageQuery {
    path: std::path::PathBuf,
}

/// Backing file of all disks in format qcow2, beside them.
const BASE: &str = "debian-12.qcow2";

/// Describes the image of a VM's disk, or the backing file of such images: there are no others.
async fn show_disk(
    State(agent): State<Agent>,
    Query(query): Query<ImageQuery>,
) -> Answer<DiskInfo> {
    if query.path.file_name().is_some_and(|name| name == BASE) {
        return Ok(Json(DiskInfo {
            path: query.path,
            format: Some(DiskFormat::Qcow2),
            virtual_bytes: 20 << 30,
            used_bytes: 1 << 30,
            backing: None,
            vms: Vec::new(),
            placed: None,
        }));
    }
    let world = agent.shared.world();
    let vms = world.host(agent.at).ok_or_else(no_host)?.vms.values();
    let disk = |vm: &VmInfo| vm.spec.disks.iter().find(|disk| disk.path == query.path).cloned();
    let Some((vm, disk)) = vms.into_iter().find_map(|vm| Some((vm.name.clone(), disk(vm)?))) else {
        return Err(missing_disk());
    };
    Ok(Json(DiskInfo {
        path: disk.path,
        format: Some(disk.format),
        virtual_bytes: 20 << 30,
        used_bytes: 2 << 30,
        backing: (disk.format == DiskFormat::Qcow2).then(|| BASE.to_owned()),
        vms: vec![vm],
        placed: None,
    }))
}

async fn no_disk() -> Refusal {
    missing_disk()
}

fn missing_disk() -> Refusal {
    let message = "no such disk image";
    ApiError::new(ErrorCode::NotFound, message, "see `godwit disk list`").into()
}

/// Answers as if the change was made: the manager reads nothing else.
async fn change_drive(
    State(agent): State<Agent>,
    Path(name): Path<String>,
    bytes: Bytes,
) -> Answer<VmInfo> {
    let _: ChangeDrive = body(&bytes)?;
    show_vm(State(agent), Path(name)).await
}

/// Answers as if the change was made, as [`change_drive`] does.
async fn change_nic(
    State(agent): State<Agent>,
    Path(name): Path<String>,
    bytes: Bytes,
) -> Answer<VmInfo> {
    let _: NicChange = body(&bytes)?;
    show_vm(State(agent), Path(name)).await
}

async fn migrate(
    State(agent): State<Agent>,
    Path(name): Path<String>,
    bytes: Bytes,
) -> Result<(StatusCode, Json<MigrationAccepted>), Refusal> {
    let request: MigrationRequest = body(&bytes)?;
    let now_ms = agent.shared.now_ms();
    let accepted = agent.shared.world().migrate(agent.at, &name, &request, now_ms, unix_ms())?;
    Ok((StatusCode::ACCEPTED, Json(accepted)))
}

async fn dry_run(
    State(agent): State<Agent>,
    Path(name): Path<String>,
    bytes: Bytes,
) -> Answer<DryRun> {
    let request: MigrationRequest = body(&bytes)?;
    Ok(Json(agent.shared.world().dry_run(agent.at, &name, &request)?))
}

async fn list_migrations(State(agent): State<Agent>) -> Answer<Vec<MigrationStatus>> {
    let world = agent.shared.world();
    Ok(Json(world.host(agent.at).ok_or_else(no_host)?.migrations.iter().rev().cloned().collect()))
}

async fn show_migration(
    State(agent): State<Agent>,
    Path(id): Path<String>,
) -> Answer<MigrationStatus> {
    Ok(Json(agent.shared.world().migration(agent.at, &id)?))
}

async fn cancel(State(agent): State<Agent>, Path(id): Path<String>) -> Result<StatusCode, Refusal> {
    agent.shared.world().cancel(agent.at, &id)?;
    Ok(StatusCode::ACCEPTED)
}

async fn follow(
    State(agent): State<Agent>,
) -> Result<Sse<impl Stream<Item = Result<Event, Infallible>>>, Refusal> {
    let events = agent.shared.world().watch(agent.at).ok_or_else(no_host)?;
    Ok(Sse::new(stream::unfold((agent, events), async |(agent, mut events)| {
        let event = next_event(&agent, &mut events).await?;
        Some((Ok(event), (agent, events)))
    })))
}

/// Returns the next event. `None` ends the stream, and clients have to reconnect.
async fn next_event(agent: &Agent, events: &mut mpsc::Receiver<HostEvent>) -> Option<Event> {
    loop {
        match timeout(KEEP_ALIVE, events.recv()).await {
            Ok(event) => return event.and_then(|event| to_sse(&event)),
            Err(_) if agent.shared.world().is_silent(agent.at) => {}
            Err(_) => return Some(Event::default().comment("")),
        }
    }
}

fn to_sse(event: &HostEvent) -> Option<Event> {
    fn named(name: &str, data: &impl Serialize) -> Option<Event> {
        Event::default().event(name).json_data(data).ok()
    }
    match event {
        HostEvent::Host(info) => named("host", info),
        HostEvent::Vm(info) => named("vm", info),
        HostEvent::VmGone(name) => named("vm-gone", name),
        HostEvent::Migration(status) => named("migration", status),
        HostEvent::Load(sample) => named("load", sample),
        HostEvent::Known => named("known", &()),
    }
}
