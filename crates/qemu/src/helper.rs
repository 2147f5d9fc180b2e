//! QEMUs that belong to no VM and answer queries: their version, their CPUs, whether KVM runs a
//! guest.
//!
//! They end with the process that queries them, however it ends. The kernel ensures that by the
//! parent-death signal, which follows the *thread* that spawned them. So one thread spawns all of
//! them and lives as long as the process. A helper may still be left over: its process was killed
//! between `fork` and that setting, or belonged to an earlier release. The next agent finds it by
//! its environment, which names its process, and ends it ([`end_left_helpers`]).

use std::io;
use std::path::Path;
use std::process::Stdio;
use std::sync::OnceLock;
use std::sync::mpsc::{SyncSender, sync_channel};

use godwit_ram::end_child_with_parent;
use tokio::process::{Child, Command};
use tokio::runtime::Handle;
use tokio::sync::oneshot;

use crate::process::{end_process, is_alive, start_time_of};
use crate::running::RunningProcess;

/// Environment variable that names the querying process by number and start time: `PID.TIME`.
const ASKER: &str = "GODWIT_ASKED_BY";
/// Most helpers that wait for their start. Further callers wait for a place: a start takes some
/// milliseconds.
const MOST_WAITING_JOBS: usize = 16;

/// Returns the command of a helper. It inherits only PATH from the caller, and is ended when its
/// handle is dropped. `user`: the user and group that it runs as; `None` for those of the caller.
pub(crate) fn helper(program: &Path, user: Option<(u32, u32)>) -> Command {
    let mut command = Command::new(program);
    command.current_dir("/").env_clear().envs(std::env::var_os("PATH").map(|path| ("PATH", path)));
    command.env(ASKER, own_name());
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
    if let Some((uid, gid)) = user {
        // The standard library drops supplementary groups with the change of user (Rust 1.95).
        command.uid(uid).gid(gid);
    }
    end_child_with_parent(command.as_std_mut());
    command
}

/// Starts a helper from the thread that lives as long as this process.
///
/// # Errors
/// The program cannot be started.
pub(crate) async fn spawn(command: Command) -> io::Result<Child> {
    let (answer, spawned) = oneshot::channel();
    let job = Job { command, runtime: Handle::current(), answer };
    let gone = || io::Error::other("the thread that starts helpers has ended");
    spawner()?.send(job).map_err(|_| gone())?;
    spawned.await.map_err(|_| gone())?
}

struct Job {
    command: Command,
    /// Runtime that waits for the child.
    runtime: Handle,
    /// Receives the child. A child that nobody receives is dropped, which ends it.
    answer: oneshot::Sender<io::Result<Child>>,
}

fn spawner() -> io::Result<&'static SyncSender<Job>> {
    static SPAWNER: OnceLock<SyncSender<Job>> = OnceLock::new();
    if let Some(spawner) = SPAWNER.get() {
        return Ok(spawner);
    }
    let (jobs, coming) = sync_channel::<Job>(MOST_WAITING_JOBS);
    // If two callers get here at once, the thread of the unused sender ends before it has spawned a
    // helper.
    std::thread::Builder::new().name("helpers".to_owned()).spawn(move || {
        for Job { mut command, runtime, answer } in coming {
            let _entered = runtime.enter();
            let _ = answer.send(command.spawn());
        }
    })?;
    Ok(SPAWNER.get_or_init(|| jobs))
}

fn own_name() -> String {
    let pid = std::process::id().cast_signed();
    format!("{pid}.{}", start_time_of(pid).unwrap_or_default())
}

/// Ends the helpers of processes that are gone, and returns their number. `is_trusted`: the users
/// that helpers run as. The environment of another user's process is ignored.
///
/// # Errors
/// /proc cannot be read, or one of them cannot be ended.
pub async fn end_left_helpers(is_trusted: impl Fn(u32) -> bool) -> io::Result<usize> {
    let own = rustix::process::geteuid().as_raw();
    let left: Vec<RunningProcess> = RunningProcess::all()?
        .filter(|process| process.is_wholly(|user| user == own || is_trusted(user)))
        // In another PID namespace the number may mean another process.
        .filter(|process| is_left(process) && process.shares_numbers())
        .collect();
    for process in &left {
        tracing::warn!(pid = process.pid, "ending a helper QEMU of an earlier agent");
        end_process(process.pid, process.start_time).await?;
    }
    Ok(left.len())
}

fn is_left(process: &RunningProcess) -> bool {
    let asker = process.variable(ASKER).and_then(|asker| {
        let (pid, start_time) = asker.split_once('.')?;
        Some((pid.parse().ok()?, start_time.parse().ok()?))
    });
    asker.is_some_and(|(pid, start_time)| !is_alive(pid, start_time))
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::CommandExt;

    use super::*;

    fn sleeper(asker: &str, user: Option<u32>) -> std::process::Child {
        let mut command = std::process::Command::new("/bin/sleep");
        command.arg("1000").env(ASKER, asker);
        if let Some(user) = user {
            command.uid(user);
        }
        let child = command.spawn().unwrap();
        // The process exists before the kernel has set up its environment.
        while RunningProcess::of(child.id().cast_signed()).unwrap().variable(ASKER).is_none() {
            std::thread::yield_now();
        }
        child
    }

    #[tokio::test]
    async fn only_helpers_of_ended_processes_are_ended() {
        let own = own_name();
        let (pid, start_time) = own.split_once('.').unwrap();
        let another = format!("{pid}.{}", start_time.parse::<u64>().unwrap() + 1);
        let mut spared = vec![sleeper(&own, None), sleeper("", None)];
        if rustix::process::geteuid().is_root() {
            // It claims in its environment to be a helper.
            spared.push(sleeper(&another, Some(1_999_940_000)));
        }
        let mut left = sleeper(&another, None);
        end_left_helpers(|_| false).await.unwrap();
        // It is gone, whether this process or the one that ended it has reaped it.
        let _ = left.wait();
        assert_eq!(RunningProcess::of(left.id().cast_signed()), None);
        for mut child in spared {
            assert!(child.try_wait().unwrap().is_none(), "ended: {child:?}");
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }

    #[test]
    fn a_helper_outlives_the_thread_and_the_runtime_that_asked_for_it() {
        // A blocking thread ends with its runtime; that must not end the helper.
        let asking = || {
            let runtime =
                tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            let child = runtime.block_on(async {
                let mut command = helper(Path::new("/bin/sleep"), None);
                command.arg("1000").kill_on_drop(false);
                spawn(command).await.unwrap()
            });
            let pid = child.id().unwrap().cast_signed();
            (pid, start_time_of(pid).unwrap())
        };
        let (pid, start_time) = std::thread::spawn(asking).join().unwrap();
        assert!(is_alive(pid, start_time));
        let number = rustix::process::Pid::from_raw(pid).unwrap();
        rustix::process::kill_process(number, rustix::process::Signal::KILL).unwrap();
    }
}
