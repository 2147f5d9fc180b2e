//! Memory available to a new VM: what the kernel has, less what is promised to VMs that have not
//! touched it yet.

use std::io;
use std::path::Path;

/// Memory reserved for the host itself.
const HOST_RESERVE_BYTES: u64 = 256 << 20;

/// Memory promised to an active VM, and the part that it already holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Promise {
    /// Size of the guest's memory.
    pub promised_bytes: u64,
    /// Memory that its files already hold; the kernel counts it as used.
    pub taken_bytes: u64,
}

/// Returns the bytes that a new VM can get. `available_bytes`: what the kernel can still provide
/// (MemAvailable); `ram_dir_bytes`: free space of the file system for guest memory.
#[must_use]
pub(crate) fn grantable_bytes(
    available_bytes: u64,
    ram_dir_bytes: u64,
    promises: &[Promise],
) -> u64 {
    let outstanding = promises
        .iter()
        .map(|promise| promise.promised_bytes.saturating_sub(promise.taken_bytes))
        .fold(0, u64::saturating_add);
    let free = available_bytes.saturating_sub(HOST_RESERVE_BYTES).min(ram_dir_bytes);
    free.saturating_sub(outstanding)
}

/// Returns the guest memory that the host would have without any VM: the kernel's memory less the
/// host's reserve, at most the size of the file system for guest memory, mounted at `ram_dir`.
pub(crate) fn guest_bytes(ram_dir: &Path) -> io::Result<u64> {
    let size = rustix::fs::statvfs(ram_dir)
        .map_or(u64::MAX, |stat| stat.f_blocks.saturating_mul(stat.f_frsize));
    Ok(total_bytes()?.saturating_sub(HOST_RESERVE_BYTES).min(size))
}

/// Returns MemAvailable of /proc/meminfo (proc(5)), in bytes.
pub(crate) fn available_bytes() -> io::Result<u64> {
    of_meminfo("MemAvailable:")
}

/// Returns MemTotal of /proc/meminfo (proc(5)), in bytes.
pub(crate) fn total_bytes() -> io::Result<u64> {
    of_meminfo("MemTotal:")
}

fn of_meminfo(key: &str) -> io::Result<u64> {
    let text = std::fs::read_to_string("/proc/meminfo")?;
    parse(&text, key).ok_or_else(|| {
        io::Error::new(io::ErrorKind::InvalidData, format!("/proc/meminfo has no {key}"))
    })
}

fn parse(text: &str, key: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(key))?;
    let kib: u64 = line.split_whitespace().next()?.parse().ok()?;
    kib.checked_mul(1024)
}

/// Guest memory of a host.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MemoryFigures {
    /// Guest memory of the host without any VM.
    pub(crate) total_bytes: u64,
    /// Memory available to a new VM.
    pub(crate) available_bytes: u64,
    /// Memory promised to active VMs.
    pub(crate) committed_bytes: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    #[test]
    fn promised_memory_is_not_granted_twice() {
        let fresh = Promise { promised_bytes: 4 * GIB, taken_bytes: 0 };
        let grown = Promise { promised_bytes: 4 * GIB, taken_bytes: 4 * GIB };
        let free = 8 * GIB + HOST_RESERVE_BYTES;
        assert_eq!(grantable_bytes(free, 16 * GIB, &[]), 8 * GIB);
        assert_eq!(grantable_bytes(free, 16 * GIB, &[fresh]), 4 * GIB);
        assert_eq!(grantable_bytes(free, 16 * GIB, &[grown]), 8 * GIB);
        assert_eq!(grantable_bytes(free, 16 * GIB, &[fresh, fresh, fresh]), 0);
        assert_eq!(grantable_bytes(free, 2 * GIB, &[]), 2 * GIB);
    }

    #[test]
    fn meminfo_is_read() {
        assert_eq!(
            parse("MemTotal: 9 kB\nMemAvailable:   24576 kB\n", "MemAvailable:"),
            Some(24576 * 1024)
        );
        assert_eq!(parse("MemTotal: 9 kB\n", "MemAvailable:"), None);
        assert!(total_bytes().unwrap() > available_bytes().unwrap());
    }
}
