//! Blackout beside the pause: a guest without an operating system that answers a packet in a few
//! microseconds moves back and forth. What a client outside waits for longer than the pause is the
//! cost of the emulator and of the network, not of a guest's kernel.

use std::path::PathBuf;

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use godwit_lab::LabOptions;
use godwit_lab::trial::{Needs, Trial, Watched, missing};
use godwit_qemu::Accel;
use godwit_types::Outcome;
use serde::Serialize;

use crate::figures::{Spread, cell};
use crate::machine::Machine;
use crate::results;

/// Name of the VM.
const VM: &str = "echo";
/// Longest time that the blackout exceeds the pause under KVM.
const GOAL_MS: f64 = 5.0;

/// Options of the scenario.
#[derive(Debug, Clone, Args, Serialize)]
pub(crate) struct Settings {
    /// What the guest runs on: kvm, tcg or both
    #[arg(
        long,
        value_name = "ACCEL",
        value_delimiter = ',',
        default_values = ["kvm"],
        value_parser = accel,
    )]
    accel: Vec<Accel>,
    /// Moves on each, after a warm-up move
    #[arg(
        long,
        value_name = "N",
        default_value_t = 10,
        value_parser = clap::value_parser!(u32).range(1..),
    )]
    runs: u32,
    /// Output directory of the JSON file
    #[arg(long, value_name = "DIR", default_value = "out/bench")]
    out: PathBuf,
    /// Fail if the goal is missed
    #[arg(long)]
    check: bool,
}

fn accel(name: &str) -> Result<Accel, String> {
    match name {
        "kvm" => Ok(Accel::Kvm),
        "tcg" => Ok(Accel::Tcg),
        _ => Err("not one of kvm, tcg".to_owned()),
    }
}

/// Moves on one accelerator.
#[derive(Debug, Serialize)]
struct Row {
    accel: Accel,
    migration_ms: Option<Spread>,
    switchover_ms: Option<Spread>,
    blackout_ms: Option<Spread>,
    /// Blackout of a move less its switchover.
    beyond_ms: Option<Spread>,
    runs: Vec<Watched>,
}

#[derive(Serialize)]
struct Measured<'a> {
    rows: &'a [Row],
    met: bool,
}

/// Measures, prints, writes. Returns false if the goal was missed and goals are checked.
pub(crate) fn run(settings: &Settings) -> Result<bool> {
    let machine = Machine::ready()?;
    if settings.accel.contains(&Accel::Kvm)
        && let Some(reason) = missing(&Needs::kvm())
    {
        bail!("cannot measure with KVM on this machine: {reason}");
    }
    println!(
        "settings  bare guest of 96 MiB that writes 5 pages a packet, probed 1,000 times a second; \
         {} moves; all in the clear",
        settings.runs
    );
    let options = LabOptions { insecure: true, ..LabOptions::default() };
    let trial = Trial::begin_with("bench", options)?.context("cannot start a lab here")?;
    let rows: Result<Vec<Row>> =
        settings.accel.iter().map(|accel| measure(&trial, *accel, settings.runs)).collect();
    let rows = rows?;
    trial.finish()?;
    print!("{}", render(&rows));
    let of_kvm = rows.iter().filter(|row| row.accel == Accel::Kvm);
    let met = of_kvm.clone().all(|row| row.beyond_ms.is_some_and(|ms| ms.median <= GOAL_MS));
    if of_kvm.count() > 0 {
        let verdict = if met { "met" } else { "missed" };
        println!("  blackout under KVM beyond the switchover: goal of {GOAL_MS} ms {verdict}");
    }
    results::write(&settings.out, "blackout", &machine, settings, &Measured { rows: &rows, met })?;
    Ok(met || !settings.check)
}

fn measure(trial: &Trial, accel: Accel, count: u32) -> Result<Row> {
    let mut guest = trial.echo_guest("a", VM, accel)?;
    let mut runs = Vec::new();
    for number in 0..=count {
        let request = guest.to_other_host();
        let moved = trial.migrate(&mut guest, &request)?;
        ensure!(moved.report.outcome == Outcome::Completed, "{:?}", moved.report.error);
        // Fails if the guest has found a wrong page.
        trial.bare_generations(&guest.host, VM)?;
        if number > 0 {
            runs.push(moved);
        }
    }
    trial.delete(&guest.host, VM)?;
    let of = |figure: fn(&Watched) -> Option<f64>| Spread::of(runs.iter().filter_map(figure));
    Ok(Row {
        accel,
        migration_ms: of(|run| Some(run.report.migration_time_ms)),
        switchover_ms: of(|run| run.report.switchover_ms),
        blackout_ms: of(|run| run.report.blackout_ms),
        beyond_ms: of(|run| Some(run.report.blackout_ms? - run.report.switchover_ms?)),
        runs,
    })
}

fn render(rows: &[Row]) -> String {
    let mut out = format!(
        "\nmedians (least to most)\n  {:<6} {:>20} {:>20} {:>20} {:>20}\n",
        "accel", "migration ms", "switchover ms", "blackout ms", "difference ms"
    );
    for row in rows {
        out += &format!(
            "  {:<6} {:>20} {:>20} {:>20} {:>20}\n",
            format!("{:?}", row.accel).to_lowercase(),
            cell(row.migration_ms, 1),
            cell(row.switchover_ms, 1),
            cell(row.blackout_ms, 1),
            cell(row.beyond_ms, 1),
        );
    }
    out
}
