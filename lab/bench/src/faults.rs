//! Faults at the moments of a migration. Each fault is injected for real. The scenario then checks
//! where the guest is, that it is whole, that nothing is left over and that it can migrate again. A
//! run writes its results into the table of docs/reliability.md.

mod table;

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use godwit_lab::faults::{
    Cell, CellReport, DiskCell, DiskCellReport, DiskFault, DiskMoment, DiskStage, Fault, LieReport,
    Moment, Stage, StagePlan, disk_matrix, lies, matrix, singles,
};
use godwit_lab::random::Random;
use godwit_types::TrackingUse;
use serde::{Deserialize, Serialize};

use crate::machine::Machine;

/// Name of all faults of migrations with disks.
const DISKS: &str = "disks";
/// Number of lying peers in each part.
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
    /// Seed of the order of the cells, and of the lies
    #[arg(long, value_name = "NUMBER", default_value_t = 1)]
    seed: u64,
    /// List the cells without trying them
    #[arg(long)]
    list: bool,
    /// How the migrations find dirty pages, each cell by each of them: auto, faults or scans
    #[arg(
        long,
        value_name = "MEANS",
        value_delimiter = ',',
        default_values = ["auto"],
        value_parser = tracking,
    )]
    tracking: Vec<TrackingUse>,
    /// Write the results into the document; results of cells that were not tried are kept
    #[arg(long)]
    write: bool,
    /// Document with the table between its markers; the JSON file is beside it
    #[arg(long, value_name = "FILE", default_value = "docs/reliability.md")]
    document: PathBuf,
}

/// Results, as stored beside the document.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Found {
    pub(crate) qemu: String,
    pub(crate) kernel: String,
    pub(crate) cpu: String,
    pub(crate) cores: usize,
    pub(crate) seed: u64,
    pub(crate) cells: Vec<CellReport>,
    pub(crate) lies: Vec<LieReport>,
    /// Migrations with disks.
    #[serde(default)]
    pub(crate) disks: Vec<DiskCellReport>,
}

/// Tries, prints, writes. Returns false if a check failed.
pub(crate) fn run(settings: &Settings) -> Result<bool> {
    let (cells, with_disks) = (wanted(settings)?, wanted_with_disks(settings));
    let with_lies = settings.moments.is_empty()
        && (settings.faults.is_empty() || settings.faults.iter().any(|name| name == "lies"));
    if settings.list {
        for cell in &cells {
            println!("{:36} {}", cell.fault_name(), cell.moment.name());
        }
        for cell in &with_disks {
            println!("{:36} {}", cell.fault.name(), cell.moment.name());
        }
        return Ok(true);
    }
    let machine = Machine::ready()?;
    println!(
        "settings  seed {}, {} cells, dirty pages by {}\n",
        settings.seed,
        cells.len() + with_disks.len(),
        means(settings.tracking.iter().copied()),
    );
    let mut found = Found {
        qemu: machine.qemu.clone(),
        kernel: machine.kernel.clone(),
        cpu: machine.cpu.clone(),
        cores: machine.cores,
        seed: settings.seed,
        cells: Vec::new(),
        lies: Vec::new(),
        disks: Vec::new(),
    };
    for plan in [StagePlan::Usual, StagePlan::Clocks, StagePlan::Clear] {
        let of_plan: Vec<Cell> =
            cells.iter().copied().filter(|cell| cell.stage() == plan).collect();
        found.cells.extend(try_all(plan, &of_plan, &settings.tracking)?);
    }
    found.disks = try_with_disks(&with_disks)?;
    if with_lies {
        found.lies = lies(settings.seed, LIARS)?;
        for lie in &found.lies {
            let verdict = lie.error.as_deref().map_or(Verdict::Passed, Verdict::Failed);
            print_line(verdict, &lie.what, "", &lie.refusals);
        }
    }
    print!("{}", table::render_summary(&found));
    let none_failed = found.cells.iter().all(|cell| cell.error.is_none())
        && found.disks.iter().all(|cell| cell.error.is_none())
        && found.lies.iter().all(|lie| lie.error.is_none());
    if settings.write {
        write(&settings.document, found)?;
    }
    Ok(none_failed)
}

/// Lists means of finding dirty pages, each once.
fn means(tracking: impl Iterator<Item = TrackingUse>) -> String {
    let mut names: Vec<&str> = tracking.map(means_name).collect();
    names.sort_unstable();
    names.dedup();
    names.join(" and ")
}

fn means_name(tracking: TrackingUse) -> &'static str {
    match tracking {
        TrackingUse::Auto => "auto",
        TrackingUse::Faults => "faults",
        TrackingUse::Scans => "scans",
    }
}

pub(crate) fn tracking(name: &str) -> Result<TrackingUse, String> {
    match name {
        "auto" => Ok(TrackingUse::Auto),
        "faults" => Ok(TrackingUse::Faults),
        "scans" => Ok(TrackingUse::Scans),
        _ => Err("not one of auto, faults, scans".to_owned()),
    }
}

fn wanted(settings: &Settings) -> Result<Vec<Cell>> {
    let all: Vec<Cell> = matrix().into_iter().chain(singles()).collect();
    let mut faults: Vec<String> =
        Fault::MATRIX.iter().chain(&Fault::SINGLE).map(|fault| fault.name().to_owned()).collect();
    faults.extend(["lies", DISKS].map(str::to_owned));
    faults.extend(DiskFault::ALL.map(|fault| fault.name().to_owned()));
    faults.extend(all.iter().filter(|cell| cell.write.is_some()).map(|cell| cell.fault_name()));
    let moments: Vec<String> = Moment::ALL
        .map(Moment::name)
        .into_iter()
        .chain(DiskMoment::ALL.map(DiskMoment::name))
        .map(str::to_owned)
        .collect();
    check_names(&settings.faults, &faults)?;
    check_names(&settings.moments, &moments)?;
    let mut cells: Vec<Cell> = all
        .into_iter()
        .filter(|cell| {
            let is_fault_wanted = is_wanted(&settings.faults, cell.fault.name())
                || is_wanted(&settings.faults, &cell.fault_name());
            is_fault_wanted && is_wanted(&settings.moments, cell.moment.name())
        })
        .collect();
    let write = |cell: &Cell| {
        cell.write.map_or(0, |failing| failing.write as u64 * 2 + failing.error as u64)
    };
    let number = |cell: &Cell| write(cell) << 16 | (cell.fault as u64) << 8 | cell.moment as u64;
    cells.sort_by_key(|cell| place(settings.seed, number(cell)));
    Ok(cells)
}

/// Returns the wanted cells of migrations with disks. The names have been checked.
fn wanted_with_disks(settings: &Settings) -> Vec<DiskCell> {
    let mut cells: Vec<DiskCell> = disk_matrix()
        .into_iter()
        .filter(|DiskCell { fault, moment }| {
            let is_fault_wanted =
                is_wanted(&settings.faults, fault.name()) || is_wanted(&settings.faults, DISKS);
            is_fault_wanted && is_wanted(&settings.moments, moment.name())
        })
        .collect();
    let number = |cell: &DiskCell| (cell.fault as u64) << 8 | cell.moment as u64;
    cells.sort_by_key(|cell| place(settings.seed, number(cell)));
    cells
}

fn is_wanted(names: &[String], name: &str) -> bool {
    names.is_empty() || names.iter().any(|wanted| wanted == name)
}

/// Returns the place of a cell in the order of a seed. Each run has its own order, so that remains
/// of one cell show in the next.
fn place(seed: u64, cell: u64) -> u64 {
    let mixed = |number: u64| Random::new(number).next();
    mixed(seed ^ mixed(cell))
}

fn check_names(names: &[String], known: &[String]) -> Result<()> {
    match names.iter().find(|name| !known.contains(name)) {
        Some(name) => bail!("unknown name `{name}`; known names: {}", known.join(", ")),
        None => Ok(()),
    }
}

fn try_all(plan: StagePlan, cells: &[Cell], tracking: &[TrackingUse]) -> Result<Vec<CellReport>> {
    if cells.is_empty() {
        return Ok(Vec::new());
    }
    let mut stage = Stage::begin("faults", plan)?.context("cannot start a lab here")?;
    let mut reports = Vec::new();
    for (cell, tracking) in cells.iter().flat_map(|cell| tracking.iter().map(move |by| (cell, by)))
    {
        stage = stage.tracking_by(*tracking);
        let report = stage.try_cell(*cell);
        let found = match (&report.skipped, report.place) {
            (Some(why), _) => why,
            (None, Some(place)) => place.name(),
            (None, None) => "?",
        };
        let what = format!("{} at {}", cell.fault_name(), cell.moment.name());
        let verdict = Verdict::of(&report);
        let by = means_name(report.tracking);
        let what = format!("{what:40} {by:6} {:5.1} s", report.seconds);
        print_line(verdict, &what, found, &report.reported);
        reports.push(report);
    }
    stage.finish()?;
    Ok(reports)
}

fn try_with_disks(cells: &[DiskCell]) -> Result<Vec<DiskCellReport>> {
    let mut stage = DiskStage::new("faults-disks");
    let mut reports = Vec::new();
    for cell in cells {
        let report = stage.try_cell(*cell);
        let found = match (&report.skipped, report.place) {
            (Some(why), _) => why,
            (None, Some(place)) => place.name(),
            (None, None) => "?",
        };
        let twice = report.resent_percent.map_or("-".to_owned(), |part| format!("{part:.1} %"));
        let what = format!("{:54} {:5.1} s  twice {twice:>6}", cell.name(), report.seconds);
        let verdict = Verdict::judge(report.error.as_deref(), report.skipped.is_some());
        print_line(verdict, &what, found, &report.reported);
        reports.push(report);
    }
    stage.finish()?;
    Ok(reports)
}

/// Result of a cell or of liars.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict<'a> {
    Passed,
    Failed(&'a str),
    /// The cell was not tried.
    Skipped,
}

impl Verdict<'_> {
    fn of(report: &CellReport) -> Verdict<'_> {
        Verdict::judge(report.error.as_deref(), report.skipped.is_some())
    }

    fn judge(error: Option<&str>, is_skipped: bool) -> Verdict<'_> {
        match error {
            Some(error) => Verdict::Failed(error),
            None if is_skipped => Verdict::Skipped,
            None => Verdict::Passed,
        }
    }
}

fn print_line(verdict: Verdict<'_>, what: &str, found: &str, details: &[String]) {
    let word = match verdict {
        Verdict::Passed => "pass",
        Verdict::Failed(_) => "FAIL",
        Verdict::Skipped => "skip",
    };
    println!("  {word}  {what}  {found}");
    for line in details {
        println!("          reported: {line}");
    }
    if let Verdict::Failed(error) = verdict {
        println!("          {}", error.replace('\n', "\n          "));
    }
}

/// Merges the results with earlier ones, in the JSON file and in the document.
fn write(document: &Path, mut found: Found) -> Result<()> {
    let json = document.with_extension("json");
    if let Ok(text) = fs::read_to_string(&json) {
        let before: Found = serde_json::from_str(&text)
            .with_context(|| format!("cannot read {}", json.display()))?;
        let replaces = |new: &CellReport, old: &CellReport| {
            new.cell == old.cell && (new.tracking == old.tracking || old.tracking.is_auto())
        };
        let is_new = |old: &CellReport| found.cells.iter().any(|new| replaces(new, old));
        let kept: Vec<CellReport> =
            before.cells.into_iter().filter(|old| old.cell.is_possible() && !is_new(old)).collect();
        found.cells.extend(kept);
        if found.lies.is_empty() {
            found.lies = before.lies;
        }
        let is_tried = |old: &DiskCellReport| found.disks.iter().any(|new| new.cell == old.cell);
        let kept: Vec<DiskCellReport> =
            before.disks.into_iter().filter(|old| !is_tried(old)).collect();
        found.disks.extend(kept);
    }
    found.disks.sort_by_key(|report| (report.cell.fault, report.cell.moment));
    let by = |report: &CellReport| means_name(report.tracking);
    found.cells.sort_by_key(|report| {
        (report.cell.fault, report.cell.moment, report.cell.write, by(report))
    });
    let text = fs::read_to_string(document)
        .with_context(|| format!("cannot read {}", document.display()))?;
    let (head, rest) =
        text.split_once(table::BEGIN).context("the document has no first marker of the table")?;
    let (_, tail) =
        rest.split_once(table::END).context("the document has no second marker of the table")?;
    let table = table::render(&found);
    ensure!(
        !table.contains(table::BEGIN) && !table.contains(table::END),
        "the table contains a marker"
    );
    fs::write(document, format!("{head}{}\n{table}{}{tail}", table::BEGIN, table::END))?;
    fs::write(&json, serde_json::to_string_pretty(&found)? + "\n")?;
    println!("\nwritten: {} and {}", document.display(), json.display());
    Ok(())
}
