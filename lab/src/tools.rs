//! `ip` and `tc` of iproute2, driven in batches.

use std::io::{ErrorKind, Write};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

/// A script for `ip -batch` or `tc -batch` inside one namespace.
pub(crate) struct Batch {
    tool: &'static str,
    namespace: Option<String>,
    lines: String,
}

impl Batch {
    /// Creates a script of `ip` commands for this process's own namespace.
    pub(crate) fn ip() -> Batch {
        Batch { tool: "ip", namespace: None, lines: String::new() }
    }

    /// Creates a script of `ip` commands for a namespace.
    pub(crate) fn ip_in(namespace: &str) -> Batch {
        Batch { tool: "ip", namespace: Some(namespace.to_owned()), lines: String::new() }
    }

    /// Creates a script of `tc` commands for a namespace.
    pub(crate) fn tc_in(namespace: &str) -> Batch {
        Batch { tool: "tc", namespace: Some(namespace.to_owned()), lines: String::new() }
    }

    pub(crate) fn line(&mut self, line: impl AsRef<str>) -> &mut Batch {
        self.lines.push_str(line.as_ref());
        self.lines.push('\n');
        self
    }

    /// Returns the script's text.
    #[cfg(test)]
    pub(crate) fn text(&self) -> &str {
        &self.lines
    }

    /// Runs the script up to the first line that fails.
    ///
    /// # Errors
    /// The tool is missing, or a line failed: the tool's own message, and the line.
    pub(crate) fn run(&self) -> Result<()> {
        if self.lines.is_empty() {
            return Ok(());
        }
        let mut command = Command::new(self.tool);
        if let Some(namespace) = &self.namespace {
            command.args(["-n", namespace]);
        }
        command
            .args(["-batch", "-"])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped());
        let mut child = match command.spawn() {
            Ok(child) => child,
            Err(error) if error.kind() == ErrorKind::NotFound => {
                bail!("{} is not installed; install it with: apt-get install iproute2", self.tool)
            }
            Err(error) => return Err(error).with_context(|| format!("cannot run {}", self.tool)),
        };
        let mut stdin = child.stdin.take().context("no standard input")?;
        // A tool that stops early closes its end; its output gives the reason.
        drop(stdin.write_all(self.lines.as_bytes()));
        drop(stdin);
        let output = child.wait_with_output()?;
        if output.status.success() {
            return Ok(());
        }
        let stderr = String::from_utf8_lossy(&output.stderr);
        let place =
            self.namespace.as_ref().map(|name| format!(" in namespace {name}")).unwrap_or_default();
        bail!("{} failed{place}: {}{}", self.tool, stderr.trim(), self.failed_line(&stderr))
    }

    /// Returns the line that iproute2's `Command failed -:N` names.
    fn failed_line(&self, stderr: &str) -> String {
        let number = stderr
            .rsplit_once("Command failed -:")
            .and_then(|(_, number)| number.trim().parse::<usize>().ok());
        let line = number.and_then(|number| self.lines.lines().nth(number.checked_sub(1)?));
        line.map(|line| format!(" (`{line}`)")).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_names_its_line() {
        let mut batch = Batch::ip();
        batch.line("link add one").line("link add two");
        assert_eq!(batch.failed_line("Error: no.\nCommand failed -:2\n"), " (`link add two`)");
        assert_eq!(batch.failed_line("something else"), "");
    }
}
