//! Tables of the results.

use std::fmt::Write;

use godwit_lab::faults::{Cell, CellReport, Fault, Moment, Place};

use super::Found;

/// Markers around the table in the document.
pub(crate) const BEGIN: &str = "<!-- faults: written by `make reliability` -->";
pub(crate) const END: &str = "<!-- faults: end -->";

/// Renders the summary of a run.
pub(crate) fn render_summary(found: &Found) -> String {
    let (passed, skipped) = counts(found);
    let failed: Vec<String> = found
        .cells
        .iter()
        .filter(|report| report.error.is_some())
        .map(|report| format!("{} at {}", report.cell.fault_name(), report.cell.moment.name()))
        .chain(found.lies.iter().filter(|lie| lie.error.is_some()).map(|lie| lie.what.clone()))
        .collect();
    let all = found.cells.len() + found.lies.len();
    let mut text = format!("\n{passed} of {all} passed, {skipped} skipped\n");
    for name in failed {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "  FAIL  {name}");
    }
    text
}

fn counts(found: &Found) -> (usize, usize) {
    let lies = found.lies.iter().filter(|lie| lie.error.is_none()).count();
    let passed = found.cells.iter().filter(|report| report.is_passed()).count();
    (passed + lies, found.cells.iter().filter(|report| report.skipped.is_some()).count())
}

/// Renders the text between the markers.
pub(crate) fn render(found: &Found) -> String {
    let Found { qemu, kernel, cpu, cores, seed, cells, lies } = found;
    let (passed, skipped) = counts(found);
    let all = cells.len() + lies.len();
    let mut text = format!(
        "{passed} of {all} passed, {skipped} skipped. QEMU {qemu}, Linux {kernel}, {cpu} ({cores} \
         cores), seed {seed}.\n\n"
    );
    let heads: Vec<&str> = Fault::MATRIX.iter().map(|fault| fault.title()).collect();
    row(&mut text, &[vec!["phase"], heads].concat());
    row(&mut text, &["---"; Fault::MATRIX.len() + 1]);
    for moment in Moment::ALL {
        let found = Fault::MATRIX.map(|fault| word(cells, Cell::at(moment, fault)));
        let mut cells = vec![moment.name()];
        cells.extend(&found);
        row(&mut text, &cells);
    }
    text.push('\n');
    row(&mut text, &["fault", "at", "the guest is at", "reported"]);
    row(&mut text, &["---"; 4]);
    for report in cells.iter().filter(|report| !Fault::MATRIX.contains(&report.cell.fault)) {
        let reported = report
            .skipped
            .clone()
            .map_or_else(|| report.reported.join("; "), |why| format!("skipped: {why}"));
        let at = report.cell.moment.name();
        row(&mut text, &[&report.cell.title(), at, word(cells, report.cell), &one_line(&reported)]);
    }
    for lie in lies {
        let found = if lie.error.is_none() { Place::Source.name() } else { "**failed**" };
        row(&mut text, &[&lie.what, "pre-copy", found, &one_line(&lie.refusals.join("; "))]);
    }
    text
}

fn word(reports: &[CellReport], cell: Cell) -> &'static str {
    if !cell.is_possible() {
        return "–";
    }
    match reports.iter().find(|report| report.cell == cell) {
        None => "not tried",
        Some(report) if report.skipped.is_some() => "skipped",
        Some(report) if report.error.is_some() => "**failed**",
        Some(report) => report.place.map_or("**failed**", Place::name),
    }
}

fn one_line(text: &str) -> String {
    text.replace('\n', " ").replace('|', "\\|")
}

fn row(text: &mut String, cells: &[&str]) {
    // Writing to a string cannot fail.
    let _ = writeln!(text, "| {} |", cells.join(" | "));
}

#[cfg(test)]
mod tests {
    use godwit_lab::faults::{matrix, singles};

    use super::*;

    #[test]
    fn every_cell_has_a_word_in_the_table() {
        let report = |cell: Cell| CellReport {
            cell,
            place: cell.allowed().first().copied(),
            reported: vec!["why | so".to_owned()],
            error: None,
            skipped: None,
            seconds: 1.0,
        };
        let mut found = Found {
            qemu: "7.2.22".to_owned(),
            kernel: "6.18".to_owned(),
            cpu: "some".to_owned(),
            cores: 2,
            seed: 7,
            cells: matrix().into_iter().chain(singles()).map(report).collect(),
            lies: Vec::new(),
        };
        let text = render(&found);
        assert!(
            text.starts_with(&format!("{0} of {0} passed, 0 skipped.", found.cells.len())),
            "{text}"
        );
        assert_eq!(
            text.lines().filter(|line| line.starts_with('|')).count(),
            2 + 11 + 2 + singles().len()
        );
        assert!(
            !text.contains("not tried") && !text.contains("failed") && text.contains("why \\| so"),
            "{text}"
        );
        found.cells[0].error = Some("lost".to_owned());
        found.cells.remove(1);
        let text = render(&found);
        assert!(text.contains("**failed**") && text.contains("not tried"), "{text}");
        assert!(render_summary(&found).contains("FAIL"));
    }
}
