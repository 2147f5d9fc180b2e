//! An installed Debian with everything that people give a VM: it boots by UEFI with a TPM, is set
//! up by cloud-init, and moves again and again while it checks its memory, its disks and its TPM.
//! `GODWIT_INSTALLED_MOVES` sets the number of moves; without it the test is skipped, because the
//! boot takes minutes under TCG. `make installed` builds the image first and makes 20 moves.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use godwit_api::{GuestInfo, MigrationRequest};
use godwit_lab::trial::{Trial, other_host, until};
use godwit_qemu::{
    ByteSize, Cdrom, CloudInit, Disk, DiskBus, DiskFormat, Firmware, MemoryBlock, Nic, NicModel,
    Video, VmSpec, Watchdog,
};
use godwit_types::{EngineKind, Report};
use serde_json::json;

const VM: &str = "debian";
/// Longest boot until cloud-init has done its work, under TCG on a busy machine.
const BOOT_LIMIT: Duration = Duration::from_secs(900);
/// Longest time for one lap of the checks in the guest.
const LAP_LIMIT: Duration = Duration::from_secs(120);
/// Laps of the checks that must succeed after each move. The first may have begun before it.
const LAPS: usize = 2;
/// Address that cloud-init gives to the guest.
const ADDRESS: &str = "10.88.0.31";
/// Buses of the disks beside the first, which has the system.
const FURTHER: [DiskBus; 3] = [DiskBus::Scsi, DiskBus::Sata, DiskBus::Virtio];

/// Checks that run in the guest from its first boot on: a file in memory keeps its digest, each
/// disk gives back what was written, and a register of the TPM stays as the firmware left it. Each
/// lap ends with a line on the second serial port.
const CHECKS: &str = r#"#!/bin/sh
head -c 96M /dev/urandom > /dev/shm/content
sum() { sha256sum < "$1" | cut -c 1-64; }
content=$(sum /dev/shm/content)
pcr() { cat /sys/class/tpm/tpm0/pcr-sha256/0; }
first=$(pcr)
lap=0
while :; do
  lap=$((lap + 1)) why=
  [ "$(sum /dev/shm/content)" = "$content" ] || why="$why memory"
  [ -n "$first" ] && [ "$(pcr)" = "$first" ] || why="$why tpm"
  for disk in $(lsblk -dno NAME,SIZE -b | awk '$2 == 33554432 { print "/dev/" $1 }'); do
    head -c 1M /dev/urandom > /run/written
    dd if=/run/written of=$disk bs=64k seek=$((lap % 16 * 16)) conv=fsync status=none
    dd if=$disk bs=64k skip=$((lap % 16 * 16)) count=16 status=none > /run/read
    cmp -s /run/written /run/read || why="$why $disk"
  done
  disks=$(lsblk -dno SIZE -b | grep -cw 33554432)
  [ "$disks" = 3 ] || why="$why disks=$disks"
  echo "LAP $lap ${why:-right}" > /dev/ttyS1
  sleep 0.2
done
"#;

#[test]
fn an_installed_system_moves_with_all_its_devices() -> Result<()> {
    let Ok(moves) = std::env::var("GODWIT_INSTALLED_MOVES") else {
        eprintln!("skipped: installed: it takes minutes (make installed)");
        return Ok(());
    };
    let moves: usize = moves.parse().context("GODWIT_INSTALLED_MOVES is not a number")?;
    let Some(trial) = Trial::begin("installed")? else { return Ok(()) };
    let folder = tempfile::Builder::new().prefix("godwit-installed-").tempdir_in("/var/tmp")?;
    let spec = spec(folder.path())?;
    trial.create("a", spec)?;
    let begin = std::time::Instant::now();
    if let Err(error) = expect_settings(&trial) {
        eprintln!("{}", trial.console("a", VM)?);
        return Err(error);
    }
    eprintln!("  booted and set up in {} s", begin.elapsed().as_secs());
    expect_laps(&trial, "a")?;

    let mut host = "a";
    let mut reports = Vec::new();
    for _ in 0..moves {
        let to = other_host(host);
        let request = MigrationRequest { engine: EngineKind::Godwit, ..MigrationRequest::to(to) };
        let report = trial.move_silent(VM, host, &request)?;
        ensure!(report.error.is_none() && report.switchover_ms.is_some(), "{report:#?}");
        host = to;
        expect_laps(&trial, host)?;
        eprintln!(
            "  to {to}: {:.0} ms, switchover {:.1} ms",
            report.migration_time_ms,
            report.switchover_ms.unwrap_or_default()
        );
        reports.push(report);
    }
    print_summary(reports);
    trial.delete(host, VM)?;
    trial.finish()
}

/// Returns the VM, with images in a folder that all hosts of the lab have.
fn spec(folder: &Path) -> Result<VmSpec> {
    let base = godwit_lab::image::default_dir().join("installed/debian-12.qcow2");
    ensure!(base.is_file(), "no {}: run `make image`", base.display());
    let system = folder.join("system.qcow2");
    std::fs::copy(&base, &system)?;
    let mut disks = vec![Disk { boot_order: Some(1), ..Disk::new(system, DiskFormat::Qcow2) }];
    for (index, bus) in FURTHER.into_iter().enumerate() {
        let path = folder.join(format!("data{index}.raw"));
        std::fs::File::create(&path)?.set_len(32 << 20)?;
        let iothread = bus == DiskBus::Virtio;
        disks.push(Disk { bus, iothread, ..Disk::new(path, DiskFormat::Raw) });
    }
    let nic = |model| Nic { network: "lan".to_owned(), model, ..Nic::default() };
    Ok(VmSpec {
        memory: vec![MemoryBlock::shared(ByteSize::from_mib(768))],
        vcpus: 2,
        firmware: Firmware::Uefi,
        tpm: true,
        video: Video::Virtio,
        disks,
        cdroms: vec![Cdrom { image: Some(cd(folder)?), ..Cdrom::default() }],
        nics: vec![nic(NicModel::Virtio), nic(NicModel::E1000e), nic(NicModel::Virtio)],
        guest_agent: true,
        rng: true,
        watchdog: Some(Watchdog::Reset),
        serial_ports: 2,
        cloud_init: Some(settings()?),
        ..VmSpec::new(VM)
    })
}

/// Makes the image of a CD, which only has to be there.
fn cd(folder: &Path) -> Result<PathBuf> {
    let path = folder.join("cd.iso");
    std::fs::write(&path, vec![0; 1 << 20])?;
    Ok(path)
}

fn settings() -> Result<CloudInit> {
    let data = json!({
        "write_files": [{ "path": "/usr/local/sbin/checks", "permissions": "0755",
            "content": CHECKS }],
        "runcmd": [
            ["sh", "-c", "echo \"USER $(id -un deploy) KEYS $(wc -l < \
                ~deploy/.ssh/authorized_keys) $([ -d /sys/firmware/efi ] && echo BY-UEFI)\" \
                > /dev/ttyS0"],
            ["systemd-run", "--unit=checks", "/usr/local/sbin/checks"],
        ],
    });
    Ok(serde_json::from_value(json!({
        "user": "deploy", "ssh_keys": ["ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ me"],
        "hostname": VM, "network": [{ "addresses": [format!("{ADDRESS}/24")] }],
        "user_data": format!("#cloud-config\n{data}\n"),
    }))?)
}

/// Waits until the guest has its user and its address by cloud-init and says that it booted by
/// UEFI.
fn expect_settings(trial: &Trial) -> Result<()> {
    until("cloud-init has made the user", BOOT_LIMIT, || {
        Ok(trial.console("a", VM)?.contains("USER deploy KEYS 1 BY-UEFI").then_some(()))
    })?;
    until("the guest's agent shows the address", LAP_LIMIT, || {
        let info: GuestInfo = trial.ask(trial.agent("a").guest(VM))?;
        let text = serde_json::to_string(&info)?;
        Ok((text.contains(ADDRESS) && text.contains("Debian")).then_some(()))
    })
}

/// Waits for further laps of the checks in the guest, which must all be right.
fn expect_laps(trial: &Trial, host: &str) -> Result<()> {
    let log = trial.paths().host(host).join("run/vms").join(VM).join("console2.log");
    let laps = || -> Result<usize> {
        // The firmware writes there too.
        let text = String::from_utf8_lossy(&std::fs::read(&log)?).into_owned();
        // The last line may still be written.
        let whole = text.split_inclusive('\n').filter(|line| line.ends_with('\n'));
        let whole: Vec<&str> = whole.filter(|line| line.starts_with("LAP ")).collect();
        if let Some(wrong) = whole.iter().find(|line| !line.trim_end().ends_with("right")) {
            anyhow::bail!("on host {host}: {wrong}");
        }
        Ok(whole.len())
    };
    let before = laps()?;
    until("the guest checks its memory, disks and TPM", LAP_LIMIT, || {
        Ok((laps()? >= before + LAPS).then_some(()))
    })
}

fn print_summary(mut reports: Vec<Report>) {
    let of = |report: &Report| report.switchover_ms.unwrap_or_default();
    reports.sort_by(|a, b| of(a).total_cmp(&of(b)));
    let (Some(least), Some(most)) = (reports.first(), reports.last()) else { return };
    eprintln!(
        "  {} moves, each verified: switchover median {:.1} ms ({:.1} to {:.1})",
        reports.len(),
        of(&reports[reports.len() / 2]),
        of(least),
        of(most)
    );
}
