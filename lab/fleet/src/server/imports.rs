//! Imports at a simulated host: each definition has one disk and a NIC in the network
//! `VM Network`, for which the request has to name one of the host. The copy of the disk takes two
//! seconds. There are no exports.

use std::collections::VecDeque;
use std::path::{Path as FilePath, PathBuf};
use std::time::{Duration, Instant};

use axum::Json;
use axum::body::Bytes;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use godwit_api::{
    ApiError, CreateVm, ErrorCode, ImportDisk, ImportFinding, ImportFrom, ImportPlan, ImportVm,
    JobState, JobStatus, VmInfo,
};
use godwit_qemu::{Uuid, VmName, VmSpec};
use serde_json::json;

use super::{Agent, Answer, Refusal, body};

const DISK_BYTES: u64 = 20 << 30;
const COPY: Duration = Duration::from_secs(2);
/// Most jobs that are kept.
const MOST_KEPT: usize = 64;

/// Jobs of all hosts, the oldest first.
#[derive(Debug, Default)]
pub(super) struct Imports {
    begun: VecDeque<Job>,
}

#[derive(Debug)]
struct Job {
    id: String,
    /// Number of the host.
    at: usize,
    spec: VmSpec,
    takes_disks: bool,
    is_dry_run: bool,
    starts: bool,
    is_refused: bool,
    begun: Instant,
    is_cancelled: bool,
    /// What became of the VM.
    made: Option<Result<VmInfo, ApiError>>,
}

impl Job {
    fn is_copied(&self) -> bool {
        self.takes_disks || self.begun.elapsed() >= COPY
    }

    fn state(&self) -> JobState {
        match &self.made {
            _ if self.is_cancelled => JobState::Cancelled,
            _ if self.is_refused => JobState::Failed,
            _ if self.is_dry_run => JobState::Done,
            None => JobState::Running,
            Some(Ok(_)) => JobState::Done,
            Some(Err(_)) => JobState::Failed,
        }
    }

    fn shown(&self) -> JobStatus {
        let passed_ms = u64::try_from(self.begun.elapsed().min(COPY).as_millis()).unwrap_or(0);
        let copied = if self.is_dry_run { 0 } else { DISK_BYTES / 2000 * passed_ms.min(2000) };
        let error = match &self.made {
            _ if self.is_refused => Some(refused(&self.spec.name)),
            Some(Err(error)) => Some(error.clone()),
            _ => None,
        };
        JobStatus {
            id: self.id.clone(),
            state: self.state(),
            done_bytes: copied,
            total_bytes: DISK_BYTES,
            written_bytes: copied,
            findings: findings(self.is_refused),
            plan: Some(plan(self.spec.clone())),
            vm: self.made.as_ref().and_then(|made| made.as_ref().ok().cloned()),
            files: Vec::new(),
            error,
        }
    }
}

fn refused(name: &str) -> ApiError {
    let message = format!("cannot import VM \"{name}\": NIC 1: network \"VM Network\" is unknown");
    let remedy = "change the refused parts on the old platform; nothing was created here";
    ApiError::new(ErrorCode::Preflight, message, remedy)
}

fn findings(is_refused: bool) -> Vec<ImportFinding> {
    let finding = |what: &str, why: &str, refuses| ImportFinding {
        what: what.to_owned(),
        why: why.to_owned(),
        refuses,
    };
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
        for job in &mut imports.begun {
            if job.at == self.at && job.state() == JobState::Running && job.is_copied() {
                let create = CreateVm::new(job.spec.clone(), job.starts);
                job.made = Some(self.shared.world().create_vm(self.at, create));
            }
        }
    }
}

pub(super) async fn begin(
    State(agent): State<Agent>,
    bytes: Bytes,
) -> Result<(StatusCode, Json<JobStatus>), Refusal> {
    let request: ImportVm = body(&bytes)?;
    let name = request.name.clone().unwrap_or_else(|| name_in(&request.from));
    let job = Job {
        id: Uuid::new_v4().to_string(),
        at: agent.at,
        spec: spec_named(&name)?,
        takes_disks: request.take_disks,
        is_dry_run: request.dry_run,
        starts: request.start,
        is_refused: request.networks.is_empty(),
        begun: Instant::now(),
        is_cancelled: false,
        made: None,
    };
    let shown = job.shown();
    let mut imports = agent.shared.imports.lock();
    if imports.begun.len() >= MOST_KEPT {
        imports.begun.pop_front();
    }
    imports.begun.push_back(job);
    Ok((StatusCode::ACCEPTED, Json(shown)))
}

fn unknown(id: &str) -> ApiError {
    let message = format!("no job \"{id}\" on this host");
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

pub(super) async fn no_export() -> Refusal {
    let message = "a simulated host has no exports";
    ApiError::new(ErrorCode::NotFound, message, "use a host").into()
}
