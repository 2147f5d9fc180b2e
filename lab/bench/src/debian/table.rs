//! Tables for people: a row per engine, then the promises.

use std::fmt::Write;

use crate::debian::{Figures, Goal};
use crate::figures::{cell, dash};

const HEADER: [&str; 10] = [
    "engine",
    "runs",
    "migration ms",
    "in use x link",
    "all x link",
    "CPU s",
    "cores",
    "source, dest. s",
    "wire MB",
    "of disk MB",
];

/// Renders the table of all engines.
pub(crate) fn render(figures: &[Figures], goals: &[Goal], idle_cores: f64) -> String {
    let mut text = format!(
        "\nguest memory by time beside the link's rate, CPU time of agents and QEMUs without the \
         idle guest's ({idle_cores:.3} cores): \
         medians (least to most)\n"
    );
    row(&mut text, &HEADER.map(str::to_owned));
    for engine in figures {
        let sides = engine.source_cpu_s.zip(engine.destination_cpu_s);
        row(
            &mut text,
            &[
                engine.engine.name().to_owned(),
                runs(engine),
                cell(engine.migration_ms, 0),
                cell(engine.in_use_of_link, 2),
                engine.all_of_link.map_or_else(dash, |all| format!("{:.2}", all.median)),
                cell(engine.cpu_s, 2),
                cell(engine.cores, 2),
                sides.map_or_else(dash, |(source, destination)| {
                    format!("{:.2}, {:.2}", source.median, destination.median)
                }),
                cell(engine.wire_mb, 0),
                engine.disk_mb.map_or_else(dash, |disk| format!("{:.0}", disk.median)),
            ],
        );
    }
    for Goal { what, found, met } in goals {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "  {}  {what}: {found}", if *met { "pass" } else { "FAIL" });
    }
    text
}

fn row(text: &mut String, [engine, rest @ ..]: &[String; 10]) {
    let _ = write!(text, "  {engine:<15}");
    for (cell, width) in rest.iter().zip([5, 21, 17, 10, 19, 17, 16, 16, 11]) {
        let _ = write!(text, " {cell:>width$}");
    }
    text.push('\n');
}

fn runs(engine: &Figures) -> String {
    let done = engine.migration_ms.map_or(0, |spread| spread.count);
    if engine.failed == 0 { done.to_string() } else { format!("{done}/{}", done + engine.failed) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::debian::tests::figures;
    use crate::subject::Engine;

    #[test]
    fn rows_are_aligned_and_goals_shown() {
        let figures = [
            figures(Engine::Godwit, 5000.0, 7.0),
            Figures { failed: 2, ..figures(Engine::Qemu, 17_000.0, 3.0) },
        ];
        let goals = [Goal { what: "faster".to_owned(), found: "5000".to_owned(), met: true }];
        let text = render(&figures, &goals, 0.01);
        let lines: Vec<&str> = text.lines().skip(2).take(3).collect();
        assert!(lines.iter().all(|line| line.len() == lines[0].len()), "{text}");
        assert!(lines[1].contains("5000 (5000-5000)") && lines[2].contains("1/3"), "{text}");
        assert!(text.contains("pass  faster: 5000"), "{text}");
    }
}
