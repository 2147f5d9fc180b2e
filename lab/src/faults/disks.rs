//! Faults of migrations in which disks travel. Each host has a file system of its own for images,
//! whose power can be cut ([`crate::power`]). A guest writes both of its disks all the time; after
//! each fault it checks every block, and moves again with its disks, which continues the transfer
//! that the fault interrupted.

mod cells;
mod scene;

use std::time::Instant;

use anyhow::{Context, Result, anyhow};
use serde::{Deserialize, Serialize};

use super::Place;
use crate::power::Store;
use crate::trial::must_run;

pub use cells::{DiskCell, DiskFault, DiskMoment, disk_matrix};

use scene::Scene;

/// Result of a cell.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct DiskCellReport {
    #[serde(flatten)]
    pub cell: DiskCell,
    /// Location of the guest afterwards; `None` if unknown.
    pub place: Option<Place>,
    /// Statements of the agents about the migration and the VM.
    pub reported: Vec<String>,
    /// Part of the disks' content that was sent twice, in percent, as the reports say; `None` if no
    /// migration with a report followed.
    pub resent_percent: Option<f64>,
    /// What the source's NIC sent until the disks were at the destination, in MiB; `None` if they
    /// came there by no migration.
    pub sent_mib: Option<f64>,
    /// Failed check; `None` if all passed.
    pub error: Option<String>,
    /// Reason for skipping the cell; `None` if it was tried.
    pub skipped: Option<String>,
    /// Duration with all checks, in seconds.
    pub seconds: f64,
}

impl DiskCellReport {
    /// Returns whether all checks passed.
    #[must_use]
    pub fn is_passed(&self) -> bool {
        self.error.is_none() && self.skipped.is_none()
    }
}

/// Findings of a cell so far.
#[derive(Debug, Default)]
struct Findings {
    place: Option<Place>,
    reported: Vec<String>,
    resent_percent: Option<f64>,
    sent_mib: Option<f64>,
}

/// Lab and guest in which one cell after another is tried.
#[derive(Debug)]
pub struct DiskStage {
    name: String,
    /// `None` before the first cell, and after a cell that left a state that cannot be reused.
    scene: Option<Scene>,
}

impl DiskStage {
    /// Prepares a stage. The lab starts with the first cell.
    #[must_use]
    pub fn new(name: &str) -> DiskStage {
        DiskStage { name: name.to_owned(), scene: None }
    }

    /// Tries a fault at a moment and checks everything afterwards. The report names a failed check.
    /// In that case the logs are kept in `out/trial/NAME-MOMENT-FAULT`, and the next cell gets a
    /// new lab.
    pub fn try_cell(&mut self, cell: DiskCell) -> DiskCellReport {
        let begun = Instant::now();
        let mut findings = Findings::default();
        let skipped = Store::missing();
        let tried = match &skipped {
            Some(why) if must_run() => {
                Err(anyhow!("cannot try the cell on this machine, and none may be skipped: {why}"))
            }
            Some(_) => Ok(()),
            None => self.try_in_scene(cell, &mut findings),
        };
        DiskCellReport {
            cell,
            place: findings.place,
            reported: findings.reported,
            resent_percent: findings.resent_percent,
            sent_mib: findings.sent_mib,
            error: tried.err().map(|error| format!("{error:#}")),
            skipped,
            seconds: begun.elapsed().as_secs_f64(),
        }
    }

    fn try_in_scene(&mut self, cell: DiskCell, findings: &mut Findings) -> Result<()> {
        let mut scene = match self.scene.take() {
            Some(scene) => scene,
            None => Scene::begin(&self.name)?.context("cannot start a lab")?,
        };
        let tried = scene.try_cell(cell, findings);
        match &tried {
            Ok(()) => self.scene = Some(scene),
            Err(_) => {
                let name = format!("{}-{}-{}", self.name, cell.moment.name(), cell.fault.name());
                scene.keep_logs(&name);
                // Only the removal of the lab still matters.
                scene.finish().context("the lab of a cell that failed")?;
            }
        }
        tried
    }

    /// Takes the lab down and checks that nothing is left.
    ///
    /// # Errors
    /// Something is left.
    pub fn finish(self) -> Result<()> {
        self.scene.map_or(Ok(()), Scene::finish)
    }
}
