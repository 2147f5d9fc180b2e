//! Migrations that end before the commit, because an operator cancels them or because the socket to
//! the destination breaks: their effect on the guest's users.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::Args;
use godwit_lab::trial::{Guest, GuestPlan, LIMIT, Trial, request_to, until};
use godwit_lab::{BitRate, Hooks, LabOptions};
use godwit_migration::millis;
use godwit_prober::clock;
use godwit_qemu::ByteSize;
use godwit_types::{EngineKind, Outcome, Phase, Report};
use rustix::process::Signal;
use serde::Serialize;

use crate::figures::{Spread, cell};
use crate::machine::Machine;
use crate::results::{self, as_text};

/// When and how a migration is ended.
#[derive(Debug, Clone, Copy, Serialize)]
struct Moment {
    phase: Phase,
    /// Point of the source at which the migration waits until it is ended; `None`: it is ended as
    /// soon as the phase has begun. A switchover takes milliseconds, and is usually over before a
    /// cancel arrives.
    held: Option<&'static str>,
    by: EndedBy,
}

/// Cause of a migration's end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum EndedBy {
    Cancel,
    /// The destination's agent is killed, so the source's next writes fail.
    SocketError,
}

const MOMENTS: [Moment; 5] = [
    Moment { phase: Phase::PreCopy, held: None, by: EndedBy::Cancel },
    Moment { phase: Phase::Convergence, held: None, by: EndedBy::Cancel },
    Moment { phase: Phase::Switchover, held: None, by: EndedBy::Cancel },
    // The guest is paused, its last pages are on their way, and the commit is not.
    Moment {
        phase: Phase::Switchover,
        held: Some("source.write-device-state"),
        by: EndedBy::Cancel,
    },
    // Everything is written except the end of the pages, the device state and the commit.
    Moment { phase: Phase::Switchover, held: Some("source.end-pages"), by: EndedBy::SocketError },
];
/// Number of migrations that a socket error ends.
const SOCKET_ERRORS: u32 = 20;
/// Longest silence allowed for a cancelled guest, ms.
const PROMISED_MS: f64 = 100.0;
/// Maximum migrations begun for each one that is to be cancelled.
const MOST_TRIES: u32 = 4;

/// Options of the scenario.
#[derive(Debug, Clone, Args, Serialize)]
pub(crate) struct Settings {
    /// Cancelled migrations of each moment
    #[arg(
        long,
        value_name = "N",
        default_value_t = 9,
        value_parser = clap::value_parser!(u32).range(1..),
    )]
    runs: u32,
    /// The guest's memory
    #[arg(long, value_name = "SIZE", default_value = "512MiB")]
    #[serde(serialize_with = "as_text")]
    memory: ByteSize,
    /// Part of that memory in use
    #[arg(long, value_name = "SIZE", default_value = "256MiB")]
    #[serde(serialize_with = "as_text")]
    fill: ByteSize,
    /// The guest's workload
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
    /// Output directory of the JSON file
    #[arg(long, value_name = "DIR", default_value = "out/bench")]
    out: PathBuf,
    /// Fail if the goal is missed
    #[arg(long)]
    check: bool,
}

/// One migration that was ended.
#[derive(Debug, Clone, Serialize)]
struct Run {
    /// Time from the command's start until the migration was over; with a held point, from its
    /// release.
    over_ms: f64,
    /// The guest's longest silence, from a second before the migration until it was over; with a
    /// held point, from its release.
    silence_ms: f64,
    /// Pause of the vCPUs, if they were paused, including the time at a held point.
    stood_still_ms: Option<f64>,
}

/// Results of one moment.
#[derive(Debug, Serialize)]
struct Part {
    #[serde(flatten)]
    moment: Moment,
    /// Number of migrations that were over before they could be cancelled.
    too_late: u32,
    runs: Vec<Run>,
    silence_ms: Option<Spread>,
    over_ms: Option<Spread>,
    /// `None`: no migration could be cancelled in time.
    met: Option<bool>,
}

/// Measures, prints, writes. Returns false if the goal was missed and goals are checked.
pub(crate) fn run(settings: &Settings) -> Result<bool> {
    let machine = Machine::ready()?;
    println!(
        "settings  guest of {} with {} in use, {}; link {}; {} migrations per moment, ended by \
         `godwit migration \
         cancel`; {SOCKET_ERRORS} by a socket error\n",
        settings.memory, settings.fill, settings.workload, settings.link, settings.runs
    );
    let hooks = Hooks { holds: true, ..Hooks::default() };
    let options = LabOptions { link: Some(settings.link), hooks, ..LabOptions::default() };
    let trial = Trial::begin_with("bench-cancel", options)?.context("cannot start a lab here")?;
    let plan = GuestPlan {
        memory: vec![settings.memory],
        fill: settings.fill,
        workload: settings.workload.clone(),
        ..GuestPlan::new("bench")
    };
    let mut guest = trial.guest("a", &plan)?;
    println!(
        "{:16} {:>4} {:>8}  silence of the guest, ms       until the end, ms",
        "ended in", "n", "too late"
    );
    let mut parts = Vec::new();
    for moment in MOMENTS {
        let part = measure(settings, &trial, &mut guest, moment)?;
        println!(
            "{:16} {:4} {:8}  {:30} {}{}",
            moment.title(),
            part.runs.len(),
            part.too_late,
            cell(part.silence_ms, 1),
            cell(part.over_ms, 1),
            if part.met == Some(false) { "  MISSED" } else { "" },
        );
        parts.push(part);
    }
    println!(
        "\nheld: the guest is stopped at a point before the commit until the cancel arrives; \
         broken: until the \
         destination's agent has been killed. Times run from then until the guest answers a client."
    );
    guest.verify()?;
    trial.finish()?;
    results::write(
        &settings.out,
        "cancel",
        &machine,
        settings,
        &serde_json::json!({ "parts": parts }),
    )?;
    Ok(parts.iter().all(|part| part.met != Some(false)) || !settings.check)
}

impl EndedBy {
    /// Returns the outcome of a migration that is ended this way.
    fn outcome(self) -> Outcome {
        match self {
            EndedBy::Cancel => Outcome::Cancelled,
            EndedBy::SocketError => Outcome::Failed,
        }
    }
}

impl Moment {
    fn title(self) -> String {
        let how = match (self.by, self.held) {
            (EndedBy::SocketError, _) => ", broken",
            (EndedBy::Cancel, Some(_)) => ", held",
            (EndedBy::Cancel, None) => "",
        };
        format!("{}{how}", self.phase.name())
    }
}

fn measure(settings: &Settings, trial: &Trial, guest: &mut Guest, moment: Moment) -> Result<Part> {
    let (mut runs, mut too_late) = (Vec::new(), 0);
    let wanted = if moment.by == EndedBy::SocketError { SOCKET_ERRORS } else { settings.runs };
    for _ in 0..wanted * MOST_TRIES {
        let ended = match moment.held {
            None => cancel_in(trial, guest, moment.phase)?,
            Some(point) => end_at(trial, guest, point, moment.by)?,
        };
        match ended {
            Some(run) => runs.push(run),
            None => too_late += 1,
        }
        if runs.len() == wanted as usize {
            break;
        }
    }
    let silence_ms = Spread::of(runs.iter().map(|run| run.silence_ms));
    let over_ms = Spread::of(runs.iter().map(|run| run.over_ms));
    let met = silence_ms.map(|spread| match moment.by {
        EndedBy::Cancel => spread.max <= PROMISED_MS,
        EndedBy::SocketError => spread.median <= PROMISED_MS,
    });
    Ok(Part { moment, too_late, runs, silence_ms, over_ms, met })
}

/// Runs one migration and cancels it as soon as it reports the phase. Returns `None` if it was over
/// by then.
fn cancel_in(trial: &Trial, guest: &mut Guest, moment: Phase) -> Result<Option<Run>> {
    let request = request_to(&guest.to_other_host().to, EngineKind::Godwit);
    let since_ns = guest.watch()?;
    let mut migration = trial.begin_migration(&guest.name, &guest.host, &request)?;
    migration.until(|progress| progress.phase >= moment && progress.sent_bytes > 0)?;
    let asked = Instant::now();
    // Refused if it is over by now.
    trial.godwit(&["migration", "cancel", &migration.id])?;
    let report = migration.report()?;
    felt(guest, &request.to, &report, EndedBy::Cancel, since_ns, millis(asked.elapsed()))
}

/// Runs one migration that waits at a point until it is ended. Returns `None` if it completed
/// nevertheless.
fn end_at(trial: &Trial, guest: &mut Guest, point: &str, by: EndedBy) -> Result<Option<Run>> {
    let request = request_to(&guest.to_other_host().to, EngineKind::Godwit);
    let held = trial.hold(&guest.host, point)?;
    guest.watch()?;
    let migration = trial.begin_migration(&guest.name, &guest.host, &request)?;
    held.reached(LIMIT)?;
    match by {
        EndedBy::Cancel => migration.cancel()?,
        EndedBy::SocketError => trial.end_agent(&request.to, Signal::KILL)?,
    }
    let (let_go, let_go_ns) = (Instant::now(), clock::monotonic_ns());
    drop(held);
    // Its first answer ends a silence that began before.
    let answered_ns = guest.wait_answer()?;
    let report = migration.report()?;
    let run = felt(guest, &request.to, &report, by, answered_ns, millis(let_go.elapsed()))?;
    if by == EndedBy::SocketError {
        trial.start_missing()?;
        until("the shadow is discarded", LIMIT, || {
            Ok(trial.vm(&request.to, &guest.name).is_err().then_some(()))
        })?;
    }
    Ok(run.map(|run| Run {
        silence_ms: run.silence_ms.max(millis_between(let_go_ns, answered_ns)),
        ..run
    }))
}

/// Measures what the guest's users noticed of a migration that is over. Returns `None` if it
/// completed.
fn felt(
    guest: &mut Guest,
    to: &str,
    report: &Report,
    by: EndedBy,
    since_ns: u64,
    over_ms: f64,
) -> Result<Option<Run>> {
    if report.outcome == Outcome::Completed {
        to.clone_into(&mut guest.host);
    }
    let until_ns = guest.wait_answer()?.max(clock::monotonic_ns());
    let gaps = guest.gaps(since_ns, until_ns)?;
    guest.unwatch()?;
    match report.outcome {
        outcome if outcome == by.outcome() => {}
        Outcome::Completed => return Ok(None),
        _ => bail!("{report:#?}"),
    }
    let gap_ms = gaps.longest_gap_ns.map(|gap_ns| millis(Duration::from_nanos(gap_ns)));
    let silence_ms = gap_ms.unwrap_or_else(|| millis_between(since_ns, until_ns));
    Ok(Some(Run { over_ms, silence_ms, stood_still_ms: report.switchover_ms }))
}

fn millis_between(since_ns: u64, until_ns: u64) -> f64 {
    millis(Duration::from_nanos(until_ns.saturating_sub(since_ns)))
}
