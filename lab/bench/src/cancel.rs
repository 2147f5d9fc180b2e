//! Migrations that an operator cancels, at any moment before the commit: what the guest's users feel of it.

use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use clap::Args;
use godwit_lab::trial::{Guest, GuestPlan, Trial, request_to};

use godwit_lab::{BitRate, LabOptions, clock};
use godwit_migration::{EngineKind, Outcome, Phase, millis};
use godwit_qemu::ByteSize;
use serde::Serialize;

use crate::figures::Spread;
use crate::machine::Machine;
use crate::results::{self, as_text};

/// When to cancel, by the phase that has begun.
const MOMENTS: [Phase; 3] = [Phase::PreCopy, Phase::Convergence, Phase::Switchover];
/// What a cancelled guest may be silent for at most.
const PROMISED_MS: f64 = 100.0;
/// Migrations begun for each one that is to be cancelled, at most: a switchover takes milliseconds, and most are over before the cancel
/// comes.
const MOST_TRIES: u32 = 4;

/// Options of the scenario.
#[derive(Debug, Clone, Args, Serialize)]
pub(crate) struct Settings {
    /// Cancelled migrations of each moment
    #[arg(long, value_name = "N", default_value_t = 9, value_parser = clap::value_parser!(u32).range(1..))]
    runs: u32,
    /// The guest's memory
    #[arg(long, value_name = "SIZE", default_value = "512MiB")]
    #[serde(serialize_with = "as_text")]
    memory: ByteSize,
    /// How much of it is in use
    #[arg(long, value_name = "SIZE", default_value = "256MiB")]
    #[serde(serialize_with = "as_text")]
    fill: ByteSize,
    /// What the guest does meanwhile
    #[arg(
        long,
        value_name = "SPEC",
        default_value = "dirty:rate=5000,ws=64M,order=random,zero=10,compressible=40"
    )]
    workload: String,
    /// The link between the hosts
    #[arg(long, value_name = "RATE", default_value = "1gbit")]
    #[serde(serialize_with = "as_text")]
    link: BitRate,
    /// Where the JSON file goes
    #[arg(long, value_name = "DIR", default_value = "out/bench")]
    out: PathBuf,
    /// Fail where the goal is missed
    #[arg(long)]
    check: bool,
}

/// One cancelled migration.
#[derive(Debug, Clone, Serialize)]
struct Run {
    /// From the command's start until the migration was over.
    over_ms: f64,
    /// The guest's longest silence, from a second before the migration until it was over.
    silence_ms: f64,
    /// How long its vCPUs stood still, where they did.
    stood_still_ms: Option<f64>,
}

/// One moment's.
#[derive(Debug, Serialize)]
struct Part {
    moment: Phase,
    /// Migrations that were over before they could be cancelled.
    too_late: u32,
    runs: Vec<Run>,
    silence_ms: Option<Spread>,
    over_ms: Option<Spread>,
    /// None: nothing could be cancelled in time.
    met: Option<bool>,
}

/// Measures, prints, writes. False where the goal was missed and that was to be checked.
pub(crate) fn run(settings: &Settings) -> Result<bool> {
    let machine = Machine::ready()?;
    println!(
        "settings  guest of {} with {} in use, {}; link {}; {} cancelled migrations a moment, by `godwit migration cancel`\n",
        settings.memory, settings.fill, settings.workload, settings.link, settings.runs
    );
    let options = LabOptions { link: Some(settings.link), ..LabOptions::default() };
    let trial = Trial::begin_with("bench-cancel", options)?.context("no lab can be had here")?;
    let plan = GuestPlan {
        memory: vec![settings.memory],
        fill: settings.fill,
        workload: settings.workload.clone(),
        ..GuestPlan::new("bench")
    };
    let mut guest = trial.guest("a", &plan)?;
    println!(
        "{:12} {:>4} {:>8}  silence of the guest, ms       until it was over, ms",
        "cancelled in", "n", "too late"
    );
    let mut parts = Vec::new();
    for moment in MOMENTS {
        let part = measure(settings, &trial, &mut guest, moment)?;
        println!(
            "{:12} {:4} {:8}  {:30} {}{}",
            moment.name(),
            part.runs.len(),
            part.too_late,
            text(part.silence_ms),
            text(part.over_ms),
            if part.met == Some(false) { "  MISSED" } else { "" },
        );
        parts.push(part);
    }
    guest.verify()?;
    trial.finish()?;
    results::write(&settings.out, "cancel", &machine, settings, &serde_json::json!({ "parts": parts }))?;
    Ok(parts.iter().all(|part| part.met != Some(false)) || !settings.check)
}

fn text(spread: Option<Spread>) -> String {
    spread.map_or("-".to_owned(), |spread| {
        format!("{:.1} ({:.1} to {:.1})", spread.median, spread.min, spread.max)
    })
}

fn measure(settings: &Settings, trial: &Trial, guest: &mut Guest, moment: Phase) -> Result<Part> {
    let (mut runs, mut too_late) = (Vec::new(), 0);
    for _ in 0..settings.runs * MOST_TRIES {
        match cancel_in(trial, guest, moment)? {
            Some(run) => runs.push(run),
            None => too_late += 1,
        }
        if runs.len() == settings.runs as usize {
            break;
        }
    }
    let silence_ms = Spread::of(runs.iter().map(|run| run.silence_ms));
    let over_ms = Spread::of(runs.iter().map(|run| run.over_ms));
    let met = silence_ms.map(|spread| spread.max <= PROMISED_MS);
    Ok(Part { moment, too_late, runs, silence_ms, over_ms, met })
}

/// One migration that is cancelled as soon as that phase is told; none: it was over by then.
fn cancel_in(trial: &Trial, guest: &mut Guest, moment: Phase) -> Result<Option<Run>> {
    let request = guest.to_other_host();
    let since_ns = guest.watch()?;
    let mut migration =
        trial.begin_migration(&guest.name, &guest.host, &request_to(&request.to, EngineKind::Godwit))?;
    migration.until(|progress| progress.phase >= moment && progress.sent_bytes > 0)?;
    let asked = Instant::now();
    // Refused where it is over by now.
    trial.godwit(&["migration", "cancel", &migration.id])?;
    let report = migration.report()?;
    let over_ms = millis(asked.elapsed());
    if report.outcome == Outcome::Completed {
        guest.host = request.to;
    }
    let until_ns = guest.wait_answer()?.max(clock::monotonic_ns());
    let gaps = guest.gaps(since_ns, until_ns)?;
    guest.unwatch()?;
    match report.outcome {
        Outcome::Cancelled => {}
        Outcome::Completed => return Ok(None),
        Outcome::Failed | Outcome::InDoubt => bail!("{report:#?}"),
    }
    #[expect(
        clippy::cast_precision_loss,
        reason = "a gap is shorter than the 104 days that f64 holds exactly"
    )]
    let silence_ms = gaps.longest_gap_ns.unwrap_or(until_ns - since_ns) as f64 / 1e6;
    Ok(Some(Run { over_ms, silence_ms, stood_still_ms: report.switchover_ms }))
}
