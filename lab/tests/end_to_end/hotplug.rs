//! A running guest gets a NIC, a disk, a vCPU and memory, and uses them. It moves there and back
//! with them, and loses the NIC and the disk that it got.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;

use anyhow::{Context, Result, ensure};
use godwit_api::{ChangeDrive, ChangeVm, ClientError, DriveChange, ErrorCode, NicChange, VmInfo};
use godwit_lab::trial::{GuestPlan, LIMIT, Trial, until};
use godwit_qemu::{ByteSize, Disk, DiskFormat, Nic, SpecPatch, VmSpec};
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::move_and_check;

const MIB: u64 = 1 << 20;
/// Memory module that Linux takes.
const MODULE_BYTES: u64 = 128 * MIB;

#[test]
fn what_a_running_guest_got_moves_with_it() -> Result<()> {
    let Some(trial) = Trial::begin("hotplug")? else { return Ok(()) };
    let folder = tempfile::tempdir_in("/var/tmp")?;
    // Linux keeps some of its memory to manage what may come.
    let fill = ByteSize::from_mib(40);
    let words = "godwit.plug=on".to_owned();
    let plan = GuestPlan { words, fill, ..GuestPlan::new("web") };
    let spec = VmSpec {
        hotplug_slots: 3,
        max_cpus: Some(3),
        max_memory: Some(ByteSize::from_mib(1024)),
        ..plan.spec(trial.image())
    };
    let first_bytes = spec.memory[0].size.bytes();
    let mut guest = trial.guest_of("a", &plan, spec)?;
    says(&trial, "a", "cpus=1 nics=1 memory=none")?;
    refuse_bad_input(&trial, first_bytes)?;

    let more = json!({ "vcpus": 2, "memory": first_bytes + MODULE_BYTES, "refuses_page_in": true });
    let grown = change(&trial, "a", more)?;
    ensure!((grown.vcpus, grown.memory_bytes) == (2, first_bytes + MODULE_BYTES), "{grown:?}");
    let plugged = nic(&trial, "a", NicChange::Attach { nic: lan() })?;
    let mac = plugged.spec.nics[1].mac.clone().context("no hardware address")?;
    let path = folder.path().join("hot.raw");
    File::create(&path)?.set_len(MIB)?;
    let disk = Box::new(Disk::new(&path, DiskFormat::Raw));
    let with_disk = drive(&trial, "a", DriveChange::Attach { disk })?;
    ensure!(with_disk.spec.disks[0].slot == Some(1), "{:?}", with_disk.spec);
    says(&trial, "a", "cpus=2 nics=2 memory=used")?;

    let late = folder.path().join("late.raw");
    File::create(&late)?.set_len(MIB)?;
    let disk = Box::new(Disk::new(&late, DiskFormat::Raw));
    drive(&trial, "a", DriveChange::Attach { disk })?;
    trial.end_agent("a", Signal::KILL)?;
    release_without_agent(&trial, "virtio-plugged2")?;
    trial.start_missing()?;
    let before = trial.vm("a", "web")?.spec;
    ensure!(before == with_disk.spec, "{before:?}");
    move_and_check(&trial, &mut guest)?;
    ensure!(trial.vm("b", "web")?.spec == before, "another definition");

    change(&trial, "b", json!({ "vcpus": 3, "memory": first_bytes + 2 * MODULE_BYTES }))?;
    nic(&trial, "b", NicChange::Detach { mac })?;
    drive(&trial, "b", DriveChange::Detach { path })?;
    says(&trial, "b", "cpus=3 nics=1 memory=used")?;
    move_and_check(&trial, &mut guest)?;
    let problems = guest.status()?.problems;
    ensure!(problems.is_empty(), "{problems:?}");
    trial.finish()
}

/// Removes a device while no agent runs, as a guest does that releases it late.
fn release_without_agent(trial: &Trial, device: &str) -> Result<()> {
    let socket = trial.paths().host("a").join("run/vms/web/qmp.sock");
    let mut qemu = UnixStream::connect(socket)?;
    qemu.set_read_timeout(Some(LIMIT))?;
    for command in [
        json!({ "execute": "qmp_capabilities" }),
        json!({ "execute": "device_del", "arguments": { "id": device } }),
    ] {
        writeln!(qemu, "{command}")?;
    }
    for line in BufReader::new(qemu).lines() {
        let event: Value = serde_json::from_str(&line?)?;
        if event["event"] == "DEVICE_DELETED" && event["data"]["device"] == device {
            return Ok(());
        }
    }
    anyhow::bail!("QEMU ended")
}

/// Makes changes that the agent must refuse, and checks that nothing of them stays.
fn refuse_bad_input(trial: &Trial, first_bytes: u64) -> Result<()> {
    let before = trial.vm("a", "web")?;
    let (wrong, invalid) = (ErrorCode::WrongState, ErrorCode::InvalidRequest);
    for (spec, code, words) in [
        (json!({ "vcpus": 4 }), invalid, "max_cpus, 3"),
        (json!({ "memory": "2GiB" }), invalid, "max_memory"),
        (json!({ "memory": first_bytes + MIB }), wrong, "128 MiB"),
        (json!({ "memory": "128MiB" }), wrong, "keeps its memory"),
        (json!({ "vcpus": 2, "max_cpus": 8, "rng": true }), wrong, "max_cpus, rng"),
    ] {
        let error = change(trial, "a", spec).err().context("accepted")?;
        ensure!(error.code() == Some(code) && error.to_string().contains(words), "{error}");
        eprintln!("  error: {error}");
    }
    let start = before.spec.nics[0].mac.clone();
    let attach = |nic| NicChange::Attach { nic };
    let elsewhere = Nic { network: "nowhere".to_owned(), ..lan() };
    for (request, code, words) in [
        (attach(Nic { mac: start.clone(), ..lan() }), invalid, "two network interfaces"),
        (attach(Nic { slot: Some(3), ..lan() }), invalid, "slot 3"),
        (attach(elsewhere), ErrorCode::NotFound, "no network"),
        (NicChange::Detach { mac: start.unwrap_or_default() }, wrong, "from its start"),
        (
            NicChange::Detach { mac: "52:54:00:00:00:99".to_owned() },
            ErrorCode::NotFound,
            "no NIC with",
        ),
    ] {
        let error = nic(trial, "a", request).err().context("accepted")?;
        ensure!(error.code() == Some(code) && error.to_string().contains(words), "{error}");
        eprintln!("  error: {error}");
    }
    let now = trial.vm("a", "web")?;
    ensure!(now == before, "{now:?}");
    Ok(())
}

fn lan() -> Nic {
    Nic { network: "lan".to_owned(), ..Nic::default() }
}

fn change(trial: &Trial, host: &str, spec: Value) -> Result<VmInfo, ClientError> {
    let spec: SpecPatch = serde_json::from_value(spec).unwrap();
    let change = ChangeVm { spec, ..ChangeVm::default() };
    trial.ask(trial.agent(host).change_vm("web", &change))
}

fn nic(trial: &Trial, host: &str, change: NicChange) -> Result<VmInfo, ClientError> {
    trial.ask(trial.agent(host).change_nic("web", &change))
}

fn drive(trial: &Trial, host: &str, change: DriveChange) -> Result<VmInfo, ClientError> {
    let request = ChangeDrive { change, vm_dirs_only: false };
    trial.ask(trial.agent(host).change_drive("web", &request))
}

/// Waits until the guest says what it has.
fn says(trial: &Trial, host: &str, words: &str) -> Result<()> {
    let wanted = format!("PLUG {words}");
    until(&format!("the guest says {wanted:?}"), LIMIT, || {
        Ok(trial.console(host, "web")?.contains(&wanted).then_some(()))
    })
}
