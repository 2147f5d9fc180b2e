//! VMs deleted and created again with the same name and UUID. Hosts that had the older VM treat the
//! new one as another VM: a broken hand-over does not end it because of their records of the older
//! one.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use godwit_lab::trial::{GuestPlan, Trial, request_to, until};
use godwit_lab::{Hooks, LabOptions};
use godwit_types::{EngineKind, Outcome};
use rustix::process::Signal;

use crate::move_and_check;

const LIMIT: Duration = Duration::from_secs(60);

#[test]
fn a_vm_created_again_survives_the_record_of_the_older_vm() -> Result<()> {
    let hooks = Hooks { holds: true, ..Hooks::default() };
    let options = LabOptions { hooks, ..LabOptions::default() };
    let Some(trial) = Trial::begin_with("created-again", options)? else { return Ok(()) };
    let plan = GuestPlan::new("web");
    let mut older = trial.guest("a", &plan)?;
    let spec = trial.vm("a", "web")?.spec;
    let incarnation = trial.vm("a", "web")?.incarnation;
    ensure!(spec.uuid.is_some() && !incarnation.is_unrecorded(), "{spec:?}, {incarnation}");
    // Host b remembers that it had the VM in an epoch as late as that of its next move there.
    move_and_check(&trial, &mut older)?;
    move_and_check(&trial, &mut older)?;
    ensure!(trial.vm("a", "web")?.incarnation == incarnation, "a move changed the incarnation");
    trial.delete("a", "web")?;

    let guest = trial.guest_of("a", &plan, spec)?;
    ensure!(trial.vm("a", "web")?.incarnation != incarnation, "the new VM has the old incarnation");
    let held = trial.hold("b", "destination.finish-load")?;
    let migration = trial.begin_migration("web", "a", &request_to("b", EngineKind::Godwit))?;
    held.reached(LIMIT)?;
    trial.end_agent("b", Signal::KILL)?;
    held.open();
    trial.start_missing()?;
    let report = migration.report()?;
    ensure!(report.outcome == Outcome::Failed, "{report:#?}");
    until("the guest is on host a alone", LIMIT, || Ok(trial.expect_whole(&guest).ok()))
        .context("the guest is lost")?;
    trial.finish()
}
