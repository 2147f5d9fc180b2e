//! A guest's last vCPU on CPUs of its own: what the hosts and the other vCPUs need then takes
//! nothing from a thread that computes there, as far as it shares no memory and no lock with them.
//! It is the affinity of threads, not a cgroup: it is the same with both versions of cgroups, and
//! an agent moves its VMs between cgroups.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, RecvTimeoutError, SyncSender};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use crate::agents::run_dir;
use crate::process::ProcessId;
use crate::trial::Trial;

/// Poll interval for new QEMUs.
const INTERVAL: Duration = Duration::from_millis(10);

/// CPUs of a vCPU that computes, and of all else.
#[derive(Clone, Copy, Debug)]
pub struct CpusApart {
    computing: CpuSet,
    /// Numbers, for people.
    pub computing_cpus: usize,
    pub other_cpus: usize,
}

/// A guest's vCPU, kept on its CPUs until this value is dropped.
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
        ensure!(cpus.len() > 1, "a vCPU of its own needs a second CPU");
        let (others, computing) = cpus.split_at(cpus.len() / 2);
        let set = |cpus: &[usize]| {
            let mut set = CpuSet::new();
            cpus.iter().for_each(|cpu| set.set(*cpu));
            set
        };
        sched_setaffinity(None, &set(others)).context("cannot choose CPUs for this process")?;
        Ok(CpusApart {
            computing: set(computing),
            computing_cpus: computing.len(),
            other_cpus: others.len(),
        })
    }

    /// Keeps vCPU number `vcpu` of a VM, on all hosts, on the upper half.
    #[must_use]
    pub fn pin(&self, trial: &Trial, vm: &str, vcpu: u32) -> Pinned {
        let pid_file =
            |host: &String| run_dir(&trial.paths, host).join("vms").join(vm).join("qemu.pid");
        let pid_files: Vec<PathBuf> = trial.hosts().iter().map(pid_file).collect();
        let (stop, stopped) = mpsc::sync_channel(1);
        let cpus = self.computing;
        let thread = std::thread::spawn(move || {
            // QEMU's name of the thread; /TCG or /KVM follows.
            let name = format!("CPU {vcpu}/");
            let mut pinned = HashSet::new();
            while stopped.recv_timeout(INTERVAL) == Err(RecvTimeoutError::Timeout) {
                pid_files.iter().for_each(|file| pin_vcpu(file, &name, &cpus, &mut pinned));
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

/// Pins the thread of a QEMU that has this name. One that has ended meanwhile needs nothing.
fn pin_vcpu(pid_file: &Path, name: &str, cpus: &CpuSet, pinned: &mut HashSet<ProcessId>) {
    let text = std::fs::read_to_string(pid_file).ok();
    let Some(id) = text.and_then(|text| ProcessId::parse(&text)).filter(|id| id.is_alive()) else {
        return;
    };
    if pinned.contains(&id) {
        return;
    }
    let tasks = std::fs::read_dir(format!("/proc/{}/task", id.pid)).into_iter().flatten().flatten();
    for task in tasks {
        let comm = std::fs::read_to_string(task.path().join("comm")).unwrap_or_default();
        let thread = task.file_name().to_str().and_then(|thread| thread.parse::<i32>().ok());
        if let Some(thread) = thread.filter(|_| comm.starts_with(name)) {
            let _ = sched_setaffinity(Pid::from_raw(thread), cpus);
            pinned.insert(id);
        }
    }
}
