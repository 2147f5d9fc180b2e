//! Processes that run out of memory: a memory cgroup around them, whose members alone the kernel's OOM killer can strike.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::process::ProcessId;

/// Where cgroups are, by convention.
const ROOT: &str = "/sys/fs/cgroup";

/// A group of processes that get no more memory than a little.
#[derive(Debug)]
pub(super) struct MemoryGroup {
    path: PathBuf,
    is_v1: bool,
    /// Each member and the group that it was in.
    members: Vec<(ProcessId, PathBuf)>,
}

impl MemoryGroup {
    /// Why this machine has none; none where it has.
    pub(super) fn missing() -> Option<String> {
        match root() {
            Ok((root, _)) => {
                let tried = root.join(format!("godwit-lab.{}.try", std::process::id()));
                let made = fs::create_dir(&tried).and_then(|()| fs::remove_dir(&tried));
                made.err().map(|error| {
                    format!("no memory cgroup can be made in {}: {error}", root.display())
                })
            }
            Err(error) => Some(error.to_string()),
        }
    }

    /// Puts processes into a group of their own, whose memory from now on has a limit: what they have stays counted elsewhere.
    pub(super) fn around(members: &[ProcessId], limit_bytes: u64) -> Result<MemoryGroup> {
        let (root, is_v1) = root()?;
        let path = root.join(format!("godwit-lab.{}", std::process::id()));
        fs::create_dir(&path).with_context(|| format!("can't make {}", path.display()))?;
        let mut group = MemoryGroup { path, is_v1, members: Vec::new() };
        let limit = if is_v1 { "memory.limit_in_bytes" } else { "memory.max" };
        let filled = fs::write(group.path.join(limit), limit_bytes.to_string())
            .map_err(Into::into)
            .and_then(|()| members.iter().try_for_each(|member| group.take_in(&root, *member)));
        match filled {
            Ok(()) => Ok(group),
            Err(error) => {
                let _ = group.remove();
                Err(error)
            }
        }
    }

    fn take_in(&mut self, root: &Path, member: ProcessId) -> Result<()> {
        let text = fs::read_to_string(format!("/proc/{}/cgroup", member.pid))?;
        let of_ours = |line: &&str| {
            if self.is_v1 { line.contains(":memory:") } else { line.starts_with("0::") }
        };
        let line = text.lines().find(of_ours).context("a process is in no memory cgroup")?;
        let before = line.rsplit_once(':').map_or("", |(_, path)| path).trim_start_matches('/');
        self.members.push((member, root.join(before)));
        Ok(fs::write(self.path.join("cgroup.procs"), member.pid.to_string())?)
    }

    /// Whether the kernel has ended one of them for want of memory, by its own count: one may have ended for another reason.
    pub(super) fn has_killed(&self) -> Result<bool> {
        let file = if self.is_v1 { "memory.oom_control" } else { "memory.events" };
        let text = fs::read_to_string(self.path.join(file))?;
        let count = text.lines().find_map(|line| line.strip_prefix("oom_kill "));
        let count = count.with_context(|| format!("no count of kills: {text}"))?;
        Ok(count.trim().parse::<u64>()? > 0)
    }

    /// Puts back who lives, and removes the group.
    pub(super) fn remove(self) -> Result<()> {
        for (member, before) in self.members.iter().filter(|(member, _)| member.is_alive()) {
            fs::write(before.join("cgroup.procs"), member.pid.to_string()).with_context(|| {
                format!("process {} can't go back to {}", member.pid, before.display())
            })?;
        }
        // Who was killed leaves it when the kernel has freed his memory.
        crate::trial::until("the group is empty", crate::trial::LIMIT, || {
            Ok(Some(fs::remove_dir(&self.path)?))
        })
    }
}

/// The hierarchy that has the memory controller, and whether it is one of version 1.
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
    bail!("no memory cgroups below {ROOT}")
}
