//! Restarts of agents: their VMs keep running and are adopted. `faults` and `many` cover restarts
//! during migrations.

use anyhow::{Context, Result, ensure};
use godwit_api::VmState;
use godwit_lab::trial::{Guest, GuestPlan, Trial};
use rustix::process::Signal;

use crate::{BUSY, move_and_check};

/// Checks that the guest answers and runs in the same process as before.
fn expect_adopted(trial: &Trial, guest: &Guest, pid: Option<i32>) -> Result<()> {
    let vm = trial.vm(&guest.host, &guest.name)?;
    ensure!(vm.state == VmState::Running && vm.pid == pid && pid.is_some(), "{vm:?}");
    trial.expect_whole(guest)?;
    Ok(())
}

#[test]
fn an_agent_killed_and_started_finds_its_vm_and_moves_it() -> Result<()> {
    let Some(trial) = Trial::begin("restart")? else { return Ok(()) };
    let clean = trial.traces("a")?;
    let mut guest =
        trial.guest("a", &GuestPlan { workload: BUSY.to_owned(), ..GuestPlan::new("web") })?;
    for signal in [Signal::KILL, Signal::TERM] {
        let pid = trial.vm("a", "web")?.pid;
        trial.end_agent("a", signal)?;
        guest.verify().context("the guest ended with the agent")?;
        trial.start_missing()?;
        expect_adopted(&trial, &guest, pid)?;
    }
    move_and_check(&trial, &mut guest)?;
    trial.expect_traces("a", &clean)?;
    // A VM that has moved in is adopted too, and moves on.
    let pid = trial.vm("b", "web")?.pid;
    trial.end_agent("b", Signal::KILL)?;
    trial.start_missing()?;
    expect_adopted(&trial, &guest, pid)?;
    move_and_check(&trial, &mut guest)?;
    trial.finish()
}
