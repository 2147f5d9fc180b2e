//! What a trial needs of the machine, and what is said where it is missing.

use std::fs::OpenOptions;
use std::path::{Path, PathBuf};

use anyhow::{Result, bail};

use crate::image;
use crate::programs::Programs;

/// Set to anything, a test that can't run is a failure: for machines on which all must run.
const REQUIRED: &str = "GODWIT_REQUIRE_TRIALS";

/// What a trial needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Needs {
    /// `/dev/kvm`, whatever guests it runs.
    pub kvm: bool,
}

impl Needs {
    /// Root, iproute2, QEMU, the built binaries and the guest's image.
    #[must_use]
    pub fn lab() -> Needs {
        Needs { kvm: false }
    }

    /// And KVM.
    #[must_use]
    pub fn kvm() -> Needs {
        Needs { kvm: true }
    }
}

/// The first thing that is missing here; `None` where a trial can run.
#[must_use]
pub fn missing(needs: &Needs) -> Option<String> {
    if !rustix::process::geteuid().is_root() {
        return Some("network namespaces need root".to_owned());
    }
    for (program, package) in
        [("qemu-system-x86_64", "qemu-system-x86"), ("ip", "iproute2"), ("tc", "iproute2")]
    {
        if !is_in_path(program) {
            return Some(format!("{program} is not in PATH (apt-get install {package})"));
        }
    }
    if let Err(error) = programs() {
        return Some(error.to_string());
    }
    if image::find(&image::default_dir()).is_none() {
        return Some(format!("no guest image in {} (make build)", image::default_dir().display()));
    }
    if needs.kvm
        && let Err(error) = OpenOptions::new().read(true).write(true).open("/dev/kvm")
    {
        return Some(format!("/dev/kvm can't be opened: {error}"));
    }
    None
}

/// Whether a test has to be skipped; the reason is printed.
///
/// # Errors
/// Whether somebody demands that all runs.
#[must_use]
pub fn must_run() -> bool {
    std::env::var_os(REQUIRED).is_some()
}

/// It has to, and somebody demands that it runs.
pub(crate) fn skip(name: &str, needs: &Needs) -> Result<bool> {
    let Some(reason) = missing(needs) else { return Ok(false) };
    if must_run() && !needs.kvm {
        bail!("{name} can't run, and {REQUIRED} is set: {reason}");
    }
    eprintln!("skipped: {name}: {reason}");
    Ok(true)
}

fn is_in_path(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|directory| directory.join(program).is_file())
}

/// Returns the programs that were built with this one: in its folder, or above it for a test
/// (`target/release/deps`).
///
/// # Errors
/// One of them, or the tracker library, has not been built.
pub(crate) fn programs() -> Result<Programs> {
    const FILES: [&str; 3] = ["godwit", "godwit-lab", "libgodwit_tracker.so"];
    let this = std::env::current_exe()?;
    let mut folders = this.ancestors().skip(1).take(2);
    let found = folders.find(|folder| FILES.iter().all(|file| folder.join(file).is_file()));
    match found {
        Some(folder) => Ok(Programs::beside(folder.join("godwit-lab"))),
        None => bail!("{} are not built beside {} (make build)", FILES.join(", "), this.display()),
    }
}

/// The folder that the sources lie in.
pub(crate) fn source_tree() -> PathBuf {
    let lab = Path::new(env!("CARGO_MANIFEST_DIR"));
    lab.parent().unwrap_or(lab).to_path_buf()
}
