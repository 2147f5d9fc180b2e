//! Progress of a running migration: the rate of each lane, and the guest's response time.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use godwit_lab::LabOptions;
use godwit_lab::trial::{GuestPlan, Trial};

const LIMIT: Duration = Duration::from_secs(180);

#[test]
fn progress_shows_the_rate_of_each_lane_and_the_response_time_of_the_guest() -> Result<()> {
    // Slow enough for many progress reports.
    let lanes = vec!["400mbit".parse()?, "400mbit".parse()?];
    let Some(trial) = Trial::begin_with("progress", LabOptions { lanes, ..LabOptions::default() })?
    else {
        return Ok(());
    };
    let clean = trial.traces("a")?;
    let mut guest = trial.guest("a", &GuestPlan::new("web"))?;
    let request = guest.to_other_host();
    let mut reports = Vec::new();
    let watched = trial
        .migrate_followed(&mut guest, &request, LIMIT, |progress| reports.push(progress.clone()))?;
    let trips: Vec<f64> =
        reports.iter().filter_map(|progress| progress.guest_round_trip_ms).collect();
    let longest =
        trips.iter().copied().reduce(f64::max).context("the guest never answered its host")?;
    eprintln!(
        "  {} progress reports, the guest took {longest:.1} ms at most, blackout {:.1} ms",
        reports.len(),
        watched.report.blackout_ms.unwrap_or_default()
    );
    // Each link is a lane over IPv4 and one over IPv6.
    let lanes = &watched.report.lanes;
    let last = reports.iter().rfind(|progress| progress.lanes.len() == lanes.len());
    let last = last.context("no progress report has all lanes")?;
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
        reports.iter().any(|progress| progress.lanes.iter().any(|lane| lane.bytes_per_s > 0.0)),
        "no progress report has a rate"
    );
    trial.expect_traces("a", &clean)?;
    trial.finish()
}
