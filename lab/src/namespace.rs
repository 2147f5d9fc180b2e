//! Network namespaces by name, as `ip netns` keeps them under /run/netns.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::linux::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

const DIRECTORY: &str = "/run/netns";

/// Where a namespace is bound.
#[must_use]
pub fn path(name: &str) -> PathBuf {
    Path::new(DIRECTORY).join(name)
}

/// Whether a namespace of that name is there.
#[must_use]
pub fn exists(name: &str) -> bool {
    path(name).exists()
}

/// Names of all namespaces.
///
/// # Errors
/// The directory can't be read.
pub fn list() -> Result<Vec<String>> {
    let entries = match std::fs::read_dir(DIRECTORY) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error).with_context(|| format!("can't read {DIRECTORY}")),
    };
    let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    Ok(names.collect())
}

/// Runs `closure` on a thread of its own inside the namespace: sockets opened, devices made and processes
/// started there belong to it. The caller's own thread stays where it is.
///
/// # Errors
/// No such namespace, no right to enter it (root), or the closure panicked.
pub fn in_namespace<T: Send>(name: &str, closure: impl FnOnce() -> T + Send) -> Result<T> {
    let file = File::open(path(name)).with_context(|| {
        format!("there is no network namespace {name}; is the lab up? `godwit lab up` brings it")
    })?;
    let inside = move || -> io::Result<T> {
        move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network))?;
        Ok(closure())
    };
    std::thread::scope(|scope| scope.spawn(inside).join())
        .map_err(|_| anyhow!("work inside network namespace {name} panicked"))?
        .with_context(|| format!("can't enter network namespace {name}; it needs root"))
}

/// Processes that live in the namespace.
///
/// # Errors
/// /proc can't be read.
pub fn processes(name: &str) -> Result<Vec<i32>> {
    let Ok(wanted) = std::fs::metadata(path(name)) else {
        return Ok(Vec::new());
    };
    let same = |pid: &i32| {
        std::fs::metadata(format!("/proc/{pid}/ns/net"))
            .is_ok_and(|found| (found.st_dev(), found.st_ino()) == (wanted.st_dev(), wanted.st_ino()))
    };
    let entries = std::fs::read_dir("/proc").context("can't read /proc")?;
    let pids = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<i32>().ok());
    Ok(pids.filter(same).collect())
}

/// Sets sysctls inside the namespace, each (path below /proc/sys, value). One that this kernel lacks is skipped
/// where `optional`.
///
/// # Errors
/// A value is refused.
pub(crate) fn set_sysctls(name: &str, values: &[(String, String)], optional: bool) -> Result<()> {
    in_namespace(name, || {
        for (key, value) in values {
            let file = Path::new("/proc/sys").join(key);
            if optional && !file.exists() {
                continue;
            }
            std::fs::write(&file, value)
                .with_context(|| format!("can't set {key} to {value} in namespace {name}"))?;
        }
        Ok(())
    })?
}

/// Reads a sysctl inside the namespace; `None` where this kernel lacks it.
///
/// # Errors
/// The namespace can't be entered.
pub(crate) fn sysctl(name: &str, key: &str) -> Result<Option<String>> {
    in_namespace(name, || std::fs::read_to_string(Path::new("/proc/sys").join(key)).ok())
}
