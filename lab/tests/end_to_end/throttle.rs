//! Writers slowed by the fault: a guest that writes memory several times as fast as the link carries it moves all the same.

use anyhow::{Context, Result, ensure};
use godwit_lab::LabOptions;
use godwit_lab::trial::{GuestPlan, Trial};
use godwit_qemu::ByteSize;

use crate::move_and_check;

/// 80 MB/s of pages that no encoding makes smaller, all over 48 MiB: three times what 200 Mb/s carry.
const TOO_MUCH: &str = "dirty:rate=20000,ws=48M,order=random,zero=0,compressible=0";

#[test]
fn a_guest_that_writes_more_than_the_link_carries_moves() -> Result<()> {
    let link = Some("200mbit".parse()?);
    let Some(trial) = Trial::begin_with("throttle", LabOptions { link, ..LabOptions::default() })? else {
        return Ok(());
    };
    let plan =
        GuestPlan { workload: TOO_MUCH.to_owned(), fill: ByteSize::from_mib(64), ..GuestPlan::new("web") };
    let mut guest = trial.guest("a", &plan)?;
    let watched = move_and_check(&trial, &mut guest)?;
    let report = &watched.report;
    let throttle = report.throttle.with_context(|| format!("it was not slowed: {report:#?}"))?;
    ensure!(throttle.faults > 0 && throttle.held_ms > 0.0, "{throttle:?}");
    ensure!(report.rounds.iter().any(|round| round.throttled_to_pages_per_s.is_some()), "{report:#?}");
    trial.finish()
}
