//! Disks that travel with a VM: each of them has the same size, and all of it travels before the
//! memory.

use godwit_api::{TravellingDisks, VmInfo};
use godwit_types::{DiskReport, DiskRound, DisksProgress, DisksReport};

/// Bytes of a disk in use.
const DISK_BYTES: u64 = 256 << 20;
/// Time until which the images at the source stay, in reports: 2030.
const KEPT_UNTIL_UNIX_MS: u64 = 1_893_456_000_000;

/// Returns the disks of a VM that travel, with their places.
pub(super) fn travelling(vm: &VmInfo, request: Option<&TravellingDisks>) -> Vec<DiskReport> {
    let Some(request) = request else { return Vec::new() };
    let written = vm.spec.disks.iter().filter(|disk| !disk.readonly);
    let of = |disk: &godwit_qemu::Disk| {
        let to = match (&request.to, disk.path.file_name()) {
            (Some(dir), Some(name)) => dir.join(name),
            _ => disk.path.clone(),
        };
        DiskReport {
            from: disk.path.display().to_string(),
            to: to.display().to_string(),
            virtual_bytes: DISK_BYTES,
            sent_bytes: DISK_BYTES,
            ..DiskReport::default()
        }
    };
    written.map(of).collect()
}

/// Returns the bytes of all disks.
pub(super) fn bytes(disks: &[DiskReport]) -> u64 {
    disks.iter().map(|disk| disk.sent_bytes).sum()
}

/// Gives a VM that has arrived the places of its disks.
pub(super) fn arrive(vm: &mut VmInfo, disks: &[DiskReport]) {
    for disk in &mut vm.spec.disks {
        if let Some(moved) = disks.iter().find(|moved| *moved.from == *disk.path.to_string_lossy())
        {
            disk.path = moved.to.clone().into();
        }
    }
}

/// Returns the progress of disks of which so much was sent; none: no disks travel.
pub(super) fn progress(
    disks: &[DiskReport],
    sent_bytes: u64,
    bytes_per_s: f64,
) -> Option<DisksProgress> {
    let total_bytes = bytes(disks);
    (total_bytes > 0).then(|| DisksProgress {
        remaining_bytes: total_bytes - sent_bytes,
        total_bytes,
        sent_bytes,
        bytes_per_s,
        ..DisksProgress::default()
    })
}

/// Returns the report of disks that arrived; none: no disks travelled.
pub(super) fn report(disks: &[DiskReport], took_ms: f64) -> Option<DisksReport> {
    (!disks.is_empty()).then(|| DisksReport {
        disks: disks.to_vec(),
        rounds: vec![DiskRound { bytes: bytes(disks), duration_ms: took_ms }],
        wire_bytes: bytes(disks),
        last_round_ms: Some(1.0),
        kept_until_unix_ms: Some(KEPT_UNTIL_UNIX_MS),
        ..DisksReport::default()
    })
}
