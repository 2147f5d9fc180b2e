//! Networks and disk directories that hosts share, according to their agents.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use godwit_api::VmInfo;
use godwit_api::control::{DatastoreAtHost, ManagedDatastore, ManagedNetwork, NetworkAtHost, Page};
use godwit_qemu::VmSpec;

use super::select::{Cursor, page};
use super::{Inventory, Vm};

impl Inventory {
    /// Returns a page of the networks that hosts have or VMs name, by name.
    #[must_use]
    pub fn networks(&self, cursor: &Cursor) -> Page<ManagedNetwork> {
        let mut all = BTreeMap::<String, ManagedNetwork>::new();
        let empty =
            |name: &str| ManagedNetwork { name: name.to_owned(), hosts: Vec::new(), vms: 0 };
        for (host, info) in self.infos() {
            for (name, network) in &info.networks {
                let bridge = network.bridge.clone();
                let entry = all.entry(name.clone()).or_insert_with(|| empty(name));
                entry.hosts.push(NetworkAtHost { host: host.to_owned(), bridge });
            }
        }
        for info in self.vms.values().filter_map(Vm::main) {
            for name in networks_of(&info.spec) {
                all.entry(name.to_owned()).or_insert_with(|| empty(name)).vms += 1;
            }
        }
        page(all.iter(), cursor, |_, network: &ManagedNetwork| network.clone())
    }

    /// Returns a page of the directories of disks, by path: `vm_dirs` of hosts, and directories
    /// with VMs' disks.
    #[must_use]
    pub fn datastores(&self, cursor: &Cursor) -> Page<ManagedDatastore> {
        let mut hosts = BTreeMap::<String, BTreeSet<&str>>::new();
        let mut vms = BTreeMap::<String, u64>::new();
        for (host, info) in self.infos() {
            // Agents that report datastores omit directories that do not exist.
            let reports = !info.datastores.is_empty();
            let dirs =
                info.vm_dirs.iter().filter(|dir| !reports || info.datastores.contains_key(*dir));
            for dir in dirs {
                hosts.entry(dir.display().to_string()).or_default().insert(host);
            }
        }
        for info in self.vms.values().filter_map(Vm::main) {
            for name in datastores_of(&info.spec) {
                hosts.entry(name.clone()).or_default().insert(&info.host);
                *vms.entry(name).or_default() += 1;
            }
        }
        page(hosts.iter(), cursor, |name, hosts: &BTreeSet<&str>| ManagedDatastore {
            name: name.to_owned(),
            hosts: hosts.iter().map(|host| self.at_host(host, name)).collect(),
            vms: vms.get(name).copied().unwrap_or_default(),
        })
    }

    fn at_host(&self, host: &str, datastore: &str) -> DatastoreAtHost {
        let room = self.host_info(host).and_then(|info| info.datastores.get(Path::new(datastore)));
        DatastoreAtHost {
            host: host.to_owned(),
            total_bytes: room.map(|room| room.total_bytes),
            free_bytes: room.map(|room| room.free_bytes),
        }
    }

    fn infos(&self) -> impl Iterator<Item = (&str, &godwit_api::HostInfo)> {
        self.hosts.iter().filter_map(|(name, host)| Some((name.as_str(), host.info.as_deref()?)))
    }
}

/// Returns the networks of a VM's interfaces, each once.
fn networks_of(spec: &VmSpec) -> BTreeSet<&str> {
    spec.nics.iter().map(|nic| nic.network.as_str()).collect()
}

/// Returns the directories of a VM's disks, each once. VMs with disks in one directory share what
/// is mounted there.
pub(crate) fn datastores_of(spec: &VmSpec) -> BTreeSet<String> {
    spec.images().filter_map(|image| Some(image.parent()?.display().to_string())).collect()
}

/// Returns whether a VM has an interface in a network.
pub(crate) fn is_in_network(info: &VmInfo, network: &str) -> bool {
    info.spec.nics.iter().any(|nic| nic.network == network)
}

/// Returns whether a VM has a disk in a directory.
pub(crate) fn is_on_datastore(info: &VmInfo, datastore: &str) -> bool {
    info.spec.images().any(|image| image.parent() == Some(Path::new(datastore)))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::cluster::inventory::VmFilter;
    use crate::rig;

    fn cluster() -> Inventory {
        let mut inventory = Inventory::default();
        for name in ["a", "b"] {
            let mut info = rig::host(name, None);
            info.networks =
                serde_json::from_value(json!({ "prod": { "bridge": format!("br-{name}") } }))
                    .unwrap();
            info.vm_dirs = vec!["/srv".into(), "/mnt".into()];
            if name == "a" {
                let room = json!({ "/srv": { "total_bytes": 100, "free_bytes": 40 } });
                info.datastores = serde_json::from_value(room).unwrap();
            }
            let mut vm = rig::vm(&format!("web-{name}"), name, None);
            vm.spec.nics =
                serde_json::from_value(json!([{ "network": "prod" }, { "network": "prod" }]))
                    .unwrap();
            let disk = json!([
                { "path": "/srv/images/a.raw", "format": "raw" },
                { "path": "/srv/images/b.raw", "format": "raw" }
            ]);
            vm.spec.disks = serde_json::from_value(disk).unwrap();
            if name == "b" {
                vm.spec.nics.extend(
                    serde_json::from_value::<Vec<godwit_qemu::Nic>>(json!([{ "network": "gone" }]))
                        .unwrap(),
                );
            }
            rig::put_host(&mut inventory, info, &[], vec![vm]);
        }
        inventory
    }

    fn all(limit: usize) -> Cursor {
        Cursor { behind: None, limit }
    }

    #[test]
    fn networks_have_their_hosts_and_vms() {
        let inventory = cluster();
        let page = inventory.networks(&all(10));
        let networks: Vec<_> = page
            .items
            .iter()
            .map(|network| (network.name.as_str(), network.hosts.len(), network.vms))
            .collect();
        assert_eq!((networks, page.total), (vec![("gone", 0, 1), ("prod", 2, 2)], 2));
        assert_eq!(
            page.items[1].hosts[1],
            NetworkAtHost { host: "b".into(), bridge: "br-b".into() }
        );
        let filter = VmFilter { network: Some("gone".into()), ..VmFilter::default() };
        let vms = inventory.vms(&filter, &all(10));
        assert_eq!((vms.total, vms.items[0].name.as_str()), (1, "web-b"));
    }

    #[test]
    fn datastores_have_the_space_that_hosts_report_in_pages() {
        let inventory = cluster();
        let first = inventory.datastores(&all(2));
        assert_eq!((first.items.len(), first.total, first.next.as_deref()), (2, 3, Some("/srv")));
        // Host a reports which of its directories exist, b does not.
        assert_eq!(
            (first.items[0].name.as_str(), first.items[0].hosts[0].host.as_str()),
            ("/mnt", "b")
        );
        let at: Vec<_> =
            first.items[1].hosts.iter().map(|at| (at.host.as_str(), at.free_bytes)).collect();
        assert_eq!(at, [("a", Some(40)), ("b", None)]);
        let rest = inventory.datastores(&Cursor { behind: first.next, limit: 2 });
        assert_eq!(
            (rest.items[0].name.as_str(), rest.items[0].vms, rest.next),
            ("/srv/images", 2, None)
        );
        let filter = VmFilter { datastore: Some("/srv/images".into()), ..VmFilter::default() };
        assert_eq!(inventory.vms(&filter, &all(10)).total, 2);
        let filter = VmFilter { datastore: Some("/srv".into()), ..VmFilter::default() };
        assert_eq!(inventory.vms(&filter, &all(10)).total, 0);
    }
}
