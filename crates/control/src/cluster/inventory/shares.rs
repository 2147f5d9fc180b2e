//! Networks that hosts share, according to their agents, and directories of VMs' disks.

use std::collections::{BTreeMap, BTreeSet};

use godwit_api::VmInfo;
use godwit_api::control::{ManagedNetwork, NetworkAtHost, Page};
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
            let mut vm = rig::vm(&format!("web-{name}"), name, None);
            vm.spec.nics =
                serde_json::from_value(json!([{ "network": "prod" }, { "network": "prod" }]))
                    .unwrap();
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
}
