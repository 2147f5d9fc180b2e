//! Throttling at page faults: a guest that writes memory several times as fast as the link carries
//! it still moves.

use anyhow::{Context, Result, ensure};
use godwit_lab::trial::{GuestPlan, Trial, request_to};
use godwit_qemu::ByteSize;
use godwit_types::EngineKind;
use rustix::process::Signal;

use crate::{move_and_check, slow_link};

/// 80 MB/s of incompressible pages, spread over 48 MiB: three times what 200 Mb/s carry.
const TOO_MUCH: &str = "dirty:rate=20000,ws=48M,order=random,zero=0,compressible=0";

fn too_busy() -> GuestPlan {
    GuestPlan {
        workload: TOO_MUCH.to_owned(),
        fill: ByteSize::from_mib(64),
        ..GuestPlan::new("web")
    }
}

#[test]
fn a_guest_that_writes_more_than_the_link_carries_moves() -> Result<()> {
    let Some(trial) = Trial::begin_with("throttle", slow_link()?)? else { return Ok(()) };
    let mut guest = trial.guest("a", &too_busy())?;
    let watched = move_and_check(&trial, &mut guest)?;
    let report = &watched.report;
    let throttle =
        report.throttle.with_context(|| format!("the guest was not slowed: {report:#?}"))?;
    ensure!(throttle.faults > 0 && throttle.held_ms > 0.0, "{throttle:?}");
    ensure!(
        report.rounds.iter().any(|round| round.throttled_to_pages_per_s.is_some()),
        "{report:#?}"
    );
    trial.finish()
}

#[test]
fn the_agent_that_slows_a_guest_is_killed_and_the_guest_lives() -> Result<()> {
    let Some(trial) = Trial::begin_with("throttle-crash", slow_link()?)? else { return Ok(()) };
    let mut guest = trial.guest("a", &too_busy())?;
    let mut migration = trial.begin_migration("web", "a", &request_to("b", EngineKind::Godwit))?;
    // After round 0 the dirty pages are sent while the writers are held.
    migration.until(|progress| progress.round >= 1)?.context("the migration was over too early")?;
    trial.end_agent("a", Signal::KILL)?;
    guest.verify().context("the guest without its agent")?;
    trial.start_missing()?;
    guest.verify().context("the guest with another agent")?;
    move_and_check(&trial, &mut guest)?;
    trial.finish()
}
