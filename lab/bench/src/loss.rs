//! Loss of a guest's work while its memory is tracked and sent: a guest that writes memory at a
//! steady rate and computes in the rest of its time, its dirty pages found by scans and by faults
//! in turns. The cost of faults is the difference between the two.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::Args;
use godwit_api::MigrationRequest;
use godwit_lab::trial::{Done, Guest, GuestPlan, Trial};
use godwit_lab::{BitRate, LabOptions};
use godwit_qemu::ByteSize;
use godwit_types::{Outcome, ReferenceUse, Report, TrackingUse};
use serde::Serialize;

use crate::converge::series::Series;
use crate::figures::{Spread, cell};
use crate::machine::Machine;
use crate::results;
use crate::results::as_text;
use crate::switchover::ODD_BYTES;

/// Time for which the guest's undisturbed work is measured before each move.
const UNDISTURBED: Duration = Duration::from_secs(3);
/// Interval at which the guest's work is sampled.
const SAMPLED_EVERY: Duration = Duration::from_millis(100);
/// Greatest loss of its writes by faults.
const GOAL_PERCENT: f64 = 2.0;

/// Options of the scenario.
#[derive(Debug, Clone, Args, Serialize)]
pub(crate) struct Settings {
    /// Moves by each means of finding dirty pages, after a warm-up move
    #[arg(
        long,
        value_name = "N",
        default_value_t = 5,
        value_parser = clap::value_parser!(u32).range(1..),
    )]
    runs: u32,
    /// Rate of the link: the slower, the longer the moves, and the more exact the rates
    #[arg(long, value_name = "RATE", default_value = "1gbit")]
    #[serde(serialize_with = "as_text")]
    link: BitRate,
    /// The guest's memory
    #[arg(long, value_name = "SIZE", default_value = "2GiB")]
    #[serde(serialize_with = "as_text")]
    memory: ByteSize,
    /// Random content in that memory
    #[arg(long, value_name = "SIZE", default_value = "512MiB")]
    #[serde(serialize_with = "as_text")]
    fill: ByteSize,
    /// The guest's workload
    #[arg(
        long,
        value_name = "WORKLOAD",
        default_value = "dirty:rate=5000,ws=256M,order=random,zero=0,compressible=0,compute=yes"
    )]
    workload: String,
    /// Output directory of the JSON file
    #[arg(long, value_name = "DIR", default_value = "out/bench")]
    out: PathBuf,
    /// Fail if the goal is missed
    #[arg(long)]
    check: bool,
}

/// One move. Rates are per second.
#[derive(Debug, Serialize)]
struct Run {
    undisturbed: Rates,
    /// From the start of the tracking until the vCPUs were stopped.
    tracked: Rates,
    report: Report,
}

#[derive(Debug, Clone, Copy, Serialize)]
struct Rates {
    writes: f64,
    rounds: f64,
}

impl Rates {
    fn between(from: (f64, Done), to: (f64, Done)) -> Rates {
        let seconds = (to.0 - from.0) / 1e3;
        let rate = |from: u64, to: u64| to.saturating_sub(from) as f64 / seconds;
        Rates { writes: rate(from.1.writes, to.1.writes), rounds: rate(from.1.rounds, to.1.rounds) }
    }
}

/// Moves by one means.
#[derive(Debug, Serialize)]
struct Row {
    tracking: TrackingUse,
    writes_lost_percent: Option<Spread>,
    computing_lost_percent: Option<Spread>,
    faults: Option<Spread>,
    answering_ms: Option<Spread>,
    /// Moves in which faults named dirty pages to the end.
    by_faults: usize,
    runs: Vec<Run>,
}

impl Row {
    /// `usual`: the guest's rates without a move.
    fn new(tracking: TrackingUse, runs: Vec<Run>, usual: Rates) -> Row {
        let lost = |of: fn(Rates) -> f64| {
            let lost = |run: &Run| 100.0 * (1.0 - of(run.tracked) / of(usual));
            Spread::of(runs.iter().map(lost).filter(|lost| lost.is_finite()))
        };
        let tracked = || runs.iter().filter_map(|run| run.report.tracking.as_ref());
        Row {
            tracking,
            writes_lost_percent: lost(|rates| rates.writes),
            computing_lost_percent: lost(|rates| rates.rounds),
            faults: Spread::of(tracked().map(|tracking| tracking.faults as f64)),
            answering_ms: Spread::of(tracked().map(|tracking| tracking.answering_ms)),
            by_faults: tracked().filter(|tracking| tracking.by_faults_bytes > 0).count(),
            runs,
        }
    }
}

#[derive(Debug, Serialize)]
struct Measured {
    rows: Vec<Row>,
    met: bool,
}

/// Measures, prints, writes. Returns false if the goal was missed and goals are checked.
pub(crate) fn run(settings: &Settings) -> Result<bool> {
    let machine = Machine::ready()?;
    let options = LabOptions { link: Some(settings.link), insecure: true, ..LabOptions::default() };
    let trial = Trial::begin_with("bench", options)?.context("cannot start a lab here")?;
    let plan = GuestPlan {
        memory: vec![ByteSize::from_bytes(settings.memory.bytes().saturating_add(ODD_BYTES))],
        fill: settings.fill,
        ..GuestPlan::new("bench")
    };
    println!(
        "settings  guest of {} and 64 KiB, {} in use, {}; link {}; {} moves each",
        settings.memory, settings.fill, settings.workload, settings.link, settings.runs,
    );
    let mut guest = trial.guest("a", &plan)?;
    guest.workload(&settings.workload)?;
    let means = [TrackingUse::Scans, TrackingUse::Faults];
    let mut runs: [Vec<Run>; 2] = [Vec::new(), Vec::new()];
    for turn in 0..=settings.runs {
        for (tracking, runs) in means.into_iter().zip(&mut runs) {
            let run = measure(&trial, &mut guest, tracking)?;
            if turn > 0 {
                runs.push(run);
            }
        }
    }
    guest.verify().context("at the end")?;
    trial.finish()?;
    // Three seconds say little on a machine with other load: the median of all is compared.
    let median = |of: fn(Rates) -> f64| {
        let all = runs.iter().flatten().map(|run| of(run.undisturbed));
        Spread::of(all).map_or(0.0, |spread| spread.median)
    };
    let usual =
        Rates { writes: median(|rates| rates.writes), rounds: median(|rates| rates.rounds) };
    let row = |(tracking, runs)| Row::new(tracking, runs, usual);
    let rows: Vec<Row> = means.into_iter().zip(runs).map(row).collect();
    let lost = rows.last().and_then(|row| row.writes_lost_percent);
    let met = lost.is_some_and(|lost| lost.median <= GOAL_PERCENT);
    print!("{}", render(&rows));
    let verdict = if met { "met" } else { "missed" };
    println!("  writes lost by faults: goal of {GOAL_PERCENT} % {verdict}");
    results::write(&settings.out, "loss", &machine, settings, &Measured { rows, met })?;
    Ok(met || !settings.check)
}

/// Moves the guest to the other host.
fn measure(trial: &Trial, guest: &mut Guest, tracking: TrackingUse) -> Result<Run> {
    // Its client probes it during the move, which is work for it as well.
    guest.watch()?;
    let sampler = guest.sample(SAMPLED_EVERY)?;
    #[expect(clippy::disallowed_methods, reason = "this time is what is measured")]
    std::thread::sleep(UNDISTURBED);
    let request =
        MigrationRequest { tracking, references: ReferenceUse::None, ..guest.to_other_host() };
    let moved = trial.migrate(guest, &request);
    let samples = sampler.end()?;
    let moved = moved?;
    ensure!(moved.report.outcome == Outcome::Completed, "{:?}", moved.report.error);
    let series = Series::new(Vec::new(), &samples, moved.begun_ns, &moved.report);
    let rates = |from_ms, to_ms| {
        let work = series.work_within(from_ms, to_ms).context("the guest was not seen to work")?;
        anyhow::Ok(Rates::between(work.0, work.1))
    };
    let (tracked_ms, stopped_ms) =
        series.tracked_ms(&moved.report).context("the report has no pause")?;
    let run = Run {
        undisturbed: rates(f64::NEG_INFINITY, 0.0)?,
        tracked: rates(tracked_ms, stopped_ms)?,
        report: moved.report,
    };
    eprintln!(
        "  {tracking:?}: {:.0} of {:.0} writes/s, {:.0} of {:.0} rounds/s, {:.1} s",
        run.tracked.writes,
        run.undisturbed.writes,
        run.tracked.rounds,
        run.undisturbed.rounds,
        run.report.migration_time_ms / 1e3,
    );
    Ok(run)
}

fn render(rows: &[Row]) -> String {
    let mut out = format!(
        "\nwork lost while memory is tracked: medians (least to most)\n  {:<8} {:>5} {:>22} {:>22} \
         {:>20} {:>20}\n",
        "tracking", "kept", "writes lost %", "computing lost %", "faults", "answers ms"
    );
    for row in rows {
        out += &format!(
            "  {:<8} {:>5} {:>22} {:>22} {:>20} {:>20}\n",
            format!("{:?}", row.tracking).to_lowercase(),
            row.by_faults,
            cell(row.writes_lost_percent, 1),
            cell(row.computing_lost_percent, 1),
            cell(row.faults, 0),
            cell(row.answering_ms, 0),
        );
    }
    out
}
