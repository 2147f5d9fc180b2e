//! Guests of another program at the first two simulated hosts, and their adoption. Its course is a
//! function of the time since its begin: a small guest is adopted within seconds, and `db` takes
//! long enough to be cancelled.

use std::collections::BTreeMap;
use std::path::Path as FilePath;
use std::time::{Duration, Instant};

use axum::Json;
use axum::body::Bytes;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use godwit_api::{
    AdoptGuest, Adoption, AdoptionState, ApiError, CreateVm, ErrorCode, ForeignGuest, ForeignPlace,
    JobKind, JobState, JobSummary,
};
use godwit_qemu::VmName;
use godwit_types::{Fault, Phase};
use serde_json::json;

use super::{Agent, Answer, Refusal, body, unix_ms_of};

const GIB: u64 = 1 << 30;
/// Name and memory of the guests that can be adopted, by the number of the host.
const POSSIBLE: [&[(&str, u64)]; 2] = [&[("db", 256 * GIB), ("web", 2 * GIB)], &[("crm", GIB)]];
/// Names of the guests of the first host that cannot be adopted.
const REFUSED: [&str; 2] = ["gpu", "mail"];
/// Time until memory is sent, and the rate at which it is.
const PREPARED_AFTER: Duration = Duration::from_millis(600);
const BYTES_PER_MS: u64 = 1_000_000;
const PAUSE_MS: f64 = 21.4;
/// Most adoptions that are kept.
const MOST_KEPT: usize = 64;

/// Adoptions of all hosts, by the number of their ID and that of the host.
#[derive(Debug, Default)]
pub(super) struct Adoptions {
    begun: BTreeMap<(u64, usize), Course>,
}

#[derive(Debug)]
struct Course {
    request: AdoptGuest,
    name: String,
    memory_bytes: u64,
    begun: Instant,
    /// Time of the cancellation, since the begin.
    cancelled: Option<Duration>,
    is_vm_made: bool,
}

impl Course {
    fn lasts(&self) -> Duration {
        PREPARED_AFTER + Duration::from_millis(self.memory_bytes / BYTES_PER_MS)
    }

    fn is_complete(&self) -> bool {
        self.cancelled.is_none() && self.begun.elapsed() >= self.lasts()
    }

    fn shown(&self, number: u64) -> Adoption {
        let elapsed = self.cancelled.unwrap_or_else(|| self.begun.elapsed()).min(self.lasts());
        let sending_ms = elapsed.saturating_sub(PREPARED_AFTER).as_millis();
        let sent = u64::try_from(sending_ms).unwrap_or(u64::MAX).saturating_mul(BYTES_PER_MS);
        let (state, phase) = match self.cancelled {
            Some(_) => (AdoptionState::Cancelled, Phase::Report),
            None if self.is_complete() => (AdoptionState::Completed, Phase::Report),
            None if elapsed < PREPARED_AFTER / 2 => (AdoptionState::Running, Phase::Preflight),
            None if elapsed < PREPARED_AFTER => (AdoptionState::Running, Phase::Prepare),
            None => (AdoptionState::Running, Phase::PreCopy),
        };
        let is_complete = state == AdoptionState::Completed;
        Adoption {
            id: format!("adoption-{number}"),
            from: self.request.from.clone(),
            vm: self.name.clone(),
            state,
            phase,
            remaining_bytes: if is_complete { 0 } else { self.memory_bytes.saturating_sub(sent) },
            total_bytes: self.memory_bytes,
            elapsed_ms: elapsed.as_secs_f64() * 1e3,
            pause_ms: is_complete.then_some(PAUSE_MS),
            notes: if is_complete { notes(&self.request) } else { Vec::new() },
            findings: Vec::new(),
            error: self.cancelled.map(|_| Fault::new("cancelled", "it was cancelled", "")),
        }
    }
}

/// Returns what an agent reports of the other program's definition.
fn notes(request: &AdoptGuest) -> Vec<String> {
    match &request.from {
        ForeignPlace::Libvirt(name) if request.undefine => {
            vec![format!("libvirt's domain \"{name}\" is off, and its definition is removed")]
        }
        ForeignPlace::Libvirt(name) => vec![format!(
            "libvirt's domain \"{name}\" is off and still defined: do not start it; `virsh \
             undefine --keep-nvram {name}` removes its definition"
        )],
        ForeignPlace::Qmp(_) => Vec::new(),
    }
}

fn guest(from: ForeignPlace, name: &str, memory_bytes: u64) -> ForeignGuest {
    ForeignGuest {
        from,
        name: name.to_owned(),
        uuid: None,
        state: "running".to_owned(),
        pid: Some(4711),
        memory_bytes: Some(memory_bytes),
        vcpus: Some(2),
        findings: Vec::new(),
    }
}

fn refused(name: &str) -> ForeignGuest {
    let mut guest = guest(ForeignPlace::Libvirt(name.to_owned()), name, 16 * GIB);
    if name == "mail" {
        guest.state = "shut off".to_owned();
        (guest.pid, guest.memory_bytes, guest.vcpus) = (None, None, None);
        let message = "libvirt's domain \"mail\" does not run";
        guest.findings.push(Fault::new("not-running", message, "start it, or import the VM"));
        return guest;
    }
    let message = "device hostdev0 (vfio-pci) passes hardware of the host through";
    guest.findings.push(Fault::new("device", message, "unplug it"));
    let message = "NIC net0 is on bridge br9, which is in no network";
    let remedy = "add a network with that bridge to the agent's [networks]";
    guest.findings.push(Fault::new("network", message, remedy));
    guest
}

/// Returns a guest with what prevents its adoption.
fn examine(at: usize, from: &ForeignPlace) -> Result<ForeignGuest, ApiError> {
    let name = match from {
        ForeignPlace::Libvirt(name) => name.as_str(),
        // A simulated host has a QEMU behind each socket.
        ForeignPlace::Qmp(path) => {
            let name = FilePath::new(path).file_stem().unwrap_or(FilePath::new("qemu").as_os_str());
            return Ok(guest(from.clone(), &name.to_string_lossy(), GIB));
        }
    };
    let possible = POSSIBLE.get(at).and_then(|all| all.iter().find(|(known, _)| *known == name));
    if let Some((_, memory_bytes)) = possible {
        return Ok(guest(from.clone(), name, *memory_bytes));
    }
    if at == 0 && REFUSED.contains(&name) {
        return Ok(refused(name));
    }
    let message = format!("{from} does not exist");
    Err(ApiError::new(ErrorCode::NotFound, message, "see `godwit vm list --all`"))
}

impl Agent {
    /// Creates the VMs of adoptions that are complete.
    fn settle(&self) {
        let mut adoptions = self.shared.adoptions.lock();
        let here = adoptions.begun.iter_mut().filter(|((_, at), _)| *at == self.at);
        for (_, course) in here.filter(|(_, course)| course.is_complete() && !course.is_vm_made) {
            course.is_vm_made = true;
            let spec = json!({
                "name": course.name, "memory": course.memory_bytes.to_string(), "vcpus": 2,
                "kernel": "/srv/images/vmlinuz",
            });
            if let Ok(spec) = serde_json::from_value(spec) {
                // A VM of that name that was created meanwhile stays as it is.
                let _ = self.shared.world().create_vm(self.at, CreateVm::new(spec, true));
            }
        }
    }
}

pub(super) async fn found(State(agent): State<Agent>) -> Json<Vec<ForeignGuest>> {
    agent.settle();
    let here = POSSIBLE.get(agent.at).copied().unwrap_or_default();
    let possible = here
        .iter()
        .map(|(name, bytes)| guest(ForeignPlace::Libvirt((*name).to_owned()), name, *bytes));
    let refused = REFUSED.into_iter().filter(|_| agent.at == 0).map(refused);
    let adoptions = agent.shared.adoptions.lock();
    let is_adopted = |guest: &ForeignGuest| {
        let mut here = adoptions.begun.iter().filter(|((_, at), _)| *at == agent.at);
        here.any(|(_, course)| course.is_complete() && course.request.from == guest.from)
    };
    Json(possible.chain(refused).filter(|guest| !is_adopted(guest)).collect())
}

pub(super) async fn list(State(agent): State<Agent>) -> Json<Vec<Adoption>> {
    agent.settle();
    let adoptions = agent.shared.adoptions.lock();
    let here = adoptions.begun.iter().filter(|((_, at), _)| *at == agent.at);
    Json(here.map(|((number, _), course)| course.shown(*number)).collect())
}

/// Returns the adoptions of a host as long work.
pub(super) fn summaries(agent: &Agent) -> Vec<JobSummary> {
    agent.settle();
    let adoptions = agent.shared.adoptions.lock();
    let here = adoptions.begun.iter().filter(|((_, at), _)| *at == agent.at);
    let summary = |((number, _), course): (&(u64, usize), &Course)| {
        let shown = course.shown(*number);
        let state = match shown.state {
            AdoptionState::Running => JobState::Running,
            AdoptionState::Completed => JobState::Done,
            AdoptionState::Failed => JobState::Failed,
            AdoptionState::Cancelled => JobState::Cancelled,
        };
        let begun_unix_ms = unix_ms_of(course.begun);
        JobSummary {
            id: shown.id,
            kind: JobKind::Adoption,
            vm: shown.vm,
            place: shown.from.to_string(),
            state,
            done_bytes: shown.total_bytes - shown.remaining_bytes,
            total_bytes: shown.total_bytes,
            begun_unix_ms,
            ended_unix_ms: (state != JobState::Running).then_some(begun_unix_ms),
            error: shown.error,
        }
    };
    here.map(summary).collect()
}

pub(super) async fn check(State(agent): State<Agent>, bytes: Bytes) -> Answer<ForeignGuest> {
    let request: AdoptGuest = body(&bytes)?;
    let mut guest = examine(agent.at, &request.from)?;
    let name = request.name.as_deref().unwrap_or(&guest.name);
    let is_taken = agent.shared.world().host(agent.at).is_some_and(|h| h.vms.contains_key(name));
    if is_taken {
        let message = format!("a VM \"{name}\" exists");
        guest.findings.push(Fault::new("already-exists", message, "give it another name"));
    }
    Ok(Json(guest))
}

pub(super) async fn adopt(
    State(agent): State<Agent>,
    bytes: Bytes,
) -> Result<(StatusCode, Json<Adoption>), Refusal> {
    let request: AdoptGuest = body(&bytes)?;
    let guest = examine(agent.at, &request.from)?;
    if let Some(first) = guest.findings.first() {
        let message = format!("cannot adopt {}: {}", request.from, first.message);
        return Err(ApiError::new(ErrorCode::Preflight, message, first.remedy.clone()).into());
    }
    let name = VmName::new(request.name.clone().unwrap_or(guest.name));
    let name = name.map_err(|e| ApiError::new(ErrorCode::InvalidRequest, e.to_string(), ""))?;
    let mut adoptions = agent.shared.adoptions.lock();
    let number = adoptions.begun.keys().map(|(number, _)| number + 1).max().unwrap_or(1);
    let course = Course {
        name: name.to_string(),
        memory_bytes: guest.memory_bytes.unwrap_or(GIB),
        request,
        begun: Instant::now(),
        cancelled: None,
        is_vm_made: false,
    };
    let shown = course.shown(number);
    adoptions.begun.insert((number, agent.at), course);
    while adoptions.begun.len() > MOST_KEPT {
        adoptions.begun.pop_first();
    }
    Ok((StatusCode::ACCEPTED, Json(shown)))
}

fn number_of(id: &str) -> Option<u64> {
    id.strip_prefix("adoption-")?.parse().ok()
}

fn unknown(id: &str) -> ApiError {
    let message = format!("cannot find adoption \"{id}\" on this host");
    ApiError::new(ErrorCode::NotFound, message, "check the ID: a restarted agent has forgotten it")
}

pub(super) async fn show(State(agent): State<Agent>, Path(id): Path<String>) -> Answer<Adoption> {
    agent.settle();
    let number = number_of(&id).ok_or_else(|| unknown(&id))?;
    let adoptions = agent.shared.adoptions.lock();
    let course = adoptions.begun.get(&(number, agent.at)).ok_or_else(|| unknown(&id))?;
    Ok(Json(course.shown(number)))
}

pub(super) async fn cancel(
    State(agent): State<Agent>,
    Path(id): Path<String>,
) -> Result<StatusCode, Refusal> {
    let number = number_of(&id).ok_or_else(|| unknown(&id))?;
    let mut adoptions = agent.shared.adoptions.lock();
    let course = adoptions.begun.get_mut(&(number, agent.at)).ok_or_else(|| unknown(&id))?;
    if course.is_complete() {
        let message =
            format!("cannot cancel adoption {id}: the guest is handed over, and Godwit runs it");
        return Err(ApiError::new(ErrorCode::WrongState, message, "").into());
    }
    course.cancelled.get_or_insert(course.begun.elapsed());
    Ok(StatusCode::NO_CONTENT)
}
