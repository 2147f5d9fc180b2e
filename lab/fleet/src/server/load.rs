//! Samples of the load of a simulated host. The figures are made up, and rise and fall steadily, so
//! that charts show something.

use std::time::Duration;

use axum::response::sse::Event;
use godwit_api::{VmInfo, VmState};
use serde_json::{Value, json};

use crate::world::Host;

/// Interval between two samples.
pub(super) const INTERVAL: Duration = Duration::from_secs(5);

/// Returns the `load` event of a host for the interval that ends now.
pub(super) fn event(host: &Host, now_unix_ms: u64) -> Option<Event> {
    Event::default().event("load").json_data(sample(host, now_unix_ms)).ok()
}

/// Built from JSON like all that a simulated agent says.
fn sample(host: &Host, now_unix_ms: u64) -> Value {
    let running = host.vms.values().filter(|vm| vm.state == VmState::Running);
    let vms: Vec<Value> = (0..)
        .zip(running)
        .filter_map(|(number, vm)| of_vm(vm, wave(now_unix_ms, number)))
        .collect();
    let level = wave(now_unix_ms, 3);
    let dirs = host.info.datastores.keys();
    let directories: serde_json::Map<String, Value> =
        dirs.map(|dir| (dir.display().to_string(), of_storage(level))).collect();
    let total = host.info.memory_total_bytes;
    json!({
        "at_unix_ms": now_unix_ms, "interval_ms": 5_000,
        "host": {
            "cores": host.info.logical_cores, "cpu_used_millicores": 4_000 + 500 * level,
            "memory_total_bytes": total, "memory_used_bytes": total / 4 + (total / 100) * level,
            "rx_bytes_per_s": 200_000 * level, "tx_bytes_per_s": 300_000 * level,
            "directories": directories,
        },
        "vms": vms,
    })
}

/// Only a VM with a UUID has a load: history goes by that.
fn of_vm(vm: &VmInfo, level: u64) -> Option<Value> {
    let uuid = vm.spec.uuid?;
    let disks = vm.spec.disks.iter().map(|disk| {
        let mut load = of_storage(level);
        load["path"] = json!(disk.path);
        load
    });
    Some(json!({
        "name": vm.name, "uuid": uuid, "vcpus": vm.vcpus,
        "cpu_used_millicores": 100 + 80 * level, "cpu_ready_millicores": level,
        "memory_total_bytes": vm.memory_bytes,
        "memory_used_bytes": vm.memory_bytes / 2 + (vm.memory_bytes / 64) * level,
        "rx_bytes_per_s": 10_000 * level, "tx_bytes_per_s": 15_000 * level,
        "disks": disks.collect::<Vec<Value>>(),
    }))
}

fn of_storage(level: u64) -> Value {
    json!({
        "reads_per_s": 5 * level, "writes_per_s": 10 * level,
        "read_bytes_per_s": 40_960 * level, "write_bytes_per_s": 81_920 * level,
        "latency_us": 300 + 40 * level,
    })
}

/// A level from 0 to 20 that rises and falls within 200 s.
fn wave(now_unix_ms: u64, number: u64) -> u64 {
    let turn = (now_unix_ms / 5_000 + 7 * number) % 40;
    turn.min(40 - turn)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::FleetPlan;
    use crate::world::World;

    #[test]
    fn a_sample_has_the_vms_that_run_and_have_a_uuid() {
        let world = |load| {
            World::new(FleetPlan {
                hosts: 1,
                vms: 2,
                datastores: true,
                load,
                ..FleetPlan::default()
            })
        };
        let mut with = world(true).unwrap();
        with.power(0, "vm-00001", VmState::Stopped).unwrap();
        let sample_of = |world: &World| sample(world.host(0).unwrap(), 1_795_444_970_253);
        let said = sample_of(&with);
        assert_eq!(said["vms"].as_array().unwrap().len(), 1);
        assert_eq!(said["vms"][0]["name"], "vm-00000");
        assert!(said["host"]["directories"]["/srv/shared"]["latency_us"].is_u64());
        assert!(sample_of(&world(false).unwrap())["vms"].as_array().unwrap().is_empty());
    }

    #[test]
    fn levels_rise_and_fall() {
        let levels: Vec<u64> = (0..=40).map(|turn| wave(turn * 5_000, 0)).collect();
        assert_eq!((levels[0], levels[20], levels[21], levels[40]), (0, 20, 19, 0));
    }
}
