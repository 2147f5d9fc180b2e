//! The first steps of init: file systems, kernel modules, the kernel command line.

use std::{fs, path::PathBuf};

use godwit_guest::control::{MemoryUse, meminfo_kib};
use rustix::{io::Errno, mount::MountFlags};

use crate::guest::Guest;

/// Where the image keeps the kernel's modules.
const MODULES: &str = "/modules";

/// Mounts what the rest of init reads.
pub(crate) fn mount_all(guest: &Guest) {
    for (kind, target) in [("proc", "/proc"), ("sysfs", "/sys"), ("devtmpfs", "/dev")] {
        // Some kernels mount devtmpfs on their own: EBUSY is as good.
        match rustix::mount::mount(kind, target, kind, MountFlags::empty(), None) {
            Ok(()) | Err(Errno::BUSY) => {}
            Err(error) => guest.report(&format!("mounting {kind} on {target}: {error}")),
        }
    }
}

/// The kernel command line.
pub(crate) fn command_line(guest: &Guest) -> String {
    fs::read_to_string("/proc/cmdline").unwrap_or_else(|error| {
        guest.report(&format!("reading the kernel command line: {error}"));
        String::new()
    })
}

/// Bytes that a program can take without pushing out what is in use.
pub(crate) fn available_bytes(guest: &Guest) -> u64 {
    meminfo_kib(&meminfo(), "MemAvailable").map_or_else(
        || {
            guest.report("/proc/meminfo tells no MemAvailable; taking 64 MiB");
            64 << 20
        },
        |kilobytes| kilobytes << 10,
    )
}

/// What the memory is used for, if the kernel tells.
pub(crate) fn memory_use() -> Option<MemoryUse> {
    MemoryUse::parse(&meminfo())
}

fn meminfo() -> String {
    fs::read_to_string("/proc/meminfo").unwrap_or_default()
}

/// Loads every module of the image. Order does not matter: passes go on while one of them loads something.
pub(crate) fn load_modules(guest: &Guest) {
    let mut waiting: Vec<PathBuf> = match fs::read_dir(MODULES) {
        Ok(entries) => entries.filter_map(Result::ok).map(|entry| entry.path()).collect(),
        Err(error) => return guest.report(&format!("{MODULES}: {error}")),
    };
    waiting.sort();
    loop {
        let before = waiting.len();
        let mut failures = Vec::new();
        waiting.retain(|path| match load(path) {
            Ok(()) => false,
            Err(error) => {
                failures.push(format!("module {}: {error}", path.display()));
                true
            }
        });
        if waiting.is_empty() || waiting.len() == before {
            return failures.iter().for_each(|failure| guest.report(failure));
        }
    }
}

fn load(path: &PathBuf) -> std::io::Result<()> {
    let file = fs::File::open(path)?;
    match rustix::system::finit_module(&file, c"", 0) {
        // EEXIST: built into this kernel.
        Ok(()) | Err(Errno::EXIST) => Ok(()),
        Err(error) => Err(error.into()),
    }
}
