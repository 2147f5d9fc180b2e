//! Hosts and guests on CPUs of their own: what the hosts need then takes nothing from a guest, as
//! far as they share no memory and no lock. It is the affinity of threads, not a cgroup: it is the
//! same with both versions of cgroups, and an agent moves its VMs between cgroups.

use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::mpsc::{self, RecvTimeoutError, SyncSender};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use crate::agents::run_dir;
use crate::process::ProcessId;
use crate::trial::Trial;

/// Poll interval for new QEMUs and new threads of theirs.
const INTERVAL: Duration = Duration::from_millis(10);

/// CPUs of hosts and of guests.
#[derive(Clone, Copy, Debug)]
pub struct CpusApart {
    guests: CpuSet,
    /// Numbers, for people.
    pub hosts_cpus: usize,
    pub guests_cpus: usize,
}

/// A guest's QEMUs, kept on the guests' CPUs until this value is dropped.
#[derive(Debug)]
pub struct Pinned {
    stop: Option<SyncSender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl CpusApart {
    /// Divides the CPUs of this process in two halves and leaves it, and what it starts from now
    /// on, on the lower one. Call it before a trial begins.
    ///
    /// # Errors
    /// The process has only one CPU.
    pub fn begin() -> Result<CpusApart> {
        let all = sched_getaffinity(None).context("cannot examine the CPUs of this process")?;
        let cpus: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|cpu| all.is_set(*cpu)).collect();
        ensure!(cpus.len() > 1, "hosts and guests need two CPUs, and this process has one");
        let (hosts, guests) = cpus.split_at(cpus.len() / 2);
        let set = |cpus: &[usize]| {
            let mut set = CpuSet::new();
            cpus.iter().for_each(|cpu| set.set(*cpu));
            set
        };
        sched_setaffinity(None, &set(hosts)).context("cannot choose CPUs for this process")?;
        Ok(CpusApart { guests: set(guests), hosts_cpus: hosts.len(), guests_cpus: guests.len() })
    }

    /// Keeps the QEMUs of a VM, on all hosts, on the guests' CPUs.
    #[must_use]
    pub fn pin(&self, trial: &Trial, vm: &str) -> Pinned {
        let pid_file =
            |host: &String| run_dir(&trial.paths, host).join("vms").join(vm).join("qemu.pid");
        let pid_files: Vec<PathBuf> = trial.hosts().iter().map(pid_file).collect();
        let (stop, stopped) = mpsc::sync_channel(1);
        let guests = self.guests;
        let thread = std::thread::spawn(move || {
            let mut pinned = HashSet::new();
            while stopped.recv_timeout(INTERVAL) == Err(RecvTimeoutError::Timeout) {
                pid_files.iter().for_each(|file| pin_threads(file, &guests, &mut pinned));
            }
        });
        Pinned { stop: Some(stop), thread: Some(thread) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            // A panic of it has been printed.
            let _ = thread.join();
        }
    }
}

/// Pins the threads of a QEMU that are not pinned yet. One that has ended meanwhile needs nothing.
fn pin_threads(pid_file: &PathBuf, cpus: &CpuSet, pinned: &mut HashSet<(ProcessId, i32)>) {
    let text = std::fs::read_to_string(pid_file).ok();
    let Some(id) = text.and_then(|text| ProcessId::parse(&text)).filter(|id| id.is_alive()) else {
        return;
    };
    let tasks = std::fs::read_dir(format!("/proc/{}/task", id.pid)).into_iter().flatten().flatten();
    let threads = tasks.filter_map(|task| task.file_name().to_str()?.parse::<i32>().ok());
    for thread in threads {
        if pinned.insert((id, thread)) {
            let _ = sched_setaffinity(Pid::from_raw(thread), cpus);
        }
    }
}
