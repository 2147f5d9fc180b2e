//! Heartbeats of a host on its datastores: which there are, their opening and their reading, both
//! by other hosts.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use futures::future::join_all;
use godwit_api::{
    HeartbeatReading, HeartbeatSlot, HostInfo, MOST_HEARTBEAT_DATASTORES, OpenHeartbeat,
    ReadHeartbeats,
};
use godwit_ha::{Mark, Term};
use godwit_qemu::Uuid;
use tokio::time::timeout;

use super::seat::{Judged, Judging, Reading};
use crate::cluster::bounds::MOST_REASON_BYTES;
use crate::cluster::inventory::Inventory;
use crate::cluster::text::beginning;

/// Returns the datastores that can have heartbeats of a host, with the other hosts that are up and
/// have them. Those with disks of its protected VMs come first.
fn shared_datastores(inventory: &Inventory, host: &str) -> Vec<(Uuid, Vec<String>)> {
    let Some(info) = inventory.host_info(host) else { return Vec::new() };
    let own: BTreeSet<Uuid> = identities(info).collect();
    let protected = inventory.vms_of(host).filter(|vm| vm.spec.protect.is_some());
    let in_use: BTreeSet<String> = protected
        .flat_map(|vm| vm.spec.images().filter_map(|image| image.parent()))
        .map(|dir| inventory.datastore_at(host, dir))
        .collect();
    let mut found: Vec<(bool, Uuid, Vec<String>)> = Vec::new();
    for id in own {
        let readers = readers_of(inventory, host, id);
        if !readers.is_empty() {
            found.push((!in_use.contains(&id.to_string()), id, readers));
        }
    }
    found.sort();
    found.into_iter().map(|(_, id, readers)| (id, readers)).collect()
}

/// Returns whether a host reports a datastore that can have its heartbeats.
pub(super) fn are_reported(inventory: &Inventory, host: &str) -> bool {
    inventory.is_up(host) && !shared_datastores(inventory, host).is_empty()
}

/// Returns the hosts other than this one that are up and have a datastore.
fn readers_of(inventory: &Inventory, host: &str, id: Uuid) -> Vec<String> {
    let others = inventory.plans().map(|(name, _)| name);
    let has = |other: &str| {
        let info = inventory.host_info(other);
        info.is_some_and(|info| identities(info).any(|one| one == id))
    };
    others
        .filter(|other| *other != host && inventory.is_up(other) && has(other))
        .map(str::to_owned)
        .collect()
}

/// Returns the identities of a host's directories, as far as they are ones. A pool has no files for
/// heartbeats, and no absolute path.
fn identities(info: &HostInfo) -> impl Iterator<Item = Uuid> {
    let directories = info.datastores.iter().filter(|(path, _)| path.is_absolute());
    directories.filter_map(|(_, info)| info.identity.as_ref()?.parse().ok())
}

fn slot(judged: &Judged, datastore: Uuid) -> HeartbeatSlot {
    HeartbeatSlot { cluster: judged.holder.cluster, host: judged.holder.host, datastore }
}

/// Opens the heartbeats of a host's next term. Returns the datastores on which another host has
/// done that: others do not count.
pub(super) async fn open(
    judging: &Judging,
    judged: &Judged,
    term: Term,
    limit: Duration,
) -> Vec<Uuid> {
    let found = shared_datastores(&judging.means.state.inventory(), &judged.host);
    let opened = found.into_iter().map(|(datastore, readers)| async move {
        let request = OpenHeartbeat { slot: slot(judged, datastore), term: term.0 };
        for reader in readers.iter().take(2) {
            let Ok(client) = judging.means.agents.client_of(reader) else { continue };
            let why = match timeout(limit, client.ha_open_heartbeat(&request)).await {
                Ok(Ok(())) => return Some(datastore),
                Ok(Err(error)) => error.to_string(),
                Err(_) => "no answer".to_owned(),
            };
            let host = &judged.host;
            tracing::warn!(host, reader, %datastore, why, "cannot open a heartbeat");
        }
        None
    });
    // More are opened than are needed: some may fail.
    let opened = join_all(opened.take(2 * MOST_HEARTBEAT_DATASTORES)).await;
    opened.into_iter().flatten().take(MOST_HEARTBEAT_DATASTORES).collect()
}

/// Reads the heartbeats of a host's term. `turn` counts: each takes the next of the possible
/// readers, so that a failing one does not hide a silence.
pub(super) async fn read(judging: &Judging, judged: &Judged, turn: usize, limit: Duration) {
    let shown = judged.shown();
    let term = shown.record.term;
    let mut by_reader = BTreeMap::<String, Vec<(usize, HeartbeatSlot)>>::new();
    {
        let inventory = judging.means.state.inventory();
        for (place, datastore) in shown.datastores.iter().enumerate() {
            let readers = readers_of(&inventory, &judged.host, *datastore);
            let Some(at) = turn.checked_rem(readers.len()) else { continue };
            if let Some(reader) = readers.into_iter().nth(at) {
                by_reader.entry(reader).or_default().push((place, slot(judged, *datastore)));
            }
        }
    }
    let asked = by_reader.iter().map(|(reader, slots)| ask(judging, reader, slots, term, limit));
    let mut problem = None;
    for (reading, foreign) in join_all(asked).await.into_iter().flatten() {
        if let Some(reading) = reading {
            judged.take_reading(term, reading).await;
        }
        problem = foreign.or(problem);
    }
    judged.note(|shown| shown.heartbeat = problem);
}

/// Has one host read heartbeats. Returns the successful readings, and what is wrong with others.
async fn ask(
    judging: &Judging,
    reader: &str,
    slots: &[(usize, HeartbeatSlot)],
    of: Term,
    limit: Duration,
) -> Vec<(Option<Reading>, Option<String>)> {
    let Ok(client) = judging.means.agents.client_of(reader) else { return Vec::new() };
    let request = ReadHeartbeats { slots: slots.iter().map(|(_, slot)| *slot).collect() };
    let began = judging.now();
    let found = match timeout(limit, client.ha_read_heartbeats(&request)).await {
        Ok(Ok(found)) if found.len() == slots.len() => found,
        Ok(Ok(_)) => return Vec::new(),
        Ok(Err(error)) => {
            tracing::warn!(reader, %error, "cannot read heartbeats");
            return Vec::new();
        }
        Err(_) => return Vec::new(),
    };
    let now = judging.now();
    let taken = slots.iter().zip(found).map(|((datastore, slot), found)| {
        let reading = |mark| Reading { datastore: *datastore, began, now, mark };
        match found {
            HeartbeatReading::Block { term, sequence } if Term(term) == of => {
                (Some(reading(Some(Mark { term: of, sequence }))), None)
            }
            // This one was opened: it may be a copy of the datastore.
            HeartbeatReading::Block { term, .. } => {
                let datastore = slot.datastore;
                (None, Some(format!("{reader} reads a heartbeat of {} on {datastore}", Term(term))))
            }
            HeartbeatReading::Empty => (Some(reading(None)), None),
            HeartbeatReading::Failed { .. } => (None, None),
            HeartbeatReading::Foreign { why } => {
                let why = beginning(&why, MOST_REASON_BYTES);
                let datastore = slot.datastore;
                (None, Some(format!("{reader} reads no heartbeat of it on {datastore}: {why}")))
            }
        }
    });
    taken.collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::rig::{host, put_host, vm};

    fn id(number: u128) -> Uuid {
        Uuid::from_u128(number)
    }

    fn inventory(hosts: &[(&str, &[u128])]) -> Inventory {
        let mut inventory = Inventory::default();
        for (name, datastores) in hosts {
            let mut info = host(name, None);
            for number in *datastores {
                let found = json!({ "total_bytes": 1, "free_bytes": 1, "identity": id(*number) });
                let path = format!("/srv/{number}");
                info.vm_dirs.push(path.clone().into());
                info.datastores.insert(path.into(), serde_json::from_value(found).unwrap());
            }
            put_host(&mut inventory, info, &[], Vec::new());
        }
        inventory
    }

    #[test]
    fn heartbeats_are_on_datastores_that_another_host_can_read() {
        let mut all = inventory(&[("a", &[1, 2, 3]), ("b", &[2, 3]), ("c", &[3, 4])]);
        let readers = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        let both: Vec<(Uuid, Vec<String>)> =
            vec![(id(2), readers(&["b"])), (id(3), readers(&["b", "c"]))];
        assert_eq!(shared_datastores(&all, "a"), both);
        // A host that is away reads nothing.
        all.lost("b", "no answer");
        assert_eq!(shared_datastores(&all, "a"), [(id(3), readers(&["c"]))]);
        assert_eq!(shared_datastores(&all, "x"), []);
    }

    #[test]
    fn a_pool_of_ceph_has_no_heartbeats() {
        let mut all = Inventory::default();
        for name in ["a", "b"] {
            let mut info = host(name, None);
            info.vm_dirs.push("rbd:vms".into());
            let found = json!({ "total_bytes": 1, "free_bytes": 1, "identity": id(1) });
            info.datastores.insert("rbd:vms".into(), serde_json::from_value(found).unwrap());
            put_host(&mut all, info, &[], Vec::new());
        }
        assert_eq!(shared_datastores(&all, "a"), []);
        assert!(!are_reported(&all, "a"));
    }

    #[test]
    fn datastores_of_protected_vms_come_first() {
        let mut all = inventory(&[("a", &[1, 2]), ("b", &[1, 2])]);
        let first = |all: &Inventory| shared_datastores(all, "a").first().map(|(id, _)| *id);
        assert_eq!(first(&all), Some(id(1)));
        let mut web = vm("web", "a", None);
        let disks = json!([{ "path": "/srv/2/web.qcow2", "format": "qcow2" }]);
        web.spec.disks = serde_json::from_value(disks).unwrap();
        web.spec.protect = Some(godwit_qemu::RestartPriority::High);
        all.apply("a", godwit_api::HostEvent::Vm(Box::new(web)), 2);
        assert_eq!(first(&all), Some(id(2)));
    }
}
