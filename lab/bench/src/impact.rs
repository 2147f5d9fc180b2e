//! Loss of a guest's own work while it is moved over an otherwise idle link: a guest that computes
//! all the time, with the engines taking turns.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use clap::Args;
use godwit_lab::trial::{Guest, GuestPlan, Trial};
use godwit_lab::{BitRate, LabOptions};
use godwit_qemu::ByteSize;
use godwit_types::Outcome;
use serde::Serialize;

use crate::figures::{Spread, cell};
use crate::machine::Machine;
use crate::results::as_text;
use crate::subject::{Engine, Subject};
use crate::switchover::ODD_BYTES;
use crate::{results, schedule};

/// Time for which the guest's undisturbed work is measured before each move.
const UNDISTURBED: Duration = Duration::from_secs(3);

/// Options of the scenario.
#[derive(Debug, Clone, Args, Serialize)]
pub(crate) struct Settings {
    /// Moves by each engine
    #[arg(
        long,
        value_name = "N",
        default_value_t = 5,
        value_parser = clap::value_parser!(u32).range(1..),
    )]
    runs: u32,
    /// Engines to compare
    #[arg(long = "engine", value_delimiter = ',', default_values = ["godwit", "qemu", "multifd-4"])]
    engines: Vec<Engine>,
    /// Rate of the link
    #[arg(long, value_name = "RATE", default_value = "1gbit")]
    #[serde(serialize_with = "as_text")]
    link: BitRate,
    /// The guest's memory
    #[arg(long, value_name = "SIZE", default_value = "1GiB")]
    #[serde(serialize_with = "as_text")]
    memory: ByteSize,
    /// Random content in that memory
    #[arg(long, value_name = "SIZE", default_value = "512MiB")]
    #[serde(serialize_with = "as_text")]
    fill: ByteSize,
    /// Output directory of the JSON file
    #[arg(long, value_name = "DIR", default_value = "out/bench")]
    out: PathBuf,
}

/// One move.
#[derive(Debug, Serialize)]
struct Run {
    /// Rounds of its computation per second without a migration.
    undisturbed_per_s: f64,
    /// Rounds of its computation per second from the migration's request to the first answer after
    /// its report.
    moving_per_s: f64,
    took_ms: f64,
}

impl Run {
    /// Returns the fraction of the work that was lost.
    fn lost(&self) -> f64 {
        1.0 - self.moving_per_s / self.undisturbed_per_s
    }
}

#[derive(Debug, Serialize)]
struct Figures {
    name: &'static str,
    failed: usize,
    lost_percent: Option<Spread>,
    migration_ms: Option<Spread>,
    runs: Vec<Run>,
}

#[derive(Serialize)]
struct Measured<'a> {
    engines: &'a [Figures],
}

/// Measures, prints, writes.
pub(crate) fn run(settings: &Settings) -> Result<bool> {
    let machine = Machine::ready()?;
    let options = LabOptions { link: Some(settings.link), ..LabOptions::default() };
    let trial = Trial::begin_with("bench", options)?.context("cannot start a lab here")?;
    let plan = GuestPlan {
        memory: vec![ByteSize::from_bytes(settings.memory.bytes().saturating_add(ODD_BYTES))],
        fill: settings.fill,
        mix: Some("zero=0,compressible=0".to_owned()),
        workload: "compute".to_owned(),
        ..GuestPlan::new("bench")
    };
    let mut subject = Subject::new(&trial, plan)?;
    println!(
        "settings  guest of {} that computes on its one vCPU ({}), {} of it random; link {}; {} \
         moves by each engine; Godwit over TLS",
        settings.memory,
        trial.vm("a", "bench")?.accel,
        settings.fill,
        settings.link,
        settings.runs,
    );
    let mut runs: Vec<Vec<Option<Run>>> = settings.engines.iter().map(|_| Vec::new()).collect();
    for place in schedule::turns(&vec![settings.runs; settings.engines.len()]) {
        let run = measure(&mut subject, settings.engines[place])?;
        let lost = run
            .as_ref()
            .map_or_else(|| "failed".to_owned(), |run| format!("{:.1} %", 100.0 * run.lost()));
        eprintln!("  {}: {lost}", settings.engines[place].name());
        runs[place].push(run);
    }
    trial.finish()?;
    let figures: Vec<Figures> = settings
        .engines
        .iter()
        .zip(runs)
        .map(|(engine, runs)| figures_of(engine.name(), runs))
        .collect();
    print!("{}", render(&figures));
    results::write(&settings.out, "impact", &machine, settings, &Measured { engines: &figures })?;
    Ok(true)
}

/// Moves the guest once with one engine. Returns `None` if it failed.
fn measure(subject: &mut Subject<'_>, engine: Engine) -> Result<Option<Run>> {
    // Its client probes it during the move, which is work for it as well.
    subject.guest.watch()?;
    let undisturbed_per_s = work_during(&subject.guest, || {
        #[expect(clippy::disallowed_methods, reason = "this time is what is measured")]
        std::thread::sleep(UNDISTURBED);
        Ok(())
    })?;
    let (begun, before) = (Instant::now(), subject.guest.status()?.iterations);
    let Some(watched) = subject.move_by(engine, |request| request)? else { return Ok(None) };
    let after = subject.guest.status()?.iterations;
    let moving_per_s = per_second(before, after, begun.elapsed());
    let completed = watched.report.outcome == Outcome::Completed;
    let took_ms = watched.report.migration_time_ms;
    Ok(completed.then_some(Run { undisturbed_per_s, moving_per_s, took_ms }))
}

/// Returns the guest's work per second meanwhile.
fn work_during(guest: &Guest, meanwhile: impl FnOnce() -> Result<()>) -> Result<f64> {
    let (begun, before) = (Instant::now(), guest.status()?.iterations);
    meanwhile()?;
    Ok(per_second(before, guest.status()?.iterations, begun.elapsed()))
}

#[expect(clippy::cast_precision_loss, reason = "counts far below 2^53")]
fn per_second(before: u64, after: u64, took: Duration) -> f64 {
    after.saturating_sub(before) as f64 / took.as_secs_f64()
}

fn figures_of(name: &'static str, moves: Vec<Option<Run>>) -> Figures {
    let failed = moves.iter().filter(|run| run.is_none()).count();
    let runs: Vec<Run> = moves.into_iter().flatten().collect();
    Figures {
        name,
        failed,
        lost_percent: Spread::of(runs.iter().map(|run| 100.0 * run.lost())),
        migration_ms: Spread::of(runs.iter().map(|run| run.took_ms)),
        runs,
    }
}

fn render(figures: &[Figures]) -> String {
    let mut out = String::from("\nwork lost during the move: medians (least to most)\n");
    out += &format!(
        "  {:<10} {:>6} {:>24} {:>24}\n",
        "engine", "failed", "work lost %", "migration ms"
    );
    for row in figures {
        let (lost, took) = (cell(row.lost_percent, 1), cell(row.migration_ms, 0));
        out += &format!("  {:<10} {:>6} {lost:>24} {took:>24}\n", row.name, row.failed);
    }
    out
}
