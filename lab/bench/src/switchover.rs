//! Switchover and blackout: one guest moves back and forth, with the engines taking turns, idle and
//! dirtying memory, with and without delay on the link.

use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::{Args, ValueEnum};
use godwit_api::MigrationRequest;
use godwit_lab::trial::{GuestPlan, Trial, Watched};
use godwit_lab::{BitRate, LabOptions, Rtt};
use godwit_qemu::{ByteSize, Firmware, Video};
use godwit_types::{Outcome, Phase, Report};
use serde::Serialize;

use crate::figures::Spread;
use crate::machine::Machine;
use crate::results::as_text;
use crate::subject::{Engine, Subject};
use crate::{results, schedule, table};

/// QEMU before 9.0 loses writes under TCG when it migrates a guest whose memory is a multiple of
/// 256 KiB (docs/engines.md): all engines move this much more.
pub(crate) const ODD_BYTES: u64 = 64 << 10;
/// Moves from which on the 99th percentile is more than the greatest value.
pub(crate) const LEAST_RUNS_OF_P99: usize = 100;
/// Longest switchover of 99 % of the moves without a delay on the link.
const P99_MS: f64 = 15.0;

/// Options of the scenario.
#[derive(Debug, Clone, Args, Serialize)]
pub(crate) struct Settings {
    /// Moves by each of QEMU's engines, after a warm-up move
    #[arg(
        long,
        value_name = "N",
        default_value_t = 5,
        value_parser = clap::value_parser!(u32).range(1..),
    )]
    runs: u32,
    /// Moves by Godwit's engine, after a warm-up move
    #[arg(
        long,
        value_name = "N",
        default_value_t = 20,
        value_parser = clap::value_parser!(u32).range(1..),
    )]
    godwit_runs: u32,
    /// Round-trip times of the migration network, each in a separate lab
    #[arg(long, value_name = "TIME", value_delimiter = ',', default_values = ["0ms", "40ms"])]
    rtt: Vec<Rtt>,
    /// Rate of the migration network's links [default: as fast as the machine]
    #[arg(long, value_name = "RATE")]
    link: Option<BitRate>,
    /// The guest's workload
    #[arg(long = "workload", value_delimiter = ',', default_values = ["idle", "dirty"])]
    workloads: Vec<WorkloadKind>,
    /// Engines to compare
    #[arg(
        long = "engine",
        value_delimiter = ',',
        default_values = ["godwit", "qemu", "multifd-2", "multifd-4"],
    )]
    engines: Vec<Engine>,
    /// The guest's memory (64 KiB more, without which QEMU before 9.0 loses writes under TCG)
    #[arg(long, value_name = "SIZE", default_value = "1GiB")]
    #[serde(serialize_with = "as_text")]
    memory: ByteSize,
    /// Part of that memory in use
    #[arg(long, value_name = "SIZE", default_value = "512MiB")]
    #[serde(serialize_with = "as_text")]
    fill: ByteSize,
    /// Give the guest UEFI firmware in place of a BIOS
    #[arg(long)]
    uefi: bool,
    /// Give the guest a screen: vga or virtio
    #[arg(long, value_name = "VIDEO", value_parser = parse_video, default_value = "none")]
    #[serde(serialize_with = "as_text")]
    video: Video,
    /// Encrypt Godwit's data; QEMU's data is never encrypted here
    #[arg(long)]
    tls: bool,
    /// Output directory of the JSON file
    #[arg(long, value_name = "DIR", default_value = "out/bench")]
    out: PathBuf,
    /// Fail if a goal is missed
    #[arg(long)]
    check: bool,
}

/// Workload of the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
enum WorkloadKind {
    /// Nothing
    Idle,
    /// Writes 5,000 pages a second at random over 256 MiB
    Dirty,
}

impl WorkloadKind {
    /// Returns the workload as text for the guest.
    fn spec(self) -> &'static str {
        match self {
            WorkloadKind::Idle => "idle",
            WorkloadKind::Dirty => "dirty:rate=5000,ws=256M,order=random,zero=10,compressible=40",
        }
    }

    fn text(self) -> &'static str {
        match self {
            WorkloadKind::Idle => "idle guest",
            WorkloadKind::Dirty => "5,000 dirty pages/s",
        }
    }
}

/// Results of an engine in one part.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct EngineFigures {
    pub(crate) name: String,
    /// Moves that did not complete: their times are not part of the figures.
    pub(crate) failed: usize,
    /// Moves after which the guest did not answer any more.
    pub(crate) lost: usize,
    pub(crate) migration_ms: Option<Spread>,
    pub(crate) switchover_ms: Option<Spread>,
    pub(crate) blackout_ms: Option<Spread>,
    pub(crate) wire_mib: Option<Spread>,
    /// Moves in which the client itself could not probe for longer than half of the blackout: the
    /// machine was overloaded, and the blackout includes that.
    pub(crate) prober_held_up: usize,
    /// Moves whose longest silence began in another phase than the switchover.
    pub(crate) blackout_elsewhere: usize,
    pub(crate) runs: Vec<Watched>,
}

impl EngineFigures {
    fn new(name: &str, moves: Vec<Option<Watched>>) -> EngineFigures {
        let lost = moves.iter().filter(|moved| moved.is_none()).count();
        let runs: Vec<Watched> = moves.into_iter().flatten().collect();
        let completed = || runs.iter().filter(|run| run.report.outcome == Outcome::Completed);
        let spread = |of: fn(&Report) -> Option<f64>| {
            Spread::of(completed().filter_map(|run| of(&run.report)))
        };
        let is_held_up = |run: &&Watched| {
            run.probes
                .longest_gap_ns
                .is_some_and(|gap_ns| run.probes.longest_send_gap_ns * 2 > gap_ns)
        };
        // It begins with the last answer before the vCPUs stop, so the phase before counts too.
        let is_elsewhere = |run: &&Watched| {
            !matches!(run.phase_of_blackout(), Some(Phase::Convergence | Phase::Switchover))
        };
        EngineFigures {
            name: name.to_owned(),
            failed: runs.len() - completed().count(),
            lost,
            migration_ms: spread(|report| Some(report.migration_time_ms)),
            switchover_ms: spread(|report| report.switchover_ms),
            blackout_ms: spread(|report| report.blackout_ms),
            wire_mib: spread(|report| Some(mib(report.wire_bytes))),
            prober_held_up: completed().filter(is_held_up).count(),
            blackout_elsewhere: completed().filter(is_elsewhere).count(),
            runs,
        }
    }
}

#[expect(clippy::cast_precision_loss, reason = "below 8 PiB, and a table shows less than a MiB")]
fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

/// One workload on one link.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Part {
    pub(crate) workload: String,
    #[serde(skip)]
    pub(crate) workload_text: String,
    pub(crate) rtt: String,
    pub(crate) engines: Vec<EngineFigures>,
    pub(crate) goals: Vec<Goal>,
}

/// Promise about Godwit's engine, and whether it is kept.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Goal {
    pub(crate) what: String,
    pub(crate) at_most_ms: f64,
    pub(crate) measured_ms: Option<f64>,
    pub(crate) met: bool,
}

/// Contents of the JSON file.
#[derive(Debug, Serialize)]
struct Measured<'a> {
    accel: String,
    parts: &'a [Part],
}

/// Measures, prints, writes. Returns false if a goal was missed and goals are checked.
pub(crate) fn run(settings: &Settings) -> Result<bool> {
    let machine = Machine::ready()?;
    let mut parts = Vec::new();
    let mut accel = String::new();
    for rtt in &settings.rtt {
        accel = measure_link(settings, *rtt, &mut parts)?;
    }
    let measured = Measured { accel, parts: &parts };
    results::write(&settings.out, "switchover", &machine, settings, &measured)?;
    let all_met = parts.iter().flat_map(|part| &part.goals).all(|goal| goal.met);
    Ok(all_met || !settings.check)
}

/// Parses the name of a video device.
pub(crate) fn parse_video(name: &str) -> Result<Video, serde_json::Error> {
    serde_json::from_value(name.into())
}

/// Measures all workloads in one lab with one guest. Returns what the guest ran on.
fn measure_link(settings: &Settings, rtt: Rtt, parts: &mut Vec<Part>) -> Result<String> {
    let options =
        LabOptions { link: settings.link, rtt, insecure: !settings.tls, ..LabOptions::default() };
    let trial = Trial::begin_with("bench", options)?.context("cannot start a lab here")?;
    let memory = ByteSize::from_bytes(settings.memory.bytes().saturating_add(ODD_BYTES));
    let firmware = if settings.uefi { Firmware::Uefi } else { Firmware::Bios };
    let (memory, fill) = (vec![memory], settings.fill);
    let video = settings.video;
    let plan = GuestPlan { memory, fill, firmware, video, ..GuestPlan::new("bench") };
    let mut subject = Subject::new(&trial, plan)?;
    let accel = trial.vm("a", "bench")?.accel;
    let link =
        settings.link.map_or_else(|| "as fast as the machine".to_owned(), |rate| rate.to_string());
    println!(
        "settings  guest of {} and 64 KiB, {} in use, {firmware}, video {video}, 1 vCPU by \
         {accel}; link {link}, round trip {rtt}; \
         switchover budget {} ms; {}",
        settings.memory,
        settings.fill,
        MigrationRequest::to("b").switchover_budget_ms,
        if settings.tls { "Godwit over TLS, QEMU in the clear" } else { "all in the clear" },
    );
    for workload in &settings.workloads {
        subject.work(workload.spec())?;
        let part = measure_part(settings, &mut subject, *workload, rtt)?;
        subject.guest.verify().with_context(|| format!("{} at the end", workload.text()))?;
        print!("{}", table::render(&part));
        print!("{}", table::render_notes(&part));
        parts.push(part);
    }
    trial.finish()?;
    Ok(accel)
}

fn measure_part(
    settings: &Settings,
    subject: &mut Subject<'_>,
    workload: WorkloadKind,
    rtt: Rtt,
) -> Result<Part> {
    let engines = &settings.engines;
    let counts: Vec<u32> = (engines.iter())
        .map(|engine| if *engine == Engine::Godwit { settings.godwit_runs } else { settings.runs })
        .collect();
    for engine in engines {
        subject.move_by(*engine, |request| request).context("warming up")?;
    }
    let mut runs: Vec<Vec<Option<Watched>>> = vec![Vec::new(); engines.len()];
    let turns = schedule::turns(&counts);
    for (number, place) in turns.iter().enumerate() {
        let run = subject.move_by(engines[*place], |request| request)?;
        if let Some(run) = &run {
            eprintln!(
                "  {}/{} {} to {}: {:.0} ms, switchover {:.1} ms, blackout {:.1} ms ({})",
                number + 1,
                turns.len(),
                engines[*place].name(),
                run.report.to,
                run.report.migration_time_ms,
                run.report.switchover_ms.unwrap_or(f64::NAN),
                run.report.blackout_ms.unwrap_or(f64::NAN),
                run.phase_of_blackout().map_or("nowhere", Phase::name),
            );
        }
        runs[*place].push(run);
    }
    let engines: Vec<EngineFigures> = engines
        .iter()
        .zip(runs)
        .map(|(engine, runs)| EngineFigures::new(engine.name(), runs))
        .collect();
    let goals = goals(settings, rtt, &engines);
    let workload_text = workload.text().to_owned();
    Ok(Part {
        workload: workload.spec().to_owned(),
        workload_text,
        rtt: rtt.to_string(),
        engines,
        goals,
    })
}

/// Returns the promises about Godwit's engine for this round trip, with the guest of the promise.
fn goals(settings: &Settings, rtt: Rtt, engines: &[EngineFigures]) -> Vec<Goal> {
    let promised = match rtt.duration().as_millis() {
        0 => (20.0, 30.0),
        40 => (40.0, 60.0),
        _ => return Vec::new(),
    };
    let is_promised_guest = settings.memory == ByteSize::from_mib(1024) && settings.link.is_none();
    let Some(ours) = engines.iter().find(|engine| engine.name == Engine::Godwit.name()) else {
        return Vec::new();
    };
    if !is_promised_guest {
        return Vec::new();
    }
    let goal = |what: &str, at_most_ms: f64, measured_ms: Option<f64>| {
        let met = ours.failed + ours.lost == 0 && measured_ms.is_some_and(|ms| ms <= at_most_ms);
        Goal { what: what.to_owned(), at_most_ms, measured_ms, met }
    };
    let median = |spread: Option<Spread>| spread.map(|spread| spread.median);
    let mut goals = vec![
        goal("switchover", promised.0, median(ours.switchover_ms)),
        goal("blackout", promised.1, median(ours.blackout_ms)),
    ];
    let p99 = ours.switchover_ms.filter(|spread| spread.count >= LEAST_RUNS_OF_P99);
    if rtt.duration().is_zero()
        && let Some(spread) = p99
    {
        goals.push(goal("switchover p99", P99_MS, Some(spread.p99)));
    }
    goals
}
