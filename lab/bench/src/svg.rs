//! SVG drawing for pictures that are readable on light and dark backgrounds. It knows nothing of
//! migrations.

use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

/// Colours of axes and text, then of measurements: all are visible on white and on black.
pub(crate) const NEUTRAL: &str = "#808080";
pub(crate) const COLOURS: [&str; 5] = ["#2f7fd1", "#d9822b", "#4d9a4d", "#b05cc6", "#c4504f"];

/// Picture under construction.
pub(crate) struct Svg {
    text: String,
}

impl Svg {
    /// Creates an empty picture of this size.
    pub(crate) fn new(width: f64, height: f64) -> Svg {
        let text = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" \
             width=\"{width}\" height=\"{height}\" \
             font-family=\"sans-serif\" font-size=\"12\" fill=\"{NEUTRAL}\">\n"
        );
        Svg { text }
    }

    /// Draws a line along a path.
    pub(crate) fn stroke(&mut self, path: &str, colour: &str, more: &str) {
        // Writing to a string cannot fail.
        let _ =
            writeln!(self.text, "<path d=\"{path}\" fill=\"none\" stroke=\"{colour}\" {more}/>");
    }

    /// Draws a rectangle without a border, from its upper left corner.
    pub(crate) fn fill(
        &mut self,
        (x, y): (f64, f64),
        (width, height): (f64, f64),
        colour: &str,
        opacity: f64,
    ) {
        let _ = writeln!(
            self.text,
            "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{height:.1}\" \
             fill=\"{colour}\" fill-opacity=\"{opacity}\"/>"
        );
    }

    /// Draws text; `anchor` is the part of it at that position.
    pub(crate) fn text(&mut self, x: f64, y: f64, anchor: &str, content: &str) {
        let _ = writeln!(
            self.text,
            "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{}</text>",
            escaped(content)
        );
    }

    /// Draws text in bold.
    pub(crate) fn title(&mut self, x: f64, y: f64, content: &str) {
        let content = escaped(content);
        let _ = writeln!(
            self.text,
            "<text x=\"{x:.1}\" y=\"{y:.1}\" font-weight=\"bold\">{content}</text>"
        );
    }

    /// Draws text from bottom to top, centred there.
    pub(crate) fn upright(&mut self, x: f64, y: f64, content: &str) {
        let content = escaped(content);
        let _ = writeln!(
            self.text,
            "<text transform=\"translate({x} {y}) rotate(-90)\" \
             text-anchor=\"middle\">{content}</text>"
        );
    }

    pub(crate) fn finish(self) -> String {
        self.text + "</svg>\n"
    }
}

/// Position of a diagram on the picture, and the ranges of its axes, both from 0 on.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Frame {
    pub(crate) left: f64,
    pub(crate) top: f64,
    pub(crate) right: f64,
    pub(crate) bottom: f64,
    pub(crate) most_x: f64,
    pub(crate) most_y: f64,
}

impl Frame {
    pub(crate) fn x(&self, value: f64) -> f64 {
        self.left + value / self.most_x * (self.right - self.left)
    }

    pub(crate) fn y(&self, value: f64) -> f64 {
        self.bottom - value / self.most_y * (self.bottom - self.top)
    }

    /// Draws the axes' lines.
    pub(crate) fn border(&self, svg: &mut Svg) {
        let Frame { left, top, right, bottom, .. } = self;
        svg.stroke(&format!("M{left} {top}V{bottom}H{right}"), NEUTRAL, "");
    }

    /// Draws at most so many marks below.
    pub(crate) fn marks_x(&self, svg: &mut Svg, most_marks: f64) {
        for mark in marks(self.most_x, most_marks) {
            let at = self.x(mark);
            svg.stroke(&format!("M{at:.1} {}v5", self.bottom), NEUTRAL, "");
            svg.text(at, self.bottom + 19.0, "middle", &short(mark));
        }
    }

    /// Draws at most so many horizontal lines at round values, with their values at the left if
    /// `named`.
    pub(crate) fn marks_y(&self, svg: &mut Svg, most_marks: f64, named: bool) {
        for mark in marks(self.most_y, most_marks) {
            let at = self.y(mark);
            svg.stroke(
                &format!("M{} {at:.1}H{}", self.left, self.right),
                NEUTRAL,
                "stroke-opacity=\"0.25\"",
            );
            if named {
                svg.text(self.left - 8.0, at + 4.0, "end", &short(mark));
            }
        }
    }

    /// Draws a dashed horizontal line.
    pub(crate) fn level(&self, svg: &mut Svg, value: f64) {
        let path = format!("M{} {:.1}H{}", self.left, self.y(value), self.right);
        svg.stroke(&path, NEUTRAL, "stroke-width=\"1.5\" stroke-dasharray=\"6 4\"");
    }
}

/// Writes a picture and returns its path.
pub(crate) fn write(folder: &Path, name: &str, svg: &str) -> Result<PathBuf> {
    fs::create_dir_all(folder)?;
    let path = folder.join(format!("{name}.svg"));
    fs::write(&path, svg).with_context(|| format!("cannot write {}", path.display()))?;
    Ok(path)
}

/// Returns the marks of an axis from 0 on: 1, 2 or 5 of a power of ten apart, at most so many in
/// addition to 0.
fn marks(most: f64, most_marks: f64) -> Vec<f64> {
    let power = 10f64.powf((most / most_marks).log10().floor());
    let apart = [1.0, 2.0, 5.0, 10.0].into_iter().map(|step| step * power);
    let apart = apart.into_iter().find(|apart| most / apart <= most_marks).unwrap_or(most);
    (0..=10u8).map(|number| f64::from(number) * apart).filter(|mark| *mark <= most).collect()
}

/// Formats a number without trailing zeros.
pub(crate) fn short(number: f64) -> String {
    let text = format!("{number:.3}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_are_round_and_few() {
        assert_eq!(marks(1.1, 9.0).len(), 6);
        assert_eq!(marks(17.0, 9.0), [0.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0, 16.0]);
        for most in [0.1, 0.35, 3.0, 8.0, 99.0, 1234.0] {
            let many = marks(most, 9.0);
            assert!((3..=10).contains(&many.len()), "{most}: {many:?}");
            let few = marks(most, 4.0);
            assert!((2..=5).contains(&few.len()), "{most}: {few:?}");
        }
        assert_eq!((short(0.5), short(20.0), short(0.0)), ("0.5".into(), "20".into(), "0".into()));
    }

    #[test]
    fn places_in_a_frame_and_text_that_is_no_markup() {
        let frame =
            Frame { left: 10.0, top: 0.0, right: 110.0, bottom: 50.0, most_x: 2.0, most_y: 5.0 };
        assert_eq!((frame.x(0.0), frame.x(2.0)), (10.0, 110.0));
        assert_eq!((frame.y(0.0), frame.y(5.0)), (50.0, 0.0));
        let mut svg = Svg::new(120.0, 60.0);
        svg.text(0.0, 0.0, "start", "a < b & c");
        let svg = svg.finish();
        assert!(
            svg.starts_with("<svg ")
                && svg.ends_with("</svg>\n")
                && svg.contains("a &lt; b &amp; c"),
            "{svg}"
        );
    }
}
