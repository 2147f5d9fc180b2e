//! What it takes to move a guest that rewrites its memory faster than the link carries it, and what that costs the guest: the
//! engines taking turns on the same guest and link.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use clap::Args;
use godwit_lab::trial::{Guest, GuestPlan, Trial};
use godwit_lab::{BitRate, LabOptions};
use godwit_migration::{Outcome, Report, ThrottleReport};
use godwit_qemu::ByteSize;
use serde::Serialize;

use crate::figures::Spread;
use crate::machine::Machine;
use crate::results::as_text;
use crate::subject::{Engine, Subject};
use crate::switchover::ODD_BYTES;
use crate::{results, schedule};

/// How long the guest's undisturbed work is measured before each move.
const UNDISTURBED: Duration = Duration::from_secs(3);
const PAGE_BYTES: f64 = 4096.0;
/// What a frame of 1500 bytes carries beside the headers of Ethernet (with what passes between frames), IP and TCP.
const PAYLOAD_SHARE: f64 = 1448.0 / 1538.0;

/// Options of the scenario.
#[derive(Debug, Clone, Args, Serialize)]
pub(crate) struct Settings {
    /// Moves by each engine of each case
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    runs: u32,
    /// Who moves it
    #[arg(long = "engine", value_delimiter = ',', default_values = ["godwit", "auto-converge", "postcopy"])]
    engines: Vec<Engine>,
    /// Rates of the link, each in a lab of its own
    #[arg(long = "link", value_name = "RATE", value_delimiter = ',', default_values = ["200mbit", "1gbit"])]
    #[serde(serialize_with = "all_as_text")]
    links: Vec<BitRate>,
    /// How many times as much as the link carries the guest is to write
    #[arg(long, value_name = "N", value_delimiter = ',', default_values_t = [2, 5, 20])]
    times: Vec<u32>,
    /// The guest's memory
    #[arg(long, value_name = "SIZE", default_value = "1GiB")]
    #[serde(serialize_with = "as_text")]
    memory: ByteSize,
    /// How much of it holds random content
    #[arg(long, value_name = "SIZE", default_value = "512MiB")]
    #[serde(serialize_with = "as_text")]
    fill: ByteSize,
    /// How much of that it rewrites, at random
    #[arg(long, value_name = "SIZE", default_value = "256MiB")]
    #[serde(serialize_with = "as_text")]
    working_set: ByteSize,
    /// Its vCPUs
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    vcpus: u32,
    /// Have another of its threads compute all the time
    #[arg(long)]
    compute: bool,
    /// Where the JSON file goes
    #[arg(long, value_name = "DIR", default_value = "out/bench")]
    out: PathBuf,
}

fn all_as_text<S: serde::Serializer>(rates: &[BitRate], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(rates.iter().map(ToString::to_string))
}

/// What the guest has done by a moment.
#[derive(Clone, Copy)]
struct Work {
    at: Instant,
    writes: u64,
    rounds: u64,
}

impl Work {
    fn of(guest: &Guest) -> Result<Work> {
        let status = guest.status()?;
        Ok(Work { at: Instant::now(), writes: status.writes, rounds: status.iterations })
    }

    /// Writes and rounds of computation a second since an earlier moment.
    #[expect(clippy::cast_precision_loss, reason = "counts far below 2^53")]
    fn since(self, before: Work) -> (f64, f64) {
        let took_s = self.at.saturating_duration_since(before.at).as_secs_f64();
        let per_s = |now: u64, then: u64| now.saturating_sub(then) as f64 / took_s;
        (per_s(self.writes, before.writes), per_s(self.rounds, before.rounds))
    }
}

/// One move.
#[derive(Debug, Serialize)]
struct Run {
    completed: bool,
    /// Pages written a second, without a migration.
    undisturbed_writes_per_s: f64,
    /// The same from the migration's request to the first answer after its report.
    moving_writes_per_s: f64,
    /// How many fewer pages were written in that time.
    lost_writes: f64,
    /// The computing thread's speed meanwhile, as a share of its undisturbed one.
    computing_share: Option<f64>,
    report: Report,
}

#[derive(Debug, Serialize)]
struct Figures {
    link: String,
    times: u32,
    engine: &'static str,
    /// The memory in use on this wire, once.
    once_ms: f64,
    failed: usize,
    migration_ms: Option<Spread>,
    migration_times_once: Option<Spread>,
    switchover_ms: Option<Spread>,
    blackout_ms: Option<Spread>,
    undisturbed_writes_per_s: Option<Spread>,
    lost_writes: Option<Spread>,
    computing_percent: Option<Spread>,
    throttle: Vec<ThrottleReport>,
    runs: Vec<Run>,
}

#[derive(Serialize)]
struct Measured<'a> {
    cases: &'a [Figures],
}

/// Measures, prints, writes.
pub(crate) fn run(settings: &Settings) -> Result<bool> {
    let machine = Machine::ready()?;
    println!(
        "settings  guest of {} with {} vCPUs under TCG or KVM as the host can, {} random, of which it rewrites {} whole pages at random{}; \
         {} moves by each engine and case, by turns; Godwit by TLS, QEMU in the clear",
        settings.memory,
        settings.vcpus,
        settings.fill,
        settings.working_set,
        if settings.compute { " while another thread computes" } else { "" },
        settings.runs,
    );
    let mut cases = Vec::new();
    for link in &settings.links {
        cases.extend(on_link(settings, *link)?);
    }
    print!("{}", render(&cases));
    results::write(&settings.out, "converge", &machine, settings, &Measured { cases: &cases })?;
    Ok(true)
}

fn on_link(settings: &Settings, link: BitRate) -> Result<Vec<Figures>> {
    let options = LabOptions { link: Some(link), ..LabOptions::default() };
    let trial = Trial::begin_with("bench", options)?.context("no lab can be had here")?;
    let plan = GuestPlan {
        memory: vec![ByteSize::from_bytes(settings.memory.bytes().saturating_add(ODD_BYTES))],
        vcpus: settings.vcpus,
        fill: settings.fill,
        mix: Some("zero=0,compressible=0".to_owned()),
        ..GuestPlan::new("bench")
    };
    let mut subject = Subject::new(&trial, plan)?;
    let mut cases = Vec::new();
    for &times in &settings.times {
        cases.extend(rewriting(settings, &mut subject, link, times)?);
    }
    trial.finish()?;
    Ok(cases)
}

/// One case: a guest that writes so many times what the link carries.
fn rewriting(
    settings: &Settings,
    subject: &mut Subject<'_>,
    link: BitRate,
    times: u32,
) -> Result<Vec<Figures>> {
    let rate = f64::from(times) * bytes_per_s(link) / PAGE_BYTES;
    let compute = if settings.compute { ",compute=yes" } else { "" };
    subject.work(&format!(
        "dirty:rate={rate:.0},ws={},order=random,zero=0,compressible=0{compute}",
        settings.working_set.bytes()
    ))?;
    let once_ms = in_use_bytes(&subject.guest)? / (bytes_per_s(link) * PAYLOAD_SHARE) * 1e3;
    let mut runs: Vec<Vec<Option<Run>>> = settings.engines.iter().map(|_| Vec::new()).collect();
    for place in schedule::turns(&vec![settings.runs; settings.engines.len()]) {
        let run = measure(subject, settings.engines[place])?;
        eprintln!("  {link}, {times} times, {}: {}", settings.engines[place].name(), told(run.as_ref()));
        runs[place].push(run);
    }
    let each = settings.engines.iter().zip(runs);
    Ok(each.map(|(engine, runs)| figures_of(link, times, once_ms, engine.name(), runs)).collect())
}

#[expect(clippy::cast_precision_loss, reason = "rates far below 2^53")]
fn bytes_per_s(link: BitRate) -> f64 {
    link.bits_per_second() as f64 / 8.0
}

/// What the guest's kernel has handed out.
#[expect(clippy::cast_precision_loss, reason = "sizes far below 2^53")]
fn in_use_bytes(guest: &Guest) -> Result<f64> {
    let memory = guest.status()?.memory.context("the guest tells nothing of its memory")?;
    Ok(memory.total_bytes.saturating_sub(memory.free_bytes) as f64)
}

/// One move by one engine; none: the guest was lost by it.
fn measure(subject: &mut Subject<'_>, engine: Engine) -> Result<Option<Run>> {
    let before = Work::of(&subject.guest)?;
    #[expect(clippy::disallowed_methods, reason = "this time is what is measured")]
    std::thread::sleep(UNDISTURBED);
    let begun = Work::of(&subject.guest)?;
    let (undisturbed_writes_per_s, undisturbed_rounds_per_s) = begun.since(before);
    let Some(watched) = subject.move_by(engine, |request| request)? else { return Ok(None) };
    let ended = Work::of(&subject.guest)?;
    let (moving_writes_per_s, moving_rounds_per_s) = ended.since(begun);
    let took_s = ended.at.saturating_duration_since(begun.at).as_secs_f64();
    Ok(Some(Run {
        completed: watched.report.outcome == Outcome::Completed,
        undisturbed_writes_per_s,
        moving_writes_per_s,
        lost_writes: (undisturbed_writes_per_s - moving_writes_per_s) * took_s,
        computing_share: (undisturbed_rounds_per_s > 0.0)
            .then(|| moving_rounds_per_s / undisturbed_rounds_per_s),
        report: watched.report,
    }))
}

fn told(run: Option<&Run>) -> String {
    let Some(run) = run else { return "the guest was lost".to_owned() };
    if !run.completed {
        return "not moved".to_owned();
    }
    format!(
        "{:.1} s, switchover {:.1} ms, {:.0} of {:.0} writes/s",
        run.report.migration_time_ms / 1e3,
        run.report.switchover_ms.unwrap_or(0.0),
        run.moving_writes_per_s,
        run.undisturbed_writes_per_s
    )
}

fn figures_of(
    link: BitRate,
    times: u32,
    once_ms: f64,
    engine: &'static str,
    moves: Vec<Option<Run>>,
) -> Figures {
    let all = moves.len();
    let runs: Vec<Run> = moves.into_iter().flatten().filter(|run| run.completed).collect();
    let spread = |figure: &dyn Fn(&Run) -> Option<f64>| Spread::of(runs.iter().filter_map(figure));
    Figures {
        link: link.to_string(),
        times,
        engine,
        once_ms,
        failed: all - runs.len(),
        migration_ms: spread(&|run| Some(run.report.migration_time_ms)),
        migration_times_once: spread(&|run| Some(run.report.migration_time_ms / once_ms)),
        switchover_ms: spread(&|run| run.report.switchover_ms),
        blackout_ms: spread(&|run| run.report.blackout_ms),
        undisturbed_writes_per_s: spread(&|run| Some(run.undisturbed_writes_per_s)),
        lost_writes: spread(&|run| Some(run.lost_writes)),
        computing_percent: spread(&|run| Some(100.0 * run.computing_share?)),
        throttle: runs.iter().filter_map(|run| run.report.throttle).collect(),
        runs,
    }
}

fn render(cases: &[Figures]) -> String {
    let text = |spread: Option<Spread>, digits: usize| {
        spread.map_or_else(
            || "-".to_owned(),
            |Spread { median, min, max, .. }| format!("{median:.digits$} ({min:.digits$}–{max:.digits$})"),
        )
    };
    let mut out = String::from("\nmedians (least to most); once: the memory in use on that wire\n");
    out += &format!(
        "  {:<8} {:>5} {:<14} {:>6} {:>22} {:>18} {:>22} {:>22} {:>10} {:>26} {:>14}\n",
        "link",
        "times",
        "engine",
        "failed",
        "migration ms",
        "times once",
        "switchover ms",
        "blackout ms",
        "writes/s",
        "writes lost",
        "computing %"
    );
    for case in cases {
        let writes = case.undisturbed_writes_per_s.map_or(0.0, |writes| writes.median);
        out += &format!(
            "  {:<8} {:>5} {:<14} {:>6} {:>22} {:>18} {:>22} {:>22} {writes:>10.0} {:>26} {:>14}\n",
            case.link,
            case.times,
            case.engine,
            case.failed,
            text(case.migration_ms, 0),
            text(case.migration_times_once, 2),
            text(case.switchover_ms, 1),
            text(case.blackout_ms, 0),
            text(case.lost_writes, 0),
            text(case.computing_percent, 0),
        );
    }
    out
}
