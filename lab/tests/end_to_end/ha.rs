//! A protected VM whose host fails: it stays where its host is alive, and starts on another host
//! where it is dead, also without a manager if agents protect it. Its guest proves on its disk that
//! it never ran twice.

mod two_clusters;

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use godwit_lab::ha::{Cell, Fault, Manner, Means, Pace, Setting, Stage};

/// Faults, those first after which the VM stays.
const FAULTS: [Fault; 3] = [Fault::RestartAgent, Fault::CutManagement, Fault::PowerOff];
/// Longer than a silence that ends a term (docs/ha-terms.md).
const WATCHED: Duration = Duration::from_secs(20);

#[test]
fn a_protected_vm_restarts_only_if_its_host_is_dead() -> Result<()> {
    let setting = Setting { datastores: 1, means: Means::Both };
    let pace = Pace { watched: WATCHED, frozen: WATCHED };
    // No clock of a host is that of another one, or of the manager.
    let manner = Manner { pace, clocks_apart: true, ..Manner::default() };
    let Some(mut stage) = Stage::begin_with("ha", setting, manner)? else { return Ok(()) };
    for fault in FAULTS {
        let report = stage.try_cell(Cell { setting, fault });
        ensure!(report.error.is_none(), "{}: {report:#?}", report.cell.name());
        let to = report.to.context("the guest is nowhere")?;
        eprintln!("  {}: from host {} to host {to}", report.cell.name(), report.from);
    }
    // The proof would find a second writer.
    stage.expect_two_writers_found()?;
    stage.finish()
}

#[test]
fn a_vm_of_agents_restarts_without_a_manager() -> Result<()> {
    let setting = Setting { datastores: 1, means: Means::Agents };
    let pace = Pace { watched: WATCHED, frozen: WATCHED };
    let Some(mut stage) = Stage::begin("ha-own", setting, pace)? else { return Ok(()) };
    let report = stage.try_cell(Cell { setting, fault: Fault::PowerOff });
    ensure!(report.error.is_none(), "{}: {report:#?}", report.cell.name());
    stage.finish()
}
