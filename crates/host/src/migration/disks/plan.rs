//! Which disks travel with a VM, before anything is made.

use std::path::Path;
use std::sync::Arc;

use godwit_api::{
    ApiError, ArrivingDisk, ArrivingDisks, ErrorCode, MOST_TRAVELLING_DISKS, OntoDevice,
    TravellingDisks,
};
use godwit_qemu::{DiskFormat, ResolvedDisk, is_rbd, is_thin_pool};
use godwit_types::Fault;

use super::departure::Departure;
use crate::block_devices::is_device_path;
use crate::doorman::fresh_id;
use crate::failure::task_failed;
use crate::store::{DiskTransferNote, NotedDisk};

/// Disks that are to travel.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Plan {
    pub(super) note: DiskTransferNote,
    pub(crate) request: ArrivingDisks,
    /// Position of each disk in the VM's definition.
    pub(super) indexes: Vec<usize>,
}

impl Plan {
    /// Sets the ID of the transfer.
    pub(super) fn set_transfer(&mut self, transfer: String) {
        self.request.transfer.clone_from(&transfer);
        self.note.transfer = transfer;
    }

    /// Whether it continues an earlier transfer: of the same images, to the same place.
    pub(super) fn continues(&self, earlier: &DiskTransferNote) -> bool {
        let now = &self.note;
        !earlier.handed_over
            && !earlier.mirrored
            && !now.mirrored
            && (&earlier.to, &earlier.directory, earlier.flatten, &earlier.disks)
                == (&now.to, &now.directory, now.flatten, &now.disks)
    }

    /// Returns the bytes that the disks have on this host's disk.
    pub(crate) fn used_bytes(&self) -> u64 {
        self.request.disks.iter().fold(0, |sum, disk| sum.saturating_add(disk.used_bytes))
    }
}

/// Finds out which disks travel; `None`: none.
///
/// # Errors
/// The request is invalid, or one of them cannot travel.
pub(crate) async fn plan(
    departure: &Departure,
    how: &TravellingDisks,
) -> Result<Option<Plan>, Fault> {
    how.check().map_err(Fault::from)?;
    let (spec, vm) = (departure.vm.spec(), &departure.vm);
    let departing = {
        let (agent, spec, flatten) = (Arc::clone(&departure.agent), Arc::clone(&spec), how.flatten);
        // It may read large files.
        tokio::task::spawn_blocking(move || agent.departing_disks(&spec, flatten)).await
    };
    let departing = departing.map_err(|error| task_failed(&error)).and_then(|found| found);
    let departing = departing.map_err(Fault::from)?;
    if departing.is_empty() {
        return Ok(None);
    }
    if departing.len() > MOST_TRAVELLING_DISKS {
        let (name, count) = (&vm.name, departing.len());
        let message = format!("cannot move VM \"{name}\" together with its {count} disks");
        let remedy = format!("at most {MOST_TRAVELLING_DISKS} disks can travel");
        return Err(ApiError::new(ErrorCode::InvalidRequest, message, remedy).into());
    }
    let transfer = fresh_id().map_err(Fault::from)?.to_string();
    let mut request = ArrivingDisks {
        transfer: transfer.clone(),
        vm: vm.name.clone(),
        uuid: spec.uuid,
        from: departure.agent.config().name.clone(),
        to: how.to.clone(),
        disks: Vec::new(),
    };
    let mut note = DiskTransferNote {
        transfer,
        to: departure.request.to.clone(),
        directory: how.to.clone(),
        flatten: how.flatten,
        disks: Vec::new(),
        limited: false,
        handed_over: false,
        mirrored: false,
    };
    let mut indexes = Vec::new();
    for found in departing {
        let node = vm.process.qmp.image_node(&spec.disks, found.index).await;
        let (node, virtual_bytes) = node.map_err(|error| error.fault())?;
        let disk = spec.disks[found.index].clone();
        let unsound = vm.process.qmp.export_is_unsound(&disk).await;
        note.mirrored |= unsound.map_err(|error| error.fault())?;
        let is_layer = !found.base.is_empty();
        let format = format_there(&vm.name, &disk, is_layer, how)?;
        let is_onto = place_there(&disk, how).is_some_and(is_device_path);
        request.disks.push(ArrivingDisk {
            path: disk.path.clone(),
            format,
            virtual_bytes,
            used_bytes: found.used_bytes.min(virtual_bytes),
            base: found.base,
            onto: is_onto.then_some(OntoDevice { overwrite: how.overwrite, source: found.device }),
        });
        note.disks.push(NotedDisk { disk, node, virtual_bytes, is_layer });
        indexes.push(found.index);
    }
    if let Some(error) = problem_of_devices(&request, note.mirrored) {
        return Err(error.into());
    }
    Ok(Some(Plan { note, request, indexes }))
}

/// Returns the place of a disk's image at the destination: a directory or a pool.
fn place_there<'a>(disk: &'a ResolvedDisk, how: &'a TravellingDisks) -> Option<&'a Path> {
    how.to.as_deref().or_else(|| disk.path.parent())
}

/// Returns why disks cannot travel onto block devices; `None` also if none is to.
fn problem_of_devices(request: &ArrivingDisks, is_mirrored: bool) -> Option<ApiError> {
    let onto = request.disks.iter().find(|disk| disk.onto.is_some())?;
    let (why, remedy) = if request.disks.iter().any(|disk| disk.onto.is_none()) {
        ("others of its disks would be files", "give a directory for all of them (--disks-to)")
    } else if is_mirrored {
        (
            "its QEMU cannot export a disk with an I/O thread (QEMU before 9.0), and mirrors of \
             disks go into files alone",
            "move the disks to a directory, or start the VM with a newer QEMU",
        )
    } else {
        return None;
    };
    let (vm, path) = (&request.vm, onto.path.display());
    let message =
        format!("cannot move disk {path} together with VM \"{vm}\" onto a block device: {why}");
    Some(ApiError::new(ErrorCode::WrongState, message, remedy))
}

/// Returns the format of a disk's image at the destination.
///
/// # Errors
/// It would be a layer in a pool or on a block device, which have raw images alone.
fn format_there(
    vm: &str,
    disk: &ResolvedDisk,
    is_layer: bool,
    how: &TravellingDisks,
) -> Result<DiskFormat, Fault> {
    let place = match place_there(disk, how) {
        Some(place) if is_rbd(place) => "into a pool of Ceph",
        Some(place) if is_thin_pool(place) => "into a thin pool of LVM",
        Some(place) if is_device_path(place) => "onto a block device",
        _ => return Ok(disk.format),
    };
    match is_layer {
        false => Ok(DiskFormat::Raw),
        true => Err(not_as_layer(vm, disk, place).into()),
    }
}

fn not_as_layer(vm: &str, disk: &ResolvedDisk, place: &str) -> ApiError {
    let message = format!(
        "cannot move disk {} together with VM \"{vm}\" {place}: it has a backing file, and a raw \
         image has none",
        disk.path.display()
    );
    let remedy = "let the content of its backing file travel, too (--flatten-disks)";
    ApiError::new(ErrorCode::InvalidRequest, message, remedy)
}

#[cfg(test)]
mod tests {
    use godwit_qemu::{Disk, DiskFormat, Uuid, VmName};

    use super::*;

    fn plan_of_one() -> Plan {
        let disk = NotedDisk {
            disk: Disk::new("/srv/web.raw", DiskFormat::Raw).into(),
            node: "disk0".into(),
            virtual_bytes: 1 << 20,
            is_layer: false,
        };
        let asked = ArrivingDisk {
            path: "/srv/web.raw".into(),
            format: DiskFormat::Raw,
            virtual_bytes: 1 << 20,
            used_bytes: 1 << 16,
            base: Vec::new(),
            onto: None,
        };
        let transfer = "0123456789abcdef0123456789abcdef".to_owned();
        Plan {
            note: DiskTransferNote {
                transfer: transfer.clone(),
                to: "b".into(),
                directory: None,
                flatten: false,
                disks: vec![disk],
                limited: false,
                handed_over: false,
                mirrored: false,
            },
            request: ArrivingDisks {
                transfer,
                vm: VmName::new("web").unwrap(),
                uuid: Uuid::nil(),
                from: "a".into(),
                to: None,
                disks: vec![asked],
            },
            indexes: vec![0],
        }
    }

    #[test]
    fn only_the_same_images_to_the_same_place_are_continued() {
        let plan = plan_of_one();
        let transfer = "f".repeat(32);
        let earlier = DiskTransferNote { transfer, limited: true, ..plan.note.clone() };
        assert!(plan.continues(&earlier));
        let mut disks = earlier.disks.clone();
        disks[0].virtual_bytes += 1;
        let others = [
            DiskTransferNote { to: "c".into(), ..earlier.clone() },
            DiskTransferNote { directory: Some("/ssd".into()), ..earlier.clone() },
            DiskTransferNote { flatten: true, ..earlier.clone() },
            DiskTransferNote { handed_over: true, ..earlier.clone() },
            DiskTransferNote { mirrored: true, ..earlier.clone() },
            DiskTransferNote { disks, ..earlier.clone() },
        ];
        assert!(others.iter().all(|other| !plan.continues(other)));
        let mut again = plan.clone();
        again.set_transfer(earlier.transfer.clone());
        assert_eq!(again.note.transfer, earlier.transfer);
        assert_eq!(again.request.transfer, earlier.transfer);
        assert_eq!(plan.used_bytes(), 1 << 16);
    }

    #[test]
    fn an_image_in_a_pool_is_raw_and_no_layer() {
        let to = |dir: &str| TravellingDisks { to: Some(dir.into()), ..TravellingDisks::default() };
        let disk: ResolvedDisk = Disk::new("/srv/web.qcow2", DiskFormat::Qcow2).into();
        for (is_layer, how, format) in [
            (true, &TravellingDisks::default(), DiskFormat::Qcow2),
            (true, &to("/ssd"), DiskFormat::Qcow2),
            (false, &to("rbd:vms"), DiskFormat::Raw),
            (false, &to("/dev/vg0"), DiskFormat::Raw),
            (false, &to("lvm:vg0/thin0"), DiskFormat::Raw),
            (true, &to("/dev/shm"), DiskFormat::Qcow2),
        ] {
            assert_eq!(format_there("web", &disk, is_layer, how).unwrap(), format);
        }
        for (place, words) in [
            ("rbd:vms", "into a pool of Ceph"),
            ("lvm:vg0/thin0", "into a thin pool of LVM"),
            ("/dev/vg0", "onto a block"),
        ] {
            let refused = format_there("web", &disk, true, &to(place)).unwrap_err();
            assert!(refused.message.contains("it has a backing file"), "{refused:?}");
            assert!(refused.message.contains(words), "{refused:?}");
        }
        // Without a place, the directory of the disk decides.
        let disk: ResolvedDisk = Disk::new("/dev/vg0/web", DiskFormat::Raw).into();
        let how = TravellingDisks::default();
        assert_eq!(place_there(&disk, &how), Some(Path::new("/dev/vg0")));
    }

    #[test]
    fn all_disks_or_none_travel_onto_devices_and_no_mirror_does() {
        let mut request = plan_of_one().request;
        assert!(problem_of_devices(&request, true).is_none());
        request.disks[0].onto = Some(OntoDevice { overwrite: false, source: None });
        assert!(problem_of_devices(&request, false).is_none());
        let refused = problem_of_devices(&request, true).unwrap();
        assert!(refused.message.contains("I/O thread"), "{refused}");
        request.disks.push(ArrivingDisk { onto: None, ..request.disks[0].clone() });
        let refused = problem_of_devices(&request, false).unwrap();
        assert!(refused.message.contains("would be files"), "{refused}");
    }
}
