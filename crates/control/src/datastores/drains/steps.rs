//! Steps of a drain at the hosts: a move begins, is looked at, or is cancelled. An agent may not
//! answer, and a job may be forgotten by an agent that was restarted: then where the VM's disk is
//! tells whether it has moved.

use std::path::{Path, PathBuf};
use std::time::Duration;

use futures::future::join_all;
use godwit_api::control::{DrainDiskState, Problem, ProblemCode};
use godwit_api::{Client, ClientError, ErrorCode, JobState, JobStatus, MoveDisk};
use godwit_qemu::{is_rbd, pool_stem};
use godwit_types::RateLimit;
use tokio::time::timeout;

use super::state::{Load, StoreDisk, StoreDrain};
use crate::agents::AgentClients;
use crate::clock::now_unix_ms;
use crate::cluster::bounds::MOST_REASON_BYTES;
use crate::cluster::inventory::Inventory;
use crate::cluster::text::beginning;

/// Longest time for an agent to answer.
const ANSWER_LIMIT: Duration = Duration::from_secs(5);
/// Longest time for an agent to cancel a move.
const CANCEL_LIMIT: Duration = Duration::from_secs(30);
/// Time before a move that was refused for now is requested again.
const RETRY_MS: u64 = 5_000;
/// Time after which a host has reported where the disks of its VMs are.
const LOOK_AGAIN_MS: u64 = 2_000;
/// Most refusals of one move.
const MOST_REFUSALS: u32 = 60;

/// How an agent sees a move.
enum Seen {
    Job(Box<JobStatus>),
    /// The agent does not know the job.
    Forgotten,
    /// It does not answer.
    Silent,
}

/// Where the disk of a VM is.
enum Whereabouts {
    /// At the image from which it is to move, on this host.
    Before { host: String },
    /// In the datastore that it is to go to.
    After { image: PathBuf },
    /// The VM is gone, or has neither image.
    Unknown { why: String },
}

/// Looks at the moves in progress.
pub(super) async fn look(agents: &AgentClients, drain: &mut StoreDrain) {
    let moving: Vec<usize> = moving(drain).collect();
    let mut asked = Vec::new();
    for index in &moving {
        let disk = &drain.disks[*index];
        asked.push(seen(agents.client_of(&disk.host), disk.job.clone().unwrap_or_default()));
    }
    for (index, seen) in moving.into_iter().zip(join_all(asked).await) {
        apply_report(agents, drain, index, seen);
    }
}

fn moving(drain: &StoreDrain) -> impl Iterator<Item = usize> {
    let all = drain.disks.iter().enumerate();
    all.filter(|(_, disk)| disk.state == DrainDiskState::Moving).map(|(index, _)| index)
}

async fn seen(client: Result<Client, Problem>, job: String) -> Seen {
    let Ok(client) = client else { return Seen::Silent };
    match timeout(ANSWER_LIMIT, client.job(&job)).await {
        Ok(Ok(status)) => Seen::Job(Box::new(status)),
        Ok(Err(ClientError::Refused(error))) if error.code == ErrorCode::NotFound => {
            Seen::Forgotten
        }
        Ok(Err(_)) | Err(_) => Seen::Silent,
    }
}

/// Takes in what an agent says of a move.
fn apply_report(agents: &AgentClients, drain: &mut StoreDrain, index: usize, seen: Seen) {
    let datastore = drain.datastore.clone();
    let disk = &mut drain.disks[index];
    let status = match seen {
        Seen::Job(status) => *status,
        Seen::Silent => return,
        Seen::Forgotten => {
            if is_unseen(disk, &agents.state.inventory()) {
                return;
            }
            // The agent was restarted, which ends a move or completes it.
            disk.job = None;
            match whereabouts(disk, &datastore, &agents.state.inventory()) {
                Whereabouts::After { image } => disk.end_moved(image),
                Whereabouts::Before { .. } => wait(disk, "its host's agent was restarted"),
                Whereabouts::Unknown { why } => disk.end_unmoved(&why),
            }
            return;
        }
    };
    disk.progress.total_bytes = status.total_bytes;
    disk.progress.done_bytes = status.done_bytes;
    match (status.state, status.files.into_iter().next()) {
        (JobState::Running, _) => {}
        (JobState::Done, Some(image)) => disk.end_moved(image),
        (JobState::Done, None) => disk.end_unmoved("the host reports no image for it"),
        (JobState::Cancelled, _) => disk.end_unmoved("its move was cancelled"),
        (JobState::Failed, _) => {
            let error = status.error.map(|error| (error.code, error.to_string()));
            let (code, why) = error.unwrap_or((ErrorCode::Unknown, "its move failed".to_owned()));
            match code {
                ErrorCode::Busy => wait(disk, &why),
                _ => disk.end_unmoved(&beginning(&why, MOST_REASON_BYTES)),
            }
        }
    }
}

/// Whether the VM of a disk may be at a host that has not reported.
fn is_unseen(disk: &StoreDisk, inventory: &Inventory) -> bool {
    inventory.vm_info(&disk.vm).is_none() && inventory.unreachable_host().is_some()
}

/// Puts a move off.
fn wait(disk: &mut StoreDisk, why: &str) {
    disk.progress.refused += 1;
    if disk.progress.refused > MOST_REFUSALS {
        disk.end_unmoved(&beginning(why, MOST_REASON_BYTES));
        return;
    }
    disk.state = DrainDiskState::Waiting;
    disk.job = None;
    disk.progress.not_before_ms = now_unix_ms() + RETRY_MS;
    disk.reason = beginning(&format!("waits: {why}"), MOST_REASON_BYTES);
}

/// Begins the moves that are due.
pub(super) async fn start(agents: &AgentClients, drain: &mut StoreDrain, load: &mut Load) {
    let (datastore, flatten, limit) =
        (drain.datastore.clone(), drain.flatten, drain.bandwidth_limit);
    for index in drain.due(load, now_unix_ms()) {
        let disk = &mut drain.disks[index];
        if is_unseen(disk, &agents.state.inventory()) {
            disk.progress.not_before_ms = now_unix_ms() + LOOK_AGAIN_MS;
            continue;
        }
        let request = match request(disk, &datastore, &agents.state.inventory()) {
            Ok(Some(request)) => MoveDisk { flatten, ..with_limit(request, limit) },
            // It has moved already, or may have.
            Ok(None) => continue,
            Err(why) => {
                disk.end_unmoved(&why);
                continue;
            }
        };
        match begun(agents, disk, &request).await {
            Ok(job) => {
                disk.state = DrainDiskState::Moving;
                disk.job = Some(job.id);
                disk.progress.total_bytes = job.total_bytes;
            }
            Err(problem) if is_passing(&problem) => wait(disk, &problem.to_string()),
            Err(problem) => {
                disk.end_unmoved(&beginning(&problem.to_string(), MOST_REASON_BYTES));
            }
        }
    }
}

fn with_limit(request: MoveDisk, bandwidth_limit: Option<RateLimit>) -> MoveDisk {
    MoveDisk { bandwidth_limit, ..request }
}

/// Returns the request for the move of a disk at the host that has its VM now. `None`: it has
/// moved, or that is to be seen.
fn request(
    disk: &mut StoreDisk,
    datastore: &str,
    inventory: &Inventory,
) -> Result<Option<MoveDisk>, String> {
    match whereabouts(disk, datastore, inventory) {
        Whereabouts::Unknown { why } => Err(why),
        // The host's report may be from before the last move.
        Whereabouts::After { .. } if disk.progress.refused == 0 => {
            disk.progress.refused = 1;
            disk.progress.not_before_ms = now_unix_ms() + LOOK_AGAIN_MS;
            Ok(None)
        }
        Whereabouts::After { image } => {
            disk.end_moved(image);
            Ok(None)
        }
        Whereabouts::Before { host } => {
            disk.host = host;
            let to = if disk.returns { datastore } else { target_of(disk)? };
            // Its VM may be at a host that has another datastore or pool under that name by now.
            let before = disk.path.parent().filter(|_| disk.returns);
            let before = before.filter(|dir| inventory.datastore_at(&disk.host, dir) == to);
            let dir = before.map(Path::to_owned).or_else(|| inventory.dir_of(&disk.host, to));
            let dir = dir.ok_or_else(|| format!("host {} does not have it", disk.host))?;
            inventory.check_takes_disks(&disk.host, &dir).map_err(|problem| problem.detail)?;
            let format = disk.format_back.filter(|_| disk.returns);
            Ok(Some(MoveDisk { format, delete_source: true, ..MoveDisk::new(disk.present(), dir) }))
        }
    }
}

fn target_of(disk: &StoreDisk) -> Result<&str, String> {
    disk.to.as_ref().map(|to| to.id.as_str()).ok_or_else(|| "it has no target".to_owned())
}

fn whereabouts(disk: &StoreDisk, datastore: &str, inventory: &Inventory) -> Whereabouts {
    let unknown = |why: String| Whereabouts::Unknown { why };
    let Some(vm) = inventory.vm_info(&disk.vm) else {
        return unknown(format!("VM {} is gone", disk.vm));
    };
    if vm.spec.disks.iter().any(|one| one.path == *disk.present()) {
        return Whereabouts::Before { host: vm.host.clone() };
    }
    let to = if disk.returns { Ok(datastore) } else { target_of(disk) };
    // The agent gives it the old one's name, with a number where that is taken.
    let is_it = |path: &&Path| {
        let dir = path.parent().unwrap_or(Path::new("/"));
        is_named_after(path, disk.present())
            && to.as_ref().is_ok_and(|to| inventory.datastore_at(&vm.host, dir) == *to)
    };
    match vm.spec.disks.iter().map(|one| one.path.as_path()).find(is_it) {
        Some(image) => Whereabouts::After { image: image.to_owned() },
        None => unknown(format!("VM {} no longer has it", disk.vm)),
    }
}

/// Whether an image has a name that an agent gives to one that is moved from another.
fn is_named_after(image: &Path, old: &Path) -> bool {
    let stem = old.file_stem().unwrap_or_default().to_string_lossy();
    // An image in a pool has no ending.
    let (name, stem) = match is_rbd(image) {
        true => (image.file_name(), pool_stem(&stem)),
        false => (image.file_stem(), stem.into_owned()),
    };
    let name = name.unwrap_or_default().to_string_lossy();
    name.strip_prefix(&stem).is_some_and(is_number)
}

/// Whether the rest of a name is empty, or a number as the agent appends it (`-1`).
fn is_number(rest: &str) -> bool {
    let number = rest.strip_prefix('-');
    rest.is_empty() || number.is_some_and(|number| number.parse::<u32>().is_ok())
}

async fn begun(
    agents: &AgentClients,
    disk: &StoreDisk,
    request: &MoveDisk,
) -> Result<JobStatus, Problem> {
    let client = agents.client_of(&disk.host)?;
    // The agent knows the VMs of its own host alone.
    agents.check_elsewhere("delete", &disk.host, &request.disk).await?;
    match timeout(ANSWER_LIMIT, client.move_disk(&disk.vm, request)).await {
        Ok(job) => Ok(job?),
        Err(_) => {
            let detail = format!("host {} does not answer", disk.host);
            let remedy = "check the host's agent and its network";
            Err(Problem::new(ProblemCode::HostAway, detail, remedy))
        }
    }
}

/// Whether a refusal may be over soon.
fn is_passing(problem: &Problem) -> bool {
    let is_busy = matches!(problem.cause, Some(ErrorCode::Busy | ErrorCode::WrongState));
    is_busy || matches!(problem.code, ProblemCode::HostAway | ProblemCode::WrongState)
}

/// Cancels the moves in progress. One that its host cannot be asked about counts as not moved: its
/// host undoes or completes it.
pub(super) async fn cancel_moving(agents: &AgentClients, drain: &mut StoreDrain) {
    let moving: Vec<usize> = moving(drain).collect();
    let mut asked = Vec::new();
    for index in &moving {
        let disk = &drain.disks[*index];
        asked.push(cancelled(agents.client_of(&disk.host), disk.job.clone().unwrap_or_default()));
    }
    for (index, seen) in moving.into_iter().zip(join_all(asked).await) {
        apply_report(agents, drain, index, seen);
        let disk = &mut drain.disks[index];
        if matches!(disk.state, DrainDiskState::Moving | DrainDiskState::Waiting) {
            disk.end_unmoved("its move was cancelled");
        }
    }
}

async fn cancelled(client: Result<Client, Problem>, job: String) -> Seen {
    let Ok(client) = client else { return Seen::Silent };
    // The answer comes when nothing of it remains, or it is done.
    let _ = timeout(CANCEL_LIMIT, client.cancel_job(&job)).await;
    seen(Ok(client), job).await
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::datastores::drains::state::tests::disk;
    use crate::rig;

    #[test]
    fn a_disk_returns_to_the_datastore_that_it_left_wherever_its_vm_is() {
        let (left, other) =
            ("1f0c4f9a-7f2c-4d7e-9c1e-5b8a8e3d2a10", "2f0c4f9a-7f2c-4d7e-9c1e-5b8a8e3d2a10");
        let back = |stores: &[(&str, &str)]| {
            let mut inventory = Inventory::default();
            let mut info = rig::host("b", None);
            for (dir, identity) in stores {
                info.vm_dirs.push((*dir).into());
                let found = json!({ "total_bytes": 9, "free_bytes": 9, "identity": identity });
                info.datastores.insert((*dir).into(), serde_json::from_value(found).unwrap());
            }
            let mut vm = rig::vm("web", "b", None);
            let disks = json!([{ "path": "/new/web.raw", "format": "raw" }]);
            vm.spec.disks = serde_json::from_value(disks).unwrap();
            rig::put_host(&mut inventory, info, &[], vec![vm]);
            let image = Some("/new/web.raw".into());
            let path = "rbd:vms/web".into();
            let mut disk = StoreDisk { path, image, returns: true, ..disk("web", "a", 0) };
            request(&mut disk, left, &inventory).map(|request| request.unwrap().to)
        };
        assert_eq!(back(&[("rbd:vms", left)]).unwrap(), Path::new("rbd:vms"));
        assert_eq!(back(&[("/x", other), ("/y", left)]).unwrap(), Path::new("/y"));
        // A pool of that name in another cluster.
        assert!(back(&[("rbd:vms", other)]).unwrap_err().contains("b does not have it"));
    }

    #[test]
    fn a_moved_image_is_known_by_its_name_in_pools_and_directories() {
        let is_it = |image: &str, old: &str| is_named_after(Path::new(image), Path::new(old));
        for (image, old) in [
            ("/fast/web.raw", "/old/web.qcow2"),
            ("/fast/web-2.qcow2", "/old/web.qcow2"),
            ("rbd:vms/web", "/old/web.qcow2"),
            ("rbd:vms/web.v2-1", "/old/web.v2.qcow2"),
            ("rbd:vms/shop/we-b", "/old/we b.raw"),
            ("/old/web.raw", "rbd:vms/web"),
            ("/old/web.raw", "rbd:vms/web.v2"),
        ] {
            assert!(is_it(image, old), "{image} {old}");
        }
        for (image, old) in [
            ("/fast/webs.raw", "/old/web.qcow2"),
            ("rbd:vms/web.qcow2", "/old/web.qcow2"),
            ("rbd:vms/web-a", "/old/web.qcow2"),
            ("rbd:vms/other", "/old/web.qcow2"),
        ] {
            assert!(!is_it(image, old), "{image} {old}");
        }
    }
}
