//! The failed KVM probe of an agent, handed from lab to lab. A probe that hangs takes a second or
//! more, in which no guest starts, and it is the same for all agents of a machine.

use std::fs;
use std::path::PathBuf;

use crate::agents::run_dir;
use crate::image;
use crate::state::write_whole;
use crate::topology::{LabPaths, Topology};

/// Its name in an agent's run directory, which checks whether it still applies.
const FILE: &str = "kvm-probe.json";

fn kept() -> PathBuf {
    image::default_dir().join(FILE)
}

/// Gives the last lab's result, if there is one, to the agents of this lab.
pub(crate) fn give(topology: &Topology, paths: &LabPaths) {
    let Ok(result) = fs::read_to_string(kept()) else { return };
    for host in &topology.hosts {
        let dir = run_dir(paths, &host.name);
        // Without it, the agent probes for itself.
        if fs::create_dir_all(&dir).is_ok() {
            let _ = write_whole(&dir.join(FILE), &result);
        }
    }
}

/// Keeps a result of this lab's agents for the next lab.
pub(crate) fn keep(paths: &LabPaths) {
    let hosts = fs::read_dir(paths.hosts()).into_iter().flatten().flatten();
    let names = hosts.filter_map(|host| host.file_name().into_string().ok());
    let mut results =
        names.filter_map(|host| fs::read_to_string(run_dir(paths, &host).join(FILE)).ok());
    if let Some(result) = results.next() {
        // Without it, the next lab's agents probe for themselves.
        let _ = write_whole(&kept(), &result);
    }
}
