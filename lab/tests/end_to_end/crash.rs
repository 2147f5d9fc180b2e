//! Death of the destination during a migration by QEMU's own engine: the guest keeps running at the
//! source and moves later. `faults` covers Godwit's engine.

use anyhow::{Context, Result, ensure};
use godwit_lab::trial::{Guest, GuestPlan, Traces, Trial, request_to};
use godwit_types::{EngineKind, Outcome, Phase};
use rustix::process::Signal;

use crate::{BUSY, move_and_check, slow_link};

/// Starts a migration, injects a fault during its pre-copy, and expects the guest to keep running
/// at the source.
fn strike(trial: &Trial, guest: &Guest, blow: impl FnOnce() -> Result<()>) -> Result<()> {
    let request = request_to("b", EngineKind::Qemu);
    let mut migration = trial.begin_migration("web", "a", &request)?;
    migration
        .until(|progress| progress.phase == Phase::PreCopy && progress.sent_bytes > 0)?
        .context("the migration was over before its pre-copy")?;
    blow()?;
    let report = migration.report()?;
    ensure!(report.outcome == Outcome::Failed, "{report:#?}");
    let error = report.error.context("no reason")?;
    ensure!(!error.message.is_empty() && !error.remedy.is_empty(), "{error:?}");
    eprintln!("  error: {} ({}; {})", error.message, error.code, error.remedy);
    guest.verify().context("the guest at the source")?;
    Ok(())
}

fn after(trial: &Trial, guest: &Guest, clean: &Traces) -> Result<()> {
    trial.expect_traces("b", clean)?;
    trial.expect_whole(guest)?;
    Ok(())
}

#[test]
fn the_destination_is_killed_during_pre_copy() -> Result<()> {
    let Some(trial) = Trial::begin_with("crash", slow_link()?)? else { return Ok(()) };
    let clean = trial.traces("b")?;
    let mut guest =
        trial.guest("a", &GuestPlan { workload: BUSY.to_owned(), ..GuestPlan::new("web") })?;
    strike(&trial, &guest, || trial.kill_hypervisor("b", "web")).context("its QEMU")?;
    after(&trial, &guest, &clean)?;
    // The shadow outlives its agent. The next agent ends it, and QEMU's own migration with it.
    let kill_and_start = || trial.end_agent("b", Signal::KILL).and_then(|()| trial.start_missing());
    strike(&trial, &guest, kill_and_start).context("its agent")?;
    after(&trial, &guest, &clean)?;
    guest.workload("idle")?;
    move_and_check(&trial, &mut guest)?;
    trial.finish()
}
