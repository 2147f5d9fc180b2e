//! Tables for people: a row per case, then the promises.

use std::fmt::Write;

use crate::figures::{Spread, cell, dash};
use crate::lanes::CaseFigures;
use crate::lanes::cases::{Goal, percent};

const HEADER: [&str; 8] =
    ["case", "runs", "wire Gb/s", "iperf3 Gb/s", "of best", "paper Gb/s", "of it", "migration ms"];

/// Renders the table of all cases.
pub(crate) fn render(figures: &[CaseFigures], goals: &[Goal]) -> String {
    let mut text = "\nwire rate of round 0, iperf3 on the same links, what headers leave of them: \
        medians (least to most)\n"
        .to_owned();
    row(&mut text, &HEADER.map(str::to_owned));
    for case in figures {
        row(
            &mut text,
            &[
                case.case.name.to_owned(),
                runs(case),
                gbit(case.wire_bits_per_s),
                gbit(case.carried_bits_per_s),
                case.share().map_or_else(dash, percent),
                format!("{:.3}", case.case.links.on_paper() / 1e9),
                case.share_on_paper().map_or_else(dash, percent),
                cell(case.migration_ms, 0),
            ],
        );
    }
    for Goal { case, what, found, met } in goals {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "  {}  {case}: {what}: {found}", if *met { "pass" } else { "FAIL" });
    }
    text
}

fn row(text: &mut String, [case, rest @ ..]: &[String; 8]) {
    let _ = write!(text, "  {case:<20}");
    for (cell, width) in rest.iter().zip([5, 21, 21, 8, 10, 8, 21]) {
        let _ = write!(text, " {cell:>width$}");
    }
    text.push('\n');
}

fn runs(case: &CaseFigures) -> String {
    let all = case.runs.len();
    if case.failed == 0 { all.to_string() } else { format!("{}/{all}", all - case.failed) }
}

fn gbit(spread: Option<Spread>) -> String {
    cell(spread.map(|spread| spread.times(1e-9)), 3)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lanes::cases;

    #[test]
    fn rows_are_aligned_and_goals_shown() {
        let figures: Vec<CaseFigures> = (cases::all().into_iter())
            .map(|case| CaseFigures {
                case,
                failed: 0,
                wire_bits_per_s: Spread::of([0.9e9, 0.92e9]),
                carried_bits_per_s: Spread::of([0.95e9]),
                migration_ms: None,
                runs: Vec::new(),
            })
            .collect();
        let goals = [cases::goal(&figures[0], figures.first())];
        let text = render(&figures, &goals);
        let lines: Vec<&str> = text.lines().skip(2).take(1 + figures.len()).collect();
        assert!(lines.iter().all(|line| line.len() == lines[0].len()), "{text}");
        assert!(lines[1].contains("0.910 (0.900-0.920)") && lines[1].contains("95.7 %"), "{text}");
        assert!(
            text.contains("FAIL  one-gbit: at least 97 % of what the links carry: 95.7 %"),
            "{text}"
        );
    }
}
