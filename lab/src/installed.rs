//! The VM of an installed Debian with everything that people give a VM: it boots by UEFI with a
//! TPM, is set up by cloud-init, gets a disk and a NIC while it runs, and checks its memory, its
//! disks and its TPM all the time. A test moves it, and a benchmark measures its devices.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Result, bail, ensure};
use godwit_api::{ChangeDrive, DriveChange, GuestInfo, MigrationRequest, NicChange};
use godwit_qemu::{
    ByteSize, Cdrom, CloudInit, Disk, DiskBus, DiskFormat, Firmware, MemoryBlock, Nic, NicModel,
    Video, VmSpec, Watchdog,
};
use godwit_types::{EngineKind, Report, SwitchoverReport};
use serde_json::json;

use crate::image;
use crate::trial::{Trial, other_host, until};

/// Name of the VM.
pub const VM: &str = "debian";
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
/// Size of each of these, and of the disk that the guest gets while it runs.
const FURTHER_BYTES: u64 = 32 << 20;

/// Checks that run in the guest from its first boot on: a file in memory keeps its digest, each
/// disk gives back what was written, and a register of the TPM stays as the firmware left it. Each
/// lap ends with a line on the second serial port. Disks and NICs may come; none may go.
const CHECKS: &str = r#"#!/bin/sh
head -c 96M /dev/urandom > /dev/shm/content
sum() { sha256sum < "$1" | cut -c 1-64; }
content=$(sum /dev/shm/content)
pcr() { cat /sys/class/tpm/tpm0/pcr-sha256/0; }
first=$(pcr)
lap=0 most=3
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
  [ "$disks" -ge "$most" ] || why="$why disks=$disks"
  most=$disks nics=$(ls /sys/class/net | grep -c eth)
  echo "LAP $lap disks=$disks nics=$nics ${why:-right}" > /dev/ttyS1
  sleep 0.2
done
"#;

/// Creates the VM on host `a` with that video device, with images in `folder`, and waits until it
/// is set up. Then gives it a disk and a NIC while it runs.
///
/// # Errors
/// The image is missing, or the guest does not boot. Its console is printed.
pub fn boot(trial: &Trial, folder: &Path, video: Video) -> Result<()> {
    trial.create("a", VmSpec { video, ..spec(folder)? })?;
    let begin = std::time::Instant::now();
    if let Err(error) = expect_settings(trial) {
        eprintln!("{}", trial.console("a", VM)?);
        return Err(error);
    }
    eprintln!("  booted and set up in {} s", begin.elapsed().as_secs());
    expect_laps(trial, "a")?;
    plug(trial, folder)
}

/// Returns the VM, with images in a folder that all hosts of the lab have.
fn spec(folder: &Path) -> Result<VmSpec> {
    let base = image::default_dir().join("installed/debian-12.qcow2");
    ensure!(base.is_file(), "no {}: run `make image`", base.display());
    let system = folder.join("system.qcow2");
    std::fs::copy(&base, &system)?;
    let mut disks = vec![Disk { boot_order: Some(1), ..Disk::new(system, DiskFormat::Qcow2) }];
    for (index, bus) in FURTHER.into_iter().enumerate() {
        let path = folder.join(format!("data{index}.raw"));
        std::fs::File::create(&path)?.set_len(FURTHER_BYTES)?;
        let iothread = bus == DiskBus::Virtio;
        disks.push(Disk { bus, iothread, ..Disk::new(path, DiskFormat::Raw) });
    }
    Ok(VmSpec {
        memory: vec![MemoryBlock::shared(ByteSize::from_mib(768))],
        vcpus: 2,
        firmware: Firmware::Uefi,
        tpm: true,
        disks,
        cdroms: vec![Cdrom { image: Some(cd(folder)?), ..Cdrom::default() }],
        nics: vec![nic(NicModel::Virtio), nic(NicModel::E1000e), nic(NicModel::Virtio)],
        guest_agent: true,
        rng: true,
        watchdog: Some(Watchdog::Reset),
        serial_ports: 2,
        hotplug_slots: 2,
        cloud_init: Some(settings()?),
        ..VmSpec::new(VM)
    })
}

fn nic(model: NicModel) -> Nic {
    Nic { network: "lan".to_owned(), model, ..Nic::default() }
}

/// Gives the running guest a disk and a NIC, and waits until it uses them.
fn plug(trial: &Trial, folder: &Path) -> Result<()> {
    let path = folder.join("hot.raw");
    std::fs::File::create(&path)?.set_len(FURTHER_BYTES)?;
    let agent = trial.agent("a");
    let disk = Box::new(Disk::new(path, DiskFormat::Raw));
    let change = DriveChange::Attach { disk };
    trial.ask(agent.change_drive(VM, &ChangeDrive { change, vm_dirs_only: false }))?;
    trial.ask(agent.change_nic(VM, &NicChange::Attach { nic: nic(NicModel::Virtio) }))?;
    let log = trial.paths().host("a").join("run/vms").join(VM).join("console2.log");
    until("the guest uses the disk and the NIC that it got", LAP_LIMIT, || {
        let text = String::from_utf8_lossy(&std::fs::read(&log)?).into_owned();
        Ok(text.contains(" disks=4 nics=4 right").then_some(()))
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
///
/// # Errors
/// One was wrong, or none came.
pub fn expect_laps(trial: &Trial, host: &str) -> Result<()> {
    let log = trial.paths().host(host).join("run/vms").join(VM).join("console2.log");
    let laps = || -> Result<usize> {
        // The firmware writes there too.
        let text = String::from_utf8_lossy(&std::fs::read(&log)?).into_owned();
        // The last line may still be written.
        let whole = text.split_inclusive('\n').filter(|line| line.ends_with('\n'));
        let whole: Vec<&str> = whole.filter(|line| line.starts_with("LAP ")).collect();
        if let Some(wrong) = whole.iter().find(|line| !line.trim_end().ends_with("right")) {
            bail!("on host {host}: {wrong}");
        }
        Ok(whole.len())
    };
    let before = laps()?;
    until("the guest checks its memory, disks and TPM", LAP_LIMIT, || {
        Ok((laps()? >= before + LAPS).then_some(()))
    })
}

/// Moves the VM to the other host and waits until its checks succeed there. Returns the report.
///
/// # Errors
/// The move did not complete, or something is wrong in the guest.
pub fn move_on(trial: &Trial, host: &str) -> Result<Report> {
    let request =
        MigrationRequest { engine: EngineKind::Godwit, ..MigrationRequest::to(other_host(host)) };
    let report = trial.move_silent(VM, host, &request)?;
    ensure!(report.error.is_none() && report.switchover_ms.is_some(), "{report:#?}");
    expect_laps(trial, &report.to)?;
    eprintln!(
        "  to {}: {:.0} ms, switchover {:.1} ms",
        report.to,
        report.migration_time_ms,
        report.switchover_ms.unwrap_or_default()
    );
    Ok(report)
}

/// Describes the pauses of moves and their parts: median, least and most.
#[must_use]
pub fn describe_pauses(reports: &[Report]) -> String {
    if reports.is_empty() {
        return String::new();
    }
    let spread = |of: &dyn Fn(&Report) -> f64| {
        let mut values: Vec<f64> = reports.iter().map(of).collect();
        values.sort_by(f64::total_cmp);
        let (least, most) = (values[0], values[values.len() - 1]);
        format!("{:.1} ms ({least:.1} to {most:.1})", values[values.len() / 2])
    };
    let part = |of: fn(&SwitchoverReport) -> f64| {
        spread(&|report| report.switchover.as_ref().map_or(0.0, of))
    };
    let pause = spread(&|report| report.switchover_ms.unwrap_or_default());
    let mut text = format!("  {} moves, each verified: switchover median {pause}\n", reports.len());
    for (name, times) in [
        ("last pages", part(|parts| parts.last_pages_ms)),
        ("device state", part(|parts| parts.device_state_ms)),
        ("flight", part(|parts| parts.flight_ms)),
        ("load", part(|parts| parts.load_ms)),
        ("resume", part(|parts| parts.resume_ms)),
        ("migration", spread(&|report| report.migration_time_ms)),
    ] {
        text.push_str(&format!("    {name:<13} {times}\n"));
    }
    text
}
