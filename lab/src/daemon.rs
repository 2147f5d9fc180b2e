//! Processes of the lab: `godwit-lab daemon KIND --config FILE`, started by `up` only.

use std::io::Write;
use std::path::Path;
use std::process::Command;
use std::str::FromStr;

use anyhow::{Context, Result, bail};
use godwit_prober::server as prober;
use serde::de::DeserializeOwned;

use crate::{door, emulator};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DaemonKind {
    /// The link emulator.
    Emulator,
    Client,
    /// Port forwarder to the manager.
    Door,
}

impl DaemonKind {
    fn name(self) -> &'static str {
        match self {
            DaemonKind::Emulator => "emulator",
            DaemonKind::Client => "client",
            DaemonKind::Door => "door",
        }
    }
}

impl FromStr for DaemonKind {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<DaemonKind> {
        match text {
            "emulator" => Ok(DaemonKind::Emulator),
            "client" => Ok(DaemonKind::Client),
            "door" => Ok(DaemonKind::Door),
            _ => bail!("unknown process `{text}`: expected emulator, client or door"),
        }
    }
}

/// Runs the process until it is ended. It prints `ready` on standard output once it works.
///
/// # Errors
/// The configuration cannot be read, or the process cannot do its work.
pub fn run(kind: DaemonKind, config: &Path) -> Result<()> {
    match kind {
        DaemonKind::Emulator => emulator::run(&read(config)?, notify_ready),
        DaemonKind::Client => prober::run(&read(config)?, notify_ready),
        DaemonKind::Door => door::run(&read(config)?, notify_ready),
    }
}

/// Returns the command that runs the process.
pub(crate) fn command(lab: &Path, kind: DaemonKind, config: &Path) -> Command {
    let mut command = Command::new(lab);
    command.args(["daemon", kind.name(), "--config"]).arg(config);
    command
}

fn read<T: DeserializeOwned>(config: &Path) -> Result<T> {
    let text = std::fs::read_to_string(config)
        .with_context(|| format!("cannot read {}", config.display()))?;
    serde_json::from_str(&text).with_context(|| format!("cannot parse {}", config.display()))
}

fn notify_ready() -> Result<()> {
    let mut stdout = std::io::stdout();
    writeln!(stdout, "ready")?;
    stdout.flush().context("cannot report that this process is ready")
}
