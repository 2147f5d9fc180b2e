//! What is planned of the cluster as a whole: its CPU baseline, and rules about where VMs may be.

use std::collections::BTreeMap;

use godwit_qemu::Baseline;

use super::Inventory;
use crate::placement::Rule;

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

    /// Sets a rule; none: there is none of that name any more.
    pub fn plan_rule(&mut self, name: &str, rule: Option<Rule>) {
        match rule {
            Some(rule) => drop(self.cluster.rules.insert(name.to_owned(), rule)),
            None => drop(self.cluster.rules.remove(name)),
        }
    }
}
