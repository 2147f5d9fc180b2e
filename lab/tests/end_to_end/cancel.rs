//! Cancelled migrations: the guest keeps running at its source and the other host keeps nothing of
//! it.

use anyhow::{Context, Result, ensure};
use godwit_api::MigrationRequest;
use godwit_lab::trial::{GuestPlan, Trial, other_host, request_to};
use godwit_types::{EngineKind, Outcome, Phase};

use crate::{BUSY, move_and_check, slow_link};

#[test]
fn during_pre_copy_it_rolls_back() -> Result<()> {
    let Some(trial) = Trial::begin_with("cancel", slow_link()?)? else { return Ok(()) };
    let clean = trial.traces("b")?;
    let guest =
        trial.guest("a", &GuestPlan { workload: BUSY.to_owned(), ..GuestPlan::new("web") })?;
    for engine in [EngineKind::Godwit, EngineKind::Qemu, EngineKind::Godwit] {
        let request = request_to("b", engine);
        let mut migration = trial.begin_migration("web", "a", &request)?;
        let sending = migration
            .until(|progress| progress.phase == Phase::PreCopy && progress.sent_bytes > 0)?;
        sending.context("the migration was over before its pre-copy")?;
        migration.cancel()?;
        let report = migration.report()?;
        ensure!(report.outcome == Outcome::Cancelled, "{report:#?}");
        ensure!(report.switchover_ms.is_none(), "{report:#?}");
        let error = report.error.context("no reason")?;
        ensure!(error.code == "cancelled" && !error.remedy.is_empty(), "{error:?}");
        trial.expect_traces("b", &clean)?;
        trial.expect_whole(&guest)?;
    }
    trial.finish()
}

/// Cancels at the last moment. Either may win, and both hosts must agree on the result.
#[test]
fn right_at_the_end_exactly_one_host_has_the_guest() -> Result<()> {
    let Some(trial) = Trial::begin("cancel-late")? else { return Ok(()) };
    let clean = [trial.traces("a")?, trial.traces("b")?];
    let mut guest =
        trial.guest("a", &GuestPlan { workload: BUSY.to_owned(), ..GuestPlan::new("web") })?;
    let (mut cancelled, mut completed) = (0, 0);
    for moment in [
        Phase::Convergence,
        Phase::Switchover,
        Phase::Announce,
        Phase::Convergence,
        Phase::Switchover,
    ] {
        let request = guest.to_other_host();
        let mut migration = trial.begin_migration("web", &guest.host, &request)?;
        migration.until(|progress| progress.phase >= moment)?;
        migration.cancel()?;
        let report = migration.report()?;
        match report.outcome {
            Outcome::Completed => {
                completed += 1;
                guest.host = request.to;
            }
            Outcome::Cancelled => cancelled += 1,
            Outcome::Failed | Outcome::InDoubt => anyhow::bail!("{report:#?}"),
        }
        let empty = other_host(&guest.host);
        trial.expect_traces(empty, &clean[usize::from(empty == "b")])?;
        trial.expect_whole(&guest)?;
    }
    eprintln!("  cancelled {cancelled}, too late for {completed}");
    move_and_check(&trial, &mut guest)?;
    trial.finish()
}

/// Repeats a migration request and cancels a finished migration. Both get an answer and do no harm.
#[test]
fn a_repeated_migration_and_a_late_cancel_are_refused() -> Result<()> {
    let Some(trial) = Trial::begin_with("cancel-twice", slow_link()?)? else { return Ok(()) };
    let clean = trial.traces("b")?;
    let guest = trial.guest("a", &GuestPlan::new("web"))?;
    let request = MigrationRequest::to("b");
    let mut migration = trial.begin_migration("web", "a", &request)?;
    migration.until(|progress| progress.phase == Phase::PreCopy && progress.sent_bytes > 0)?;
    let second =
        trial.begin_migration("web", "a", &request).err().context("two migrations of one VM")?;
    ensure!(second.to_string().contains(&migration.id), "{second}");
    ensure!(trial.delete("a", "web").is_err(), "deleted under a migration");
    migration.cancel()?;
    migration.cancel()?;
    let id = migration.id.clone();
    ensure!(migration.report()?.outcome == Outcome::Cancelled, "not cancelled");
    let over = trial
        .ask(trial.agent("a").cancel_migration(&id))
        .err()
        .context("a finished migration was cancelled")?;
    ensure!(over.to_string().contains("over"), "{over}");
    trial.expect_traces("b", &clean)?;
    trial.expect_whole(&guest)?;
    trial.finish()
}
