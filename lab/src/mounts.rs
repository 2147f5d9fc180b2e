//! Mount namespaces of hosts, in which a host can lose a directory that the others keep. Mounts of
//! an agent outlive it there, as they do without. Beside them, time namespaces of hosts whose boot
//! clocks differ from the machine's.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::options::Hooks;
use crate::topology::{LabPaths, Topology};

/// Creates a namespace for each host. The machine's later mounts appear in them, and theirs nowhere
/// else.
pub(crate) fn make(topology: &Topology, hooks: &Hooks, paths: &LabPaths) -> Result<()> {
    let folder = paths.mounts();
    fs::create_dir(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    // A namespace can be mounted only where mounts do not propagate.
    run(Command::new("mount").arg("--bind").args([&folder, &folder]))?;
    run(Command::new("mount").arg("--make-private").arg(&folder))?;
    for host in &topology.hosts {
        let file = folder.join(&host.name);
        File::create_new(&file).with_context(|| format!("cannot make {}", file.display()))?;
        let mut unshare = Command::new("unshare");
        unshare.arg(format!("--mount={}", file.display()));
        run(unshare.args(["--propagation", "slave", "true"]))?;
        if let Some(seconds) = hooks.boot_clocks_ahead_s.get(&host.name) {
            make_time(&time(paths, &host.name), *seconds)?;
        }
    }
    Ok(())
}

/// Creates a time namespace in which the machine has run so many seconds longer.
fn make_time(file: &Path, seconds: u32) -> Result<()> {
    File::create_new(file).with_context(|| format!("cannot make {}", file.display()))?;
    let mut unshare = Command::new("unshare");
    unshare.arg(format!("--time={}", file.display()));
    let seconds = seconds.to_string();
    run(unshare.args(["--boottime", &seconds, "--monotonic", &seconds, "true"]))
}

/// Returns the file of a host's time namespace.
fn time(paths: &LabPaths, host: &str) -> PathBuf {
    paths.mounts().join(format!("{host}.time"))
}

/// Returns the command of a program in a host's namespaces. The program has the command's process
/// ID.
pub(crate) fn command(paths: &LabPaths, host: &str, program: &Path) -> Command {
    let mut command = Command::new("nsenter");
    command.arg(format!("--mount={}", paths.mounts().join(host).display()));
    let time = time(paths, host);
    if time.exists() {
        command.arg(format!("--time={}", time.display()));
    }
    command.arg("--").arg(program);
    command
}

/// Puts another directory in the place of one, for one host. What is open stays open.
pub(crate) fn cover(paths: &LabPaths, host: &str, directory: &Path, by: &Path) -> Result<()> {
    run(command(paths, host, "mount".as_ref()).arg("--bind").args([by, directory]))
}

/// Undoes [`cover`].
pub(crate) fn uncover(paths: &LabPaths, host: &str, directory: &Path) -> Result<()> {
    run(command(paths, host, "umount".as_ref()).arg("--lazy").arg(directory))
}

/// Removes everything in a directory, as a host sees it.
pub(crate) fn empty(paths: &LabPaths, host: &str, directory: &Path) -> Result<()> {
    let mut find = command(paths, host, "find".as_ref());
    run(find.arg(directory).args(["-mindepth", "1", "-delete"]))
}

fn run(command: &mut Command) -> Result<()> {
    let output = command.output().with_context(|| format!("cannot run {command:?}"))?;
    if !output.status.success() {
        bail!("{command:?} failed: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(())
}
