//! Each kind of fault, injected for real at the most informative moments of a migration. `make
//! reliability` tries all faults at all moments (docs/reliability.md).

use anyhow::{Result, ensure};
use godwit_lab::faults::{Cell, Fault, Moment, Place, Stage, StagePlan, lies};

/// Tries all cells in one lab and reports the failures together.
fn try_all(name: &str, plan: StagePlan, cells: &[(Fault, Moment)]) -> Result<()> {
    let Some(mut stage) = Stage::begin(name, plan)? else { return Ok(()) };
    let mut failed = Vec::new();
    for (fault, moment) in cells {
        let report = stage.try_cell(Cell::at(*moment, *fault));
        let what = format!("{} at {}", fault.name(), moment.name());
        let place = report.place.map_or("?", Place::name);
        eprintln!("  {what}: {place}, {:.0} s; {}", report.seconds, report.reported.join("; "));
        if let Some(why) = &report.skipped {
            eprintln!("skipped: {what}: {why}");
        }
        failed.extend(report.error.map(|error| format!("{what}: {error}")));
    }
    stage.finish()?;
    ensure!(failed.is_empty(), "{}", failed.join("\n"));
    Ok(())
}

#[test]
fn agents_that_are_killed() -> Result<()> {
    let cells = [
        (Fault::KillSourceAgent, Moment::PreCopy),
        (Fault::KillSourceAgent, Moment::Committed),
        (Fault::KillDestinationAgent, Moment::Started),
    ];
    try_all("faults-agents", StagePlan::Usual, &cells)
}

#[test]
fn hypervisors_that_are_killed_and_the_command() -> Result<()> {
    let cells = [
        (Fault::KillCli, Moment::PreCopy),
        (Fault::KillSourceQemu, Moment::Switchover),
        (Fault::KillDestinationQemu, Moment::Committed),
    ];
    try_all("faults-qemus", StagePlan::Usual, &cells)
}

#[test]
fn links_that_are_cut() -> Result<()> {
    let cells = [(Fault::CutBriefly, Moment::PreCopy), (Fault::CutForGood, Moment::Loaded)];
    try_all("faults-links", StagePlan::Usual, &cells)
}

#[test]
fn peers_that_fall_silent() -> Result<()> {
    try_all("faults-silence", StagePlan::Usual, &[(Fault::SilentSource, Moment::Committed)])
}

#[test]
fn disks_and_memory_that_are_full() -> Result<()> {
    let cells = [
        (Fault::SourceDiskFull, Moment::PreCopy),
        (Fault::RamFull, Moment::Prepare),
        (Fault::OutOfMemory, Moment::Prepare),
    ];
    try_all("faults-full", StagePlan::Usual, &cells)
}

#[test]
fn guests_that_shut_themselves_down() -> Result<()> {
    // `make reliability` covers the later moments. docs/reliability.md lists those that fail.
    let cells = [(Fault::GuestShutDown, Moment::PreCopy), (Fault::GuestShutDown, Moment::Started)];
    try_all("faults-shutdown", StagePlan::Usual, &cells)
}

#[test]
fn clocks_that_are_stepped() -> Result<()> {
    let cells =
        [(Fault::ClockForward, Moment::PreCopy), (Fault::ClockBackward, Moment::Switchover)];
    try_all("faults-clocks", StagePlan::Clocks, &cells)
}

#[test]
fn a_byte_that_changes_on_its_way() -> Result<()> {
    try_all("faults-byte", StagePlan::Clear, &[(Fault::CorruptByte, Moment::PreCopy)])
}

#[test]
fn peers_that_lie() -> Result<()> {
    for report in lies(1, 12)? {
        eprintln!("  {}: {}", report.what, report.refusals.join(", "));
        ensure!(report.error.is_none(), "{}: {}", report.what, report.error.unwrap_or_default());
    }
    Ok(())
}
