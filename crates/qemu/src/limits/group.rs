//! A cgroup (v2) for each VM, below a group that systemd has delegated
//! (Documentation/admin-guide/cgroup-v2.rst).
//!
//! ```text
//! ROOT/          given to the agent, by default the packaged godwit-vms.service
//! ROOT/holder/   systemd's process: a group that limits others has no processes of its own
//! ROOT/vm.NAME/  one QEMU: memory.max, pids.max
//! ```
//!
//! Accounting: a page of guest memory is a page of a tmpfs, charged to the group of the process
//! that touches it first. That is QEMU for a guest that boots, and the *agent* for the pages that
//! it writes of an incoming guest. So the limit covers all of a guest's memory although less may be
//! charged, and the agent's own unit needs room for incoming guests.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::QemuLimits;
use crate::spec::VmName;
use crate::vcpu_group::unified_mount;

/// The packaged unit for VMs, below the mount of the unified hierarchy.
const UNIT: &str = "system.slice/godwit-vms.service";
/// The packaged unit of the agent, as /proc/PID/cgroup names it.
const AGENTS_UNIT: &str = "0::/system.slice/godwit-host.service";
const HOLDER: &str = "holder";
const PREFIX: &str = "vm.";
/// Controllers without which the groups limit nothing.
const NEEDED: [&str; 2] = ["memory", "pids"];
/// Controller for slowing vCPUs, used if available.
const WANTED: &str = "cpu";
/// Most passes over the root's processes, to catch those that arrive while others are moved out.
const MOST_LOOKS: u32 = 16;

/// Why VMs get no cgroups.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VmGroupError {
    /// The group does not exist, or is not delegated with these controllers.
    #[error("cgroup {path} lacks the controllers memory and pids", path = path.display())]
    NoController {
        /// The group.
        path: PathBuf,
    },
    /// Access to a file of a group failed.
    #[error("cannot {what} {path}: {source}", path = path.display())]
    Io {
        /// The attempted operation, as a verb.
        what: &'static str,
        path: PathBuf,
        /// The system error.
        source: io::Error,
    },
}

impl VmGroupError {
    fn io(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> VmGroupError {
        move |source| VmGroupError::Io { what, path: path.to_owned(), source }
    }
}

/// The parent of the VMs' groups.
#[derive(Clone, Debug)]
pub struct VmGroups {
    root: PathBuf,
    /// Removes a group: the system's function, or a test's, which also removes the files in it.
    remove: fn(&Path) -> io::Result<()>,
}

impl VmGroups {
    /// Returns the group of the packaged unit. `None` if this host has no such unit, or this
    /// process is not the agent of the packaged unit: another agent of this machine may have a VM
    /// with the same name.
    #[must_use]
    pub fn packaged() -> Option<PathBuf> {
        let own = fs::read_to_string("/proc/self/cgroup").ok()?;
        own.lines().find(|line| *line == AGENTS_UNIT)?;
        Some(unified_mount()?.join(UNIT)).filter(|path| path.is_dir())
    }

    /// Takes over a delegated group, and gives its controllers to the groups below it.
    ///
    /// # Errors
    /// The group lacks a controller, or does not allow passing it on.
    pub fn open(root: &Path) -> Result<VmGroups, VmGroupError> {
        VmGroups::in_tree(root, |path| fs::remove_dir(path))
    }

    fn in_tree(root: &Path, remove: fn(&Path) -> io::Result<()>) -> Result<VmGroups, VmGroupError> {
        let groups = VmGroups { root: root.to_owned(), remove };
        let has = |words: &str, name: &str| words.split_whitespace().any(|word| word == name);
        let available = fs::read_to_string(root.join("cgroup.controllers")).unwrap_or_default();
        if !NEEDED.iter().all(|name| has(&available, name)) {
            return Err(VmGroupError::NoController { path: root.to_owned() });
        }
        let control = root.join("cgroup.subtree_control");
        let given = fs::read_to_string(&control).map_err(VmGroupError::io("read", &control))?;
        let names =
            NEEDED.into_iter().chain([WANTED].into_iter().filter(|name| has(&available, name)));
        let lacking: Vec<String> =
            names.filter(|name| !has(&given, name)).map(|name| format!("+{name}")).collect();
        if !lacking.is_empty() {
            groups.empty_root()?;
            write(&control, &lacking.join(" "))?;
        }
        Ok(groups)
    }

    /// Moves processes out of the root: a group that gives controllers to others may have none
    /// itself.
    fn empty_root(&self) -> Result<(), VmGroupError> {
        let (processes, holder) = (self.root.join("cgroup.procs"), self.root.join(HOLDER));
        make(&holder)?;
        for _ in 0..MOST_LOOKS {
            let listed =
                fs::read_to_string(&processes).map_err(VmGroupError::io("read", &processes))?;
            if listed.trim().is_empty() {
                return Ok(());
            }
            for process in listed.lines() {
                match write(&holder.join("cgroup.procs"), process) {
                    // The process has ended.
                    Err(VmGroupError::Io { source, .. })
                        if source.raw_os_error() == Some(ESRCH) => {}
                    moved => moved?,
                }
            }
        }
        Ok(())
    }

    fn of(&self, vm: &VmName) -> PathBuf {
        self.root.join(format!("{PREFIX}{vm}"))
    }

    /// Moves a VM's QEMU into its own group with limits. What it used before stays charged to the
    /// group that it leaves.
    ///
    /// # Errors
    /// The group cannot be created or limited, or the process is gone.
    pub fn confine(&self, vm: &VmName, pid: i32, limits: &QemuLimits) -> Result<(), VmGroupError> {
        let group = self.of(vm);
        make(&group)?;
        write(&group.join("memory.max"), &limits.memory_bytes.to_string())?;
        write(&group.join("pids.max"), &limits.tasks.to_string())?;
        write(&group.join("cgroup.procs"), &pid.to_string())
    }

    /// Removes a VM's group, and those of its vCPUs in it. A group that still has a process is kept
    /// for the next start of the VM.
    pub fn release(&self, vm: &VmName) {
        let group = self.of(vm);
        let below = fs::read_dir(&group).into_iter().flatten().flatten();
        for entry in below.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir())) {
            let _ = (self.remove)(&entry.path());
        }
        match (self.remove)(&group) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                tracing::debug!(vm = vm.as_str(), %error, "the VM's cgroup is kept");
            }
            _ => {}
        }
    }
}

const ESRCH: i32 = rustix::io::Errno::SRCH.raw_os_error();

fn make(path: &Path) -> Result<(), VmGroupError> {
    match fs::create_dir(path) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            Err(VmGroupError::io("make", path)(error))
        }
        _ => Ok(()),
    }
}

/// Writes to a control file, with all words in one call as the kernel requires.
fn write(path: &Path, words: &str) -> Result<(), VmGroupError> {
    fs::write(path, words).map_err(VmGroupError::io("write to", path))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: QemuLimits = QemuLimits {
        memory_bytes: 1 << 30,
        address_space_bytes: 1 << 33,
        tasks: 300,
        open_files: 4096,
    };

    /// Creates a directory with the files of a delegated group.
    fn delegated(controllers: &str, processes: &str) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        fs::write(root.path().join("cgroup.controllers"), controllers).unwrap();
        fs::write(root.path().join("cgroup.subtree_control"), "").unwrap();
        fs::write(root.path().join("cgroup.procs"), processes).unwrap();
        root
    }

    fn open(root: &tempfile::TempDir) -> Result<VmGroups, VmGroupError> {
        VmGroups::in_tree(root.path(), |path| fs::remove_dir_all(path))
    }

    #[test]
    fn each_vm_has_a_group_with_its_limits() {
        let root = delegated("cpuset cpu io memory pids\n", "");
        let groups = open(&root).unwrap();
        let read = |file: &str| fs::read_to_string(root.path().join(file)).unwrap();
        assert_eq!(read("cgroup.subtree_control"), "+memory +pids +cpu");
        let web = VmName::new("web").unwrap();
        // A repetition works too: for an adopted QEMU, or a group that was left over.
        for pid in [4711, 4712] {
            groups.confine(&web, pid, &LIMITS).unwrap();
            assert_eq!(read("vm.web/memory.max"), "1073741824");
            assert_eq!(read("vm.web/pids.max"), "300");
            assert_eq!(read("vm.web/cgroup.procs"), pid.to_string());
        }
        fs::create_dir(root.path().join("vm.web/godwit.web.4712")).unwrap();
        groups.release(&web);
        groups.release(&web);
        assert!(!root.path().join("vm.web").exists());
    }

    #[test]
    fn the_process_of_systemd_is_moved_aside() {
        let root = delegated("memory pids\n", "17\n");
        // In a plain directory the process stays in the list: the passes end anyway.
        open(&root).unwrap();
        let read = |file: &str| fs::read_to_string(root.path().join(file)).unwrap();
        assert_eq!(
            (read("holder/cgroup.procs"), read("cgroup.subtree_control")),
            ("17".into(), "+memory +pids".into())
        );
        // The next agent finds the group prepared.
        fs::write(root.path().join("cgroup.subtree_control"), "memory pids\n").unwrap();
        fs::remove_dir_all(root.path().join("holder")).unwrap();
        open(&root).unwrap();
        assert!(!root.path().join("holder").exists());
        assert_eq!(read("cgroup.subtree_control"), "memory pids\n");
    }

    #[test]
    fn a_group_without_the_controllers_is_refused() {
        for controllers in ["", "cpu pids", "cpu memory"] {
            let root = delegated(controllers, "");
            assert!(matches!(open(&root), Err(VmGroupError::NoController { .. })), "{controllers}");
            assert_eq!(fs::read_dir(root.path()).unwrap().count(), 3);
        }
    }
}
