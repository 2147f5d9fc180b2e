//! QEMU's process: watched by a pidfd, whether this agent started it or adopted it from an earlier one.

use std::fmt;
use std::os::fd::{AsFd, OwnedFd};
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

use crate::launch::QMP_SOCKET;
use crate::qmp::{Qmp, QmpError};
use godwit_types::Fault;

/// How long QEMU may take to end when told to: it flushes its disks.
const QUIT_LIMIT: Duration = Duration::from_secs(10);
/// How long the kernel may take to end a killed QEMU: it frees its memory.
const KILL_LIMIT: Duration = Duration::from_secs(60);
/// Longest time to read the last events of a process that is gone.
const LAST_WORDS_LIMIT: Duration = Duration::from_secs(5);
/// How long a QEMU that closed its monitor at start may take to end by itself.
const EXIT_LIMIT: Duration = Duration::from_secs(5);

/// The stack of a thread that only waits.
const WAIT_STACK_BYTES: usize = 64 << 10;

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Exit {
    /// By itself, with this code.
    Code(i32),
    Signal(i32),
    /// Nobody knows: it was another agent's child.
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
    /// The guest requested it: it powered itself off.
    pub guest_shut_down: bool,
}

/// Why a process can't be adopted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AdoptError {
    /// The process has ended, or its number belongs to another now.
    #[error("process {pid} is gone")]
    Gone {
        /// Its number.
        pid: i32,
    },
    /// It runs, but its monitor can't be used.
    #[error("process {pid} runs, but {why}")]
    Monitor {
        /// Its number.
        pid: i32,
        /// What its monitor did.
        why: QmpError,
    },
    /// The kernel does not let it be watched.
    #[error("process {pid} can't be watched: {why}")]
    Watch {
        /// Its number.
        pid: i32,
        /// What the system said.
        why: String,
    },
}

impl AdoptError {
    /// A stable code for programs.
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
                format!("see that no other agent runs here; if QEMU hangs, end process {pid}")
            }
            AdoptError::Watch { .. } => "run the agent as root".to_owned(),
        }
    }

    /// Code, message and remedy together.
    #[must_use]
    pub fn fault(&self) -> Fault {
        Fault::new(self.code(), self.to_string(), self.remedy())
    }
}

/// A running QEMU. Dropping it lets QEMU run on.
#[derive(Clone, Debug)]
pub struct QemuProcess {
    /// Its number.
    pub pid: i32,
    /// When it started, in clock ticks since the host's boot: with the number, its identity.
    pub start_time: u64,
    /// Its monitor.
    pub qmp: Qmp,
    /// Where its sockets and logs are.
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
    /// The process is gone (another with its number doesn't count), or its monitor can't be used.
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

    /// Ends QEMU: by its monitor, else by SIGKILL; returns when it is gone. The guest is not asked.
    pub async fn quit(&self) {
        if !self.qmp.is_closed() {
            // Whatever it answers, what counts is whether it ends.
            let _ = self.qmp.execute_within("quit", serde_json::Value::Null, QUIT_LIMIT).await;
            if tokio::time::timeout(QUIT_LIMIT, self.exited()).await.is_ok() {
                return;
            }
        }
        self.kill().await;
    }

    /// Ends QEMU by SIGKILL at once: what fencing needs. Returns when it is gone.
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
        // The kernel keeps what the process wrote; the reading task may be late.
        let _ = tokio::time::timeout(LAST_WORDS_LIMIT, self.qmp.closed()).await;
        Ended { exit, guest_shut_down: self.qmp.guest_has_shut_down() }
    }

    /// How it ended, if it has.
    #[must_use]
    pub fn exit(&self) -> Option<Exit> {
        *self.process.exit.borrow()
    }
}

/// Ends a QEMU whose monitor does not answer, by SIGKILL, and returns when it is gone; one that is gone already is no error.
///
/// # Errors
/// The kernel does not let this process watch or end it, or it hangs there.
pub async fn end_process(pid: i32, start_time: u64) -> std::io::Result<()> {
    match Process::watch(pid, Some(start_time)) {
        Ok(process) => process.kill().await,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    }
    if is_alive(pid, start_time) { Err(std::io::ErrorKind::TimedOut.into()) } else { Ok(()) }
}

/// Whether that very process runs: a number is given anew, a number with a start time is not. A zombie doesn't run.
#[must_use]
pub fn is_alive(pid: i32, start_time: u64) -> bool {
    matches!(stat_of(pid), Ok(stat) if stat.start_time == start_time && !stat.is_ended)
}

/// Whether that process ends within the limit, or has ended. Blocks.
#[must_use]
pub fn ends_within(pid: i32, start_time: u64, limit: Duration) -> bool {
    let Some(Ok(pidfd)) = Pid::from_raw(pid).map(|number| pidfd_open(number, PidfdFlags::empty()))
    else {
        return !is_alive(pid, start_time);
    };
    // The one that is meant, or it is gone: the pidfd means whoever has the number since it was opened.
    if is_alive(pid, start_time)
        && let Ok(limit) = Timespec::try_from(limit)
    {
        // A signal ends it early; who asks looks once more.
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
    /// Watches a child just started. A child that has ended already is a zombie and watched all the same.
    pub(crate) fn of_child(pid: i32) -> std::io::Result<Process> {
        Process::watch(pid, None)
    }

    /// Watches a process, one with this start time if it is given.
    fn watch(pid: i32, start_time: Option<u64>) -> std::io::Result<Process> {
        let gone = || std::io::Error::from(std::io::ErrorKind::NotFound);
        let number = Pid::from_raw(pid).ok_or_else(gone)?;
        let pidfd = pidfd_open(number, PidfdFlags::empty()).map_err(|errno| match errno {
            Errno::SRCH => gone(),
            errno => errno.into(),
        })?;
        // Looked at after the pidfd was opened: from here on it means this process and no other.
        let stat = stat_of(pid)?;
        if start_time.is_some_and(|expected| expected != stat.start_time || stat.is_ended) {
            return Err(gone());
        }
        let waiting = pidfd.try_clone()?;
        let (told, exit) = watch::channel(None);
        // A thread, as tokio watches foreign descriptors by unsafe means only (1.53). It lives as long as the process
        // does, so that no zombie stays.
        std::thread::Builder::new()
            .name(format!("wait-{pid}"))
            .stack_size(WAIT_STACK_BYTES)
            .spawn(move || {
                told.send_replace(Some(wait(&waiting)));
            })?;
        Ok(Process { pid, start_time: stat.start_time, pidfd: Arc::new(pidfd), exit })
    }

    async fn exited(&self) -> Exit {
        let mut exit = self.exit.clone();
        match exit.wait_for(Option::is_some).await {
            Ok(exit) => exit.unwrap_or(Exit::Unknown),
            // The runtime goes down.
            Err(_) => Exit::Unknown,
        }
    }

    async fn kill(&self) {
        // It may have ended by itself.
        let _ = pidfd_send_signal(&*self.pidfd, Signal::KILL);
        if tokio::time::timeout(KILL_LIMIT, self.exited()).await.is_err() {
            tracing::error!(pid = self.pid, "killed QEMU does not end: it hangs in the kernel");
        }
    }

    /// Ends a process whose monitor failed at start; returns how it ended if it did so by itself.
    pub(crate) async fn end_now(&self, error: &QmpError) -> Option<Exit> {
        let is_ending = matches!(error, QmpError::Closed { .. } | QmpError::Io { .. });
        if is_ending && let Ok(exit) = tokio::time::timeout(EXIT_LIMIT, self.exited()).await {
            return Some(exit);
        }
        self.kill().await;
        None
    }
}

/// Blocks until the process has ended; takes its exit code where it is our child.
fn wait(pidfd: &OwnedFd) -> Exit {
    let mut ended = [PollFd::new(pidfd, PollFlags::IN)];
    while let Err(errno) = poll(&mut ended, None) {
        if errno != Errno::INTR {
            tracing::error!(%errno, "a QEMU can't be waited for");
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

/// When a process started, in clock ticks since the host's boot. `None`: it is gone, or a zombie.
pub(crate) fn start_time_of(pid: i32) -> Option<u64> {
    stat_of(pid).ok().filter(|stat| !stat.is_ended).map(|stat| stat.start_time)
}

/// Reads `/proc/PID/stat`.
fn stat_of(pid: i32) -> std::io::Result<Stat> {
    // A process may give itself a name that is no text.
    let stat = std::fs::read(format!("/proc/{pid}/stat"))?;
    parse_stat(&String::from_utf8_lossy(&stat))
        .ok_or_else(|| std::io::ErrorKind::InvalidData.into())
}

/// `PID (NAME) STATE …`: the state is field 3, the number of threads field 20, the start time field 22
/// (proc_pid_stat(5)). The name may hold anything, parentheses too. A process whose first thread has ended is a
/// zombie to its state, and lives as long as it has others.
fn parse_stat(text: &str) -> Option<Stat> {
    let (_, rest) = text.rsplit_once(')')?;
    let mut fields = rest.split_ascii_whitespace();
    let state = fields.next()?;
    let threads: u32 = fields.nth(16)?.parse().ok()?;
    let start_time = fields.nth(1)?.parse().ok()?;
    let is_ended = matches!(state, "X" | "x") || (state == "Z" && threads <= 1);
    Some(Stat { start_time, is_ended })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sleeper() -> std::process::Child {
        std::process::Command::new("sleep").arg("1000").spawn().unwrap()
    }

    #[test]
    fn a_process_is_known_by_number_and_start() {
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
    fn an_end_is_waited_for_and_no_longer() {
        let mut child = sleeper();
        let pid = child.id().cast_signed();
        let start_time = stat_of(pid).unwrap().start_time;
        assert!(!ends_within(pid, start_time, Duration::ZERO));
        assert!(ends_within(pid, start_time + 1, Duration::from_secs(60)), "that one is gone");
        child.kill().unwrap();
        assert!(ends_within(pid, start_time, Duration::from_secs(60)));
        child.wait().unwrap();
        assert!(ends_within(pid, start_time, Duration::ZERO));
    }

    #[test]
    fn names_with_parentheses_are_read_over() {
        let text = "12 (a) R (b) Z 1 12 12 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 4242 0 0";
        let stat = parse_stat(text).unwrap();
        assert_eq!((stat.start_time, stat.is_ended), (4242, true));
        assert!(parse_stat("12 (a) R 1").is_none());
        // Its first thread has ended, and two run.
        let led_by_none = text.replacen(" 1 0 4242", " 2 0 4242", 1);
        assert!(led_by_none != text && !parse_stat(&led_by_none).unwrap().is_ended);
    }

    #[test]
    fn a_process_whose_name_is_no_text_is_alive() {
        // The kernel names a process after its file; it can also name itself so.
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
    async fn an_ended_child_is_reaped_and_its_end_told() {
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
    async fn a_process_with_another_start_is_not_adopted() {
        let mut child = sleeper();
        let pid = child.id().cast_signed();
        let start_time = stat_of(pid).unwrap().start_time;
        let adopt = |time| QemuProcess::adopt("/nowhere".into(), pid, time);
        assert_eq!(adopt(start_time + 1).await.unwrap_err(), AdoptError::Gone { pid });
        assert_eq!(adopt(start_time).await.unwrap_err().code(), "qmp-unreachable");
        child.kill().unwrap();
        // The adoption that failed for want of a monitor reaps a child of this process too, and may have been sooner.
        let _ = child.wait();
        assert_eq!(adopt(start_time).await.unwrap_err().code(), "qemu-gone");
    }
}
