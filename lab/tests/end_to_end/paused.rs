//! A paused guest stays paused across a migration.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;

use anyhow::{Context, Result, ensure};
use godwit_api::{MigrationRequest, VmState};
use godwit_lab::trial::{GuestPlan, Trial};
use godwit_types::Outcome;
use rustix::process::Signal;

use crate::move_and_check;

#[test]
fn a_paused_guest_stays_paused() -> Result<()> {
    let Some(trial) = Trial::begin("paused")? else { return Ok(()) };
    let clean = trial.traces("b")?;
    let mut guest = trial.guest("a", &GuestPlan::new("web"))?;
    // The monitor accepts one client at a time, so the agent is stopped.
    trial.end_agent("a", Signal::TERM)?;
    stop_vcpus(&trial)?;
    trial.start_missing()?;
    ensure!(trial.vm("a", "web")?.state == VmState::Paused, "{:?}", trial.vm("a", "web")?);

    match trial.begin_migration("web", "a", &MigrationRequest::to("b")) {
        // If it moves, it is paused at the destination.
        Ok(migration) => {
            let report = migration.report()?;
            ensure!(report.outcome == Outcome::Completed, "{report:#?}");
            guest.host = report.to;
        }
        // Otherwise the refusal says what to do first.
        Err(error) => {
            ensure!(
                error.to_string().contains("paused") && error.to_string().contains("vm start"),
                "{error}"
            );
            trial.expect_traces("b", &clean)?;
        }
    }
    let vm = trial.vm(&guest.host, "web")?;
    ensure!(vm.state == VmState::Paused, "{vm:?}");
    trial.ask(trial.agent(&guest.host).start_vm("web"))?;
    trial.expect_whole(&guest)?;
    move_and_check(&trial, &mut guest)?;
    trial.finish()
}

/// Stops the vCPUs behind the agent's back.
fn stop_vcpus(trial: &Trial) -> Result<()> {
    let run_dir = trial.paths().host("a").join("run/vms/web");
    let socket = std::fs::read_dir(&run_dir)?
        .flatten()
        .map(|entry| entry.path())
        .find(|path| path.ends_with("qmp.sock"))
        .with_context(|| format!("no monitor in {}", run_dir.display()))?;
    let stream = UnixStream::connect(socket)?;
    let mut lines = BufReader::new(&stream).lines();
    lines.next().context("no greeting")??;
    for command in ["qmp_capabilities", "stop"] {
        (&stream).write_all(format!("{{\"execute\":\"{command}\"}}\n").as_bytes())?;
        let mut answer = String::new();
        while !answer.contains("return") {
            answer = lines.next().context("the monitor closed")??;
        }
    }
    Ok(())
}
