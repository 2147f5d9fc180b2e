//! Bandwidth limits: a guest moves whole under them, and a change during the move takes effect.

use anyhow::{Context, Result, ensure};
use godwit_api::{LimitOf, MigrationRequest};
use godwit_lab::trial::{GuestPlan, Trial, request_to};
use godwit_types::{EngineKind, Outcome, Phase, RateLimit};

use crate::{BUSY, move_and_check};

#[test]
fn a_limited_guest_moves_whole_and_a_change_holds_at_once() -> Result<()> {
    let Some(trial) = Trial::begin("limits")? else { return Ok(()) };
    let mut guest =
        trial.guest("a", &GuestPlan { workload: BUSY.to_owned(), ..GuestPlan::new("web") })?;
    let limit = |text: &str| -> Result<RateLimit> { Ok(text.parse()?) };
    let (a, b) = (trial.agent("a"), trial.agent("b"));

    // At 10 Mbit/s the first round alone would take minutes.
    let request =
        MigrationRequest { bandwidth_limit: Some(limit("10mbit")?), ..guest.to_other_host() };
    let mut migration = trial.begin_migration("web", "a", &request)?;
    let limited =
        migration.until(|progress| progress.phase == Phase::PreCopy && progress.sent_bytes > 0)?;
    let limited = limited.context("the migration was over before it was limited")?;
    ensure!(limited.bandwidth_limit == limit("10mbit")?.rate(), "{limited:#?}");
    let id = migration.id.clone();
    let low = trial.godwit(&["migration", "limit", &id, "0mbit"])?;
    ensure!(low.code == Some(2) && low.stderr.contains("zero"), "{low:?}");
    let changed = trial.godwit(&["migration", "limit", &id, "none", "--json"])?;
    ensure!(
        changed.code == Some(0) && changed.stdout.contains("\"bandwidth_limit\": \"none\""),
        "{changed:?}"
    );
    // The host's own limit is set during the migration and applies to it at once.
    trial.ask(a.set_limit(LimitOf::Host, limit("2gbit")?))?;
    let report = migration.report()?;
    ensure!(report.outcome == Outcome::Completed, "{report:#?}");
    ensure!(report.bandwidth_limit == limit("2gbit")?.rate(), "{report:#?}");
    guest.host = "b".to_owned();
    trial.expect_whole(&guest)?;
    eprintln!("  moved in {:.0} ms, begun at 10 Mbit/s", report.migration_time_ms);

    // The way back is limited by the other host from the start.
    trial.ask(b.set_limit(LimitOf::Host, limit("1gbit")?))?;
    let watched = move_and_check(&trial, &mut guest)?;
    ensure!(watched.report.bandwidth_limit == limit("1gbit")?.rate(), "{:#?}", watched.report);
    trial.finish()
}

/// Sets the limit of QEMU's own engine. QEMU itself is responsible for keeping it.
#[test]
fn qemus_own_engine_gets_the_limit_and_its_change() -> Result<()> {
    let Some(trial) = Trial::begin("limits-qemu")? else { return Ok(()) };
    let mut guest = trial.guest("a", &GuestPlan::new("web"))?;
    let bandwidth_limit = Some("10mbit".parse()?);
    let request = MigrationRequest { bandwidth_limit, ..request_to("b", EngineKind::Qemu) };
    let mut migration = trial.begin_migration("web", "a", &request)?;
    let limited =
        migration.until(|progress| progress.phase == Phase::PreCopy && progress.sent_bytes > 0)?;
    let limited = limited.context("the migration was over before it was limited")?;
    ensure!(limited.bandwidth_limit == "10mbit".parse().ok(), "{limited:#?}");
    trial.ask(trial.agent("a").limit_migration(&migration.id, RateLimit::NONE))?;
    let report = migration.report()?;
    ensure!(
        report.outcome == Outcome::Completed && report.bandwidth_limit.is_none(),
        "{report:#?}"
    );
    guest.host = "b".to_owned();
    trial.expect_whole(&guest)?;
    trial.finish()
}
