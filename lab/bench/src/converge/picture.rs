//! Picture of a case: for each engine a column of diagrams over the time since the request, below a
//! strip that shows the phases.

use std::fmt::Write;

use godwit_types::{Phase, Progress};

use crate::converge::series::{Series, Step};
use crate::plot;
use crate::svg::{COLOURS, Frame, NEUTRAL, Svg};

const LEFT: f64 = 62.0;
const RIGHT_MARGIN: f64 = 20.0;
/// Total width of the columns when there are few, and their minimum width.
const COLUMNS: f64 = 778.0;
const NARROWEST: f64 = 250.0;
const BETWEEN_COLUMNS: f64 = 18.0;
const STRIP_TOP: f64 = 58.0;
const STRIP_HEIGHT: f64 = 9.0;
/// The diagrams, one below the other, each with its name above it.
const FIRST_TOP: f64 = 92.0;
const DIAGRAM_HEIGHT: f64 = 92.0;
const DIAGRAM_STEP: f64 = 122.0;
const DIAGRAMS: u8 = 4;
/// Below the last diagram: the time marks, their name, the phases.
const FOOT: f64 = 66.0;
/// Minimum distance of time marks.
const MARKS_APART: f64 = 60.0;
const MOST_MARKS_Y: f64 = 4.0;
/// Maximum steps of a line: more than its width in pixels are not visible.
const MOST_STEPS: f64 = 150.0;
const MOST_POINTS: usize = 400;
/// Rounds that begin closer to each other are not distinguished; numbers need more room.
const ROUNDS_APART: f64 = 3.0;
const NUMBERS_APART: f64 = 13.0;
/// A pause is shorter than a pixel of a long move.
const THINNEST: f64 = 1.5;

/// One engine's move.
pub(crate) struct Column<'a> {
    /// Name of the engine, and the outcome.
    pub(crate) name: String,
    pub(crate) series: &'a Series,
}

struct Diagram {
    name: &'static str,
    colour: &'static str,
    /// The lines, one per column.
    lines: Vec<Line>,
    /// A dashed horizontal line in each column that has such a level.
    levels: Vec<Option<f64>>,
}

enum Line {
    /// Line from point to point: seconds, value.
    Slopes(Vec<(f64, f64)>),
    Steps(Vec<Step>),
}

impl Line {
    fn most(&self) -> f64 {
        match self {
            Line::Slopes(points) => points.iter().map(|(_, value)| *value).fold(0.0, f64::max),
            Line::Steps(steps) => steps.iter().map(|step| step.value).fold(0.0, f64::max),
        }
    }

    fn path(&self, frame: &Frame) -> String {
        let mut path = String::new();
        // Writing to a string cannot fail.
        match self {
            Line::Slopes(points) => {
                for (number, (at_s, value)) in points.iter().enumerate() {
                    let pen = if number == 0 { 'M' } else { 'L' };
                    let _ = write!(path, "{pen}{:.1} {:.1}", frame.x(*at_s), frame.y(*value));
                }
            }
            Line::Steps(steps) => {
                let mut last_ms = f64::NAN;
                for Step { from_ms, to_ms, value } in steps {
                    let (from, to, at) =
                        (frame.x(from_ms / 1e3), frame.x(to_ms / 1e3), frame.y(*value));
                    #[expect(
                        clippy::float_cmp,
                        reason = "a step begins at the very value that the one before ends at"
                    )]
                    let _ = if *from_ms == last_ms {
                        write!(path, "V{at:.1}H{to:.1}")
                    } else {
                        write!(path, "M{from:.1} {at:.1}H{to:.1}")
                    };
                    last_ms = *to_ms;
                }
            }
        }
        path
    }
}

/// Renders the picture. `link_mb_per_s` is the link's maximum, if it has a rate.
pub(crate) fn render(title: &str, link_mb_per_s: Option<f64>, columns: &[Column<'_>]) -> String {
    #[expect(clippy::cast_precision_loss, reason = "a handful of engines")]
    let count = columns.len().max(1) as f64;
    let width = ((COLUMNS - BETWEEN_COLUMNS * (count - 1.0)) / count).max(NARROWEST);
    let all = LEFT + count * width + (count - 1.0) * BETWEEN_COLUMNS + RIGHT_MARGIN;
    let bottom = FIRST_TOP + f64::from(DIAGRAMS - 1) * DIAGRAM_STEP + DIAGRAM_HEIGHT;
    let mut svg = Svg::new(all, bottom + FOOT);
    svg.title(LEFT, 18.0, title);
    let diagrams = diagrams(link_mb_per_s, columns);
    let mut left = LEFT;
    for (place, column) in columns.iter().enumerate() {
        let across = Across {
            left,
            right: left + width,
            bottom,
            most_s: (column.series.end_ms() / 1e3).max(0.1),
        };
        svg.text(left, 40.0, "start", &column.name);
        phases(&mut svg, &across, column.series);
        rounds(&mut svg, &across, column.series);
        let mut top = FIRST_TOP;
        for diagram in &diagrams {
            draw(&mut svg, diagram, place, &across, top);
            top += DIAGRAM_STEP;
        }
        left += width + BETWEEN_COLUMNS;
    }
    svg.text(LEFT, bottom + 37.0, "start", "time since the request, s; numbers above: rounds");
    legend(&mut svg, bottom + 56.0, columns);
    svg.finish()
}

/// Position and time span of a column.
struct Across {
    left: f64,
    right: f64,
    bottom: f64,
    most_s: f64,
}

impl Across {
    fn frame(&self, top: f64, most_y: f64) -> Frame {
        let Across { left, right, most_s, .. } = *self;
        Frame { left, top, right, bottom: top + DIAGRAM_HEIGHT, most_x: most_s, most_y }
    }

    fn x(&self, ms: f64) -> f64 {
        self.left + (ms / 1e3 / self.most_s).clamp(0.0, 1.0) * (self.right - self.left)
    }
}

fn draw(svg: &mut Svg, diagram: &Diagram, place: usize, across: &Across, top: f64) {
    // One scale for all columns, so that they can be compared.
    let lines = diagram.lines.iter().map(Line::most);
    let most = lines.chain(diagram.levels.iter().flatten().copied()).fold(0.0, f64::max);
    let most_y = if most > 0.0 { most * 1.08 } else { 1.0 };
    let frame = across.frame(top, most_y);
    frame.marks_y(svg, MOST_MARKS_Y, place == 0);
    frame.border(svg);
    if place == 0 {
        svg.text(frame.left, top - 6.0, "start", diagram.name);
    }
    if let Some(level) = diagram.levels[place] {
        frame.level(svg, level);
    }
    let path = diagram.lines[place].path(&frame);
    if !path.is_empty() {
        svg.stroke(&path, diagram.colour, "stroke-width=\"1.6\" stroke-linejoin=\"round\"");
    }
    if diagram.name == GUEST {
        frame.marks_x(svg, (across.right - across.left) / MARKS_APART);
    }
}

const GUEST: &str = "what the guest writes, thousand pages/s; dashed: undisturbed";

#[expect(clippy::cast_precision_loss, reason = "bytes below 8 PiB")]
fn diagrams(link_mb_per_s: Option<f64>, columns: &[Column<'_>]) -> Vec<Diagram> {
    let none = || vec![None; columns.len()];
    let slopes = |value: &dyn Fn(&Progress) -> f64| {
        let of = |column: &Column<'_>| {
            // Before that, there is nothing to show.
            let has_begun = |update: &&Progress| update.phase >= Phase::PreCopy;
            let points: Vec<&Progress> = column.series.progress.iter().filter(has_begun).collect();
            let each = points.len().div_ceil(MOST_POINTS).max(1);
            Line::Slopes(
                points
                    .iter()
                    .step_by(each)
                    .map(|update| (update.elapsed_ms / 1e3, value(update)))
                    .collect(),
            )
        };
        columns.iter().map(of).collect()
    };
    let written = |column: &Column<'_>| {
        let mut steps = column.series.writes_per_s(column.series.end_ms() / MOST_STEPS);
        // The picture leaves out the time before the request.
        steps.retain(|step| step.to_ms > 0.0);
        for step in &mut steps {
            step.from_ms = step.from_ms.max(0.0);
            step.value /= 1e3;
        }
        Line::Steps(steps)
    };
    let undisturbed = |column: &Column<'_>| Some(column.series.undisturbed_writes_per_s / 1e3);
    vec![
        Diagram {
            name: "memory still to check or send, MiB",
            colour: COLOURS[0],
            lines: slopes(&|update| update.remaining_bytes as f64 / f64::from(1 << 20)),
            levels: none(),
        },
        Diagram {
            name: "what the guest dirties, MB/s; dashed: the link",
            colour: COLOURS[1],
            lines: slopes(&|update| update.dirty_bytes_per_s / 1e6),
            levels: vec![link_mb_per_s; columns.len()],
        },
        Diagram {
            name: "what the source sends, MB/s; dashed: the link",
            colour: COLOURS[2],
            lines: columns.iter().map(|column| Line::Steps(sent(column.series))).collect(),
            levels: vec![link_mb_per_s; columns.len()],
        },
        Diagram {
            name: GUEST,
            colour: COLOURS[3],
            lines: columns.iter().map(written).collect(),
            levels: columns.iter().map(undisturbed).collect(),
        },
    ]
}

fn sent(series: &Series) -> Vec<Step> {
    let steps = plot::steps(&series.sent());
    let mut from_ms = 0.0;
    let of = |(at_s, gbit): &(f64, f64)| {
        let step = Step { from_ms, to_ms: at_s * 1e3, value: gbit * 125.0 };
        from_ms = step.to_ms;
        step
    };
    steps.iter().skip(1).map(of).collect()
}

/// Draws the strip, and the phases that extend through the diagrams: the pause, and the time with
/// missing pages.
fn phases(svg: &mut Svg, across: &Across, series: &Series) {
    for span in &series.spans {
        let Some(colour) = colour(span.phase) else { continue };
        let left = across.x(span.from_ms);
        let width = across.x(span.to_ms) - left;
        let through = match span.phase {
            Phase::Switchover => Some((width.max(THINNEST), 0.55)),
            Phase::PageIn => Some((width, 0.12)),
            _ => None,
        };
        if let Some((width, opacity)) = through {
            svg.fill((left, FIRST_TOP), (width, across.bottom - FIRST_TOP), colour, opacity);
        }
        let width = width.max(if span.phase == Phase::Switchover { THINNEST } else { 0.0 });
        svg.fill((left, STRIP_TOP), (width, STRIP_HEIGHT), colour, 1.0);
    }
}

/// Returns a phase's colour, or `None` if it is not shown.
fn colour(phase: Phase) -> Option<&'static str> {
    match phase {
        Phase::Prepare => Some(NEUTRAL),
        Phase::PreCopy => Some(COLOURS[0]),
        Phase::Convergence => Some(COLOURS[1]),
        Phase::Switchover => Some(COLOURS[4]),
        Phase::PageIn => Some(COLOURS[3]),
        Phase::Preflight | Phase::Disks | Phase::Reconnect | Phase::Announce | Phase::Report => {
            None
        }
    }
}

fn rounds(svg: &mut Svg, across: &Across, series: &Series) {
    let (mut last, mut last_number) = (f64::NEG_INFINITY, f64::NEG_INFINITY);
    for (round, at_ms) in series.rounds() {
        let at = across.x(at_ms);
        if at - last < ROUNDS_APART {
            continue;
        }
        last = at;
        svg.stroke(
            &format!("M{at:.1} {STRIP_TOP}V{:.1}", across.bottom),
            NEUTRAL,
            "stroke-opacity=\"0.3\"",
        );
        if at - last_number >= NUMBERS_APART {
            last_number = at;
            svg.text(at, STRIP_TOP - 3.0, "middle", &round.to_string());
        }
    }
}

/// Draws the legend of the phases that occur.
fn legend(svg: &mut Svg, y: f64, columns: &[Column<'_>]) {
    let mut left = LEFT;
    for phase in Phase::ALL {
        let is_there =
            columns.iter().any(|column| column.series.spans.iter().any(|span| span.phase == phase));
        let Some(colour) = colour(phase).filter(|_| is_there) else { continue };
        svg.fill((left, y - 9.0), (14.0, STRIP_HEIGHT), colour, 1.0);
        svg.text(left + 20.0, y, "start", phase.name());
        left += 110.0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::converge::series::Span;
    use crate::converge::series::tests::{guest, update};

    fn series() -> Series {
        let span = |phase, from_ms, to_ms| Span { phase, from_ms, to_ms };
        Series {
            progress: vec![
                update(Phase::PreCopy, 0, 100.0),
                update(Phase::PreCopy, 1, 500.0),
                update(Phase::Switchover, 1, 900.0),
            ],
            guest: guest(&[5.0, 5.0, 1.0, 2.0, 5.0]),
            spans: vec![span(Phase::PreCopy, 100.0, 880.0), span(Phase::Switchover, 880.0, 900.0)],
            undisturbed_writes_per_s: 5000.0,
        }
    }

    #[test]
    fn a_picture_has_its_diagrams_phases_and_rounds() {
        let series = series();
        let column = |name: &str| Column { name: name.to_owned(), series: &series };
        let svg =
            render("5 times", Some(125.0), &[column("godwit: 0.9 s"), column("postcopy: 0.9 s")]);
        for wanted in [
            "memory still to check or send, MiB",
            "what the guest dirties, MB/s; dashed: the link",
            "what the source sends, MB/s; dashed: the link",
            GUEST,
            ">pre-copy<",
            ">switchover<",
            ">godwit: 0.9 s<",
            ">postcopy: 0.9 s<",
            ">1</text>",
        ] {
            assert!(svg.contains(wanted), "{wanted}: {svg}");
        }
        assert!(
            !svg.contains("NaN") && !svg.contains("inf") && !svg.contains(">page-in<"),
            "{svg}"
        );
        assert!(svg.contains("viewBox=\"0 0 860 "), "{svg}");
    }

    #[test]
    fn nothing_known_is_an_empty_picture() {
        let nothing = Series::default();
        let svg =
            render("nothing", None, &[Column { name: "godwit".to_owned(), series: &nothing }]);
        assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
        assert!(render("nobody", None, &[]).ends_with("</svg>\n"));
    }

    #[test]
    fn steps_that_do_not_follow_each_other_leave_a_gap() {
        let frame =
            Frame { left: 0.0, top: 0.0, right: 100.0, bottom: 10.0, most_x: 1.0, most_y: 10.0 };
        let step = |from_ms, to_ms, value| Step { from_ms, to_ms, value };
        let line = Line::Steps(vec![
            step(0.0, 100.0, 1.0),
            step(100.0, 200.0, 2.0),
            step(500.0, 600.0, 3.0),
        ]);
        assert_eq!(line.path(&frame), "M0.0 9.0H10.0V8.0H20.0M50.0 7.0H60.0");
    }
}
