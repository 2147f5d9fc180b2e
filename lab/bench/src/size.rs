//! Size: guests of different sizes with the same small working set move back and forth, their dirty
//! pages found by faults and by scans in turns.

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use clap::Args;
use godwit_api::MigrationRequest;
use godwit_lab::trial::{Guest, GuestPlan, LIMIT, Trial, Watched, until};
use godwit_lab::{BitRate, LabOptions};
use godwit_qemu::ByteSize;
use godwit_types::{Outcome, ReferenceUse, TrackingUse};
use serde::Serialize;

use crate::figures::{Spread, cell, dash};
use crate::machine::Machine;
use crate::results;
use crate::switchover::ODD_BYTES;

/// Longest difference between the median pauses of the smallest and the largest guest.
const GOAL_MS: f64 = 3.0;

/// Memory that a host keeps free, and some more.
const RESERVE_BYTES: u64 = 1536 << 20;

/// Options of the scenario.
#[derive(Debug, Clone, Args, Serialize)]
pub(crate) struct Settings {
    /// Moves by each means, after a warm-up move
    #[arg(
        long,
        value_name = "N",
        default_value_t = 10,
        value_parser = clap::value_parser!(u32).range(1..),
    )]
    runs: u32,
    /// Sizes of the guest (64 KiB more each, without which QEMU before 9.0 loses writes under TCG)
    #[arg(long, value_name = "SIZE", value_delimiter = ',', default_values = ["1GiB", "10GiB"])]
    #[serde(skip)]
    memory: Vec<ByteSize>,
    /// The guest's workload
    #[arg(long, value_name = "WORKLOAD", default_value = "dirty:rate=1000,ws=20M,order=random")]
    workload: String,
    /// Part of the memory in use
    #[arg(long, value_name = "SIZE", default_value = "256MiB")]
    #[serde(skip)]
    fill: ByteSize,
    /// Rate of the migration network's links [default: as fast as the machine]
    #[arg(long, value_name = "RATE")]
    link: Option<BitRate>,
    /// Output directory of the JSON file
    #[arg(long, value_name = "DIR", default_value = "out/bench")]
    out: PathBuf,
    /// Fail if the goal is missed
    #[arg(long)]
    check: bool,
}

/// Moves of a guest of one size, by one means.
#[derive(Debug, Serialize)]
struct Row {
    memory: String,
    tracking: TrackingUse,
    switchover_ms: Option<Spread>,
    blackout_ms: Option<Spread>,
    last_pages_ms: Option<Spread>,
    migration_ms: Option<Spread>,
    faults: Option<Spread>,
    answering_ms: Option<Spread>,
    unnoted_pages: u64,
    runs: Vec<Watched>,
}

/// Contents of the JSON file.
#[derive(Debug, Serialize)]
struct Measured {
    rows: Vec<Row>,
    /// Difference of the median pauses of the largest and the smallest guest, by faults.
    difference_ms: Option<f64>,
    met: bool,
}

/// Measures, prints, writes. Returns false if the goal was missed and goals are checked.
pub(crate) fn run(settings: &Settings) -> Result<bool> {
    let machine = Machine::ready()?;
    let mut rows = Vec::new();
    println!(
        "settings  guests of {:?} and 64 KiB, {} in use, {}; link {}; {} moves each",
        settings.memory.iter().map(ToString::to_string).collect::<Vec<_>>(),
        settings.fill,
        settings.workload,
        settings.link.map_or_else(|| "as fast as the machine".to_owned(), |rate| rate.to_string()),
        settings.runs,
    );
    for memory in &settings.memory {
        rows.extend(measure(settings, *memory)?);
    }
    let median = |row: Option<&Row>| row?.switchover_ms.as_ref().map(|spread| spread.median);
    let mut by_faults = rows.iter().filter(|row| row.tracking == TrackingUse::Faults);
    let (first, last) = (median(by_faults.next()), median(by_faults.next_back()));
    let difference_ms = last.zip(first).map(|(last, first)| last - first);
    let met = difference_ms.is_some_and(|difference| difference <= GOAL_MS);
    print_rows(&rows);
    if let Some(difference_ms) = difference_ms {
        let verdict = if met { "met" } else { "missed" };
        println!(
            "the largest guest's pause by faults is {difference_ms:.1} ms longer than the \
             smallest's: goal of {GOAL_MS} ms {verdict}"
        );
    }
    let measured = Measured { rows, difference_ms, met };
    results::write(&settings.out, "size", &machine, settings, &measured)?;
    Ok(met || !settings.check)
}

/// Moves a guest of one size by each means in turns.
fn measure(settings: &Settings, memory: ByteSize) -> Result<Vec<Row>> {
    let options = LabOptions { link: settings.link, insecure: true, ..LabOptions::default() };
    let trial = Trial::begin_with("bench", options)?.context("cannot start a lab here")?;
    let bytes = ByteSize::from_bytes(memory.bytes().saturating_add(ODD_BYTES));
    let plan = GuestPlan { memory: vec![bytes], fill: settings.fill, ..GuestPlan::new("bench") };
    let mut guest = trial.guest("a", &plan)?;
    guest.workload(&settings.workload)?;
    let means = [TrackingUse::Scans, TrackingUse::Faults];
    let mut runs: [Vec<Watched>; 2] = [Vec::new(), Vec::new()];
    for turn in 0..=settings.runs {
        for (tracking, runs) in means.into_iter().zip(&mut runs) {
            let moved = step(&trial, &mut guest, memory, tracking)?;
            if turn > 0 {
                runs.push(moved);
            }
        }
    }
    guest.verify().context("at the end")?;
    trial.finish()?;
    let rows = means.into_iter().zip(runs);
    Ok(rows.map(|(tracking, runs)| Row::new(memory, tracking, runs)).collect())
}

/// Moves the guest to the other host.
fn step(
    trial: &Trial,
    guest: &mut Guest,
    memory: ByteSize,
    tracking: TrackingUse,
) -> Result<Watched> {
    until("the memory of the guest's last stay is free", LIMIT, || {
        let bytes = memory.bytes() + RESERVE_BYTES;
        Ok((available_bytes()? >= bytes).then_some(()))
    })?;
    // No memory is retained for the way back: two large guests would not fit beside it.
    let request =
        MigrationRequest { tracking, references: ReferenceUse::None, ..guest.to_other_host() };
    let moved = trial.migrate(guest, &request)?;
    ensure!(moved.report.outcome == Outcome::Completed, "{:?}", moved.report.error);
    Ok(moved)
}

/// Returns the memory that the kernel can still provide.
pub(crate) fn available_bytes() -> Result<u64> {
    let text = std::fs::read_to_string("/proc/meminfo")?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|line| line.split_whitespace().next()).context("no MemAvailable")?;
    Ok(kib.parse::<u64>()? << 10)
}

impl Row {
    fn new(memory: ByteSize, tracking: TrackingUse, runs: Vec<Watched>) -> Row {
        let reports = || runs.iter().map(|run| &run.report);
        let tracked = || reports().filter_map(|report| report.tracking.as_ref());
        Row {
            memory: memory.to_string(),
            tracking,
            switchover_ms: Spread::of(reports().filter_map(|report| report.switchover_ms)),
            blackout_ms: Spread::of(reports().filter_map(|report| report.blackout_ms)),
            last_pages_ms: Spread::of(
                reports().filter_map(|report| Some(report.switchover.as_ref()?.last_pages_ms)),
            ),
            migration_ms: Spread::of(reports().map(|report| report.migration_time_ms)),
            faults: Spread::of(tracked().map(|tracking| tracking.faults as f64)),
            answering_ms: Spread::of(tracked().map(|tracking| tracking.answering_ms)),
            unnoted_pages: tracked().map(|tracking| tracking.unnoted_pages).sum(),
            runs,
        }
    }
}

fn print_rows(rows: &[Row]) {
    println!(
        "\n{:>8} {:>8} {:>18} {:>18} {:>18} {:>18} {:>8} {:>12} {:>8}",
        "guest",
        "tracking",
        "pause ms",
        "last pages ms",
        "blackout ms",
        "migration ms",
        "faults",
        "answers ms",
        "unnoted",
    );
    for row in rows {
        println!(
            "{:>8} {:>8} {:>18} {:>18} {:>18} {:>18} {:>8} {:>12} {:>8}",
            row.memory,
            format!("{:?}", row.tracking).to_lowercase(),
            cell(row.switchover_ms, 1),
            cell(row.last_pages_ms, 1),
            cell(row.blackout_ms, 1),
            cell(row.migration_ms, 1),
            row.faults.as_ref().map_or(0.0, |of| of.median),
            row.answering_ms.as_ref().map_or_else(dash, |of| format!("{:.1}", of.median)),
            row.unnoted_pages,
        );
    }
}
