//! The first steps of init: file systems, kernel modules, the kernel command line.

use std::{fs, path::PathBuf};

use godwit_guest::control::{MemoryUse, meminfo_kib};
use rustix::{io::Errno, mount::MountFlags};

use crate::guest::Guest;

/// Folder of the kernel's modules in the image.
const MODULES: &str = "/modules";

/// Mounts the file systems that the rest of init reads.
pub(crate) fn mount_all(guest: &Guest) {
    for (kind, target) in [("proc", "/proc"), ("sysfs", "/sys"), ("devtmpfs", "/dev")] {
        // Some kernels mount devtmpfs on their own, so EBUSY is a success.
        match rustix::mount::mount(kind, target, kind, MountFlags::empty(), None) {
            Ok(()) | Err(Errno::BUSY) => {}
            Err(error) => guest.report(&format!("cannot mount {kind} on {target}: {error}")),
        }
    }
}

/// Returns the kernel command line.
pub(crate) fn command_line(guest: &Guest) -> String {
    fs::read_to_string("/proc/cmdline").unwrap_or_else(|error| {
        guest.report(&format!("cannot read the kernel command line: {error}"));
        String::new()
    })
}

/// Returns how many bytes a program can allocate without evicting memory in use.
pub(crate) fn available_bytes(guest: &Guest) -> u64 {
    meminfo_kib(&meminfo(), "MemAvailable").map_or_else(
        || {
            guest.report("/proc/meminfo has no MemAvailable; assuming 64 MiB");
            64 << 20
        },
        |kilobytes| kilobytes << 10,
    )
}

/// Returns the use of the memory, if the kernel reports it.
pub(crate) fn memory_use() -> Option<MemoryUse> {
    MemoryUse::parse(&meminfo())
}

fn meminfo() -> String {
    fs::read_to_string("/proc/meminfo").unwrap_or_default()
}

/// Loads every module of the image. Their order does not matter: passes repeat while one of them
/// loads a module.
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
        // EEXIST: the module is built into this kernel.
        Ok(()) | Err(Errno::EXIST) => Ok(()),
        Err(error) => Err(error.into()),
    }
}
