//! Drains of datastores, over the API, with simulated hosts.

use godwit_api::control::{
    DatastoreDetails, DatastoreDrain, DrainDiskState, DrainState, ProblemCode,
};
use godwit_fleet::FleetPlan;
use godwit_qemu::DiskFormat;
use http::Method;
use serde_json::{Value, json};

use crate::vms::tests::Cluster;

const DRAINS: &str = "/api/v1/datastore-drains";
const OLD: &str = "/api/v1/datastores/%2Fsrv%2Flocal";

/// A cluster whose first host has VMs with disks in `/srv/local`.
async fn cluster(vms: usize) -> Cluster {
    let plan = FleetPlan { hosts: 1, vms: 0, datastores: true, ..FleetPlan::default() };
    let cluster = Cluster::of(plan).await;
    for number in 0..vms {
        let spec = json!({
            "name": format!("vm{number}"), "memory": "1GiB", "kernel": "/srv/local/vmlinuz",
            "disks": [{ "path": format!("/srv/local/vm{number}.qcow2"), "format": "qcow2" }],
        });
        let made = cluster.root(Method::POST, "/api/v1/vms", Some(json!({ "spec": spec }))).await;
        assert_eq!(made.status, 201, "{}", made.body);
    }
    cluster
}

async fn drain(cluster: &Cluster, request: Value) -> DatastoreDrain {
    let path = format!("{OLD}/drain");
    let answer = cluster.root(Method::POST, &path, Some(request)).await;
    assert_eq!(answer.status, 202, "{}", answer.body);
    answer.read()
}

/// Waits until a drain meets a condition.
async fn until(
    cluster: &Cluster,
    id: &str,
    is_so: impl Fn(&DatastoreDrain) -> bool,
) -> DatastoreDrain {
    loop {
        let path = format!("{DRAINS}/{id}");
        let now: DatastoreDrain = cluster.root(Method::GET, &path, None).await.read();
        if is_so(&now) {
            return now;
        }
        tokio::task::yield_now().await;
    }
}

fn states(drain: &DatastoreDrain) -> Vec<DrainDiskState> {
    drain.disks.iter().map(|disk| disk.state).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_datastore_is_emptied_and_its_disks_return() {
    let cluster = cluster(3).await;
    let plan = drain(&cluster, json!({ "plan_only": true })).await;
    assert_eq!((plan.state, plan.disks.len()), (DrainState::Planned, 3));
    assert!(plan.disks.iter().all(|disk| disk.to.is_some() && !disk.reason.is_empty()));
    let shown: DatastoreDetails = cluster.root(Method::GET, OLD, None).await.read();
    assert!(!shown.datastore.maintenance, "the plan changed something");

    cluster.fleet.hold_disk_moves(true);
    let begun = drain(&cluster, json!({})).await;
    // No more than two disks of one host move at once.
    let moving = states(&begun).iter().filter(|state| **state == DrainDiskState::Moving).count();
    assert!(begun.state == DrainState::Running && moving <= 2, "{begun:?}");
    // A second request returns it, and the maintenance cannot end meanwhile.
    assert_eq!(drain(&cluster, json!({})).await.id, begun.id);
    let end = json!({ "maintenance": false });
    let refused = cluster.root(Method::PATCH, OLD, Some(end)).await;
    assert_eq!(refused.problem(), ProblemCode::WrongState);
    cluster.fleet.hold_disk_moves(false);
    let over = until(&cluster, &begun.id, |now| now.state == DrainState::Done).await;
    assert_eq!(states(&over), [DrainDiskState::Moved; 3], "{over:?}");
    let left = || {
        let inventory = cluster.managed.manager.state.inventory();
        inventory.find_datastore("/srv/local").map_or(0, |found| found.disks)
    };
    while left() > 0 {
        tokio::task::yield_now().await;
    }

    let path = format!("{DRAINS}/{}/undo", begun.id);
    let undoing = cluster.root(Method::POST, &path, None).await;
    assert_eq!(undoing.status, 202, "{}", undoing.body);
    let undone = until(&cluster, &begun.id, |now| now.state == DrainState::Undone).await;
    assert_eq!(states(&undone), [DrainDiskState::Back; 3], "{undone:?}");
    let shown: DatastoreDetails = cluster.root(Method::GET, OLD, None).await.read();
    assert!(!shown.datastore.maintenance);
}

/// Returns the path and the format of the disk of each VM.
fn disks(cluster: &Cluster) -> Vec<(String, DiskFormat)> {
    let inventory = cluster.managed.manager.state.inventory();
    let vms = (0..9).filter_map(|number| inventory.vm_info(&format!("vm{number}")));
    let disks = vms.filter_map(|vm| vm.spec.disks.first());
    disks.map(|disk| (disk.path.display().to_string(), disk.format)).collect()
}

/// Waits until the VMs have these disks.
async fn until_disks(cluster: &Cluster, expected: &[(&str, DiskFormat)]) {
    let expected: Vec<(String, DiskFormat)> =
        expected.iter().map(|(path, format)| ((*path).to_owned(), *format)).collect();
    while disks(cluster) != expected {
        tokio::task::yield_now().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn disks_move_into_a_pool_that_is_named_and_return_with_their_format() {
    use DiskFormat::{Qcow2, Raw};
    let cluster = cluster(2).await;
    let at_first = [("/srv/local/vm0.qcow2", Qcow2), ("/srv/local/vm1.qcow2", Qcow2)];
    until_disks(&cluster, &at_first).await;
    // Not without being named, and no layer without its base.
    let plan = drain(&cluster, json!({ "plan_only": true })).await;
    assert!(plan.disks.iter().all(|disk| disk.to.as_deref() == Some("/srv/shared")), "{plan:?}");
    let layers = drain(&cluster, json!({ "plan_only": true, "to": ["rbd:vms"] })).await;
    assert_eq!(states(&layers), [DrainDiskState::Stays; 2]);
    assert!(layers.disks[0].reason.contains("takes no layers"), "{layers:?}");

    let begun = drain(&cluster, json!({ "to": ["rbd:vms"], "flatten": true })).await;
    let over = until(&cluster, &begun.id, |now| now.state == DrainState::Done).await;
    assert_eq!(states(&over), [DrainDiskState::Moved; 2], "{over:?}");
    until_disks(&cluster, &[("rbd:vms/vm0", Raw), ("rbd:vms/vm1", Raw)]).await;
    let shown: DatastoreDetails =
        cluster.root(Method::GET, "/api/v1/datastores/rbd:vms", None).await.read();
    assert_eq!((shown.datastore.disks, shown.used_by.len()), (2, 2));
    assert_eq!(shown.datastore.kind.as_deref(), Some("ceph-rbd"));

    let path = format!("{DRAINS}/{}/undo", begun.id);
    let undoing = cluster.root(Method::POST, &path, None).await;
    assert_eq!(undoing.status, 202, "{}", undoing.body);
    let undone = until(&cluster, &begun.id, |now| now.state == DrainState::Undone).await;
    assert_eq!(states(&undone), [DrainDiskState::Back; 2], "{undone:?}");
    until_disks(&cluster, &at_first).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pool_is_drained_into_directories_and_gets_its_disks_back() {
    let cluster = cluster(0).await;
    let spec = json!({
        "name": "vm0", "memory": "1GiB", "kernel": "/srv/local/vmlinuz",
        "disks": [{ "path": "rbd:vms/vm0", "format": "raw" }],
    });
    let made = cluster.root(Method::POST, "/api/v1/vms", Some(json!({ "spec": spec }))).await;
    assert_eq!(made.status, 201, "{}", made.body);
    until_disks(&cluster, &[("rbd:vms/vm0", DiskFormat::Raw)]).await;
    let pool = "/api/v1/datastores/rbd:vms";
    let answer = cluster.root(Method::POST, &format!("{pool}/drain"), Some(json!({}))).await;
    assert_eq!(answer.status, 202, "{}", answer.body);
    let begun: DatastoreDrain = answer.read();
    let over = until(&cluster, &begun.id, |now| now.state == DrainState::Done).await;
    assert_eq!(states(&over), [DrainDiskState::Moved], "{over:?}");
    until_disks(&cluster, &[("/srv/shared/vm0.raw", DiskFormat::Raw)]).await;
    // It is in maintenance now, also for disks that name it.
    let into = json!({ "disk": "/srv/shared/vm0.raw", "to": "rbd:vms" });
    let refused = cluster.root(Method::POST, "/api/v1/vms/vm0/drives/move", Some(into)).await;
    assert_eq!(refused.problem(), ProblemCode::WrongState);
    let path = format!("{DRAINS}/{}/undo", begun.id);
    cluster.root(Method::POST, &path, None).await;
    let undone = until(&cluster, &begun.id, |now| now.state == DrainState::Undone).await;
    assert_eq!(states(&undone), [DrainDiskState::Back], "{undone:?}");
    until_disks(&cluster, &[("rbd:vms/vm0", DiskFormat::Raw)]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cancelled_drain_leaves_disks_where_they_are() {
    let cluster = cluster(4).await;
    let nowhere = json!({ "plan_only": true, "to": ["/srv/local"] });
    let nowhere = drain(&cluster, nowhere).await;
    assert_eq!(states(&nowhere), [DrainDiskState::Stays; 4]);
    assert!(nowhere.disks[0].reason.contains("no other datastore"), "{nowhere:?}");
    cluster.fleet.hold_disk_moves(true);
    let begun = drain(&cluster, json!({})).await;
    let path = format!("{DRAINS}/{}", begun.id);
    let cancelled = cluster.root(Method::DELETE, &path, None).await;
    assert_eq!(cancelled.status, 202, "{}", cancelled.body);
    let cancelled: DatastoreDrain = cancelled.read();
    assert_eq!(cancelled.state, DrainState::Cancelled);
    assert_eq!(states(&cancelled), [DrainDiskState::Stays; 4], "{cancelled:?}");
    let shown: DatastoreDetails = cluster.root(Method::GET, OLD, None).await.read();
    assert!(shown.datastore.disks == 4 && !shown.datastore.maintenance, "{shown:?}");
    let again = cluster.root(Method::DELETE, &path, None).await;
    assert_eq!(again.problem(), ProblemCode::WrongState);
    let unknown = cluster.root(Method::GET, &format!("{DRAINS}/s0"), None).await;
    assert_eq!(unknown.problem(), ProblemCode::NotFound);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disk_of_a_vm_that_agents_restart_stays() {
    let cluster = cluster(1).await;
    let spec = json!({
        "name": "own", "memory": "1GiB", "kernel": "/srv/local/vmlinuz", "protect_by_agents": true,
        "disks": [{ "path": "/srv/local/own.qcow2", "format": "qcow2" }],
    });
    let made = cluster.root(Method::POST, "/api/v1/vms", Some(json!({ "spec": spec }))).await;
    assert_eq!(made.status, 201, "{}", made.body);
    let plan = drain(&cluster, json!({ "plan_only": true })).await;
    let stays = |vm: &str| {
        let disk = plan.disks.iter().find(|disk| disk.vm == vm).unwrap();
        (disk.state == DrainDiskState::Stays).then_some(disk.reason.as_str())
    };
    assert_eq!(stays("vm0"), None, "{plan:?}");
    let reason = stays("own").unwrap();
    assert!(reason.contains("end its protect_by_agents first"), "{reason}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_next_leader_continues_a_drain() {
    let cluster = cluster(2).await;
    let begun = drain(&cluster, json!({})).await;
    let store = std::sync::Arc::clone(&cluster.managed.store);
    cluster.managed.manager.step_down();
    let next = Cluster { managed: crate::http::tests::Managed::with(store).await, ..cluster };
    let over = until(&next, &begun.id, |now| now.state == DrainState::Done).await;
    assert_eq!(states(&over), [DrainDiskState::Moved; 2], "{over:?}");
}
