//! The use of disks and CDs: each disk is written and read again, block after block; what is in a
//! CD-ROM drive is shown. Disks and CDs may come and go.
//!
//! Block `n` of a disk holds the number `n + LAP * lap`: what an image holds afterwards shows how
//! far the guest came.

use std::collections::BTreeMap;
use std::fs::{self, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::OFlags;

use crate::guest::{Guest, print};

/// Interval between two writes of a disk, and between two looks at the drives.
const INTERVAL: Duration = Duration::from_millis(50);
/// Bytes of a block.
const BLOCK_BYTES: usize = 4096;
/// Blocks of a disk that are written.
const BLOCKS: u64 = 256;
/// Bytes at the start of a CD that are shown.
const CD_BYTES: usize = 16;

/// What is known of a disk.
#[derive(Default)]
struct Known {
    /// Number of the next block to write.
    next: u64,
}

/// A block with its number throughout. O_DIRECT needs its alignment.
#[repr(C, align(4096))]
struct Block([u8; BLOCK_BYTES]);

/// Uses all disks and drives that there are, for ever.
pub(crate) fn use_all(guest: &Arc<Guest>) -> anyhow::Result<()> {
    let mut disks: BTreeMap<String, Known> = BTreeMap::new();
    let mut cds: BTreeMap<String, String> = BTreeMap::new();
    loop {
        let names: Vec<String> = fs::read_dir("/sys/block")
            .map(|entries| {
                let names = entries.flatten().map(|entry| entry.file_name());
                names.filter_map(|name| name.into_string().ok()).collect()
            })
            .unwrap_or_default();
        disks.retain(|name, _| {
            let stays = names.contains(name);
            if !stays {
                print(&format!("DRIVES {name} is gone"));
            }
            stays
        });
        for name in &names {
            if name.starts_with("sr") {
                show_cd(name, &mut cds);
            } else if name.starts_with("vd") || name.starts_with("sd") {
                let is_new = !disks.contains_key(name);
                let disk = disks.entry(name.clone()).or_default();
                if let Err(why) = use_disk(name, disk, is_new) {
                    guest.report(&format!("disk {name}: {why}"));
                }
            }
        }
        std::thread::park_timeout(INTERVAL);
    }
}

/// Writes the next block of a disk, and reads it, the one before, and the oldest one again.
fn use_disk(name: &str, disk: &mut Known, is_new: bool) -> Result<(), String> {
    let read = |what: &str| fs::read_to_string(format!("/sys/block/{name}/{what}"));
    if read("ro").is_ok_and(|ro| ro.trim() == "1") {
        return Ok(());
    }
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(OFlags::DIRECT.bits().cast_signed())
        .open(format!("/dev/{name}"))
        .map_err(|why| format!("cannot open it: {why}"))?;
    let mut block = Block([0; BLOCK_BYTES]);
    let number = disk.next;
    for bytes in block.0.chunks_exact_mut(8) {
        bytes.copy_from_slice(&number.to_le_bytes());
    }
    let at = |number: u64| number % BLOCKS * BLOCK_BYTES as u64;
    file.write_all_at(&block.0, at(number)).map_err(|why| format!("cannot write: {why}"))?;
    let next_overwritten = (number + 1).checked_sub(BLOCKS);
    for wanted in next_overwritten.into_iter().chain(number.saturating_sub(1)..=number) {
        file.read_exact_at(&mut block.0, at(wanted))
            .map_err(|why| format!("cannot read: {why}"))?;
        let wrong = block.0.chunks_exact(8).any(|bytes| bytes != wanted.to_le_bytes());
        if wrong {
            return Err(format!("block {wanted} is not what was written"));
        }
    }
    if is_new {
        let size = read("size").unwrap_or_default();
        print(&format!("DRIVES {name} of {} sectors is written", size.trim()));
    }
    disk.next += 1;
    Ok(())
}

/// Shows what is in a drive if it has changed.
fn show_cd(name: &str, cds: &mut BTreeMap<String, String>) {
    let mut start = [0; CD_BYTES];
    let opened = OpenOptions::new().read(true).open(format!("/dev/{name}"));
    let found = match opened.and_then(|file| file.read_exact_at(&mut start, 0)) {
        Ok(()) => String::from_utf8_lossy(&start).trim_end_matches('\0').to_owned(),
        Err(_) => "nothing".to_owned(),
    };
    if cds.get(name) != Some(&found) {
        print(&format!("DRIVES {name} holds {found}"));
        cds.insert(name.to_owned(), found);
    }
}
