//! The migration network goes silent in the middle of a migration: no packet comes through and nobody is told.

use anyhow::{Context, Result, ensure};
use godwit_api::MigrationRequest;
use godwit_lab::trial::{GuestPlan, Trial};
use godwit_migration::{EngineKind, Outcome, Phase};

use crate::{BUSY, move_and_check, set_link, slow_link};

#[test]
fn a_cut_lane_leaves_the_guest_at_the_source() -> Result<()> {
    let Some(trial) = Trial::begin_with("lane-cut", slow_link()?)? else { return Ok(()) };
    let clean = trial.traces("b")?;
    let mut guest = trial.guest("a", &GuestPlan { workload: BUSY.to_owned(), ..GuestPlan::new("web") })?;
    let mut migration = trial.begin_migration("web", "a", &MigrationRequest::to("b"))?;
    migration
        .until(|progress| progress.phase == Phase::PreCopy && progress.sent_bytes > 0)?
        .context("too fast")?;
    set_link(&trial, "down")?;
    let report = migration.report()?;
    ensure!(report.outcome == Outcome::Failed && report.engine == EngineKind::Godwit, "{report:#?}");
    let error = report.error.context("no reason")?;
    ensure!(error.code == "lane-lost" && !error.mend.is_empty(), "{error:?}");
    eprintln!("  told: {} ({})", error.message, error.mend);
    guest.verify()?;
    set_link(&trial, "up")?;
    trial.expect_traces("b", &clean)?;
    trial.expect_whole(&guest)?;
    guest.workload("idle")?;
    move_and_check(&trial, &mut guest)?;
    trial.finish()
}
