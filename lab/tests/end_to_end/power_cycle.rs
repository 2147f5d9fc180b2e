//! The power of a host is cut, and its VMs start with it: in the order that they name, all of them.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use godwit_api::{CreateVm, VmState};
use godwit_lab::ProcessId;
use godwit_lab::trial::{GuestPlan, Trial, until};
use godwit_qemu::{Accel, Autostart, ByteSize, VmName, VmSpec};
use rustix::process::Signal;

/// Groups of VMs, each of which starts after the one before it, with their sizes and their place in
/// the order, which would have them start in another one.
const GROUPS: [(&str, u8, u32); 3] = [("db", 5, 3), ("app", 7, 2), ("web", 8, 1)];
/// Longest time for all of them to run.
const START_LIMIT: Duration = Duration::from_secs(600);
/// Ticks of the kernel's clock a second, in which start times of processes are counted.
const TICKS_A_SECOND: f64 = 100.0;

/// Defines all VMs, stopped; returns the names of each group.
fn define(trial: &Trial) -> Result<Vec<Vec<String>>> {
    let (mut number, mut groups) = (21, Vec::<Vec<String>>::new());
    for (group, size, order) in GROUPS {
        let before = groups.last().into_iter().flatten().map(VmName::new);
        let after: BTreeSet<VmName> = before.collect::<Result<_, _>>()?;
        let autostart = Autostart { order: Some(order), delay_ms: 50, after };
        let mut names = Vec::new();
        for index in 0..size {
            let plan = GuestPlan {
                number,
                memory: vec![ByteSize::from_mib(96)],
                fill: ByteSize::from_bytes(0),
                ..GuestPlan::new(&format!("{group}{index}"))
            };
            let spec = trial.echo_spec(&plan, Accel::Tcg)?;
            let spec = VmSpec { autostart: Some(autostart.clone()), ..spec };
            trial.ask(trial.agent("a").create_vm(&CreateVm::new(spec, false)))?;
            names.push(plan.name);
            number += 1;
        }
        groups.push(names);
    }
    Ok(groups)
}

/// Waits until a guest runs; returns when its QEMU was started, in ticks.
fn started(trial: &Trial, name: &str) -> Result<u64> {
    until(&format!("{name} runs"), START_LIMIT, || {
        let vm = trial.vm("a", name)?;
        let runs = vm.state == VmState::Running && trial.console("a", name)?.contains("READY");
        ensure!(runs, "it is {}: {}", vm.state, vm.reason.unwrap_or_default());
        Ok(Some(ProcessId::of(vm.pid.context("no process")?).context("it has ended")?.start_time))
    })
}

#[test]
#[ignore = "takes a minute: make power-cycle"]
fn twenty_vms_start_with_their_host_in_three_groups() -> Result<()> {
    let Some(trial) = Trial::begin("power-cycle")? else { return Ok(()) };
    let groups = define(&trial)?;
    trial.cut_power("a")?;
    let begun = Instant::now();
    trial.start_missing()?;
    let mut all = Vec::new();
    for (group, names) in groups.iter().enumerate() {
        for name in names {
            all.push((started(&trial, name)?, group, name));
        }
    }
    let took = begun.elapsed();
    all.sort_unstable();
    let first = all.first().map_or(0, |(at, ..)| *at);
    for (at, group, name) in &all {
        let seconds = (at - first) as f64 / TICKS_A_SECOND;
        eprintln!("  {seconds:6.2} s  group {}  {name}", group + 1);
    }
    eprintln!("  {} VMs run {:.1} s after the power returned", all.len(), took.as_secs_f64());
    ensure!(all.is_sorted_by_key(|(_, group, _)| *group), "the order was not kept: {all:?}");
    // The next agent of the same boot starts nothing.
    trial.kill_hypervisor("a", "web0")?;
    trial.end_agent("a", Signal::KILL)?;
    trial.start_missing()?;
    let vm = trial.vm("a", "web0")?;
    ensure!(vm.state == VmState::Failed, "{vm:?}");
    trial.finish()
}
