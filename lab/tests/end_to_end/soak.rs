//! Many moves in a row of a guest that dirties memory at random and checks itself. `GODWIT_SOAK_MOVES` says how many
//! (10); `make soak` makes 200.

use anyhow::{Context, Result, ensure};
use godwit_lab::trial::{Guest, GuestPlan, Trial, Watched, other_host};
use godwit_migration::Report;

use crate::move_and_check;

const DEFAULT_MOVES: u32 = 10;
/// Moves after which agents have opened what they keep open.
const WARM_UP_MOVES: u32 = 4;
/// Files that an agent may have open more than after the warm-up: connections that are just being closed.
const OPEN_FILES_SLACK: usize = 12;

#[test]
fn many_moves_lose_nothing_and_leave_nothing() -> Result<()> {
    let moves = moves()?;
    let Some(trial) = Trial::begin("soak")? else { return Ok(()) };
    let clean = [trial.traces("a")?, trial.traces("b")?];
    let workload = "dirty:rate=5000,order=random,zero=15,compressible=40,touch=words:24".to_owned();
    let mut guest = trial.guest("a", &GuestPlan { workload, ..GuestPlan::new("soak") })?;
    let mut reports: Vec<Report> = Vec::new();
    let mut warm = [usize::MAX; 2];
    for number in 1..=moves {
        let report = one_move(&trial, &mut guest).with_context(|| format!("move {number} of {moves}"))?;
        let left = other_host(&guest.host);
        trial.expect_traces(left, &clean[usize::from(left == "b")])?;
        reports.push(report);
        if number <= WARM_UP_MOVES {
            warm = [trial.agent_open_files("a")?, trial.agent_open_files("b")?];
        }
    }
    for (host, warm) in ["a", "b"].iter().zip(warm) {
        let open = trial.agent_open_files(host)?;
        ensure!(
            open <= warm.saturating_add(OPEN_FILES_SLACK),
            "the agent of host {host} had {warm} files open, and has {open}"
        );
    }
    for (what, of) in [
        ("migration time", (|report| Some(report.migration_time_ms)) as fn(&Report) -> Option<f64>),
        ("switchover", |report| report.switchover_ms),
        ("blackout", |report| report.blackout_ms),
    ] {
        let mut values: Vec<f64> = reports.iter().filter_map(of).collect();
        values.sort_by(f64::total_cmp);
        if let (Some(least), Some(most)) = (values.first(), values.last()) {
            let median = values[values.len() / 2];
            eprintln!(
                "  {what} of {} moves: {least:.1} to {most:.1} ms, median {median:.1} ms",
                values.len()
            );
        }
    }
    trial.delete(&guest.host, "soak")?;
    trial.expect_traces("a", &clean[0])?;
    trial.expect_traces("b", &clean[1])?;
    trial.finish()
}

/// How many moves a soak makes.
pub(crate) fn moves() -> Result<u32> {
    match std::env::var("GODWIT_SOAK_MOVES") {
        Ok(text) => text.parse().context("GODWIT_SOAK_MOVES is no number"),
        Err(_) => Ok(DEFAULT_MOVES),
    }
}

/// One move, checked; and no run of probes may be lost that is longer than the blackout explains.
fn one_move(trial: &Trial, guest: &mut Guest) -> Result<Report> {
    let Watched { report, probes: gaps, .. } = move_and_check(trial, guest)?;
    let longest_ms = gaps.longest_gap_ns.context("no gap")?.div_ceil(1_000_000);
    // A probe a millisecond: as many are lost in a row as the blackout has milliseconds, at most.
    ensure!(gaps.longest_lost_run <= longest_ms, "probes are lost that no blackout explains: {gaps:?}");
    Ok(report)
}
