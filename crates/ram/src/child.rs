//! Limits of a process that this program starts, set in the child before its program begins.
//!
//! A limit that the parent sets later leaves a gap in which the program runs without it, and only
//! the child can request the parent-death signal. Both need a closure between `fork` and `exec`,
//! which is unsafe code; therefore this module is in this crate. The closures make only system
//! calls (signal-safety(7)): no allocation, no lock.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;

use rustix::io::Errno;
use rustix::process::{
    Resource, Rlimit, Signal, getpid, getppid, getrlimit, set_parent_process_death_signal,
    setrlimit,
};

/// Resource limits of a child (getrlimit(2)), soft and hard alike. `None` keeps the inherited
/// limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ChildLimits {
    /// `RLIMIT_AS`: bytes of address space.
    pub address_space_bytes: Option<u64>,
    /// `RLIMIT_NPROC`: tasks of the child's user, threads included. The kernel does not apply it to
    /// root.
    pub tasks: Option<u64>,
    /// `RLIMIT_NOFILE`: one more than the highest descriptor number that the child may open.
    pub open_files: Option<u64>,
    /// `RLIMIT_FSIZE`: bytes of a file that it writes. The kernel ends a child that writes more.
    pub file_bytes: Option<u64>,
}

/// Limits the child. A limit that is already lower stays.
pub fn limit_child(command: &mut Command, limits: ChildLimits) {
    let limits = [
        (Resource::As, limits.address_space_bytes),
        (Resource::Nproc, limits.tasks),
        (Resource::Nofile, limits.open_files),
        (Resource::Fsize, limits.file_bytes),
    ];
    let set = move || {
        for (resource, limit) in limits {
            let Some(limit) = limit else { continue };
            let least = getrlimit(resource).maximum.map_or(limit, |inherited| inherited.min(limit));
            setrlimit(resource, Rlimit { current: Some(least), maximum: Some(least) })?;
        }
        Ok(())
    };
    // SAFETY: the closure makes system calls only, on values that it owns.
    unsafe { command.pre_exec(set) };
}

/// Makes the kernel kill the child when the thread that spawns it ends, and therefore when this
/// process ends, by whatever cause. A child whose parent has ended before that takes effect does
/// not start.
///
/// The thread counts, not the process (`PR_SET_PDEATHSIG`, prctl(2)): the caller must spawn from a
/// thread that lives as long as the process.
pub fn end_child_with_parent(command: &mut Command) {
    let parent = getpid();
    let arrange = move || {
        set_parent_process_death_signal(Some(Signal::KILL))?;
        // The parent may have ended before the signal was requested.
        if getppid() == Some(parent) { Ok(()) } else { Err(io::Error::from(Errno::SRCH)) }
    };
    // SAFETY: the closure makes system calls only, on values that it owns.
    unsafe { command.pre_exec(arrange) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_has_its_limits_from_its_first_instruction_on() {
        let mut command = Command::new("cat");
        command.arg("/proc/self/limits");
        let limits = ChildLimits {
            address_space_bytes: Some(1 << 33),
            tasks: Some(1 << 20),
            open_files: Some(63),
            file_bytes: Some(1 << 22),
        };
        limit_child(&mut command, limits);
        let printed = String::from_utf8(command.output().unwrap().stdout).unwrap();
        let of = |name: &str| {
            let line = printed.lines().find_map(|line| line.strip_prefix(name)).unwrap();
            line.split_whitespace().take(2).map(str::to_owned).collect::<Vec<_>>()
        };
        assert_eq!(of("Max address space"), ["8589934592", "8589934592"]);
        assert_eq!(of("Max open files"), ["63", "63"]);
        assert_eq!(of("Max file size"), ["4194304", "4194304"]);
    }

    #[test]
    fn a_child_ends_with_the_thread_that_spawned_it() {
        let spawning = std::thread::spawn(|| {
            let mut command = Command::new("sleep");
            command.arg("1000");
            end_child_with_parent(&mut command);
            command.spawn().unwrap()
        });
        let mut child = spawning.join().unwrap();
        let signal = std::os::unix::process::ExitStatusExt::signal(&child.wait().unwrap());
        assert_eq!(signal, Some(Signal::KILL.as_raw()));
    }
}
