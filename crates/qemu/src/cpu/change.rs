//! Effects of raising or lowering a cluster's baseline. Pure.
//!
//! A guest keeps the CPU with which it was started. A new baseline changes nothing for it until it
//! is stopped and started again. Until then it runs on, moves among the hosts that have its
//! features, and lacks the features that the new baseline would add.

use super::HostCpu;
use super::baseline::Baseline;
use super::features::CpuFeatures;
use super::model::CpuModel;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunningVm {
    pub name: String,
    /// The VM's `cpu_model`.
    pub cpu_model: String,
    /// The host on which it was started, for models that are host-specific.
    pub host: String,
}

/// A VM or a host, and the features concerned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unmet {
    pub name: String,
    pub features: CpuFeatures,
}

/// Effects of a new baseline.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BaselineChange {
    /// VMs with fewer features than the new baseline. They run on, and get it at their next start.
    pub behind: Vec<Unmet>,
    /// VMs with more features than the new baseline. Until their next start they cannot move to
    /// every host that satisfies it.
    pub beyond: Vec<Unmet>,
    /// VMs whose CPU model no host knows.
    pub unknown: Vec<String>,
    /// Hosts that do not satisfy the new baseline, with the features that they lack. No VM that
    /// starts with it can move there.
    pub out: Vec<Unmet>,
}

/// Compares the running VMs with a new baseline of the cluster.
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
    // The QEMU of its own host knows best.
    let others = hosts.iter().map(|(_, host)| *host);
    let on_paper = own.into_iter().chain(others).find_map(|host| host.features_of(&model))?;
    match own {
        // The guest has no feature that was missing there.
        Some(host) if model.takes_what_there_is() => {
            Some(on_paper.intersection(&host.features).cloned().collect())
        }
        _ => Some(on_paper),
    }
}
