//! Bandwidth over time as a picture, beside the rate of the link: SVG, readable on light and on dark ground.

use std::fmt::Write;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use godwit_lab::BitRate;
use godwit_migration::{BandwidthPoint, Outcome, Report};

const WIDTH: f64 = 860.0;
const HEIGHT: f64 = 380.0;
/// The frame of the axes: left, top, right, bottom.
const LEFT: f64 = 64.0;
const TOP: f64 = 44.0;
const RIGHT: f64 = WIDTH - 20.0;
const BOTTOM: f64 = HEIGHT - 52.0;
/// What is sent within less is a matter of buffers.
const LEAST_STEP_MS: f64 = 200.0;
/// The most steps of a line.
const MOST_STEPS: f64 = 120.0;
/// The most marks of an axis.
const MOST_MARKS: f64 = 9.0;
/// Lines of the axes and text, then of what was measured: none is lost on white or on black.
const NEUTRAL: &str = "#808080";
const COLOURS: [&str; 5] = ["#2f7fd1", "#d9822b", "#4d9a4d", "#b05cc6", "#c4504f"];

/// One migration's line.
pub(crate) struct Line {
    pub(crate) name: String,
    /// Time since the request, s, and what was sent from the point before to this, Gb/s.
    steps: Vec<(f64, f64)>,
}

impl Line {
    /// Of the run whose migration took the median time; none where none has points.
    pub(crate) fn of_median<'a>(name: &str, reports: impl Iterator<Item = &'a Report>) -> Option<Line> {
        let mut reports: Vec<&Report> = reports
            .filter(|report| report.outcome == Outcome::Completed && !report.bandwidth.is_empty())
            .collect();
        reports.sort_by(|one, other| one.migration_time_ms.total_cmp(&other.migration_time_ms));
        let median = reports.get(reports.len() / 2)?;
        Some(Line { name: name.to_owned(), steps: steps(&median.bandwidth) })
    }
}

/// Rates from point to point, over no less than what buffers blur.
#[expect(clippy::cast_precision_loss, reason = "below 8 PiB")]
fn steps(points: &[BandwidthPoint]) -> Vec<(f64, f64)> {
    let end_ms = points.last().map_or(0.0, |point| point.ms);
    let least_ms = LEAST_STEP_MS.max(end_ms / MOST_STEPS);
    let mut steps = vec![(0.0, 0.0)];
    let mut last = BandwidthPoint { ms: 0.0, bytes: 0 };
    for point in points {
        let took_ms = point.ms - last.ms;
        if took_ms >= least_ms || (point.ms >= end_ms && took_ms > 0.0) {
            steps.push((point.ms / 1e3, point.bytes.saturating_sub(last.bytes) as f64 * 8.0 / took_ms / 1e6));
            last = *point;
        }
    }
    steps
}

/// Gb/s of a link.
#[expect(clippy::cast_precision_loss, reason = "rates are far below 2^53 bit/s")]
pub(crate) fn gbit(link: BitRate) -> f64 {
    link.bits_per_second() as f64 / 1e9
}

/// Writes the picture and says where it is.
pub(crate) fn write(folder: &Path, name: &str, title: &str, link_gbit: f64, lines: &[Line]) -> Result<()> {
    fs::create_dir_all(folder)?;
    let path = folder.join(format!("{name}.svg"));
    fs::write(&path, render(title, link_gbit, lines))
        .with_context(|| format!("writing {}", path.display()))?;
    println!("bandwidth over time: {}", path.display());
    Ok(())
}

/// The picture.
fn render(title: &str, link_gbit: f64, lines: &[Line]) -> String {
    let all = || lines.iter().flat_map(|line| &line.steps);
    let most_s = all().map(|(at_s, _)| *at_s).fold(0.1, f64::max);
    let most_gbit = all().map(|(_, gbit)| *gbit).fold(link_gbit, f64::max) * 1.1;
    let x = |at_s: f64| LEFT + at_s / most_s * (RIGHT - LEFT);
    let y = |gbit: f64| BOTTOM - gbit / most_gbit * (BOTTOM - TOP);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" width=\"{WIDTH}\" height=\"{HEIGHT}\" \
         font-family=\"sans-serif\" font-size=\"12\" fill=\"{NEUTRAL}\">\n"
    );
    text(&mut svg, LEFT, 18.0, "start", &format!("<tspan font-weight=\"bold\">{}</tspan>", escaped(title)));
    axes(&mut svg, most_s, most_gbit, x, y);
    let at = y(link_gbit);
    stroke(
        &mut svg,
        &format!("M{LEFT} {at:.1}H{RIGHT}"),
        NEUTRAL,
        "stroke-width=\"1.5\" stroke-dasharray=\"6 4\"",
    );
    text(&mut svg, RIGHT, at - 5.0, "end", &format!("the link: {} Gb/s", short(link_gbit)));
    for (number, line) in lines.iter().enumerate() {
        let colour = COLOURS[number % COLOURS.len()];
        stroke(&mut svg, &path_of(&line.steps, x, y), colour, "stroke-width=\"1.8\"");
        #[expect(clippy::cast_precision_loss, reason = "a handful of lines")]
        let left = LEFT + number as f64 * 150.0;
        stroke(&mut svg, &format!("M{left} 31h18"), colour, "stroke-width=\"3\"");
        text(&mut svg, left + 24.0, 35.0, "start", &escaped(&line.name));
    }
    svg + "</svg>\n"
}

fn axes(svg: &mut String, most_s: f64, most_gbit: f64, x: impl Fn(f64) -> f64, y: impl Fn(f64) -> f64) {
    for mark in marks(most_s) {
        let at = x(mark);
        stroke(svg, &format!("M{at:.1} {BOTTOM}v5"), NEUTRAL, "");
        text(svg, at, BOTTOM + 19.0, "middle", &short(mark));
    }
    for mark in marks(most_gbit) {
        let at = y(mark);
        stroke(svg, &format!("M{LEFT} {at:.1}H{RIGHT}"), NEUTRAL, "stroke-opacity=\"0.25\"");
        text(svg, LEFT - 8.0, at + 4.0, "end", &short(mark));
    }
    stroke(svg, &format!("M{LEFT} {TOP}V{BOTTOM}H{RIGHT}"), NEUTRAL, "");
    text(svg, f64::midpoint(LEFT, RIGHT), HEIGHT - 12.0, "middle", "time since the request, s");
    let middle = f64::midpoint(TOP, BOTTOM);
    let _ = writeln!(
        svg,
        "<text transform=\"translate(16 {middle}) rotate(-90)\" text-anchor=\"middle\">sent by the source, Gb/s</text>"
    );
}

/// Steps, not slopes: each rate holds from the point before on.
fn path_of(steps: &[(f64, f64)], x: impl Fn(f64) -> f64, y: impl Fn(f64) -> f64) -> String {
    let begin = format!("M{:.1} {:.1}", x(0.0), y(0.0));
    let mut path = steps.iter().skip(1).fold(begin, |mut path, (at_s, gbit)| {
        let _ = write!(path, "V{:.1}H{:.1}", y(*gbit), x(*at_s));
        path
    });
    let _ = write!(path, "V{:.1}", y(0.0));
    path
}

/// Marks of an axis from 0 on: 1, 2 or 5 of a power of ten apart.
fn marks(most: f64) -> Vec<f64> {
    let power = 10f64.powf((most / MOST_MARKS).log10().floor());
    let apart = [1.0, 2.0, 5.0, 10.0].into_iter().map(|step| step * power);
    let apart = apart.into_iter().find(|apart| most / apart <= MOST_MARKS).unwrap_or(most);
    (0..=10u8).map(|number| f64::from(number) * apart).filter(|mark| *mark <= most).collect()
}

fn stroke(svg: &mut String, path: &str, colour: &str, more: &str) {
    // Writing to a string can't fail.
    let _ = writeln!(svg, "<path d=\"{path}\" fill=\"none\" stroke=\"{colour}\" {more}/>");
}

fn text(svg: &mut String, x: f64, y: f64, anchor: &str, content: &str) {
    let _ = writeln!(svg, "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{content}</text>");
}

/// A number without zeros at its end.
fn short(number: f64) -> String {
    let text = format!("{number:.3}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn points(points: &[(f64, u64)]) -> Vec<BandwidthPoint> {
        points.iter().map(|(ms, bytes)| BandwidthPoint { ms: *ms, bytes: *bytes }).collect()
    }

    #[test]
    fn rates_are_taken_over_no_less_than_buffers_blur() {
        // 125 MB in a second is 1 Gb/s.
        let steps =
            steps(&points(&[(100.0, 9), (500.0, 62_500_000), (600.0, 62_500_000), (1000.0, 125_000_000)]));
        assert_eq!(steps, [(0.0, 0.0), (0.5, 1.0), (1.0, 1.0)]);
        assert_eq!(super::steps(&[]), [(0.0, 0.0)]);
    }

    #[test]
    fn marks_are_round_and_few() {
        assert_eq!(marks(1.1).len(), 6);
        assert_eq!(marks(17.0), [0.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0, 16.0]);
        for most in [0.1, 0.35, 3.0, 8.0, 99.0, 1234.0] {
            let marks = marks(most);
            assert!((3..=10).contains(&marks.len()), "{most}: {marks:?}");
        }
        assert_eq!((short(0.5), short(20.0), short(0.0)), ("0.5".into(), "20".into(), "0".into()));
    }

    #[test]
    fn a_picture_has_its_link_its_lines_and_its_units() {
        let line =
            |name: &str| Line { name: name.to_owned(), steps: steps(&points(&[(1000.0, 100_000_000)])) };
        let svg = render("a < b", 1.0, &[line("godwit"), line("qemu")]);
        assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n"));
        for wanted in
            ["a &lt; b", "the link: 1 Gb/s", "time since the request, s", "Gb/s", ">godwit<", ">qemu<"]
        {
            assert!(svg.contains(wanted), "{wanted}: {svg}");
        }
        assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
        assert!(!render("nothing", 1.0, &[]).contains("NaN"));
    }
}
