//! A cgroup for the vCPU threads of one QEMU, which limits their CPU time.
//!
//! The group is a child of the group that the threads are in, so that the limits of that one still
//! hold. Its name is `godwit.VM.PID`: a thread in a group of that name, found by
//! [`put_back_vcpus`], was left there by an agent that died. QEMU's main thread and its iothreads
//! stay where they are, so a slowed guest still responds on its monitor.
//!
//! There are two kinds, depending on what is mounted
//! (Documentation/admin-guide/cgroup-v1/cgroups.rst, cgroup-v2.rst):
//! - v1: the hierarchy of the controller `cpu`. Single threads move by `tasks`; `cpu.cfs_quota_us`
//!   for each `cpu.cfs_period_us`.
//! - v2: a *threaded* group, because threads of a process may be in different groups only within
//!   one threaded subtree; `cgroup.threads`, `cpu.max`. It makes the group above `domain threaded`;
//!   that becomes `domain` again when this group is removed.
//!
//! A thread that has used its quota stops until the period's end wherever it is, even while it
//! holds QEMU's lock. So periods are as short as the quota allows. Since Linux 6.18 the thread
//! first continues to the end of its system call.

mod place;
#[cfg(test)]
mod tests;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

pub(crate) use place::unified_mount;
use place::{Kind, Place};

use crate::spec::VmName;

/// Shortest quota of a period: the kernel's minimum (`min_cfs_quota_period`, kernel/sched/core.c,
/// Linux 6.18), µs.
const LEAST_QUOTA_US: f64 = 1000.0;
/// Shortest and longest period, µs. Threads stop for at most one period at a time. The kernel's
/// default is 100 ms. In less than 10 ms a scheduler with ticks of 4 ms (`CONFIG_HZ=250`) is too
/// coarse.
const PERIODS_US: (f64, f64) = (10_000.0, 100_000.0);
/// Prefix of the names of groups.
const PREFIX: &str = "godwit.";
/// Most passes over a group's threads, to catch those that arrive while others are put back.
const MOST_LOOKS: u32 = 16;

/// Why the CPU time of vCPUs cannot be limited.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VcpuGroupError {
    /// No hierarchy has the controller.
    #[error(
        "no cgroup limits the CPUs of process {pid}: the controller `cpu` is not mounted (v1), or \
        not given to its group (v2)"
    )]
    NoController {
        /// QEMU's process.
        pid: i32,
    },
    /// The threads are in different groups.
    #[error(
        "the vCPU threads of process {pid} are in separate groups: another program limits them"
    )]
    Scattered {
        /// QEMU's process.
        pid: i32,
    },
    /// Access to a file of the group or of the process failed.
    #[error("cannot {what} {path}: {source}", path = path.display())]
    Io {
        /// The attempted operation, as a verb.
        what: &'static str,
        path: PathBuf,
        /// The system error.
        source: io::Error,
    },
}

impl VcpuGroupError {
    fn io(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> VcpuGroupError {
        move |source| VcpuGroupError::Io { what, path: path.to_owned(), source }
    }
}

/// File systems for groups: the system's, or a test's.
#[derive(Clone, Debug)]
struct Tree {
    proc: PathBuf,
    make: fn(&Path) -> io::Result<()>,
    remove: fn(&Path) -> io::Result<()>,
}

impl Tree {
    fn system() -> Tree {
        Tree {
            proc: "/proc".into(),
            make: |path| fs::create_dir(path),
            remove: |path| fs::remove_dir(path),
        }
    }
}

/// The vCPU threads of one QEMU, whose CPU time can be limited. Dropping this returns them to their
/// former group and removes the group.
#[derive(Debug)]
pub struct VcpuGroup {
    tree: Tree,
    vm: VmName,
    pid: i32,
    vcpus: Vec<u32>,
    group: Option<Group>,
}

impl VcpuGroup {
    /// Covers the threads `vcpus` of process `pid`, which runs the VM `vm`. Creates nothing yet.
    #[must_use]
    pub fn new(vm: &VmName, pid: i32, vcpus: Vec<u32>) -> VcpuGroup {
        VcpuGroup::in_tree(Tree::system(), vm, pid, vcpus)
    }

    fn in_tree(tree: Tree, vm: &VmName, pid: i32, vcpus: Vec<u32>) -> VcpuGroup {
        VcpuGroup { tree, vm: vm.clone(), pid, vcpus, group: None }
    }

    /// Limits the threads together to this share of the CPU time that they could use: 1 is one CPU
    /// for each. `None` removes the limit at once; the threads stay in the group. The first share
    /// creates the group.
    ///
    /// # Errors
    /// No cgroup can limit them; the threads are unchanged.
    pub fn set_share(&mut self, share: Option<f64>) -> Result<(), VcpuGroupError> {
        match (&mut self.group, share) {
            (None, None) => Ok(()),
            (Some(group), _) => group.set_share(share, self.vcpus.len()),
            (absent @ None, Some(_)) => {
                let group = Group::make(&self.tree, &self.vm, self.pid, &self.vcpus)?;
                absent.insert(group).set_share(share, self.vcpus.len())
            }
        }
    }
}

impl Drop for VcpuGroup {
    fn drop(&mut self) {
        if let Some(group) = self.group.take()
            && let Err(error) = group.dissolve(&self.tree)
        {
            tracing::warn!(vm = self.vm.as_str(), %error, "cannot remove the vCPUs' cgroup");
        }
    }
}

/// Returns the threads of process `pid` from a group that a former agent left, and removes the
/// group. Returns whether there was one.
///
/// # Errors
/// The threads may still be slowed.
pub fn put_back_vcpus(pid: i32) -> Result<bool, VcpuGroupError> {
    put_back(&Tree::system(), pid)
}

/// Removes the groups of ended processes, if this process is in the group in which those were
/// started.
pub fn remove_ended_vcpu_groups() {
    remove_ended(&Tree::system());
}

fn put_back(tree: &Tree, pid: i32) -> Result<bool, VcpuGroupError> {
    let tasks = tree.proc.join(pid.to_string()).join("task");
    let entries = fs::read_dir(&tasks).map_err(VcpuGroupError::io("read", &tasks))?;
    let threads = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    for thread in threads {
        // A thread that has ended meanwhile is in no group.
        let Ok(Some(place)) = Place::of_thread(&tree.proc, pid, thread) else { continue };
        if let Some(group) = Group::left_by_somebody(&place, pid) {
            tracing::warn!(
                pid,
                group = %group.path.display(),
                "returning vCPUs that an agent left slowed to their group"
            );
            // All slowed threads are in it.
            return group.dissolve(tree).map(|()| true);
        }
    }
    Ok(false)
}

fn remove_ended(tree: &Tree) {
    let own = i32::try_from(std::process::id()).unwrap_or_default();
    let Ok(thread) = u32::try_from(own) else { return };
    let Ok(Some(place)) = Place::of_thread(&tree.proc, own, thread) else { return };
    for entry in fs::read_dir(&place.directory).into_iter().flatten().flatten() {
        let pid = entry.file_name().to_str().and_then(pid_of);
        if pid.is_some_and(|pid| !tree.proc.join(pid.to_string()).exists()) {
            // What keeps the group is not a process of ours.
            let _ = (tree.remove)(&entry.path());
        }
    }
}

/// Returns the process in the name of a group.
fn pid_of(group: &str) -> Option<i32> {
    group.strip_prefix(PREFIX)?.rsplit_once('.')?.1.parse().ok()
}

/// A group that was created.
#[derive(Debug)]
struct Group {
    kind: Kind,
    /// Former group of its threads.
    former: PathBuf,
    path: PathBuf,
    /// Whether the controller was enabled for it.
    enabled: bool,
    /// The current period.
    period_us: u64,
}

impl Group {
    fn make(tree: &Tree, vm: &VmName, pid: i32, vcpus: &[u32]) -> Result<Group, VcpuGroupError> {
        put_back(tree, pid)?;
        remove_ended(tree);
        let mut places = Vec::new();
        for vcpu in vcpus {
            places.push(Place::of_thread(&tree.proc, pid, *vcpu)?);
        }
        let Some(Some(Place { kind, directory: former })) =
            places.first().cloned().map(|place| place.filter(Place::has_controller))
        else {
            return Err(VcpuGroupError::NoController { pid });
        };
        if places.iter().any(|other| other != &places[0]) {
            return Err(VcpuGroupError::Scattered { pid });
        }
        let path = former.join(format!("{PREFIX}{vm}.{pid}"));
        let mut group = Group { kind, former, path, enabled: false, period_us: 0 };
        match (tree.make)(&group.path) {
            // An agent died between creating and filling it.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            made => made.map_err(VcpuGroupError::io("make", &group.path))?,
        }
        match group.fill(vcpus) {
            Ok(()) => Ok(group),
            Err(error) => {
                if let Err(undo) = group.dissolve(tree) {
                    tracing::warn!(
                        vm = vm.as_str(),
                        error = %undo,
                        "cannot remove a cgroup that could not be used"
                    );
                }
                Err(error)
            }
        }
    }

    /// Returns the group of a thread, if it is one of these.
    fn left_by_somebody(place: &Place, pid: i32) -> Option<Group> {
        let Place { kind, directory } = place;
        let is_ours = pid_of(directory.file_name()?.to_str()?) == Some(pid);
        let former = directory.parent()?.to_owned();
        // The controller may have been enabled before: it stays enabled.
        is_ours.then(|| Group {
            kind: *kind,
            former,
            path: directory.clone(),
            enabled: false,
            period_us: 0,
        })
    }

    fn fill(&mut self, vcpus: &[u32]) -> Result<(), VcpuGroupError> {
        if self.kind == Kind::V2 {
            write(&self.path.join("cgroup.type"), "threaded")?;
            let control = self.former.join("cgroup.subtree_control");
            let on = fs::read_to_string(&control).map_err(VcpuGroupError::io("read", &control))?;
            if !on.split_whitespace().any(|name| name == "cpu") {
                write(&control, "+cpu")?;
                self.enabled = true;
            }
        }
        self.weigh(vcpus.len());
        vcpus.iter().try_for_each(|vcpu| write(&self.path.join(self.threads()), &vcpu.to_string()))
    }

    /// Restores the threads' weight. Each thread counted as one before; in a group they count as
    /// one together unless its weight is set. Without it the guest also loses CPU time to other
    /// processes, which is undesirable but not a reason to fail.
    fn weigh(&self, vcpus: usize) {
        // The weight of one thread is 1024 in v1 and 100 in v2, up to 262,144 and 10,000.
        let (file, each, most) = match self.kind {
            Kind::V1 => ("cpu.shares", 1024, 262_144),
            Kind::V2 => ("cpu.weight", 100, 10_000),
        };
        if let Err(error) =
            write(&self.path.join(file), &(each * vcpus.max(1)).min(most).to_string())
        {
            tracing::debug!(%error, "the vCPUs' cgroup has the weight of one thread");
        }
    }

    fn threads(&self) -> &'static str {
        match self.kind {
            Kind::V1 => "tasks",
            Kind::V2 => "cgroup.threads",
        }
    }

    fn set_share(&mut self, share: Option<f64>, vcpus: usize) -> Result<(), VcpuGroupError> {
        let Some(share) = share.filter(|share| *share < 1.0) else { return self.set_free() };
        let Quota { quota_us, period_us } = Quota::of(share, vcpus);
        match self.kind {
            Kind::V1 => {
                let quota = self.path.join("cpu.cfs_quota_us");
                if self.period_us != period_us {
                    write(&self.path.join("cpu.cfs_period_us"), &period_us.to_string())?;
                    self.period_us = period_us;
                }
                match write(&quota, &quota_us.to_string()) {
                    // A group may have no more than the group above it (v1,
                    // `tg_cfs_schedulable_down`), whose limit holds.
                    Err(VcpuGroupError::Io { source, .. })
                        if source.kind() == io::ErrorKind::InvalidInput =>
                    {
                        self.set_free()
                    }
                    written => written,
                }
            }
            Kind::V2 => write(&self.path.join("cpu.max"), &format!("{quota_us} {period_us}")),
        }
    }

    fn set_free(&self) -> Result<(), VcpuGroupError> {
        match self.kind {
            Kind::V1 => write(&self.path.join("cpu.cfs_quota_us"), "-1"),
            Kind::V2 => write(&self.path.join("cpu.max"), "max"),
        }
    }

    /// Returns all of its threads to their former group, including those that they have started,
    /// and removes it.
    fn dissolve(self, tree: &Tree) -> Result<(), VcpuGroupError> {
        // Lift the limit first: whatever fails afterwards, the threads run. A group that was not
        // filled may have no such file.
        let freed = self.set_free();
        let (threads, former) = (self.path.join(self.threads()), self.former.join(self.threads()));
        let mut emptied = Ok(());
        for _ in 0..MOST_LOOKS {
            let listed = fs::read_to_string(&threads).unwrap_or_default();
            if listed.trim().is_empty() {
                break;
            }
            for thread in listed.lines() {
                emptied = match write(&former, thread) {
                    // The thread has ended.
                    Err(VcpuGroupError::Io { source, .. })
                        if source.raw_os_error() == Some(ESRCH) =>
                    {
                        Ok(())
                    }
                    written => written,
                };
            }
        }
        let removed = (tree.remove)(&self.path).map_err(VcpuGroupError::io("remove", &self.path));
        if self.enabled && removed.is_ok() {
            // Harmless if another group uses it: the kernel then refuses.
            let _ = write(&self.former.join("cgroup.subtree_control"), "-cpu");
        }
        match removed {
            Ok(()) => Ok(()),
            Err(error) => freed.and(emptied).and(Err(error)),
        }
    }
}

const ESRCH: i32 = rustix::io::Errno::SRCH.raw_os_error();

/// CPU time of all threads in each period, µs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Quota {
    quota_us: u64,
    period_us: u64,
}

impl Quota {
    /// Returns the shortest period in which the share is a quota that the kernel accepts.
    #[allow(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "between 1000 and 100,000 times the vCPUs"
    )]
    fn of(share: f64, vcpus: usize) -> Quota {
        let cpus = share.clamp(0.0, 1.0) * vcpus.max(1) as f64;
        let period = (LEAST_QUOTA_US / cpus.max(1e-6)).clamp(PERIODS_US.0, PERIODS_US.1);
        let quota = (cpus * period).max(LEAST_QUOTA_US);
        Quota { quota_us: quota.round() as u64, period_us: period.round() as u64 }
    }
}

/// Writes to a control file in one call, as the kernel requires.
fn write(path: &Path, word: &str) -> Result<(), VcpuGroupError> {
    fs::write(path, word).map_err(VcpuGroupError::io("write to", path))
}
