//! Figures of each case and engine, and their table. Pure.

use godwit_types::{Outcome, ThrottleReport};
use serde::Serialize;

use crate::converge::cases::Case;
use crate::converge::measure::Run;
use crate::figures::{Spread, cell, dash};
use crate::subject::Engine;

/// Results of one engine in one case. Times are those of completed moves.
#[derive(Debug, Serialize)]
pub(crate) struct Row {
    pub(crate) engine: &'static str,
    /// Number of moves, including unsuccessful ones.
    pub(crate) moves: usize,
    /// Moves that exceeded the time limit and were ended: the guest runs on at the source.
    pub(crate) late: usize,
    /// Moves that failed by themselves.
    pub(crate) failed: usize,
    /// Moves after which the guest did not answer any more.
    pub(crate) lost: usize,
    pub(crate) migration_ms: Option<Spread>,
    pub(crate) migration_times_once: Option<Spread>,
    pub(crate) switchover_ms: Option<Spread>,
    pub(crate) blackout_ms: Option<Spread>,
    pub(crate) undisturbed_writes_per_s: Option<Spread>,
    /// Includes those of moves that did not end, until they were ended.
    pub(crate) lost_writes: Option<Spread>,
    pub(crate) computing_percent: Option<Spread>,
    /// While its writers were slowed, and in the rounds before that.
    pub(crate) computing_while_slowed_percent: Option<Spread>,
    pub(crate) computing_before_slowed_percent: Option<Spread>,
    /// Its speed while writers were slowed, of that in the rounds before.
    pub(crate) computing_of_unslowed_percent: Option<Spread>,
    pub(crate) back_ms: Option<Spread>,
    /// Pages that the guest accessed before they arrived.
    pub(crate) demanded_pages: Option<Spread>,
    /// Spread of the moves' medians, without the round trip.
    pub(crate) fetch_beyond_round_trip_ms: Option<Spread>,
    pub(crate) throttle: Vec<ThrottleReport>,
    pub(crate) runs: Vec<Run>,
}

/// All engines of one case.
#[derive(Debug, Serialize)]
pub(crate) struct CaseFigures {
    pub(crate) case: Case,
    /// Time for sending the memory in use over this wire once.
    pub(crate) once_ms: Option<f64>,
    /// Time for sending the pages that the guest rewrites over this wire once.
    pub(crate) working_set_ms: Option<f64>,
    pub(crate) rows: Vec<Row>,
}

impl CaseFigures {
    pub(crate) fn row(&self, engine: &str) -> Option<&Row> {
        self.rows.iter().find(|row| row.engine == engine)
    }

    /// Returns an engine's lost writes divided by those of auto-converge in the same run.
    pub(crate) fn lost_by_auto_converge(&self, engine: &str) -> Option<f64> {
        let theirs = self.row(Engine::AutoConverge.name())?.lost_writes?.median;
        let ours = self.row(engine)?.lost_writes?.median;
        (theirs > 0.0).then(|| ours / theirs)
    }
}

impl Row {
    pub(crate) fn new(engine: Engine, once_ms: Option<f64>, moves: Vec<Option<Run>>) -> Row {
        let count = moves.len();
        let runs: Vec<Run> = moves.into_iter().flatten().collect();
        let completed = || runs.iter().filter(|run| run.completed);
        let with = |outcome| runs.iter().filter(|run| run.report.outcome == outcome).count();
        let spread =
            |figure: &dyn Fn(&Run) -> Option<f64>| Spread::of(completed().filter_map(figure));
        let fetch = |run: &Run| {
            // A guest that accessed no missing page did not wait for any.
            let page_in =
                run.report.page_in.as_ref().filter(|page_in| page_in.demanded_pages > 0)?;
            Some(page_in.fetch_ms.median - run.report.round_trip_ms?)
        };
        #[expect(clippy::cast_precision_loss, reason = "pages far below 2^53")]
        let demanded = |run: &Run| Some(run.report.page_in.as_ref()?.demanded_pages as f64);
        Row {
            engine: engine.name(),
            moves: count,
            late: with(Outcome::Cancelled),
            failed: with(Outcome::Failed) + with(Outcome::InDoubt),
            lost: count - runs.len(),
            migration_ms: spread(&|run| Some(run.report.migration_time_ms)),
            migration_times_once: spread(&|run| Some(run.report.migration_time_ms / once_ms?)),
            switchover_ms: spread(&|run| run.report.switchover_ms),
            blackout_ms: spread(&|run| run.report.blackout_ms),
            undisturbed_writes_per_s: Spread::of(
                runs.iter().map(|run| run.undisturbed.writes_per_s()),
            ),
            lost_writes: Spread::of(runs.iter().map(|run| run.lost_writes)),
            computing_percent: Spread::of(
                runs.iter().filter_map(|run| Some(100.0 * run.computing_share?)),
            ),
            computing_while_slowed_percent: spread(&|run| {
                Some(100.0 * run.computing_share_while_slowed?)
            }),
            computing_before_slowed_percent: spread(&|run| {
                Some(100.0 * run.computing_share_before_slowed?)
            }),
            computing_of_unslowed_percent: spread(&|run| {
                let slowed = run.computing_share_while_slowed?;
                Some(100.0 * slowed / run.computing_share_before_slowed?)
            }),
            back_ms: spread(&|run| run.back_ms),
            demanded_pages: spread(&demanded),
            fetch_beyond_round_trip_ms: spread(&fetch),
            throttle: completed().filter_map(|run| run.report.throttle).collect(),
            runs,
        }
    }

    /// Returns whether every move completed.
    pub(crate) fn all_moved(&self) -> bool {
        self.late + self.failed + self.lost == 0
    }

    /// Returns the representative move: the completed one with the median time, or else the first.
    pub(crate) fn median_run(&self) -> Option<&Run> {
        let mut completed: Vec<&Run> = self.runs.iter().filter(|run| run.completed).collect();
        completed.sort_by(|one, other| {
            one.report.migration_time_ms.total_cmp(&other.report.migration_time_ms)
        });
        completed.get(completed.len() / 2).copied().or(self.runs.first())
    }

    /// Returns the migration time as text, or that there is none.
    fn migration_text(&self, limit_s: u64) -> String {
        let Row { moves, late, failed, lost, .. } = self;
        let mut text = self.migration_ms.map_or_else(String::new, |_| cell(self.migration_ms, 0));
        for (count, what) in [
            (*late, format!("not within {limit_s} s")),
            (*failed, "failed".to_owned()),
            (*lost, "guest lost".to_owned()),
        ] {
            if count > 0 {
                let apart = if text.is_empty() { "" } else { ", " };
                text += &format!("{apart}{count} of {moves} {what}");
            }
        }
        text
    }
}

/// Renders the whole table.
pub(crate) fn render(cases: &[CaseFigures], limit_s: u64) -> String {
    let head = [
        "case",
        "engine",
        "migration ms",
        "times once",
        "switchover ms",
        "blackout ms",
        "writes/s",
        "writes lost",
        "lost x",
        "computing %",
        "unslowed %",
        "slowed %",
        "of unslowed %",
        "back ms",
    ];
    let mut rows = vec![head.map(str::to_owned)];
    for figures in cases {
        rows.extend(figures.rows.iter().map(|row| cells(figures, row, limit_s)));
    }
    let widths: Vec<usize> = (0..head.len())
        .map(|column| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0))
        .collect();
    let mut text = String::from(
        "\nmedians (least to most); once: the memory in use on that wire; lost x: writes lost by \
         those of auto-converge;\n\
         computing: the computing thread's speed over the whole move; unslowed: in the rounds \
         before writers were slowed; slowed: while they were, also of the speed before;\n\
         back: from the vCPUs' stop to 90 % of the undisturbed writes; writes of moves that did \
         not end count until then\n",
    );
    for row in &rows {
        let [case, engine, rest @ ..] = row;
        text += &format!("  {case:<0$} {engine:<1$}", widths[0], widths[1]);
        for (cell, width) in rest.iter().zip(&widths[2..]) {
            text += &format!("  {cell:>width$}");
        }
        text.push('\n');
    }
    text
}

fn cells(figures: &CaseFigures, row: &Row, limit_s: u64) -> [String; 14] {
    let writes = row.undisturbed_writes_per_s.map_or(0.0, |writes| writes.median);
    [
        figures.case.name.clone(),
        row.engine.to_owned(),
        row.migration_text(limit_s),
        cell(row.migration_times_once, 2),
        cell(row.switchover_ms, 1),
        cell(row.blackout_ms, 0),
        format!("{writes:.0}"),
        cell(row.lost_writes, 0),
        figures.lost_by_auto_converge(row.engine).map_or_else(dash, |ratio| format!("{ratio:.2}")),
        cell(row.computing_percent, 0),
        cell(row.computing_before_slowed_percent, 0),
        cell(row.computing_while_slowed_percent, 0),
        cell(row.computing_of_unslowed_percent, 0),
        cell(row.back_ms, 0),
    ]
}

#[cfg(test)]
pub(crate) mod tests {
    use godwit_types::Phase;

    use super::*;
    use crate::converge::cases::Kind;
    use crate::converge::measure::Done;
    use crate::converge::series::{Series, tests::report};

    pub(crate) fn case(kind: Kind, name: &str) -> Case {
        let link = (kind != Kind::Fetching).then(|| "1gbit".parse().unwrap());
        Case { kind, name: name.to_owned(), link, pages_per_s: 1.0, vcpus: 1, engines: Vec::new() }
    }

    /// Returns a move that took so long and lost so many writes.
    pub(crate) fn run(completed: bool, took_ms: f64, lost_writes: f64) -> Option<Run> {
        let mut report = report(&[(Phase::PreCopy, took_ms - 20.0), (Phase::Switchover, 20.0)]);
        report.switchover_ms = Some(20.0);
        if !completed {
            report.outcome = Outcome::Cancelled;
        }
        Some(Run {
            completed,
            undisturbed: Done { took_s: 1.0, writes: 1000.0, rounds: 0.0 },
            moving: Done { took_s: 1.0, writes: 500.0, rounds: 0.0 },
            lost_writes,
            computing_share: None,
            computing_share_while_slowed: None,
            computing_share_before_slowed: None,
            back_ms: None,
            report,
            series: Series::default(),
        })
    }

    pub(crate) fn figures(kind: Kind, rows: Vec<Row>) -> CaseFigures {
        let (once_ms, working_set_ms) = (Some(1000.0), Some(500.0));
        CaseFigures { case: case(kind, "some"), once_ms, working_set_ms, rows }
    }

    #[test]
    fn moves_that_do_not_end_count_by_what_was_lost_until_then() {
        let ours = Row::new(
            Engine::Godwit,
            Some(1000.0),
            vec![run(true, 1200.0, 10.0), run(true, 1400.0, 30.0), run(true, 1300.0, 20.0)],
        );
        let theirs = Row::new(
            Engine::AutoConverge,
            Some(1000.0),
            vec![run(false, 180e3, 80.0), None, run(true, 9e3, 40.0)],
        );
        assert_eq!((ours.migration_times_once.unwrap().median, ours.all_moved()), (1.3, true));
        assert_eq!((theirs.late, theirs.failed, theirs.lost, theirs.moves), (1, 0, 1, 3));
        assert_eq!(theirs.migration_ms.unwrap().max, 9e3);
        assert_eq!(theirs.lost_writes.unwrap().median, 60.0);
        let all = [figures(Kind::Rewriting, vec![ours, theirs])];
        assert_eq!(all[0].lost_by_auto_converge("godwit"), Some(20.0 / 60.0));
        assert_eq!(all[0].lost_by_auto_converge("postcopy"), None);
        let text = render(&all, 180);
        assert!(
            text.contains("9000 (9000-9000), 1 of 3 not within 180 s, 1 of 3 guest lost"),
            "{text}"
        );
        assert!(text.contains(" 0.33 "), "{text}");
        let lengths: Vec<usize> = text.lines().skip(4).map(|line| line.chars().count()).collect();
        assert!(lengths.iter().all(|length| *length == lengths[0]), "{text}");
    }

    #[test]
    fn the_median_run_stands_for_all() {
        let row = Row::new(
            Engine::Godwit,
            None,
            vec![
                run(false, 9.0, 0.0),
                run(true, 300.0, 0.0),
                run(true, 100.0, 0.0),
                run(true, 200.0, 0.0),
            ],
        );
        assert_eq!(row.median_run().unwrap().report.migration_time_ms, 200.0);
        assert_eq!(row.migration_times_once, None);
        let none = Row::new(Engine::Godwit, None, vec![run(false, 90.0, 0.0)]);
        assert!(!none.median_run().unwrap().completed);
        assert!(Row::new(Engine::Godwit, None, vec![None]).median_run().is_none());
    }
}
