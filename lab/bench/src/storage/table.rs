//! Figures, goals and tables of moves with disks. Pure.

use std::fmt::Write;

use godwit_lab::BitRate;
use serde::Serialize;

use super::content::Content;
use super::kept::{Compared, Place};
use super::{Run, Way};
use crate::figures::{Spread, cell, dash};

/// Longest migration, as a multiple of the time that the wire needs for what is in use.
const WIRE_TIMES: f64 = 1.2;
/// Longest migration, as a multiple of QEMU's best.
const OF_QEMU: f64 = 0.7;
/// Longest additional pause with disks, beside half a round trip.
const ADDITIONAL_PAUSE_MS: f64 = 20.0;
/// Longest write of the guest while its writes are not limited.
const WRITE_MS: f64 = 100.0;

/// Results of a way in one part.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct WayFigures {
    pub(crate) way: Way,
    /// Moves that did not complete: their times are not part of the figures.
    pub(crate) failed: usize,
    /// Moves after which the guest did not answer, or its disks were not right.
    pub(crate) lost: usize,
    /// Moves in which the guest's writes were limited.
    pub(crate) limited: usize,
    pub(crate) migration_ms: Option<Spread>,
    /// Migration time, as a multiple of the wire's time for what is in use.
    pub(crate) wire_times: Option<Spread>,
    pub(crate) wire_mib: Option<Spread>,
    pub(crate) switchover_ms: Option<Spread>,
    /// Longest write of each move.
    pub(crate) longest_write_ms: Option<Spread>,
    /// Longest write of each move without a limit of writes.
    pub(crate) free_write_ms: Option<Spread>,
    pub(crate) written_mib_s: Option<Spread>,
    /// Moves after which the guest was whole.
    pub(crate) whole: usize,
}

impl WayFigures {
    pub(super) fn new(way: Way, link: BitRate, moves: Vec<Option<Run>>) -> WayFigures {
        let lost = moves.iter().filter(|moved| moved.is_none()).count();
        let runs: Vec<Run> = moves.into_iter().flatten().collect();
        let completed = || runs.iter().filter(|run| run.moved.error.is_none());
        let spread = |of: &dyn Fn(&Run) -> Option<f64>| Spread::of(completed().filter_map(of));
        let is_limited = |run: &&Run| run.moved.limited_ms > 0.0;
        WayFigures {
            way,
            failed: runs.len() - completed().count(),
            lost,
            limited: completed().filter(is_limited).count(),
            migration_ms: spread(&|run| Some(run.moved.migration_ms)),
            wire_times: spread(&|run| wire_times(run, link)),
            wire_mib: spread(&|run| Some(mib(run.wire_bytes))),
            switchover_ms: spread(&|run| run.moved.switchover_ms),
            longest_write_ms: spread(&|run| Some(run.longest_write_ms)),
            free_write_ms: spread(&|run| (!is_limited(&run)).then_some(run.longest_write_ms)),
            written_mib_s: spread(&|run| Some(run.written_bytes_per_s / f64::from(1 << 20))),
            whole: runs.len(),
        }
    }
}

/// Returns the migration time as a multiple of the time in which the link carries what is in use,
/// without compression.
fn wire_times(run: &Run, link: BitRate) -> Option<f64> {
    #[expect(clippy::cast_precision_loss, reason = "sizes far below 8 PiB")]
    let wire_ms = run.in_use_bytes as f64 * 8e3 / link.bits_per_second() as f64;
    (wire_ms > 0.0).then(|| run.moved.migration_ms / wire_ms)
}

#[expect(clippy::cast_precision_loss, reason = "below 8 PiB, and a table shows less than a MiB")]
fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

/// What the disks hold.
#[derive(Debug, Clone, Copy, Serialize)]
pub(crate) struct Held {
    pub(super) content: Content,
    /// Ratio of its compression with zstd; none for random content.
    pub(super) zstd_ratio: Option<f64>,
}

impl Held {
    pub(super) fn describe(&self) -> String {
        let ratio = self.zstd_ratio.map(|ratio| format!("files, zstd {ratio:.2}"));
        ratio.unwrap_or_else(|| "random content".to_owned())
    }
}

/// One rate of writes on one link.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Part {
    pub(super) place: Place,
    pub(super) held: Held,
    pub(crate) ways: Vec<WayFigures>,
    pub(crate) compared: Vec<Compared>,
    pub(crate) goals: Vec<Goal>,
}

/// Promise about Godwit's way, and whether it is kept.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Goal {
    pub(crate) what: String,
    pub(crate) at_most: f64,
    pub(crate) measured: Option<f64>,
    pub(crate) met: bool,
}

impl Part {
    pub(super) fn new(
        place: Place,
        held: Held,
        ways: Vec<WayFigures>,
        compared: Vec<Compared>,
    ) -> Part {
        let half_round_trip_ms = place.rtt.one_way().as_secs_f64() * 1e3;
        let goals = goals(half_round_trip_ms, &ways, &compared);
        Part { place, held, ways, compared, goals }
    }
}

/// Judges Godwit's way.
fn goals(half_round_trip_ms: f64, ways: &[WayFigures], compared: &[Compared]) -> Vec<Goal> {
    let of = |way: Way| ways.iter().find(|figures| figures.way == way);
    let Some(ours) = of(Way::Godwit) else { return Vec::new() };
    let median = |spread: Option<Spread>| spread.map(|spread| spread.median);
    let is_whole = ours.failed + ours.lost == 0;
    let goal = |what: &str, at_most: f64, measured: Option<f64>| {
        let met = is_whole && measured.is_some_and(|measured| measured <= at_most);
        Goal { what: what.to_owned(), at_most, measured, met }
    };
    #[expect(clippy::cast_precision_loss, reason = "a few moves")]
    let wrong = (ours.failed + ours.lost) as f64;
    let differing = compared
        .iter()
        .filter(|compared| compared.way == Way::Godwit && compared.difference.is_some());
    #[expect(clippy::cast_precision_loss, reason = "one comparison")]
    let differing = differing.count() as f64;
    let mut goals = vec![
        goal("moves that failed, or after which a block was wrong", 0.0, Some(wrong)),
        goal("comparisons of images that differ", 0.0, Some(differing)),
        goal("migration time by the wire's time", WIRE_TIMES, median(ours.wire_times)),
    ];
    let theirs =
        ways.iter().filter(|figures| figures.way.is_qemu() && figures.whole > figures.failed);
    let best = theirs.filter_map(|figures| median(figures.migration_ms)).min_by(f64::total_cmp);
    if let (Some(ours), Some(best)) = (median(ours.migration_ms), best) {
        goals.push(goal("migration time by QEMU's best", OF_QEMU, Some(ours / best)));
    }
    if let Some(without) = of(Way::WithoutDisks) {
        let pause = median(ours.switchover_ms).zip(median(without.switchover_ms));
        let additional = pause.map(|(with, without)| with - without);
        let at_most = ADDITIONAL_PAUSE_MS + half_round_trip_ms;
        goals.push(goal("additional switchover with disks, ms", at_most, additional));
    }
    if ours.free_write_ms.is_some() {
        let longest = median(ours.free_write_ms);
        goals.push(goal("the guest's longest write, not limited, ms", WRITE_MS, longest));
    }
    goals
}

/// Renders the table of one part.
pub(super) fn render(part: &Part) -> String {
    let Place { rtt, rate_mib_s } = part.place;
    let mut text = format!(
        "\nwriting {rate_mib_s} MiB/s, round trip {rtt}, {}: medians (least to most)\n",
        part.held.describe()
    );
    let header = [
        "way",
        "moves",
        "migration ms",
        "wire's time x",
        "wire MiB",
        "switchover ms",
        "longest write ms",
        "wrote MiB/s",
        "limited",
    ];
    row(&mut text, &header.map(str::to_owned));
    for figures in &part.ways {
        let all = figures.whole + figures.lost;
        let done = figures.whole - figures.failed;
        let moves = if done == all { done.to_string() } else { format!("{done}/{all}") };
        let limited = if figures.limited == 0 { dash() } else { figures.limited.to_string() };
        row(
            &mut text,
            &[
                figures.way.name().to_owned(),
                moves,
                cell(figures.migration_ms, 0),
                cell(figures.wire_times, 2),
                cell(figures.wire_mib, 0),
                cell(figures.switchover_ms, 1),
                cell(figures.longest_write_ms, 1),
                cell(figures.written_mib_s, 1),
                limited,
            ],
        );
    }
    for Compared { way, difference } in &part.compared {
        let found = difference.as_deref().unwrap_or("the same");
        // Writing to a string cannot fail.
        let _ = writeln!(text, "  images  {}: {found}", way.name());
    }
    for Goal { what, at_most, measured, met } in &part.goals {
        let verdict = if *met { "pass" } else { "FAIL" };
        let found = measured.map_or_else(dash, |measured| format!("{measured:.2}"));
        let _ = writeln!(text, "  {verdict}  {what}, at most {at_most}: {found}");
    }
    text
}

/// Renders one line for each part: which goals it misses.
pub(super) fn summary(parts: &[Part]) -> String {
    let mut text = String::from("\ngoals\n");
    for part in parts {
        let Place { rtt, rate_mib_s } = part.place;
        let missed: Vec<String> = part
            .goals
            .iter()
            .filter(|goal| !goal.met)
            .map(|Goal { what, at_most, measured, .. }| {
                let found = measured.map_or_else(dash, |measured| format!("{measured:.2}"));
                format!("{what} {found} (at most {at_most})")
            })
            .collect();
        let verdict = if missed.is_empty() {
            "pass".to_owned()
        } else {
            format!("FAIL  {}", missed.join("; "))
        };
        // Writing to a string cannot fail.
        let _ = writeln!(text, "  {rate_mib_s} MiB/s, round trip {rtt}: {verdict}");
    }
    text
}

fn row(text: &mut String, cells: &[String; 9]) {
    let [way, moves, rest @ ..] = cells;
    // Writing to a string cannot fail.
    let _ = write!(text, "  {way:<22} {moves:>5}");
    for (cell, width) in rest.iter().zip([23, 18, 18, 20, 22, 18, 8]) {
        let _ = write!(text, " {cell:>width$}");
    }
    text.push('\n');
}

#[cfg(test)]
mod tests {
    use super::super::Moved;
    use super::*;

    const MIB: u64 = 1 << 20;

    fn link() -> BitRate {
        "1gbit".parse().unwrap()
    }

    fn run(migration_ms: f64, switchover_ms: f64, write_ms: f64) -> Option<Run> {
        let moved = Moved { migration_ms, switchover_ms: Some(switchover_ms), ..Moved::default() };
        Some(Run {
            moved,
            wire_bytes: 1100 * MIB,
            in_use_bytes: 125_000_000 * 8,
            longest_write_ms: write_ms,
            written_bytes_per_s: 5e6,
        })
    }

    fn part(ours: Vec<Option<Run>>, compared: Option<&str>) -> Part {
        let figures = |way, runs| WayFigures::new(way, link(), runs);
        let ways = vec![
            figures(Way::Godwit, ours),
            figures(Way::WithoutDisks, vec![run(900.0, 10.0, 20.0)]),
            figures(Way::MirrorBackground, vec![run(16_000.0, 40.0, 90.0)]),
            figures(Way::MirrorBlocking, vec![run(14_000.0, 30.0, 200.0)]),
        ];
        let difference = compared.map(str::to_owned);
        let compared = vec![Compared { way: Way::Godwit, difference }];
        let place = Place { rtt: "10ms".parse().unwrap(), rate_mib_s: 30 };
        let held = Held { content: Content::Files, zstd_ratio: Some(2.3) };
        Part::new(place, held, ways, compared)
    }

    fn missed(part: &Part) -> Vec<&str> {
        part.goals.iter().filter(|goal| !goal.met).map(|goal| goal.what.as_str()).collect()
    }

    #[test]
    fn goals_are_judged_by_medians() {
        // The wire needs 8 s.
        let good = part(vec![run(9000.0, 34.0, 99.0), run(9200.0, 30.0, 50.0)], None);
        assert_eq!(good.goals.len(), 6);
        assert!(missed(&good).is_empty(), "{:?}", missed(&good));
        let slow = part(vec![run(9900.0, 36.0, 101.0)], None);
        assert_eq!(missed(&slow).len(), 4, "{:?}", missed(&slow));
        let wrong = part(vec![run(9000.0, 34.0, 99.0), None], Some("offset 5"));
        assert_eq!(missed(&wrong).len(), 6, "{:?}", missed(&wrong));
    }

    #[test]
    fn a_write_while_writes_are_limited_does_not_count() {
        let mut limited = run(9000.0, 34.0, 5000.0);
        limited.iter_mut().for_each(|run| run.moved.limited_ms = 10.0);
        let both = part(vec![run(9000.0, 34.0, 99.0), limited.clone()], None);
        assert!(missed(&both).is_empty(), "{:?}", missed(&both));
        let alone = part(vec![limited], None);
        assert_eq!(alone.goals.len(), 5);
        assert_eq!(alone.ways[0].limited, 1);
    }

    #[test]
    fn rows_are_aligned() {
        let mut failed = run(1.0, 1.0, 1.0);
        failed.iter_mut().for_each(|run| run.moved.error = Some("no room".to_owned()));
        let text = render(&part(vec![run(9040.0, 34.0, 99.0), failed], Some("offset 5")));
        let lines: Vec<&str> = text.lines().skip(2).take(5).collect();
        assert!(lines.iter().all(|line| line.len() == lines[0].len()), "{text}");
        assert!(lines[1].contains("1/2") && lines[1].contains("1.13 (1.13-1.13)"), "{text}");
        assert!(text.contains("images  godwit: offset 5") && text.contains("FAIL"), "{text}");
        assert!(text.contains("round trip 10ms, files, zstd 2.30: medians"), "{text}");
    }

    #[test]
    fn a_summary_names_what_is_missed() {
        let good = part(vec![run(9000.0, 34.0, 99.0)], None);
        let slow = part(vec![run(9000.0, 34.0, 101.0)], None);
        let text = summary(&[good, slow]);
        assert!(text.contains("  30 MiB/s, round trip 10ms: pass\n"), "{text}");
        let missed = "FAIL  the guest's longest write, not limited, ms 101.00 (at most 100)\n";
        assert!(text.ends_with(missed), "{text}");
    }
}
