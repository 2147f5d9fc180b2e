//! Processes that the lab started: how they are identified, so that no other process is ever ended,
//! and how they are ended.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use godwit_prober::clock;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::process::{
    Pid, PidfdFlags, Signal, WaitOptions, pidfd_open, pidfd_send_signal, waitpid,
};
use serde::{Deserialize, Serialize};

use crate::namespace::in_namespace;

/// Clock ticks in a second, as the kernel reports them on all architectures (`USER_HZ`).
const TICKS_PER_S: u64 = 100;

/// Process identified by pid and start time: pids are reused, the pair is not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ProcessId {
    /// Process id.
    pub pid: i32,
    /// Start time in clock ticks since boot: field 22 of /proc/PID/stat.
    pub start_time: u64,
}

impl ProcessId {
    /// Returns the process that has `pid` now, or `None` if there is none (a zombie does not
    /// count).
    #[must_use]
    pub fn of(pid: i32) -> Option<ProcessId> {
        let (state, start_time) = stat_of(pid)?;
        (!matches!(state, 'Z' | 'X')).then_some(ProcessId { pid, start_time })
    }

    /// Parses the `PID STARTTIME` of a pid file.
    #[must_use]
    pub fn parse(text: &str) -> Option<ProcessId> {
        let (pid, start_time) = text.trim().split_once(' ')?;
        let id = ProcessId { pid: pid.parse().ok()?, start_time: start_time.trim().parse().ok()? };
        (id.pid > 1).then_some(id)
    }

    /// Returns the process that a host names whose boot clock is so many seconds ahead: start times
    /// are those of the reader's clock.
    pub(crate) fn on_clock_ahead(self, seconds: u32) -> ProcessId {
        let ticks = u64::from(seconds).saturating_mul(TICKS_PER_S);
        ProcessId { start_time: self.start_time.saturating_sub(ticks), ..self }
    }

    /// Returns whether this very process still runs.
    #[must_use]
    pub fn is_alive(self) -> bool {
        ProcessId::of(self.pid) == Some(self)
    }

    /// Opens a pidfd of this very process, or returns `None` if it is gone. The check comes after
    /// opening, so the pid cannot have been reused in between.
    fn open(self) -> Option<OwnedFd> {
        let pidfd = pidfd_open(Pid::from_raw(self.pid)?, PidfdFlags::empty()).ok()?;
        self.is_alive().then_some(pidfd)
    }
}

/// Returns state and start time of the process with that pid.
fn stat_of(pid: i32) -> Option<(char, u64)> {
    parse_stat(&std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
}

/// Parses state and start time of a `/proc/PID/stat` line. The command's name may contain blanks
/// and brackets.
fn parse_stat(stat: &str) -> Option<(char, u64)> {
    let rest = stat.rsplit_once(')')?.1;
    let mut fields = rest.split_ascii_whitespace();
    let state = fields.next()?.chars().next()?;
    Some((state, fields.nth(18)?.parse().ok()?))
}

/// Ends the processes: SIGTERM, then SIGKILL to those left after `grace`. Processes that are gone
/// are ignored.
///
/// # Errors
/// A process does not end even after SIGKILL (it hangs in the kernel).
pub(crate) fn end_all(processes: &[ProcessId], grace: Duration) -> Result<()> {
    let mut running: Vec<(ProcessId, OwnedFd)> =
        processes.iter().filter_map(|id| Some((*id, id.open()?))).collect();
    for (signal, limit) in [(Signal::TERM, grace), (Signal::KILL, Duration::from_secs(10))] {
        for (_, pidfd) in &running {
            let _ = pidfd_send_signal(pidfd, signal);
        }
        let deadline = Instant::now() + limit;
        running.retain(|(_, pidfd)| !wait_readable(pidfd, deadline));
    }
    // Our own children would remain as zombies.
    for id in processes {
        if let Some(pid) = Pid::from_raw(id.pid) {
            let _ = waitpid(Some(pid), WaitOptions::NOHANG);
        }
    }
    if let Some((id, _)) = running.first() {
        bail!("process {} does not end even after SIGKILL; look at /proc/{}/stack", id.pid, id.pid);
    }
    Ok(())
}

/// Returns this process and its ancestors.
pub(crate) fn self_and_ancestors() -> Vec<i32> {
    let parent_of = |pid: &i32| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        stat.rsplit_once(')')?
            .1
            .split_ascii_whitespace()
            .nth(1)?
            .parse()
            .ok()
            .filter(|parent| *parent > 0)
    };
    std::iter::successors(i32::try_from(std::process::id()).ok(), parent_of).collect()
}

/// Waits until `fd` is readable. Returns false past the deadline.
pub(crate) fn wait_readable(fd: &impl AsFd, deadline: Instant) -> bool {
    loop {
        let left = clock::duration_timespec(deadline.saturating_duration_since(Instant::now()));
        match poll(&mut [PollFd::new(fd, PollFlags::IN)], Some(&left)) {
            Ok(0) => return false,
            Err(Errno::INTR) => {}
            Ok(_) | Err(_) => return true,
        }
    }
}

/// Process just started in a namespace.
pub(crate) struct Started {
    pub(crate) id: ProcessId,
    pidfd: OwnedFd,
    stdout: Option<std::process::ChildStdout>,
}

/// Starts `command` inside the namespace, in a process group of its own, with stderr going to
/// `log`.
///
/// It enters only the network namespace and not a mount namespace as `ip netns exec` does: mounts
/// of an agent must outlive it and be visible to the next one.
pub(crate) fn start(namespace: &str, command: Command, log: &Path, piped: bool) -> Result<Started> {
    start_with(namespace, command, log, piped, Stdio::null())
}

/// Starts a process as [`start`] does, with a given standard input.
pub(crate) fn start_with(
    namespace: &str,
    mut command: Command,
    log: &Path,
    piped: bool,
    stdin: Stdio,
) -> Result<Started> {
    use std::os::unix::process::CommandExt;
    let open_log = || File::options().create(true).append(true).open(log);
    let log_file = open_log().with_context(|| format!("cannot write {}", log.display()))?;
    let stdout = if piped { Stdio::piped() } else { Stdio::from(log_file.try_clone()?) };
    command.stdin(stdin).stdout(stdout).stderr(log_file).process_group(0);
    let program = command.get_program().to_string_lossy().into_owned();
    let mut child = in_namespace(namespace, move || command.spawn())?
        .with_context(|| format!("cannot start {program}; is it there and executable?"))?;
    let pid = i32::try_from(child.id())?;
    let pidfd =
        Pid::from_raw(pid).map(|pid| pidfd_open(pid, PidfdFlags::empty())).context("no pid")??;
    // Our child exists until we wait for it, even if it has ended: a later wait for readiness
    // notices that.
    let (_, start_time) = stat_of(pid).with_context(|| format!("{program} is gone"))?;
    let id = ProcessId { pid, start_time };
    Ok(Started { id, pidfd, stdout: child.stdout.take() })
}

impl Started {
    /// Waits until the process prints `ready` on its standard output.
    pub(crate) fn wait_ready_line(
        &mut self,
        what: &str,
        log: &Path,
        limit: Duration,
    ) -> Result<()> {
        let stdout = self.stdout.take().context("standard output is not piped")?;
        if !wait_readable(&stdout, Instant::now() + limit) {
            bail!(
                "{what} (process {}) is not ready after {limit:?}; its log:\n{}",
                self.id.pid,
                tail(log)
            );
        }
        let mut line = String::new();
        BufReader::new(stdout).read_line(&mut line)?;
        if line.trim() != "ready" {
            bail!("{what} ended at its start; its log:\n{}", tail(log));
        }
        Ok(())
    }

    /// Polls `is_ready` until it returns true, the process ends or `limit` is over.
    pub(crate) fn wait_until(
        &self,
        what: &str,
        log: &Path,
        limit: Duration,
        is_ready: impl Fn() -> bool,
    ) -> Result<()> {
        let deadline = Instant::now() + limit;
        while !is_ready() {
            if wait_readable(&self.pidfd, Instant::now() + Duration::from_millis(20)) {
                bail!("{what} ended at its start; its log ({}):\n{}", log.display(), tail(log));
            }
            if Instant::now() >= deadline {
                bail!(
                    "{what} does not answer after {limit:?}; its log ({}):\n{}",
                    log.display(),
                    tail(log)
                );
            }
        }
        Ok(())
    }
}

/// Returns the last lines of a log.
fn tail(log: &Path) -> String {
    let text = std::fs::read_to_string(log).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    let from = lines.len().saturating_sub(12);
    if lines.is_empty() {
        "  (nothing logged)".to_owned()
    } else {
        format!("  {}", lines[from..].join("\n  "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stat_line_with_brackets_in_the_name() {
        let line = "42 (a) b (c)) S 1 42 42 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 1 0 987654 0 0";
        assert_eq!(parse_stat(line), Some(('S', 987_654)));
        assert_eq!(parse_stat("nonsense"), None);
    }

    #[test]
    fn pid_files() {
        assert_eq!(ProcessId::parse("12 345\n"), Some(ProcessId { pid: 12, start_time: 345 }));
        for text in ["", "12", "1 345", "-5 1", "x y", "0 0"] {
            assert_eq!(ProcessId::parse(text), None, "{text}");
        }
    }

    #[test]
    fn a_clock_ahead_names_later_start_times() {
        let named = ProcessId { pid: 12, start_time: 360_045 };
        assert_eq!(named.on_clock_ahead(3600), ProcessId { pid: 12, start_time: 45 });
        assert_eq!(named.on_clock_ahead(0), named);
    }

    #[test]
    fn this_process_is_alive_and_another_start_time_is_not() {
        let me = ProcessId::of(i32::try_from(std::process::id()).unwrap()).unwrap();
        assert!(me.is_alive());
        assert!(!ProcessId { start_time: me.start_time + 1, ..me }.is_alive());
        assert_eq!(self_and_ancestors()[0], me.pid);
    }

    #[test]
    fn a_child_that_ignores_sigterm_is_killed() {
        let mut child = Command::new("sh")
            .args(["-c", "trap '' TERM; echo trapped; exec sleep 1000"])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let id = ProcessId::of(i32::try_from(child.id()).unwrap()).unwrap();
        end_all(&[id], Duration::from_millis(50)).unwrap();
        assert!(!id.is_alive());
        drop(child.wait());
    }
}
