//! Output of a scenario: one JSON file with the machine, the settings and all measurements.

use std::fmt::Display;
use std::fs;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};
use serde::{Serialize, Serializer};

use crate::machine::Machine;

/// Head of the file, followed by the measurements.
#[derive(Serialize)]
struct Results<'a, S, M> {
    scenario: &'a str,
    unix_s: u64,
    machine: &'a Machine,
    settings: &'a S,
    #[serde(flatten)]
    measured: &'a M,
}

/// Writes the file and prints its path.
pub(crate) fn write(
    folder: &Path,
    scenario: &str,
    machine: &Machine,
    settings: &impl Serialize,
    measured: &impl Serialize,
) -> Result<()> {
    let unix_s = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs();
    fs::create_dir_all(folder)?;
    let path = folder.join(format!("{scenario}-{unix_s}.json"));
    let results = Results { scenario, unix_s, machine, settings, measured };
    fs::write(&path, serde_json::to_string_pretty(&results)?)
        .with_context(|| format!("cannot write {}", path.display()))?;
    println!("\nall figures and reports: {}", path.display());
    Ok(())
}

/// Serialises a setting as the text that was typed.
pub(crate) fn as_text<T: Display, S: Serializer>(
    value: &T,
    serializer: S,
) -> std::result::Result<S::Ok, S::Error> {
    serializer.collect_str(value)
}
