//! QEMU's own migration as the reference engine: every variant moves the same guest and reports the
//! same keys.

use std::collections::BTreeSet;

use anyhow::{Context, Result, ensure};
use godwit_api::{MigrationRequest, QemuEngineOptions};
use godwit_lab::LabOptions;
use godwit_lab::trial::{Guest, GuestPlan, LIMIT, Trial, request_to, until};
use godwit_qemu::{Backing, MemoryBlock};
use godwit_types::{EngineKind, Report};

use crate::{BUSY, move_and_check};

fn variants() -> [(&'static str, QemuEngineOptions); 5] {
    let plain = QemuEngineOptions { plaintext: true, ..QemuEngineOptions::default() };
    [
        ("plain", plain.clone()),
        ("autostart", QemuEngineOptions { autostart: true, ..plain.clone() }),
        ("multifd", QemuEngineOptions { multifd_channels: Some(2), ..plain.clone() }),
        (
            "multifd with zstd",
            QemuEngineOptions {
                multifd_channels: Some(2),
                compression: Some("zstd".to_owned()),
                ..plain.clone()
            },
        ),
        ("auto-converge", QemuEngineOptions { auto_converge: true, ..plain }),
    ]
}

fn keys(report: &Report) -> Result<BTreeSet<String>> {
    let value = serde_json::to_value(report)?;
    Ok(value.as_object().context("no object")?.keys().cloned().collect())
}

fn request(guest: &Guest, qemu: QemuEngineOptions) -> MigrationRequest {
    MigrationRequest { engine: EngineKind::Qemu, qemu, ..guest.to_other_host() }
}

#[test]
fn every_variant_moves_the_guest_and_reports_the_same() -> Result<()> {
    let Some(trial) = Trial::begin("qemu-engine")? else { return Ok(()) };
    let clean = [trial.traces("a")?, trial.traces("b")?];
    let mut guest =
        trial.guest("a", &GuestPlan { workload: BUSY.to_owned(), ..GuestPlan::new("web") })?;
    let ours = move_and_check(&trial, &mut guest)?.report;
    for (variant, options) in variants() {
        let request = request(&guest, options);
        let report = trial.move_guest(&mut guest, &request).context(variant)?.report;
        ensure!(report.engine == EngineKind::Qemu, "{variant}: {report:#?}");
        let other_keys: Vec<_> =
            keys(&report)?.symmetric_difference(&keys(&ours)?).cloned().collect();
        ensure!(other_keys.is_empty(), "{variant}: keys of one report only: {other_keys:?}");
        ensure!(
            report.switchover_ms.is_some() && report.blackout_ms.is_some(),
            "{variant}: {report:#?}"
        );
        ensure!(
            report.wire_bytes > 0 && report.guest_bytes == ours.guest_bytes,
            "{variant}: {report:#?}"
        );
        trial.expect_whole(&guest).context(variant)?;
        eprintln!(
            "  {variant}: {:.0} ms, {} MiB",
            report.migration_time_ms,
            report.wire_bytes >> 20
        );
    }
    // The engines may alternate on one VM. Neither leaves anything that hinders the other.
    move_and_check(&trial, &mut guest)?;
    trial.delete(&guest.host, "web")?;
    trial.expect_traces("a", &clean[0])?;
    trial.expect_traces("b", &clean[1])?;
    trial.finish()
}

#[test]
fn post_copy_moves_it_where_qemu_has_the_right() -> Result<()> {
    let Some(trial) = Trial::begin_with("qemu-postcopy", LabOptions::default().for_postcopy())?
    else {
        return Ok(());
    };
    let mut guest =
        trial.guest("a", &GuestPlan { workload: BUSY.to_owned(), ..GuestPlan::new("web") })?;
    let postcopy =
        QemuEngineOptions { plaintext: true, postcopy: true, ..QemuEngineOptions::default() };
    let request = request(&guest, postcopy);
    let report = trial.move_guest(&mut guest, &request)?.report;
    ensure!(report.engine == EngineKind::Qemu && report.switchover_ms.is_some(), "{report:#?}");
    trial.expect_whole(&guest)?;
    if trial.options().qemu_user.is_none() {
        return trial.finish();
    }
    // With a separate user per VM the request is refused with a remedy, and the guest stays.
    trial.delete(&guest.host, "web")?;
    for host in trial.hosts() {
        trial.reconfigure(&host, |config| {
            config.remove("qemu_user");
        })?;
    }
    let guest = trial.guest("a", &GuestPlan::new("web"))?;
    let report = trial.begin_migration("web", "a", &request)?.report()?;
    let error = report.error.context("the guest moved")?;
    ensure!(error.remedy.contains("vm.unprivileged_userfaultfd"), "{error:?}");
    trial.expect_whole(&guest)?;
    trial.finish()
}

#[test]
fn private_memory_is_refused_by_one_engine_and_moved_by_the_other() -> Result<()> {
    let Some(trial) = Trial::begin("private-memory")? else { return Ok(()) };
    let plan = GuestPlan::new("private");
    let mut spec = plan.spec(trial.image());
    spec.memory = vec![MemoryBlock { backing: Backing::Private, ..spec.memory[0] }];
    trial.create("a", spec)?;
    let refused = trial.begin_migration("private", "a", &MigrationRequest::to("b"));
    let (message, remedy) = match refused {
        Err(error) => (error.to_string(), error.to_string()),
        Ok(migration) => {
            let error = migration.report()?.error.context("the guest moved")?;
            (error.message, error.remedy)
        }
    };
    ensure!(message.contains("shared") || message.contains("private"), "{message}");
    ensure!(remedy.contains("--engine qemu"), "{remedy}");
    until("the guest has booted", LIMIT, || {
        Ok(trial.console("a", "private")?.contains("HEARTBEAT").then_some(()))
    })?;
    let request = request_to("b", EngineKind::Qemu);
    let report = trial.move_silent("private", "a", &request)?;
    ensure!(report.wire_bytes > 0, "{report:#?}");
    trial.finish()
}
