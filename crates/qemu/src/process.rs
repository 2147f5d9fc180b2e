//! The process of QEMU, watched by a pidfd, whether this agent started it or adopted it from an
//! earlier one.

use std::fmt;
use std::os::fd::{AsFd, OwnedFd, RawFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{
    Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, pidfd_open, pidfd_send_signal, waitid,
};
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use crate::qmp::{CrashSign, Qmp, QmpError};
use godwit_types::Fault;

/// Socket of the monitor in a VM's run directory.
pub const QMP_SOCKET: &str = "qmp.sock";
/// Rights that QEMU gives up: obsolete system calls, changes of user and group, starting programs,
/// changes of priority and affinity. A VM needs none of these, under KVM or TCG, nor do migrations
/// and the tracker's library (QEMU 7.2 to 10.0).
pub(crate) const SANDBOX: &str =
    "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny";

/// Longest time until QEMU ends after `quit`: it flushes its disks.
const QUIT_LIMIT: Duration = Duration::from_secs(10);
/// Longest time until the kernel has ended a killed QEMU: it frees its memory.
const KILL_LIMIT: Duration = Duration::from_secs(60);
/// Longest time to read the last events of a process that is gone.
const LAST_WORDS_LIMIT: Duration = Duration::from_secs(5);
/// Longest time until a QEMU that closed its monitor at the start ends by itself.
const EXIT_LIMIT: Duration = Duration::from_secs(5);

/// Stack of a thread that only waits.
const WAIT_STACK_BYTES: usize = 64 << 10;

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Exit {
    /// The process exited with this code.
    Code(i32),
    Signal(i32),
    /// Unknown: the process was the child of another agent.
    Unknown,
}

impl fmt::Display for Exit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Exit::Code(code) => write!(f, "exit code {code}"),
            Exit::Signal(signal) => write!(f, "signal {signal}"),
            Exit::Unknown => f.write_str("exit code unknown"),
        }
    }
}

/// End of a QEMU process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ended {
    /// How the process ended.
    pub exit: Exit,
    /// Whether the guest requested the end by powering itself off. Also true after a panic.
    pub guest_shut_down: bool,
    /// What QEMU said of a crash before its end.
    pub crash: Option<CrashSign>,
}

/// Why a process cannot be adopted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AdoptError {
    /// The process has ended, or its number now belongs to another one.
    #[error("process {pid} is gone")]
    Gone {
        /// Number of the process.
        pid: i32,
    },
    /// The process runs, but its monitor is unusable.
    #[error("process {pid} runs, but {why}")]
    Monitor {
        /// Number of the process.
        pid: i32,
        /// The error of its monitor.
        why: QmpError,
    },
    /// The kernel does not allow watching the process.
    #[error("cannot watch process {pid}: {why}")]
    Watch {
        /// Number of the process.
        pid: i32,
        /// The system error.
        why: String,
    },
}

impl AdoptError {
    /// Stable code for programs.
    #[must_use]
    pub fn code(&self) -> &'static str {
        match self {
            AdoptError::Gone { .. } => "qemu-gone",
            AdoptError::Monitor { why, .. } => why.code(),
            AdoptError::Watch { .. } => "qemu-not-watched",
        }
    }

    /// What the operator can do about it.
    #[must_use]
    pub fn remedy(&self) -> String {
        match self {
            AdoptError::Gone { .. } => "start the VM again".to_owned(),
            AdoptError::Monitor { pid, .. } => {
                format!("check that no other agent runs here; if QEMU hangs, end process {pid}")
            }
            AdoptError::Watch { .. } => "run the agent as root".to_owned(),
        }
    }

    /// Combines code, message and remedy.
    #[must_use]
    pub fn fault(&self) -> Fault {
        Fault::new(self.code(), self.to_string(), self.remedy())
    }
}

/// A running QEMU. Dropping this does not end QEMU.
#[derive(Clone, Debug)]
pub struct QemuProcess {
    /// Number of the process.
    pub pid: i32,
    /// Start time, in clock ticks since the host's boot. With the number it identifies the process.
    pub start_time: u64,
    /// Connection to the monitor.
    pub qmp: Qmp,
    /// Directory of its sockets and logs.
    pub run_dir: PathBuf,
    process: Process,
}

impl QemuProcess {
    pub(crate) fn new(process: Process, qmp: Qmp, run_dir: PathBuf) -> QemuProcess {
        QemuProcess { pid: process.pid, start_time: process.start_time, qmp, run_dir, process }
    }

    /// Takes over a QEMU that an earlier agent started.
    ///
    /// # Errors
    /// The process is gone (another one with its number does not count), or its monitor is
    /// unusable.
    pub async fn adopt(
        run_dir: PathBuf,
        pid: i32,
        start_time: u64,
    ) -> Result<QemuProcess, AdoptError> {
        let process = Process::watch(pid, Some(start_time)).map_err(|why| match why.kind() {
            std::io::ErrorKind::NotFound => AdoptError::Gone { pid },
            _ => AdoptError::Watch { pid, why: why.to_string() },
        })?;
        match Qmp::connect(run_dir.join(QMP_SOCKET)).await {
            Ok(qmp) => Ok(QemuProcess::new(process, qmp, run_dir)),
            Err(_) if process.exit.borrow().is_some() => Err(AdoptError::Gone { pid }),
            Err(why) => Err(AdoptError::Monitor { pid, why }),
        }
    }

    /// Ends QEMU by its monitor, otherwise by SIGKILL; returns when it is gone. The guest is not
    /// asked.
    pub async fn quit(&self) {
        if !self.qmp.is_closed() {
            // Whatever the response is, what counts is whether QEMU ends.
            let _ = self.qmp.execute_within("quit", serde_json::Value::Null, QUIT_LIMIT).await;
            if tokio::time::timeout(QUIT_LIMIT, self.exited()).await.is_ok() {
                return;
            }
        }
        self.kill().await;
    }

    /// Ends QEMU by SIGKILL at once, as fencing requires. Returns when it is gone.
    pub async fn kill(&self) {
        self.process.kill().await;
    }

    /// Waits until QEMU has ended.
    pub async fn exited(&self) -> Exit {
        self.process.exited().await
    }

    /// Waits until QEMU has ended and its last event is read.
    pub async fn ended(&self) -> Ended {
        let exit = self.exited().await;
        // The kernel keeps the process's output; the reading task may be late.
        let _ = tokio::time::timeout(LAST_WORDS_LIMIT, self.qmp.closed()).await;
        let (guest_shut_down, crash) = (self.qmp.guest_has_shut_down(), self.qmp.crash());
        Ended { exit, guest_shut_down, crash }
    }

    /// Returns how QEMU ended, if it has.
    #[must_use]
    pub fn exit(&self) -> Option<Exit> {
        *self.process.exit.borrow()
    }
}

/// Ends a QEMU whose monitor does not respond, by SIGKILL, and returns when it is gone. A process
/// that is gone already is not an error.
///
/// # Errors
/// The kernel does not allow this process to watch or end it, or it hangs in the kernel.
pub async fn end_process(pid: i32, start_time: u64) -> std::io::Result<()> {
    match Process::watch(pid, Some(start_time)) {
        Ok(process) => process.kill().await,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    }
    if is_alive(pid, start_time) { Err(std::io::ErrorKind::TimedOut.into()) } else { Ok(()) }
}

/// Whether the process with this start time runs. Numbers are reused; pairs of number and start
/// time are not. A zombie does not run.
#[must_use]
pub fn is_alive(pid: i32, start_time: u64) -> bool {
    matches!(stat_of(pid), Ok(stat) if stat.start_time == start_time && !stat.is_ended)
}

/// Whether the process ends within the limit, or has ended. Blocks.
#[must_use]
pub fn ends_within(pid: i32, start_time: u64, limit: Duration) -> bool {
    let Some(Ok(pidfd)) = Pid::from_raw(pid).map(|number| pidfd_open(number, PidfdFlags::empty()))
    else {
        return !is_alive(pid, start_time);
    };
    // Check the start time after opening the pidfd: the pidfd refers to the process that had the
    // number at that time.
    if is_alive(pid, start_time)
        && let Ok(limit) = Timespec::try_from(limit)
    {
        // A signal ends the wait early; the caller checks once more.
        let _ = poll(&mut [PollFd::new(&pidfd, PollFlags::IN)], Some(&limit));
    }
    !is_alive(pid, start_time)
}

/// A process and the task that waits for its end.
#[derive(Clone, Debug)]
pub(crate) struct Process {
    pid: i32,
    start_time: u64,
    pidfd: Arc<OwnedFd>,
    exit: watch::Receiver<Option<Exit>>,
}

impl Process {
    /// Watches a child that was just started. A child that has already ended is a zombie, which can
    /// be watched too.
    pub(crate) fn of_child(pid: i32) -> std::io::Result<Process> {
        Process::watch(pid, None)
    }

    /// Watches a process. If a start time is given, the process must have it.
    pub(crate) fn watch(pid: i32, start_time: Option<u64>) -> std::io::Result<Process> {
        let gone = || std::io::Error::from(std::io::ErrorKind::NotFound);
        let number = Pid::from_raw(pid).ok_or_else(gone)?;
        let pidfd = pidfd_open(number, PidfdFlags::empty()).map_err(|errno| match errno {
            Errno::SRCH => gone(),
            errno => errno.into(),
        })?;
        // Read after the pidfd was opened, which from then on refers to this process only.
        let stat = stat_of(pid)?;
        if start_time.is_some_and(|expected| expected != stat.start_time || stat.is_ended) {
            return Err(gone());
        }
        let waiting = pidfd.try_clone()?;
        let (sender, exit) = watch::channel(None);
        // A thread, because tokio (1.53) watches foreign descriptors only by unsafe means. It lives
        // as long as the process, so that no zombie stays.
        std::thread::Builder::new()
            .name(format!("wait-{pid}"))
            .stack_size(WAIT_STACK_BYTES)
            .spawn(move || {
                sender.send_replace(Some(wait(&waiting)));
            })?;
        Ok(Process { pid, start_time: stat.start_time, pidfd: Arc::new(pidfd), exit })
    }

    /// Returns number and start time.
    pub(crate) fn identity(&self) -> (i32, u64) {
        (self.pid, self.start_time)
    }

    pub(crate) async fn exited(&self) -> Exit {
        let mut exit = self.exit.clone();
        match exit.wait_for(Option::is_some).await {
            Ok(exit) => exit.unwrap_or(Exit::Unknown),
            // The runtime shuts down.
            Err(_) => Exit::Unknown,
        }
    }

    /// Sends SIGKILL; the process may have ended by itself.
    pub(crate) fn send_kill(&self) {
        let _ = pidfd_send_signal(&*self.pidfd, Signal::KILL);
    }

    async fn kill(&self) {
        self.send_kill();
        if tokio::time::timeout(KILL_LIMIT, self.exited()).await.is_err() {
            tracing::error!(pid = self.pid, "a killed QEMU does not end: it hangs in the kernel");
        }
    }

    /// Ends a process whose monitor failed at the start; returns how it ended if it did so by
    /// itself.
    pub(crate) async fn end_now(&self, error: &QmpError) -> Option<Exit> {
        let is_ending = matches!(error, QmpError::Closed { .. } | QmpError::Io { .. });
        if is_ending && let Ok(exit) = tokio::time::timeout(EXIT_LIMIT, self.exited()).await {
            return Some(exit);
        }
        self.kill().await;
        None
    }
}

/// Blocks until the process has ended; takes the exit code of a child.
fn wait(pidfd: &OwnedFd) -> Exit {
    let mut ended = [PollFd::new(pidfd, PollFlags::IN)];
    while let Err(errno) = poll(&mut ended, None) {
        if errno != Errno::INTR {
            tracing::error!(%errno, "cannot wait for a QEMU");
            return Exit::Unknown;
        }
    }
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG;
    match waitid(WaitId::PidFd(pidfd.as_fd()), options) {
        Ok(Some(status)) => match (status.exit_status(), status.terminating_signal()) {
            (Some(code), _) => Exit::Code(code),
            (None, Some(signal)) => Exit::Signal(signal),
            (None, None) => Exit::Unknown,
        },
        _ => Exit::Unknown,
    }
}

struct Stat {
    start_time: u64,
    is_ended: bool,
}

/// Returns the start time of a process, in clock ticks since the host's boot. `None` if it is gone,
/// or a zombie.
#[must_use]
pub fn start_time_of(pid: i32) -> Option<u64> {
    stat_of(pid).ok().filter(|stat| !stat.is_ended).map(|stat| stat.start_time)
}

/// Reads `/proc/PID/stat`.
fn stat_of(pid: i32) -> std::io::Result<Stat> {
    // The name of a process need not be valid text.
    let stat = std::fs::read(format!("/proc/{pid}/stat"))?;
    parse_stat(&String::from_utf8_lossy(&stat))
        .ok_or_else(|| std::io::ErrorKind::InvalidData.into())
}

/// Parses `PID (NAME) STATE …`: the state is field 3, the number of threads field 20, the start
/// time field 22 (proc_pid_stat(5)). The name may contain anything, parentheses too. A process
/// whose first thread has ended has the state of a zombie, but lives as long as it has other
/// threads.
fn parse_stat(text: &str) -> Option<Stat> {
    let (_, rest) = text.rsplit_once(')')?;
    let mut fields = rest.split_ascii_whitespace();
    let state = fields.next()?;
    let threads: u32 = fields.nth(16)?.parse().ok()?;
    let start_time = fields.nth(1)?.parse().ok()?;
    let is_ended = matches!(state, "X" | "x") || (state == "Z" && threads <= 1);
    Some(Stat { start_time, is_ended })
}

/// Returns the path by which QEMU reopens the inherited descriptor with that number. The reopening
/// needs its user's rights to the file itself.
pub(crate) fn path_in_qemu(number: RawFd) -> String {
    format!("/proc/self/fd/{number}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sleeper() -> std::process::Child {
        std::process::Command::new("sleep").arg("1000").spawn().unwrap()
    }

    #[test]
    fn a_process_is_identified_by_number_and_start_time() {
        let mut child = sleeper();
        let pid = child.id().cast_signed();
        let start_time = stat_of(pid).unwrap().start_time;
        assert!(is_alive(pid, start_time));
        assert!(!is_alive(pid, start_time + 1));
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!is_alive(pid, start_time));
        assert!(!is_alive(0, 0) && !is_alive(-1, 0));
    }

    #[test]
    fn waiting_for_an_end_stops_with_the_end() {
        let mut child = sleeper();
        let pid = child.id().cast_signed();
        let start_time = stat_of(pid).unwrap().start_time;
        assert!(!ends_within(pid, start_time, Duration::ZERO));
        assert!(ends_within(pid, start_time + 1, Duration::from_secs(60)), "that process is gone");
        child.kill().unwrap();
        assert!(ends_within(pid, start_time, Duration::from_secs(60)));
        child.wait().unwrap();
        assert!(ends_within(pid, start_time, Duration::ZERO));
    }

    #[test]
    fn names_with_parentheses_are_skipped() {
        let text = "12 (a) R (b) Z 1 12 12 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 4242 0 0";
        let stat = parse_stat(text).unwrap();
        assert_eq!((stat.start_time, stat.is_ended), (4242, true));
        assert!(parse_stat("12 (a) R 1").is_none());
        // Its first thread has ended, and two run.
        let led_by_none = text.replacen(" 1 0 4242", " 2 0 4242", 1);
        assert!(led_by_none != text && !parse_stat(&led_by_none).unwrap().is_ended);
    }

    #[test]
    fn a_process_whose_name_is_not_utf8_is_alive() {
        // The kernel names a process after its file; a process can also choose such a name.
        let folder = tempfile::tempdir().unwrap();
        let name = <std::ffi::OsStr as std::os::unix::ffi::OsStrExt>::from_bytes(b"\xff) Z");
        std::os::unix::fs::symlink("/bin/sleep", folder.path().join(name)).unwrap();
        let mut child =
            std::process::Command::new(folder.path().join(name)).arg("1000").spawn().unwrap();
        let stat = stat_of(child.id().cast_signed());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!stat.unwrap().is_ended);
    }

    #[tokio::test]
    async fn an_ended_child_is_reaped_and_reported() {
        let child = sleeper();
        let pid = child.id().cast_signed();
        drop(child);
        let process = Process::of_child(pid).unwrap();
        let start_time = process.start_time;
        process.kill().await;
        assert_eq!(process.exited().await, Exit::Signal(9));
        assert!(stat_of(pid).is_err(), "a zombie stayed");
        assert!(!is_alive(pid, start_time));
    }

    #[tokio::test]
    async fn a_process_with_another_start_time_is_not_adopted() {
        let mut child = sleeper();
        let pid = child.id().cast_signed();
        let start_time = stat_of(pid).unwrap().start_time;
        let adopt = |time| QemuProcess::adopt("/nowhere".into(), pid, time);
        assert_eq!(adopt(start_time + 1).await.unwrap_err(), AdoptError::Gone { pid });
        assert_eq!(adopt(start_time).await.unwrap_err().code(), "qmp-unreachable");
        child.kill().unwrap();
        // The adoption that failed for lack of a monitor also reaps a child of this process, and
        // may have been faster.
        let _ = child.wait();
        assert_eq!(adopt(start_time).await.unwrap_err().code(), "qemu-gone");
    }
}
