//! Checks from outside that two hosts never run the vCPUs of one guest at the same time, by whether
//! the vCPU threads of their QEMUs are scheduled. The agents' reports are not used: agents may be
//! dead, or wrong.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError, SyncSender};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Result, ensure};
use parking_lot::{Mutex, MutexGuard};

use crate::agents::run_dir;
use crate::process::ProcessId;
use crate::trial::{LIMIT, Trial, until};

/// Poll interval.
const PACE: Duration = Duration::from_millis(20);
/// Number of consecutive looks in which both must have run. Within one interval one may have
/// stopped and the other begun, and a paused one is woken when it is created or queried.
const LOOKS: u32 = 4;

/// Observation of one guest's vCPUs on all hosts, from its start to [`VcpuWatch::end`].
#[derive(Debug)]
pub struct VcpuWatch {
    stop: SyncSender<()>,
    looking: JoinHandle<()>,
    seen: Arc<Mutex<Seen>>,
}

/// Result of an observation.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Seen {
    /// Most consecutive looks in which vCPUs of two hosts had run.
    pub both_ran: u32,
    /// Total number of looks.
    pub looks: u32,
    /// Number of looks in which its vCPUs had run, by host; hosts without any are left out.
    pub ran: BTreeMap<String, u32>,
}

impl Trial {
    /// Starts to observe a guest's vCPUs on all hosts.
    #[must_use]
    pub fn watch_vcpus(&self, vm: &str) -> VcpuWatch {
        let mut hosts: Vec<Vcpus> = self
            .hosts()
            .into_iter()
            .map(|host| Vcpus {
                pid_file: run_dir(&self.paths, &host).join("vms").join(vm).join("qemu.pid"),
                clock_ahead_s: self.boot_clock_ahead_s(&host),
                host,
                processes: Vec::new(),
            })
            .collect();
        let (stop, stopped) = mpsc::sync_channel(1);
        let seen = Arc::<Mutex<Seen>>::default();
        let shared = Arc::clone(&seen);
        let looking = std::thread::spawn(move || {
            let mut in_a_row = 0;
            while stopped.recv_timeout(PACE) == Err(RecvTimeoutError::Timeout) {
                // All hosts are examined, also after the second that runs.
                let ran: Vec<&str> = hosts
                    .iter_mut()
                    .filter_map(|host| host.has_run().then_some(host.host.as_str()))
                    .collect();
                in_a_row = if ran.len() > 1 { in_a_row + 1 } else { 0 };
                lock(&shared).add(&ran, in_a_row);
            }
        });
        VcpuWatch { stop, looking, seen }
    }
}

impl Seen {
    fn add(&mut self, ran: &[&str], in_a_row: u32) {
        self.looks += 1;
        self.both_ran = self.both_ran.max(in_a_row);
        for host in ran {
            *self.ran.entry((*host).to_owned()).or_default() += 1;
        }
    }
}

/// Locks the results.
fn lock(seen: &Mutex<Seen>) -> MutexGuard<'_, Seen> {
    seen.lock()
}

impl VcpuWatch {
    /// Waits until the guest has been seen to run on a host since the start: an observation that
    /// cannot see it there could not detect that it runs on two.
    ///
    /// # Errors
    /// It is not seen within the limit.
    pub fn until_seen(&self, host: &str) -> Result<()> {
        until(&format!("the guest's vCPUs are seen to run on host {host}"), LIMIT, || {
            let seen = lock(&self.seen);
            ensure!(seen.ran.contains_key(host), "they are not: {seen:?}");
            Ok(Some(()))
        })
    }

    /// Ends the observation.
    ///
    /// # Errors
    /// Two hosts ran the guest at the same time.
    pub fn end(self) -> Result<Seen> {
        drop(self.stop);
        ensure!(self.looking.join().is_ok(), "the thread that observed the vCPUs panicked");
        let seen = lock(&self.seen).clone();
        ensure!(
            seen.both_ran < LOOKS,
            "DOUBLED: vCPUs of two hosts ran in {} looks in a row, {PACE:?} apart",
            seen.both_ran
        );
        Ok(seen)
    }
}

/// vCPU threads of a guest on one host, including those of a QEMU of which no file is left.
struct Vcpus {
    host: String,
    pid_file: PathBuf,
    clock_ahead_s: u32,
    processes: Vec<(ProcessId, Activity)>,
}

impl Vcpus {
    /// Returns whether one has run since the last look.
    fn has_run(&mut self) -> bool {
        let named = std::fs::read_to_string(&self.pid_file).ok();
        let named = named.and_then(|text| ProcessId::parse(&text));
        if let Some(id) = named.map(|id| id.on_clock_ahead(self.clock_ahead_s))
            && !self.processes.iter().any(|(known, _)| *known == id)
        {
            self.processes.push((id, Activity::of(id)));
        }
        self.processes.retain(|(id, _)| id.is_alive());
        let mut ran = false;
        for (id, before) in &mut self.processes {
            let now = Activity::of(*id);
            ran |= now != *before;
            *before = now;
        }
        ran
    }
}

/// Counters that change when vCPU threads run, and not while they are paused: how often they gave
/// up a CPU (for a guest that sleeps now and then), and their CPU time (for one that never does).
/// `schedstat` would be better, but not every kernel has it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Activity {
    switches: u64,
    ticks: u64,
}

impl Activity {
    /// Sums up all vCPU threads of a QEMU, which it names `CPU N/…`.
    fn of(id: ProcessId) -> Activity {
        let threads =
            std::fs::read_dir(format!("/proc/{}/task", id.pid)).into_iter().flatten().flatten();
        let read =
            |path: &Path, file: &str| std::fs::read_to_string(path.join(file)).unwrap_or_default();
        threads
            .map(|thread| thread.path())
            .filter(|path| read(path, "comm").starts_with("CPU "))
            .fold(Activity::default(), |sum, path| Activity {
                switches: sum.switches + switches(&read(&path, "status")),
                ticks: sum.ticks + ticks(&read(&path, "stat")),
            })
    }
}

/// Parses the switches in `/proc/PID/task/TID/status`.
fn switches(status: &str) -> u64 {
    let counts = status.lines().filter_map(|line| line.split_once("_ctxt_switches:"));
    counts.filter_map(|(_, count)| count.trim().parse::<u64>().ok()).sum()
}

/// Parses the time in user space and in the kernel from `/proc/PID/task/TID/stat`: fields 14 and
/// 15; the second field is the name in brackets.
fn ticks(stat: &str) -> u64 {
    let Some((_, rest)) = stat.rsplit_once(')') else { return 0 };
    rest.split_ascii_whitespace()
        .skip(11)
        .take(2)
        .filter_map(|field| field.parse::<u64>().ok())
        .sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn running_vcpus_are_counted_by_host() {
        let mut seen = Seen::default();
        for (ran, in_a_row) in [(&["a"][..], 0), (&["a", "b"], 1), (&["b"], 0), (&[], 0)] {
            seen.add(ran, in_a_row);
        }
        let ran = BTreeMap::from([("a".to_owned(), 2), ("b".to_owned(), 2)]);
        assert_eq!(seen, Seen { both_ran: 1, looks: 4, ran });
    }

    #[test]
    fn a_threads_figures_are_parsed() {
        assert_eq!(
            switches(
                "Name:\tCPU 0/TCG\nvoluntary_ctxt_switches:\t41\nnonvoluntary_ctxt_switches:\t1\n"
            ),
            42
        );
        assert_eq!(
            ticks("7 (CPU 0/TCG) S 1 7 7 0 -1 4194304 9 0 0 0 30 12 0 0 20 0 6 0 99 1 1"),
            42
        );
        assert_eq!(ticks("nonsense"), 0);
    }
}
