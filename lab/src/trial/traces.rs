//! Traces that a VM leaves on a host, and a lab on the machine.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::down::LabName;
use crate::namespace;
use crate::topology::is_lab_namespace;
use crate::trial::{LIMIT, Trial, until};

/// Traces of VMs on a host.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Traces {
    /// Files, sockets and folders below the agent's state, run and memory folders.
    pub files: BTreeSet<PathBuf>,
    /// Processes in the host's namespace, without the agent: `PID COMMAND`.
    pub processes: BTreeSet<String>,
    pub links: BTreeSet<String>,
}

impl Trial {
    /// Returns the traces of VMs that are on a host now.
    ///
    /// # Errors
    /// The host cannot be examined.
    pub fn traces(&self, host: &str) -> Result<Traces> {
        let namespace = self.namespace(host);
        let agent = self.agent_process(host).map(|agent| agent.pid).unwrap_or(-1);
        let pids = namespace::processes(&namespace)?.into_iter().filter(|pid| *pid != agent);
        let name_of = |pid: i32| {
            let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).ok()?;
            Some(format!("{pid} {}", name.trim()))
        };
        let folders = ["state", "run", "ram"].map(|folder| self.paths.host(host).join(folder));
        Ok(Traces {
            files: folders
                .iter()
                .flat_map(|folder| files_below(folder))
                .filter(|file| !is_memory(file) && !is_empty_store(file))
                .collect(),
            processes: pids.filter_map(name_of).collect(),
            links: links(&namespace)?,
        })
    }

    /// Waits until a host has these traces and no others: a migration's clean-up runs concurrently
    /// with its report.
    ///
    /// # Errors
    /// It has others, which the error lists.
    pub fn expect_traces(&self, host: &str, wanted: &Traces) -> Result<()> {
        until(&format!("nothing is left on host {host}"), LIMIT, || {
            let found = self.traces(host)?;
            ensure!(found == *wanted, "there is\n{found:#?}\nwhere there was\n{wanted:#?}");
            Ok(Some(()))
        })
    }
}

/// Returns whether a path is an agent's memory of the VMs that have left it
/// (`STATE_DIR/gone/UUID.json`), or of the images of their disks that stay
/// (`STATE_DIR/kept-disks/ID.json`), or a folder of these, which do not count as traces.
fn is_memory(path: &Path) -> bool {
    let is_folder =
        |path: &Path| path.ends_with("state/gone") || path.ends_with("state/kept-disks");
    is_folder(path) || path.parent().is_some_and(is_folder)
}

/// Returns whether a path is an agent's folder for records (`STATE_DIR/NAME`) without any: the
/// first record makes it.
fn is_empty_store(path: &Path) -> bool {
    path.parent().is_some_and(|folder| folder.ends_with("state"))
        && std::fs::read_dir(path).is_ok_and(|mut entries| entries.next().is_none())
}

fn links(namespace: &str) -> Result<BTreeSet<String>> {
    let output = Command::new("ip")
        .args(["-n", namespace, "-brief", "link"])
        .output()
        .context("cannot run ip")?;
    ensure!(output.status.success(), "ip: {}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    Ok(text.lines().filter_map(|line| line.split_whitespace().next()).map(str::to_owned).collect())
}

/// Returns all files and folders below `folder`, without those that disappear during the search.
pub(crate) fn files_below(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut waiting = vec![folder.to_owned()];
    while let Some(folder) = waiting.pop() {
        for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                waiting.push(entry.path());
            }
            found.push(entry.path());
        }
    }
    found
}

/// Returns what is left of a lab that is down.
pub(crate) fn left_on_machine(name: &LabName) -> Result<Vec<String>> {
    let namespaces =
        namespace::list()?.into_iter().filter(|found| is_lab_namespace(&name.prefix, found));
    let mut left: Vec<String> = namespaces.map(|found| format!("namespace {found}")).collect();
    if name.state_dir.exists() {
        left.push(name.state_dir.display().to_string());
    }
    let below = format!("{}/", name.state_dir.display());
    let mounts = std::fs::read_to_string("/proc/self/mountinfo")?;
    left.extend(
        mounts.lines().filter(|line| line.contains(&below)).map(|line| format!("mount {line}")),
    );
    for entry in std::fs::read_dir("/proc")?.flatten() {
        let command = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
        let command = String::from_utf8_lossy(&command).replace('\0', " ");
        if command.contains(&below) {
            left.push(format!("process {} ({command})", entry.file_name().display()));
        }
    }
    Ok(left)
}
