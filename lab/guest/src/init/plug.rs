//! The use of what comes while the guest runs: vCPUs and memory are brought online, memory is used
//! and read again for ever, and what there is is shown on the console.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use crate::guest::{Guest, print};

/// Interval between two looks.
const INTERVAL: Duration = Duration::from_millis(50);
const PAGE_BYTES: usize = 4096;
/// Part of the memory that came which is used.
const USED_SHARE: u64 = 2;

/// Uses whatever comes, for ever.
pub(crate) fn use_all(guest: &Arc<Guest>) -> anyhow::Result<()> {
    let mut shown = String::new();
    let first_kib = memory_kib();
    let mut used: Vec<u8> = Vec::new();
    loop {
        bring_online("/sys/devices/system/cpu", "cpu");
        bring_online("/sys/devices/system/memory", "memory");
        let grown_kib = memory_kib().saturating_sub(first_kib);
        if used.is_empty() && grown_kib > 0 {
            // More than was free before.
            let bytes = usize::try_from((first_kib + grown_kib) / USED_SHARE * 1024)?;
            used = vec![0; bytes];
            for (number, page) in used.chunks_exact_mut(PAGE_BYTES).enumerate() {
                page[..8].copy_from_slice(&number.to_le_bytes());
            }
        }
        for (number, page) in used.chunks_exact(PAGE_BYTES).enumerate() {
            if page[..8] != number.to_le_bytes() || page[8..].iter().any(|byte| *byte != 0) {
                guest.report(&format!("page {number} of the plugged memory is wrong"));
                return Ok(());
            }
        }
        let nics = fs::read_dir("/sys/class/net").map_or(0, |nics| {
            nics.flatten()
                .filter(|nic| nic.file_name().as_encoded_bytes().starts_with(b"eth"))
                .count()
        });
        let cpus = std::thread::available_parallelism().map_or(0, usize::from);
        let memory = if used.is_empty() { "none" } else { "used" };
        let now = format!("PLUG cpus={cpus} nics={nics} memory={memory}");
        if now != shown {
            print(&now);
            shown = now;
        }
        std::thread::park_timeout(INTERVAL);
    }
}

/// Brings what the kernel has found but does not use online.
fn bring_online(folder: &str, prefix: &str) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let is_one = entry.file_name().to_str().is_some_and(|name| {
            name.strip_prefix(prefix).is_some_and(|number| number.parse::<u32>().is_ok())
        });
        let online = entry.path().join("online");
        if is_one && is_off(&online) {
            // If it fails, it is tried again.
            let _ = fs::write(online, "1");
        }
    }
}

fn is_off(online: &Path) -> bool {
    fs::read_to_string(online).is_ok_and(|text| text.trim() == "0")
}

/// Returns the memory that the kernel manages.
fn memory_kib() -> u64 {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:"));
    line.and_then(|line| line.split_whitespace().next()?.parse().ok()).unwrap_or(0)
}
