//! What is told of a migration while it runs: what each lane carries, and how long the guest takes to answer.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use godwit_lab::LabOptions;
use godwit_lab::trial::{GuestPlan, Trial};

const LIMIT: Duration = Duration::from_secs(180);

#[test]
fn progress_tells_what_lanes_carry_and_how_long_the_guest_takes_to_answer() -> Result<()> {
    // Slow enough that it is told of often.
    let lanes = vec!["400mbit".parse()?, "400mbit".parse()?];
    let Some(trial) = Trial::begin_with("progress", LabOptions { lanes, ..LabOptions::default() })?
    else {
        return Ok(());
    };
    let clean = trial.traces("a")?;
    let mut guest = trial.guest("a", &GuestPlan::new("web"))?;
    let request = guest.to_other_host();
    let mut told = Vec::new();
    let watched = trial
        .migrate_followed(&mut guest, &request, LIMIT, |progress| told.push(progress.clone()))?;
    let trips: Vec<f64> = told.iter().filter_map(|progress| progress.guest_round_trip_ms).collect();
    let longest =
        trips.iter().copied().reduce(f64::max).context("the guest has answered its host never")?;
    eprintln!(
        "  {} times told, the guest took {longest:.1} ms at most, blackout {:.1} ms",
        told.len(),
        watched.report.blackout_ms.unwrap_or_default()
    );
    // Each link is a lane by IPv4 and one by IPv6.
    let lanes = &watched.report.lanes;
    let last = told.iter().rfind(|progress| progress.lanes.len() == lanes.len());
    let last = last.context("not all lanes are ever told")?;
    for (lane, reported) in last.lanes.iter().zip(lanes) {
        ensure!(
            lane.from == reported.from && lane.to == Some(reported.to),
            "{lane:?} is not {reported:?}"
        );
        ensure!(
            lane.bytes > 0 && lane.bytes <= reported.bytes,
            "{lane:?} carried more than {reported:?}"
        );
    }
    ensure!(
        told.iter().any(|progress| progress.lanes.iter().any(|lane| lane.bytes_per_s > 0.0)),
        "no rates"
    );
    trial.expect_traces("a", &clean)?;
    trial.finish()
}
