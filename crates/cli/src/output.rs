//! Output of results, progress and errors: results go to standard output, everything else to
//! standard error. Colours and live lines appear only on terminals, and never if NO_COLOR is set
//! (no-color.org).

use std::io::{self, IsTerminal, Write};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;
use tracing_subscriber::EnvFilter;

use crate::exit::Failure;

/// Writes the log of an agent or a manager to standard error. RUST_LOG sets its level.
pub(crate) fn log_to_stderr() {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(io::stderr)
        .with_ansi(false)
        .init();
}

/// Format of results.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Output {
    json: bool,
    colours: bool,
}

/// A colour, named by its meaning.
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

    /// Returns whether results are written as JSON.
    pub(crate) fn is_json(self) -> bool {
        self.json
    }

    /// Writes a result as JSON, or as the text of `text`.
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
            // A reader that closes the pipe early (`| head`) is not an error.
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
            other => Ok(other?),
        }
    }

    /// Writes a remark to standard error.
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

    /// Colours a text, if colours are enabled.
    pub(crate) fn paint(self, tone: Tone, text: &str) -> String {
        let code = match tone {
            Tone::Good => 32,
            Tone::Bad => 31,
            Tone::Strong => 1,
        };
        if self.colours { format!("\u{1b}[{code}m{text}\u{1b}[0m") } else { text.to_owned() }
    }
}

/// Creates a live line for an operation in progress; `None` without a terminal.
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

/// Formats a table of aligned columns, with heads in capitals and without lines.
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

/// Formats `key: value` lines with aligned values.
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
