//! Promises about Godwit, and whether they are kept. Pure.

use serde::Serialize;

use crate::converge::cases::{Kind, LINKS};
use crate::converge::table::{CaseFigures, Row};
use crate::figures::{Spread, dash};
use crate::subject::Engine;

const TIMES_ONCE: f64 = 1.5;
const LOST_BY_AUTO_CONVERGE: f64 = 0.5;
const SWITCHOVER_MS: f64 = 30.0;
const COMPUTING_PERCENT: f64 = 95.0;
/// Limit until the guest runs at the destination, if the rest is paged in.
const PAGE_IN_SWITCHOVER_MS: f64 = 50.0;
/// Limit in addition to the round trip.
const FETCH_MS: f64 = 1.0;
/// Limit in addition to the time that the working set takes on the wire.
const BACK_MS: f64 = 1000.0;

/// A promise.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Goal {
    pub(crate) case: String,
    pub(crate) what: &'static str,
    pub(crate) bound: Bound,
    pub(crate) unit: &'static str,
    /// The median; `None` if nothing could be measured.
    pub(crate) measured: Option<f64>,
    pub(crate) met: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Bound {
    AtMost(f64),
    AtLeast(f64),
}

impl Bound {
    fn holds(self, value: f64) -> bool {
        match self {
            Bound::AtMost(most) => value <= most,
            Bound::AtLeast(least) => value >= least,
        }
    }

    fn text(self) -> String {
        match self {
            Bound::AtMost(most) => format!("≤ {}", digits(most)),
            Bound::AtLeast(least) => format!("≥ {}", digits(least)),
        }
    }
}

/// Returns the promises that concern these cases.
pub(crate) fn goals(cases: &[CaseFigures]) -> Vec<Goal> {
    cases.iter().flat_map(goals_of).collect()
}

fn goals_of(figures: &CaseFigures) -> Vec<Goal> {
    let mut goals = Vec::new();
    let median = |spread: Option<Spread>| spread.map(|spread| spread.median);
    let mut add = |row: &Row, what, bound: Bound, unit, measured: Option<f64>| {
        // A guest that was not moved exceeds every bound.
        let met = row.all_moved() && measured.is_some_and(|measured| bound.holds(measured));
        goals.push(Goal { case: figures.case.name.clone(), what, bound, unit, measured, met });
    };
    let (ours, paging) =
        (figures.row(Engine::Godwit.name()), figures.row(Engine::GodwitPageIn.name()));
    match figures.case.kind {
        Kind::Rewriting => {
            if let Some(ours) = ours {
                let times_once = median(ours.migration_times_once);
                add(ours, "migration, times once", Bound::AtMost(TIMES_ONCE), "", times_once);
                if figures.row(Engine::AutoConverge.name()).is_some() {
                    let ratio = figures.lost_by_auto_converge(ours.engine);
                    let what = "writes lost, of auto-converge's";
                    add(ours, what, Bound::AtMost(LOST_BY_AUTO_CONVERGE), "", ratio);
                }
                let switchover_ms = median(ours.switchover_ms);
                add(ours, "switchover", Bound::AtMost(SWITCHOVER_MS), "ms", switchover_ms);
            }
            if let Some(paging) = paging {
                let runs_ms = median(paging.switchover_ms);
                let what = "page-in: runs at the destination after";
                add(paging, what, Bound::AtMost(PAGE_IN_SWITCHOVER_MS), "ms", runs_ms);
                let bound = Bound::AtMost(figures.working_set_ms.unwrap_or(0.0) + BACK_MS);
                let what = "page-in: back at 90 % after";
                add(paging, what, bound, "ms", median(paging.back_ms));
            }
        }
        Kind::Computing => {
            if let Some(ours) = ours {
                let computing = median(ours.computing_of_unslowed_percent);
                add(
                    ours,
                    "the computing thread keeps, of its speed before writers are slowed",
                    Bound::AtLeast(COMPUTING_PERCENT),
                    "%",
                    computing,
                );
            }
        }
        Kind::Fetching => {
            if let Some(paging) = paging {
                let beyond_ms = median(paging.fetch_beyond_round_trip_ms);
                let what = "page-in: median fetch beyond a round trip";
                add(paging, what, Bound::AtMost(FETCH_MS), "ms", beyond_ms);
            }
        }
        Kind::Links => {}
    }
    goals
}

/// Returns Godwit's time over the slower link divided by that over the faster one, or `None` if
/// either was not measured.
pub(crate) fn slower_by_faster(cases: &[CaseFigures]) -> Option<f64> {
    let time = |link: &str| {
        let name = format!("links-{link}");
        let figures = cases.iter().find(|figures| figures.case.name == name)?;
        Some(figures.row(Engine::Godwit.name())?.migration_ms?.median)
    };
    let [slower, faster] = LINKS;
    Some(time(slower)? / time(faster)?)
}

/// Renders the goals as a table, followed by the links.
pub(crate) fn render(goals: &[Goal], slower_by_faster: Option<f64>) -> String {
    let mut text = String::new();
    if !goals.is_empty() {
        text += &format!("\n  {:<24} {:<42} {:>10} {:>12}\n", "case", "goal", "bound", "measured");
    }
    for Goal { case, what, bound, unit, measured, met } in goals {
        let with_unit = |value: String| format!("{value} {unit}").trim_end().to_owned();
        let (bound, measured) = (
            with_unit(bound.text()),
            measured.map_or_else(dash, |measured| with_unit(digits(measured))),
        );
        let verdict = if *met { "met" } else { "MISSED" };
        text += &format!("  {case:<24} {what:<42} {bound:>10} {measured:>12}  {verdict}\n");
    }
    if let Some(ratio) = slower_by_faster {
        let [slower, faster] = LINKS;
        text += &format!(
            "\n  the same guest over {faster} moves {ratio:.2} times as fast as over {slower}, a \
             link of a quarter (published for 40 GbE against\n  \
             10 GbE, a guest of 128 or 256 GB that rewrites its memory, its writers slowed: 5.5 \
             times with Windows, 38 times with Linux)\n"
        );
    }
    text
}

/// Formats a value with a meaningful number of digits.
fn digits(value: f64) -> String {
    if value.abs() < 10.0 { format!("{value:.2}") } else { format!("{value:.0}") }
}

#[cfg(test)]
mod tests {
    use godwit_types::{FetchTimes, PageInReport};

    use super::*;
    use crate::converge::table::tests::{case, figures, run};

    fn row(engine: Engine, moves: &[(bool, f64, f64)]) -> Row {
        let moves =
            moves.iter().map(|&(completed, took_ms, lost)| run(completed, took_ms, lost)).collect();
        Row::new(engine, Some(1000.0), moves)
    }

    #[test]
    fn what_is_met_and_what_is_missed() {
        let ours = row(Engine::Godwit, &[(true, 1400.0, 10.0)]);
        let theirs = row(Engine::AutoConverge, &[(false, 180e3, 15.0)]);
        let goals = goals(&[figures(Kind::Rewriting, vec![ours, theirs])]);
        let found: Vec<(Option<f64>, bool)> =
            goals.iter().map(|goal| (goal.measured, goal.met)).collect();
        assert_eq!(found, [(Some(1.4), true), (Some(10.0 / 15.0), false), (Some(20.0), true)]);
        let text = render(&goals, Some(4.5));
        assert!(
            text.contains("≤ 1.50         1.40  met") && text.contains("0.67  MISSED"),
            "{text}"
        );
        assert!(
            text.contains("4.50 times as fast") && text.contains("5.5 times with Windows"),
            "{text}"
        );
        assert_eq!(render(&[], None), "");
    }

    #[test]
    fn one_move_that_does_not_end_misses_every_goal() {
        let ours = row(Engine::Godwit, &[(true, 1400.0, 10.0), (false, 180e3, 10.0)]);
        let goals = goals(&[figures(Kind::Rewriting, vec![ours])]);
        assert_eq!(goals.len(), 2, "nothing to compare lost writes with");
        assert!(goals.iter().all(|goal| goal.measured.is_some() && !goal.met), "{goals:?}");
    }

    #[test]
    fn a_computing_thread_keeps_its_speed() {
        let mut ours = run(true, 1000.0, 0.0);
        if let Some(run) = &mut ours {
            run.computing_share_while_slowed = Some(0.58);
            run.computing_share_before_slowed = Some(0.61);
        }
        let ours = Row::new(Engine::Godwit, None, vec![ours]);
        let goals = goals(&[figures(Kind::Computing, vec![ours])]);
        assert_eq!((goals.len(), goals[0].met, goals[0].unit), (1, true, "%"));
    }

    #[test]
    fn page_in_has_goals_of_its_own() {
        let paging = |fetch_ms: f64| {
            let mut paged = run(true, 1000.0, 0.0);
            if let Some(run) = &mut paged {
                run.back_ms = Some(1500.0);
                run.report.round_trip_ms = Some(0.5);
                let fetch_ms = FetchTimes { median: fetch_ms, ..FetchTimes::default() };
                run.report.page_in =
                    Some(PageInReport { demanded_pages: 3, fetch_ms, ..PageInReport::default() });
            }
            Row::new(Engine::GodwitPageIn, None, vec![paged])
        };
        let found = |kind, fetch_ms| {
            let goals = goals(&[figures(kind, vec![paging(fetch_ms)])]);
            goals.iter().map(|goal| (goal.measured, goal.met)).collect::<Vec<_>>()
        };
        // The working set takes 500 ms on that wire.
        assert_eq!(found(Kind::Rewriting, 0.0), [(Some(20.0), true), (Some(1500.0), true)]);
        assert_eq!(found(Kind::Fetching, 1.25), [(Some(0.75), true)]);
        assert_eq!(found(Kind::Fetching, 2.0), [(Some(1.5), false)]);
        assert_eq!(found(Kind::Links, 2.0), []);
    }

    #[test]
    fn links_are_compared_by_godwits_times() {
        let of = |name: &str, took_ms| CaseFigures {
            case: case(Kind::Links, name),
            ..figures(Kind::Links, vec![row(Engine::Godwit, &[(true, took_ms, 0.0)])])
        };
        let (slower, faster) = (of("links-200mbit", 24e3), of("links-800mbit", 5e3));
        assert_eq!(slower_by_faster(&[slower, faster]), Some(4.8));
        assert_eq!(slower_by_faster(&[of("links-200mbit", 1.0)]), None);
    }
}
