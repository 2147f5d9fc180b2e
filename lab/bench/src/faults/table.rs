//! Tables of the results.

use std::fmt::Write;

use godwit_lab::faults::{
    Cell, CellReport, DiskCell, DiskCellReport, DiskFault, DiskMoment, Fault, Moment, Place,
};

use super::{Found, means, means_name};

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
        .map(|report| {
            let (fault, moment) = (report.cell.fault_name(), report.cell.moment.name());
            format!("{fault} at {moment}, dirty pages by {}", means_name(report.tracking))
        })
        .chain(
            found
                .disks
                .iter()
                .filter(|report| report.error.is_some())
                .map(|report| report.cell.name()),
        )
        .chain(found.lies.iter().filter(|lie| lie.error.is_some()).map(|lie| lie.what.clone()))
        .collect();
    let all = count(found);
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
    let with_disks = found.disks.iter().filter(|report| report.is_passed()).count();
    let skipped = found.cells.iter().filter(|report| report.skipped.is_some()).count()
        + found.disks.iter().filter(|report| report.skipped.is_some()).count();
    (passed + with_disks + lies, skipped)
}

fn count(found: &Found) -> usize {
    found.cells.len() + found.disks.len() + found.lies.len()
}

/// Renders the text between the markers.
pub(crate) fn render(found: &Found) -> String {
    let Found { qemu, kernel, cpu, cores, seed, cells, lies, disks } = found;
    let (passed, skipped) = counts(found);
    let all = count(found);
    let mut text = format!(
        "{passed} of {all} passed, {skipped} skipped; dirty pages by {}. QEMU {qemu}, Linux \
         {kernel}, {cpu} ({cores} cores), seed {seed}.\n\n",
        means(cells.iter().map(|report| report.tracking)),
    );
    let heads: Vec<&str> = Fault::MATRIX.iter().map(|fault| fault.title()).collect();
    row(&mut text, &[vec!["phase"], heads].concat());
    row(&mut text, &["---"; Fault::MATRIX.len() + 1]);
    for moment in Moment::ALL {
        let found = Fault::MATRIX.map(|fault| word(cells, Cell::at(moment, fault)));
        let mut cells = vec![moment.name()];
        cells.extend(found.iter().map(String::as_str));
        row(&mut text, &cells);
    }
    text.push('\n');
    row(&mut text, &["fault", "at", "dirty pages by", "the guest is at", "reported"]);
    row(&mut text, &["---"; 5]);
    let others = cells.iter().filter(|report| !Fault::MATRIX.contains(&report.cell.fault));
    for report in others {
        // A cell has one row if each means has the same result.
        let of_cell: Vec<&CellReport> =
            cells.iter().filter(|other| other.cell == report.cell).collect();
        let alike = of_cell.iter().all(|other| word_of(other) == word_of(report));
        if alike && of_cell.first().is_some_and(|first| first.tracking != report.tracking) {
            continue;
        }
        let by = if alike {
            means(of_cell.iter().map(|report| report.tracking))
        } else {
            means_name(report.tracking).to_owned()
        };
        let reported = report
            .skipped
            .clone()
            .map_or_else(|| report.reported.join("; "), |why| format!("skipped: {why}"));
        let (title, at) = (report.cell.title(), report.cell.moment.name());
        row(&mut text, &[&title, at, &by, word_of(report), &one_line(&reported)]);
    }
    for lie in lies {
        let found = if lie.error.is_none() { Place::Source.name() } else { "**failed**" };
        row(
            &mut text,
            &[&lie.what, "pre-copy", "auto", found, &one_line(&lie.refusals.join("; "))],
        );
    }
    if !disks.is_empty() {
        render_disks(&mut text, disks);
    }
    text
}

/// Renders the table of migrations with disks.
fn render_disks(text: &mut String, disks: &[DiskCellReport]) {
    let passed = disks.iter().filter(|report| report.is_passed()).count();
    let twice = disks.iter().filter_map(|report| report.resent_percent).reduce(f64::max);
    let twice = twice.map_or_else(|| "unknown".to_owned(), |most| format!("{most:.1} %"));
    // Writing to a string cannot fail.
    let _ = writeln!(
        text,
        "\nWith disks: {passed} of {} passed; at most {twice} of their content was sent twice.\n",
        disks.len()
    );
    let heads = DiskFault::ALL.map(DiskFault::title);
    row(text, &[["phase"].as_slice(), &heads].concat());
    row(text, &["---"; DiskFault::ALL.len() + 1]);
    for moment in DiskMoment::ALL {
        let words = DiskFault::ALL.map(|fault| {
            let found = disks.iter().find(|report| report.cell == DiskCell { moment, fault });
            found.map_or("not tried", word_with_disks)
        });
        row(text, &[[moment.name()].as_slice(), &words].concat());
    }
}

fn word_with_disks(report: &DiskCellReport) -> &'static str {
    if report.skipped.is_some() {
        return "skipped";
    }
    report.place.filter(|_| report.error.is_none()).map_or("**failed**", Place::name)
}

/// Returns the result of a cell: one word if all means have the same.
fn word(reports: &[CellReport], cell: Cell) -> String {
    if !cell.is_possible() {
        return "–".to_owned();
    }
    let of_cell: Vec<&CellReport> = reports.iter().filter(|report| report.cell == cell).collect();
    let Some(first) = of_cell.first() else { return "not tried".to_owned() };
    if of_cell.iter().all(|report| word_of(report) == word_of(first)) {
        return word_of(first).to_owned();
    }
    let word_by =
        |report: &&CellReport| format!("{} by {}", word_of(report), means_name(report.tracking));
    of_cell.iter().map(word_by).collect::<Vec<_>>().join(", ")
}

fn word_of(report: &CellReport) -> &'static str {
    if report.skipped.is_some() {
        return "skipped";
    }
    let place = report.place.filter(|_| report.error.is_none());
    place.map_or("**failed**", Place::name)
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
    use godwit_lab::faults::{disk_matrix, matrix, singles};
    use godwit_types::TrackingUse;

    use super::*;

    #[test]
    fn every_cell_has_a_word_in_the_table() {
        let report = |tracking: TrackingUse, cell: Cell| CellReport {
            cell,
            tracking,
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
            cells: [TrackingUse::Faults, TrackingUse::Scans]
                .into_iter()
                .flat_map(|by| {
                    matrix().into_iter().chain(singles()).map(move |cell| report(by, cell))
                })
                .collect(),
            lies: Vec::new(),
            disks: Vec::new(),
        };
        let text = render(&found);
        assert!(
            text.starts_with(&format!("{0} of {0} passed, 0 skipped;", found.cells.len())),
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
        assert!(text.contains("; dirty pages by faults and scans."), "{text}");
        found.cells[0].error = Some("lost".to_owned());
        let cell = found.cells[1].cell;
        found.cells.retain(|report| report.cell != cell);
        let text = render(&found);
        assert!(text.contains("**failed** by faults, ") && text.contains("not tried"), "{text}");
        assert!(render_summary(&found).contains("FAIL"));
    }

    #[test]
    fn cells_with_disks_have_a_table_of_their_own() {
        let report = |cell: DiskCell| DiskCellReport {
            cell,
            place: cell.allowed().first().copied(),
            reported: Vec::new(),
            resent_percent: Some(0.5),
            sent_mib: Some(1200.0),
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
            cells: Vec::new(),
            lies: Vec::new(),
            disks: disk_matrix().into_iter().map(report).collect(),
        };
        let text = render(&found);
        assert!(text.contains("With disks: 40 of 40 passed; at most 0.5 %"), "{text}");
        let (_, text) = text.split_once("With disks").unwrap();
        assert!(!text.contains("not tried") && !text.contains("failed"), "{text}");
        let rows = text.lines().filter(|line| line.starts_with("| disks-")).count();
        assert_eq!(rows, DiskMoment::ALL.len());
        found.disks[3].error = Some("lost".to_owned());
        found.disks.remove(4);
        let text = render(&found);
        let (_, text) = text.split_once("With disks").unwrap();
        assert!(text.contains("**failed**") && text.contains("not tried"), "{text}");
        assert!(render_summary(&found).contains("FAIL  disks-"), "{}", render_summary(&found));
    }
}
