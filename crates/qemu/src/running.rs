//! Processes of this machine, identified by facts from the kernel.
//!
//! Any process can choose its name and arguments. A process is identified by its users and its
//! executable, which it cannot choose.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use crate::process::start_time_of;

/// A process, as the kernel reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RunningProcess {
    /// Number of the process.
    pub pid: i32,
    /// Start time, in clock ticks since the host's boot. With the number it identifies the process.
    pub start_time: u64,
    /// Real, effective, saved and file-system user.
    users: [u32; 4],
}

impl RunningProcess {
    /// Reads one process. `None` if no process has that number, or it has ended.
    #[must_use]
    pub fn of(pid: i32) -> Option<RunningProcess> {
        let start_time = start_time_of(pid)?;
        let users = users_of(pid)?;
        // The number may have passed to another process in between.
        (start_time_of(pid) == Some(start_time)).then_some(RunningProcess {
            pid,
            start_time,
            users,
        })
    }

    /// Returns all processes that this process can see.
    ///
    /// # Errors
    /// /proc cannot be read.
    pub fn all() -> io::Result<impl Iterator<Item = RunningProcess>> {
        Ok(numbers()?.filter_map(RunningProcess::of))
    }

    /// Whether any of its users is this one, so that it may act as that user.
    #[must_use]
    pub fn may_act_as(&self, user: u32) -> bool {
        self.users.contains(&user)
    }

    /// Whether all of its users are this one. Another user can neither start nor imitate such a
    /// process.
    #[must_use]
    pub fn belongs_to(&self, user: u32) -> bool {
        self.users == [user; 4]
    }

    /// Whether `is_such` holds for all of its users.
    #[must_use]
    pub fn is_wholly(&self, is_such: impl Fn(u32) -> bool) -> bool {
        self.users.iter().all(|user| is_such(*user))
    }

    /// Whether its executable is a QEMU that root has installed.
    ///
    /// An upgrade may have replaced the file since; the kernel still knows the one that runs.
    #[must_use]
    pub fn runs_qemu(&self) -> bool {
        let link = PathBuf::from(format!("/proc/{}/exe", self.pid));
        let named = fs::read_link(&link).is_ok_and(|path| {
            path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"qemu"))
        });
        // The kernel follows the link to the file itself.
        named && fs::metadata(&link).is_ok_and(|file| file.uid() == 0)
    }

    /// Returns its arguments, each followed by a zero byte. The process chose them: they
    /// distinguish processes of a trusted user and prove nothing about others.
    #[must_use]
    pub fn arguments(&self) -> Vec<u8> {
        fs::read(format!("/proc/{}/cmdline", self.pid)).unwrap_or_default()
    }

    /// Returns a variable of its environment, which the process chose as well.
    #[must_use]
    pub fn variable(&self, name: &str) -> Option<String> {
        let environment = fs::read(format!("/proc/{}/environ", self.pid)).ok()?;
        let mut variables = environment.split(|byte| *byte == 0);
        let value =
            variables.find_map(|pair| pair.strip_prefix(name.as_bytes())?.strip_prefix(b"="))?;
        String::from_utf8(value.to_vec()).ok()
    }

    /// Whether it is in the PID namespace of this process.
    #[must_use]
    pub fn shares_numbers(&self) -> bool {
        let space = |of: &str| fs::read_link(format!("/proc/{of}/ns/pid")).ok();
        space("self").is_some_and(|own| space(&self.pid.to_string()) == Some(own))
    }
}

/// Returns every user that a process of this machine may act as, once for each process and user.
///
/// # Errors
/// /proc cannot be read.
pub fn users_of_processes() -> io::Result<impl Iterator<Item = u32>> {
    Ok(numbers()?.filter_map(users_of).flatten())
}

fn numbers() -> io::Result<impl Iterator<Item = i32>> {
    let entries = fs::read_dir("/proc")?.flatten();
    Ok(entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()))
}

/// Reads the users of a process from its status. The owner of /proc/PID is unsuitable: it is root
/// for a process that has made itself undumpable (proc(5)).
fn users_of(pid: i32) -> Option<[u32; 4]> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("Uid:"))?;
    let users: Vec<u32> =
        line.split_ascii_whitespace().map_while(|user| user.parse().ok()).collect();
    users.try_into().ok()
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::CommandExt;
    use std::process::{Child, Command};

    use super::*;

    const STRANGER: u32 = 1_999_950_000;

    /// Starts a process with arbitrary arguments and environment.
    fn pretender(user: Option<u32>) -> Child {
        let mut command = Command::new("/bin/sleep");
        command.arg0("qemu-system-x86_64").arg("1000").env("WHO", "qemu");
        if let Some(user) = user {
            command.uid(user);
        }
        let child = command.spawn().unwrap();
        // The process exists before the kernel has set up its arguments and environment.
        while RunningProcess::of(child.id().cast_signed()).unwrap().variable("WHO").is_none() {
            std::thread::yield_now();
        }
        child
    }

    fn end(mut child: Child) {
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn a_name_makes_no_qemu() {
        let child = pretender(None);
        let process = RunningProcess::of(child.id().cast_signed()).unwrap();
        assert!(process.belongs_to(rustix::process::geteuid().as_raw()));
        assert!(process.arguments().starts_with(b"qemu-system-x86_64\0"));
        assert!(!process.runs_qemu());
        assert_eq!(process.variable("WHO").as_deref(), Some("qemu"));
        assert_eq!(process.variable("WH"), None);
        assert!(process.shares_numbers());
        assert!(RunningProcess::all().unwrap().any(|other| other == process));
        end(child);
        assert_eq!(RunningProcess::of(process.pid), None);
        assert_eq!(RunningProcess::of(0), None);
    }

    #[test]
    fn a_process_has_the_user_that_started_it() {
        if !rustix::process::geteuid().is_root() {
            eprintln!("skipped: only root can start a process as another user");
            return;
        }
        let child = pretender(Some(STRANGER));
        let process = RunningProcess::of(child.id().cast_signed()).unwrap();
        assert!(process.belongs_to(STRANGER) && process.may_act_as(STRANGER));
        assert!(!process.may_act_as(0));
        assert!(users_of_processes().unwrap().any(|user| user == STRANGER));
        end(child);
    }
}
