//! The network namespaces of this machine by name, as `ip netns` keeps them in /run/netns: which
//! there are, who lives in them, their settings.

use std::io;
use std::os::linux::fs::MetadataExt;
use std::path::Path;

use anyhow::{Context, Result};
use godwit_prober::NAMESPACE_DIR;
pub use godwit_prober::{in_namespace, namespace_path as path};

/// Returns whether a namespace of that name exists.
#[must_use]
pub fn exists(name: &str) -> bool {
    path(name).exists()
}

/// Returns the names of all namespaces.
///
/// # Errors
/// The directory cannot be read.
pub fn list() -> Result<Vec<String>> {
    let entries = match std::fs::read_dir(NAMESPACE_DIR) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error).with_context(|| format!("cannot read {NAMESPACE_DIR}")),
    };
    let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    Ok(names.collect())
}

/// Returns the processes in the namespace.
///
/// # Errors
/// /proc cannot be read.
pub fn processes(name: &str) -> Result<Vec<i32>> {
    let Ok(wanted) = std::fs::metadata(path(name)) else {
        return Ok(Vec::new());
    };
    let same = |pid: &i32| {
        std::fs::metadata(format!("/proc/{pid}/ns/net")).is_ok_and(|found| {
            (found.st_dev(), found.st_ino()) == (wanted.st_dev(), wanted.st_ino())
        })
    };
    let entries = std::fs::read_dir("/proc").context("cannot read /proc")?;
    let pids = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<i32>().ok());
    Ok(pids.filter(same).collect())
}

/// Sets sysctls inside the namespace, each as (path below /proc/sys, value). With `optional`,
/// sysctls that this kernel lacks are skipped.
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
                .with_context(|| format!("cannot set {key} to {value} in namespace {name}"))?;
        }
        Ok(())
    })?
}

/// Reads a sysctl inside the namespace. Returns `None` if this kernel lacks it.
///
/// # Errors
/// The namespace cannot be entered.
pub(crate) fn sysctl(name: &str, key: &str) -> Result<Option<String>> {
    in_namespace(name, || std::fs::read_to_string(Path::new("/proc/sys").join(key)).ok())
}
