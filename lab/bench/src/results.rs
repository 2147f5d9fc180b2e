//! Output of a scenario: one JSON file with the machine, the settings and all measurements.

use std::fmt::Display;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};
use serde::{Serialize, Serializer};

use crate::machine::Machine;

/// Content of the file.
#[derive(Serialize)]
struct Results<'a, S, M> {
    #[serde(flatten)]
    head: &'a Head<'a, S>,
    #[serde(flatten)]
    measured: &'a M,
}

/// Head of the file, followed by the measurements.
#[derive(Debug, Serialize)]
struct Head<'a, S> {
    scenario: &'a str,
    unix_s: u64,
    machine: &'a Machine,
    settings: &'a S,
}

/// File of a scenario that is replaced after each measurement, so that a stop loses nothing.
#[derive(Debug)]
pub(crate) struct Output<'a, S> {
    path: PathBuf,
    head: Head<'a, S>,
}

impl<'a, S: Serialize> Output<'a, S> {
    /// Names a new file in a folder, which it creates.
    pub(crate) fn new(
        folder: &Path,
        scenario: &'a str,
        machine: &'a Machine,
        settings: &'a S,
    ) -> Result<Output<'a, S>> {
        let unix_s = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs();
        fs::create_dir_all(folder)?;
        let path = folder.join(format!("{scenario}-{unix_s}.json"));
        Ok(Output { path, head: Head { scenario, unix_s, machine, settings } })
    }

    /// Takes another file, which is replaced.
    pub(crate) fn with_path(self, path: PathBuf) -> Output<'a, S> {
        Output { path, ..self }
    }

    /// Replaces the file: a stop leaves the former content or the new one.
    pub(crate) fn save(&self, measured: &impl Serialize) -> Result<()> {
        let text = serde_json::to_string_pretty(&Results { head: &self.head, measured })?;
        let beside = self.path.with_extension("new");
        fs::write(&beside, text)
            .and_then(|()| fs::rename(&beside, &self.path))
            .with_context(|| format!("cannot write {}", self.path.display()))
    }

    /// Prints its path.
    pub(crate) fn print_path(&self) {
        println!("\nall figures and reports: {}", self.path.display());
    }
}

/// Writes the file and prints its path.
pub(crate) fn write(
    folder: &Path,
    scenario: &str,
    machine: &Machine,
    settings: &impl Serialize,
    measured: &impl Serialize,
) -> Result<()> {
    let output = Output::new(folder, scenario, machine, settings)?;
    output.save(measured)?;
    output.print_path();
    Ok(())
}

/// Serialises a setting as the text that was typed.
pub(crate) fn as_text<T: Display, S: Serializer>(
    value: &T,
    serializer: S,
) -> std::result::Result<S::Ok, S::Error> {
    serializer.collect_str(value)
}
