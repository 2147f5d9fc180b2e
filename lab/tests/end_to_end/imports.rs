//! Export and import, a part of the scenario `clones`: a VM leaves as a libvirt domain and comes
//! back, and so does one as an OVA; what cannot come is refused by name.

mod bootable;
mod shapes;
mod waves;

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use godwit_api::{CreateVm, JobKind, JobState, JobSummary, StopVm};
use godwit_lab::trial::{LIMIT, Trial, until};
use godwit_qemu::{ByteSize, Disk, DiskFormat, MemoryBlock, VmSpec};

use crate::drives::expect_blocks;

/// Exports the stopped VM, deletes it with its disks, and imports it again: the same guest, with
/// the same hardware addresses and blocks.
pub(crate) fn leave_and_return(trial: &Trial, web: &VmSpec, folder: &Path) -> Result<()> {
    let out = folder.join("export");
    std::fs::create_dir(&out)?;
    let to = out.display().to_string();
    let run = |command: &[&str]| {
        let mut words = vec!["vm"];
        words.extend(command);
        words.extend(["--host", "a"]);
        trial.godwit(&words)
    };
    let done = |command: &[&str]| -> Result<String> {
        let done = run(command)?;
        ensure!(done.code == Some(0), "{command:?}: {}", done.stderr);
        Ok(done.stdout)
    };
    done(&["export", "web", "--to", &to, "--format", "libvirt"])?;
    let refused = run(&["export", "web", "--to", &to, "--format", "ova"])?;
    ensure!(refused.stderr.contains("kernel"), "{}", refused.stderr);
    let xml = out.join("web.xml").display().to_string();
    let image = out.join("web-disk0.qcow2");
    refuse(trial, &out, &xml)?;
    as_package(trial, folder, &image, &done)?;
    warm(trial, folder, &done)?;
    waves::import(trial, &out)?;

    done(&["delete", "web", "--delete-disks", "--yes"])?;
    let planned = done(&["import", &xml, "--dry-run"])?;
    ensure!(planned.contains("VM web could be imported"), "{planned}");
    let imported = done(&["import", &xml, "--start"])?;
    ensure!(imported.contains("VM web on host a is running"), "{imported}");
    let back = trial.vm("a", "web")?.spec;
    ensure!(back.nics[0].mac == web.nics[0].mac && back.uuid == web.uuid, "{back:?}");
    until("the guest writes its disk", LIMIT, || {
        Ok(trial.console("a", "web")?.contains("vda of 65536 sectors is written").then_some(()))
    })?;
    trial.ask(trial.agent("a").stop_vm("web", StopVm { force: true, grace_ms: None }))?;
    expect_blocks(&back.disks[0].path)?;
    expect_listed(trial)?;
    std::fs::remove_dir_all(&out)?;
    Ok(())
}

/// Imports definitions with parts that cannot come: each is named, and nothing is created.
fn refuse(trial: &Trial, out: &Path, xml: &str) -> Result<()> {
    let text = std::fs::read_to_string(xml)?;
    let before = std::fs::read_dir(out)?.count();
    for (name, changed, word) in [
        ("passed", text.replace("</devices>", "<hostdev type='pci'/></devices>"), "passed through"),
        ("entity", format!("<!DOCTYPE a [<!ENTITY e SYSTEM 'file:///etc/shadow'>]>{text}"), "type"),
        ("lost", text.replace("web-disk0", "lost"), "lost.qcow2"),
    ] {
        let path = out.join("bad.xml");
        std::fs::write(&path, changed)?;
        let path = path.display().to_string();
        let command = ["vm", "import", &path, "--name", name, "--host", "a"];
        let refused = trial.godwit(&command)?;
        std::fs::remove_file(&path)?;
        ensure!(refused.code != Some(0) && refused.stderr.contains(word), "{}", refused.stderr);
        ensure!(trial.vm("a", name).is_err(), "{name} was created");
    }
    ensure!(std::fs::read_dir(out)?.count() == before, "something was left");
    Ok(())
}

/// Packages a VM without a kernel, and imports the package: its disk has the same content.
fn as_package(
    trial: &Trial,
    folder: &Path,
    image: &Path,
    done: &dyn Fn(&[&str]) -> Result<String>,
) -> Result<()> {
    let spec = VmSpec {
        memory: vec![MemoryBlock::shared(ByteSize::from_mib(64))],
        disks: vec![Disk::new(image, DiskFormat::Qcow2)],
        ..VmSpec::new("plain")
    };
    let create = CreateVm { spec, start: false, vm_dirs_only: false, new_disks: Vec::new() };
    trial.ask(trial.agent("a").create_vm(&create))?;
    let out = folder.join("export");
    done(&["export", "plain", "--to", &out.display().to_string(), "--format", "ova"])?;
    done(&["delete", "plain"])?;
    let package = out.join("plain.ova").display().to_string();
    let imported = done(&["import", &package])?;
    ensure!(imported.contains("VM plain on host a is stopped"), "{imported}");
    let copy = trial.vm("a", "plain")?.spec.disks[0].path.clone();
    let compared = Command::new("qemu-img").arg("compare").arg(image).arg(&copy).output()?;
    ensure!(compared.status.success(), "{compared:?}");
    done(&["delete", "plain", "--delete-disks", "--yes"])?;
    Ok(())
}

/// Copies a disk in three passes, the first from an NBD server, and starts the VM with the copy.
fn warm(trial: &Trial, folder: &Path, done: &dyn Fn(&[&str]) -> Result<String>) -> Result<()> {
    let out = folder.join("export");
    let at = |name: &str| out.join(name).display().to_string();
    let (source, socket, xml) = (at("erp.source"), at("nbd.socket"), at("erp.xml"));
    let mut content = vec![7; 8 << 20];
    std::fs::write(&source, &content)?;
    let disk = "<disk type='file' device='disk'><source file='/elsewhere/erp.img'/>\
                <target dev='vda' bus='virtio'/></disk>";
    let domain = format!(
        "<domain type='qemu'><name>erp</name><memory unit='MiB'>64</memory><vcpu>1</vcpu>\
         <os><type arch='x86_64' machine='pc'>hvm</type></os><devices>{disk}</devices></domain>"
    );
    std::fs::write(&xml, domain)?;
    let server = Command::new("qemu-nbd")
        .args(["--fork", "--read-only", "--format", "raw", "--export-name", "erp", "--socket"])
        .args([&socket, &source])
        .output()?;
    ensure!(server.status.success(), "{server:?}");
    let export = format!("nbd+unix:///erp?socket={socket}");
    let first = done(&["import", &xml, "--warm", &export])?;
    ensure!(first.contains("wrote 8.0 MiB") && trial.vm("a", "erp").is_err(), "{first}");
    content[1 << 20] = 1;
    std::fs::write(&source, &content)?;
    let second = done(&["import", &xml, "--warm", &source, "--again"])?;
    ensure!(second.contains("wrote 64 KiB"), "{second}");
    content[5 << 20] = 1;
    std::fs::write(&source, &content)?;
    let last = done(&["import", &xml, "--warm", &source, "--cut-over"])?;
    ensure!(last.contains("VM erp on host a is running"), "{last}");
    let copy = trial.vm("a", "erp")?.spec.disks[0].path.clone();
    ensure!(std::fs::read(&copy)? == content, "the copy differs");
    done(&["delete", "erp", "--force", "--delete-disks", "--yes"])?;
    Ok(())
}

/// The host lists what it did, and refuses to cancel what is done.
fn expect_listed(trial: &Trial) -> Result<()> {
    let list = trial.godwit(&["job", "list", "--host", "a", "--json"])?;
    let jobs: Vec<JobSummary> = serde_json::from_str(&list.stdout)?;
    let last = |kind: JobKind, vm: &str| {
        let found = jobs.iter().rfind(|job| job.kind == kind && job.vm == vm);
        found.with_context(|| format!("no {kind:?} of {vm}: {}", list.stdout))
    };
    ensure!(last(JobKind::ImportCheck, "web").is_err(), "{}", list.stdout);
    let (warm, failed) = (last(JobKind::WarmImport, "erp")?, last(JobKind::Import, "lost")?);
    ensure!(warm.state == JobState::Done && warm.done_bytes == warm.total_bytes, "{warm:?}");
    ensure!(failed.state == JobState::Failed && failed.error.is_some(), "{failed:?}");
    let export = last(JobKind::Export, "plain")?;
    ensure!(export.ended_unix_ms >= Some(export.begun_unix_ms), "{export:?}");
    let cancel = |id: &str| trial.godwit(&["job", "cancel", id, "--host", "a"]);
    let late = cancel(&export.id)?;
    ensure!(late.code == Some(4) && late.stderr.contains("it is done"), "{}", late.stderr);
    ensure!(cancel(&failed.id)?.code == Some(0) && cancel("1")?.code == Some(3), "cancelled");
    Ok(())
}
