//! Measures the queue with 10,000 waiting jobs on 1,000 hosts, and the plan of a drain with 200
//! VMs: `cargo run --release -p godwit-planner --example queue_speed`.

use std::time::Instant;

use godwit_api::control::MovePriority;
use godwit_planner::drain::{DrainRequest, DrainVm, plan};
use godwit_planner::placement::{Host, Rule, RuleKind, Strength, Vm};
use godwit_planner::queue::{HostFacts, Limits, Situation, WaitingJob, schedule};

const GIB: u64 = 1 << 30;
const HOSTS: u64 = 1_000;
const JOBS: u64 = 10_000;
const VMS: u64 = 200;
const NOW_MS: u64 = 1_800_000_000_000;

fn host(number: u64) -> String {
    format!("host{number:04}")
}

fn facts(number: u64) -> HostFacts {
    HostFacts {
        name: host(number),
        link_bits_per_s: Some(10_000_000_000),
        memory_total_bytes: 512 * GIB,
        memory_free_bytes: 256 * GIB,
        ..HostFacts::default()
    }
}

/// Returns a job from one of `sources` hosts, with `targets` targets.
fn job(number: u64, sources: u64, targets: u64) -> WaitingJob {
    WaitingJob {
        id: format!("job{number:05}"),
        vm: format!("vm{number:05}"),
        source: host(number % sources),
        targets: (0..targets).map(|target| host((number * 7 + target * 13 + 1) % HOSTS)).collect(),
        priority: MovePriority::Normal,
        group: format!("group{}", number % 7),
        memory_bytes: (number * 31 % 64 + 1) * GIB,
        estimate_ms: number * 17 % 100 * 1000,
        datastores: vec![
            format!("datastore{}", number % 10),
            format!("datastore{}", 10 + number % 3),
        ],
        reference_group: number.is_multiple_of(5).then(|| format!("image{}", number % 50)),
        submitted_ms: NOW_MS - JOBS + number,
        failed_attempts: 0,
        not_before_ms: None,
        last_failure: None,
    }
}

fn queue(hosts: &[HostFacts]) {
    let limits = Limits::default();
    for (sources, targets) in [(1, 1), (100, 8), (1000, 16)] {
        let waiting: Vec<_> = (0..JOBS).map(|number| job(number, sources, targets)).collect();
        let (running, served) = (&[], &[]);
        let situation = Situation {
            now_ms: NOW_MS,
            waiting: &waiting,
            running,
            hosts,
            limits: &limits,
            served,
        };
        let begun = Instant::now();
        let decided = schedule(&situation);
        let took_ms = begun.elapsed().as_secs_f64() * 1e3;
        let (starts, waits) = (decided.starts.len(), decided.waits.len());
        println!(
            "queue: {sources} sources, {targets} targets per job: {took_ms:.1} ms, {starts} start, \
            {waits} wait"
        );
    }
}

fn drain(hosts: &[Host]) {
    let vms: Vec<_> = (0..VMS)
        .map(|number| DrainVm {
            vm: Vm {
                name: format!("vm{number}"),
                memory_bytes: (number % 64 + 1) * GIB,
                vcpus: 4,
                ..Vm::default()
            },
            estimate_ms: (number + 1) * 1000,
            ..DrainVm::default()
        })
        .collect();
    let apart = |(number, vms): (usize, &[DrainVm])| Rule {
        name: format!("apart{number}"),
        strength: Strength::Must,
        kind: RuleKind::Apart,
        vms: vms.iter().map(|vm| vm.vm.name.clone()).collect(),
    };
    let rules: Vec<_> = vms.chunks(4).enumerate().map(apart).collect();
    let limits = Limits::default();
    let begun = Instant::now();
    let planned = plan(&DrainRequest {
        now_ms: NOW_MS,
        host: "host0000",
        vms: &vms,
        hosts,
        rules: &rules,
        limits: &limits,
        running: &[],
    });
    println!("drain: {VMS} VMs: {:.1} ms: {}", begun.elapsed().as_secs_f64() * 1e3, planned.text);
}

fn main() {
    let facts: Vec<_> = (0..HOSTS).map(facts).collect();
    queue(&facts);
    let hosts = facts.into_iter().map(|facts| Host {
        facts,
        cores: 64,
        arrivals_limit: 8,
        ..Host::default()
    });
    drain(&hosts.collect::<Vec<_>>());
}
