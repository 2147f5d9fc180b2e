//! A protected VM whose host fails in every way, with different datastores and means: where it is
//! afterwards, how long it was away, and that it never ran twice.

mod labs;
mod table;

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use clap::Args;
use godwit_lab::ha::{Cell, CellReport, Fault, Means, cells};
use serde::{Deserialize, Serialize};

use crate::machine::Machine;
use crate::results::Output;

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
    /// Labs at the same time, each with a setting of its own [default: one, without other trials
    /// on this machine]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(2..=4))]
    at_once: Option<u32>,
    /// File of a run that was stopped: its runs are not repeated, and the others are added to it.
    /// The remaining options must be those of that run
    #[arg(long = "continue", value_name = "FILE")]
    continued: Option<PathBuf>,
    /// List the cells without trying them
    #[arg(long)]
    list: bool,
    /// Output directory of the JSON file
    #[arg(long, value_name = "DIR", default_value = "out/bench")]
    out: PathBuf,
}

/// A run of a cell.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Tried {
    /// Number of the run, from 1.
    run: u32,
    #[serde(flatten)]
    report: CellReport,
}

/// Measurements in the file.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Measured {
    cells: Vec<Tried>,
}

/// Tries, prints, writes. Returns false if a check failed.
pub(crate) fn run(settings: &Settings) -> Result<bool> {
    let wanted = wanted(settings)?;
    if settings.list {
        wanted.iter().for_each(|cell| println!("{}", cell.name()));
        return Ok(true);
    }
    let mut measured = settings.continued.as_deref().map(read).transpose()?.unwrap_or_default();
    let labs = labs::plan(settings, &wanted, &measured.cells);
    let machine = Machine::ready()?;
    println!(
        "settings  seed {}, {} cells, {} runs of each, {} of them tried before; three hosts, one \
         of them without VMs\n",
        settings.seed,
        wanted.len(),
        settings.runs,
        measured.cells.len()
    );
    let mut output = Output::new(&settings.out, "ha", &machine, settings)?;
    if let Some(path) = &settings.continued {
        output = output.with_path(path.clone());
    }
    labs::try_all(&labs, settings.at_once, |tried| {
        print!("{}", table::line(&tried.report, tried.run));
        measured.cells.push(tried);
        output.save(&measured)
    })?;
    let reports: Vec<CellReport> = measured.cells.into_iter().map(|one| one.report).collect();
    print!("{}", table::render(&reports));
    output.print_path();
    Ok(reports.iter().all(|report| report.error.is_none()))
}

/// Reads the runs of a file.
fn read(file: &Path) -> Result<Measured> {
    let text =
        fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
    serde_json::from_str(&text).with_context(|| format!("cannot parse {}", file.display()))
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

    pub(super) fn settings(faults: &[&str], means: &[&str]) -> Settings {
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        Settings {
            faults: names(faults),
            means: names(means),
            runs: 1,
            seed: 1,
            at_once: None,
            continued: None,
            list: false,
            out: PathBuf::new(),
        }
    }

    pub(super) fn tried(run: u32, cell: Cell) -> Tried {
        let report = CellReport {
            cell,
            from: "b".to_owned(),
            to: None,
            started_s: None,
            back_s: None,
            seconds: 60.0,
            boots: 1,
            error: Some("a reason".to_owned()),
        };
        Tried { run, report }
    }

    #[test]
    fn cells_are_chosen_by_name() {
        assert_eq!(wanted(&settings(&[], &[])).unwrap().len(), cells().len());
        assert_eq!(wanted(&settings(&[], &["agents"])).unwrap().len(), 5);
        assert_eq!(wanted(&settings(&["freeze"], &["failing-bmc"])).unwrap().len(), 1);
        assert!(wanted(&settings(&["frost"], &[])).is_err());
    }

    #[test]
    fn a_file_has_what_was_tried() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("ha.json");
        let mut one = tried(2, cells()[0]);
        one.report.started_s = Some(17.5);
        let measured = Measured { cells: vec![one] };
        let machine = Machine::inspect("no-qemu".as_ref());
        let settings = settings(&[], &[]);
        let output = Output::new(folder.path(), "ha", &machine, &settings).unwrap();
        output.with_path(file.clone()).save(&measured).unwrap();
        let again = read(&file).unwrap().cells;
        assert_eq!((again.len(), again[0].run, again[0].report.cell), (1, 2, cells()[0]));
        assert_eq!(again[0].report.started_s, Some(17.5));
        assert!(read(&folder.path().join("another")).is_err());
    }
}
