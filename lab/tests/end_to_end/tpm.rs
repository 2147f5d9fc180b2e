//! TPM: its state goes with the guest, and is on the disk of the host that has the guest.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use godwit_api::{MigrationRequest, StopVm};
use godwit_lab::trial::{Guest, GuestPlan, LIMIT, Trial, until};
use godwit_lab::{Hooks, LabOptions};
use godwit_qemu::{Disk, DiskFormat, RunningProcess, VmSpec};
use godwit_types::{EngineKind, Outcome};

use crate::check_report;

/// Options for a lab with hold points.
fn holds() -> LabOptions {
    LabOptions { hooks: Hooks { holds: true, ..Hooks::default() }, ..LabOptions::default() }
}

const STATE: &str = "tpm2-00.permall";

#[test]
fn a_tpm_moves_with_its_guest() -> Result<()> {
    if !Path::new("/usr/bin/swtpm").exists() {
        ensure!(!godwit_lab::trial::must_run(), "no swtpm (apt-get install swtpm)");
        eprintln!("skipped: tpm: no swtpm (apt-get install swtpm)");
        return Ok(());
    }
    let Some(trial) = Trial::begin_with("tpm", holds())? else {
        return Ok(());
    };
    let plan = GuestPlan::new("web");
    // A disk with a thread of its own and a second serial port travel along.
    let image = tempfile::NamedTempFile::new_in("/var/tmp")?;
    image.as_file().set_len(4 << 20)?;
    let disk = Disk { iothread: true, ..Disk::new(image.path(), DiskFormat::Raw) };
    let spec = plan.spec(trial.image());
    let cmdline = spec.cmdline.as_ref().map(|line| format!("{line} godwit.drives=on"));
    let spec = VmSpec { tpm: true, disks: vec![disk], serial_ports: 2, cmdline, ..spec };
    let mut guest = trial.guest_of("a", &plan, spec)?;
    expect_counter(&trial, "a", 1)?;
    expect_tpm(&trial, &guest)?;

    for engine in [EngineKind::Godwit, EngineKind::Qemu] {
        let source = guest.host.clone();
        let request = MigrationRequest { engine, ..guest.to_other_host() };
        check_report(&trial.move_guest(&mut guest, &request)?.report)?;
        ensure!(!state(&trial, &source).exists(), "{engine:?}: left at host {source}");
        ensure!(swtpms(&trial, &source)?.is_empty(), "{engine:?}: swtpm left at host {source}");
        expect_tpm(&trial, &guest)?;
    }

    // A move that fails after the TPM's state was read leaves the source's in use.
    let held = trial.hold("b", "destination.finish-load")?;
    let migration = trial.begin_migration("web", "a", &guest.to_other_host())?;
    held.reached(LIMIT)?;
    trial.kill_hypervisors("b")?;
    held.open();
    let report = migration.report()?;
    ensure!(report.outcome != Outcome::Completed, "{report:#?}");
    expect_tpm(&trial, &guest)?;

    // A restarted agent finds the process, and the next boot continues with its state.
    trial.end_agent("a", rustix::process::Signal::KILL)?;
    trial.start_missing()?;
    expect_tpm(&trial, &guest)?;
    trial.ask(trial.agent("a").stop_vm("web", StopVm { force: true, grace_ms: None }))?;
    ensure!(swtpms(&trial, "a")?.is_empty(), "swtpm outlives QEMU");
    trial.ask(trial.agent("a").start_vm("web"))?;
    guest.wait_ready(plan.boot_limit)?;
    expect_counter(&trial, "a", 2)?;
    trial.ask(trial.agent("a").suspend_vm("web"))?;
    trial.ask(trial.agent("a").start_vm("web"))?;
    expect_tpm(&trial, &guest)?;

    // Without its swtpm, the guest runs on and says so.
    let [swtpm] = swtpms(&trial, "a")?[..] else { anyhow::bail!("not one swtpm") };
    let pid = rustix::process::Pid::from_raw(swtpm.pid).context("no number")?;
    rustix::process::kill_process(pid, rustix::process::Signal::KILL)?;
    until("the VM shows that its TPM is gone", LIMIT, || {
        let reason = trial.vm("a", "web")?.reason;
        Ok(reason.is_some_and(|reason| reason.contains("swtpm")).then_some(()))
    })?;
    guest.status()?;
    trial.delete("a", "web")?;
    ensure!(!state(&trial, "a").exists(), "left after the deletion");
    trial.finish()
}

/// Waits until the guest has used its TPM further, and checks that nothing was lost.
fn expect_tpm(trial: &Trial, guest: &Guest) -> Result<()> {
    let lines = |text: &str| text.matches("TPM ").count();
    let before = lines(&trial.console(&guest.host, "web")?);
    until("the guest uses its TPM", LIMIT, || {
        Ok((lines(&trial.console(&guest.host, "web")?) >= before + 2).then_some(()))
    })?;
    trial.expect_whole(guest)?;
    let owner = std::fs::metadata(state(trial, &guest.host))?;
    let [swtpm] = swtpms(trial, &guest.host)?[..] else { anyhow::bail!("not one swtpm") };
    ensure!(swtpm.belongs_to(owner.uid()) && owner.uid() != 0, "the state is another user's");
    let qemu = trial.vm(&guest.host, "web")?.pid.context("no QEMU")?;
    let qemu = RunningProcess::of(qemu).context("no QEMU")?;
    ensure!(!qemu.may_act_as(owner.uid()), "QEMU has the TPM's user");
    Ok(())
}

/// Waits for the guest's line about the counter in its TPM, incremented at each boot.
fn expect_counter(trial: &Trial, host: &str, boots: u64) -> Result<()> {
    let read = || -> Result<Option<u64>> {
        let console = trial.console(host, "web")?;
        let value = console.split("TPM counter ").nth(1).and_then(|rest| rest.split('\n').next());
        Ok(value.and_then(|value| value.trim().parse().ok()))
    };
    let value = until("the guest reads its TPM", LIMIT, read)?;
    ensure!(value == boots, "counter {value} at boot {boots}");
    Ok(())
}

/// Returns the file of the TPM's permanent state on a host.
fn state(trial: &Trial, host: &str) -> PathBuf {
    trial.paths().host(host).join("state/vms/web/tpm").join(STATE)
}

/// Returns the processes that have the TPM's state of a host open.
fn swtpms(trial: &Trial, host: &str) -> Result<Vec<RunningProcess>> {
    let dir = trial.paths().host(host).join("state/vms/web/tpm");
    let has_it = |process: &RunningProcess| {
        let open = std::fs::read_dir(format!("/proc/{}/fd", process.pid));
        let arguments = process.arguments();
        arguments.windows(6).any(|part| part == b"swtpm\0")
            && open
                .into_iter()
                .flatten()
                .flatten()
                .any(|entry| std::fs::read_link(entry.path()).is_ok_and(|target| target == dir))
    };
    Ok(RunningProcess::all()?.filter(has_it).collect())
}
