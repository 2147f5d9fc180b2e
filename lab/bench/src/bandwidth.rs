//! Speed of moving guest memory when no link is the limit: an idle guest full of random content,
//! with the engines and iperf3 taking turns, unencrypted and over TLS.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::{Args, ValueEnum};
use godwit_api::MigrationRequest;
use godwit_lab::LabOptions;
use godwit_lab::iperf::Iperf;
use godwit_lab::trial::{GuestPlan, Trial, Watched, other_host};
use godwit_qemu::ByteSize;
use godwit_types::{EngineKind, Outcome, Report};
use serde::Serialize;

use crate::cpu::{CpuUse, CpuWatch};
use crate::figures::{Spread, cell, dash};
use crate::footprint::Footprint;
use crate::machine::Machine;
use crate::results::as_text;
use crate::subject::{Engine, Subject};
use crate::switchover::ODD_BYTES;
use crate::{results, schedule, warm};

/// Minimum multiple of QEMU's best rate.
const TIMES_QEMU: f64 = 3.3;
/// Minimum fraction of what iperf3 moves with as many streams.
const SHARE_OF_IPERF: f64 = 0.7;
/// Minimum fraction of the unencrypted rate over TLS.
const TLS_SHARE: f64 = 0.72;
/// Maximum memory that the engine takes on a host, without configured caches: this much, and a
/// fraction of the guest's memory.
const ENGINE_BYTES: u64 = 32 << 20;
const ENGINE_SHARE: f64 = 0.002;
/// Time for which iperf3 sends, after a second that is not counted.
const IPERF_TIME: Duration = Duration::from_secs(2);

/// Options of the scenario.
#[derive(Debug, Clone, Args, Serialize)]
pub(crate) struct Settings {
    /// Moves by each engine, after a warm-up move
    #[arg(
        long,
        value_name = "N",
        default_value_t = 5,
        value_parser = clap::value_parser!(u32).range(1..),
    )]
    runs: u32,
    /// Engines to compare
    #[arg(
        long = "engine",
        value_delimiter = ',',
        default_values = ["godwit", "qemu", "multifd-2", "multifd-4", "multifd-8"],
    )]
    engines: Vec<Engine>,
    /// Protection of Godwit's data, each in a separate lab (QEMU's data is never encrypted here)
    #[arg(long, value_delimiter = ',', default_values = ["clear", "tls"])]
    protection: Vec<Protection>,
    /// Godwit's streams per lane [default: as many as increase the rate]
    #[arg(long, value_name = "N")]
    streams: Option<u32>,
    /// The guest's memory (64 KiB more, without which QEMU before 9.0 loses writes under TCG)
    #[arg(long, value_name = "SIZE", default_value = "4GiB")]
    #[serde(serialize_with = "as_text")]
    memory: ByteSize,
    /// Random content in that memory
    #[arg(long, value_name = "SIZE", default_value = "3GiB")]
    #[serde(serialize_with = "as_text")]
    fill: ByteSize,
    /// Output directory of the JSON file
    #[arg(long, value_name = "DIR", default_value = "out/bench")]
    out: PathBuf,
    /// Fail if a goal is missed
    #[arg(long)]
    check: bool,
}

/// How Godwit's streams are protected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
enum Protection {
    /// None
    Clear,
    /// TLS 1.3
    Tls,
}

/// One move, and the engine's use of memory and CPUs.
struct Moved {
    watched: Watched,
    engine_bytes: Option<u64>,
    cpu: CpuUse,
}

/// Figures of one engine, or of iperf3.
#[derive(Debug, Serialize)]
struct Figures {
    name: String,
    failed: usize,
    migration_ms: Option<Spread>,
    /// The guest's content divided by the duration of the migration, MB/s.
    guest_mb_per_s: Option<Spread>,
    /// Bytes of round 0 divided by its duration, MB/s; for iperf3 its own figure.
    wire_mb_per_s: Option<Spread>,
    /// Number of data streams of the last move.
    streams: Option<u32>,
    /// Growth of the anonymous memory of the agent that took most, MiB.
    engine_mib: Option<Spread>,
    /// User and system time of agent and QEMU for each GiB of the guest's content, the guest's own
    /// included, seconds.
    source_cpu_s_a_gib: Option<Spread>,
    destination_cpu_s_a_gib: Option<Spread>,
    runs: Vec<Watched>,
}

#[derive(Debug, Serialize)]
struct Part {
    protection: Protection,
    figures: Vec<Figures>,
}

/// Promise and result.
#[derive(Debug, Serialize)]
struct Goal {
    what: String,
    at_least: f64,
    found: Option<f64>,
    met: bool,
}

/// Contents of the JSON file.
#[derive(Serialize)]
struct Measured<'a> {
    parts: &'a [Part],
    goals: &'a [Goal],
    /// CPU seconds a GiB, of both ends together, that Godwit takes more over TLS.
    tls_cpu_s_a_gib: Option<f64>,
}

/// Measures, prints, writes. Returns false if a goal was missed and goals are checked.
pub(crate) fn run(settings: &Settings) -> Result<bool> {
    let machine = Machine::ready()?;
    let mut parts = Vec::new();
    for protection in &settings.protection {
        parts.push(measure(settings, *protection)?);
    }
    let goals = goals(&parts, settings.memory.bytes());
    for goal in &goals {
        let found = goal.found.map_or_else(dash, |found| format!("{found:.2}"));
        let verdict = if goal.met { "pass" } else { "FAIL" };
        println!("  {verdict}  {} at least {}: {found}", goal.what, goal.at_least);
    }
    let tls_cpu_s_a_gib = tls_cpu(&parts);
    if let Some(seconds) = tls_cpu_s_a_gib {
        println!("        TLS takes {seconds:.2} s of CPU a GiB, both ends together");
    }
    let measured = Measured { parts: &parts, goals: &goals, tls_cpu_s_a_gib };
    results::write(&settings.out, "bandwidth", &machine, settings, &measured)?;
    Ok(goals.iter().all(|goal| goal.met) || !settings.check)
}

/// Measures all engines in turns, in one lab with one guest.
fn measure(settings: &Settings, protection: Protection) -> Result<Part> {
    let insecure = protection == Protection::Clear;
    let options = LabOptions { insecure, ..LabOptions::default() };
    let trial = Trial::begin_with("bench", options)?.context("cannot start a lab here")?;
    let memory = ByteSize::from_bytes(settings.memory.bytes().saturating_add(ODD_BYTES));
    let plan = GuestPlan {
        memory: vec![memory],
        fill: settings.fill,
        mix: Some("zero=0,compressible=0".to_owned()),
        ..GuestPlan::new("bench")
    };
    let mut subject = Subject::new(&trial, plan)?;
    println!(
        "settings  idle guest of {} and 64 KiB, {} of it random, 1 vCPU by {}; link as fast as \
         the machine; the destination's memory \
         touched before each move; {}",
        settings.memory,
        settings.fill,
        trial.vm("a", "bench")?.accel,
        if insecure { "all in the clear" } else { "Godwit over TLS, QEMU and iperf3 in the clear" },
    );
    // Encryption makes a difference only for Godwit.
    let engines: Vec<Engine> = (settings.engines.iter().copied())
        .filter(|engine| insecure || *engine == Engine::Godwit)
        .collect();
    let mut runs: Vec<Vec<Option<Moved>>> = engines.iter().map(|_| Vec::new()).collect();
    let mut wire = Vec::new();
    let move_by =
        |subject: &mut Subject<'_>, engine: Engine| move_by(&trial, subject, engine, settings);
    for engine in &engines {
        move_by(&mut subject, *engine).context("warming up")?;
    }
    for place in schedule::turns(&vec![settings.runs; engines.len()]) {
        let run = move_by(&mut subject, engines[place])?;
        if let Some(run) = &run {
            let report = &run.watched.report;
            eprintln!("  {}: {:.0} ms", engines[place].name(), report.migration_time_ms);
            if engines[place] == Engine::Godwit {
                wire.push(iperf_with(&trial, streams_of(report))?);
            }
        }
        runs[place].push(run);
    }
    subject.guest.verify().context("at the end")?;
    trial.finish()?;
    let mut figures: Vec<Figures> = (engines.iter().zip(runs))
        .map(|(engine, runs)| figures_of(engine.name(), settings.fill.bytes(), runs))
        .collect();
    figures.push(Figures {
        name: "iperf3".to_owned(),
        failed: 0,
        migration_ms: None,
        guest_mb_per_s: None,
        wire_mb_per_s: Spread::of(wire),
        streams: figures.first().and_then(|ours| ours.streams),
        engine_mib: None,
        source_cpu_s_a_gib: None,
        destination_cpu_s_a_gib: None,
        runs: Vec::new(),
    });
    let part = Part { protection, figures };
    print!("{}", render(&part));
    Ok(part)
}

/// Moves the guest to memory that was touched right before.
fn move_by(
    trial: &Trial,
    subject: &mut Subject<'_>,
    engine: Engine,
    settings: &Settings,
) -> Result<Option<Moved>> {
    let (name, from) = (subject.guest.name.clone(), subject.guest.host.clone());
    let to = other_host(&from);
    // The move is over before memory that is free is cold.
    drop(warm::memory(trial, to, settings.fill.bytes())?);
    let with_streams = |request: MigrationRequest| match request.engine {
        EngineKind::Godwit => MigrationRequest { streams: settings.streams, ..request },
        EngineKind::Qemu => request,
    };
    let footprint = Footprint::begin(trial)?;
    let cpu = CpuWatch::begin(trial, &[&name], &from, to)?;
    let watched = subject.move_by(engine, with_streams)?;
    let cpu = cpu.end()?;
    Ok(watched.map(|watched| Moved { watched, engine_bytes: footprint.end(), cpu }))
}

fn streams_of(report: &Report) -> u32 {
    report.lanes.iter().map(|lane| lane.streams).sum::<u32>().max(1)
}

/// Measures iperf3 between the two hosts, MB/s.
fn iperf_with(trial: &Trial, streams: u32) -> Result<f64> {
    let info = trial.ask(trial.agent("b").host())?;
    let address = *info.migration_addresses.first().context("host b has no migration address")?;
    let (from, to) = (trial.namespace("a"), trial.namespace("b"));
    let iperf = Iperf {
        from: &from,
        to: &to,
        addresses: &[address],
        streams,
        duration: IPERF_TIME,
        omitted: Duration::from_secs(1),
        congestion: None,
    };
    Ok(iperf.goodput()? / 8e6)
}

#[expect(clippy::cast_precision_loss, reason = "sizes far below 8 PiB")]
fn figures_of(name: &str, fill_bytes: u64, moves: Vec<Option<Moved>>) -> Figures {
    let is_completed = |moved: &Moved| moved.watched.report.outcome == Outcome::Completed;
    let failed = moves.iter().filter(|moved| !moved.as_ref().is_some_and(is_completed)).count();
    let moves: Vec<Moved> = moves.into_iter().flatten().collect();
    let gib = f64::from(1 << 30);
    let engine = moves.iter().filter_map(|moved| moved.engine_bytes);
    let engine_mib = Spread::of(engine.map(|bytes| bytes as f64 / f64::from(1 << 20)));
    let cpu = |end: fn(&CpuUse) -> f64| {
        let completed = moves.iter().filter(|&moved| is_completed(moved));
        Spread::of(completed.map(|moved| end(&moved.cpu) / (fill_bytes as f64 / gib)))
    };
    let source_cpu_s_a_gib = cpu(|cpu| cpu.source_s);
    let destination_cpu_s_a_gib = cpu(|cpu| cpu.destination_s);
    let runs: Vec<Watched> = moves.into_iter().map(|moved| moved.watched).collect();
    let completed =
        || runs.iter().map(|run| &run.report).filter(|report| report.outcome == Outcome::Completed);
    // Bytes per millisecond are kB/s.
    let guest = |report: &Report| fill_bytes as f64 / report.migration_time_ms / 1e3;
    let round_0 = |report: &Report| {
        let first = report.rounds.first().filter(|round| round.duration_ms > 0.0)?;
        Some(first.bytes as f64 / first.duration_ms / 1e3)
    };
    Figures {
        name: name.to_owned(),
        failed,
        migration_ms: Spread::of(completed().map(|report| report.migration_time_ms)),
        guest_mb_per_s: Spread::of(completed().map(guest)),
        wire_mb_per_s: Spread::of(completed().filter_map(round_0)),
        streams: completed().next_back().filter(|report| !report.lanes.is_empty()).map(streams_of),
        engine_mib,
        source_cpu_s_a_gib,
        destination_cpu_s_a_gib,
        runs,
    }
}

/// Returns the CPU time that Godwit takes more over TLS: seconds a GiB, both ends together.
fn tls_cpu(parts: &[Part]) -> Option<f64> {
    let of = |protection: Protection| {
        let part = parts.iter().find(|part| part.protection == protection)?;
        let row = part.figures.iter().find(|row| row.name == "godwit")?;
        Some(row.source_cpu_s_a_gib?.median + row.destination_cpu_s_a_gib?.median)
    };
    Some(of(Protection::Tls)? - of(Protection::Clear)?)
}

fn render(part: &Part) -> String {
    let mut lines = vec![format!(
        "  {:<10} {:>6} {:>8} {:>20} {:>20} {:>20} {:>12} {:>16}",
        "engine",
        "failed",
        "streams",
        "migration ms",
        "guest MB/s",
        "round 0 MB/s",
        "engine MiB",
        "CPU s a GiB"
    )];
    for row in &part.figures {
        let cpu = row.source_cpu_s_a_gib.zip(row.destination_cpu_s_a_gib);
        lines.push(format!(
            "  {:<10} {:>6} {:>8} {:>20} {:>20} {:>20} {:>12} {:>16}",
            row.name,
            row.failed,
            row.streams.map_or_else(dash, |streams| streams.to_string()),
            cell(row.migration_ms, 0),
            cell(row.guest_mb_per_s, 0),
            cell(row.wire_mb_per_s, 0),
            row.engine_mib.map_or_else(dash, |spread| format!("{:.1}", spread.median)),
            cpu.map_or_else(dash, |(source, destination)| {
                format!("{:.2} + {:.2}", source.median, destination.median)
            }),
        ));
    }
    lines.push("  CPU: source + destination, agent and QEMU, user and system time".to_owned());
    let title = match part.protection {
        Protection::Clear => "in the clear",
        Protection::Tls => "over TLS",
    };
    format!("\n{title}: medians (least to most)\n{}\n", lines.join("\n"))
}

#[expect(clippy::cast_precision_loss, reason = "sizes far below 8 PiB")]
fn goals(parts: &[Part], memory_bytes: u64) -> Vec<Goal> {
    let part = |protection| parts.iter().find(|part| part.protection == protection);
    let of = |part: Option<&Part>, name: &str| {
        part.and_then(|part| part.figures.iter().find(|row| row.name == name && row.failed == 0))
            .map(|row| (row.guest_mb_per_s, row.wire_mb_per_s))
    };
    let median = |spread: Option<Spread>| spread.map(|spread| spread.median);
    let (clear, tls) = (part(Protection::Clear), part(Protection::Tls));
    let ours = of(clear, "godwit");
    let qemu = clear.and_then(|clear| {
        let peers = clear.figures.iter().filter(|row| row.name != "godwit");
        peers.filter_map(|row| median(row.guest_mb_per_s)).max_by(f64::total_cmp)
    });
    let ratio = |one: Option<f64>, other: Option<f64>| Some(one? / other?);
    let ours_guest = ours.and_then(|(guest, _)| median(guest));
    let ours_wire = ours.and_then(|(_, wire)| median(wire));
    let iperf = of(clear, "iperf3").and_then(|(_, wire)| median(wire));
    let tls_guest = of(tls, "godwit").and_then(|(guest, _)| median(guest));
    let rows = parts.iter().flat_map(|part| &part.figures).filter(|row| row.name == "godwit");
    let engine_mib = rows.filter_map(|row| Some(row.engine_mib?.max)).max_by(f64::total_cmp);
    let allowed_mib =
        (ENGINE_BYTES as f64 + ENGINE_SHARE * memory_bytes as f64) / f64::from(1 << 20);
    [
        ("guest bytes a second, times QEMU's best,", TIMES_QEMU, ratio(ours_guest, qemu)),
        (
            "round 0's bytes a second, of iperf3's with as many streams,",
            SHARE_OF_IPERF,
            ratio(ours_wire, iperf),
        ),
        (
            "guest bytes a second over TLS, of those in the clear,",
            TLS_SHARE,
            ratio(tls_guest, ours_guest),
        ),
        ("allowed memory of the engine, of its use,", 1.0, ratio(Some(allowed_mib), engine_mib)),
    ]
    .into_iter()
    .map(|(what, at_least, found)| Goal {
        what: what.to_owned(),
        at_least,
        found,
        met: found.is_some_and(|found| found >= at_least),
    })
    .collect()
}
