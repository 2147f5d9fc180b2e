//! Property tests: any order of submit, finish, fail, cancel and restart.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::retry::{RetryPolicy, Verdict};
use super::*;

const HOSTS: [&str; 4] = ["a", "b", "c", "d"];
const DATASTORES: [&str; 2] = ["ceph", "nfs"];
const GROUPS: [&str; 3] = ["drain", "alice", "bob"];
const CODES: [&str; 4] = ["lane-lost", "busy", "insufficient-memory", "in-doubt"];
const PRIORITIES: [MovePriority; 4] =
    [MovePriority::Low, MovePriority::Normal, MovePriority::High, MovePriority::Urgent];

#[derive(Clone, Debug)]
enum Op {
    Submit {
        vm: u8,
        targets: Vec<u8>,
        priority: u8,
        group: u8,
        minutes: u64,
        datastores: u8,
        clone: bool,
    },
    Finish(u8),
    Fail(u8, u8),
    Cancel(u8),
    Presence(u8, bool),
    Pass(u64),
    /// Another manager takes over, without the times of service.
    Restart,
}

fn ops() -> impl Strategy<Value = Op> {
    let submit = (
        0..16u8,
        prop::collection::vec(0..4u8, 1..4),
        0..4u8,
        0..3u8,
        1..40u64,
        0..4u8,
        any::<bool>(),
    );
    prop_oneof![
        4 => submit.prop_map(
            |(vm, targets, priority, group, minutes, datastores, clone)| Op::Submit {
                vm, targets, priority, group, minutes, datastores, clone
            }
        ),
        2 => any::<u8>().prop_map(Op::Finish),
        1 => (any::<u8>(), 0..4u8).prop_map(|(index, code)| Op::Fail(index, code)),
        1 => any::<u8>().prop_map(Op::Cancel),
        1 => (0..4u8, any::<bool>()).prop_map(|(host, up)| Op::Presence(host, up)),
        1 => (1..30u64).prop_map(Op::Pass),
        1 => Just(Op::Restart),
    ]
}

/// A small cluster: the hosts of VMs, and the input of the queue.
struct World {
    given: Given,
    vms: BTreeMap<String, (String, u64)>,
    submitted: u32,
    failed: BTreeMap<String, WaitingJob>,
}

impl World {
    fn new(limits: Limits) -> World {
        let mut given = Given::new(Vec::new());
        given.limits = limits;
        let mut vms = BTreeMap::new();
        for (vm, host) in (0..16_u64).zip(HOSTS.into_iter().cycle()) {
            let bytes = (1 + vm % 5) * GIB;
            vms.insert(format!("vm{vm}"), (host.to_owned(), bytes));
        }
        for host in &mut given.hosts {
            (host.memory_total_bytes, host.memory_free_bytes) = (24 * GIB, 12 * GIB);
        }
        World { given, vms, submitted: 0, failed: BTreeMap::new() }
    }

    fn act(&mut self, op: Op) {
        match op {
            Op::Submit { vm, targets, priority, group, minutes, datastores, clone } => {
                let vm = format!("vm{vm}");
                let (source, memory_bytes) = self.vms[&vm].clone();
                self.submitted += 1;
                let on =
                    DATASTORES.iter().enumerate().filter(|(bit, _)| datastores & (1 << bit) != 0);
                self.given.waiting.push(WaitingJob {
                    id: format!("j{}", self.submitted),
                    source,
                    targets: targets
                        .iter()
                        .map(|host| HOSTS[usize::from(*host)].to_owned())
                        .collect(),
                    priority: PRIORITIES[usize::from(priority)],
                    group: GROUPS[usize::from(group)].into(),
                    memory_bytes,
                    estimate_ms: minutes * MINUTE,
                    datastores: on.map(|(_, name)| (*name).to_owned()).collect(),
                    reference_group: clone.then(|| "debian".to_owned()),
                    submitted_ms: self.given.now_ms,
                    ..job(&vm)
                });
            }
            Op::Finish(index) => self.end(index, None),
            Op::Fail(index, code) => self.end(index, Some(CODES[usize::from(code)])),
            Op::Cancel(index) => {
                if !self.given.waiting.is_empty() {
                    let index = usize::from(index) % self.given.waiting.len();
                    self.given.waiting.remove(index);
                }
            }
            Op::Presence(host, up) => {
                let presence = if up { Presence::Up } else { Presence::Away };
                self.given.host(HOSTS[usize::from(host)]).presence = presence;
            }
            Op::Pass(minutes) => self.given.now_ms += minutes * MINUTE,
            Op::Restart => self.given.served.clear(),
        }
    }

    /// Ends a move; with a code if it failed.
    fn end(&mut self, index: u8, code: Option<&str>) {
        if self.given.running.is_empty() {
            return;
        }
        let index = usize::from(index) % self.given.running.len();
        let ended = self.given.running.remove(index);
        let bytes = self.vms[&ended.vm].1;
        self.given.host(&ended.target).memory_promised_bytes -= bytes;
        let job = self.failed.remove(&ended.vm).unwrap();
        self.given.served(&job.source, &job.group);
        let Some(code) = code else {
            self.given.host(&ended.target).memory_free_bytes -= bytes;
            self.given.host(&ended.source).memory_free_bytes += bytes;
            self.vms.insert(ended.vm.clone(), (ended.target.clone(), bytes));
            for waiting in self.given.waiting.iter_mut().filter(|waiting| waiting.vm == ended.vm) {
                waiting.source.clone_from(&ended.target);
            }
            return;
        };
        let failed_attempts = job.failed_attempts + 1;
        if let Verdict::Again { at_ms, .. } =
            RetryPolicy::default().after(code, failed_attempts, self.given.now_ms)
        {
            let (not_before_ms, last_failure) = (Some(at_ms), Some(code.to_owned()));
            self.given.waiting.push(WaitingJob {
                failed_attempts,
                not_before_ms,
                last_failure,
                ..job
            });
        }
    }

    /// Starts the moves that are due, and checks all invariants.
    fn start(&mut self) -> Result<usize, TestCaseError> {
        let schedule = self.given.schedule();
        self.same_in_any_order(&schedule)?;
        let decided: Vec<&String> = schedule
            .starts
            .iter()
            .map(|start| &start.job)
            .chain(schedule.waits.iter().map(|wait| &wait.job))
            .collect();
        let waiting: BTreeSet<&String> = self.given.waiting.iter().map(|job| &job.id).collect();
        prop_assert_eq!(decided.len(), waiting.len());
        prop_assert_eq!(decided.into_iter().collect::<BTreeSet<_>>(), waiting);
        prop_assert!(schedule.waits.iter().all(|wait| !wait.text.is_empty()));
        for job in &self.given.waiting {
            if schedule.starts.iter().any(|start| start.job == job.id) {
                self.failed.insert(job.vm.clone(), job.clone());
            }
        }
        let waits = schedule.waits.clone();
        let starts = self.given.start().len();
        self.within_limits()?;
        self.reasons_are_true(&waits)?;
        Ok(starts)
    }

    fn same_in_any_order(&self, schedule: &Schedule) -> Result<(), TestCaseError> {
        let Given { now_ms, waiting, running, hosts, limits, served } = &self.given;
        let waiting: Vec<_> = waiting.iter().rev().cloned().collect();
        let hosts: Vec<_> = hosts.iter().rev().cloned().collect();
        let situation = Situation {
            now_ms: *now_ms,
            waiting: &waiting,
            running,
            hosts: &hosts,
            limits,
            served,
        };
        prop_assert_eq!(&super::schedule(&situation), schedule);
        Ok(())
    }

    fn count(&self, of: impl Fn(&RunningMove) -> bool) -> u32 {
        u32::try_from(self.given.running.iter().filter(|running| of(running)).count()).unwrap()
    }

    fn within_limits(&self) -> Result<(), TestCaseError> {
        let limits = &self.given.limits;
        for host in &self.given.hosts {
            let (name, speed) = (&host.name, host.link_bits_per_s);
            prop_assert!(
                self.count(|running| &running.source == name) <= limits.out_of(name, speed)
            );
            prop_assert!(
                self.count(|running| &running.target == name) <= limits.into_host(name, speed)
            );
            prop_assert!(host.memory_promised_bytes <= host.memory_free_bytes, "memory of {name}");
        }
        for datastore in DATASTORES {
            let on = self.count(|running| running.datastores.iter().any(|on| on == datastore));
            prop_assert!(on <= limits.on_datastore(datastore));
        }
        prop_assert!(self.count(|_| true) <= limits.in_all.unwrap_or(u32::MAX));
        let vms: BTreeSet<&String> = self.given.running.iter().map(|running| &running.vm).collect();
        prop_assert_eq!(vms.len(), self.given.running.len(), "a VM moves twice");
        Ok(())
    }

    /// Checks that a limit that is reported as full is full, after all starts.
    fn reasons_are_true(&self, waits: &[Wait]) -> Result<(), TestCaseError> {
        let host = |name: &str| self.given.hosts.iter().find(|host| host.name == name).unwrap();
        for wait in waits {
            match &wait.reason {
                WaitReason::SourceLimit { host: name, line } => {
                    prop_assert_eq!(self.count(|running| &running.source == name), line.limit);
                }
                WaitReason::DatastoreLimit { datastore, line } => {
                    prop_assert_eq!(
                        self.count(|running| running.datastores.contains(datastore)),
                        line.limit
                    );
                }
                WaitReason::TotalLimit { line } => {
                    prop_assert_eq!(self.count(|_| true), line.limit);
                }
                WaitReason::Target { obstacle: TargetObstacle::Limit { host: name, line } } => {
                    prop_assert_eq!(self.count(|running| &running.target == name), line.limit);
                }
                WaitReason::Target {
                    obstacle: TargetObstacle::Memory { host: name, needed_bytes, .. },
                } => {
                    prop_assert!(host(name).memory_left_bytes() < *needed_bytes);
                }
                WaitReason::VmBusy { migration, .. } => {
                    prop_assert_eq!(self.count(|running| &running.migration == migration), 1);
                }
                WaitReason::RetryAt { at_ms, .. } => prop_assert!(*at_ms > self.given.now_ms),
                _ => {}
            }
        }
        Ok(())
    }

    /// Lets all moves end, until nothing starts any more.
    fn settle(&mut self) -> Result<(), TestCaseError> {
        for host in &mut self.given.hosts {
            host.presence = Presence::Up;
        }
        let mut idle = 0;
        for _ in 0..1000 {
            self.act(Op::Pass(5));
            let started = self.start()?;
            idle = if started == 0 && self.given.running.is_empty() { idle + 1 } else { 0 };
            // Longer than any retry, and than any reservation.
            if idle > 12 {
                return Ok(());
            }
            self.act(Op::Finish(0));
        }
        Err(TestCaseError::fail("the queue does not settle"))
    }
}

fn limits() -> impl Strategy<Value = Limits> {
    (1..4u32, 1..4u32, 1..4u32, prop::option::of(1..6u32)).prop_map(
        |(out, into, per_datastore, in_all)| {
            let of =
                |host: &&str| ((*host).to_owned(), HostLimit { out: Some(out), into: Some(into) });
            Limits {
                in_all,
                per_datastore,
                hosts: HOSTS.iter().map(of).collect(),
                ..Limits::default()
            }
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn no_limit_is_exceeded_and_every_job_gets_a_turn(
        limits in limits(),
        ops in prop::collection::vec(ops(), 1..80),
    ) {
        let mut world = World::new(limits);
        for op in ops {
            world.act(op);
            world.start()?;
        }
        world.settle()?;
        // What still waits cannot be helped by any move that ends.
        for wait in world.given.schedule().waits {
            let helpless = match &wait.reason {
                WaitReason::Target { obstacle } | WaitReason::Targets { best: obstacle, .. } => {
                    matches!(
                        obstacle,
                        TargetObstacle::Memory { .. } | TargetObstacle::IsSource { .. }
                    )
                }
                WaitReason::EarlierJob { .. } => true,
                _ => false,
            };
            prop_assert!(helpless, "{} waits forever: {}", wait.job, wait.text);
        }
    }
}
