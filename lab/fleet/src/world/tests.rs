use std::path::Path;

use super::*;
use godwit_api::{MigrationRequest, SetPeers, TravellingDisks};
use godwit_qemu::{Disk, DiskFormat};
use godwit_types::{Outcome, Phase};

fn world() -> World {
    let mut world =
        World::new(FleetPlan { hosts: 3, vms: 6, hosts_with_vms: 2, ..FleetPlan::default() })
            .unwrap();
    let peers: BTreeMap<_, _> = (0..3)
        .map(|number| (world.plan.host_name(number), format!("http://127.0.0.1:{number}")))
        .collect();
    for at in 0..3 {
        world.set_peers(at, SetPeers { peers: peers.clone() });
    }
    world
}

fn to(host: usize, id: &str) -> MigrationRequest {
    MigrationRequest { id: Some(id.into()), ..MigrationRequest::to(format!("host-{host:04}")) }
}

/// Steps until nothing moves, and returns the milliseconds that it took.
fn until_still(world: &mut World) -> u64 {
    let mut now_ms = world.stepped_ms;
    while !world.running.is_empty() {
        now_ms += 50;
        assert!(now_ms < 1_000_000);
        world.step(now_ms);
    }
    now_ms
}

#[test]
fn a_vm_moves_in_the_time_that_its_link_needs() {
    let mut world = world();
    let mut watcher = world.watch(0).unwrap();
    world.migrate(0, "vm-00000", &to(2, "m1"), 0, 0).unwrap();
    let incarnation = world.hosts[0].vms["vm-00000"].incarnation;
    assert!(!incarnation.is_unrecorded());
    let shadow = &world.hosts[2].vms["vm-00000"];
    assert_eq!((shadow.state, shadow.epoch), (VmState::MigratingIn, 2));
    // 256 MiB at 1 Gb/s take 2.1 s, plus the preparation.
    let took_ms = until_still(&mut world);
    assert!((2_400..=2_600).contains(&took_ms), "{took_ms}");
    assert!(!world.hosts[0].vms.contains_key("vm-00000"));
    let vm = &world.hosts[2].vms["vm-00000"];
    assert_eq!((vm.state, vm.epoch, vm.host.as_str()), (VmState::Running, 2, "host-0002"));
    assert_eq!(vm.incarnation, incarnation, "a move changed the incarnation");
    let events: Vec<_> = std::iter::from_fn(|| watcher.try_recv().ok()).collect();
    assert!(
        events.contains(&HostEvent::Known)
            && events.contains(&HostEvent::VmGone("vm-00000".into()))
    );
    let ended = world.migration(0, "m1").unwrap().report.unwrap();
    assert_eq!((ended.outcome, ended.wire_bytes), (Outcome::Completed, 256 << 20));
}

#[test]
fn disks_travel_before_the_memory() {
    let mut world = world();
    let vm = world.hosts[0].vms.get_mut("vm-00000").unwrap();
    vm.spec.disks.push(Disk::new("/srv/web.raw", DiskFormat::Raw));
    let disks = TravellingDisks { to: Some("/ssd".into()), ..TravellingDisks::default() };
    let request = MigrationRequest { disks: Some(disks), ..to(2, "m1") };
    world.migrate(0, "vm-00000", &request, 0, 0).unwrap();
    world.step(1_000);
    let begun = world.migration(0, "m1").unwrap().progress;
    let disks = begun.disks.unwrap();
    assert!(begun.phase == Phase::Disks && begun.sent_bytes == 0, "{begun:?}");
    assert!(disks.sent_bytes > 0 && disks.remaining_bytes > 0, "{disks:?}");
    until_still(&mut world);
    let vm = &world.hosts[2].vms["vm-00000"];
    assert_eq!(vm.spec.disks[0].path, Path::new("/ssd/web.raw"));
    let report = world.migration(0, "m1").unwrap().report.unwrap();
    assert_eq!(report.disks.unwrap().disks[0].to, "/ssd/web.raw");
}

#[test]
fn links_are_shared_and_the_most_at_once_is_counted() {
    let mut world = world();
    for (vm, id) in [("vm-00000", "m1"), ("vm-00002", "m2"), ("vm-00004", "m3")] {
        world.migrate(0, vm, &to(2, id), 0, 0).unwrap();
    }
    let took_ms = until_still(&mut world);
    // 256 MiB + 512 MiB + 1 GiB over one link take at least this time.
    assert!((15_000..=15_900).contains(&took_ms), "{took_ms}");
    assert_eq!(
        (world.counts.most_out_of_one(), world.counts.most_into_one(), world.counts.completed),
        (3, 3, 3)
    );
}

#[test]
fn an_id_starts_one_migration_and_a_second_one_is_counted() {
    let mut world = world();
    world.migrate(0, "vm-00000", &to(2, "m1"), 0, 0).unwrap();
    assert_eq!(world.migrate(0, "vm-00000", &to(2, "m1"), 1, 1).unwrap().id, "m1");
    assert_eq!(
        world.migrate(0, "vm-00002", &to(2, "m1"), 1, 1).unwrap_err().code,
        ErrorCode::AlreadyExists
    );
    assert_eq!(world.migrate(0, "vm-00000", &to(1, "m2"), 1, 1).unwrap_err().code, ErrorCode::Busy);
    until_still(&mut world);
    assert_eq!(
        world.migrate(0, "vm-00000", &to(1, "m3"), 1, 1).unwrap_err().code,
        ErrorCode::NotFound
    );
    let Counts { repeated, double_begins, not_there, .. } = world.counts;
    assert_eq!((repeated, double_begins, not_there), (1, 1, 1));
    assert_eq!(world.counts.begun["vm-00000"], 1);
}

#[test]
fn faults_occur_as_often_as_requested() {
    let mut world = world();
    world.fault("vm-00000", InjectedFault::Refuse(ErrorCode::Preflight), 1);
    assert_eq!(
        world.migrate(0, "vm-00000", &to(2, "m1"), 0, 0).unwrap_err().code,
        ErrorCode::Preflight
    );
    world.fault("vm-00000", InjectedFault::FailHalfWay, 1);
    world.migrate(0, "vm-00000", &to(2, "m2"), 0, 0).unwrap();
    until_still(&mut world);
    assert_eq!(world.hosts[0].vms["vm-00000"].state, VmState::Running);
    assert!(!world.hosts[2].vms.contains_key("vm-00000"));
    assert_eq!(world.migration(0, "m2").unwrap().report.unwrap().error.unwrap().code, "lane-lost");
    world.migrate(0, "vm-00000", &to(2, "m3"), 0, 0).unwrap();
    world.cancel(0, "m3").unwrap();
    until_still(&mut world);
    world.silence(2, true);
    world.migrate(0, "vm-00000", &to(2, "m4"), 0, 0).unwrap();
    until_still(&mut world);
    assert_eq!((world.counts.completed, world.counts.cancelled, world.counts.failed), (0, 1, 2));
}

#[test]
fn disturbance_changes_things_and_leaves_them_as_they_were() {
    let mut world = world();
    let mut watcher = world.watch(0).unwrap();
    let before = std::iter::from_fn(|| watcher.try_recv().ok()).count();
    (0..600).for_each(|turn| world.disturb(turn));
    assert!(before > 3 && std::iter::from_fn(|| watcher.try_recv().ok()).count() > 100);
    assert!(world.hosts[0].vms.values().all(|vm| vm.state == VmState::Running));
}

#[test]
fn hosts_report_their_load_in_turns() {
    let mut world = world();
    let mut watchers: Vec<_> = (0..3).map(|at| world.watch(at).unwrap()).collect();
    world.power(0, "vm-00000", VmState::Stopped).unwrap();
    for now_ms in (0..15_000).step_by(20) {
        world.report_loads(now_ms, 1_800_000_000_000 + now_ms);
    }
    let mut samples: Vec<_> = Vec::new();
    for watcher in &mut watchers {
        let events = std::iter::from_fn(|| watcher.try_recv().ok());
        let of_host = events.filter_map(|event| match event {
            HostEvent::Load(sample) => Some(*sample),
            _ => None,
        });
        samples.push(of_host.collect::<Vec<_>>());
    }
    assert_eq!(samples.iter().map(Vec::len).collect::<Vec<_>>(), [3, 3, 3]);
    let [of_first, of_second, _] = &samples[..] else { panic!("three hosts") };
    assert_eq!(of_first[0].at_unix_ms, 1_800_000_000_000);
    assert!(of_second[0].at_unix_ms > of_first[0].at_unix_ms, "all at once");
    let last = &of_first[2];
    let names: Vec<&str> = last.vms.iter().map(|vm| vm.name.as_str()).collect();
    assert_eq!(names, ["vm-00002", "vm-00004"], "a stopped VM has a load");
    for vm in &last.vms {
        assert!(!vm.uuid.is_nil() && vm.memory_used_bytes <= vm.memory_total_bytes, "{vm:?}");
        assert!((1..=2000).contains(&vm.cpu_used_millicores), "{vm:?}");
    }
    assert!(last.host.cpu_used_millicores <= u64::from(last.host.cores) * 1000);
}
