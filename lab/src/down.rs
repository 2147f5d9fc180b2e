//! Takes a lab down, whatever is left of it.
//!
//! It ends only processes that the lab or its agents started: those in lab.json and in the VMs' pid
//! files, by pid and start time, and all processes in a namespace that the lab made. So it works
//! without lab.json as well.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use rustix::mount::{UnmountFlags, unmount};

use crate::agents;
use crate::kvm_probe;
use crate::links::remove_namespaces;
use crate::namespace;
use crate::process::{ProcessId, end_all, self_and_ancestors};
use crate::state::{LabLock, LabState};
use crate::topology::{
    DEFAULT_PREFIX, DEFAULT_STATE_DIR, LabPaths, check_prefix, is_lab_namespace,
};

/// Time that a process may take after SIGTERM.
const GRACE: Duration = Duration::from_secs(5);

/// Identifies a lab of this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LabName {
    /// Prefix of its namespaces' names.
    pub prefix: String,
    /// Directory of its files.
    pub state_dir: PathBuf,
}

impl Default for LabName {
    fn default() -> LabName {
        LabName { prefix: DEFAULT_PREFIX.to_owned(), state_dir: PathBuf::from(DEFAULT_STATE_DIR) }
    }
}

/// Takes the lab down. Returns false if there was none.
///
/// # Errors
/// Not root, another lab command is running, or something cannot be removed.
pub fn down(name: &LabName) -> Result<bool> {
    check_prefix(&name.prefix)?;
    if leftovers(name)?.is_empty() {
        return Ok(false);
    }
    if !rustix::process::geteuid().is_root() {
        bail!("the lab's namespaces and processes are root's; run it with sudo");
    }
    let _lock = LabLock::take(&LabPaths::new(&name.state_dir))?;
    tear_down(name)?;
    Ok(true)
}

/// Returns what exists of a lab: its namespaces and its directory.
pub(crate) fn leftovers(name: &LabName) -> Result<Vec<String>> {
    let mut left: Vec<String> = own_namespaces(name)?
        .into_iter()
        .map(|namespace| format!("namespace {namespace}"))
        .collect();
    // An empty directory contains only our own lock.
    let holds_something =
        std::fs::read_dir(&name.state_dir).is_ok_and(|mut entries| entries.next().is_some());
    if holds_something {
        left.push(name.state_dir.display().to_string());
    }
    Ok(left)
}

/// Removes everything, under the caller's lock.
pub(crate) fn tear_down(name: &LabName) -> Result<()> {
    let paths = LabPaths::new(&name.state_dir);
    if let Some(state) = LabState::load(&paths) {
        // The agents come first, so that none reacts to a QEMU that ends.
        let processes: Vec<ProcessId> = state.processes.iter().map(|process| process.id).collect();
        end_all(&processes, GRACE)?;
    }
    end_all(&hypervisors(&paths), GRACE)?;
    let namespaces = own_namespaces(name)?;
    end_all(&inhabitants(&namespaces)?, GRACE)?;
    unmount_below(paths.root())?;
    kvm_probe::keep(&paths);
    remove_namespaces(&namespaces)?;
    remove_state(&paths)
}

fn own_namespaces(name: &LabName) -> Result<Vec<String>> {
    let mut own: Vec<String> = namespace::list()?
        .into_iter()
        .filter(|found| is_lab_namespace(&name.prefix, found))
        .collect();
    own.sort();
    Ok(own)
}

/// Returns the QEMUs that the agents started, from `PID STARTTIME` in RUN_DIR/vms/NAME/qemu.pid as
/// the agent writes it.
fn hypervisors(paths: &LabPaths) -> Vec<ProcessId> {
    let below = |directory: PathBuf| {
        let entries = std::fs::read_dir(directory).into_iter().flatten();
        entries.filter_map(|entry| Some(entry.ok()?.path()))
    };
    let hosts =
        below(paths.hosts()).filter_map(|host| host.file_name()?.to_str().map(str::to_owned));
    let vms = hosts.flat_map(|host| below(agents::run_dir(paths, &host).join("vms")));
    vms.filter_map(|vm| ProcessId::parse(&std::fs::read_to_string(vm.join("qemu.pid")).ok()?))
        .collect()
}

/// Returns the processes in the namespaces, except the one that runs `down` inside.
fn inhabitants(namespaces: &[String]) -> Result<Vec<ProcessId>> {
    let spared = self_and_ancestors();
    let mut found = Vec::new();
    for name in namespaces {
        let pids = namespace::processes(name)?;
        found
            .extend(pids.into_iter().filter(|pid| !spared.contains(pid)).filter_map(ProcessId::of));
    }
    Ok(found)
}

/// Unmounts file systems below a directory, the innermost first: the hosts' guest RAM.
fn unmount_below(root: &Path) -> Result<()> {
    let table =
        std::fs::read_to_string("/proc/self/mountinfo").context("cannot read the mount table")?;
    for place in mounts_below(&table, root) {
        unmount(&place, UnmountFlags::DETACH)
            .with_context(|| format!("cannot unmount {}", place.display()))?;
    }
    Ok(())
}

/// Returns the mount points below `root` in a mountinfo table, the last mounted first.
fn mounts_below(table: &str, root: &Path) -> Vec<PathBuf> {
    let places = table.lines().filter_map(|line| line.split(' ').nth(4)).map(unescape);
    let mut below: Vec<PathBuf> =
        places.filter(|place| place != root && place.starts_with(root)).collect();
    below.reverse();
    below
}

/// Decodes the kernel's octal escapes of blanks and similar characters: `\040`.
fn unescape(field: &str) -> PathBuf {
    let mut text = field.to_owned();
    for (code, character) in [("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")] {
        text = text.replace(code, character);
    }
    PathBuf::from(text)
}

/// Removes the lab's directory, below which nothing is mounted any more.
fn remove_state(paths: &LabPaths) -> Result<()> {
    let root = paths.root();
    if !is_lab_directory(paths) {
        bail!(
            "{} holds something, but nothing of a lab; look at it and remove it yourself",
            root.display()
        );
    }
    match std::fs::remove_dir_all(root) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", root.display()))
        }
        _ => Ok(()),
    }
}

/// Returns whether a directory belongs to a lab: a mistyped path must not cost a user's files.
fn is_lab_directory(paths: &LabPaths) -> bool {
    let marks = [paths.state_file(), paths.hosts_file(), paths.hosts(), paths.client_config()];
    let is_empty =
        std::fs::read_dir(paths.root()).map_or(true, |mut entries| entries.next().is_none());
    is_empty
        || paths.root() == Path::new(DEFAULT_STATE_DIR)
        || marks.iter().any(|mark| mark.exists())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_of_something_else_is_kept() {
        let directory = tempfile::tempdir().unwrap();
        let paths = LabPaths::new(directory.path());
        std::fs::write(directory.path().join("thesis.txt"), "years of work").unwrap();
        assert!(remove_state(&paths).is_err());
        std::fs::write(paths.state_file(), "").unwrap();
        assert!(remove_state(&paths).is_ok());
        assert!(!directory.path().exists());
    }

    #[test]
    fn mounts_are_found_innermost_first() {
        let table = "30 1 0:26 / /run rw - tmpfs tmpfs rw\n\
                     31 30 0:50 / /run/lab/hosts/a/ram rw shared:1 - tmpfs godwit rw\n\
                     32 31 0:51 / /run/lab/hosts/a/ram/with\\040blank rw - tmpfs x rw\n\
                     33 30 0:52 / /run/lab-other/ram rw - tmpfs x rw\n";
        let found = mounts_below(table, Path::new("/run/lab"));
        assert_eq!(
            found,
            [Path::new("/run/lab/hosts/a/ram/with blank"), Path::new("/run/lab/hosts/a/ram")]
        );
    }

    #[test]
    fn pid_files_of_virtual_machines_are_found() {
        let directory = tempfile::tempdir().unwrap();
        let paths = LabPaths::new(directory.path());
        let vm = agents::run_dir(&paths, "a").join("vms/web");
        std::fs::create_dir_all(&vm).unwrap();
        std::fs::write(vm.join("qemu.pid"), "4321 99\n").unwrap();
        std::fs::create_dir_all(agents::run_dir(&paths, "a").join("vms/no-pid")).unwrap();
        assert_eq!(hypervisors(&paths), [ProcessId { pid: 4321, start_time: 99 }]);
    }

    #[test]
    fn down_of_no_lab_is_fine() {
        let directory = tempfile::tempdir().unwrap();
        let name = LabName { prefix: "gwnone".to_owned(), state_dir: directory.path().join("lab") };
        assert!(!down(&name).unwrap());
        assert!(!name.state_dir.exists());
    }
}
