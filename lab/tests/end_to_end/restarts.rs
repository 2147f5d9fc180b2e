//! Restarts of VMs that crashed, by their policy: QEMU killed, the guest's kernel panicked, the
//! limit reached, an agent that ends in between, a move that was under way.

use anyhow::{Context, Result, ensure};
use godwit_api::{CrashCause, LastCrash, VmInfo, VmState};
use godwit_lab::trial::{GuestPlan, LIMIT, Trial, until};
use godwit_lab::{Hooks, LabOptions};
use godwit_qemu::{Accel, ByteSize, OnCrash, VmSpec};
use godwit_types::{Outcome, Phase};
use rustix::process::Signal;

use crate::{BUSY, slow_link};

/// Waits until a VM of host a runs in another process than before.
fn runs_again(trial: &Trial, before: &VmInfo) -> Result<(VmInfo, LastCrash)> {
    let vm = until("the VM runs again", LIMIT, || {
        let vm = trial.vm("a", &before.name)?;
        ensure!(vm.state == VmState::Running, "it is {}: {:?}", vm.state, vm.reason);
        let crash = vm.last_crash.context("no crash")?;
        // That it has been restarted is saved shortly after it is shown.
        let note = trial.paths().host("a").join(format!("state/vms/{}/crashes.json", before.name));
        let is_saved = !std::fs::read_to_string(note)?.contains("awaited_in_boot");
        Ok((vm.pid != before.pid && !crash.restarting && is_saved).then_some(vm))
    })?;
    let crash = vm.last_crash.context("no crash")?;
    Ok((vm, crash))
}

/// Waits until VM web of host a is shown as failed for a reason.
fn is_down(trial: &Trial, reason: &str) -> Result<(String, LastCrash)> {
    until("the VM is down", LIMIT, || {
        let vm = trial.vm("a", "web")?;
        let is_down = vm.state == VmState::Failed;
        let found = vm.reason.filter(|found| is_down && found.contains(reason));
        Ok(found.zip(vm.last_crash))
    })
}

/// Starts a guest without an operating system at host a.
fn begin(trial: &Trial, on_crash: OnCrash) -> Result<VmInfo> {
    let plan = GuestPlan {
        memory: vec![ByteSize::from_mib(96)],
        fill: ByteSize::from_bytes(0),
        ..GuestPlan::new("web")
    };
    let spec = VmSpec { on_crash, ..trial.echo_spec(&plan, Accel::Tcg)? };
    Ok(trial.create("a", spec)?)
}

#[test]
fn a_killed_and_a_panicked_guest_are_restarted_up_to_the_limit() -> Result<()> {
    let Some(trial) = Trial::begin("restarts")? else { return Ok(()) };
    let plan = GuestPlan::new("web");
    let spec = VmSpec { on_crash: OnCrash::Times(2), ..plan.spec(trial.image()) };
    let guest = trial.guest_of("a", &plan, spec)?;
    let vm = trial.vm("a", "web")?;
    ensure!(vm.last_crash.is_none() && vm.spec.panic_device == Some(true), "{vm:?}");

    trial.kill_hypervisor("a", "web")?;
    let (vm, crash) = runs_again(&trial, &vm)?;
    ensure!((crash.how, crash.restarts) == (CrashCause::QemuEnded, 1), "{crash:?}");
    ensure!(vm.reason.is_none(), "{vm:?}");
    guest.wait_ready(plan.boot_limit)?;

    guest.panic()?;
    let (_, crash) = runs_again(&trial, &vm)?;
    ensure!((crash.how, crash.restarts) == (CrashCause::Panic, 2), "{crash:?}");
    guest.wait_ready(plan.boot_limit)?;
    trial.expect_whole(&guest)?;
    let shown = trial.godwit(&["vm", "show", "web"])?;
    for part in ["up to 2 within an hour", "the guest panicked", "2 restarts within an hour"] {
        ensure!(shown.stdout.contains(part), "{part}: {shown:?}");
    }

    trial.kill_hypervisor("a", "web")?;
    let (_, crash) = is_down(&trial, "allows 2 restarts within an hour")?;
    ensure!(crash.restarts == 2 && !crash.restarting, "{crash:?}");
    trial.ask(trial.agent("a").start_vm("web"))?;
    guest.wait_ready(plan.boot_limit)?;
    trial.finish()
}

#[test]
fn without_a_policy_a_vm_stays_down() -> Result<()> {
    let Some(trial) = Trial::begin("restarts-never")? else { return Ok(()) };
    let vm = begin(&trial, OnCrash::Never)?;
    ensure!(vm.spec.panic_device == Some(false), "{vm:?}");
    trial.kill_hypervisor("a", "web")?;
    let (reason, crash) = is_down(&trial, "ended by itself")?;
    ensure!(!reason.contains("restarted"), "{reason}");
    ensure!((crash.restarts, crash.restarting) == (0, false), "{crash:?}");
    // Nor does the next agent restart it.
    trial.end_agent("a", Signal::KILL)?;
    trial.start_missing()?;
    let (_, crash) = is_down(&trial, "QEMU had ended when the agent started")?;
    ensure!(!crash.restarting, "{crash:?}");
    trial.finish()
}

#[test]
fn an_agent_that_ends_in_between_neither_forgets_nor_repeats_a_restart() -> Result<()> {
    let options =
        LabOptions { hooks: Hooks { holds: true, ..Hooks::default() }, ..LabOptions::default() };
    let Some(trial) = Trial::begin_with("restarts-agent", options)? else { return Ok(()) };
    let vm = begin(&trial, OnCrash::Times(3))?;

    let held = trial.hold("a", "host.restart-crashed")?;
    trial.kill_hypervisor("a", "web")?;
    held.reached(LIMIT)?;
    ensure!(trial.vm("a", "web")?.last_crash.is_some_and(|crash| crash.restarting));
    trial.end_agent("a", Signal::KILL)?;
    held.open();
    trial.start_missing()?;
    let (vm, crash) = runs_again(&trial, &vm).context("planned before the agent ended")?;
    ensure!((crash.how, crash.restarts) == (CrashCause::QemuEnded, 1), "{crash:?}");

    trial.end_agent("a", Signal::KILL)?;
    trial.kill_hypervisors("a")?;
    trial.start_missing()?;
    let (_, crash) = runs_again(&trial, &vm).context("ended while no agent ran")?;
    ensure!((crash.how, crash.restarts) == (CrashCause::QemuEnded, 2), "{crash:?}");

    // What did not run before a loss of power is not restarted by the policy.
    trial.cut_power("a")?;
    trial.start_missing()?;
    let (reason, crash) = is_down(&trial, "QEMU had ended when the agent started")?;
    ensure!(!reason.contains("restarted in") && !crash.restarting, "{reason} {crash:?}");
    trial.finish()
}

#[test]
fn a_guest_that_dies_in_a_move_is_restarted_at_one_host() -> Result<()> {
    let Some(trial) = Trial::begin_with("restarts-move", slow_link()?)? else { return Ok(()) };
    let plan = GuestPlan { workload: BUSY.to_owned(), ..GuestPlan::new("web") };
    let spec = VmSpec { on_crash: OnCrash::Always, ..plan.spec(trial.image()) };
    let clean = trial.traces("b")?;
    let guest = trial.guest_of("a", &plan, spec)?;
    let vm = trial.vm("a", "web")?;
    let mut migration = trial.begin_migration("web", "a", &guest.to_other_host())?;
    migration
        .until(|progress| progress.phase == Phase::PreCopy && progress.sent_bytes > 0)?
        .context("the migration was over before its pre-copy")?;
    trial.kill_hypervisor("a", "web")?;
    let report = migration.report()?;
    ensure!(report.outcome == Outcome::Failed, "{report:#?}");
    runs_again(&trial, &vm)?;
    guest.wait_ready(plan.boot_limit)?;
    trial.expect_whole(&guest)?;
    trial.expect_traces("b", &clean)?;
    trial.finish()
}
