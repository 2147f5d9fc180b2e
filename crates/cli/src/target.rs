//! Where a command about one host goes: to its agent or, with `--manager`, through the manager.

use std::path::{Path, PathBuf};

use godwit_api::Client;
use godwit_api::control::ManagerClient;

use crate::args::ManagerPlace;
use crate::exit::Failure;
use crate::hosts::Hosts;
use crate::manager;

/// Where requests go.
pub(crate) enum HostTarget {
    Agent(Client),
    /// The manager, and the host's name.
    Manager(ManagerClient, String),
}

impl HostTarget {
    /// Chooses the manager if one is named, otherwise the agent of the host.
    pub(crate) fn choose(
        place: &ManagerPlace,
        hosts_file: Option<&Path>,
        only: Option<&str>,
    ) -> Result<HostTarget, Failure> {
        if !place.is_named() {
            let hosts = Hosts::load(hosts_file)?;
            let (_, client) = hosts.one(only)?;
            return Ok(HostTarget::Agent(client.clone()));
        }
        let Some(host) = only else {
            return Err(Failure::usage("the host is missing", "name it with --host"));
        };
        Ok(HostTarget::Manager(manager::client(place, hosts_file)?, host.to_owned()))
    }
}

/// Makes a path absolute: the host reads it, so it must not depend on the current directory of this
/// command. The name of an image in a pool of Ceph stays as it is.
pub(crate) fn absolute(path: &Path) -> Result<PathBuf, Failure> {
    if godwit_qemu::is_rbd(path) {
        return Ok(path.to_owned());
    }
    std::path::absolute(path).map_err(|error| {
        Failure::usage(format!("cannot use {}: {error}", path.display()), "give an absolute path")
    })
}
