//! Users of disk images at other hosts. Hosts may share a directory, and an agent knows its own VMs
//! alone, so the agents of the others are asked before an image is changed or deleted.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use futures::{StreamExt, stream};
use godwit_api::control::{Problem, ProblemCode};
use godwit_api::{Client, ClientError, ErrorCode, VmInfo};
use godwit_qemu::{Disk, is_rbd};

use crate::agents::AgentClients;
use crate::cluster::inventory::Inventory;

/// Most agents that are asked at once about an image.
const MOST_ASKED: usize = 16;
/// Longest time for an agent to describe an image.
const ASK_LIMIT: Duration = Duration::from_secs(30);

impl AgentClients {
    /// Checks that no VM of another host uses an image, also as a backing file, a CD, a kernel or
    /// an initrd.
    pub(crate) async fn check_elsewhere(
        &self,
        verb: &str,
        host: &str,
        path: &Path,
    ) -> Result<(), Problem> {
        let mut asked = Vec::new();
        for other in self.others(verb, host, path)? {
            let agent = self.client_of(&other)?;
            asked.push(users_at(other, agent, path.to_owned()));
        }
        let mut answers = stream::iter(asked).buffer_unordered(MOST_ASKED);
        while let Some((other, users)) = answers.next().await {
            match users {
                Ok(vms) => {
                    if let Some(vm) = vms.first() {
                        return Err(used(verb, path, vm, &other));
                    }
                }
                Err(why) => return Err(unknown(verb, path, &other, &why)),
            }
        }
        Ok(())
    }

    /// Checks that no VM of another host uses the image of a disk that a VM writes: the images are
    /// to be deleted where the VM is.
    pub(crate) async fn check_disks_elsewhere(&self, info: &VmInfo) -> Result<(), Problem> {
        // Images in pools of Ceph do not travel.
        let travels = |disk: &&Disk| !disk.readonly && !is_rbd(&disk.path);
        let written = info.spec.disks.iter().filter(travels);
        let images: Vec<&Path> = written.map(|disk| disk.path.as_path()).collect();
        for image in images {
            self.check_elsewhere("delete", &info.host, image).await?;
        }
        Ok(())
    }

    /// Returns the other hosts whose agents must be asked about an image, if no VM that the manager
    /// knows of at another host names it.
    fn others(&self, verb: &str, host: &str, path: &Path) -> Result<Vec<String>, Problem> {
        let inventory = self.state.inventory();
        let user = elsewhere(&inventory, host).find(|vm| names(vm, path));
        if let Some(vm) = user {
            return Err(used(verb, path, &vm.name, &vm.host));
        }
        let mut others = Vec::new();
        for (other, _) in inventory.plans().filter(|(other, _)| *other != host) {
            if inventory.is_up(other) {
                others.push(other.to_owned());
            } else if may_have(&inventory, other, path) {
                return Err(unknown(verb, path, other, "it is away"));
            }
        }
        Ok(others)
    }

    /// Checks that no VM of another host writes the base of a new image.
    pub(crate) fn check_not_written(&self, host: &str, base: &Path) -> Result<(), Problem> {
        let inventory = self.state.inventory();
        let writes =
            |vm: &VmInfo| vm.spec.disks.iter().any(|disk| !disk.readonly && disk.path == base);
        let Some(vm) = elsewhere(&inventory, host).find(|vm| writes(vm)) else { return Ok(()) };
        let detail = format!(
            "cannot use base {}: VM \"{}\" on host {} writes it",
            base.display(),
            vm.name,
            vm.host
        );
        let remedy = "use another base, or stop the VM and copy its disk on that host";
        Err(Problem::new(ProblemCode::AlreadyExists, detail, remedy))
    }
}

/// Returns what the other hosts report of their VMs.
fn elsewhere<'a>(inventory: &'a Inventory, host: &'a str) -> impl Iterator<Item = &'a Arc<VmInfo>> {
    let hosts = inventory.plans().map(|(other, _)| other);
    hosts.filter(move |other| *other != host).flat_map(move |other| inventory.vms_of(other))
}

/// Whether the definition of a VM names a file. It does not show backing files.
fn names(vm: &VmInfo, path: &Path) -> bool {
    let boot = vm.spec.kernel.iter().chain(&vm.spec.initrd).map(PathBuf::as_path);
    vm.spec.images().chain(boot).any(|file| file == path)
}

/// Whether a host that is away may have an image in its directories for VMs.
fn may_have(inventory: &Inventory, host: &str, path: &Path) -> bool {
    let Some(info) = inventory.host_info(host) else { return true };
    // An older agent does not report them.
    info.vm_dirs.is_empty() || info.vm_dirs.iter().any(|dir| path.starts_with(dir))
}

/// Asks an agent for the VMs that use an image there; returns them with the host.
async fn users_at(
    host: String,
    agent: Client,
    path: PathBuf,
) -> (String, Result<Vec<String>, String>) {
    let users = match tokio::time::timeout(ASK_LIMIT, agent.disk(&path)).await {
        Ok(Ok(disk)) => Ok(disk.vms),
        // It is not there, or not in the directories for VMs.
        Ok(Err(ClientError::Refused(error)))
            if matches!(error.code, ErrorCode::NotFound | ErrorCode::InvalidRequest) =>
        {
            Ok(Vec::new())
        }
        Ok(Err(error)) => Err(error.detail()),
        Err(_) => Err(format!("no answer within {} s", ASK_LIMIT.as_secs())),
    };
    (host, users)
}

fn used(verb: &str, path: &Path, vm: &str, host: &str) -> Problem {
    let detail =
        format!("cannot {verb} disk {}: VM \"{vm}\" on host {host} uses it", path.display());
    let remedy = match verb {
        "resize" => "resize it on that host, or detach it from the VM first",
        _ => "detach it from the VM, or delete the VM first",
    };
    Problem::new(ProblemCode::WrongState, detail, remedy)
}

fn unknown(verb: &str, path: &Path, host: &str, why: &str) -> Problem {
    let detail = format!(
        "cannot {verb} disk {}: host {host} may have a VM that uses it, and cannot be asked: {why}",
        path.display()
    );
    let remedy = "bring the host back (`godwit control host list`), or forget it with \
                  `godwit control host forget` if it is gone for good";
    Problem::new(ProblemCode::HostAway, detail, remedy)
}

#[cfg(test)]
mod tests {
    use godwit_api::HostInfo;
    use serde_json::json;

    use super::*;
    use crate::rig;

    #[test]
    fn an_image_is_found_at_other_hosts() {
        let mut inventory = Inventory::default();
        let mut web = rig::vm("web", "b", None);
        let disk = json!({ "path": "/srv/web.raw", "format": "raw" });
        web.spec.disks = vec![serde_json::from_value(disk).unwrap()];
        rig::put_host(&mut inventory, rig::host("a", None), &[], vec![]);
        let b = HostInfo { vm_dirs: vec!["/srv".into()], ..rig::host("b", None) };
        rig::put_host(&mut inventory, b, &[], vec![web]);
        let is_named = |host: &str, path: &str| {
            elsewhere(&inventory, host).any(|vm| names(vm, Path::new(path)))
        };
        assert!(is_named("a", "/srv/web.raw") && is_named("a", "/k"));
        assert!(!is_named("a", "/srv/other.raw") && !is_named("b", "/srv/web.raw"));
        let may_have = |host: &str, path: &str| may_have(&inventory, host, Path::new(path));
        assert!(may_have("b", "/srv/x") && !may_have("b", "/srvx/x"));
        // These say nothing of their directories.
        assert!(may_have("a", "/x") && may_have("c", "/x"));
    }
}
