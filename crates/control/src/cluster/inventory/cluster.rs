//! Plans of the cluster as a whole: its CPU baseline and its placement rules.

use std::collections::BTreeMap;

use godwit_api::control::{Change, CpuBaseline, Page, RuleInfo, RuleState};
use godwit_planner::placement::Rule;
use godwit_qemu::{Baseline, CpuFeatures, PsabiLevel};

use super::Inventory;
use super::select::{Cursor, page};
use crate::cluster::rule_state::rule_info;

/// Most VMs that a list names as breaking a rule.
const LISTED_BREAKERS: usize = 16;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct RuleFilter {
    /// VM that the rules name.
    pub(crate) vm: Option<String>,
    /// Whether the rules are kept.
    pub(crate) state: Option<RuleState>,
}

/// CPU baseline of the cluster, and how it was set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BaselinePlan {
    pub baseline: Baseline,
    /// Requested baseline: a name, or `computed`.
    pub asked: String,
    /// Hosts that may lack features of the baseline.
    pub without: Vec<String>,
    pub set_unix_ms: u64,
    pub set_by: String,
}

impl BaselinePlan {
    pub(crate) fn info(&self) -> CpuBaseline {
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

/// Baseline and rules, which the store keeps.
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
    /// Returns the cluster's CPU baseline; none: each VM has the CPU of its host or specification.
    #[must_use]
    pub fn baseline(&self) -> Option<&Baseline> {
        self.cluster.baseline()
    }

    /// Returns the cluster's CPU baseline, and how it was set.
    #[must_use]
    pub fn baseline_plan(&self) -> Option<&BaselinePlan> {
        self.cluster.baseline.as_ref()
    }

    /// Returns the argument of QEMU's `-cpu` for a VM that names no model: the cluster's baseline
    /// with all its features and settings. None: without a baseline, the host's default applies.
    #[must_use]
    pub fn guest_cpu_model(&self) -> Option<&str> {
        self.baseline().map(|baseline| baseline.cpu_model.as_str())
    }

    /// Returns the features of the cluster's baseline that a host lacks, according to its agent's
    /// last report. Empty: it lacks nothing, or there is no baseline. None: the host is unknown or
    /// has not reported which CPU its guests can have.
    #[must_use]
    pub fn lacks_of_baseline(&self, host: &str) -> Option<CpuFeatures> {
        let host = self.hosts.get(host)?;
        host.info.as_ref()?.cpu.as_ref()?;
        Some(host.lacks.clone())
    }

    /// Sets the cluster's CPU baseline. The changes include the hosts whose missing features differ
    /// from before.
    pub fn plan_baseline(&mut self, plan: Option<BaselinePlan>) -> Vec<Change> {
        if self.cluster.baseline == plan {
            return Vec::new();
        }
        let mut changes = vec![match &plan {
            Some(plan) => Change::CpuBaseline(Box::new(plan.info())),
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

    /// Returns the placement rules, by name.
    #[must_use]
    pub fn rules(&self) -> Vec<Rule> {
        self.cluster.rules.values().cloned().collect()
    }

    /// Returns a placement rule; none: unknown rule.
    #[must_use]
    pub fn rule(&self, name: &str) -> Option<&Rule> {
        self.cluster.rules.get(name)
    }

    /// Returns a page of the rules that match a filter, by name. Each has the first
    /// [`LISTED_BREAKERS`] of the VMs that break it.
    pub(crate) fn rules_page(&self, filter: &RuleFilter, cursor: &Cursor) -> Page<RuleInfo> {
        let found = self.cluster.rules.iter().filter(|(_, rule)| {
            filter.vm.as_ref().is_none_or(|vm| rule.vms.contains(vm))
                && filter.state.is_none_or(|state| rule_info(rule, self, 0).state == state)
        });
        page(found, cursor, |_, rule| rule_info(rule, self, LISTED_BREAKERS))
    }

    /// Sets or removes a rule. Returns the change, unless the rule is the same as before.
    pub(crate) fn plan_rule(&mut self, name: &str, rule: Option<Rule>) -> Option<Change> {
        match rule {
            Some(rule) => {
                let before = self.cluster.rules.insert(name.to_owned(), rule);
                let rule =
                    self.cluster.rules.get(name).filter(|rule| before.as_ref() != Some(rule))?;
                Some(Change::Rule(Box::new(rule_info(rule, self, LISTED_BREAKERS))))
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
    fn a_host_that_reports_its_cpu_meets_the_baseline_or_lacks_features() {
        let mut inventory = Inventory::default();
        put_host(&mut inventory, host("a", Some(&cpu(&["aes"]))), &[], vec![]);
        put_host(&mut inventory, host("b", Some(&cpu(&[]))), &[], vec![]);
        put_host(&mut inventory, host("silent", None), &[], vec![]);
        assert_eq!(inventory.guest_cpu_model(), None);
        assert_eq!(inventory.lacks_of_baseline("b"), Some(CpuFeatures::new()));
        let changes = inventory.plan_baseline(Some(baseline("Nehalem-v1,+aes", &["aes"])));
        // Of the hosts, only the one that has changed is published.
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
        // A host that reports another CPU, as after an update, is compared again.
        inventory.apply("b", HostEvent::Host(Box::new(host("b", Some(&cpu(&["aes"]))))), 2);
        assert!(inventory.host_summary("b").unwrap().lacks_of_baseline.is_empty());
        inventory.apply("silent", HostEvent::Host(Box::new(host("silent", Some(&cpu(&[]))))), 2);
        assert_eq!(
            inventory.host_summary("silent").unwrap().lacks_of_baseline,
            ["aes".to_owned()].into()
        );
        let cleared = inventory.plan_baseline(None);
        assert_eq!((&cleared[0], cleared.len()), (&Change::CpuBaselineGone, 2));
    }
}
