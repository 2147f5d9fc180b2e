//! Savings by references: the return of a guest that has changed little, and clones of one guest
//! that are drained to one host. It measures the bytes on the wire, and checks that the guests are
//! intact.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::{Args, ValueEnum};
use godwit_api::MigrationRequest;
use godwit_lab::trial::{Guest, GuestPlan, Trial, other_host};
use godwit_lab::{BitRate, Hooks, LabOptions};
use godwit_qemu::ByteSize;
use godwit_types::{EncodingName, ReferenceUse, Report};
use rustix::process::Signal;
use serde::Serialize;

use crate::figures::{Spread, cell};
use crate::machine::Machine;
use crate::results;
use crate::results::as_text;

/// Maximum bytes of the return, as a fraction of the outbound move's.
const WAY_BACK_SHARE: f64 = 0.1;
/// Maximum bytes of the clones, as a fraction of those without references.
const CLONES_SHARE: f64 = 0.3;
/// First of the address numbers that the lab has for guests.
const FIRST_NUMBER: u8 = 21;

/// Options of the scenario.
#[derive(Debug, Clone, Args, Serialize)]
pub(crate) struct Settings {
    /// Round trips, and drains
    #[arg(
        long,
        value_name = "N",
        default_value_t = 5,
        value_parser = clap::value_parser!(u32).range(1..),
    )]
    runs: u32,
    /// Cases to measure
    #[arg(long = "case", value_delimiter = ',', default_values = ["way-back", "clones"])]
    cases: Vec<Case>,
    /// The link between the hosts
    #[arg(long, value_name = "RATE", default_value = "1gbit")]
    #[serde(serialize_with = "as_text")]
    link: BitRate,
    /// Memory of the guest that returns
    #[arg(long, value_name = "SIZE", default_value = "4GiB")]
    #[serde(serialize_with = "as_text")]
    memory: ByteSize,
    /// Content in that memory
    #[arg(long, value_name = "SIZE", default_value = "3GiB")]
    #[serde(serialize_with = "as_text")]
    fill: ByteSize,
    /// Workload of that guest
    #[arg(long, value_name = "WORKLOAD", default_value = "dirty:rate=200,ws=16M")]
    workload: String,
    /// Time from its arrival to its way back, in seconds; otherwise all digests are waited for
    #[arg(long, value_name = "SECONDS")]
    stay_s: Option<u64>,
    /// Size of the files for retained pages that do not fit in memory (`spill_size`)
    #[arg(long, value_name = "SIZE", default_value = "auto")]
    spill: String,
    /// Number of clones
    #[arg(
        long,
        value_name = "N",
        default_value_t = 12,
        value_parser = clap::value_parser!(u8).range(2..=70),
    )]
    clones: u8,
    /// Memory of each guest
    #[arg(long, value_name = "SIZE", default_value = "384MiB")]
    #[serde(serialize_with = "as_text")]
    clone_memory: ByteSize,
    /// Content in that memory
    #[arg(long, value_name = "SIZE", default_value = "256MiB")]
    #[serde(serialize_with = "as_text")]
    clone_fill: ByteSize,
    /// Output directory of the JSON file
    #[arg(long, value_name = "DIR", default_value = "out/bench")]
    out: PathBuf,
    /// Fail if a goal is missed
    #[arg(long)]
    check: bool,
}

/// What is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Case {
    /// A guest there, and back at once
    WayBack,
    /// Clones of one guest, one after another, without references and with them
    Clones,
}

/// One comparison: bytes without anything to refer to, and with it.
#[derive(Debug, Serialize)]
struct Run {
    plain: Vec<Report>,
    referring: Vec<Report>,
}

#[derive(Debug, Serialize)]
struct Figures {
    case: Case,
    plain_mb: Option<Spread>,
    referring_mb: Option<Spread>,
    /// Bytes with references as a fraction of those without.
    share: Option<Spread>,
    plain_ms: Option<Spread>,
    referring_ms: Option<Spread>,
    goal: f64,
    met: bool,
    runs: Vec<Run>,
}

#[derive(Serialize)]
struct Measured<'a> {
    cases: &'a [Figures],
}

/// Measures, prints, writes. Returns false if a goal was missed and goals are checked.
pub(crate) fn run(settings: &Settings) -> Result<bool> {
    let machine = Machine::ready()?;
    println!(
        "settings  link {}; way back: {} with {} of content, {}; clones: {} of {} with {} of \
         content, idle; all over TLS, content \
         as the lab's guest mixes it (10 % zero, 40 % compressible, the rest random), compression \
         auto",
        settings.link,
        settings.memory,
        settings.fill,
        settings.workload,
        settings.clones,
        settings.clone_memory,
        settings.clone_fill
    );
    let cases =
        settings.cases.iter().map(|case| measure(settings, *case)).collect::<Result<Vec<_>>>()?;
    println!("\nmedians (least to most)\n{}", render(&cases));
    results::write(&settings.out, "references", &machine, settings, &Measured { cases: &cases })?;
    Ok(cases.iter().all(|figures| figures.met) || !settings.check)
}

fn measure(settings: &Settings, case: Case) -> Result<Figures> {
    // The lab's own folders are in memory.
    let agents =
        format!("[references]\nspill_dir = \"/var/tmp\"\nspill_size = \"{}\"\n", settings.spill);
    let hooks = Hooks { settings: agents, ..Hooks::default() };
    let options = LabOptions { link: Some(settings.link), hooks, ..LabOptions::default() };
    let trial = Trial::begin_with("bench", options)?.context("cannot start a lab here")?;
    let guests = boot(settings, case, &trial)?;
    let mut runs = Vec::new();
    for _ in 0..settings.runs {
        // Remains of an earlier run must not count: agents that end free them.
        for host in ["a", "b"] {
            trial.end_agent(host, Signal::TERM)?;
        }
        trial.start_missing()?;
        let run = match case {
            Case::WayBack => way_back(&trial, &guests, settings.stay_s)?,
            Case::Clones => drain(&trial, &guests)?,
        };
        eprintln!(
            "  {case:?}: {:.0} MB, then {:.0} MB, with {} pages of files",
            megabytes(&run.plain),
            megabytes(&run.referring),
            run.referring.iter().map(|report| report.referenced.spilled).sum::<u64>()
        );
        runs.push(run);
    }
    trial.finish()?;
    Ok(figures_of(case, runs))
}

fn boot(settings: &Settings, case: Case, trial: &Trial) -> Result<Vec<Guest>> {
    match case {
        Case::WayBack => {
            let plan = GuestPlan {
                memory: vec![settings.memory],
                fill: settings.fill,
                workload: settings.workload.clone(),
                ..GuestPlan::new("bench")
            };
            Ok(vec![trial.guest("a", &plan)?])
        }
        Case::Clones => (0..settings.clones)
            .map(|clone| {
                let plan = GuestPlan {
                    number: FIRST_NUMBER + clone,
                    memory: vec![settings.clone_memory],
                    fill: settings.clone_fill,
                    ..GuestPlan::new(&format!("clone-{clone}"))
                };
                trial.clone_guest("a", &plan)
            })
            .collect(),
    }
}

/// Moves there, with nothing to refer to, and back.
fn way_back(trial: &Trial, guests: &[Guest], stay_s: Option<u64>) -> Result<Run> {
    let plain = move_all(trial, guests, "a", ReferenceUse::All, None)?;
    let referring = move_all(trial, guests, "b", ReferenceUse::All, stay_s)?;
    Ok(Run { plain, referring })
}

/// Moves all guests to one host without references, back, and once more with them.
fn drain(trial: &Trial, guests: &[Guest]) -> Result<Run> {
    let plain = move_all(trial, guests, "a", ReferenceUse::None, None)?;
    move_all(trial, guests, "b", ReferenceUse::None, None)?;
    let referring = move_all(trial, guests, "a", ReferenceUse::All, None)?;
    // Nothing is kept of the return, so the next run begins as this one did.
    move_all(trial, guests, "b", ReferenceUse::None, None)?;
    Ok(Run { plain, referring })
}

/// Moves guests one after the other to the other host, and checks that they are intact. `stay_s`:
/// when to begin, whether or not all digests are computed.
fn move_all(
    trial: &Trial,
    guests: &[Guest],
    from: &str,
    references: ReferenceUse,
    stay_s: Option<u64>,
) -> Result<Vec<Report>> {
    let mut reports = Vec::new();
    for guest in guests {
        let mut guest = guest.clone();
        from.clone_into(&mut guest.host);
        match stay_s {
            #[expect(clippy::disallowed_methods, reason = "the guest is to stay for a while")]
            Some(seconds) => std::thread::sleep(Duration::from_secs(seconds)),
            None if references == ReferenceUse::All => trial.wait_digested(other_host(from))?,
            None => {}
        }
        let request = MigrationRequest { references, ..guest.to_other_host() };
        let report = trial.move_guest(&mut guest, &request)?.report;
        guest.verify().with_context(|| format!("{} after its move from {from}", guest.name))?;
        ensure!(report.error.is_none(), "{report:#?}");
        reports.push(report);
    }
    Ok(reports)
}

#[expect(clippy::cast_precision_loss, reason = "sizes far below 8 PiB")]
fn megabytes(reports: &[Report]) -> f64 {
    reports.iter().map(|report| report.wire_bytes).sum::<u64>() as f64 / 1e6
}

fn milliseconds(reports: &[Report]) -> f64 {
    reports.iter().map(|report| report.migration_time_ms).sum()
}

fn figures_of(case: Case, runs: Vec<Run>) -> Figures {
    let share =
        Spread::of(runs.iter().map(|run| megabytes(&run.referring) / megabytes(&run.plain)));
    let goal = match case {
        Case::WayBack => WAY_BACK_SHARE,
        Case::Clones => CLONES_SHARE,
    };
    Figures {
        case,
        plain_mb: Spread::of(runs.iter().map(|run| megabytes(&run.plain))),
        referring_mb: Spread::of(runs.iter().map(|run| megabytes(&run.referring))),
        share,
        plain_ms: Spread::of(runs.iter().map(|run| milliseconds(&run.plain))),
        referring_ms: Spread::of(runs.iter().map(|run| milliseconds(&run.referring))),
        goal,
        met: share.is_some_and(|share| share.median <= goal),
        runs,
    }
}

fn render(cases: &[Figures]) -> String {
    let text = |spread: Option<Spread>, factor: f64| cell(spread.map(|of| of.times(factor)), 1);
    let mut lines = vec![format!(
        "  {:<9} {:>24} {:>24} {:>18} {:>22} {:>22} {:>10} {:>8}",
        "case",
        "without, MB",
        "with, MB",
        "share, %",
        "without, s",
        "with, s",
        "by ref, %",
        "missing"
    )];
    for row in cases {
        let referring = || row.runs.iter().flat_map(|run| &run.referring);
        let pages = |only_referenced: bool| -> u64 {
            let encodings = referring().flat_map(|report| &report.encodings);
            let counted = encodings.filter(|encoding| match encoding.name {
                EncodingName::Zero => false,
                EncodingName::Reference => true,
                _ => !only_referenced,
            });
            counted.map(|encoding| encoding.pages).sum()
        };
        let missing: u64 = referring().map(|report| report.missing_pages).sum();
        lines.push(format!(
            "  {:<9} {:>24} {:>24} {:>18} {:>22} {:>22} {:>10} {:>8}",
            format!("{:?}", row.case),
            text(row.plain_mb, 1.0),
            text(row.referring_mb, 1.0),
            text(row.share, 100.0),
            text(row.plain_ms, 1e-3),
            text(row.referring_ms, 1e-3),
            100 * pages(true) / pages(false).max(1),
            missing
        ));
        let verdict = if row.met { "pass" } else { "FAIL" };
        lines.push(format!("  {verdict}  share at most {:.0} %", row.goal * 100.0));
    }
    lines.join("\n")
}
