//! End-to-end migrations on this machine: real agents, QEMUs and guests, with a separate lab for
//! each test. Each file is a scenario; all are one program, so that it is linked once. If root,
//! QEMU or the built image is missing, each test says so and passes. With `GODWIT_REQUIRE_TRIALS`
//! set it fails instead. No test asserts a duration.

#![allow(clippy::unwrap_used, clippy::panic, clippy::float_cmp, reason = "tests")]

mod adoption;
mod bad_input;
mod bare_kvm;
mod boundaries;
mod cancel;
mod ceph;
mod certificates;
mod change;
mod clones;
mod compression;
mod crash;
mod created_again;
mod deltas;
mod disk;
mod disk_moves;
mod drives;
mod fake_peer;
mod faults;
mod firmware;
mod guest_agent;
mod ha;
mod hotplug;
mod imports;
mod installed;
mod lane_cut;
mod limits;
mod many;
mod memory_blocks;
mod page_in;
mod paused;
mod peer_version;
mod power_cycle;
mod predict;
mod probe;
mod progress;
mod qemu_engine;
mod quota;
mod references;
mod restart;
mod restarts;
mod screen;
mod soak;
mod soak_mixed;
mod suspend;
mod there_and_back;
mod throttle;
mod tpm;
mod two_lanes;
mod unprivileged;
mod vanishing;
mod viewer;
mod with_disks;

use std::process::Command;

use anyhow::{Result, ensure};
use godwit_lab::LabOptions;
use godwit_lab::trial::{Guest, Trial, Watched};
use godwit_types::{Phase, Report};

/// Dirties 5,000 pages a second at random, all kinds of pages.
const BUSY: &str = "dirty:rate=5000,ws=64M,order=random,zero=10,compressible=40";

/// Returns options for a link so slow that the first round takes seconds. That leaves time to act
/// on a running migration.
fn slow_link() -> Result<LabOptions> {
    Ok(LabOptions { link: Some("200mbit".parse()?), ..LabOptions::default() })
}

/// Checks what every completed report must contain.
fn check_report(report: &Report) -> Result<()> {
    ensure!(report.error.is_none(), "{report:#?}");
    ensure!(
        report.wire_bytes > 0 && report.guest_bytes > 0 && report.migration_time_ms > 0.0,
        "{report:#?}"
    );
    let switchover_ms = report.switchover_ms.unwrap_or_default();
    let blackout_ms = report.blackout_ms.unwrap_or_default();
    ensure!(switchover_ms > 0.0 && blackout_ms > 0.0, "{report:#?}");
    ensure!(
        !report.rounds.is_empty() && report.phases.iter().any(|p| p.phase == Phase::Switchover),
        "{report:#?}"
    );
    Ok(())
}

/// Moves the guest to the other host and runs all checks afterwards.
fn move_and_check(trial: &Trial, guest: &mut Guest) -> Result<Watched> {
    let request = guest.to_other_host();
    let watched = trial.move_guest(guest, &request)?;
    let report = &watched.report;
    check_report(report)?;
    trial.expect_whole(guest)?;
    eprintln!(
        "  {} to {}: {:.0} ms, switchover {:.1} ms, blackout {:.1} ms, {} rounds, {} MiB",
        report.from,
        report.to,
        report.migration_time_ms,
        report.switchover_ms.unwrap_or_default(),
        report.blackout_ms.unwrap_or_default(),
        report.rounds.len(),
        report.wire_bytes >> 20
    );
    Ok(watched)
}

/// Sets the destination's NIC of the migration network up or down. It keeps its IPv4 address.
fn set_link(trial: &Trial, state: &str) -> Result<()> {
    let ended = Command::new("ip")
        .args(["-n", &trial.namespace("b"), "link", "set", "mig0", state])
        .status()?;
    ensure!(ended.success(), "ip link set mig0 {state} failed");
    Ok(())
}
