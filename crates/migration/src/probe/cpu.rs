//! CPU time of threads and of the host.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

use crate::report::nanos;
use godwit_types::probe::{CpuReading, CpuUse};

/// CPU time of the threads that carry a probe's streams on this host. Each thread adds its own.
#[derive(Debug)]
pub(super) struct CpuMeter {
    begun: Instant,
    threads_ns: AtomicU64,
}

impl CpuMeter {
    pub(super) fn new(begun: Instant) -> CpuMeter {
        CpuMeter { begun, threads_ns: AtomicU64::new(0) }
    }

    /// Returns the time of the probe's clock on this host, ns.
    pub(super) fn now_ns(&self) -> u64 {
        nanos(self.begun.elapsed())
    }

    pub(super) fn read(&self) -> CpuReading {
        let (busy_ns, cores) = host_cpu();
        CpuReading {
            at_ns: self.now_ns(),
            threads_ns: self.threads_ns.load(Ordering::Relaxed),
            busy_ns,
            cores,
        }
    }

    /// Creates a thread's share. Call it on that thread.
    pub(super) fn thread(&self) -> ThreadCpu<'_> {
        ThreadCpu { meter: self, counted_ns: thread_cpu_ns() }
    }
}

/// Share of one thread in a [`CpuMeter`].
pub(super) struct ThreadCpu<'a> {
    meter: &'a CpuMeter,
    counted_ns: u64,
}

impl ThreadCpu<'_> {
    /// Adds the CPU time since the last call.
    pub(super) fn count(&mut self) {
        let now_ns = thread_cpu_ns();
        self.meter.threads_ns.fetch_add(now_ns.saturating_sub(self.counted_ns), Ordering::Relaxed);
        self.counted_ns = now_ns;
    }
}

fn thread_cpu_ns() -> u64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::try_from(time).map_or(0, nanos)
}

/// Returns the CPU time that was not idle since the host booted, ns, and the number of cores; zeros
/// if the kernel does not report them.
fn host_cpu() -> (u64, u32) {
    let text = std::fs::read_to_string("/proc/stat").unwrap_or_default();
    let ticks_a_second = rustix::param::clock_ticks_per_second().max(1);
    let (ticks, cores) = parse_stat(&text);
    (ticks.saturating_mul(1_000_000_000 / ticks_a_second), cores)
}

/// Parses the first line of /proc/stat (proc_stat(5)): user, nice, system, idle, iowait, irq,
/// softirq, steal. One line per core follows.
fn parse_stat(text: &str) -> (u64, u32) {
    let mut lines = text.lines().filter(|line| line.starts_with("cpu"));
    let all = lines.next().unwrap_or_default();
    let fields = all.split_ascii_whitespace().skip(1).take(8).enumerate();
    let busy = fields.filter(|(place, _)| ![3, 4].contains(place));
    let ticks =
        busy.filter_map(|(_, field)| field.parse::<u64>().ok()).fold(0, u64::saturating_add);
    (ticks, u32::try_from(lines.count()).unwrap_or(u32::MAX))
}

/// Returns the CPU use between two readings, which may come from a peer.
#[expect(clippy::cast_precision_loss, reason = "three digits count")]
pub(super) fn used(before: &CpuReading, after: &CpuReading) -> CpuUse {
    let time_ns = after.at_ns.saturating_sub(before.at_ns) as f64;
    let cores = after.cores;
    if time_ns <= 0.0 {
        return CpuUse { cores, ..CpuUse::default() };
    }
    let threads_cores = after.threads_ns.saturating_sub(before.threads_ns) as f64 / time_ns;
    let busy = after.busy_ns.saturating_sub(before.busy_ns) as f64 / time_ns;
    // The kernel counts in ticks of 10 ms, so rounding may exceed the total slightly.
    let host_share = (busy / f64::from(cores.max(1))).min(1.0);
    CpuUse { threads_cores, host_share, cores }
}

/// Returns the CPU use between the readings nearest to both ends of a measurement.
pub(super) fn around(readings: &[CpuReading], from_ns: u64, to_ns: u64) -> CpuUse {
    let nearest = |at_ns: u64| readings.iter().min_by_key(|reading| reading.at_ns.abs_diff(at_ns));
    match (nearest(from_ns), nearest(to_ns)) {
        (Some(before), Some(after)) => used(before, after),
        _ => CpuUse::default(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_line_is_read() {
        let text = "cpu  10 20 30 400 50 6 7 8 90 0\ncpu0 1 2 3 4 5 6 7 8 9 0\ncpu1 1 2 3 4 5 6 7 \
            8 9 0\nintr 1\n";
        assert_eq!(parse_stat(text), (10 + 20 + 30 + 6 + 7 + 8, 2));
        assert_eq!(parse_stat(""), (0, 0));
        let (busy_ns, cores) = host_cpu();
        assert!(busy_ns > 0 && cores > 0);
    }

    #[test]
    fn two_readings_make_a_share() {
        let at = |at_ns, threads_ns, busy_ns| CpuReading { at_ns, threads_ns, busy_ns, cores: 4 };
        let readings = [at(0, 0, 0), at(100, 0, 0), at(200, 150, 200), at(900, 150, 200)];
        let used = around(&readings, 95, 220);
        assert!((used.threads_cores - 1.5).abs() < 1e-9 && (used.host_share - 0.5).abs() < 1e-9);
        assert_eq!(around(&[], 0, 1), CpuUse::default());
        // Nonsensical readings of a peer yield no time and no share.
        let nonsense = [at(5, 9, 9), at(5, 0, u64::MAX), at(0, u64::MAX, 0)];
        assert!(around(&nonsense, 0, u64::MAX).host_share <= 1.0);
    }

    #[test]
    fn a_threads_time_is_counted_once() {
        let meter = CpuMeter::new(Instant::now());
        let mut thread = meter.thread();
        while thread_cpu_ns() < thread.counted_ns + 1000 {}
        thread.count();
        let once = meter.read().threads_ns;
        assert!(once >= 1000);
        thread.count();
        assert!(meter.read().threads_ns < 2 * once + 1_000_000_000);
    }
}
