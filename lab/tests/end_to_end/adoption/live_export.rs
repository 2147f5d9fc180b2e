//! The way back to a real libvirtd: an adopted guest goes to its old domain while it runs, and
//! comes again. Before the hand-over it is undone, after a crash of the agent too; after it, the
//! next agent completes it. `make adoption` runs it.

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use godwit_api::{ExportFormat, ExportVm, JobState, JobStatus, StopVm, VmState};
use godwit_lab::trial::{Guest, GuestPlan, LIMIT, Trial, until};
use godwit_lab::{LAN_NETWORK, image};
use godwit_qemu::{ByteSize, MemoryBlock, Nic, VmSpec};
use rustix::process::Signal;

use super::libvirt::{self, Libvirt, PLAIN, Shape};
use crate::drives::expect_blocks;

const NAME: &str = "shop";
const SHAPE: Shape = Shape { disks: &[("virtio", "qcow2"), ("scsi", "raw")], ..PLAIN };

#[test]
fn a_guest_goes_back_to_libvirt_and_comes_again() -> Result<()> {
    let Some((trial, libvirt)) = libvirt::begin("live-export")? else { return Ok(()) };
    let plan = GuestPlan {
        number: 51,
        memory: vec![ByteSize::from_mib(224)],
        workload: crate::BUSY.to_owned(),
        image: Some(image::build_with_drives(&image::default_dir())?),
        words: "godwit.drives=on".to_owned(),
        ..GuestPlan::new(NAME)
    };
    let guest = libvirt.boot(&trial, &plan, &SHAPE)?;
    adopt(&trial, NAME)?;
    refused(&trial)?;
    copy_ended(&trial, &libvirt, &guest)?;
    agent_ended(&trial, &libvirt, &guest)?;

    let since = guest.watch()?;
    let command = ["vm", "export", NAME, "--live", "--host", "a"];
    let left = trial.godwit(&command)?;
    ensure!(left.code == Some(0), "{}{}", left.stdout, left.stderr);
    let gaps = guest.gaps(since, guest.wait_answer()?)?;
    guest.unwatch()?;
    let longest_ms = gaps.longest_gap_ns.unwrap_or_default() as f64 / 1e6;
    eprint!("  left for libvirt; longest gap of a client {longest_ms:.1} ms\n{}", left.stdout);
    at_libvirt(&trial, &libvirt, &guest)?;
    let again = trial.godwit(&command)?;
    ensure!(again.code != Some(0), "a stopped VM left: {}", again.stdout);

    // It comes again, and leaves with an agent that ends after the hand-over.
    let agent = trial.agent("a");
    let images = trial.ask(agent.images_of_vm(NAME))?;
    ensure!(images.deleted.is_empty(), "libvirt's guest loses {:?}", images.deleted);
    trial.ask(agent.delete_vm(NAME))?;
    let image = libvirt.image(NAME, 0);
    let refused = trial.ask(agent.delete_disk(&image)).err().context("its disk was deleted")?;
    eprintln!("  refused: {refused}");
    ensure!(image.exists(), "its disk is gone");
    adopt(&trial, NAME)?;
    trial.expect_whole(&guest)?;
    let held = trial.hold("a", "host.live-export-committed")?;
    leave(&trial)?;
    held.reached(LIMIT)?;
    trial.end_agent("a", Signal::KILL)?;
    held.open();
    trial.start_missing()?;
    until("libvirt runs it", LIMIT, || {
        Ok(libvirt.virsh(&["domstate", NAME])?.contains("running").then_some(()))
    })?;
    at_libvirt(&trial, &libvirt, &guest)?;
    libvirt.virsh(&["destroy", NAME])?;
    for disk in 0..SHAPE.disks.len() {
        expect_blocks(&libvirt.image(NAME, disk))?;
    }
    with_firmware(&trial, &libvirt)?;
    drop(libvirt);
    trial.finish()
}

/// A guest with UEFI and a screen, whose variables are in libvirt's own file, goes back.
fn with_firmware(trial: &Trial, libvirt: &Libvirt) -> Result<()> {
    let name = "vault";
    let plan =
        GuestPlan { number: 52, memory: vec![ByteSize::from_mib(320)], ..GuestPlan::new(name) };
    let shape = Shape { uefi: true, video: Some("virtio"), ..PLAIN };
    let guest = libvirt.boot(trial, &plan, &shape)?;
    adopt(trial, name)?;
    let left = trial.godwit(&["vm", "export", name, "--live", "--host", "a"])?;
    ensure!(left.code == Some(0), "{}{}", left.stdout, left.stderr);
    eprint!("  {}", left.stdout);
    ensure!(libvirt.virsh(&["domstate", name])?.contains("running"), "libvirt does not run it");
    guest.verify()?;
    // It starts from its variables, which its second QEMU wrote.
    libvirt.virsh(&["destroy", name])?;
    libvirt.virsh(&["start", name])?;
    guest.wait_ready(plan.boot_limit)?;
    libvirt.virsh(&["destroy", name]).map(drop)
}

fn adopt(trial: &Trial, name: &str) -> Result<()> {
    let adopted = trial.godwit(&["vm", "adopt", "--libvirt", name, "--host", "a"])?;
    ensure!(adopted.code == Some(0), "{}{}", adopted.stdout, adopted.stderr);
    eprint!("  {}", adopted.stdout);
    Ok(())
}

fn leave(trial: &Trial) -> Result<JobStatus> {
    let live = ExportVm { to: PathBuf::new(), format: ExportFormat::Libvirt, live: true };
    Ok(trial.ask(trial.agent("a").export_vm(NAME, &live))?)
}

/// Refuses a VM whose devices are Godwit's, which runs on.
fn refused(trial: &Trial) -> Result<()> {
    let memory = vec![MemoryBlock::shared(ByteSize::from_mib(64))];
    let nic = Nic { network: LAN_NETWORK.to_owned(), boot_order: Some(1), ..Nic::default() };
    trial.create("a", VmSpec { memory, nics: vec![nic], ..VmSpec::new("own") })?;
    let refused = trial.godwit(&["vm", "export", "own", "--live", "--host", "a"])?;
    let says_why = refused.stderr.contains("only a guest that was adopted");
    ensure!(refused.code == Some(5) && says_why, "{}", refused.stderr);
    ensure!(trial.vm("a", "own")?.state == VmState::Running, "it does not run");
    trial.ask(trial.agent("a").stop_vm("own", StopVm { force: true, grace_ms: None }))?;
    Ok(trial.ask(trial.agent("a").delete_vm("own"))?)
}

/// libvirt's copy ends before the hand-over: the guest runs on here.
fn copy_ended(trial: &Trial, libvirt: &Libvirt, guest: &Guest) -> Result<()> {
    let held = trial.hold("a", "host.live-export-loaded")?;
    let begun = leave(trial)?;
    held.reached(LIMIT)?;
    ensure!(libvirt.virsh(&["domstate", NAME])?.contains("paused"), "it is not paused there");
    libvirt.virsh(&["destroy", NAME])?;
    held.open();
    let job = until("the export ends", LIMIT, || {
        let job = trial.ask(trial.agent("a").job(&begun.id))?;
        Ok((job.state != JobState::Running).then_some(job))
    })?;
    ensure!(job.state == JobState::Failed && job.error.is_some(), "{job:?}");
    eprintln!("  undone: {}", job.error.context("it has no error")?.message);
    runs_here(trial, libvirt, guest)
}

/// The agent ends before the hand-over: the next one ends libvirt's copy, and the guest runs on.
fn agent_ended(trial: &Trial, libvirt: &Libvirt, guest: &Guest) -> Result<()> {
    let held = trial.hold("a", "host.live-export-loaded")?;
    leave(trial)?;
    held.reached(LIMIT)?;
    trial.end_agent("a", Signal::KILL)?;
    held.open();
    trial.start_missing()?;
    runs_here(trial, libvirt, guest)
}

fn runs_here(trial: &Trial, libvirt: &Libvirt, guest: &Guest) -> Result<()> {
    until("the VM runs here, and libvirt's copy is off", LIMIT, || {
        let runs = trial.vm("a", NAME)?.state == VmState::Running;
        let is_off = libvirt.virsh(&["domstate", NAME])?.contains("shut off");
        Ok((runs && is_off).then_some(()))
    })?;
    ensure!(trial.hypervisors("a")?.len() == 1, "{:?}", trial.hypervisors("a")?);
    trial.expect_whole(guest).map(drop)
}

/// Checks that libvirt runs the guest, whole, and that Godwit does not.
fn at_libvirt(trial: &Trial, libvirt: &Libvirt, guest: &Guest) -> Result<()> {
    ensure!(libvirt.virsh(&["domstate", NAME])?.contains("running"), "libvirt does not run it");
    let state = trial.vm("a", NAME)?.state;
    ensure!(state == VmState::Stopped, "the VM is {state}");
    ensure!(trial.hypervisors("a")?.len() == 1, "{:?}", trial.hypervisors("a")?);
    // Only this run of the domain waited for a guest.
    let defined = libvirt.virsh(&["dumpxml", "--inactive", NAME])?;
    ensure!(!defined.contains("-incoming"), "{defined}");
    guest.verify().map(drop)
}
