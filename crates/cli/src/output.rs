//! Where results, progress and failures go: results to standard output, everything else to standard error; colours
//! and moving lines on terminals only, and never where NO_COLOR is set (no-color.org).

use std::io::{self, IsTerminal, Write};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;

use crate::exit::Failure;

/// How results are written.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Output {
    json: bool,
    colours: bool,
}

/// A colour by what it means.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Tone {
    Good,
    Bad,
    Strong,
}

impl Output {
    pub(crate) fn new(json: bool) -> Output {
        let forbidden = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        Output { json, colours: !json && !forbidden && io::stdout().is_terminal() }
    }

    /// Whether results are for programs.
    pub(crate) fn is_json(self) -> bool {
        self.json
    }

    /// Writes a result: as JSON, or as `text` makes it for people.
    pub(crate) fn result(
        self,
        result: &impl Serialize,
        text: impl FnOnce() -> String,
    ) -> Result<(), Failure> {
        let mut out = if self.json {
            serde_json::to_string_pretty(result).unwrap_or_default()
        } else {
            text()
        };
        if !out.is_empty() && !out.ends_with('\n') {
            out.push('\n');
        }
        match io::stdout().lock().write_all(out.as_bytes()) {
            // A reader that has seen enough (`| head`) is no failure.
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
            other => Ok(other?),
        }
    }

    /// A remark beside the result.
    pub(crate) fn note(self, text: &str) {
        let _ = writeln!(io::stderr().lock(), "{text}");
    }

    pub(crate) fn failure(self, failure: &Failure) {
        let text = if self.json {
            serde_json::json!({ "error": failure }).to_string()
        } else {
            format!("error: {failure}")
        };
        self.note(&text);
    }

    /// Text in a colour, where there are colours.
    pub(crate) fn paint(self, tone: Tone, text: &str) -> String {
        let code = match tone {
            Tone::Good => 32,
            Tone::Bad => 31,
            Tone::Strong => 1,
        };
        if self.colours { format!("\u{1b}[{code}m{text}\u{1b}[0m") } else { text.to_owned() }
    }
}

/// A moving line for what is under way; none where nobody watches a terminal.
pub(crate) fn spinner() -> Option<ProgressBar> {
    io::stderr().is_terminal().then(|| {
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
        bar.set_style(
            ProgressStyle::with_template("{spinner} {msg}")
                .unwrap_or_else(|_| ProgressStyle::default_spinner()),
        );
        bar
    })
}

/// A table of aligned columns, the heads in capitals, without lines.
pub(crate) fn table(heads: &[&str], rows: &[Vec<String>]) -> String {
    let mut widths: Vec<usize> = heads.iter().map(|head| head.chars().count()).collect();
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let line = |cells: &mut dyn Iterator<Item = &str>| {
        let padded: Vec<String> = cells
            .zip(&widths)
            .map(|(cell, width)| format!("{cell:<width$}", width = *width))
            .collect();
        format!("{}\n", padded.join("  ").trim_end())
    };
    let heads: Vec<String> = heads.iter().map(|head| head.to_uppercase()).collect();
    let mut text = line(&mut heads.iter().map(String::as_str));
    for row in rows {
        text.push_str(&line(&mut row.iter().map(String::as_str)));
    }
    text
}

/// `key: value` lines, the values aligned.
pub(crate) fn fields(fields: &[(&str, String)]) -> String {
    let width = fields.iter().map(|(key, _)| key.len()).max().unwrap_or(0) + 1;
    fields.iter().map(|(key, value)| format!("{:<width$} {value}\n", format!("{key}:"))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_aligned_and_lines_end_clean() {
        let rows =
            vec![vec!["web".into(), "running".into()], vec!["a-long-name".into(), String::new()]];
        assert_eq!(
            table(&["name", "state"], &rows),
            "NAME         STATE\nweb          running\na-long-name\n"
        );
        assert_eq!(
            fields(&[("name", "web".into()), ("state", "up".into())]),
            "name:  web\nstate: up\n"
        );
    }
}
