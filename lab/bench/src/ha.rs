//! A protected VM whose host fails in every way, with different datastores and means: where it is
//! afterwards, how long it was away, and that it never ran twice.

mod table;

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use clap::Args;
use godwit_lab::ha::{Cell, CellReport, Fault, Means, Pace, Setting, Stage, cells};
use godwit_lab::random::Random;
use serde::Serialize;

use crate::machine::Machine;
use crate::results;

/// Options of the scenario.
#[derive(Debug, Clone, Args, Serialize)]
pub(crate) struct Settings {
    /// Faults to try, by their names [default: all]
    #[arg(long = "fault", value_name = "NAME", value_delimiter = ',')]
    faults: Vec<String>,
    /// Means with which to try them [default: all]
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    means: Vec<String>,
    /// Runs of each cell
    #[arg(
        long,
        value_name = "N",
        default_value_t = 5,
        value_parser = clap::value_parser!(u32).range(1..),
    )]
    runs: u32,
    /// Seed of the order of the cells
    #[arg(long, value_name = "NUMBER", default_value_t = 1)]
    seed: u64,
    /// List the cells without trying them
    #[arg(long)]
    list: bool,
    /// Output directory of the JSON file
    #[arg(long, value_name = "DIR", default_value = "out/bench")]
    out: PathBuf,
}

#[derive(Debug, Serialize)]
struct Measured {
    cells: Vec<CellReport>,
}

/// Tries, prints, writes. Returns false if a check failed.
pub(crate) fn run(settings: &Settings) -> Result<bool> {
    let wanted = wanted(settings)?;
    if settings.list {
        wanted.iter().for_each(|cell| println!("{}", cell.name()));
        return Ok(true);
    }
    let machine = Machine::ready()?;
    println!(
        "settings  seed {}, {} cells, {} runs of each; three hosts, one of them without VMs\n",
        settings.seed,
        wanted.len(),
        settings.runs
    );
    let mut reports = Vec::new();
    let mut labs: Vec<Setting> = wanted.iter().map(|cell| cell.setting).collect();
    labs.sort();
    labs.dedup();
    for setting in labs {
        let cells: Vec<Cell> =
            wanted.iter().copied().filter(|cell| cell.setting == setting).collect();
        reports.extend(try_all(settings, setting, &cells)?);
    }
    print!("{}", table::render(&reports));
    let is_passed = reports.iter().all(|report| report.error.is_none());
    results::write(&settings.out, "ha", &machine, settings, &Measured { cells: reports })?;
    Ok(is_passed)
}

/// Tries the cells of a setting in one lab after another: a new one after each failure.
fn try_all(settings: &Settings, setting: Setting, cells: &[Cell]) -> Result<Vec<CellReport>> {
    let mut stage: Option<Stage> = None;
    let mut reports = Vec::new();
    for run in 1..=settings.runs {
        for cell in in_order(settings.seed ^ u64::from(run), cells) {
            let current = match &mut stage {
                Some(stage) => stage,
                None => {
                    let begun = Stage::begin("bench-ha", setting, Pace::default())?;
                    stage.insert(begun.context("cannot start a lab here")?)
                }
            };
            let report = current.try_cell(cell);
            print!("{}", table::line(&report, run));
            if report.error.is_some() {
                current.keep_logs(&format!("ha-{}-{run}", cell.name().replace(", ", "-")));
                stage = None;
            }
            reports.push(report);
        }
    }
    if let Some(stage) = stage {
        stage.finish()?;
    }
    Ok(reports)
}

/// Returns the cells in the order of a seed. Each run has its own, so that remains of one cell show
/// in the next.
fn in_order(seed: u64, cells: &[Cell]) -> Vec<Cell> {
    let mut random = Random::new(seed);
    let mut placed: Vec<(u64, Cell)> = cells.iter().map(|cell| (random.next(), *cell)).collect();
    placed.sort();
    placed.into_iter().map(|(_, cell)| cell).collect()
}

fn wanted(settings: &Settings) -> Result<Vec<Cell>> {
    check_names(&settings.faults, &Fault::ALL.map(Fault::name))?;
    check_names(&settings.means, &Means::ALL.map(Means::name))?;
    let is_wanted = |names: &[String], name: &str| {
        names.is_empty() || names.iter().any(|wanted| wanted == name)
    };
    let mut all = cells();
    all.retain(|cell| {
        is_wanted(&settings.faults, cell.fault.name())
            && is_wanted(&settings.means, cell.setting.means.name())
    });
    Ok(all)
}

fn check_names(names: &[String], known: &[&str]) -> Result<()> {
    match names.iter().find(|name| !known.contains(&name.as_str())) {
        Some(name) => bail!("unknown name `{name}`; known names: {}", known.join(", ")),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(faults: &[&str], means: &[&str]) -> Settings {
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        Settings {
            faults: names(faults),
            means: names(means),
            runs: 1,
            seed: 1,
            list: false,
            out: PathBuf::new(),
        }
    }

    #[test]
    fn cells_are_chosen_by_name() {
        assert_eq!(wanted(&settings(&[], &[])).unwrap().len(), 34);
        assert_eq!(wanted(&settings(&[], &["agents"])).unwrap().len(), 4);
        assert_eq!(wanted(&settings(&["freeze"], &["failing-bmc"])).unwrap().len(), 1);
        assert!(wanted(&settings(&["frost"], &[])).is_err());
    }

    #[test]
    fn each_run_has_all_cells_in_its_own_order() {
        let all = cells();
        let (mut one, other) = (in_order(1, &all), in_order(2, &all));
        assert_ne!(one, other);
        one.sort();
        let mut sorted = all.clone();
        sorted.sort();
        assert_eq!(one, sorted);
    }
}
