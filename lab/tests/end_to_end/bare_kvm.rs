//! Moves of the bare guests under KVM, if /dev/kvm runs at least a 32-bit guest, and under TCG.

use std::time::Duration;

use anyhow::{Result, ensure};
use godwit_api::MigrationRequest;
use godwit_lab::trial::{Needs, Trial, missing, until};
use godwit_qemu::Accel;

/// Longest time for some reports of the bare guest, which makes one every 64 sweeps. It is slow
/// under a KVM that itself runs in a VM of a busy machine.
const SWEEPS_LIMIT: Duration = Duration::from_secs(240);

fn wait_generations(trial: &Trial, host: &str, count: usize) -> Result<()> {
    until("the bare guest's reports", SWEEPS_LIMIT, || {
        Ok((trial.bare_generations(host, "bare")? >= count).then_some(()))
    })
}

fn there_and_back(trial: &Trial, accel: Accel) -> Result<()> {
    trial.bare_guest("a", "bare", accel)?;
    wait_generations(trial, "a", 1)?;
    for (from, to) in [("a", "b"), ("b", "a")] {
        let report = trial.move_silent("bare", from, &MigrationRequest::to(to))?;
        // Two reports have 64 sweeps between them, and each sweep checks each page.
        wait_generations(trial, to, 2)?;
        eprintln!(
            "  {accel:?} {from} to {to}: {:.0} ms, switchover {:.1} ms, {} rounds",
            report.migration_time_ms,
            report.switchover_ms.unwrap_or_default(),
            report.rounds.len()
        );
        ensure!(trial.vm(from, "bare").is_err(), "the VM is still on host {from}");
    }
    trial.delete("a", "bare")?;
    let mut echo = trial.echo_guest("a", "echo", accel)?;
    for _ in 0..2 {
        let request = echo.to_other_host();
        let moved = trial.move_guest(&mut echo, &request)?;
        eprintln!(
            "  {accel:?}, answering packets: switchover {:.1} ms, blackout {:.1} ms",
            moved.report.switchover_ms.unwrap_or_default(),
            moved.report.blackout_ms.unwrap_or_default(),
        );
        // Fails if it has found a wrong page.
        trial.bare_generations(&echo.host, "echo")?;
    }
    Ok(trial.delete("a", "echo")?)
}

#[test]
fn the_bare_guest_moves_under_kvm() -> Result<()> {
    if let Some(reason) = missing(&Needs::kvm()) {
        eprintln!("skipped: bare guest under KVM: {reason}");
        return Ok(());
    }
    let Some(trial) = Trial::begin("bare-kvm")? else { return Ok(()) };
    let clean = [trial.traces("a")?, trial.traces("b")?];
    there_and_back(&trial, Accel::Kvm)?;
    trial.expect_traces("a", &clean[0])?;
    trial.expect_traces("b", &clean[1])?;
    trial.finish()
}

#[test]
fn the_bare_guest_moves_under_tcg() -> Result<()> {
    let Some(trial) = Trial::begin("bare-tcg")? else { return Ok(()) };
    there_and_back(&trial, Accel::Tcg)?;
    trial.finish()
}
