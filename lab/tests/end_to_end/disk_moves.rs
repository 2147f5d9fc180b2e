//! Disks that move between directories and formats of their host, while the guest writes and reads
//! all of them: raw, a layer, and one with limits. Moves into a full datastore, cancelled ones, and
//! ones that are cut off with the agent at each point.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use godwit_api::{ErrorCode, JobState, JobStatus, MoveDisk, StopVm};
use godwit_lab::image;
use godwit_lab::trial::{GuestPlan, LIMIT, Trial, until};
use godwit_lab::{Hooks, LabOptions};
use godwit_qemu::{Disk, DiskBus, DiskFormat};
use rustix::process::Signal;

use crate::disk::holds_lock;
use crate::drives::{expect_blocks, image_at};
use crate::move_and_check;
use crate::suspend::SmallFolder;

const VM: &str = "diskmoves";
/// What images hold behind the blocks that the guest writes, and where.
static FILLING: [u8; 6 << 20] = [0x5a; 6 << 20];
const FILLED_AT: u64 = 16 << 20;

#[test]
fn a_disk_moves_while_the_guest_writes_it() -> Result<()> {
    let hooks = Hooks { holds: true, ..Hooks::default() };
    let options = LabOptions { hooks, manager: true, ..LabOptions::default() };
    let Some(trial) = Trial::begin_with("diskmoves", options)? else { return Ok(()) };
    if !Path::new("/usr/bin/qemu-img").exists() {
        eprintln!("skipped: diskmoves: no qemu-img (apt-get install qemu-utils)");
        return trial.finish();
    }
    let folder = tempfile::tempdir_in("/var/tmp")?;
    let (hdd, ssd) = (folder.path().join("hdd"), folder.path().join("ssd"));
    [&hdd, &ssd].into_iter().try_for_each(fs::create_dir)?;
    let small = SmallFolder::mount()?;
    let dirs = [&*hdd, &ssd, small.0.path()].map(|dir| dir.display().to_string());
    let dirs: toml::Value = dirs.to_vec().into();
    trial.reconfigure("a", |config| drop(config.insert("vm_dirs".to_owned(), dirs)))?;

    let plain = Disk { iothread: true, ..image_at(&hdd.join("plain.raw"), DiskFormat::Raw)? };
    File::options().write(true).open(&plain.path)?.write_all_at(&FILLING, FILLED_AT)?;
    let layer = layer_at(&hdd)?;
    let limited = Disk {
        bus: DiskBus::Scsi,
        detect_zeroes: true,
        iops: Some(2000),
        ..image_at(&hdd.join("limited.qcow2"), DiskFormat::Qcow2)?
    };
    let plan = GuestPlan {
        disks: vec![plain.clone(), layer.clone(), limited.clone()],
        image: Some(image::build_with_drives(&image::default_dir())?),
        words: "godwit.drives=on".to_owned(),
        ..GuestPlan::new(VM)
    };
    let mut guest = trial.guest("a", &plan)?;
    for disk in ["vda", "vdb", "sda"] {
        let wanted = format!("DRIVES {disk} of 65536 sectors is written");
        until(&wanted, LIMIT, || Ok(trial.console("a", VM)?.contains(&wanted).then_some(())))?;
    }
    let pid = trial.vm("a", VM)?.pid.context("no process")?;

    refuse_bad_input(&trial, &plain.path, &hdd)?;
    fill_up(&trial, &plain.path, &small)?;
    by_command(&trial, &plain.path, &ssd)?;
    ensure!(plain.path.exists() && !is_open(pid, &plain.path)?, "the old image is open, or gone");
    let qcow2 = ssd.join("plain.qcow2");
    ensure!(holds_lock(pid, &qcow2)?, "the new image is not locked");
    let used = trial.ask(trial.agent("a").disk(&qcow2))?.used_bytes;
    ensure!(used < 12 << 20, "the new image takes {used} bytes");

    let to_raw = MoveDisk {
        format: Some(DiskFormat::Raw),
        delete_source: true,
        ..MoveDisk::new(&limited.path, &ssd)
    };
    expect_done(&trial, &to_raw, &ssd.join("limited.raw"))?;
    ensure!(!limited.path.exists(), "the old image stays");
    expect_done(&trial, &MoveDisk::new(&layer.path, &ssd), &ssd.join("layer.qcow2"))?;
    let moved = trial.ask(trial.agent("a").disk(&ssd.join("layer.qcow2")))?;
    ensure!(moved.backing.is_some() && moved.used_bytes < 4 << 20, "{moved:?}");
    let flat = MoveDisk { flatten: true, ..MoveDisk::new(ssd.join("layer.qcow2"), &ssd) };
    expect_done(&trial, &flat, &ssd.join("layer-1.qcow2"))?;

    cut_off(&trial, &qcow2, [&hdd, &ssd])?;
    ensure!(trial.vm("a", VM)?.pid == Some(pid), "another process");
    let back = MoveDisk { format: Some(DiskFormat::Raw), ..MoveDisk::new(&qcow2, &hdd) };
    cut_at(&trial, "disk-move-held", &back, &qcow2)?;
    ensure!(!hdd.join("plain-1.raw").exists(), "the new image is left");
    cut_at(&trial, "disk-move-recorded", &back, &hdd.join("plain-1.raw"))?;
    ensure!(!is_open(pid, &qcow2)?, "the old image is open");
    ensure!(guest.status()?.problems.is_empty(), "{:?}", guest.status()?.problems);

    drain(&trial, &ssd, &hdd)?;
    ensure!(guest.status()?.problems.is_empty(), "{:?}", guest.status()?.problems);

    // The destination has its own names of block nodes.
    move_and_check(&trial, &mut guest)?;
    ensure!(guest.status()?.problems.is_empty(), "{:?}", guest.status()?.problems);
    let stop = StopVm { force: true, grace_ms: None };
    trial.ask(trial.agent("b").stop_vm(VM, stop))?;
    let stopped = MoveDisk {
        format: Some(DiskFormat::Qcow2),
        ..MoveDisk::new(hdd.join("plain-1.raw"), &ssd)
    };
    let job = moved_at(&trial, "b", &stopped)?;
    ensure!(job.state == JobState::Done && job.files == [ssd.join("plain-1.qcow2")], "{job:?}");
    trial.ask(trial.agent("b").delete_vm(VM))?;
    for name in ["plain-1.qcow2", "limited.raw", "layer-1.qcow2"] {
        expect_blocks(&ssd.join(name))?;
    }
    expect_filling(&ssd.join("plain-1.read"))?;
    expect_filling(&ssd.join("layer-1.read"))?;
    trial.finish()
}

/// Empties a datastore through the manager while the guest writes, and takes its disks back.
fn drain(trial: &Trial, ssd: &Path, hdd: &Path) -> Result<()> {
    let manager = format!("unix:{}", trial.paths().manager_socket().display());
    let (name, new) = (ssd.display().to_string(), ssd.join("new.raw").display().to_string());
    let run = |words: &[&str]| {
        let mut all = words.to_vec();
        all.extend(["--manager", &manager]);
        trial.godwit(&all)
    };
    until("the manager knows both datastores and the disks", LIMIT, || {
        let shown = run(&["datastore", "show", &name])?;
        let is_known = shown.code == Some(0) && shown.stdout.contains("layer-1.qcow2");
        // After the agent's start it measures one datastore after the other.
        let other = trial.ask(trial.agent("a").host())?.datastores.remove(hdd);
        let is_measured = other.is_some_and(|other| other.identity.is_some());
        let other = run(&["datastore", "show", &hdd.display().to_string()])?;
        let is_ready = is_measured && other.code == Some(0);
        Ok((is_known && is_ready && shown.stdout.contains("limited.raw")).then_some(()))
    })?;
    let info = trial.ask(trial.agent("a").host())?.datastores.remove(ssd).context("unknown")?;
    ensure!(info.identity.is_some() && info.kind.is_some() && info.problem.is_none(), "{info:?}");

    let plan = run(&["datastore", "drain", &name, "--dry-run"])?;
    ensure!(plan.code == Some(0) && plan.stdout.contains("nothing moves"), "{plan:?}");
    let done = run(&["datastore", "drain", &name])?;
    ensure!(done.code == Some(0), "{done:?}");
    let disks = trial.vm("a", VM)?.spec.disks;
    ensure!(disks.iter().all(|disk| disk.path.parent() == Some(hdd)), "{disks:?}");
    ensure!(!ssd.join("limited.raw").exists(), "the old image stays");
    let refused = run(&["disk", "create", &new, "--size", "1MiB", "--host", "a"])?;
    ensure!(refused.code == Some(4) && refused.stderr.contains("maintenance"), "{refused:?}");
    let back = run(&["datastore", "drain", &name, "--undo"])?;
    ensure!(back.code == Some(0), "{back:?}");
    let disks = trial.vm("a", VM)?.spec.disks;
    let returned = disks.iter().filter(|disk| disk.path.parent() == Some(ssd)).count();
    ensure!(returned == 2 && ssd.join("limited.raw").exists(), "{disks:?}");
    Ok(())
}

/// Makes a layer on a base with the filling.
fn layer_at(folder: &Path) -> Result<Disk> {
    let base = image_at(&folder.join("base.raw"), DiskFormat::Raw)?;
    File::options().write(true).open(&base.path)?.write_all_at(&FILLING, FILLED_AT)?;
    let path = folder.join("layer.qcow2");
    let create = ["create", "-q", "-f", "qcow2", "-F", "raw", "-b", "base.raw"];
    let made = Command::new("qemu-img").args(create).arg(&path).status()?;
    ensure!(made.success(), "qemu-img create failed");
    Ok(Disk::new(path, DiskFormat::Qcow2))
}

/// Makes requests that are refused, and checks that nothing of them stays.
fn refuse_bad_input(trial: &Trial, image: &Path, hdd: &Path) -> Result<()> {
    let names = listed(&[hdd])?;
    let raw_layer =
        MoveDisk { format: Some(DiskFormat::Raw), ..MoveDisk::new(hdd.join("layer.qcow2"), hdd) };
    let invalid = ErrorCode::InvalidRequest;
    for (request, code) in [
        (MoveDisk::new(image, hdd), invalid),
        (raw_layer, invalid),
        (MoveDisk::new(image, "/etc"), invalid),
        (MoveDisk::new(image, hdd.join("../..")), invalid),
        (MoveDisk::new(image, hdd.join("none")), ErrorCode::NotFound),
        (MoveDisk::new(hdd.join("other"), hdd), ErrorCode::NotFound),
    ] {
        let job = moved_at(trial, "a", &request)?;
        let error = job.error.context("accepted")?;
        ensure!(job.state == JobState::Failed && error.code == code, "{error}");
        eprintln!("  error: {error}");
    }
    ensure!(listed(&[hdd])? == names, "something is left: {:?}", listed(&[hdd])?);
    Ok(())
}

/// Moves a disk by the command, to qcow2.
fn by_command(trial: &Trial, image: &Path, to: &Path) -> Result<()> {
    let (image, to) = (image.display().to_string(), to.display().to_string());
    let done = trial
        .godwit(&["disk", "move", VM, &image, "--to", &to, "--format", "qcow2", "--host", "a"])?;
    ensure!(done.code == Some(0), "{}", done.stderr);
    ensure!(done.stdout.contains("plain.qcow2") && done.stdout.contains("kept"), "{}", done.stdout);
    Ok(())
}

/// Cancels a slow move, and ends the agent during another one.
fn cut_off(trial: &Trial, image: &Path, folders: [&Path; 2]) -> Result<()> {
    let before = (trial.vm("a", VM)?.spec, listed(&folders)?);
    let slow = MoveDisk {
        format: Some(DiskFormat::Raw),
        bandwidth_limit: "4mbit".parse().ok(),
        ..MoveDisk::new(image, folders[0])
    };
    for is_cancelled in [true, false] {
        let agent = trial.agent("a");
        let job = trial.ask(agent.move_disk(VM, &slow))?;
        until("the copy has begun", LIMIT, || {
            let job = trial.ask(agent.job(&job.id))?;
            ensure!(job.state == JobState::Running, "{job:?}");
            Ok((job.done_bytes > 0).then_some(()))
        })?;
        let busy = trial.ask(agent.stop_vm(VM, StopVm { force: true, grace_ms: None }));
        ensure!(busy.is_err(), "stopped while a disk moves");
        if is_cancelled {
            trial.ask(agent.cancel_job(&job.id))?;
            let job = trial.ask(agent.job(&job.id))?;
            ensure!(job.state == JobState::Cancelled, "{job:?}");
        } else {
            trial.end_agent("a", Signal::KILL)?;
            trial.start_missing()?;
        }
        let now = (trial.vm("a", VM)?.spec, listed(&folders)?);
        ensure!(now == before, "{now:?}");
    }
    Ok(())
}

/// Moves a disk into a datastore that has no room, and into one that becomes full.
fn fill_up(trial: &Trial, image: &Path, small: &SmallFolder) -> Result<()> {
    let (to, before) = (small.0.path(), trial.vm("a", VM)?.spec);
    let slow = MoveDisk { bandwidth_limit: "4mbit".parse().ok(), ..MoveDisk::new(image, to) };
    let refused = moved_at(trial, "a", &slow)?.error.context("moved without room")?;
    ensure!(refused.message.contains("may need"), "{refused}");
    small.resize("12m")?;
    let job = trial.ask(trial.agent("a").move_disk(VM, &slow))?;
    let job = || trial.ask(trial.agent("a").job(&job.id));
    until("the copy has begun", LIMIT, || Ok((job()?.done_bytes > 0).then_some(())))?;
    // It takes all that is left, and fails.
    ensure!(fs::write(to.join("filler"), vec![1; 16 << 20]).is_err(), "the folder is not full");
    let failed = until("the move ends", LIMIT, || {
        Ok(Some(job()?).filter(|job| job.state != JobState::Running))
    })?;
    ensure!(failed.state == JobState::Failed, "{failed:?}");
    eprintln!("  error: {}", failed.error.context("no error")?);
    ensure!(listed(&[to])? == [to.join("filler")], "{:?}", listed(&[to])?);
    ensure!(trial.vm("a", VM)?.spec == before, "the VM was changed");
    Ok(())
}

/// Kills the agent when a move reaches a point, starts another, and checks which image the VM has.
fn cut_at(trial: &Trial, point: &str, request: &MoveDisk, image: &Path) -> Result<()> {
    let held = trial.hold("a", &format!("host.{point}"))?;
    trial.ask(trial.agent("a").move_disk(VM, request))?;
    held.reached(LIMIT)?;
    trial.end_agent("a", Signal::KILL)?;
    held.open();
    trial.start_missing()?;
    let vm = trial.vm("a", VM)?;
    ensure!(vm.spec.disks[0].path == image, "{:?}", vm.spec);
    ensure!(holds_lock(vm.pid.context("no process")?, image)?, "QEMU has another image");
    Ok(())
}

/// Moves a disk, and checks that the VM has the new image.
fn expect_done(trial: &Trial, request: &MoveDisk, image: &Path) -> Result<()> {
    let job = moved_at(trial, "a", request)?;
    ensure!(job.state == JobState::Done, "{job:?}");
    ensure!(job.files == [image] && job.findings.is_empty(), "{job:?}");
    let spec = trial.vm("a", VM)?.spec;
    ensure!(spec.disks.iter().any(|disk| disk.path == *image), "{spec:?}");
    Ok(())
}

/// Waits for the end of a move.
fn moved_at(trial: &Trial, host: &str, request: &MoveDisk) -> Result<JobStatus> {
    let agent = trial.agent(host);
    let job = trial.ask(agent.move_disk(VM, request))?;
    until("the move ends", LIMIT, || {
        let job = trial.ask(agent.job(&job.id))?;
        Ok((job.state != JobState::Running).then_some(job))
    })
}

/// Returns the names of all files in folders, hidden ones too, but not the mark of a datastore.
fn listed(folders: &[&Path]) -> Result<Vec<PathBuf>> {
    let mut names = Vec::new();
    for folder in folders {
        for entry in fs::read_dir(folder)? {
            names.push(entry?.path());
        }
        names.retain(|name| !name.ends_with(".godwit-datastore"));
    }
    names.sort();
    Ok(names)
}

/// Whether a process has this file open.
fn is_open(pid: i32, file: &Path) -> Result<bool> {
    let links = fs::read_dir(format!("/proc/{pid}/fd"))?.flatten();
    Ok(links.filter_map(|link| fs::read_link(link.path()).ok()).any(|open| open == file))
}

/// Checks that a raw image has the filling.
fn expect_filling(image: &Path) -> Result<()> {
    let mut found = vec![0; FILLING.len()];
    File::open(image)?.read_exact_at(&mut found, FILLED_AT)?;
    ensure!(found == FILLING, "{}: the filling is lost", image.display());
    Ok(())
}
