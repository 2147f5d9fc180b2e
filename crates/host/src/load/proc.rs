//! Counters in the kernel's files. Reads of them never wait for a disk or a guest, and are bounded.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use crate::load::reading::{CpuTicks, Traffic};

/// Longest part of a file with one line of counters that is read, in bytes.
const LINE_BYTES: u64 = 4 << 10;
/// Longest list of interfaces that is read, in bytes: more than 8,000 interfaces.
const INTERFACES_BYTES: u64 = 1 << 20;
/// Most threads of a QEMU whose waiting time is read: those of the most vCPUs, and of their disks.
const MOST_THREADS: usize = 2_048;

/// Where the kernel's files are.
#[derive(Clone, Debug)]
pub(crate) struct KernelFiles {
    proc: PathBuf,
    sys: PathBuf,
}

impl Default for KernelFiles {
    fn default() -> KernelFiles {
        KernelFiles { proc: PathBuf::from("/proc"), sys: PathBuf::from("/sys") }
    }
}

/// CPU time of a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ProcessTime {
    /// CPU time of its threads, ended ones included, in clock ticks.
    pub(crate) ticks: u64,
    /// See [`VmReading::waits_ns`](crate::load::VmReading::waits_ns).
    pub(crate) waits_ns: Option<BTreeMap<i32, u64>>,
}

impl KernelFiles {
    /// Returns the time of all processors; `None` if the kernel does not report it.
    pub(crate) fn cpu(&self) -> Option<CpuTicks> {
        parse_cpu(&read(&self.proc.join("stat"), LINE_BYTES).ok()?)
    }

    /// Returns the traffic of all interfaces of this network namespace, by name.
    pub(crate) fn interfaces(&self) -> BTreeMap<String, Traffic> {
        let text = read(&self.proc.join("net/dev"), INTERFACES_BYTES).unwrap_or_default();
        parse_interfaces(&text)
    }

    /// Whether an interface belongs to a device of the host, not to software.
    pub(crate) fn is_device(&self, interface: &str) -> bool {
        self.sys.join("class/net").join(interface).join("device").exists()
    }

    /// Returns the CPU time of a process; `None` if it has ended.
    pub(crate) fn process(&self, (pid, start_time): (i32, u64)) -> Option<ProcessTime> {
        let dir = self.proc.join(pid.to_string());
        let waits_ns = waits(&dir.join("task"));
        // Read last: if this process still has the number, the waits are its own.
        let (ticks, started) = parse_process(&read(&dir.join("stat"), LINE_BYTES).ok()?)?;
        (started == start_time).then_some(ProcessTime { ticks, waits_ns })
    }
}

/// Reads the beginning of a file.
fn read(path: &Path, most_bytes: u64) -> io::Result<String> {
    let mut bytes = Vec::new();
    File::open(path)?.take(most_bytes).read_to_end(&mut bytes)?;
    // The name of a process need not be valid text.
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// Reads the waiting times of a process's threads. Threads that end meanwhile are left out.
fn waits(tasks: &Path) -> Option<BTreeMap<i32, u64>> {
    let entries = fs::read_dir(tasks).ok()?.take(MOST_THREADS).filter_map(Result::ok);
    let mut waits = BTreeMap::new();
    let mut is_reported = false;
    for entry in entries {
        let Some(thread) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        let text = read(&entry.path().join("schedstat"), LINE_BYTES).unwrap_or_default();
        if let Some((ran_ns, waited_ns)) = parse_schedstat(&text) {
            is_reported |= ran_ns > 0;
            waits.insert(thread, waited_ns);
        }
    }
    is_reported.then_some(waits)
}

/// Parses the first line of /proc/stat (proc_stat(5)): `cpu`, then user, nice, system, idle,
/// iowait, irq, softirq and steal. The time of guests, which follows, is a part of user and nice.
fn parse_cpu(text: &str) -> Option<CpuTicks> {
    let fields = text.lines().next()?.strip_prefix("cpu ")?.split_ascii_whitespace().take(8);
    let fields: Vec<u64> = fields.map(|field| field.parse().ok()).collect::<Option<_>>()?;
    let [user, nice, system, idle, iowait, irq, softirq, steal] = fields[..] else { return None };
    let sum = |parts: [u64; 6]| parts.into_iter().fold(0, u64::saturating_add);
    let busy = sum([user, nice, system, irq, softirq, steal]);
    Some(CpuTicks { busy, all: busy.saturating_add(idle).saturating_add(iowait) })
}

/// Parses /proc/net/dev (proc_pid_net(5)): two lines of headings, then `NAME:` with eight counters
/// of what was received, bytes first, and eight of what was sent.
fn parse_interfaces(text: &str) -> BTreeMap<String, Traffic> {
    let interface = |line: &str| {
        let (name, counters) = line.split_once(':')?;
        let mut counters = counters.split_ascii_whitespace();
        let rx_bytes = counters.next()?.parse().ok()?;
        let tx_bytes = counters.nth(7)?.parse().ok()?;
        Some((name.trim().to_owned(), Traffic { rx_bytes, tx_bytes }))
    };
    text.lines().skip(2).filter_map(interface).collect()
}

/// Parses `PID (NAME) STATE …` (proc_pid_stat(5)): returns fields 14 and 15, the CPU time in ticks,
/// as a sum, and field 22, the start time. The name may contain anything.
fn parse_process(text: &str) -> Option<(u64, u64)> {
    let (_, rest) = text.rsplit_once(')')?;
    // The first one is field 3.
    let mut fields = rest.split_ascii_whitespace().skip(11);
    let user: u64 = fields.next()?.parse().ok()?;
    let system = fields.next()?.parse().ok()?;
    let start_time = fields.nth(6)?.parse().ok()?;
    Some((user.saturating_add(system), start_time))
}

/// Parses a thread's schedstat: the time it has run and the time it has waited for a processor, in
/// nanoseconds (Linux Documentation/scheduler/sched-stats.rst).
fn parse_schedstat(text: &str) -> Option<(u64, u64)> {
    let mut fields = text.split_ascii_whitespace();
    Some((fields.next()?.parse().ok()?, fields.next()?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    const INTERFACES: &str = "\
Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop
    lo:     512       4    0    0    0     0          0         0      512       4    0    0
  eth0:18446744073709551615 1 0 0 0 0 0 0 77 1 0 0 0 0 0 0
 gw0a: 5 1 0 0 0 0 0 0 9 1 0 0 0 0 0 0
";

    /// Files of one process with two threads and one that has just ended.
    fn files() -> (tempfile::TempDir, KernelFiles) {
        let dir = tempfile::tempdir().unwrap();
        let (proc, sys) = (dir.path().join("proc"), dir.path().join("sys"));
        for (thread, text) in [("70", Some("900 300 5\n")), ("71", Some("80 7 1\n")), ("72", None)]
        {
            let task = proc.join("70/task").join(thread);
            fs::create_dir_all(&task).unwrap();
            if let Some(text) = text {
                fs::write(task.join("schedstat"), text).unwrap();
            }
        }
        let stat = "70 (qemu) x) S 1 70 70 0 -1 4194304 1 0 0 0 250 50 0 0 20 0 3 0 4711 9 9\n";
        fs::write(proc.join("70/stat"), stat).unwrap();
        fs::create_dir_all(proc.join("net")).unwrap();
        fs::write(proc.join("net/dev"), INTERFACES).unwrap();
        fs::write(proc.join("stat"), "cpu  10 1 5 100 20 2 3 4 9 9\ncpu0 1 1\n").unwrap();
        fs::create_dir_all(sys.join("class/net/eth0/device")).unwrap();
        fs::create_dir_all(sys.join("class/net/gw0a")).unwrap();
        (dir, KernelFiles { proc, sys })
    }

    #[test]
    fn a_process_is_read_and_another_one_with_its_number_is_not() {
        let (_dir, files) = files();
        let read = files.process((70, 4711)).unwrap();
        assert_eq!(read.ticks, 300);
        assert_eq!(read.waits_ns, Some(BTreeMap::from([(70, 300), (71, 7)])));
        assert_eq!(files.process((70, 4712)), None);
        assert_eq!(files.process((71, 4711)), None);
    }

    #[test]
    fn processors_and_interfaces_are_read() {
        let (_dir, files) = files();
        assert_eq!(files.cpu(), Some(CpuTicks { busy: 25, all: 145 }));
        let interfaces = files.interfaces();
        assert_eq!(interfaces["eth0"], Traffic { rx_bytes: u64::MAX, tx_bytes: 77 });
        assert_eq!(interfaces["gw0a"], Traffic { rx_bytes: 5, tx_bytes: 9 });
        assert!(files.is_device("eth0") && !files.is_device("gw0a") && !files.is_device("lo"));
    }

    #[test]
    fn a_kernel_that_does_not_count_waits_reports_none() {
        let (dir, files) = files();
        for thread in ["70", "71"] {
            let task = dir.path().join("proc/70/task").join(thread);
            fs::write(task.join("schedstat"), "0 0 0\n").unwrap();
        }
        assert_eq!(files.process((70, 4711)).unwrap().waits_ns, None);
    }

    #[test]
    fn what_is_no_counter_is_left_out() {
        for text in ["", "cpu", "cpu  1 2 3", "cpu  1 2 3 4 5 6 7 x", "cpu  -1 2 3 4 5 6 7 8"] {
            assert_eq!(parse_cpu(text), None, "{text}");
        }
        for text in ["", "7 (a", "7 (a) S 1 2", "7 (a) S 1 1 1 1 1 1 1 1 1 1 x 1 1 1 1 1 1 1 1"] {
            assert_eq!(parse_process(text), None, "{text}");
        }
        let odd = "a\nb\nno counters\neth0: 1\neth1: x 0 0 0 0 0 0 0 1\n:\n";
        assert!(parse_interfaces(odd).is_empty());
        assert_eq!(parse_schedstat("12"), None);
        assert_eq!(parse_schedstat(&"9".repeat(30)), None);
    }

    #[test]
    fn this_process_is_read() {
        let files = KernelFiles::default();
        let pid = std::process::id().cast_signed();
        let start_time = godwit_qemu::start_time_of(pid).unwrap();
        assert!(files.process((pid, start_time)).is_some());
        assert!(files.cpu().is_some());
    }
}
