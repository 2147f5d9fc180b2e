//! A plan of three VMs in two waves, of which one cannot be imported; and plans that are refused.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, ensure};
use godwit_lab::trial::{LIMIT, Trial, until};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

/// Imports by plan, with definitions and disks in `out`.
pub(super) fn import(trial: &Trial, out: &Path) -> Result<()> {
    // The third one has the name of the first.
    for (file, name) in [("one", "one"), ("two", "two"), ("three", "one")] {
        let disk = out.join(format!("{file}.img"));
        fs::write(&disk, vec![5; 4 << 20])?;
        let domain = format!(
            "<domain type='qemu'><name>{name}</name><memory unit='MiB'>64</memory><vcpu>1</vcpu>\
             <os><type arch='x86_64' machine='pc'>hvm</type></os><devices>\
             <disk type='file' device='disk'><source file='{}'/>\
             <target dev='vda' bus='virtio'/></disk></devices></domain>",
            disk.display()
        );
        fs::write(out.join(format!("{file}.xml")), domain)?;
    }
    let path = out.join("waves.toml");
    let plan = path.display().to_string();
    let run = |text: &str| {
        fs::write(&path, text)?;
        trial.godwit(&["--json", "--host", "a", "vm", "import", "--plan", &plan])
    };
    let wave = |name: &str, files: &[&str]| {
        let vms = files.iter().map(|file| format!("[[waves.vms]]\nfile = \"{file}.xml\"\n"));
        format!("[[waves]]\nname = \"{name}\"\n{}", vms.collect::<String>())
    };
    let whole =
        format!("at_once = 2\n{}{}", wave("first", &["one", "two"]), wave("last", &["three"]));
    for (text, word) in [
        (whole.replace("at_once", "at_most"), "at_most"),
        (whole.replace("name = \"first\"", "name = \"x\"\nwindow = \"24:00-01:00\""), "window"),
        (whole.replace("three", "two"), "twice"),
    ] {
        let refused = run(&text)?;
        ensure!(refused.code == Some(2) && refused.stderr.contains(word), "{refused:?}");
    }
    ensure!(trial.vm("a", "one").is_err(), "a refused plan created a VM");

    let ended = run(&whole)?;
    ensure!(ended.code != Some(0), "{ended:?}");
    let report: Vec<Value> = serde_json::from_str(&ended.stdout)?;
    let state = |wave: &str, vm: &str| {
        let of_it = |row: &&Value| {
            row["wave"] == wave && row["vm"].as_str().is_some_and(|name| name.contains(vm))
        };
        report.iter().find(of_it).map(|row| (row["state"].clone(), row["error"].clone()))
    };
    for vm in ["one", "two"] {
        let (state, _) = state("first", vm).context("it is not in the report")?;
        ensure!(state == "done" && trial.vm("a", vm).is_ok(), "{report:?}");
    }
    let (state, error) = state("last", "three").context("it is not in the report")?;
    let says_why = error.as_str().is_some_and(|why| why.contains("already exists"));
    ensure!(state == "failed" && says_why, "{report:?}");
    too_late(trial, &path, &wave("late", &["three"]))?;
    for vm in ["one", "two"] {
        let delete = ["vm", "delete", vm, "--delete-disks", "--yes", "--host", "a"];
        let deleted = trial.godwit(&delete)?;
        ensure!(deleted.code == Some(0), "{}", deleted.stderr);
    }
    Ok(())
}

/// A wave whose window is over waits for the next day; Ctrl-C ends the wait, and skips its VMs.
fn too_late(trial: &Trial, path: &Path, wave: &str) -> Result<()> {
    let hour = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs() / 3600 % 24;
    let window = format!("\"{:02}:00-{:02}:00\"", (hour + 22) % 24, (hour + 23) % 24);
    let name = "name = \"late\"\n";
    fs::write(path, wave.replace(name, &format!("{name}window = {window}\n")))?;
    let plan = path.display().to_string();
    let mut command = trial.godwit_command(&["vm", "import", "--plan", &plan, "--host", "a"]);
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    let mut child = Ended(child);
    let child = &mut child.0;
    let mut errors = BufReader::new(child.stderr.take().context("no standard error")?);
    let mut line = String::new();
    errors.read_line(&mut line)?;
    ensure!(line.contains("wave late: 1 VMs"), "{line}");
    let status = until("the command ends", LIMIT, || {
        kill_process(Pid::from_child(child), Signal::INT)?;
        Ok(child.try_wait()?)
    })?;
    let mut text = String::new();
    child.stdout.take().context("no standard output")?.read_to_string(&mut text)?;
    ensure!(status.code() == Some(1) && text.contains("skipped"), "{status}: {text}");
    Ok(())
}

/// A command that ends with the test.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
