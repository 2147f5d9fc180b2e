//! Disks without locks: the hosts of a lab share a kernel, and QEMU's lock of an image would hide
//! that a second one wants to write it.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

const SOURCE: &str = include_str!("unlocked.c");

/// Builds a library that agents load into QEMU in place of the tracker: the tracker, and locks that
/// always succeed. It is in a new folder, which the users of QEMUs can read.
pub(super) fn build(folder: &Path, tracker: &Path) -> Result<PathBuf> {
    fs::create_dir(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let (source, library) = (folder.join("unlocked.c"), folder.join("libunlocked.so"));
    let copy = folder.join("libgodwit_tracker.so");
    fs::copy(tracker, &copy).with_context(|| format!("cannot copy {}", tracker.display()))?;
    fs::write(&source, SOURCE)?;
    let compiled = Command::new("cc")
        .args(["-shared", "-fPIC", "-O2", "-o"])
        .args([&library, &source])
        .arg("-Wl,--no-as-needed")
        .arg(&copy)
        .arg(format!("-Wl,-rpath,{}", folder.display()))
        .output()
        .context("cannot compile the library without locks; remedy: apt-get install gcc")?;
    ensure!(compiled.status.success(), "cc: {}", String::from_utf8_lossy(&compiled.stderr));
    for path in [folder, &copy, &library] {
        fs::set_permissions(path, Permissions::from_mode(0o755))?;
    }
    Ok(library)
}
