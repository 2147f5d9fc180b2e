//! What is planned of the cluster as a whole: its CPU baseline, and rules about where VMs may be.

use std::collections::BTreeMap;

use godwit_api::control::{Change, Page, RuleInfo, RuleState};
use godwit_qemu::{Baseline, CpuFeatures};

use super::Inventory;
use super::select::{Cursor, page};
use crate::placement::Rule;
use crate::rules::told;

/// VMs by which a rule is broken that a list names.
const LISTED_BREAKERS: usize = 16;

/// Which rules.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct RuleFilter {
    /// A VM that they name.
    pub(crate) vm: Option<String>,
    /// Whether they are kept.
    pub(crate) state: Option<RuleState>,
}

/// What the store keeps of the cluster, as it is worked with.
#[derive(Debug, Default)]
pub(super) struct ClusterPlan {
    baseline: Option<Baseline>,
    rules: BTreeMap<String, Rule>,
}

impl Inventory {
    /// The CPU that guests of the cluster get; none: each has its own.
    #[must_use]
    pub fn baseline(&self) -> Option<&Baseline> {
        self.cluster.baseline.as_ref()
    }

    /// What QEMU's `-cpu` takes for a VM that names no model of its own: the cluster's baseline, with all its features and settings. None:
    /// there is none, and the host's default holds.
    #[must_use]
    pub fn guest_cpu_model(&self) -> Option<&str> {
        self.baseline().map(|baseline| baseline.cpu_model.as_str())
    }

    /// What a host lacks of the cluster's baseline, by what its agent told last. Empty: nothing, or there is no baseline. None: it has not
    /// told what CPU its guests can have, or it is not known.
    #[must_use]
    pub fn lacks_of_baseline(&self, host: &str) -> Option<CpuFeatures> {
        let cpu = self.host_info(host)?.cpu.as_ref()?;
        Some(self.baseline().map(|baseline| cpu.lacks_of(baseline)).unwrap_or_default())
    }

    /// Sets the CPU that guests of the cluster get.
    pub fn plan_baseline(&mut self, baseline: Option<Baseline>) {
        self.cluster.baseline = baseline;
    }

    /// Rules about where VMs may be, by name.
    #[must_use]
    pub fn rules(&self) -> Vec<Rule> {
        self.cluster.rules.values().cloned().collect()
    }

    /// One of them; none: there is none of that name.
    #[must_use]
    pub fn rule(&self, name: &str) -> Option<&Rule> {
        self.cluster.rules.get(name)
    }

    /// Those that a filter lets through, by name, a page at a time, each with the first of the VMs by which it is broken.
    pub(crate) fn rules_page(&self, filter: &RuleFilter, cursor: &Cursor) -> Page<RuleInfo> {
        let found = self.cluster.rules.iter().filter(|(_, rule)| {
            filter.vm.as_ref().is_none_or(|vm| rule.vms.contains(vm))
                && filter.state.is_none_or(|state| told(rule, self, 0).state == state)
        });
        page(found, cursor, |_, rule| told(rule, self, LISTED_BREAKERS))
    }

    /// Sets a rule; none: there is none of that name any more. A change, unless it was so before.
    pub(crate) fn plan_rule(&mut self, name: &str, rule: Option<Rule>) -> Option<Change> {
        match rule {
            Some(rule) => {
                let before = self.cluster.rules.insert(name.to_owned(), rule);
                let rule = self.cluster.rules.get(name).filter(|rule| before.as_ref() != Some(rule))?;
                Some(Change::Rule(Box::new(told(rule, self, LISTED_BREAKERS))))
            }
            None => self.cluster.rules.remove(name).map(|_| Change::RuleGone(name.to_owned())),
        }
    }
}

#[cfg(test)]
mod tests {
    use godwit_api::{HostEvent, HostInfo};
    use serde_json::json;

    use super::*;
    use crate::inventory::HostPlan;

    fn host(name: &str, features: &[&str]) -> HostInfo {
        let cpu = json!({
            "vendor": "GenuineIntel", "name": "Xeon", "accel": "kvm", "features": features, "models": ["Nehalem-v1", "max"],
            "generations": { "Nehalem-v1": { "features": ["lm", "pni"] } },
        });
        let info = json!({
            "name": name, "version": "0.5.0", "kernel": "6.18", "cpu": cpu, "memory_available_bytes": 0, "memory_committed_bytes": 0,
            "huge_pages": true, "migration_addresses": [], "networks": {}, "peers": {}, "vms": 0,
        });
        serde_json::from_value(info).unwrap()
    }

    #[test]
    fn a_host_that_has_told_its_cpu_meets_the_baseline_or_lacks_some_of_it() {
        let mut inventory = Inventory::default();
        for (name, features) in [("a", &["lm", "pni", "aes"][..]), ("b", &["lm", "pni"])] {
            inventory.plan_host(name, HostPlan::default());
            inventory.heard(name, HostEvent::Host(Box::new(host(name, features))), 1);
        }
        inventory.plan_host("silent", HostPlan::default());
        assert_eq!(inventory.guest_cpu_model(), None);
        assert_eq!(inventory.lacks_of_baseline("b"), Some(CpuFeatures::new()));
        let features = ["lm", "pni", "aes"].map(str::to_owned).into();
        inventory.plan_baseline(Some(Baseline { cpu_model: "Nehalem-v1,+aes".to_owned(), features }));
        assert_eq!(inventory.guest_cpu_model(), Some("Nehalem-v1,+aes"));
        assert_eq!(inventory.lacks_of_baseline("a"), Some(CpuFeatures::new()));
        assert_eq!(inventory.lacks_of_baseline("b"), Some(["aes".to_owned()].into()));
        assert_eq!(inventory.lacks_of_baseline("silent"), None);
        assert_eq!(inventory.lacks_of_baseline("nobody"), None);
    }
}
