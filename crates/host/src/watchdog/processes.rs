//! The processes that are guarded, each by a pidfd: its number may be another process's by the
//! time it must end.

use std::os::fd::OwnedFd;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

/// Processes that are guarded.
pub(super) trait Processes {
    /// Replaces the list. A process is a number and a start time.
    fn list(&mut self, pids: &[(i32, u64)]);
    /// Whether one of them lives, or may live.
    fn live(&mut self) -> bool;
    /// Sends SIGKILL to all, and returns how many have not ended yet.
    fn end(&mut self) -> usize;
}

/// Those that had not ended when they were last looked at.
#[derive(Debug, Default)]
pub(super) struct ByPidfd(Vec<Listed>);

#[derive(Debug)]
struct Listed {
    pid: i32,
    start_time: u64,
    /// Missing while the kernel does not give one.
    handle: Option<OwnedFd>,
    is_reported: bool,
}

/// A process by number and start time.
enum Found {
    Running(OwnedFd),
    Ended,
    Unknown(Errno),
}

impl Processes for ByPidfd {
    fn list(&mut self, pids: &[(i32, u64)]) {
        let mut former = std::mem::take(&mut self.0);
        let listed = pids.iter().map(|&(pid, start_time)| {
            let is_it = |one: &Listed| (one.pid, one.start_time) == (pid, start_time);
            match former.iter().position(is_it) {
                Some(at) => former.swap_remove(at),
                None => Listed { pid, start_time, handle: None, is_reported: false },
            }
        });
        self.0 = listed.collect();
    }

    fn live(&mut self) -> bool {
        self.0.retain_mut(|process| !process.has_ended());
        !self.0.is_empty()
    }

    fn end(&mut self) -> usize {
        for process in &self.0 {
            if let Some(handle) = &process.handle {
                // One that has ended is taken off the list by the next look.
                let _ = pidfd_send_signal(handle, Signal::KILL);
            }
        }
        self.0.len()
    }
}

impl Listed {
    fn has_ended(&mut self) -> bool {
        if self.handle.is_none() {
            match find(self.pid, self.start_time) {
                Found::Running(handle) => self.handle = Some(handle),
                Found::Ended => return true,
                Found::Unknown(error) => {
                    if !std::mem::replace(&mut self.is_reported, true) {
                        tracing::error!(pid = self.pid, %error, "cannot watch a QEMU");
                    }
                    return false;
                }
            }
        }
        self.handle.as_ref().is_some_and(has_ended)
    }
}

fn find(pid: i32, start_time: u64) -> Found {
    let Some(number) = Pid::from_raw(pid) else { return Found::Ended };
    let handle = match pidfd_open(number, PidfdFlags::empty()) {
        Ok(handle) => handle,
        // The number is nobody's, or a thread's of another process (ENOENT from Linux 6.9).
        Err(Errno::SRCH | Errno::INVAL | Errno::NOENT) => return Found::Ended,
        Err(error) => return Found::Unknown(error),
    };
    // Read after the pidfd was opened, which from then on refers to one process only.
    match godwit_qemu::start_time_of(pid) {
        Some(found) if found == start_time => Found::Running(handle),
        Some(_) => Found::Ended,
        None if has_ended(&handle) => Found::Ended,
        None => Found::Unknown(Errno::ACCESS),
    }
}

/// Whether all threads of the process have ended (pidfd_open(2)): none of them writes any more.
fn has_ended(handle: &OwnedFd) -> bool {
    let mut ended = [PollFd::new(handle, PollFlags::IN)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    matches!(poll(&mut ended, Some(&now)), Ok(1))
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command};

    use super::*;

    fn sleeper() -> (Child, (i32, u64)) {
        let child = Command::new("sleep").arg("1000").spawn().unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        (child, (pid, godwit_qemu::start_time_of(pid).unwrap()))
    }

    #[test]
    fn listed_processes_end_and_no_others() {
        let (mut one, first) = sleeper();
        let (mut other, second) = sleeper();
        let (mut reused, (pid, start_time)) = sleeper();
        let mut processes = ByPidfd::default();
        assert!(!processes.live());
        processes.list(&[first, second, (pid, start_time + 1)]);
        assert!(processes.live());
        processes.list(&[second, first]);
        assert_eq!(processes.0.iter().filter(|one| one.handle.is_some()).count(), 2);
        processes.list(&[first]);
        assert!(processes.live());
        assert_eq!(processes.end(), 1);
        one.wait().unwrap();
        assert!(!processes.live());
        for child in [&mut other, &mut reused] {
            assert!(child.try_wait().unwrap().is_none(), "another process was ended");
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }

    #[test]
    fn a_process_that_its_parent_has_not_reaped_has_ended() {
        let (mut child, listed) = sleeper();
        let mut processes = ByPidfd::default();
        processes.list(&[listed]);
        assert!(processes.live());
        child.kill().unwrap();
        let wait = rustix::process::WaitIdOptions::EXITED | rustix::process::WaitIdOptions::NOWAIT;
        let id = rustix::process::WaitId::Pid(Pid::from_child(&child));
        rustix::process::waitid(id, wait).unwrap();
        assert!(!processes.live());
        processes.list(&[listed]);
        assert!(!processes.live(), "listed again");
        child.wait().unwrap();
    }
}
