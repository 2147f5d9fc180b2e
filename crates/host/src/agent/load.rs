//! Reads the load of this host and its VMs in intervals, and keeps the newest sample.
//!
//! No operation waits for it: it takes no VM's turn, reads the kernel's files in a thread of its
//! own, and gives QEMU a time limit. It asks no QEMU whose guest is on its way from or to another
//! host: at a switchover the guest would wait for that answer, and a QEMU that lacks pages may wait
//! for them.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, Weak};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use futures::StreamExt;
use godwit_api::{LOAD_INTERVAL_MS, LoadSample};
use godwit_qemu::{DiskCounters, QmpError, may_query_counters, nic_number};
use tokio::time::{Instant, MissedTickBehavior, interval};

use crate::agent::Agent;
use crate::load::proc::{KernelFiles, ProcessTime};
use crate::load::{
    DiskReading, HostReading, Process, Reading, Sampler, Silences, Traffic, VmReading,
};
use crate::network::{is_tap_name, tap_name};
use crate::vm::{Condition, Vm};
use crate::{memory, processors};

/// Longest wait for the answers of one QEMU.
const ANSWER_LIMIT: Duration = Duration::from_secs(2);
/// Longest wait for the answers of all QEMUs. Those that were not asked by then have no figures of
/// their disks in this sample.
const ROUND_LIMIT: Duration = Duration::from_secs(4);
/// QEMUs asked at the same time.
const ASKED_AT_ONCE: usize = 32;

/// What is read, as the agent knew it at the beginning.
#[derive(Debug)]
struct Subjects {
    host: String,
    bridges: BTreeSet<String>,
    vms: BTreeMap<Process, Subject>,
}

/// A VM with a process.
#[derive(Clone, Debug)]
struct Subject {
    vm: Arc<Vm>,
    may_be_asked: bool,
    dirty_bytes_per_s: Option<u64>,
}

/// What the kernel reports.
#[derive(Debug, Default)]
struct KernelReading {
    host: HostReading,
    interfaces: BTreeMap<String, Traffic>,
    /// Time of each process, and the memory of its VM.
    processes: HashMap<Process, (ProcessTime, u64)>,
}

/// What a QEMU reports.
#[derive(Debug, Default)]
struct Answer {
    disks: Option<DiskReading>,
    memory_ballooned_bytes: Option<u64>,
}

impl Agent {
    /// Returns the newest sample of the host's load; `None` in the first seconds of the agent.
    pub(crate) fn newest_load(&self) -> Option<Arc<LoadSample>> {
        self.load.get()
    }

    /// Samples the load for as long as the agent exists.
    pub(super) async fn sample_load(agent: Weak<Agent>) {
        let (began, mut sampler, mut silences) =
            (Instant::now(), Sampler::default(), Silences::default());
        let mut ticks = interval(Duration::from_millis(LOAD_INTERVAL_MS));
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            // The agent may end during the reading.
            let Some(subjects) = agent.upgrade().map(|agent| agent.subjects()) else { return };
            let reading = subjects.read(began, &mut silences).await;
            let Some(agent) = agent.upgrade() else { return };
            if let Some(sample) = sampler.take(reading) {
                agent.load.set(sample);
            }
        }
    }

    /// Returns the VMs with a process, without shadows.
    fn subjects(&self) -> Subjects {
        let running = self.migrations.running().into_iter();
        let dirty: HashMap<String, u64> =
            running.map(|(vm, progress)| (vm, saturate(progress.dirty_bytes_per_s))).collect();
        let table = self.table();
        let vms = table.iter().filter_map(|(name, slot)| {
            let vm = slot.vm.clone()?;
            let condition = slot.condition.shown();
            if matches!(condition, Condition::MigratingIn { .. }) {
                return None;
            }
            let is_here = matches!(condition, Condition::Running | Condition::Paused);
            let may_be_asked = is_here && self.page_ins.state(name).is_none();
            let dirty_bytes_per_s = dirty.get(name.as_str()).copied();
            let process = (vm.process.pid, vm.process.start_time);
            Some((process, Subject { vm, may_be_asked, dirty_bytes_per_s }))
        });
        let vms = vms.collect();
        let bridges = self.config.networks.values().map(|network| network.bridge.clone());
        Subjects { host: self.config.name.clone(), bridges: bridges.collect(), vms }
    }
}

impl Subjects {
    async fn read(self, began: Instant, silences: &mut Silences) -> Reading {
        let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let at_unix_ms = u64::try_from(since_1970.as_millis()).unwrap_or(0);
        let at = began.elapsed();
        let (bridges, vms) = (self.bridges.clone(), self.vms.clone());
        let kernel = tokio::task::spawn_blocking(move || {
            read_kernel(&KernelFiles::default(), &bridges, &vms)
        });
        let mut answers = self.ask(began, silences).await;
        let KernelReading { host, interfaces, mut processes } = kernel.await.unwrap_or_default();
        let vms = self.vms.iter().filter_map(|(process, subject)| {
            let read = processes.remove(process)?;
            let answer = answers.remove(process).unwrap_or_default();
            Some((*process, subject.reading(&self.host, &interfaces, read, answer)))
        });
        let vms = vms.collect();
        Reading { at, at_unix_ms, host, vms }
    }

    /// Asks the QEMUs that may be asked, several at a time.
    async fn ask(&self, began: Instant, silences: &mut Silences) -> HashMap<Process, Answer> {
        let may = |(_, subject): &(&Process, &Subject)| subject.may_be_asked;
        let processes: Vec<Process> =
            self.vms.iter().filter(may).map(|(process, _)| *process).collect();
        let end = Instant::now() + ROUND_LIMIT;
        let asked = silences.begin(&processes).into_iter().filter_map(|process| {
            let vm = self.vms.get(&process)?.vm.clone();
            Some(async move { (process, ask(&vm, began, end).await, vm) })
        });
        let outcomes: Vec<_> =
            futures::stream::iter(asked).buffer_unordered(ASKED_AT_ONCE).collect().await;
        let mut answers = HashMap::new();
        for (process, outcome, vm) in outcomes {
            match outcome {
                Some(Ok(answer)) => {
                    silences.answered(process);
                    answers.insert(process, answer);
                }
                Some(Err(error)) if silences.missed(process) => {
                    let vm = vm.name.as_str();
                    tracing::info!(vm, %error, "a QEMU does not report the load of its disks");
                }
                Some(Err(_)) | None => {}
            }
        }
        answers
    }
}

impl Subject {
    fn reading(
        &self,
        host: &str,
        interfaces: &BTreeMap<String, Traffic>,
        (time, memory_used_bytes): (ProcessTime, u64),
        answer: Answer,
    ) -> VmReading {
        let (name, spec) = (&self.vm.name, self.vm.spec());
        let taps = (0..spec.nics.len()).filter_map(|index| {
            let tap = tap_name(host, name, nic_number(&spec.nics, index));
            let traffic = *interfaces.get(&tap)?;
            Some((tap, traffic))
        });
        VmReading {
            name: name.to_string(),
            uuid: spec.uuid,
            vcpus: spec.vcpus,
            memory_total_bytes: spec.memory_bytes(),
            memory_used_bytes,
            memory_ballooned_bytes: answer.memory_ballooned_bytes,
            dirty_bytes_per_s: self.dirty_bytes_per_s,
            cpu_ns: ticks_to_ns(time.ticks),
            waits_ns: time.waits_ns,
            taps: taps.collect(),
            disks: answer.disks,
        }
    }
}

/// Asks a QEMU for its counters; `None` if there is no time left for it.
async fn ask(vm: &Vm, began: Instant, end: Instant) -> Option<Result<Answer, QmpError>> {
    let limit = end.saturating_duration_since(Instant::now()).min(ANSWER_LIMIT);
    if limit.is_zero() {
        return None;
    }
    Some(ask_within(vm, began, limit).await)
}

async fn ask_within(vm: &Vm, began: Instant, limit: Duration) -> Result<Answer, QmpError> {
    let (qmp, spec, end) = (&vm.process.qmp, vm.spec(), Instant::now() + limit);
    let mut answer = Answer::default();
    if may_query_counters(&spec.disks) {
        let found: Vec<Option<DiskCounters>> = match spec.disks.is_empty() {
            true => Vec::new(),
            false => qmp.disk_counters(&spec.disks, limit).await?,
        };
        let found = spec.disks.iter().zip(found);
        let counters =
            found.filter_map(|(disk, counters)| Some((disk.path.to_str()?.to_owned(), counters?)));
        answer.disks = Some(DiskReading { at: began.elapsed(), counters: counters.collect() });
    }
    if spec.has_balloon() {
        let left = qmp.balloon_leaves(end.saturating_duration_since(Instant::now())).await?;
        answer.memory_ballooned_bytes = left.map(|left| spec.memory_bytes().saturating_sub(left));
    }
    Ok(answer)
}

/// Reads the kernel's counters. Blocks, but waits for nothing.
fn read_kernel(
    files: &KernelFiles,
    bridges: &BTreeSet<String>,
    vms: &BTreeMap<Process, Subject>,
) -> KernelReading {
    let interfaces = files.interfaces();
    let outside = outside(&interfaces, |name| files.is_device(name), bridges);
    let host = HostReading {
        cores: processors::logical_cores(),
        cpu: files.cpu(),
        memory_total_bytes: memory::total_bytes().unwrap_or(0),
        memory_available_bytes: memory::available_bytes().unwrap_or(0),
        interfaces: outside,
    };
    let processes = vms.iter().filter_map(|(process, subject)| {
        let time = files.process(*process)?;
        Some((*process, (time, subject.vm.memory_taken_bytes())))
    });
    KernelReading { host, processes: processes.collect(), interfaces }
}

/// Returns the interfaces that lead out of the host: those of devices. Without any, as in a
/// network namespace, all that are neither taps of VMs nor bridges of networks.
fn outside(
    all: &BTreeMap<String, Traffic>,
    is_device: impl Fn(&str) -> bool,
    bridges: &BTreeSet<String>,
) -> BTreeMap<String, Traffic> {
    let own = |(name, traffic): (&String, &Traffic)| (name.clone(), *traffic);
    let devices: BTreeMap<_, _> = all.iter().filter(|(name, _)| is_device(name)).map(own).collect();
    if !devices.is_empty() {
        return devices;
    }
    let is_inside = |name: &str| name == "lo" || is_tap_name(name) || bridges.contains(name);
    all.iter().filter(|(name, _)| !is_inside(name)).map(own).collect()
}

fn ticks_to_ns(ticks: u64) -> u64 {
    let ticks_a_second = rustix::param::clock_ticks_per_second().max(1);
    ticks.saturating_mul(1_000_000_000 / ticks_a_second)
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "it saturates")]
fn saturate(number: f64) -> u64 {
    number as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn traffic_of_the_host_is_that_of_its_devices() {
        let tap = tap_name("a", "web", 0);
        let names = ["lo", "eth0", "eth1", "br0", "bond0", tap.as_str()];
        let all: BTreeMap<String, Traffic> =
            names.iter().map(|name| ((*name).to_owned(), Traffic::default())).collect();
        let bridges = BTreeSet::from(["br0".to_owned()]);
        let names = |is_device: fn(&str) -> bool| -> Vec<String> {
            outside(&all, is_device, &bridges).into_keys().collect()
        };
        // The bond's traffic is that of its devices.
        assert_eq!(names(|name| name.starts_with("eth")), ["eth0", "eth1"]);
        assert_eq!(names(|_| false), ["bond0", "eth0", "eth1"]);
    }

    #[test]
    fn the_kernel_of_this_host_is_read() {
        let read = read_kernel(&KernelFiles::default(), &BTreeSet::new(), &BTreeMap::new());
        let host = read.host;
        assert!(host.cores > 0 && host.cpu.is_some());
        assert!(host.memory_total_bytes > host.memory_available_bytes);
        assert!(read.processes.is_empty());
    }

    #[test]
    fn rates_are_whole() {
        assert_eq!(
            [saturate(1.9), saturate(-3.0), saturate(f64::NAN), saturate(1e30)],
            [1, 0, 0, u64::MAX]
        );
    }
}
