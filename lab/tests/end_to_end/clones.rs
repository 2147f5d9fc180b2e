//! Snapshots, templates and clones: a guest continues from a snapshot with its memory and disks,
//! clones are layers on a template that nobody writes, and what goes with a VM is its own.

use std::path::Path;
use std::process::Command;

use anyhow::{Result, ensure};
use godwit_api::{
    ChangeVm, ClientError, CloneMode, CloneVm, CreateSnapshot, ErrorCode, MigrationRequest,
    RevertVm, SetTemplate, StopVm, VmState,
};
use godwit_lab::image;
use godwit_lab::trial::{Guest, GuestPlan, LIMIT, Trial, until};
use godwit_lab::{Hooks, LabOptions};
use godwit_qemu::{DiskFormat, SpecPatch, Uuid, VmSpec};
use rustix::process::Signal;
use serde_json::json;

use crate::drives::{expect_blocks, image_at};

const STOP: StopVm = StopVm { force: true, grace_ms: None };

#[test]
fn a_vm_is_snapshotted_reverted_and_cloned() -> Result<()> {
    let hooks = Hooks { holds: true, ..Hooks::default() };
    let options = LabOptions { hooks, ..LabOptions::default() };
    let Some(trial) = Trial::begin_with("clones", options)? else { return Ok(()) };
    if !Path::new("/usr/bin/qemu-img").exists() {
        eprintln!("skipped: clones: no qemu-img (apt-get install qemu-utils)");
        return trial.finish();
    }
    let folder = tempfile::tempdir_in("/var/tmp")?;
    let dirs: toml::Value = vec![folder.path().display().to_string()].into();
    trial.reconfigure("a", |config| drop(config.insert("vm_dirs".to_owned(), dirs)))?;
    let disk = image_at(&folder.path().join("web.qcow2"), DiskFormat::Qcow2)?;
    let plan = GuestPlan {
        disks: vec![disk.clone()],
        image: Some(image::build_with_drives(&image::default_dir())?),
        words: "godwit.drives=on".to_owned(),
        ..GuestPlan::new("web")
    };
    let guest = trial.guest("a", &plan)?;
    let writes = |vm: &str| {
        until("the guest writes its disk", LIMIT, || {
            let wanted = "DRIVES vda of 65536 sectors is written";
            Ok(trial.console("a", vm)?.contains(wanted).then_some(()))
        })
    };
    writes("web")?;

    // A snapshot of a running guest has its memory, and the guest continues.
    let agent = trial.agent("a");
    let one = CreateSnapshot { name: "one".to_owned() };
    let taken = trial.ask(agent.create_snapshot("web", &one))?;
    ensure!(taken.memory && taken.disks == 1, "{taken:?}");
    ensure!(trial.ask(agent.create_snapshot("web", &one)).is_err(), "a second one of the name");
    trial.expect_whole(&guest)?;
    let refused = trial.ask(agent.migrate("web", &MigrationRequest::to("b")));
    ensure!(
        matches!(&refused, Err(ClientError::Refused(error)) if error.message.contains("snapshot")),
        "{refused:?}"
    );
    let revert = RevertVm { name: "one".to_owned(), vm_dirs_only: true };
    ensure!(trial.ask(agent.revert_to_snapshot("web", &revert)).is_err(), "reverted while it runs");
    cut_a_snapshot(&trial, &guest, folder.path())?;
    let agent = trial.agent("a");
    trial.ask(agent.stop_vm("web", STOP))?;
    let layer = trial.vm("a", "web")?.spec.disks[0].path.clone();
    ensure!(layer != disk.path, "the frozen image is written");
    let scribble = ["-f", "qcow2", "-c", "write -P 0xee 0 1M"];
    let scribbled = Command::new("qemu-io").args(scribble).arg(&layer).output()?;
    ensure!(scribbled.status.success(), "{scribbled:?}");

    let reverted = trial.ask(agent.revert_to_snapshot("web", &revert))?;
    ensure!(reverted.state == VmState::Suspended && !layer.exists(), "{reverted:?}");
    change_settings(&trial, json!({ "description": "It sleeps" }))?;
    trial.end_agent("a", Signal::KILL)?;
    trial.start_missing()?;
    let agent = trial.agent("a");
    ensure!(trial.vm("a", "web")?.snapshots == 1, "the snapshot is forgotten");
    trial.ask(agent.start_vm("web"))?;
    trial.expect_whole(&guest)?;
    ensure!(guest.status()?.problems.is_empty(), "{:?}", guest.status()?.problems);
    trial.ask(agent.stop_vm("web", STOP))?;
    expect_blocks(&trial.vm("a", "web")?.spec.disks[0].path)?;
    // Its layer is merged into the first image.
    trial.ask(agent.delete_snapshot("web", "one"))?;
    let web = trial.vm("a", "web")?;
    ensure!(web.snapshots == 0 && web.spec.disks[0].path == disk.path, "{web:?}");
    expect_blocks(&disk.path)?;
    crate::imports::leave_and_return(&trial, &web.spec, folder.path())?;
    let web = trial.vm("a", "web")?;
    clone_and_delete(&trial, &web.spec, folder.path())?;
    trial.finish()
}

/// Kills the agent while the guest is suspended for a snapshot: the next one resumes the guest, and
/// removes an image that was being created.
fn cut_a_snapshot(trial: &Trial, guest: &Guest, folder: &Path) -> Result<()> {
    let id = Uuid::new_v4();
    let unfinished = folder.join(format!(".half.qcow2.{id}.new"));
    let notes = trial.paths().host("a").join("state/new-images");
    let held = trial.hold("a", "host.snapshot-suspended")?;
    let mut request = trial.godwit_command(&["vm", "snapshot", "create", "web", "two"]);
    let request = request.args(["--host", "a"]).stderr(std::process::Stdio::null()).spawn();
    held.reached(LIMIT)?;
    trial.end_agent("a", Signal::KILL)?;
    request?.wait()?;
    held.open();
    std::fs::write(&unfinished, "half")?;
    std::fs::write(notes.join(id.to_string()), unfinished.display().to_string())?;
    trial.start_missing()?;
    until("the VM runs again", LIMIT, || {
        Ok((trial.vm("a", "web")?.state == VmState::Running).then_some(()))
    })?;
    trial.expect_whole(guest)?;
    ensure!(trial.vm("a", "web")?.snapshots == 1, "half a snapshot is there");
    ensure!(!unfinished.exists() && std::fs::read_dir(&notes)?.next().is_none(), "leftovers");
    Ok(())
}

/// Changes settings of a VM that does not run, in which nothing else can change.
fn change_settings(trial: &Trial, spec: serde_json::Value) -> Result<()> {
    let (agent, before) = (trial.agent("a"), trial.vm("a", "web")?.state);
    let change = |spec| -> Result<_> {
        let spec: SpecPatch = serde_json::from_value(spec)?;
        Ok(trial.ask(agent.change_vm("web", &ChangeVm { spec, ..ChangeVm::default() })))
    };
    let changed = change(spec)?.map_err(anyhow::Error::from)?;
    let is_set = changed.spec.description.is_some() || !changed.spec.tags.is_empty();
    ensure!(is_set && changed.state == before, "{changed:?}");
    ensure!(change(json!({ "vcpus": 2 }))?.is_err(), "another machine");
    Ok(())
}

/// Makes the stopped VM a template, clones it, and deletes all with their disks.
fn clone_and_delete(trial: &Trial, web: &VmSpec, folder: &Path) -> Result<()> {
    let agent = trial.agent("a");
    let clone = |name: &str, mode| CloneVm {
        name: name.to_owned(),
        mode: Some(mode),
        start: mode == CloneMode::Linked,
        ..CloneVm::default()
    };
    let refused = trial.ask(agent.clone_vm("web", &clone("one", CloneMode::Linked)));
    ensure!(
        matches!(&refused, Err(ClientError::Refused(error))
            if error.code == ErrorCode::WrongState && error.remedy.contains("vm template web")),
        "{refused:?}"
    );
    let template = SetTemplate { template: true };
    let made = trial.ask(agent.set_template("web", template))?;
    ensure!(made.state == VmState::Template, "{made:?}");
    change_settings(trial, json!({ "tags": ["gold"] }))?;
    ensure!(trial.ask(agent.start_vm("web")).is_err(), "a template was started");
    let base = std::fs::read(&web.disks[0].path)?;
    let one = trial.ask(agent.clone_vm("web", &clone("one", CloneMode::Linked)))?;
    let full = trial.ask(agent.clone_vm("web", &clone("full", CloneMode::Full)))?;
    ensure!(one.state == VmState::Running && full.state == VmState::Stopped, "{one:?} {full:?}");
    ensure!(one.spec.uuid != web.uuid && one.spec.nics[0].mac != web.nics[0].mac, "{one:?}");
    until("the clone writes its disk", LIMIT, || {
        Ok(trial.console("a", "one")?.contains("vda of 65536 sectors is written").then_some(()))
    })?;
    ensure!(trial.ask(agent.set_template("web", SetTemplate { template: false })).is_err());
    trial.end_agent("a", Signal::KILL)?;
    trial.start_missing()?;
    ensure!(trial.vm("a", "web")?.state == VmState::Template, "the template is forgotten");
    ensure!(base == std::fs::read(&web.disks[0].path)?, "the template's image was written");
    expect_blocks(&full.spec.disks[0].path)?;

    // The template's image stays as long as the clone is layered on it.
    let deleted = trial.godwit(&["vm", "delete", "web", "--delete-disks", "--host", "a"])?;
    ensure!(deleted.code != Some(0) && deleted.stderr.contains("VM \"one\" uses it"));
    let delete = |vm: &str| -> Result<()> {
        let command = ["vm", "delete", vm, "--force", "--delete-disks", "--yes", "--host", "a"];
        let deleted = trial.godwit(&command)?;
        ensure!(deleted.code == Some(0), "{}", deleted.stderr);
        Ok(())
    };
    delete("one")?;
    delete("full")?;
    delete("web")?;
    let left = std::fs::read_dir(folder)?.flatten().map(|entry| entry.file_name());
    let is_expected = |name: &str| name.ends_with(".read") || name == ".godwit-datastore";
    let left: Vec<_> = left.filter(|name| !is_expected(&name.to_string_lossy())).collect();
    ensure!(left.is_empty(), "left: {left:?}");
    Ok(())
}
