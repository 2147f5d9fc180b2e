//! Out-of-memory faults: a memory cgroup around processes, so that the kernel's OOM killer can
//! strike only its members.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context, Result, bail};

use crate::process::ProcessId;

/// Conventional mount point of cgroups.
const ROOT: &str = "/sys/fs/cgroup";

/// Group of processes that can allocate only a little more memory.
#[derive(Debug)]
pub struct MemoryGroup {
    path: PathBuf,
    is_v1: bool,
    /// Each member and its previous group.
    members: Vec<(ProcessId, PathBuf)>,
}

impl MemoryGroup {
    /// Returns why this machine cannot make such a group; `None` if it can.
    #[must_use]
    pub fn missing() -> Option<String> {
        match root() {
            Ok((root, _)) => {
                let tried = fresh(&root);
                let made = fs::create_dir(&tried).and_then(|()| fs::remove_dir(&tried));
                made.err().map(|error| {
                    format!("cannot make a memory cgroup in {}: {error}", root.display())
                })
            }
            Err(error) => Some(error.to_string()),
        }
    }

    /// Moves processes into a new group with a memory limit. Memory that they already have stays
    /// charged to their previous groups.
    ///
    /// # Errors
    /// The machine cannot make the group, or a process has ended.
    pub fn around(members: &[ProcessId], limit_bytes: u64) -> Result<MemoryGroup> {
        let (root, is_v1) = root()?;
        let path = fresh(&root);
        fs::create_dir(&path).with_context(|| format!("cannot make {}", path.display()))?;
        let mut group = MemoryGroup { path, is_v1, members: Vec::new() };
        let limit = if is_v1 { "memory.limit_in_bytes" } else { "memory.max" };
        let filled = fs::write(group.path.join(limit), limit_bytes.to_string())
            .map_err(Into::into)
            .and_then(|()| members.iter().try_for_each(|member| group.add(&root, *member)));
        match filled {
            Ok(()) => Ok(group),
            Err(error) => {
                let _ = group.remove();
                Err(error)
            }
        }
    }

    fn add(&mut self, root: &Path, member: ProcessId) -> Result<()> {
        let text = fs::read_to_string(format!("/proc/{}/cgroup", member.pid))?;
        let of_ours = |line: &&str| {
            if self.is_v1 { line.contains(":memory:") } else { line.starts_with("0::") }
        };
        let line = text.lines().find(of_ours).context("a process is in no memory cgroup")?;
        let before = line.rsplit_once(':').map_or("", |(_, path)| path).trim_start_matches('/');
        self.members.push((member, root.join(before)));
        Ok(fs::write(self.path.join("cgroup.procs"), member.pid.to_string())?)
    }

    /// Returns whether the kernel's OOM killer has killed a member, by the group's own counter. A
    /// member may also have ended for another reason.
    ///
    /// # Errors
    /// The group has no such counter.
    pub fn has_killed(&self) -> Result<bool> {
        let file = if self.is_v1 { "memory.oom_control" } else { "memory.events" };
        let text = fs::read_to_string(self.path.join(file))?;
        let count = text.lines().find_map(|line| line.strip_prefix("oom_kill "));
        let count =
            count.with_context(|| format!("the cgroup shows no count of OOM kills: {text}"))?;
        Ok(count.trim().parse::<u64>()? > 0)
    }

    /// Returns the living members to their previous groups and removes the group.
    ///
    /// # Errors
    /// A member cannot be moved, or the group is not empty in time.
    pub fn remove(self) -> Result<()> {
        for (member, before) in self.members.iter().filter(|(member, _)| member.is_alive()) {
            fs::write(before.join("cgroup.procs"), member.pid.to_string()).with_context(|| {
                format!("cannot move process {} back to {}", member.pid, before.display())
            })?;
        }
        // A killed process leaves the group once the kernel has freed its memory.
        crate::trial::until("the group is empty", crate::trial::LIMIT, || {
            Ok(Some(fs::remove_dir(&self.path)?))
        })
    }
}

/// Returns the path of a new group: several trials may run in this process.
fn fresh(root: &Path) -> PathBuf {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    root.join(format!("godwit-lab.{}.{number}", std::process::id()))
}

/// Returns the hierarchy with the memory controller, and whether it is of cgroup version 1.
fn root() -> Result<(PathBuf, bool)> {
    let v1 = Path::new(ROOT).join("memory");
    if v1.join("memory.limit_in_bytes").exists() {
        return Ok((v1, true));
    }
    let controllers =
        fs::read_to_string(Path::new(ROOT).join("cgroup.subtree_control")).unwrap_or_default();
    if controllers.split_ascii_whitespace().any(|controller| controller == "memory") {
        return Ok((ROOT.into(), false));
    }
    bail!("cannot find memory cgroups below {ROOT}")
}
