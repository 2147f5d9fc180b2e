//! Many consecutive moves under random faults. `GODWIT_SOAK_MOVES` sets the number of moves (8),
//! `GODWIT_SOAK_SEED` the seed, and `GODWIT_SOAK_GUESTS` the number of guests that move at once
//! (4). `make soak` makes 1,000 moves of 8 guests. A run prints its seed, which repeats the run.

use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, ensure};
use godwit_lab::faults::{SoakPlan, soak};
use godwit_lab::trial::{Guest, GuestPlan, Trial, Watched, other_host};
use godwit_types::Report;

use crate::move_and_check;

/// Two waves, if nothing is undone.
const DEFAULT_MOVES: u32 = 8;
const DEFAULT_GUESTS: u8 = 4;
/// Moves of a guest that is probed continuously.
const UNDISTURBED_MOVES: u32 = 8;
/// Moves after which agents have opened all files that they keep open.
const WARM_UP_MOVES: u32 = 4;
/// Allowed increase in an agent's open files after the warm-up, for connections that are just being
/// closed.
const OPEN_FILES_SLACK: usize = 12;

#[test]
fn moves_under_faults_lose_nothing_and_leave_nothing() -> Result<()> {
    let plan = SoakPlan {
        moves: moves(DEFAULT_MOVES)?,
        seed: seed()?,
        guests: number("GODWIT_SOAK_GUESTS")?.unwrap_or(DEFAULT_GUESTS),
    };
    eprintln!(
        "  {} moves of seed {} (GODWIT_SOAK_SEED={} repeats them)",
        plan.moves, plan.seed, plan.seed
    );
    if let Some(report) = soak("soak", plan, |wave| eprintln!("  {wave}"))? {
        eprintln!("  {report}");
    }
    Ok(())
}

/// Returns the number of moves of a soak.
pub(crate) fn moves(usually: u32) -> Result<u32> {
    Ok(number("GODWIT_SOAK_MOVES")?.unwrap_or(usually))
}

/// Returns the requested seed, or one from the clock.
pub(crate) fn seed() -> Result<u64> {
    match number("GODWIT_SOAK_SEED")? {
        Some(seed) => Ok(seed),
        None => Ok(SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs()),
    }
}

fn number<T: std::str::FromStr>(variable: &str) -> Result<Option<T>> {
    let Ok(text) = std::env::var(variable) else { return Ok(None) };
    text.parse().ok().map(Some).with_context(|| format!("{variable} is not a valid number"))
}

#[test]
fn undisturbed_moves_lose_no_probe_and_leave_no_file_open() -> Result<()> {
    let moves = UNDISTURBED_MOVES;
    let Some(trial) = Trial::begin("soak-undisturbed")? else { return Ok(()) };
    let clean = [trial.traces("a")?, trial.traces("b")?];
    let workload = "dirty:rate=5000,order=random,zero=15,compressible=40,touch=words:24".to_owned();
    let mut guest = trial.guest("a", &GuestPlan { workload, ..GuestPlan::new("soak") })?;
    let mut reports: Vec<Report> = Vec::new();
    let mut warm = [usize::MAX; 2];
    for number in 1..=moves {
        let report =
            one_move(&trial, &mut guest).with_context(|| format!("move {number} of {moves}"))?;
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

/// Makes one move and checks it. No run of lost probes may be longer than the blackout explains.
fn one_move(trial: &Trial, guest: &mut Guest) -> Result<Report> {
    let Watched { report, probes: gaps, .. } = move_and_check(trial, guest)?;
    let longest_ms = gaps.longest_gap_ns.context("no gap")?.div_ceil(1_000_000);
    // One probe per millisecond, so at most as many are lost in a row as the blackout has
    // milliseconds, and as many more as a late sender sends at once.
    let late_ms = gaps.longest_send_gap_ns.div_ceil(1_000_000);
    ensure!(
        gaps.longest_lost_run <= longest_ms + late_ms,
        "probes are lost that no blackout explains: {gaps:?}"
    );
    Ok(report)
}
