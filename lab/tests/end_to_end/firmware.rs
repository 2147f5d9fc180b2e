//! UEFI firmware: the guest's variables are a file on its host, and travel with it. Also a boot
//! from the network.

mod pxe;

use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::PathBuf;

use anyhow::{Result, ensure};
use godwit_api::{MigrationRequest, StopVm};
use godwit_lab::trial::{GuestPlan, LIMIT, Trial, until};
use godwit_qemu::{
    ByteSize, DESCRIPTION_DIRS, Disk, DiskFormat, Firmware, FirmwareImages, MemoryBlock, VmSpec,
};
use godwit_types::{EngineKind, Outcome};

use crate::{check_report, slow_link};

#[test]
fn variables_travel_with_the_guest() -> Result<()> {
    let dirs = DESCRIPTION_DIRS.map(std::path::Path::new);
    let Some(images) = FirmwareImages::find(&dirs, Firmware::Uefi, "pc-q35-7.2") else {
        ensure!(!godwit_lab::trial::must_run(), "no UEFI firmware (apt-get install ovmf)");
        eprintln!("skipped: firmware: no UEFI firmware (apt-get install ovmf)");
        return Ok(());
    };
    let Some(trial) = Trial::begin_with("firmware", slow_link()?)? else {
        return Ok(());
    };
    let plan = GuestPlan { firmware: Firmware::Uefi, ..GuestPlan::new("web") };
    let mut guest = trial.guest("a", &plan)?;
    let template = std::fs::read(&images.variables)?;
    let written = std::fs::read(variables(&trial, "a"))?;
    ensure!(written.len() == template.len() && written != template, "the guest wrote no variable");
    ensure!(std::fs::metadata(variables(&trial, "a"))?.mode() & 0o777 == 0o600, "others read it");

    for engine in [EngineKind::Godwit, EngineKind::Qemu, EngineKind::Godwit] {
        let source = guest.host.clone();
        let request = MigrationRequest { engine, ..guest.to_other_host() };
        check_report(&trial.move_guest(&mut guest, &request)?.report)?;
        trial.expect_whole(&guest)?;
        ensure!(
            std::fs::read(variables(&trial, &guest.host))? == written,
            "{engine:?}: other ones"
        );
        ensure!(!variables(&trial, &source).exists(), "{engine:?}: left at host {source}");
    }
    ensure!(guest.host == "b", "three moves end at host b");

    // What the guest writes after its flash was sent is not in QEMU's stream: it stays.
    let request = MigrationRequest { engine: EngineKind::Qemu, ..guest.to_other_host() };
    let mut migration = trial.begin_migration("web", "b", &request)?;
    let sends = migration.until(|progress| progress.sent_bytes > 1 << 20)?;
    ensure!(sends.is_some(), "it ended at once: {:#?}", migration.report()?);
    let last = written.len() as u64 - 1;
    let file = std::fs::OpenOptions::new().write(true).open(variables(&trial, "b"))?;
    file.write_all_at(&[0x5a], last)?;
    let report = migration.report()?;
    let code = report.error.as_ref().map(|error| error.code.as_str());
    ensure!(report.outcome == Outcome::Failed && code == Some("firmware-written"), "{report:#?}");
    trial.expect_whole(&guest)?;
    ensure!(!variables(&trial, "a").exists(), "left at host a");

    // It starts from its own variables where it is now.
    trial.ask(trial.agent("b").stop_vm("web", StopVm { force: true, grace_ms: None }))?;
    let kept = std::fs::read(variables(&trial, "b"))?;
    ensure!(kept[..kept.len() - 1] == written[..written.len() - 1], "a stop changed them");
    trial.ask(trial.agent("b").start_vm("web"))?;
    guest.wait_ready(plan.boot_limit)?;
    ensure!(std::fs::read(variables(&trial, "b"))? != template, "started from the template");
    trial.delete("b", "web")?;
    ensure!(!variables(&trial, "b").exists(), "left after the deletion");
    move_with_secure_boot(&trial)?;
    pxe::boot(&trial)?;
    trial.finish()
}

/// Moves a VM whose firmware finds nothing to start.
fn move_with_secure_boot(trial: &Trial) -> Result<()> {
    let disk = tempfile::NamedTempFile::new_in("/var/tmp")?;
    disk.as_file().set_len(1 << 20)?;
    let spec = VmSpec {
        memory: vec![MemoryBlock::shared(ByteSize::from_mib(128))],
        firmware: Firmware::UefiSecure,
        disks: vec![Disk::new(disk.path(), DiskFormat::Raw)],
        ..VmSpec::new("safe")
    };
    trial.create("a", spec)?;
    let path = |host: &str| trial.paths().host(host).join("state/vms/safe/uefi-secure.variables");
    until("the firmware finds nothing to start", LIMIT, || {
        Ok(trial.console("a", "safe")?.contains("No bootable option").then_some(()))
    })?;
    let written = std::fs::read(path("a"))?;
    trial.move_silent("safe", "a", &MigrationRequest::to("b"))?;
    ensure!(std::fs::read(path("b"))? == written && !path("a").exists(), "other variables");
    Ok(trial.delete("b", "safe")?)
}

/// Returns the file of the guest's variables on a host.
fn variables(trial: &Trial, host: &str) -> PathBuf {
    trial.paths().host(host).join("state/vms/web/uefi.variables")
}
