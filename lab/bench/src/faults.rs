//! Faults at the moments of a migration: each is done for real, and then it is looked where the guest is, that it is whole, that nothing
//! is left over and that it moves again. The table of docs/reliability.md is written by the run that tried it.

mod table;

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use godwit_lab::faults::{
    Cell, CellReport, Fault, LieReport, Moment, Stage, StagePlan, lies, matrix, singles,
};
use godwit_lab::random::Random;
use serde::{Deserialize, Serialize};

use crate::machine::Machine;

/// How many peers lie in each part.
const LIARS: u64 = 100;

/// Options of the scenario.
#[derive(Debug, Clone, Args)]
pub(crate) struct Settings {
    /// Faults to try, by their names [default: all]
    #[arg(long = "fault", value_name = "NAME", value_delimiter = ',')]
    faults: Vec<String>,
    /// Moments at which to try them [default: all]
    #[arg(long = "phase", alias = "moment", value_name = "NAME", value_delimiter = ',')]
    moments: Vec<String>,
    /// Decides in which order they are tried, and what a lying peer says [default: 1]
    #[arg(long, value_name = "NUMBER", default_value_t = 1)]
    seed: u64,
    /// Say what would be tried, and try nothing
    #[arg(long)]
    list: bool,
    /// Write what was found into the documentation: what was not tried stays as it was found before
    #[arg(long)]
    write: bool,
    /// The document with the table between its markers; the JSON file lies beside it
    #[arg(long, value_name = "FILE", default_value = "docs/reliability.md")]
    document: PathBuf,
}

/// What was found, as it is kept beside the document.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Found {
    pub(crate) qemu: String,
    pub(crate) kernel: String,
    pub(crate) cpu: String,
    pub(crate) cores: usize,
    pub(crate) seed: u64,
    pub(crate) cells: Vec<CellReport>,
    pub(crate) lies: Vec<LieReport>,
}

/// Tries, prints, writes. False where something was not as it must be.
pub(crate) fn run(settings: &Settings) -> Result<bool> {
    let cells = wanted(settings)?;
    let with_lies = settings.moments.is_empty()
        && (settings.faults.is_empty() || settings.faults.iter().any(|name| name == "lies"));
    if settings.list {
        for cell in &cells {
            println!("{:36} {}", cell.fault_name(), cell.moment.name());
        }
        return Ok(true);
    }
    let machine = Machine::ready()?;
    println!("settings  seed {}, {} cells\n", settings.seed, cells.len());
    let mut found = Found {
        qemu: machine.qemu.clone(),
        kernel: machine.kernel.clone(),
        cpu: machine.cpu.clone(),
        cores: machine.cores,
        seed: settings.seed,
        cells: Vec::new(),
        lies: Vec::new(),
    };
    for plan in [StagePlan::Usual, StagePlan::Clocks, StagePlan::Clear] {
        let of_plan: Vec<Cell> =
            cells.iter().copied().filter(|cell| cell.stage() == plan).collect();
        found.cells.extend(try_all(plan, &of_plan)?);
    }
    if with_lies {
        found.lies = lies(settings.seed, LIARS)?;
        for lie in &found.lies {
            let verdict = lie.error.as_deref().map_or(Verdict::Passed, Verdict::Failed);
            print_line(verdict, &lie.what, "", &lie.told);
        }
    }
    print!("{}", table::render_summary(&found));
    let none_failed = found.cells.iter().all(|cell| cell.error.is_none())
        && found.lies.iter().all(|lie| lie.error.is_none());
    if settings.write {
        write(&settings.document, found)?;
    }
    Ok(none_failed)
}

fn wanted(settings: &Settings) -> Result<Vec<Cell>> {
    let all: Vec<Cell> = matrix().into_iter().chain(singles()).collect();
    let mut faults: Vec<String> =
        Fault::MATRIX.iter().chain(&Fault::SINGLE).map(|fault| fault.name().to_owned()).collect();
    faults.push("lies".to_owned());
    faults.extend(all.iter().filter(|cell| cell.write.is_some()).map(|cell| cell.fault_name()));
    let moments: Vec<String> = Moment::ALL.iter().map(|moment| moment.name().to_owned()).collect();
    check_names(&settings.faults, &faults)?;
    check_names(&settings.moments, &moments)?;
    let is_wanted = |names: &[String], name: &str| {
        names.is_empty() || names.iter().any(|wanted| wanted == name)
    };
    let mut cells: Vec<Cell> = all
        .into_iter()
        .filter(|cell| {
            let is_fault_wanted = is_wanted(&settings.faults, cell.fault.name())
                || is_wanted(&settings.faults, &cell.fault_name());
            is_fault_wanted && is_wanted(&settings.moments, cell.moment.name())
        })
        .collect();
    // Each run in an order of its own: what one cell leaves shows in the next.
    let mixed = |number: u64| Random::new(number).next();
    let write = |cell: &Cell| {
        cell.write.map_or(0, |failing| failing.write as u64 * 2 + failing.error as u64)
    };
    let number = |cell: &Cell| write(cell) << 16 | (cell.fault as u64) << 8 | cell.moment as u64;
    let place = |cell: &Cell| mixed(settings.seed ^ mixed(number(cell)));
    cells.sort_by_key(place);
    Ok(cells)
}

fn check_names(names: &[String], known: &[String]) -> Result<()> {
    match names.iter().find(|name| !known.contains(name)) {
        Some(name) => bail!("there is no `{name}`; there are {}", known.join(", ")),
        None => Ok(()),
    }
}

fn try_all(plan: StagePlan, cells: &[Cell]) -> Result<Vec<CellReport>> {
    if cells.is_empty() {
        return Ok(Vec::new());
    }
    let mut stage = Stage::begin("faults", plan)?.context("no lab can be had here")?;
    let mut reports = Vec::new();
    for cell in cells {
        let report = stage.try_cell(*cell);
        let found = match (&report.skipped, report.place) {
            (Some(why), _) => why,
            (None, Some(place)) => place.name(),
            (None, None) => "?",
        };
        let what = format!("{} at {}", cell.fault_name(), cell.moment.name());
        let verdict = Verdict::of(&report);
        print_line(verdict, &format!("{what:40} {:5.1} s", report.seconds), found, &report.told);
        reports.push(report);
    }
    stage.finish()?;
    Ok(reports)
}

/// What came of a cell, or of liars.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict<'a> {
    Passed,
    Failed(&'a str),
    /// It was not tried.
    Skipped,
}

impl Verdict<'_> {
    fn of(report: &CellReport) -> Verdict<'_> {
        match &report.error {
            Some(error) => Verdict::Failed(error),
            None if report.skipped.is_some() => Verdict::Skipped,
            None => Verdict::Passed,
        }
    }
}

fn print_line(verdict: Verdict<'_>, what: &str, found: &str, told: &[String]) {
    let word = match verdict {
        Verdict::Passed => "pass",
        Verdict::Failed(_) => "FAIL",
        Verdict::Skipped => "skip",
    };
    println!("  {word}  {what}  {found}");
    for line in told {
        println!("          told: {line}");
    }
    if let Verdict::Failed(error) = verdict {
        println!("          {}", error.replace('\n', "\n          "));
    }
}

/// Puts what was found beside what was found before, into the JSON file and into the document.
fn write(document: &Path, mut found: Found) -> Result<()> {
    let json = document.with_extension("json");
    if let Ok(text) = fs::read_to_string(&json) {
        let before: Found = serde_json::from_str(&text)
            .with_context(|| format!("{} is not readable", json.display()))?;
        let is_new = |old: &CellReport| found.cells.iter().any(|new| new.cell == old.cell);
        let kept: Vec<CellReport> =
            before.cells.into_iter().filter(|old| old.cell.is_possible() && !is_new(old)).collect();
        found.cells.extend(kept);
        if found.lies.is_empty() {
            found.lies = before.lies;
        }
    }
    found.cells.sort_by_key(|report| (report.cell.fault, report.cell.moment, report.cell.write));
    let text = fs::read_to_string(document)
        .with_context(|| format!("can't read {}", document.display()))?;
    let (head, rest) =
        text.split_once(table::BEGIN).context("the document lacks the table's first marker")?;
    let (_, tail) =
        rest.split_once(table::END).context("the document lacks the table's second marker")?;
    let table = table::render(&found);
    ensure!(
        !table.contains(table::BEGIN) && !table.contains(table::END),
        "a marker within the table"
    );
    fs::write(document, format!("{head}{}\n{table}{}{tail}", table::BEGIN, table::END))?;
    fs::write(&json, serde_json::to_string_pretty(&found)? + "\n")?;
    println!("\nwritten: {} and {}", document.display(), json.display());
    Ok(())
}
