//! Moves of a guest that rewrites its memory faster than the link carries it: their duration and
//! the cost for the guest, with the engines taking turns on the same guest and link.

mod cases;
mod measure;
mod picture;
mod recovery;
pub(crate) mod series;
mod table;
mod verdict;

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use clap::Args;
use godwit_lab::trial::{CpusApart, Guest, GuestPlan, MOVE_LIMIT, Trial};
use godwit_lab::{BitRate, LabOptions};
use godwit_qemu::ByteSize;
use godwit_types::Outcome;
use serde::Serialize;

use crate::converge::cases::{Case, Kind, bytes_per_s};
use crate::converge::measure::{Run, judged, measure, summary};
use crate::converge::picture::Column;
use crate::converge::series::Series;
use crate::converge::table::{CaseFigures, Row};
use crate::converge::verdict::Goal;
use crate::machine::Machine;
use crate::results::as_text;
use crate::subject::{Engine, Subject};
use crate::switchover::ODD_BYTES;
use crate::{results, schedule, svg};

/// Folder of pictures in the documentation.
const FIGURES: &str = "figures";

/// Options of the scenario.
#[derive(Debug, Clone, Args, Serialize)]
pub(crate) struct Settings {
    /// Cases to measure
    #[arg(
        long = "case",
        value_name = "NAME",
        value_delimiter = ',',
        default_values = ["rewriting", "computing", "links", "fetching"],
    )]
    cases: Vec<Kind>,
    /// Moves by each engine of each case
    #[arg(
        long,
        value_name = "N",
        default_value_t = 5,
        value_parser = clap::value_parser!(u32).range(1..),
    )]
    runs: u32,
    /// Engines to compare, if a case supports them
    #[arg(
        long = "engine",
        value_delimiter = ',',
        default_values = ["godwit", "godwit-page-in", "auto-converge", "postcopy"],
    )]
    engines: Vec<Engine>,
    /// Link rates of the case `rewriting`
    #[arg(
        long = "link",
        value_name = "RATE",
        value_delimiter = ',',
        default_values = ["200mbit", "1gbit"],
    )]
    #[serde(serialize_with = "all_as_text")]
    links: Vec<BitRate>,
    /// Write rates of the guest in the case `rewriting`, as multiples of the link's rate
    #[arg(long, value_name = "N", value_delimiter = ',', default_values_t = [2, 5, 20])]
    times: Vec<u32>,
    /// Time limit of a move in seconds, after which it is ended and counts as failed
    #[arg(
        long,
        value_name = "N",
        default_value_t = MOVE_LIMIT.as_secs(),
        value_parser = clap::value_parser!(u64).range(1..),
    )]
    limit: u64,
    /// The guest's memory
    #[arg(long, value_name = "SIZE", default_value = "1GiB")]
    #[serde(serialize_with = "as_text")]
    memory: ByteSize,
    /// Random content in that memory
    #[arg(long, value_name = "SIZE", default_value = "512MiB")]
    #[serde(serialize_with = "as_text")]
    fill: ByteSize,
    /// Part of that content that the guest rewrites, at random
    #[arg(long, value_name = "SIZE", default_value = "256MiB")]
    #[serde(serialize_with = "as_text")]
    working_set: ByteSize,
    /// Keep the vCPU on which the guest computes on the upper half of the CPUs, and all else on the
    /// lower half
    #[arg(long)]
    pin: bool,
    /// Output directory of the JSON files and pictures
    #[arg(long, value_name = "DIR", default_value = "out/bench")]
    out: PathBuf,
    /// Documentation folder; the pictures are also written to its `figures`
    #[arg(long, value_name = "DIR")]
    docs: Option<PathBuf>,
    /// Fail if a goal is missed
    #[arg(long)]
    check: bool,
}

fn all_as_text<S: serde::Serializer>(rates: &[BitRate], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(rates.iter().map(ToString::to_string))
}

#[derive(Serialize)]
struct Measured<'a> {
    cases: &'a [CaseFigures],
    goals: &'a [Goal],
    /// Godwit's time over the slower link of the case `links`, divided by its time over the faster
    /// one.
    slower_by_faster: Option<f64>,
}

/// Measures, prints, writes. Returns false if a goal was missed and goals are checked.
pub(crate) fn run(settings: &Settings) -> Result<bool> {
    let machine = Machine::ready()?;
    println!(
        "settings  guest of {} under TCG or KVM as the host can, {} random, of which it rewrites \
         {} whole pages at random; \
         {} moves by each engine and case, in turns, at most {} s each; Godwit over TLS, QEMU in \
         the clear",
        settings.memory, settings.fill, settings.working_set, settings.runs, settings.limit,
    );
    // Everything that is started later inherits the CPUs.
    let apart = settings.pin.then(CpusApart::begin).transpose()?;
    if let Some(CpusApart { computing_cpus, other_cpus, .. }) = apart {
        println!(
            "          pinned: the last vCPU on {computing_cpus}, all else on {other_cpus} CPUs"
        );
    }
    let mut figures = Vec::new();
    for cases in cases::cases(settings)?.chunk_by(Case::shares_lab) {
        for case in in_one_lab(settings, cases, apart)? {
            draw(settings, &case)?;
            figures.push(case);
        }
    }
    let (goals, slower_by_faster) = (verdict::goals(&figures), verdict::slower_by_faster(&figures));
    print!("{}", table::render(&figures, settings.limit));
    print!("{}", verdict::render(&goals, slower_by_faster));
    let measured = Measured { cases: &figures, goals: &goals, slower_by_faster };
    results::write(&settings.out, "converge", &machine, settings, &measured)?;
    Ok(goals.iter().all(|goal| goal.met) || !settings.check)
}

fn in_one_lab(
    settings: &Settings,
    cases: &[Case],
    apart: Option<CpusApart>,
) -> Result<Vec<CaseFigures>> {
    let first = cases.first().context("no case")?;
    let options = LabOptions { link: first.link, ..LabOptions::default() }.for_postcopy();
    let trial = Trial::begin_with("bench", options)?.context("cannot start a lab here")?;
    let plan = GuestPlan {
        memory: vec![ByteSize::from_bytes(settings.memory.bytes().saturating_add(ODD_BYTES))],
        vcpus: first.vcpus,
        fill: settings.fill,
        mix: Some("zero=0,compressible=0".to_owned()),
        ..GuestPlan::new("bench")
    };
    let _pinned = apart.map(|apart| apart.pin(&trial, &plan.name, first.vcpus - 1));
    let mut subject = Subject::new(&trial, plan)?;
    let mut figures = Vec::new();
    for case in cases {
        figures.push(one_case(settings, &mut subject, case)?);
    }
    trial.finish()?;
    Ok(figures)
}

#[expect(clippy::cast_precision_loss, reason = "sizes far below 2^53")]
fn one_case(settings: &Settings, subject: &mut Subject<'_>, case: &Case) -> Result<CaseFigures> {
    subject.work(&case.workload(settings.working_set.bytes()))?;
    let once_ms = case.wire_ms(in_use_bytes(&subject.guest)?);
    let limit = Duration::from_secs(settings.limit);
    let mut runs: Vec<Vec<Option<Run>>> = case.engines.iter().map(|_| Vec::new()).collect();
    for place in schedule::turns(&vec![settings.runs; case.engines.len()]) {
        let run = measure(subject, case.engines[place], limit)?;
        eprintln!("  {}, {}: {}", case.name, case.engines[place].name(), summary(run.as_ref()));
        runs[place].push(run);
    }
    let each = case.engines.iter().zip(judged(runs));
    Ok(CaseFigures {
        case: case.clone(),
        once_ms,
        working_set_ms: case.wire_ms(settings.working_set.bytes() as f64),
        rows: each.map(|(engine, runs)| Row::new(*engine, once_ms, runs)).collect(),
    })
}

/// Returns the memory in use according to the guest's kernel.
#[expect(clippy::cast_precision_loss, reason = "sizes far below 2^53")]
fn in_use_bytes(guest: &Guest) -> Result<f64> {
    let memory = guest.status()?.memory.context("the guest reports no memory use")?;
    Ok(memory.total_bytes.saturating_sub(memory.free_bytes) as f64)
}

/// All series of one engine in one case.
#[derive(Serialize)]
struct EngineSeries<'a> {
    engine: &'static str,
    runs: Vec<&'a Series>,
}

/// Draws a case, with the median move of each engine, and writes the series of all moves beside it.
fn draw(settings: &Settings, figures: &CaseFigures) -> Result<()> {
    let columns: Vec<Column<'_>> = (figures.rows.iter())
        .filter_map(|row| {
            let run = row.median_run()?;
            let took = match run.report.outcome {
                Outcome::Completed => format!("{:.1} s", run.report.migration_time_ms / 1e3),
                Outcome::Cancelled => format!("not moved within {} s", settings.limit),
                Outcome::Failed | Outcome::InDoubt => "failed".to_owned(),
            };
            Some(Column { name: format!("{}: {took}", row.engine), series: &run.series })
        })
        .collect();
    let case = &figures.case;
    let link = case
        .link
        .map_or_else(|| "links as fast as the machine".to_owned(), |link| link.to_string());
    let title = format!(
        "A guest that rewrites {} at {:.0} MB/s if it can{}, over {link}",
        settings.working_set,
        case.pages_per_s * 4096.0 / 1e6,
        if case.computes() { " and computes" } else { "" },
    );
    let picture = picture::render(&title, case.link.map(|link| bytes_per_s(link) / 1e6), &columns);
    let name = format!("converge-{}", case.name);
    let path = svg::write(&settings.out, &name, &picture)?;
    println!("over time: {}", path.display());
    if let Some(docs) = &settings.docs {
        svg::write(&docs.join(FIGURES), &name, &picture)?;
    }
    let mut all = Vec::new();
    for row in &figures.rows {
        all.push(EngineSeries {
            engine: row.engine,
            runs: row.runs.iter().map(|run| &run.series).collect(),
        });
    }
    write_series(&settings.out.join(format!("{name}.json")), &all)
}

fn write_series(path: &Path, all: &[EngineSeries<'_>]) -> Result<()> {
    fs::write(path, serde_json::to_vec(all)?)
        .with_context(|| format!("cannot write {}", path.display()))
}
