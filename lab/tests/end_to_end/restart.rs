//! Agents end and start again; their VMs run on and are found again.

use anyhow::{Context, Result, ensure};
use godwit_api::{MigrationRequest, VmState};
use godwit_lab::trial::{Guest, GuestPlan, Trial};
use godwit_migration::Phase;
use rustix::process::Signal;

use crate::{BUSY, move_and_check, slow_link};

/// The guest answers, and by the same process as before.
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
    let mut guest = trial.guest("a", &GuestPlan { workload: BUSY.to_owned(), ..GuestPlan::new("web") })?;
    for signal in [Signal::KILL, Signal::TERM] {
        let pid = trial.vm("a", "web")?.pid;
        trial.end_agent("a", signal)?;
        guest.verify().context("the guest ended with the agent")?;
        trial.start_missing()?;
        expect_adopted(&trial, &guest, pid)?;
    }
    move_and_check(&trial, &mut guest)?;
    trial.expect_traces("a", &clean)?;
    // What has moved in is found again as well, and moves on.
    let pid = trial.vm("b", "web")?.pid;
    trial.end_agent("b", Signal::KILL)?;
    trial.start_missing()?;
    expect_adopted(&trial, &guest, pid)?;
    move_and_check(&trial, &mut guest)?;
    trial.finish()
}

#[test]
fn a_source_agent_killed_while_it_migrates_keeps_the_guest() -> Result<()> {
    let Some(trial) = Trial::begin_with("restart-source", slow_link()?)? else { return Ok(()) };
    let clean = trial.traces("b")?;
    let guest = trial.guest("a", &GuestPlan { workload: BUSY.to_owned(), ..GuestPlan::new("web") })?;
    let pid = trial.vm("a", "web")?.pid;
    let mut migration = trial.begin_migration("web", "a", &MigrationRequest::to("b"))?;
    migration
        .until(|progress| progress.phase == Phase::PreCopy && progress.sent_bytes > 0)?
        .context("too fast")?;
    trial.end_agent("a", Signal::KILL)?;
    ensure!(migration.report().is_err(), "a report of an agent that is gone");
    trial.start_missing()?;
    trial.expect_traces("b", &clean)?;
    expect_adopted(&trial, &guest, pid)?;
    let mut guest = guest;
    guest.workload("idle")?;
    move_and_check(&trial, &mut guest)?;
    trial.finish()
}
