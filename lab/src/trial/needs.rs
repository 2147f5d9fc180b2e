//! Requirements of a trial on the machine, and the message if one is missing.

use std::fs::OpenOptions;
use std::path::{Path, PathBuf};

use anyhow::{Result, bail};

use crate::image;
use crate::programs::Programs;

/// If this variable is set, a test that cannot run fails: for machines on which all tests must run.
const REQUIRED: &str = "GODWIT_REQUIRE_TRIALS";

/// Requirements of a trial.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Needs {
    /// `/dev/kvm`, whatever guests it can run.
    pub kvm: bool,
}

impl Needs {
    /// Requires root, iproute2, QEMU, the built binaries and the guest's image.
    #[must_use]
    pub fn lab() -> Needs {
        Needs { kvm: false }
    }

    /// Requires KVM in addition.
    #[must_use]
    pub fn kvm() -> Needs {
        Needs { kvm: true }
    }
}

/// Returns the first missing requirement, or `None` if a trial can run.
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
        return Some(format!(
            "no guest image in {} (make programs)",
            image::default_dir().display()
        ));
    }
    if needs.kvm
        && let Err(error) = OpenOptions::new().read(true).write(true).open("/dev/kvm")
    {
        return Some(format!("cannot open /dev/kvm: {error}"));
    }
    None
}

/// Returns whether all tests are required to run.
#[must_use]
pub fn must_run() -> bool {
    std::env::var_os(REQUIRED).is_some()
}

/// Returns whether a test must be skipped, and prints the reason.
///
/// # Errors
/// The test must be skipped although all tests are required to run. Tests that need KVM are exempt.
pub(crate) fn skip(name: &str, needs: &Needs) -> Result<bool> {
    let Some(reason) = missing(needs) else { return Ok(false) };
    if must_run() && !needs.kvm {
        bail!("{name} cannot run, and {REQUIRED} is set: {reason}");
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

/// Returns the folder of the sources.
pub(crate) fn source_tree() -> PathBuf {
    let lab = Path::new(env!("CARGO_MANIFEST_DIR"));
    lab.parent().unwrap_or(lab).to_path_buf()
}
