//! Clocks that are stepped. Hosts of a lab share the machine's clock, which is not the lab's to set, and time namespaces know monotonic
//! clocks alone; so a library is preloaded into the agents that adds to the time of day what a file says.

use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::agents::clock_step;
use crate::trial::{LIMIT, Trial, until};

const SOURCE: &str = include_str!("clock_step.c");

/// Compiles the library into a folder, and gives its path.
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
    let compiled =
        compiled.context("a library for stepped clocks needs a C compiler: apt-get install gcc")?;
    ensure!(compiled.status.success(), "cc: {}", String::from_utf8_lossy(&compiled.stderr));
    Ok(library)
}

/// Sets by how much the time of day of a host's agent differs from the machine's.
pub(super) fn step(trial: &Trial, host: &str, seconds: i64) -> Result<()> {
    ensure!(trial.options().hooks.clock.is_some(), "this lab's clocks can't be stepped");
    let file = std::fs::File::options().write(true).open(clock_step(trial.paths(), host))?;
    // In place: the agent has it mapped.
    Ok(file.write_all_at(&seconds.to_ne_bytes(), 0)?)
}

/// Waits until a host's agent itself has been told a time of day that differs by so much: each answer over HTTP has one.
pub(super) fn expect_stepped(trial: &Trial, host: &str, seconds: i64) -> Result<()> {
    let agent = i64::from(trial.agent_process(host)?.pid);
    let file = std::fs::File::open(clock_step(trial.paths(), host))?;
    until(&format!("the agent of host {host} is told a time of day {seconds} s off"), LIMIT, || {
        trial.ask(trial.agent(host).host())?;
        let mut told = [0; 16];
        file.read_exact_at(&mut told, 8)?;
        let [step, process] =
            [&told[..8], &told[8..]].map(|part| part.try_into().map(i64::from_ne_bytes));
        let (step, process) = (step?, process?);
        ensure!(
            (step, process) == (seconds, agent),
            "process {process} was last told one, {step} s off; the agent is {agent}"
        );
        Ok(Some(()))
    })
}
