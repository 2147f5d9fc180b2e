//! Tables for people: a row per engine, then the promises.

use std::fmt::Write;

use crate::figures::{Spread, cell, dash};
use crate::switchover::{EngineFigures, Goal, LEAST_RUNS_OF_P99, Part};

/// Renders the table of one workload on one link.
pub(crate) fn render(part: &Part) -> String {
    let mut text =
        format!("\n{}, round trip {}: medians (least to most)\n", part.workload_text, part.rtt);
    let header = [
        "engine",
        "runs",
        "migration ms",
        "switchover ms",
        "blackout ms",
        "wire MiB",
        "time x",
        "blackout x",
    ];
    row(&mut text, &header.map(str::to_owned));
    let ours = part.engines.iter().find(|engine| engine.name == "godwit");
    for engine in &part.engines {
        let ratio = |of: fn(&EngineFigures) -> Option<Spread>| {
            let (theirs, ours) = (of(engine)?, ours.and_then(of)?);
            (ours.median > 0.0).then(|| format!("{:.2}", theirs.median / ours.median))
        };
        row(
            &mut text,
            &[
                engine.name.clone(),
                runs(engine),
                cell(engine.migration_ms, 0),
                cell(engine.switchover_ms, 1),
                cell(engine.blackout_ms, 1),
                cell(engine.wire_mib, 0),
                ratio(|engine| engine.migration_ms).unwrap_or_else(dash),
                ratio(|engine| engine.blackout_ms).unwrap_or_else(dash),
            ],
        );
    }
    for engine in part.engines.iter().filter(|engine| engine.runs.len() >= LEAST_RUNS_OF_P99) {
        text.push_str(&render_p99(engine));
    }
    for goal in &part.goals {
        text.push_str(&render_goal(goal));
    }
    text
}

/// Renders the slow end of an engine's switchovers and blackouts.
fn render_p99(engine: &EngineFigures) -> String {
    let of = |spread: Option<Spread>| {
        spread.map_or_else(dash, |Spread { p99, max, .. }| format!("{p99:.1} ms, most {max:.1} ms"))
    };
    let count = engine.switchover_ms.map_or(0, |spread| spread.count);
    let (switchover, blackout) = (of(engine.switchover_ms), of(engine.blackout_ms));
    let name = &engine.name;
    format!("  p99   {name}, {count} moves: switchover {switchover}; blackout {blackout}\n")
}

/// Renders notes that qualify the figures.
pub(crate) fn render_notes(part: &Part) -> String {
    let sum = |of: fn(&EngineFigures) -> usize| part.engines.iter().map(of).sum::<usize>();
    let mut text = String::new();
    for (moves, what) in [
        (
            sum(|engine| engine.prober_held_up),
            "the client did not probe for half of the blackout: it got no CPU time",
        ),
        (sum(|engine| engine.lost), "the guest stopped answering and was replaced"),
        (
            sum(|engine| engine.blackout_elsewhere),
            "the longest silence was not at the switchover: the guest got no CPU time, or the \
             link was full",
        ),
    ] {
        if moves > 0 {
            // Writing to a string cannot fail.
            let _ = writeln!(text, "  note  in {moves} moves {what}");
        }
    }
    text
}

fn row(text: &mut String, cells: &[String; 8]) {
    let [engine, runs, rest @ ..] = cells;
    // Writing to a string cannot fail.
    let _ = write!(text, "  {engine:<12} {runs:>5}");
    for (cell, width) in rest.iter().zip([22, 20, 20, 15, 7, 10]) {
        let _ = write!(text, " {cell:>width$}");
    }
    text.push('\n');
}

fn runs(engine: &EngineFigures) -> String {
    let (done, all) = (engine.runs.len() - engine.failed, engine.runs.len() + engine.lost);
    if done == all { done.to_string() } else { format!("{done}/{all}") }
}

/// Formats a promise and whether it is kept.
fn render_goal(goal: &Goal) -> String {
    let Goal { what, at_most_ms, measured_ms, met } = goal;
    let verdict = if *met { "pass" } else { "FAIL" };
    let found = measured_ms.map_or_else(dash, |ms| format!("{ms:.1} ms"));
    format!("  {verdict}  {what} at most {at_most_ms} ms: {found}\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn engine(name: &str, values: &[f64]) -> EngineFigures {
        let spread = Spread::of(values.iter().copied());
        EngineFigures {
            name: name.to_owned(),
            failed: 0,
            lost: 0,
            migration_ms: spread,
            switchover_ms: spread,
            blackout_ms: spread,
            wire_mib: None,
            prober_held_up: 0,
            blackout_elsewhere: 0,
            runs: Vec::new(),
        }
    }

    #[test]
    fn rows_are_aligned_and_ratios_are_to_godwit() {
        let goal = Goal {
            what: "switchover".to_owned(),
            at_most_ms: 20.0,
            measured_ms: Some(25.0),
            met: false,
        };
        let part = Part {
            workload: "idle".to_owned(),
            workload_text: "idle guest".to_owned(),
            rtt: "0ms".to_owned(),
            engines: vec![engine("godwit", &[10.0, 20.0]), engine("qemu", &[30.0])],
            goals: vec![goal],
        };
        let text = render(&part);
        let lines: Vec<&str> = text.lines().skip(2).take(3).collect();
        assert!(lines.iter().all(|line| line.len() == lines[0].len()), "{text}");
        assert!(lines[1].contains("15 (10-20)") && lines[2].contains("2.00"), "{text}");
        assert!(text.contains("FAIL  switchover at most 20 ms: 25.0 ms"), "{text}");
    }
}
