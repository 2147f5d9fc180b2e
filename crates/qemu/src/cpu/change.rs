//! What it means to raise or to lower a cluster's baseline. Pure.
//!
//! A guest keeps the CPU with which it was started: another baseline changes nothing for it until it is stopped and started anew. Until
//! then it runs on, moves among the hosts that have what it has, and lacks what the new baseline would give it.

use super::{Baseline, CpuFeatures, CpuModel, HostCpu};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunningVm {
    pub name: String,
    /// Its `cpu_model`.
    pub cpu_model: String,
    /// The host it was started on, for the models that are each host's own.
    pub host: String,
}

/// A VM or a host, and the features that it is about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unmet {
    pub name: String,
    pub features: CpuFeatures,
}

/// What another baseline would mean.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BaselineChange {
    /// VMs that have less than the new baseline: they get it when they are started anew, and run on meanwhile.
    pub behind: Vec<Unmet>,
    /// VMs that have more than the new baseline: until they are started anew they can't go to every host that satisfies it.
    pub beyond: Vec<Unmet>,
    /// VMs of whose CPU model no host says what it holds.
    pub unknown: Vec<String>,
    /// Hosts that don't satisfy the new baseline, with what they lack of it: no VM that starts with it can go there.
    pub out: Vec<Unmet>,
}

/// Compares what runs with a baseline that shall be the cluster's from now on.
#[must_use]
pub fn change_of_baseline(
    new: &Baseline,
    hosts: &[(&str, &HostCpu)],
    vms: &[RunningVm],
) -> BaselineChange {
    let mut change = BaselineChange::default();
    for vm in vms {
        let Some(has) = features_of(vm, hosts) else {
            change.unknown.push(vm.name.clone());
            continue;
        };
        let less: CpuFeatures = new.features.difference(&has).cloned().collect();
        let more: CpuFeatures = has.difference(&new.features).cloned().collect();
        for (list, features) in [(&mut change.behind, less), (&mut change.beyond, more)] {
            if !features.is_empty() {
                list.push(Unmet { name: vm.name.clone(), features });
            }
        }
    }
    let lacking = hosts
        .iter()
        .map(|(name, host)| Unmet { name: (*name).to_owned(), features: host.lacks_of(new) });
    change.out = lacking.filter(|unmet| !unmet.features.is_empty()).collect();
    change
}

fn features_of(vm: &RunningVm, hosts: &[(&str, &HostCpu)]) -> Option<CpuFeatures> {
    let model = CpuModel::parse(&vm.cpu_model);
    let own = hosts.iter().find(|(name, _)| *name == vm.host).map(|(_, host)| *host);
    if model.is_hosts_own() {
        let features = &own?.features;
        return Some(features.difference(&model.without).chain(&model.with).cloned().collect());
    }
    // Its own host's QEMU knows best.
    let others = hosts.iter().map(|(_, host)| *host);
    let on_paper = own.into_iter().chain(others).find_map(|host| host.features_of(&model))?;
    match own {
        // What was missing there the guest has not got.
        Some(host) if model.takes_what_there_is() => {
            Some(on_paper.intersection(&host.features).cloned().collect())
        }
        _ => Some(on_paper),
    }
}
