//! CPU time of moves: of both agents and all QEMUs, for every engine, because QEMU's engine is in
//! the one and Godwit's in the other. The time that the idle guest would have taken meanwhile is
//! measured separately and subtracted. The kernel's own threads, which serve all processes, are not
//! included.

use std::sync::mpsc::{self, RecvTimeoutError, SyncSender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use godwit_lab::trial::Trial;
use serde::Serialize;

/// Poll interval of the source's QEMU: when it ends, its CPU time since the last look is lost. With
/// several, each of them adds as much.
const INTERVAL: Duration = Duration::from_millis(5);

/// CPU time of a move, or of several.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct CpuUse {
    /// Agent and QEMU at the source, seconds.
    pub(crate) source_s: f64,
    /// Agent and QEMU at the destination, seconds.
    pub(crate) destination_s: f64,
}

impl CpuUse {
    pub(crate) fn total_s(&self) -> f64 {
        self.source_s + self.destination_s
    }
}

/// Measurement of moves from before their request until [`CpuWatch::end`].
pub(crate) struct CpuWatch<'a> {
    trial: &'a Trial,
    vms: Vec<String>,
    hosts: [String; 2],
    agents_before: [Duration; 2],
    hypervisor_before: Duration,
    stop: SyncSender<()>,
    looking: JoinHandle<Duration>,
}

impl<'a> CpuWatch<'a> {
    /// Begins to observe the VMs that will be moved.
    pub(crate) fn begin(
        trial: &'a Trial,
        vms: &[&str],
        from: &str,
        to: &str,
    ) -> Result<CpuWatch<'a>> {
        let hosts = [from, to].map(str::to_owned);
        let hypervisor = |vm: &&str| -> Result<(i32, Duration)> {
            let pid = trial.vm(from, vm)?.pid.context("the VM has no process")?;
            Ok((pid, cpu_time(pid).context("the VM's process is gone")?))
        };
        let mut seen = vms.iter().map(hypervisor).collect::<Result<Vec<_>>>()?;
        let hypervisor_before = seen.iter().map(|(_, time)| *time).sum();
        let agents_before = agents(trial, &hosts)?;
        let (stop, stopped) = mpsc::sync_channel(1);
        let interval = INTERVAL * u32::try_from(vms.len()).unwrap_or(u32::MAX);
        let looking = std::thread::spawn(move || {
            let mut look = || -> Duration {
                let now = |(pid, time): &mut (i32, Duration)| {
                    *time = cpu_time(*pid).unwrap_or(*time);
                    *time
                };
                seen.iter_mut().map(now).sum()
            };
            while stopped.recv_timeout(interval) == Err(RecvTimeoutError::Timeout) {
                look();
            }
            look()
        });
        let vms = vms.iter().map(|vm| (*vm).to_owned()).collect();
        Ok(CpuWatch { trial, vms, hosts, agents_before, hypervisor_before, stop, looking })
    }

    /// Returns the CPU time since the start.
    pub(crate) fn end(self) -> Result<CpuUse> {
        drop(self.stop);
        let [source, destination] = agents(self.trial, &self.hosts)?;
        // After a failed move there is none.
        let arrived =
            |vm: &String| self.trial.vm(&self.hosts[1], vm).ok().and_then(|vm| cpu_time(vm.pid?));
        let arrived: Duration = self.vms.iter().filter_map(arrived).sum();
        let left = self.looking.join().ok().context("looking at the source's QEMU panicked")?;
        let [source_before, destination_before] = self.agents_before;
        Ok(CpuUse {
            source_s: (source + left)
                .saturating_sub(source_before + self.hypervisor_before)
                .as_secs_f64(),
            destination_s: (destination + arrived).saturating_sub(destination_before).as_secs_f64(),
        })
    }
}

/// Returns how many cores agents and guest keep busy when nothing is moved.
pub(crate) fn idle_cores(trial: &Trial, vm: &str, host: &str, over: Duration) -> Result<f64> {
    let hosts = ["a", "b"].map(str::to_owned);
    let hypervisor = trial.vm(host, vm)?.pid.context("the VM has no process")?;
    let look = || {
        let hypervisor = cpu_time(hypervisor).context("the VM's process is gone")?;
        Ok::<_, anyhow::Error>(agents(trial, &hosts)?.iter().sum::<Duration>() + hypervisor)
    };
    let (begun, before) = (Instant::now(), look()?);
    #[expect(clippy::disallowed_methods, reason = "this time is what is measured")]
    std::thread::sleep(over);
    Ok(look()?.saturating_sub(before).as_secs_f64() / begun.elapsed().as_secs_f64())
}

fn agents(trial: &Trial, hosts: &[String; 2]) -> Result<[Duration; 2]> {
    let time = |host: &str| {
        let pid = trial.agent_process(host)?.pid;
        cpu_time(pid).with_context(|| format!("the agent of host {host} is gone"))
    };
    Ok([time(&hosts[0])?, time(&hosts[1])?])
}

/// Returns the user and system time of a process, with its threads that have ended, or `None` if it
/// is gone.
fn cpu_time(pid: i32) -> Option<Duration> {
    let ticks = ticks(&std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)?;
    let per_s = rustix::param::clock_ticks_per_second();
    Some(Duration::from_millis(ticks * 1000 / per_s))
}

/// Parses utime and stime of proc(5). The command's name may contain blanks and brackets.
fn ticks(stat: &str) -> Option<u64> {
    let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace();
    let user: u64 = fields.nth(11)?.parse().ok()?;
    let system: u64 = fields.next()?.parse().ok()?;
    Some(user + system)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn user_and_system_time_of_a_stat_line() {
        let line = "7 (a ) b) S 1 7 7 0 -1 4194560 5 0 0 0 120 30 8 9 20 0 1 0 100 1 1 1";
        assert_eq!(ticks(line), Some(150));
        assert_eq!(ticks("7 (a) S 1"), None);
        let this = i32::try_from(std::process::id()).unwrap();
        assert!(cpu_time(this).is_some() && cpu_time(-1).is_none());
    }
}
