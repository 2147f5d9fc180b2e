//! Stepped clocks. Hosts of a lab share the machine's clock, which the lab must not set, and time
//! namespaces (`Hooks::boot_clocks_ahead_s`) cover monotonic clocks only. The agents therefore
//! preload a library that adds an offset, read from a file, to the time of day.

use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::agents::clock_step;
use crate::trial::{LIMIT, Trial, until};

const SOURCE: &str = include_str!("clock_step.c");

/// Compiles the library into a folder and returns its path.
///
/// # Errors
/// There is no C compiler.
pub fn build_clock(out_dir: &Path) -> Result<PathBuf> {
    std::fs::create_dir_all(out_dir)?;
    let (source, library) = (out_dir.join("clock_step.c"), out_dir.join("libclock_step.so"));
    if library.exists() && std::fs::read_to_string(&source).is_ok_and(|text| text == SOURCE) {
        return Ok(library);
    }
    std::fs::write(&source, SOURCE)?;
    let compiled = Command::new("cc")
        .args(["-shared", "-fPIC", "-O2", "-o"])
        .args([&library, &source])
        .output();
    let compiled = compiled
        .context("cannot compile the library for stepped clocks; remedy: apt-get install gcc")?;
    ensure!(compiled.status.success(), "cc: {}", String::from_utf8_lossy(&compiled.stderr));
    Ok(library)
}

/// Sets the offset of an agent's time of day from the machine's.
pub(crate) fn step(trial: &Trial, host: &str, seconds: i64) -> Result<()> {
    ensure!(trial.options().hooks.clock.is_some(), "the clocks of this lab cannot be stepped");
    let file = std::fs::File::options().write(true).open(clock_step(trial.paths(), host))?;
    // Written in place, because the agent has mapped the file.
    Ok(file.write_all_at(&seconds.to_ne_bytes(), 0)?)
}

/// Waits until a host's agent itself has read a time of day with this offset. Every HTTP response
/// contains the time.
pub(crate) fn expect_stepped(trial: &Trial, host: &str, seconds: i64) -> Result<()> {
    let agent = i64::from(trial.agent_process(host)?.pid);
    let file = std::fs::File::open(clock_step(trial.paths(), host))?;
    until(&format!("the agent of host {host} reads a time of day {seconds} s off"), LIMIT, || {
        trial.ask(trial.agent(host).host())?;
        let mut last_read = [0; 16];
        file.read_exact_at(&mut last_read, 8)?;
        let [step, process] =
            [&last_read[..8], &last_read[8..]].map(|part| part.try_into().map(i64::from_ne_bytes));
        let (step, process) = (step?, process?);
        ensure!(
            (step, process) == (seconds, agent),
            "process {process} was the last to read one, {step} s off; the agent is {agent}"
        );
        Ok(Some(()))
    })
}
