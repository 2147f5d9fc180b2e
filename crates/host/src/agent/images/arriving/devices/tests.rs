//! Block devices as targets of disks that arrive, on loop devices.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;

use godwit_api::{
    ApiError, ArrivingDisk, ArrivingDisks, CreateVm, ErrorCode, OntoDevice, StopVm, VmState,
};
use godwit_qemu::{Disk, DiskFormat, Uuid, VmName, VmSpec};

use super::MOST_REST_BYTES;
use crate::agent::Agent;
use crate::agent::images::arriving::tests::prepare;
use crate::agent::vm_files::FileRule;
use crate::agent::writes_fail::opened;
use crate::agent::writes_fail::support::TestHost;
use crate::block_devices::open_exclusively;
use crate::block_devices::tests::LoopDevice;
use crate::disk_arrivals::{DiskArrival, OpenedContent};
use crate::store::SavedArrival;

const MIB: u64 = 1 << 20;
const DEVICE_BYTES: u64 = 8 * MIB;
const DISK_BYTES: u64 = 5 * MIB;

fn web() -> VmName {
    VmName::new("web").unwrap()
}

/// Returns a host with a device that VMs may use.
fn host_with_device() -> Option<(TestHost, LoopDevice)> {
    let device = LoopDevice::new(DEVICE_BYTES)?;
    let mut host = TestHost::new()?;
    host.config.block_devices = vec![device.path.clone()];
    Some((host, device))
}

/// Returns a request for the device by the name of the disk.
fn request(device: &LoopDevice, onto: OntoDevice) -> ArrivingDisks {
    let disk = ArrivingDisk {
        path: format!("/srv/source/{}.raw", device.name()).into(),
        format: DiskFormat::Raw,
        virtual_bytes: DISK_BYTES,
        used_bytes: 4096,
        base: Vec::new(),
        onto: Some(onto),
    };
    ArrivingDisks {
        transfer: format!("{:032x}", 7),
        vm: web(),
        uuid: Uuid::from_u128(0x5eed),
        from: "b".to_owned(),
        to: device.path.parent().map(Path::to_owned),
        disks: vec![disk],
    }
}

fn gently() -> OntoDevice {
    OntoDevice { overwrite: false, source: None }
}

fn over() -> OntoDevice {
    OntoDevice { overwrite: true, source: None }
}

/// Opens the device of a transfer as its streams do.
async fn open(agent: &Agent, arrival: &DiskArrival) -> Result<File, ApiError> {
    match agent.open_arrival(arrival).await?.remove(0).content {
        OpenedContent::Raw(file) => Ok(file),
        OpenedContent::Exported(..) => panic!("a device is written without a QEMU"),
    }
}

fn content(device: &LoopDevice) -> Vec<u8> {
    fs::read(&device.path).unwrap()
}

fn fill(device: &LoopDevice) {
    let bytes = vec![7; usize::try_from(DEVICE_BYTES).unwrap()];
    let file = File::options().write(true).open(&device.path).unwrap();
    file.write_all_at(&bytes, 0).unwrap();
    file.sync_data().unwrap();
}

/// Returns the bytes of a device that are not zero, in a part of it.
fn used(content: &[u8], from: u64, to: u64) -> usize {
    let [from, to] = [from, to].map(|at| usize::try_from(at).unwrap());
    content[from..to].iter().filter(|byte| **byte != 0).count()
}

#[test]
fn a_device_is_filled_found_again_and_left_without_its_ends() {
    let Some((host, device)) = host_with_device() else { return };
    host.run(async {
        fill(&device);
        let mut agent = opened(&host).await;
        let asked = request(&device, over());
        let checked = agent.check_arriving_disks(&asked).await.unwrap();
        assert_eq!(checked[0].path, device.path);
        assert_eq!(used(&content(&device), 0, DEVICE_BYTES) as u64, DEVICE_BYTES);
        let (arrival, is_new) = prepare(&agent, &asked).await.unwrap();
        assert!(is_new && arrival.record.disks[0].device.is_some());
        // The guest sees what the device has more than the disk.
        assert_eq!(used(&content(&device), DISK_BYTES, DEVICE_BYTES), 0);
        let file = open(&agent, &arrival).await.unwrap();
        file.write_all_at(&[9; 4096], 2 * MIB).unwrap();
        // Nobody else may write it.
        assert!(open_exclusively(&device.path).is_err());
        drop(file);
        let checked = agent.check_arriving_disks(&asked).await.unwrap();
        assert_eq!(checked[0].path, device.path);
        let of_db = ArrivingDisks {
            transfer: format!("{:032x}", 8),
            vm: VmName::new("db").unwrap(),
            uuid: Uuid::from_u128(8),
            ..asked.clone()
        };
        for refused in [
            agent.check_arriving_disks(&of_db).await.map(drop).unwrap_err(),
            prepare(&agent, &of_db).await.map(drop).unwrap_err(),
        ] {
            assert_eq!(refused.code, ErrorCode::Busy, "{refused}");
        }
        arrival.present.lock().mark(vec![(0, 2 * MIB, MIB)]);
        drop(arrival);
        for _ in 0..2 {
            let disks = vec![Disk::new(&device.path, DiskFormat::Raw)];
            let other = VmSpec { disks, ..host.spec("db") };
            let refused = agent.create(CreateVm::new(other, false)).await.unwrap_err();
            assert_eq!(refused.code, ErrorCode::Busy, "{refused}");
            drop(agent);
            agent = opened(&host).await;
        }
        let (arrival, is_new) = prepare(&agent, &asked).await.unwrap();
        assert!(!is_new);
        assert_eq!(arrival.present.lock().runs(), [vec![(2 * MIB, MIB)]]);
        drop(open(&agent, &arrival).await.unwrap());
        agent.remove_disk_arrival(&arrival).unwrap();
        let left = content(&device);
        assert_eq!(used(&left, 0, MIB) + used(&left, DEVICE_BYTES - MIB, DEVICE_BYTES), 0);
        assert_eq!(left[usize::try_from(2 * MIB).unwrap()], 9, "nothing else is deleted");
        assert!(agent.arrivals.all().is_empty() && agent.store.arrivals().is_empty());
        // It counts as empty now.
        drop(arrival);
        prepare(&agent, &request(&device, gently())).await.unwrap();
    });
}

#[test]
fn what_is_in_use_or_does_not_fit_is_refused_and_stays_as_it_is() {
    let Some((mut host, device)) = host_with_device() else { return };
    let Some(other) = LoopDevice::new(DEVICE_BYTES) else { return };
    let missing = device.path.with_file_name("godwit-test-missing");
    host.config.block_devices.push(missing.clone());
    host.run(async {
        let agent = opened(&host).await;
        let good = request(&device, over());
        let disk = &good.disks[0];
        let with = |disk: ArrivingDisk| ArrivingDisks { disks: vec![disk], ..good.clone() };
        let named =
            |name: &str| ArrivingDisk { path: Path::new("/srv/source").join(name), ..disk.clone() };
        let source = |name: &str| Some(OntoDevice { overwrite: true, source: Some(name.into()) });
        fill(&device);
        let before = content(&device);
        let (bad, wrong) = (ErrorCode::InvalidRequest, ErrorCode::WrongState);
        for (request, code, why) in [
            (request(&device, gently()), ErrorCode::AlreadyExists, "has content"),
            (with(named(&other.name())), bad, "lets VMs use no block device"),
            (with(named("..")), bad, "lets VMs use no block device"),
            (with(named("godwit-test-missing.raw")), ErrorCode::NotFound, "has no block device"),
            (ArrivingDisks { to: Some("/dev/..".into()), ..good.clone() }, bad, "no block device"),
            (ArrivingDisks { to: None, ..good.clone() }, bad, "no block device"),
            (with(ArrivingDisk { virtual_bytes: 9 * MIB, ..disk.clone() }), wrong, "has 8388608"),
            (with(ArrivingDisk { format: DiskFormat::Qcow2, ..disk.clone() }), bad, "not raw"),
            (
                ArrivingDisks {
                    disks: vec![disk.clone(), ArrivingDisk { onto: None, ..named("x.raw") }],
                    ..good.clone()
                },
                bad,
                "others are not",
            ),
            (
                with(ArrivingDisk { onto: source("LVM-abc"), ..disk.clone() }),
                wrong,
                "this device has no name of its own",
            ),
            (
                with(ArrivingDisk { onto: source(""), ..disk.clone() }),
                wrong,
                "the source's device has no name of its own",
            ),
            // One device is not for two disks.
            (
                ArrivingDisks { disks: vec![disk.clone(), named(&device.name())], ..good.clone() },
                ErrorCode::Busy,
                "another transfer",
            ),
        ] {
            for refused in [
                prepare(&agent, &request).await.map(drop).unwrap_err(),
                agent.check_arriving_disks(&request).await.map(drop).unwrap_err(),
            ] {
                assert_eq!(refused.code, code, "{refused}");
                assert!(refused.message.contains(why), "{refused} is not {why}");
            }
        }
        let held = open_exclusively(&device.path).unwrap();
        let refused = prepare(&agent, &good).await.map(drop).unwrap_err();
        assert_eq!(refused.code, wrong, "{refused}");
        assert!(refused.message.contains("the host uses it"), "{refused}");
        drop(held);
        assert!(content(&device) == before && agent.store.arrivals().is_empty());
        // Nothing of all that keeps the device.
        prepare(&agent, &good).await.unwrap();
    });
}

#[test]
fn a_device_that_is_much_larger_than_the_disk_is_refused() {
    let Some(device) = LoopDevice::new(DISK_BYTES + MOST_REST_BYTES + 512) else { return };
    let Some(mut host) = TestHost::new() else { return };
    host.config.block_devices = vec![device.path.clone()];
    host.run(async {
        let agent = opened(&host).await;
        let mut asked = request(&device, gently());
        let refused = prepare(&agent, &asked).await.map(drop).unwrap_err();
        assert!(refused.message.contains("and the disk only"), "{refused}");
        asked.disks[0].virtual_bytes += MOST_REST_BYTES;
        prepare(&agent, &asked).await.unwrap();
    });
}

#[test]
fn nothing_is_written_to_another_device_of_the_same_path() {
    let Some((host, device)) = host_with_device() else { return };
    host.run(async {
        let agent = opened(&host).await;
        let (arrival, _) = prepare(&agent, &request(&device, gently())).await.unwrap();
        drop(open(&agent, &arrival).await.unwrap());
        fill(&device);
        let before = content(&device);
        // As if it had been removed and made again.
        let mut record: SavedArrival = arrival.record.clone();
        record.disks[0].device.as_mut().unwrap().sequence += 1;
        let (saved, another) = (&record.disks[0], record.disks[0].device.as_ref().unwrap());
        let refused = agent.open_device(saved, another).map(drop).unwrap_err();
        assert!(refused.message.contains("another device"), "{refused}");
        agent.clear_device(&saved.path, another);
        agent.store.save_arrival(&record).unwrap();
        drop((arrival, agent));
        let agent = opened(&host).await;
        assert!(agent.arrivals.all().is_empty() && agent.store.arrivals().is_empty());
        assert!(content(&device) == before, "another device has been written");
    });
}

#[test]
fn a_transfer_waits_for_a_device_that_is_not_for_vms_now() {
    let Some((mut host, device)) = host_with_device() else { return };
    let asked = request(&device, gently());
    host.run(async {
        let agent = opened(&host).await;
        prepare(&agent, &asked).await.unwrap();
    });
    let allowed = std::mem::take(&mut host.config.block_devices);
    host.run(async {
        let agent = opened(&host).await;
        assert_eq!((agent.arrivals.all().len(), agent.store.arrivals().len()), (0, 1));
        // Another record would replace it.
        let refused = prepare(&agent, &asked).await.map(drop).unwrap_err();
        assert_eq!(refused.code, ErrorCode::Busy, "{refused}");
    });
    host.config.block_devices = allowed;
    host.run(async {
        let agent = opened(&host).await;
        let (arrival, is_new) = prepare(&agent, &asked).await.unwrap();
        assert!(!is_new);
        drop(open(&agent, &arrival).await.unwrap());
    });
}

#[test]
fn a_transfer_leaves_a_device_to_a_vm_that_has_got_it_meanwhile() {
    let Some((mut host, device)) = host_with_device() else { return };
    let asked = request(&device, gently());
    host.run(async {
        let agent = opened(&host).await;
        prepare(&agent, &asked).await.unwrap();
    });
    let allowed = std::mem::take(&mut host.config.block_devices);
    host.run(async {
        let agent = opened(&host).await;
        let disks = vec![Disk::new(&device.path, DiskFormat::Raw)];
        let spec = VmSpec { disks, ..host.spec("db") };
        agent.create(CreateVm::new(spec, false)).await.unwrap();
    });
    host.config.block_devices = allowed;
    fill(&device);
    let before = content(&device);
    host.run(async {
        let agent = opened(&host).await;
        assert_eq!((agent.arrivals.all().len(), agent.store.arrivals().len()), (0, 1));
        let refused = prepare(&agent, &asked).await.map(drop).unwrap_err();
        assert_eq!(refused.code, ErrorCode::Busy, "{refused}");
    });
    assert!(content(&device) == before, "the VM's device has been written");
}

#[test]
fn a_vm_of_another_host_gets_a_device_that_is_for_vms_and_free() {
    let Some((mut host, device)) = host_with_device() else { return };
    host.config.block_devices.clear();
    for is_allowed in [false, true] {
        if is_allowed {
            host.config.block_devices.push(device.path.clone());
        }
        host.run(async {
            let agent = opened(&host).await;
            let disks = vec![Disk::new(&device.path, DiskFormat::Raw)];
            let spec = agent.resolve(VmSpec { disks, ..host.spec("web") }).await.unwrap();
            for rule in [FileRule::OtherHost, FileRule::VmDirs] {
                let found = agent.open_files_of_running(&spec, rule);
                assert_eq!(found.is_ok(), is_allowed, "{rule:?}");
                let held = open_exclusively(&device.path).unwrap();
                let refused = agent.open_files_of_running(&spec, rule).map(drop).unwrap_err();
                assert_eq!(refused.code, ErrorCode::Preflight, "{refused}");
                assert!(refused.message.contains("uses it itself"), "{refused}");
                drop(held);
            }
        });
    }
}

#[test]
fn a_vm_runs_on_a_block_device_which_nothing_arrives_on() {
    let Some((host, device)) = host_with_device() else { return };
    host.run(async {
        let agent = opened(&host).await;
        let disks = vec![Disk::new(&device.path, DiskFormat::Raw)];
        let spec = VmSpec { disks, ..host.spec("db") };
        let info = agent.create(CreateVm::new(spec, true)).await.unwrap();
        assert_eq!(info.state, VmState::Running);
        let db = VmName::new("db").unwrap();
        for is_running in [true, false] {
            let refused = prepare(&agent, &request(&device, over())).await.map(drop).unwrap_err();
            assert_eq!(refused.code, ErrorCode::WrongState, "{refused}");
            assert!(refused.message.contains("VM \"db\" uses it"), "{refused}");
            if is_running {
                agent.stop(&db, StopVm { force: true, grace_ms: None }).await.unwrap();
            }
        }
        agent.delete(&db, false).await.unwrap();
        prepare(&agent, &request(&device, gently())).await.unwrap();
    });
}
