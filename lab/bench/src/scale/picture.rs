//! Picture of how figures grow with the guest, each relative to its value for the smallest guest.

use std::fmt::Write;

use crate::svg::{COLOURS, Frame, NEUTRAL, Svg};

const WIDTH: f64 = 860.0;
const HEIGHT: f64 = 420.0;
const MOST_MARKS: f64 = 9.0;

/// Draws lines through the points of each curve: its name, and its figures by size. The dashed line
/// grows as the size.
pub(crate) fn render(gib: &[f64], curves: &[(&str, &[Option<f64>])]) -> String {
    let relative = |medians: &[Option<f64>]| -> Vec<(f64, f64)> {
        let Some(first) = medians.first().copied().flatten().filter(|first| *first > 0.0) else {
            return Vec::new();
        };
        let points = gib.iter().zip(medians);
        points.filter_map(|(gib, median)| Some((*gib, (*median)? / first))).collect()
    };
    let lines: Vec<_> = curves.iter().map(|(name, medians)| (*name, relative(medians))).collect();
    let (least_x, most_x) = (
        gib.iter().copied().fold(f64::INFINITY, f64::min),
        gib.iter().copied().fold(1.0, f64::max),
    );
    let as_size = if least_x.is_finite() { most_x / least_x } else { 1.0 };
    let points = lines.iter().flat_map(|(_, line)| line);
    let most_y = points.map(|(_, ratio)| *ratio).fold(as_size, f64::max) * 1.1;
    let (left, top, right, bottom) = (64.0, 110.0, WIDTH - 20.0, HEIGHT - 52.0);
    let frame = Frame { left, top, right, bottom, most_x: most_x * 1.02, most_y };
    let mut svg = Svg::new(WIDTH, HEIGHT);
    svg.title(left, 18.0, "Growth with the size of the guest");
    frame.marks_x(&mut svg, MOST_MARKS);
    frame.marks_y(&mut svg, MOST_MARKS, true);
    frame.border(&mut svg);
    svg.text(f64::midpoint(left, right), HEIGHT - 12.0, "middle", "guest, GiB");
    svg.upright(16.0, f64::midpoint(top, bottom), "times the smallest guest's");
    let straight = [(least_x, 1.0), (most_x, as_size)];
    svg.stroke(&path(&frame, &straight), NEUTRAL, "stroke-width=\"1.5\" stroke-dasharray=\"6 4\"");
    for (number, (name, line)) in lines.iter().enumerate() {
        let colour = COLOURS[number % COLOURS.len()];
        svg.stroke(&path(&frame, line), colour, "stroke-width=\"1.8\"");
        #[expect(clippy::cast_precision_loss, reason = "a handful of lines")]
        let y = 34.0 + number as f64 * 16.0;
        svg.stroke(&format!("M{left} {}h18", y - 4.0), colour, "stroke-width=\"3\"");
        svg.text(left + 24.0, y, "start", name);
    }
    svg.finish()
}

fn path(frame: &Frame, points: &[(f64, f64)]) -> String {
    points.iter().fold(String::new(), |mut path, (x, y)| {
        let command = if path.is_empty() { 'M' } else { 'L' };
        // Writing to a string cannot fail.
        let _ = write!(path, "{command}{:.1} {:.1}", frame.x(*x), frame.y(*y));
        path
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_picture_has_its_lines_and_no_invalid_number() {
        let svg = render(
            &[64.0, 128.0],
            &[("scan", &[Some(10.0), Some(40.0)]), ("none", &[None, Some(1.0)])],
        );
        for wanted in [">scan<", ">none<", "guest, GiB"] {
            assert!(svg.contains(wanted), "{wanted}: {svg}");
        }
        let empty = render(&[], &[]);
        assert!(![&svg, &empty].iter().any(|svg| svg.contains("NaN")), "{svg}\n{empty}");
    }
}
