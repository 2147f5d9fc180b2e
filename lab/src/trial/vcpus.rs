//! Checks from outside that two hosts never run the vCPUs of one guest at the same time, by the CPU
//! time of their QEMUs' vCPU threads. The agents' reports are not used: agents may be dead, or
//! wrong.
//!
//! A vCPU thread uses CPU time without running its guest, too. It exists before the guest may run,
//! and waits for a condition. QEMU wakes it for each item that it queues to it: the changes of the
//! memory map in which the devices are made, configured and loaded (with TCG each one flushes the
//! thread's TLB; softmmu/physmem.c, `tcg_commit`, QEMU 7.2), a reset, a stop. On a busy machine
//! that goes on for several looks. So the number of times that a thread was scheduled proves
//! nothing, but its CPU time does: an item costs microseconds. Until its guest is loaded, a
//! shadow's thread uses about half a millisecond (0.4 to 0.9 ms in most of 60 that were measured,
//! with TCG). A guest that runs uses more in each look ([`LEAST_IN_A_LOOK`]), and soon more in
//! total ([`LEAST_EVER`]): QEMU translates its first instructions and serves its overdue timers.
//! Once the total is reached, the looks in a row before it count as well, so that the proof hides
//! none.

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
/// stopped and the other begun.
const LOOKS: u32 = 4;
/// Least CPU time of the vCPU threads of a guest that runs, between two looks. Few wakes of a
/// paused one take so long.
const LEAST_IN_A_LOOK: Duration = Duration::from_micros(50);
/// Least CPU time of the vCPU threads of a guest that has run, since its QEMU started. That of one
/// that has never run stays far below, and a guest that starts needs less than [`LOOKS`] looks for
/// it.
const LEAST_EVER: Duration = Duration::from_millis(20);
/// Clock tick in `/proc`, on all architectures.
const TICK: Duration = Duration::from_millis(10);

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
            while stopped.recv_timeout(PACE) == Err(RecvTimeoutError::Timeout) {
                let rows: Vec<u32> = hosts.iter_mut().map(Vcpus::look).collect();
                let names = hosts.iter().map(|host| host.host.as_str());
                let ran: Vec<(&str, u32)> = names.zip(rows).filter(|(_, row)| *row > 0).collect();
                lock(&shared).add(&ran);
            }
        });
        VcpuWatch { stop, looking, seen }
    }
}

impl Seen {
    /// Adds a look: the hosts in which vCPUs had run, each with the number of looks in a row.
    fn add(&mut self, ran: &[(&str, u32)]) {
        self.looks += 1;
        let mut rows: Vec<u32> = ran.iter().map(|(_, row)| *row).collect();
        rows.sort_unstable();
        // Both ran in the latest looks that the shorter row has.
        let both = rows.iter().rev().nth(1).copied().unwrap_or_default();
        self.both_ran = self.both_ran.max(both);
        for (host, _) in ran {
            *self.ran.entry((*host).to_owned()).or_default() += 1;
        }
    }

    /// Returns the hosts that have run the guest since an earlier state of this observation: in one
    /// of ten looks. Single wakes of a paused vCPU may take long on a busy machine.
    #[must_use]
    pub fn ran_since(&self, earlier: &Seen) -> Vec<&str> {
        let looks = self.looks - earlier.looks;
        let hosts = self.ran.iter().filter_map(|(host, ran)| {
            let ran = ran - earlier.ran.get(host).copied().unwrap_or_default();
            (ran > 0 && ran.saturating_mul(10) >= looks).then_some(host.as_str())
        });
        hosts.collect()
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

    /// Returns what has been seen so far.
    #[must_use]
    pub fn seen(&self) -> Seen {
        lock(&self.seen).clone()
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
    /// Returns in how many looks in a row, this one included, the guest has run.
    fn look(&mut self) -> u32 {
        let named = std::fs::read_to_string(&self.pid_file).ok();
        let named = named.and_then(|text| ProcessId::parse(&text));
        if let Some(id) = named.map(|id| id.on_clock_ahead(self.clock_ahead_s))
            && !self.processes.iter().any(|(known, _)| *known == id)
        {
            self.processes.push((id, Activity { used: used_by(id), row: 0 }));
        }
        self.processes.retain(|(id, _)| id.is_alive());
        let rows = self.processes.iter_mut().map(|(id, activity)| activity.look(used_by(*id)));
        rows.max().unwrap_or_default()
    }
}

/// Activity of the vCPU threads of one QEMU.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Activity {
    /// CPU time since the QEMU started.
    used: Duration,
    /// Latest looks in a row in which the threads had used as much as a guest that runs.
    row: u32,
}

impl Activity {
    /// Takes the CPU time at the next look. Returns in how many looks in a row, this one included,
    /// the guest has run; 0 as long as it is not certain that it ever has.
    fn look(&mut self, used: Duration) -> u32 {
        let is_active = used.saturating_sub(self.used) >= LEAST_IN_A_LOOK;
        self.row = if is_active { self.row + 1 } else { 0 };
        self.used = used;
        if used >= LEAST_EVER { self.row } else { 0 }
    }
}

/// Returns the CPU time of all vCPU threads of a QEMU, which it names `CPU N/…`.
fn used_by(id: ProcessId) -> Duration {
    let threads =
        std::fs::read_dir(format!("/proc/{}/task", id.pid)).into_iter().flatten().flatten();
    let read =
        |path: &Path, file: &str| std::fs::read_to_string(path.join(file)).unwrap_or_default();
    threads
        .map(|thread| thread.path())
        .filter(|path| read(path, "comm").starts_with("CPU "))
        .map(|path| {
            let exact = run_time(&read(&path, "schedstat"));
            exact.unwrap_or_else(|| estimated(&read(&path, "stat"), &read(&path, "status")))
        })
        .sum()
}

/// Parses the CPU time in `/proc/PID/task/TID/schedstat`. `None` if this kernel does not count it:
/// then the file is missing, or has zeros.
fn run_time(schedstat: &str) -> Option<Duration> {
    let nanos = schedstat.split_ascii_whitespace().next()?.parse::<u64>().ok()?;
    (nanos > 0).then_some(Duration::from_nanos(nanos))
}

/// Estimates a thread's CPU time where the kernel does not count it exactly. Ticks miss a guest
/// that sleeps most of the time, so each switch counts as the least that a guest uses in a look.
fn estimated(stat: &str, status: &str) -> Duration {
    let times = |unit: Duration, count: u64| unit * u32::try_from(count).unwrap_or(u32::MAX);
    times(TICK, ticks(stat)).saturating_add(times(LEAST_IN_A_LOOK, switches(status)))
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

    const MS: Duration = Duration::from_millis(1);

    /// Returns what is seen of two QEMUs that use so much CPU time in each look.
    fn seen(source: &[Duration], destination: &[Duration]) -> Seen {
        let (mut seen, mut life) = (Seen::default(), [Duration::from_secs(9), Duration::ZERO]);
        let mut activity = life.map(|used| Activity { used, row: 0 });
        for used in source.iter().zip(destination) {
            life[0] += *used.0;
            life[1] += *used.1;
            let rows = [activity[0].look(life[0]), activity[1].look(life[1])];
            let ran: Vec<(&str, u32)> =
                ["a", "b"].into_iter().zip(rows).filter(|(_, row)| *row > 0).collect();
            seen.add(&ran);
        }
        seen
    }

    #[test]
    fn running_vcpus_are_counted_by_host() {
        let mut seen = Seen::default();
        for ran in [&[("a", 7)][..], &[("a", 8), ("b", 1)], &[("b", 2)], &[]] {
            seen.add(ran);
        }
        let ran = BTreeMap::from([("a".to_owned(), 2), ("b".to_owned(), 2)]);
        assert_eq!(seen, Seen { both_ran: 1, looks: 4, ran });
    }

    #[test]
    fn a_paused_guest_has_not_run_since() {
        let mut seen = Seen::default();
        (0..50).for_each(|_| seen.add(&[("a", 1)]));
        let earlier = seen.clone();
        assert_eq!(seen.ran_since(&earlier), Vec::<&str>::new());
        // Paused, and woken twice.
        (0..40).for_each(|_| seen.add(&[]));
        (0..2).for_each(|_| seen.add(&[("a", 1)]));
        assert_eq!(seen.ran_since(&earlier), Vec::<&str>::new());
        (0..5).for_each(|row| seen.add(&[("b", row + 1)]));
        assert_eq!(seen.ran_since(&earlier), ["b"]);
        assert_eq!(seen.ran_since(&Seen::default()), ["a"]);
    }

    #[test]
    fn a_shadow_that_is_being_made_does_not_run() {
        // A busy machine stretches that over a second, with wakes in every look.
        let shadow = [MS / 4; 50];
        let found = seen(&[2 * MS; 50], &shadow);
        assert_eq!((found.both_ran, found.ran.contains_key("b")), (0, false), "{found:?}");
    }

    #[test]
    fn a_guest_that_is_handed_over_runs_once() {
        // The paused source is woken a few times until it ends: for its state and its end.
        let wake = LEAST_IN_A_LOOK / 3;
        let source = [2 * MS, 2 * MS, MS, wake, wake, wake, wake, wake, wake];
        let destination = [wake, wake, wake, 19 * MS, 20 * MS, 20 * MS, 20 * MS, 20 * MS, 20 * MS];
        let found = seen(&source, &destination);
        assert!(found.both_ran < LOOKS, "{found:?}");
        assert!(found.ran.contains_key("b"), "{found:?}");
    }

    #[test]
    fn a_doubled_guest_is_found_within_the_looks_that_prove_it() {
        // The second one has a busy machine's half of a CPU, the first hardly does anything.
        let looks = usize::try_from(LOOKS).unwrap();
        let (source, destination) = (vec![MS / 5; looks], vec![10 * MS; looks]);
        assert_eq!(seen(&source, &destination).both_ran, LOOKS);
        // Before it has proven to run, nothing is claimed.
        assert_eq!(seen(&source[..1], &destination[..1]).both_ran, 0);
    }

    #[test]
    fn a_pause_ends_a_row() {
        let mut activity = Activity { used: 40 * MS, row: 0 };
        assert_eq!([activity.look(41 * MS), activity.look(42 * MS)], [1, 2]);
        assert_eq!([activity.look(42 * MS), activity.look(43 * MS)], [0, 1]);
        // A vCPU was unplugged, with the time that it had used.
        assert_eq!(activity.look(30 * MS), 0);
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
        assert_eq!(run_time("191182252 67588427 33\n"), Some(Duration::from_nanos(191_182_252)));
        assert_eq!([run_time("0 0 0\n"), run_time(""), run_time("x")], [None; 3]);
        let stat = "7 (CPU 0/TCG) S 1 7 7 0 -1 4194304 9 0 0 0 2 1 0 0 20 0 6 0 99 1 1";
        assert_eq!(
            estimated(stat, "voluntary_ctxt_switches:\t4\n"),
            3 * TICK + LEAST_IN_A_LOOK * 4
        );
    }
}
