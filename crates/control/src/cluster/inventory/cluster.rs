//! What is planned of the cluster as a whole: its CPU baseline, and rules about where VMs may be.

use std::collections::BTreeMap;

use godwit_api::control::{Change, CpuBaseline, Page, RuleInfo, RuleState};
use godwit_planner::placement::Rule;
use godwit_qemu::{Baseline, CpuFeatures, PsabiLevel};

use super::Inventory;
use super::select::{Cursor, page};
use crate::cluster::rule_state::told;

/// VMs by which a rule is broken that a list names.
const LISTED_BREAKERS: usize = 16;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct RuleFilter {
    /// A VM that they name.
    pub(crate) vm: Option<String>,
    /// Whether they are kept.
    pub(crate) state: Option<RuleState>,
}

/// The CPU that guests of the cluster get, and how it came to be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BaselinePlan {
    /// The CPU.
    pub baseline: Baseline,
    /// What was asked for: a name, or `computed`.
    pub asked: String,
    /// Hosts that may fall short of it.
    pub without: Vec<String>,
    /// When it was set.
    pub set_unix_ms: u64,
    pub set_by: String,
}

impl BaselinePlan {
    pub(crate) fn told(&self) -> CpuBaseline {
        CpuBaseline {
            cpu_model: self.baseline.cpu_model.clone(),
            features: self.baseline.features.clone(),
            level: PsabiLevel::of(&self.baseline.features).map(|level| level.name().to_owned()),
            asked: self.asked.clone(),
            without: self.without.clone(),
            set_unix_ms: self.set_unix_ms,
            set_by: self.set_by.clone(),
        }
    }
}

/// What the store keeps of the cluster, as it is worked with.
#[derive(Debug, Default)]
pub(crate) struct ClusterPlan {
    baseline: Option<BaselinePlan>,
    rules: BTreeMap<String, Rule>,
}

impl ClusterPlan {
    pub(crate) fn baseline(&self) -> Option<&Baseline> {
        self.baseline.as_ref().map(|plan| &plan.baseline)
    }
}

impl Inventory {
    /// The CPU that guests of the cluster get; none: each has its own.
    #[must_use]
    pub fn baseline(&self) -> Option<&Baseline> {
        self.cluster.baseline()
    }

    /// Returns it with its origin.
    #[must_use]
    pub fn baseline_plan(&self) -> Option<&BaselinePlan> {
        self.cluster.baseline.as_ref()
    }

    /// What QEMU's `-cpu` takes for a VM that names no model of its own: the cluster's baseline,
    /// with all its features and settings. None:
    /// there is none, and the host's default holds.
    #[must_use]
    pub fn guest_cpu_model(&self) -> Option<&str> {
        self.baseline().map(|baseline| baseline.cpu_model.as_str())
    }

    /// What a host lacks of the cluster's baseline, by what its agent told last. Empty: nothing, or
    /// there is no baseline. None: it has not
    /// told what CPU its guests can have, or it is not known.
    #[must_use]
    pub fn lacks_of_baseline(&self, host: &str) -> Option<CpuFeatures> {
        let host = self.hosts.get(host)?;
        host.info.as_ref()?.cpu.as_ref()?;
        Some(host.lacks.clone())
    }

    /// Sets the CPU that guests of the cluster get. Hosts that fall short of it otherwise than
    /// before are told.
    pub fn plan_baseline(&mut self, plan: Option<BaselinePlan>) -> Vec<Change> {
        if self.cluster.baseline == plan {
            return Vec::new();
        }
        let mut changes = vec![match &plan {
            Some(plan) => Change::CpuBaseline(Box::new(plan.told())),
            None => Change::CpuBaselineGone,
        }];
        self.cluster.baseline = plan;
        let baseline = self.cluster.baseline();
        for (name, host) in &mut self.hosts {
            if host.compare(baseline) {
                changes.push(Change::Host(Box::new(host.summary(name))));
            }
        }
        changes
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

    /// Those that a filter lets through, by name, a page at a time, each with the first of the VMs
    /// by which it is broken.
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
                let rule =
                    self.cluster.rules.get(name).filter(|rule| before.as_ref() != Some(rule))?;
                Some(Change::Rule(Box::new(told(rule, self, LISTED_BREAKERS))))
            }
            None => self.cluster.rules.remove(name).map(|_| Change::RuleGone(name.to_owned())),
        }
    }
}

#[cfg(test)]
mod tests {
    use godwit_api::HostEvent;

    use super::*;
    use crate::rig::{baseline, cpu, host, put_host};

    #[test]
    fn a_host_that_has_told_its_cpu_meets_the_baseline_or_lacks_some_of_it() {
        let mut inventory = Inventory::default();
        put_host(&mut inventory, host("a", Some(&cpu(&["aes"]))), &[], vec![]);
        put_host(&mut inventory, host("b", Some(&cpu(&[]))), &[], vec![]);
        put_host(&mut inventory, host("silent", None), &[], vec![]);
        assert_eq!(inventory.guest_cpu_model(), None);
        assert_eq!(inventory.lacks_of_baseline("b"), Some(CpuFeatures::new()));
        let changes = inventory.plan_baseline(Some(baseline("Nehalem-v1,+aes", &["aes"])));
        // Of the hosts only the one is told that is no longer as it was.
        let [Change::CpuBaseline(set), Change::Host(short)] = &changes[..] else {
            panic!("{changes:?}")
        };
        assert_eq!((set.cpu_model.as_str(), short.name.as_str()), ("Nehalem-v1,+aes", "b"));
        assert_eq!(inventory.guest_cpu_model(), Some("Nehalem-v1,+aes"));
        assert_eq!(inventory.lacks_of_baseline("a"), Some(CpuFeatures::new()));
        assert_eq!(inventory.lacks_of_baseline("b"), Some(["aes".to_owned()].into()));
        assert_eq!(inventory.lacks_of_baseline("silent"), None);
        assert_eq!(inventory.lacks_of_baseline("nobody"), None);
        let again = inventory.plan_baseline(Some(baseline("Nehalem-v1,+aes", &["aes"])));
        assert_eq!(again, []);
        // A host whose agent tells another CPU, as after an update, is judged anew.
        inventory.heard("b", HostEvent::Host(Box::new(host("b", Some(&cpu(&["aes"]))))), 2);
        assert!(inventory.host_summary("b").unwrap().lacks_of_baseline.is_empty());
        inventory.heard("silent", HostEvent::Host(Box::new(host("silent", Some(&cpu(&[]))))), 2);
        assert_eq!(
            inventory.host_summary("silent").unwrap().lacks_of_baseline,
            ["aes".to_owned()].into()
        );
        let cleared = inventory.plan_baseline(None);
        assert_eq!((&cleared[0], cleared.len()), (&Change::CpuBaselineGone, 2));
    }
}
