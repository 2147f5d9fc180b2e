//! Silent loss of the migration network during a migration: no packet passes, and no host is
//! notified.

use anyhow::{Context, Result, ensure};
use godwit_api::MigrationRequest;
use godwit_lab::trial::{Guest, GuestPlan, Migration, Trial};
use godwit_types::{EngineKind, Outcome, Phase};

use crate::{BUSY, move_and_check, set_link, slow_link};

fn busy_guest(trial: &Trial) -> Result<Guest> {
    trial.guest("a", &GuestPlan { workload: BUSY.to_owned(), ..GuestPlan::new("web") })
}

fn cut_in_pre_copy(trial: &Trial, migration: &mut Migration<'_>) -> Result<()> {
    migration
        .until(|progress| progress.phase == Phase::PreCopy && progress.sent_bytes > 0)?
        .context("the migration was over too early")?;
    set_link(trial, "down")
}

#[test]
fn a_cut_that_lasts_too_long_leaves_the_guest_at_the_source() -> Result<()> {
    let Some(trial) = Trial::begin_with("lane-cut", slow_link()?)? else { return Ok(()) };
    let clean = trial.traces("b")?;
    let mut guest = busy_guest(&trial)?;
    let request = MigrationRequest { cut_limit_ms: 1000, ..MigrationRequest::to("b") };
    let mut migration = trial.begin_migration("web", "a", &request)?;
    cut_in_pre_copy(&trial, &mut migration)?;
    let report = migration.report()?;
    ensure!(
        report.outcome == Outcome::Failed && report.engine == EngineKind::Godwit,
        "{report:#?}"
    );
    let error = report.error.context("no reason")?;
    ensure!(error.code == "lane-lost" && !error.remedy.is_empty(), "{error:?}");
    eprintln!("  error: {} ({})", error.message, error.remedy);
    guest.verify()?;
    set_link(&trial, "up")?;
    trial.expect_traces("b", &clean)?;
    trial.expect_whole(&guest)?;
    guest.workload("idle")?;
    move_and_check(&trial, &mut guest)?;
    trial.finish()
}

#[test]
fn a_migration_goes_on_where_the_link_was_cut() -> Result<()> {
    let Some(trial) = Trial::begin_with("lane-resumed", slow_link()?)? else { return Ok(()) };
    let mut guest = busy_guest(&trial)?;
    let mut migration = trial.begin_migration("web", "a", &MigrationRequest::to("b"))?;
    cut_in_pre_copy(&trial, &mut migration)?;
    migration
        .until(|progress| progress.phase == Phase::Reconnect)?
        .context("the cut was not noticed")?;
    set_link(&trial, "up")?;
    let report = migration.report()?;
    ensure!(report.outcome == Outcome::Completed && report.cuts.len() == 1, "{report:#?}");
    eprintln!("  cut: {:?}", report.cuts[0]);
    guest.host = "b".to_owned();
    guest.verify()?;
    trial.expect_whole(&guest)?;
    trial.finish()
}
