//! Plot of bandwidth over time, compared with the rate of the link.

use std::fmt::Write;
use std::path::Path;

use anyhow::Result;
use godwit_lab::BitRate;
use godwit_types::{BandwidthPoint, Outcome, Report};

use crate::svg::{self, COLOURS, Frame, Svg, short};

const WIDTH: f64 = 860.0;
const HEIGHT: f64 = 380.0;
/// Edges of the plot area: left, top, right, bottom.
const LEFT: f64 = 64.0;
const TOP: f64 = 44.0;
const RIGHT: f64 = WIDTH - 20.0;
const BOTTOM: f64 = HEIGHT - 52.0;
/// Minimum length of a step: what is sent in less time depends on buffers.
const LEAST_STEP_MS: f64 = 200.0;
/// Maximum steps of a line.
const MOST_STEPS: f64 = 120.0;
/// Maximum marks of an axis.
const MOST_MARKS: f64 = 9.0;

pub(crate) struct Line {
    pub(crate) name: String,
    /// Time since the request in s, and the rate from the previous point to this one in Gb/s.
    steps: Vec<(f64, f64)>,
}

impl Line {
    /// Returns the line of the run with the median migration time, or `None` if no run has points.
    pub(crate) fn of_median<'a>(
        name: &str,
        reports: impl Iterator<Item = &'a Report>,
    ) -> Option<Line> {
        let mut reports: Vec<&Report> = reports
            .filter(|report| report.outcome == Outcome::Completed && !report.bandwidth.is_empty())
            .collect();
        reports.sort_by(|one, other| one.migration_time_ms.total_cmp(&other.migration_time_ms));
        let median = reports.get(reports.len() / 2)?;
        Some(Line { name: name.to_owned(), steps: steps(&median.bandwidth) })
    }
}

/// Returns the rates from point to point, over steps that are long enough to exclude the effect of
/// buffers.
#[expect(clippy::cast_precision_loss, reason = "below 8 PiB")]
pub(crate) fn steps(points: &[BandwidthPoint]) -> Vec<(f64, f64)> {
    let end_ms = points.last().map_or(0.0, |point| point.ms);
    let least_ms = LEAST_STEP_MS.max(end_ms / MOST_STEPS);
    let mut steps = vec![(0.0, 0.0)];
    let mut last = BandwidthPoint { ms: 0.0, bytes: 0 };
    for point in points {
        let took_ms = point.ms - last.ms;
        if took_ms >= least_ms || (point.ms >= end_ms && took_ms > 0.0) {
            steps.push((
                point.ms / 1e3,
                point.bytes.saturating_sub(last.bytes) as f64 * 8.0 / took_ms / 1e6,
            ));
            last = *point;
        }
    }
    steps
}

/// Returns the rate of a link in Gb/s.
#[expect(clippy::cast_precision_loss, reason = "rates are far below 2^53 bit/s")]
pub(crate) fn gbit(link: BitRate) -> f64 {
    link.bits_per_second() as f64 / 1e9
}

/// Writes the picture and prints its path.
pub(crate) fn write(
    folder: &Path,
    name: &str,
    title: &str,
    link_gbit: f64,
    lines: &[Line],
) -> Result<()> {
    let path = svg::write(folder, name, &render(title, link_gbit, lines))?;
    println!("bandwidth over time: {}", path.display());
    Ok(())
}

fn render(title: &str, link_gbit: f64, lines: &[Line]) -> String {
    let all = || lines.iter().flat_map(|line| &line.steps);
    let frame = Frame {
        left: LEFT,
        top: TOP,
        right: RIGHT,
        bottom: BOTTOM,
        most_x: all().map(|(at_s, _)| *at_s).fold(0.1, f64::max),
        most_y: all().map(|(_, gbit)| *gbit).fold(link_gbit, f64::max) * 1.1,
    };
    let mut svg = Svg::new(WIDTH, HEIGHT);
    svg.title(LEFT, 18.0, title);
    frame.marks_x(&mut svg, MOST_MARKS);
    frame.marks_y(&mut svg, MOST_MARKS, true);
    frame.border(&mut svg);
    svg.text(f64::midpoint(LEFT, RIGHT), HEIGHT - 12.0, "middle", "time since the request, s");
    svg.upright(16.0, f64::midpoint(TOP, BOTTOM), "sent by the source, Gb/s");
    frame.level(&mut svg, link_gbit);
    let link = format!("the link: {} Gb/s", short(link_gbit));
    svg.text(RIGHT, frame.y(link_gbit) - 5.0, "end", &link);
    for (number, line) in lines.iter().enumerate() {
        let colour = COLOURS[number % COLOURS.len()];
        svg.stroke(&path_of(&line.steps, &frame), colour, "stroke-width=\"1.8\"");
        #[expect(clippy::cast_precision_loss, reason = "a handful of lines")]
        let left = LEFT + number as f64 * 150.0;
        svg.stroke(&format!("M{left} 31h18"), colour, "stroke-width=\"3\"");
        svg.text(left + 24.0, 35.0, "start", &line.name);
    }
    svg.finish()
}

/// Returns the path as steps, not slopes: each rate holds from the previous point on.
fn path_of(steps: &[(f64, f64)], frame: &Frame) -> String {
    let begin = format!("M{:.1} {:.1}", frame.x(0.0), frame.y(0.0));
    let mut path = steps.iter().skip(1).fold(begin, |mut path, (at_s, gbit)| {
        // Writing to a string cannot fail.
        let _ = write!(path, "V{:.1}H{:.1}", frame.y(*gbit), frame.x(*at_s));
        path
    });
    let _ = write!(path, "V{:.1}", frame.y(0.0));
    path
}

#[cfg(test)]
mod tests {
    use super::*;

    fn points(points: &[(f64, u64)]) -> Vec<BandwidthPoint> {
        points.iter().map(|(ms, bytes)| BandwidthPoint { ms: *ms, bytes: *bytes }).collect()
    }

    #[test]
    fn rates_are_taken_over_steps_longer_than_the_effect_of_buffers() {
        // 125 MB in a second is 1 Gb/s.
        let steps = steps(&points(&[
            (100.0, 9),
            (500.0, 62_500_000),
            (600.0, 62_500_000),
            (1000.0, 125_000_000),
        ]));
        assert_eq!(steps, [(0.0, 0.0), (0.5, 1.0), (1.0, 1.0)]);
        assert_eq!(super::steps(&[]), [(0.0, 0.0)]);
    }

    #[test]
    fn a_picture_has_its_link_its_lines_and_its_units() {
        let line = |name: &str| Line {
            name: name.to_owned(),
            steps: steps(&points(&[(1000.0, 100_000_000)])),
        };
        let svg = render("a < b", 1.0, &[line("godwit"), line("qemu")]);
        assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n"));
        for wanted in [
            "a &lt; b",
            "the link: 1 Gb/s",
            "time since the request, s",
            "Gb/s",
            ">godwit<",
            ">qemu<",
        ] {
            assert!(svg.contains(wanted), "{wanted}: {svg}");
        }
        assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
        assert!(!render("nothing", 1.0, &[]).contains("NaN"));
    }
}
