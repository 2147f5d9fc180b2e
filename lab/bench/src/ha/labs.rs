//! Which lab tries which cells, and labs at the same time.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};

use anyhow::{Context, Result, anyhow};
use godwit_lab::ha::{Cell, Manner, Parts, Setting, Stage};
use godwit_lab::random::Random;

use super::{Settings, Tried};

/// Cells that need the same lab, in the order in which it tries them.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Lab {
    setting: Setting,
    parts: Parts,
    /// Cells with the numbers of their runs.
    runs: Vec<(u32, Cell)>,
}

/// Returns the labs that try these cells, without the runs that were tried before. Those with most
/// runs come first, so that none of them is left alone at the end.
pub(super) fn plan(settings: &Settings, wanted: &[Cell], before: &[Tried]) -> Vec<Lab> {
    let needs = |cell: &Cell| (cell.setting, cell.fault.parts());
    let mut all: Vec<(Setting, Parts)> = wanted.iter().map(needs).collect();
    all.sort();
    all.dedup();
    let is_new = |(run, cell): &(u32, Cell)| {
        !before.iter().any(|tried| tried.run == *run && tried.report.cell == *cell)
    };
    let lab = |(setting, parts): (Setting, Parts)| {
        let cells: Vec<Cell> =
            wanted.iter().copied().filter(|cell| needs(cell) == (setting, parts)).collect();
        let runs = (1..=settings.runs).flat_map(|run| {
            let cells = in_order(settings.seed ^ u64::from(run), &cells);
            cells.into_iter().map(move |cell| (run, cell))
        });
        Lab { setting, parts, runs: runs.filter(is_new).collect() }
    };
    let mut labs: Vec<Lab> = all.into_iter().map(lab).collect();
    labs.retain(|lab| !lab.runs.is_empty());
    labs.sort_by_key(|lab| std::cmp::Reverse(lab.runs.len()));
    labs
}

/// Returns the cells in the order of a seed. Each run has its own, so that remains of one cell show
/// in the next.
fn in_order(seed: u64, cells: &[Cell]) -> Vec<Cell> {
    let mut random = Random::new(seed);
    let mut placed: Vec<(u64, Cell)> = cells.iter().map(|cell| (random.next(), *cell)).collect();
    placed.sort();
    placed.into_iter().map(|(_, cell)| cell).collect()
}

/// Tries all cells, in so many labs at the same time. `keep` has each run when it is over; an error
/// of it ends everything.
pub(super) fn try_all(
    labs: &[Lab],
    at_once: Option<u32>,
    mut keep: impl FnMut(Tried) -> Result<()>,
) -> Result<()> {
    let next = AtomicUsize::new(0);
    let next_lab = || labs.get(next.fetch_add(1, Ordering::Relaxed));
    std::thread::scope(|scope| -> Result<()> {
        let (sender, tried) = sync_channel(1);
        let work = |sender: SyncSender<Tried>| -> Result<()> {
            while let Some(lab) = next_lab() {
                lab.try_cells(at_once, &sender)?;
            }
            Ok(())
        };
        let workers: Vec<_> = (0..at_once.unwrap_or(1))
            .map(|_| {
                let sender = sender.clone();
                scope.spawn(move || work(sender))
            })
            .collect();
        drop(sender);
        for one in tried {
            keep(one)?;
        }
        let panicked = |_| Err(anyhow!("a lab's thread panicked"));
        workers.into_iter().try_for_each(|worker| worker.join().unwrap_or_else(panicked))
    })
}

impl Lab {
    /// Tries the cells in one lab after another: a new one after each failure.
    fn try_cells(&self, at_once: Option<u32>, tried: &SyncSender<Tried>) -> Result<()> {
        let manner = Manner { parts: self.parts, at_once, ..Manner::default() };
        let mut stage: Option<Stage> = None;
        for (run, cell) in self.runs.iter().copied() {
            let current = match &mut stage {
                Some(stage) => stage,
                None => {
                    let begun = Stage::begin_with("bench-ha", self.setting, manner)?;
                    stage.insert(begun.context("cannot start a lab here")?)
                }
            };
            let report = current.try_cell(cell);
            if report.error.is_some() {
                current.keep_logs(&format!("ha-{}-{run}", cell.name().replace(", ", "-")));
                stage = None;
            }
            tried.send(Tried { run, report }).context("the runs are not kept any more")?;
        }
        stage.map_or(Ok(()), Stage::finish)
    }
}

#[cfg(test)]
mod tests {
    use godwit_lab::ha::cells;

    use super::super::tests::{settings, tried};
    use super::*;

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

    #[test]
    fn a_lab_has_the_runs_of_its_setting_that_were_not_tried() {
        let (all, settings) = (cells(), settings(&[], &[]));
        let labs = plan(&settings, &all, &[]);
        let count = |labs: &[Lab]| labs.iter().map(|lab| lab.runs.len()).sum::<usize>();
        assert_eq!(count(&labs), all.len());
        assert!(labs.is_sorted_by_key(|lab| std::cmp::Reverse(lab.runs.len())));
        for lab in &labs {
            let mut cells = lab.runs.iter().map(|(_, cell)| cell);
            let is_own =
                |cell: &Cell| (cell.setting, cell.fault.parts()) == (lab.setting, lab.parts);
            assert!(cells.all(is_own), "{lab:?}");
        }
        let before = [tried(1, all[0]), tried(2, all[1])];
        assert_eq!(count(&plan(&settings, &all, &before)), all.len() - 1);
        let before: Vec<Tried> = all.iter().map(|cell| tried(1, *cell)).collect();
        assert!(plan(&settings, &all, &before).is_empty());
    }

    #[test]
    fn an_error_of_a_lab_ends_its_thread_and_no_lab_is_no_error() {
        try_all(&[], Some(3), |_| Ok(())).unwrap();
    }
}
