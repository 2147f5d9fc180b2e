//! Imports, exports and moves of disks at a simulated host. Each definition has one disk and a NIC
//! in the network `VM Network`, for which the request has to name one of the host. A copy of the
//! disk takes two seconds, that of a VM whose name begins with `slow` long enough to be cancelled.
//! A further pass of a warm import, and the move of a disk, are short.

use std::collections::VecDeque;
use std::path::{Path as FilePath, PathBuf};
use std::time::{Duration, Instant};

use axum::Json;
use axum::body::Bytes;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use godwit_api::{
    ApiError, CreateVm, ErrorCode, ExportFormat, ExportVm, ImportDisk, ImportFinding, ImportFrom,
    ImportPlan, ImportVm, JobKind, JobState, JobStatus, JobSummary, MoveDisk, VmInfo, VmState,
    WarmStep,
};
use godwit_qemu::{DiskFormat, Uuid, VmName, VmSpec, is_rbd};
use godwit_types::Fault;
use serde_json::json;

use super::{Agent, Answer, Refusal, adoption, body, show_vm, unix_ms_of};

const DISK_BYTES: u64 = 20 << 30;
/// What a further pass of a warm import finds changed.
const CHANGED_BYTES: u64 = 64 << 20;
const COPY: Duration = Duration::from_secs(2);
const SLOW_COPY: Duration = Duration::from_secs(120);
const FURTHER_PASS: Duration = Duration::from_millis(500);
const DISK_MOVE: Duration = Duration::from_millis(300);
/// Most jobs that are kept.
const MOST_KEPT: usize = 64;

/// Jobs of all hosts, the oldest first.
#[derive(Debug, Default)]
pub(super) struct Imports {
    begun: VecDeque<Job>,
    holds_moves: bool,
}

impl Imports {
    /// Keeps the disks that move from arriving, or lets them arrive.
    pub(super) fn hold_moves(&mut self, held: bool) {
        self.holds_moves = held;
    }
}

#[derive(Debug)]
struct Job {
    id: String,
    /// Number of the host.
    at: usize,
    kind: JobKind,
    place: String,
    spec: VmSpec,
    takes_disks: bool,
    starts: bool,
    /// Pass of a warm import.
    step: Option<WarmStep>,
    /// Files of an export, or the new image of a disk.
    files: Vec<PathBuf>,
    /// Old image of a disk that moves.
    moves: Option<PathBuf>,
    is_refused: bool,
    begun: Instant,
    is_cancelled: bool,
    /// Its result: the VM, if it creates one.
    made: Option<Result<Option<VmInfo>, ApiError>>,
}

impl Job {
    fn lasts(&self) -> Duration {
        match self.step {
            _ if self.takes_disks => Duration::ZERO,
            _ if self.spec.name.starts_with("slow") => SLOW_COPY,
            _ if self.moves.is_some() => DISK_MOVE,
            Some(WarmStep::Again | WarmStep::CutOver) => FURTHER_PASS,
            _ => COPY,
        }
    }

    fn is_copied(&self) -> bool {
        self.begun.elapsed() >= self.lasts()
    }

    fn creates_vm(&self) -> bool {
        match self.kind {
            JobKind::Import => true,
            JobKind::WarmImport => self.step == Some(WarmStep::CutOver),
            _ => false,
        }
    }

    fn copied_bytes(&self) -> u64 {
        let millis = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(0);
        let all = millis(self.lasts()).max(1);
        match self.kind {
            JobKind::ImportCheck => 0,
            _ => DISK_BYTES / all * millis(self.begun.elapsed()).min(all),
        }
    }

    fn error(&self) -> Option<ApiError> {
        match &self.made {
            _ if self.is_cancelled => {
                let message = "cancelled: nothing of it remains";
                Some(ApiError::new(ErrorCode::Cancelled, message, ""))
            }
            _ if self.is_refused => Some(refused(&self.spec.name)),
            Some(Err(error)) => Some(error.clone()),
            _ => None,
        }
    }

    fn state(&self) -> JobState {
        match &self.made {
            _ if self.is_cancelled => JobState::Cancelled,
            _ if self.is_refused => JobState::Failed,
            _ if self.kind == JobKind::ImportCheck => JobState::Done,
            None => JobState::Running,
            Some(Ok(_)) => JobState::Done,
            Some(Err(_)) => JobState::Failed,
        }
    }

    fn shown(&self) -> JobStatus {
        let copied = self.copied_bytes();
        let written = match self.step {
            None => 0,
            Some(WarmStep::Copy) => copied,
            Some(WarmStep::Again | WarmStep::CutOver) => copied.min(CHANGED_BYTES),
        };
        let is_export = self.kind == JobKind::Export;
        let is_move = self.moves.is_some();
        let is_done = self.state() == JobState::Done;
        JobStatus {
            id: self.id.clone(),
            state: self.state(),
            done_bytes: copied,
            total_bytes: DISK_BYTES,
            written_bytes: written,
            findings: match self.kind {
                JobKind::Export => lost(),
                JobKind::DiskMove => Vec::new(),
                _ => findings(self.is_refused),
            },
            plan: (!is_export && !is_move).then(|| plan(self.spec.clone())),
            vm: self.made.as_ref().and_then(|made| made.as_ref().ok().cloned()).flatten(),
            files: if is_done { self.files.clone() } else { Vec::new() },
            error: self.error(),
        }
    }

    fn summary(&self) -> JobSummary {
        let state = self.state();
        let begun_unix_ms = unix_ms_of(self.begun);
        let lasts_ms = u64::try_from(self.lasts().as_millis()).unwrap_or(0);
        let ended_unix_ms = match state {
            JobState::Running => None,
            JobState::Done => Some(begun_unix_ms + lasts_ms),
            JobState::Failed | JobState::Cancelled => Some(begun_unix_ms),
        };
        JobSummary {
            id: self.id.clone(),
            kind: self.kind,
            vm: self.spec.name.clone(),
            place: self.place.clone(),
            state,
            done_bytes: self.copied_bytes(),
            total_bytes: DISK_BYTES,
            begun_unix_ms,
            ended_unix_ms,
            error: self.error().map(Fault::from),
        }
    }
}

fn refused(name: &str) -> ApiError {
    let message = format!("cannot import VM \"{name}\": NIC 1: network \"VM Network\" is unknown");
    let remedy = "change the refused parts on the old platform; nothing was created here";
    ApiError::new(ErrorCode::Preflight, message, remedy)
}

fn finding(what: &str, why: &str, refuses: bool) -> ImportFinding {
    ImportFinding { what: what.to_owned(), why: why.to_owned(), refuses }
}

/// Returns what an export leaves out.
fn lost() -> Vec<ImportFinding> {
    vec![finding("UEFI variables", "are not exported", false)]
}

fn findings(is_refused: bool) -> Vec<ImportFinding> {
    let mut all = vec![finding("SCSI controller", "LSI Logic becomes SATA (AHCI)", false)];
    if is_refused {
        let why = "network \"VM Network\" is unknown: name one of this host's, which are: lan";
        all.push(finding("NIC 1", why, true));
    }
    all
}

fn plan(spec: VmSpec) -> ImportPlan {
    let disk = ImportDisk {
        name: "disk1".to_owned(),
        source: Some(PathBuf::from("/srv/import/disk1.vmdk")),
        format: "vmdk".to_owned(),
        bytes: DISK_BYTES,
    };
    ImportPlan { spec, disks: vec![disk] }
}

/// Returns the name that the definition has.
fn name_in(from: &ImportFrom) -> String {
    match from {
        ImportFrom::Libvirt(name) => name.clone(),
        ImportFrom::File(path) => {
            let stem = FilePath::new(path).file_stem().unwrap_or_default();
            stem.to_string_lossy().into_owned()
        }
        ImportFrom::Text(_) => "imported".to_owned(),
    }
}

fn spec_named(name: &str) -> Result<VmSpec, ApiError> {
    let invalid = |error: String| ApiError::new(ErrorCode::InvalidRequest, error, "");
    let name = VmName::new(name).map_err(|error| invalid(error.to_string()))?;
    let spec = json!({
        "name": name.to_string(), "memory": "4GiB", "vcpus": 2, "kernel": "/srv/images/vmlinuz",
    });
    serde_json::from_value(spec).map_err(|error| invalid(error.to_string()))
}

impl Agent {
    /// Creates the VMs of imports that are complete.
    fn settle_imports(&self) {
        let mut imports = self.shared.imports.lock();
        let Imports { begun, holds_moves } = &mut *imports;
        let is_held = |job: &Job| *holds_moves && job.moves.is_some();
        for job in begun {
            let is_due = job.is_copied() && !is_held(job);
            if job.at == self.at && job.state() == JobState::Running && is_due {
                if let (Some(from), Some(to)) = (&job.moves, job.files.first()) {
                    self.shared.world().move_disk(self.at, &job.spec.name, from, to);
                }
                job.made = Some(if job.creates_vm() {
                    let create = CreateVm::new(job.spec.clone(), job.starts);
                    self.shared.world().create_vm(self.at, create).map(Some)
                } else {
                    Ok(None)
                });
            }
        }
    }

    fn begin_job(&self, job: Job) -> (StatusCode, Json<JobStatus>) {
        let shown = job.shown();
        let mut imports = self.shared.imports.lock();
        if imports.begun.len() >= MOST_KEPT {
            imports.begun.pop_front();
        }
        imports.begun.push_back(job);
        (StatusCode::ACCEPTED, Json(shown))
    }
}

pub(super) async fn begin(
    State(agent): State<Agent>,
    bytes: Bytes,
) -> Result<(StatusCode, Json<JobStatus>), Refusal> {
    let request: ImportVm = body(&bytes)?;
    let name = request.name.clone().unwrap_or_else(|| name_in(&request.from));
    let step = request.warm.as_ref().map(|warm| warm.step);
    let kind = match step {
        _ if request.dry_run => JobKind::ImportCheck,
        Some(_) => JobKind::WarmImport,
        None => JobKind::Import,
    };
    let place = match &request.from {
        ImportFrom::File(path) => path.clone(),
        ImportFrom::Libvirt(name) => format!("libvirt's domain \"{name}\""),
        ImportFrom::Text(_) => "a definition that was sent".to_owned(),
    };
    let job = Job {
        id: Uuid::new_v4().to_string(),
        at: agent.at,
        kind,
        place,
        spec: spec_named(&name)?,
        takes_disks: request.take_disks,
        starts: request.start || step.is_some(),
        step,
        files: Vec::new(),
        moves: None,
        is_refused: request.networks.is_empty(),
        begun: Instant::now(),
        is_cancelled: false,
        made: None,
    };
    Ok(agent.begin_job(job))
}

pub(super) async fn export(
    State(agent): State<Agent>,
    Path(name): Path<String>,
    bytes: Bytes,
) -> Result<(StatusCode, Json<JobStatus>), Refusal> {
    let request: ExportVm = body(&bytes)?;
    let vm = show_vm(State(agent.clone()), Path(name)).await?.0;
    if vm.state != VmState::Stopped {
        let message = format!("cannot export VM \"{}\": it is {}", vm.name, vm.state);
        return Err(ApiError::new(ErrorCode::WrongState, message, "stop it").into());
    }
    let file = |ending: &str| request.to.join(format!("{}{ending}", vm.name));
    let files = match request.format {
        ExportFormat::Libvirt => vec![file("-disk0.qcow2"), file(".xml")],
        ExportFormat::Ova => vec![file(".ova")],
    };
    let job = Job {
        id: Uuid::new_v4().to_string(),
        at: agent.at,
        kind: JobKind::Export,
        place: request.to.display().to_string(),
        spec: vm.spec,
        takes_disks: false,
        starts: false,
        step: None,
        files,
        moves: None,
        is_refused: false,
        begun: Instant::now(),
        is_cancelled: false,
        made: None,
    };
    Ok(agent.begin_job(job))
}

/// Moves a disk of a VM: it has another image when the copy is complete.
pub(super) async fn move_disk(
    State(agent): State<Agent>,
    Path(name): Path<String>,
    bytes: Bytes,
) -> Result<(StatusCode, Json<JobStatus>), Refusal> {
    let request: MoveDisk = body(&bytes)?;
    agent.settle_imports();
    let vm = show_vm(State(agent.clone()), Path(name)).await?.0;
    let refused = |code, why: &str| {
        let message = format!("cannot move disk {}: {why}", request.disk.display());
        Refusal::from(ApiError::new(code, message, "see `godwit vm show`"))
    };
    let Some(disk) = vm.spec.disks.iter().find(|disk| disk.path == request.disk) else {
        return Err(refused(ErrorCode::NotFound, "the VM has no such disk"));
    };
    let image = image_after(&request, disk.format);
    let is_moving = |job: &Job| {
        job.at == agent.at
            && job.moves.is_some()
            && job.spec.name == vm.name
            && job.state() == JobState::Running
    };
    if agent.shared.imports.lock().begun.iter().any(is_moving) {
        return Err(refused(ErrorCode::Busy, "another disk of the VM moves"));
    }
    let job = Job {
        id: Uuid::new_v4().to_string(),
        at: agent.at,
        kind: JobKind::DiskMove,
        place: request.to.display().to_string(),
        spec: vm.spec,
        takes_disks: false,
        starts: false,
        step: None,
        files: vec![image],
        moves: Some(request.disk),
        is_refused: false,
        begun: Instant::now(),
        is_cancelled: false,
        made: None,
    };
    Ok(agent.begin_job(job))
}

/// Returns the image of a disk after a move, as an agent names it: in a pool without an ending.
fn image_after(request: &MoveDisk, format: DiskFormat) -> PathBuf {
    let stem = request.disk.file_stem().unwrap_or_default();
    if is_rbd(&request.to) {
        return request.to.join(stem);
    }
    let format = request.format.unwrap_or(format);
    request.to.join(format!("{}.{}", stem.display(), format.name()))
}

/// Lists imports, exports and adoptions, the oldest first.
pub(super) async fn list(State(agent): State<Agent>) -> Json<Vec<JobSummary>> {
    agent.settle_imports();
    let mut all = adoption::summaries(&agent);
    let imports = agent.shared.imports.lock();
    all.extend(imports.begun.iter().filter(|job| job.at == agent.at).map(Job::summary));
    all.sort_by_key(|job| job.begun_unix_ms);
    Json(all)
}

fn unknown(id: &str) -> ApiError {
    let message = format!("cannot find job \"{id}\" on this host");
    ApiError::new(ErrorCode::NotFound, message, "check the ID: a restarted agent has forgotten it")
}

pub(super) async fn show(State(agent): State<Agent>, Path(id): Path<String>) -> Answer<JobStatus> {
    agent.settle_imports();
    let imports = agent.shared.imports.lock();
    let job = imports.begun.iter().find(|job| job.at == agent.at && job.id == id);
    Ok(Json(job.ok_or_else(|| unknown(&id))?.shown()))
}

pub(super) async fn cancel(
    State(agent): State<Agent>,
    Path(id): Path<String>,
) -> Result<StatusCode, Refusal> {
    agent.settle_imports();
    let mut imports = agent.shared.imports.lock();
    let job = imports.begun.iter_mut().find(|job| job.at == agent.at && job.id == id);
    let job = job.ok_or_else(|| unknown(&id))?;
    job.is_cancelled |= job.state() == JobState::Running;
    Ok(StatusCode::NO_CONTENT)
}
