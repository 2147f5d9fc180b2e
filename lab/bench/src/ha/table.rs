//! Lines and table for people.

use std::collections::BTreeSet;
use std::fmt::Write;

use godwit_lab::ha::{Cell, CellReport, Expected};

use crate::figures::{Spread, cell as figure, dash};

/// Renders one run of a cell.
pub(crate) fn line(report: &CellReport, run: u32) -> String {
    let verdict = if report.error.is_none() { "pass" } else { "FAIL" };
    let to = report.to.as_deref().unwrap_or("?");
    let seconds = |time: Option<f64>| time.map_or_else(dash, |time| format!("{time:.1} s"));
    let mut text = format!(
        "  {verdict}  run {run}  {:44} {} to {to}  started {:>7}  writes {:>7}  ({:.0} s)\n",
        report.cell.name(),
        report.from,
        seconds(report.started_s),
        seconds(report.back_s),
        report.seconds
    );
    if let Some(error) = &report.error {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "          {}", error.replace('\n', "\n          "));
    }
    text
}

/// Renders all cells: runs, and the times until the VM runs and its guest writes.
pub(crate) fn render(reports: &[CellReport]) -> String {
    let mut cells: Vec<Cell> = reports.iter().map(|report| report.cell).collect();
    cells.sort();
    cells.dedup();
    let mut text = format!(
        "\nmedians (least to most) after the fault\n  {:44} {:>7}  {:10} {:>20} {:>20}\n",
        "cell", "passed", "guest", "started, s", "writes, s"
    );
    for cell in cells {
        let runs: Vec<&CellReport> = reports.iter().filter(|one| one.cell == cell).collect();
        let passed = runs.iter().filter(|report| report.error.is_none()).count();
        let of = |time: fn(&CellReport) -> Option<f64>| {
            figure(Spread::of(runs.iter().filter_map(|report| time(report))), 1)
        };
        let place = match cell.expected() {
            Expected::Stays => "stays",
            Expected::Elsewhere => "elsewhere",
        };
        let share = format!("{passed}/{}", runs.len());
        // Writing to a string cannot fail.
        let _ = writeln!(
            text,
            "  {:44} {share:>7}  {place:10} {:>20} {:>20}",
            cell.name(),
            of(|report| report.started_s),
            of(|report| report.back_s)
        );
    }
    text + &summary(reports)
}

/// Renders the last line: what passed, and medians and largest times.
fn summary(reports: &[CellReport]) -> String {
    let is_doubled = |report: &&CellReport| {
        report
            .error
            .as_ref()
            .is_some_and(|error| ["TWO WRITERS", "DOUBLED"].iter().any(|mark| error.contains(mark)))
    };
    let doubled = reports.iter().filter(is_doubled).count();
    let cells = |has_failed: bool| -> BTreeSet<Cell> {
        let chosen = reports.iter().filter(|report| report.error.is_some() || !has_failed);
        chosen.map(|report| report.cell).collect()
    };
    let (all, failed) = (cells(false).len(), cells(true).len());
    let passed = reports.iter().filter(|report| report.error.is_none()).count();
    let time = |of: fn(&CellReport) -> Option<f64>| {
        Spread::of(reports.iter().filter_map(of))
            .map_or_else(dash, |Spread { median, max, .. }| {
                format!("{median:.1} s (largest {max:.1} s)")
            })
    };
    format!(
        "\n{} of {all} cells and {passed} of {} runs passed; two writers in {doubled}; started {}, \
         writes {}\n",
        all - failed,
        reports.len(),
        time(|report| report.started_s),
        time(|report| report.back_s)
    )
}

#[cfg(test)]
mod tests {
    use godwit_lab::ha::{Fault, Means, Setting};

    use super::*;

    fn report(fault: Fault, back_s: Option<f64>, error: Option<&str>) -> CellReport {
        CellReport {
            cell: Cell { setting: Setting { datastores: 1, means: Means::Both }, fault },
            from: "b".to_owned(),
            to: Some("c".to_owned()),
            started_s: back_s.map(|time| time - 5.0),
            back_s,
            seconds: 60.0,
            boots: 2,
            error: error.map(str::to_owned),
        }
    }

    #[test]
    fn a_cell_has_a_row_and_two_writers_are_counted() {
        let reports = [
            report(Fault::PowerOff, Some(25.0), None),
            report(Fault::PowerOff, Some(27.0), None),
            report(Fault::CutStorage, None, Some("TWO WRITERS: boot 0 was late")),
        ];
        let text = render(&reports);
        assert!(text.contains("26.0 (25.0-27.0)") && text.contains("2/2"), "{text}");
        assert!(text.contains("0/1") && text.contains("two writers in 1"), "{text}");
        let last = "1 of 2 cells and 2 of 3 runs passed; two writers in 1; started 21.0 s (largest \
                    22.0 s), writes 26.0 s (largest 27.0 s)\n";
        assert!(text.ends_with(last), "{text}");
        assert!(summary(&[]).contains("0 of 0 runs") && summary(&[]).ends_with("writes -\n"));
        assert!(line(&reports[0], 3).contains("pass  run 3"), "{}", line(&reports[0], 3));
        assert!(line(&reports[2], 1).contains("late"), "{}", line(&reports[2], 1));
    }
}
