//! Lanes and streams: an idle guest of random pages moves over shaped links. The wire rate of its
//! first round is compared with what iperf3 achieves on the same links, in turns.

mod cases;
mod table;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::Args;
use clap::builder::PossibleValuesParser;
use godwit_api::MigrationRequest;
use godwit_lab::LabOptions;
use godwit_lab::iperf::Iperf;
use godwit_lab::trial::{Guest, GuestPlan, Trial, other_host};
use godwit_qemu::ByteSize;
use godwit_types::{Outcome, Report};
use serde::Serialize;

use crate::figures::Spread;
use crate::lanes::cases::{BASE, Case, Goal, Links};
use crate::machine::Machine;
use crate::plot::Line;
use crate::results::as_text;
use crate::{plot, results, schedule};

/// Content that no encoding can make smaller, so that only the link is measured.
const MIX: &str = "zero=0,compressible=0";

/// Options of the scenario.
#[derive(Debug, Clone, Args, Serialize)]
pub(crate) struct Settings {
    /// Cases; one that is compared with one-gbit includes it [default: all]
    #[arg(
        long = "case",
        value_name = "NAME",
        value_delimiter = ',',
        value_parser = PossibleValuesParser::new(cases::names()),
    )]
    cases: Vec<String>,
    /// Moves of each case, after a warm-up move in each lab
    #[arg(
        long,
        value_name = "N",
        default_value_t = 5,
        value_parser = clap::value_parser!(u32).range(1..),
    )]
    runs: u32,
    /// The guest's memory
    #[arg(long, value_name = "SIZE", default_value = "1GiB")]
    #[serde(serialize_with = "as_text")]
    memory: ByteSize,
    /// Part of that memory in use, filled at random
    #[arg(long, value_name = "SIZE", default_value = "768MiB")]
    #[serde(serialize_with = "as_text")]
    fill: ByteSize,
    /// The guest's memory if the lanes carry 4 Gb/s or more
    #[arg(long, value_name = "SIZE", default_value = "4GiB")]
    #[serde(serialize_with = "as_text")]
    large_memory: ByteSize,
    /// Part of that memory in use
    #[arg(long, value_name = "SIZE", default_value = "3GiB")]
    #[serde(serialize_with = "as_text")]
    large_fill: ByteSize,
    /// Duration of iperf3 before each move in seconds, after a second that is not counted
    #[arg(
        long,
        value_name = "N",
        default_value_t = 3,
        value_parser = clap::value_parser!(u32).range(1..),
    )]
    iperf_seconds: u32,
    /// Encrypt Godwit's data
    #[arg(long)]
    tls: bool,
    /// Output directory of the JSON file
    #[arg(long, value_name = "DIR", default_value = "out/bench")]
    out: PathBuf,
    /// Fail if a goal is missed
    #[arg(long)]
    check: bool,
}

/// One move, and what the links carried just before it.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Run {
    carried_bits_per_s: f64,
    report: Report,
}

#[derive(Debug, Clone, Serialize)]
pub(crate) struct CaseFigures {
    pub(crate) case: Case,
    /// Number of moves that did not complete: they are not part of the figures.
    pub(crate) failed: usize,
    /// Round 0: bytes on the wire divided by its duration.
    pub(crate) wire_bits_per_s: Option<Spread>,
    /// Rate that iperf3's receivers counted.
    pub(crate) carried_bits_per_s: Option<Spread>,
    pub(crate) migration_ms: Option<Spread>,
    pub(crate) runs: Vec<Run>,
}

impl CaseFigures {
    fn new(case: Case, runs: Vec<Run>) -> CaseFigures {
        let completed = || runs.iter().filter(|run| run.report.outcome == Outcome::Completed);
        CaseFigures {
            case,
            failed: runs.len() - completed().count(),
            wire_bits_per_s: Spread::of(completed().filter_map(|run| wire_bits_per_s(&run.report))),
            carried_bits_per_s: Spread::of(runs.iter().map(|run| run.carried_bits_per_s)),
            migration_ms: Spread::of(completed().map(|run| run.report.migration_time_ms)),
            runs,
        }
    }

    /// Returns the median wire rate as a fraction of what the links carry, taken as iperf3's best
    /// result: a machine with other load shows a link smaller than it is, never larger.
    pub(crate) fn share(&self) -> Option<f64> {
        Some(self.wire_bits_per_s?.median / self.carried_bits_per_s?.max)
    }

    /// Returns the median wire rate as a fraction of the links' rate without headers.
    pub(crate) fn share_on_paper(&self) -> Option<f64> {
        Some(self.wire_bits_per_s?.median / self.case.links.on_paper())
    }
}

/// Returns the first round's rate on the wire.
#[expect(clippy::cast_precision_loss, reason = "below 8 PiB")]
fn wire_bits_per_s(report: &Report) -> Option<f64> {
    let round = report.rounds.iter().find(|round| round.round == 0)?;
    (round.duration_ms > 0.0).then(|| round.bytes as f64 * 8e3 / round.duration_ms)
}

/// Contents of the JSON file.
#[derive(Debug, Serialize)]
struct Measured<'a> {
    accel: &'a str,
    cases: &'a [CaseFigures],
    goals: &'a [Goal],
}

/// Measures, prints, writes. Returns false if a goal was missed and goals are checked.
pub(crate) fn run(settings: &Settings) -> Result<bool> {
    let machine = Machine::ready()?;
    println!(
        "settings  idle guest of {} with {} in use at random ({} with {} from 4 Gb/s on), 1 vCPU; \
         {} runs per case; \
         Godwit's default streams unless the case sets them; iperf3 for {} s before each move; {}",
        settings.memory,
        settings.fill,
        settings.large_memory,
        settings.large_fill,
        settings.runs,
        settings.iperf_seconds,
        if settings.tls { "over TLS" } else { "in the clear" },
    );
    let chosen = cases::chosen(&settings.cases);
    let mut accel = String::new();
    let mut figures = Vec::new();
    for cases in chosen.chunk_by(|one, other| one.links == other.links) {
        accel = measure_links(settings, cases, &mut figures)?;
    }
    let base = figures.iter().find(|case| case.case.name == BASE);
    let goals: Vec<Goal> = figures.iter().map(|case| cases::goal(case, base)).collect();
    print!("{}", table::render(&figures, &goals));
    plot(settings, base)?;
    let measured = Measured { accel: &accel, cases: &figures, goals: &goals };
    results::write(&settings.out, "lanes", &machine, settings, &measured)?;
    Ok(goals.iter().all(|goal| goal.met) || !settings.check)
}

/// Plots bandwidth over time of the base's median move, if it was measured.
fn plot(settings: &Settings, base: Option<&CaseFigures>) -> Result<()> {
    let Some(base) = base else { return Ok(()) };
    let lines: Vec<Line> =
        Line::of_median("godwit", base.runs.iter().map(|run| &run.report)).into_iter().collect();
    let link_gbit = base.case.links.lanes.iter().copied().map(plot::gbit).sum();
    let title = format!(
        "An idle guest, {} of {} random, over {}",
        settings.fill, settings.memory, base.case.links
    );
    plot::write(&settings.out, "lanes", &title, link_gbit, &lines)
}

/// Measures the cases in turns, in one lab with one guest. Returns what the guest ran on.
fn measure_links(
    settings: &Settings,
    cases: &[Case],
    figures: &mut Vec<CaseFigures>,
) -> Result<String> {
    let links = &cases.first().context("no case")?.links;
    let trial =
        Trial::begin_with("bench", lab_of(settings, links))?.context("cannot start a lab here")?;
    let (memory, fill) = if links.large_guest {
        (settings.large_memory, settings.large_fill)
    } else {
        (settings.memory, settings.fill)
    };
    let plan = GuestPlan {
        memory: vec![memory],
        fill,
        mix: Some(MIX.to_owned()),
        ..GuestPlan::new("bench")
    };
    let mut guest = trial.guest("a", &plan)?;
    let accel = trial.vm("a", "bench")?.accel;
    eprintln!("{links}: guest of {memory} by {accel}");
    if let Some(error) = move_guest(&trial, &mut guest, None)?.error {
        bail!("the first move over {links} did not complete: {} ({})", error.message, error.remedy);
    }
    let mut runs: Vec<Vec<Run>> = vec![Vec::new(); cases.len()];
    for place in schedule::turns(&vec![settings.runs; cases.len()]) {
        let run = measure(settings, &trial, &mut guest, &cases[place])?;
        runs[place].push(run);
    }
    guest.verify().context("the guest at the end")?;
    trial.finish()?;
    figures.extend(cases.iter().zip(runs).map(|(case, runs)| CaseFigures::new(case.clone(), runs)));
    Ok(accel)
}

fn lab_of(settings: &Settings, links: &Links) -> LabOptions {
    let Links { lanes, family, rtt, flow_cap, .. } = links.clone();
    LabOptions { lanes, family, rtt, flow_cap, insecure: !settings.tls, ..LabOptions::default() }
}

/// Measures what the links carry towards the other host, then a move there.
fn measure(settings: &Settings, trial: &Trial, guest: &mut Guest, case: &Case) -> Result<Run> {
    let to = other_host(&guest.host);
    let iperf = Iperf {
        from: &trial.namespace(&guest.host),
        to: &trial.namespace(to),
        addresses: &trial.lane_addresses(to)?,
        streams: case.iperf_streams,
        duration: Duration::from_secs(settings.iperf_seconds.into()),
        omitted: Duration::from_secs(1),
        congestion: None,
    };
    let carried_bits_per_s = iperf.goodput()?;
    let report = move_guest(trial, guest, case.streams)?;
    eprintln!(
        "  {} to {to}: {:.0} ms, wire {:.3} Gb/s, iperf3 {:.3} Gb/s{}",
        case.name,
        report.migration_time_ms,
        wire_bits_per_s(&report).unwrap_or(f64::NAN) / 1e9,
        carried_bits_per_s / 1e9,
        report.error.as_ref().map(|error| format!(": {}", error.message)).unwrap_or_default(),
    );
    Ok(Run { carried_bits_per_s, report })
}

/// Moves the guest to the other host without probing it meanwhile: probes cost an emulated guest a
/// core.
fn move_guest(trial: &Trial, guest: &mut Guest, streams: Option<u32>) -> Result<Report> {
    let request = MigrationRequest { streams, ..guest.to_other_host() };
    let report = trial.begin_migration(&guest.name, &guest.host, &request)?.report()?;
    if report.outcome == Outcome::Completed {
        guest.host.clone_from(&request.to);
    }
    Ok(report)
}
