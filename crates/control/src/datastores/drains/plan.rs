//! Facts for the plan of a drain of a datastore: the disks in it, as their hosts describe them, and
//! the datastores that they may go to.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::Duration;

use futures::{StreamExt, stream};
use godwit_api::control::{DrainDiskState, Problem};
use godwit_api::{Client, DiskInfo, VmState};
use godwit_planner::disk_drain::{DiskPlan, LeavingDisk, TargetStore, plan_disks};
use godwit_qemu::{DiskFormat, is_rbd};

use super::state::{Progress, StoreDisk, Target};
use crate::agents::AgentClients;
use crate::cluster::inventory::Inventory;
use crate::cluster::inventory::datastores::DiskInDatastore;
use crate::cluster::inventory::disk_places::HostPlace;

/// Most agents that are asked at once.
const MOST_ASKED: usize = 16;
/// Longest time for an agent to describe an image.
const ASK_LIMIT: Duration = Duration::from_secs(30);

/// Plans where each disk of a datastore goes. `to`: IDs of the datastores that they may go to;
/// empty: all others that are no pools of Ceph.
pub(super) async fn planned(
    agents: &AgentClients,
    datastore: &str,
    to: &BTreeSet<String>,
    flatten: bool,
) -> Vec<StoreDisk> {
    let disks = agents.state.inventory().disks_in(datastore);
    let mut asked = Vec::new();
    for disk in &disks {
        asked.push(described(client_for(agents, disk), disk.path.clone()));
    }
    let described: Vec<Result<DiskInfo, String>> =
        stream::iter(asked).buffered(MOST_ASKED).collect().await;
    let inventory = agents.state.inventory();
    let leaving: Vec<LeavingDisk> = disks
        .iter()
        .zip(&described)
        .map(|(disk, found)| leaving(disk, found, flatten, &inventory))
        .collect();
    let hosts: BTreeSet<&String> = disks.iter().map(|disk| &disk.host).collect();
    let targets: BTreeMap<String, Vec<TargetStore>> = hosts
        .into_iter()
        .map(|host| (host.clone(), targets(host, datastore, to, &inventory)))
        .collect();
    let plans = plan_disks(&leaving, &targets);
    let all = disks.into_iter().zip(described).zip(plans);
    all.map(|((disk, found), plan)| {
        let base = found.ok().and_then(|found| found.backing).filter(|_| !flatten);
        let of_host = targets.get(&disk.host).map(Vec::as_slice).unwrap_or_default();
        let format = format_of(&disk, &inventory);
        store_disk(disk, plan, of_host, (format, base))
    })
    .collect()
}

fn store_disk(
    disk: DiskInDatastore,
    plan: DiskPlan,
    targets: &[TargetStore],
    (format, base): (Option<DiskFormat>, Option<String>),
) -> StoreDisk {
    let mut format_back = None;
    let (state, reason, to) = match plan {
        DiskPlan::Stays { why } => (DrainDiskState::Stays, why, None),
        DiskPlan::Goes { target, why } => {
            let stays = base.map(|base| format!("; its base {base} stays")).unwrap_or_default();
            let to = targets.get(target);
            // In a pool it is raw.
            format_back = to.filter(|to| to.is_pool).and(format);
            let to = to.map(|to| Target { id: to.id.clone(), name: to.candidate.name.clone() });
            (DrainDiskState::Waiting, format!("{why}{stays}"), to)
        }
    };
    let DiskInDatastore { vm, host, path, readonly: _ } = disk;
    StoreDisk {
        vm,
        host,
        path,
        state,
        reason,
        to,
        image: None,
        job: None,
        returns: false,
        format_back,
        progress: Progress::default(),
    }
}

/// Returns the format of a disk.
fn format_of(disk: &DiskInDatastore, inventory: &Inventory) -> Option<DiskFormat> {
    let disks = &inventory.vm_info(&disk.vm)?.spec.disks;
    disks.iter().find(|one| one.path == disk.path).map(|one| one.format)
}

/// Returns a client of the host that can describe a disk.
fn client_for(agents: &AgentClients, disk: &DiskInDatastore) -> Result<Client, String> {
    if disk.readonly || !agents.state.inventory().is_up(&disk.host) {
        return Err("no request was sent to its host".to_owned());
    }
    agents.client_of(&disk.host).map_err(|problem| problem.detail)
}

async fn described(client: Result<Client, String>, path: PathBuf) -> Result<DiskInfo, String> {
    match tokio::time::timeout(ASK_LIMIT, client?.disk(&path)).await {
        Ok(Ok(found)) => Ok(found),
        Ok(Err(error)) => Err(Problem::from(error).detail),
        Err(_) => Err(format!("no answer within {} s", ASK_LIMIT.as_secs())),
    }
}

fn leaving(
    disk: &DiskInDatastore,
    found: &Result<DiskInfo, String>,
    flatten: bool,
    inventory: &Inventory,
) -> LeavingDisk {
    let vm = inventory.vm_info(&disk.vm);
    let immovable = if disk.readonly {
        Some("the VM only reads it, as others may: move the file by hand".to_owned())
    } else if !inventory.is_up(&disk.host) {
        Some(format!("host {} is away", disk.host))
    } else if vm.is_some_and(|vm| vm.state == VmState::Template) {
        Some("its VM is a template, which is never changed".to_owned())
    } else if vm.is_some_and(|vm| vm.snapshots > 0) {
        Some("its VM has snapshots, which refer to the image: delete them first".to_owned())
    } else if vm.is_some_and(|vm| vm.spec.protect_by_agents) {
        Some("agents restart its VM from here: end its protect_by_agents first".to_owned())
    } else {
        found.as_ref().err().map(|why| format!("its host cannot describe it: {why}"))
    };
    let is_sparse = vm
        .and_then(|vm| vm.spec.disks.iter().find(|one| one.path == disk.path))
        .is_some_and(|one| one.discard);
    // What an image in a pool takes is not known.
    let is_known = !is_rbd(&disk.path);
    let needed_bytes = found.as_ref().map_or(0, |found| match is_sparse && is_known && !flatten {
        true => found.used_bytes.min(found.virtual_bytes),
        // Without discard, zeros are written.
        false => found.virtual_bytes,
    });
    let is_layer = !flatten && found.as_ref().is_ok_and(|found| found.backing.is_some());
    LeavingDisk { host: disk.host.clone(), needed_bytes, is_layer, immovable }
}

/// Returns the datastores of a host that disks may go to: pools of Ceph only if they are named.
fn targets(
    host: &str,
    from: &str,
    to: &BTreeSet<String>,
    inventory: &Inventory,
) -> Vec<TargetStore> {
    let may = |place: &HostPlace| {
        let is_wanted = if to.is_empty() { !is_rbd(&place.dir) } else { to.contains(&place.id) };
        place.id != from && is_wanted
    };
    let places = inventory.places(host).into_iter().filter(may);
    places
        .map(|HostPlace { dir, id, candidate }| {
            let pool = pool_of(&dir);
            let (is_pool, space) = (pool.is_some(), pool.unwrap_or_else(|| id.clone()));
            TargetStore { id, space, is_pool, candidate }
        })
        .collect()
}

/// Returns the pool of a namespace, or the pool itself: its namespaces share its space. `None`: a
/// directory.
fn pool_of(place: &Path) -> Option<String> {
    let name = place.to_str().filter(|_| is_rbd(place))?;
    Some(name.split_once('/').map_or(name, |(pool, _)| pool).to_owned())
}
