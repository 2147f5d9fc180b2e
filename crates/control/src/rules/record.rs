//! Saved form of a rule.

use std::collections::{BTreeMap, BTreeSet};

use godwit_planner::placement::{Hosts, Rule, RuleKind, Strength};
use godwit_store::records::{Record, Table};
use serde::{Deserialize, Serialize};

use crate::cluster::state::State;
use crate::storage::planned::Planned;

pub(crate) const RULES: Table<SavedRule> = Table::new();

/// A rule; its ID is its name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SavedRule {
    strength: SavedStrength,
    kind: SavedKind,
    vms: Vec<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum SavedStrength {
    Must,
    Should,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum SavedKind {
    Together,
    Apart,
    On(SavedHosts),
    NotOn(SavedHosts),
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct SavedHosts {
    names: Vec<String>,
    labels: BTreeMap<String, String>,
}

impl Record for SavedRule {
    const KIND: &'static str = "rule";
    const PREFIX: &'static str = "rules/";
    const VERSION: u32 = 1;
}

impl From<&Rule> for SavedRule {
    fn from(rule: &Rule) -> SavedRule {
        let hosts =
            |hosts: &Hosts| SavedHosts { names: hosts.names.clone(), labels: hosts.labels.clone() };
        let kind = match &rule.kind {
            RuleKind::Together => SavedKind::Together,
            RuleKind::Apart => SavedKind::Apart,
            RuleKind::On(on) => SavedKind::On(hosts(on)),
            RuleKind::NotOn(not_on) => SavedKind::NotOn(hosts(not_on)),
        };
        let strength = match rule.strength {
            Strength::Must => SavedStrength::Must,
            Strength::Should => SavedStrength::Should,
        };
        SavedRule { strength, kind, vms: rule.vms.clone() }
    }
}

impl SavedRule {
    pub(crate) fn rule(self, name: &str) -> Rule {
        let hosts = |SavedHosts { names, labels }: SavedHosts| Hosts { names, labels };
        let kind = match self.kind {
            SavedKind::Together => RuleKind::Together,
            SavedKind::Apart => RuleKind::Apart,
            SavedKind::On(on) => RuleKind::On(hosts(on)),
            SavedKind::NotOn(not_on) => RuleKind::NotOn(hosts(not_on)),
        };
        let strength = match self.strength {
            SavedStrength::Must => Strength::Must,
            SavedStrength::Should => Strength::Should,
        };
        Rule { name: name.to_owned(), strength, kind, vms: self.vms }
    }
}

impl Planned<State> for SavedRule {
    fn known(state: &State) -> BTreeSet<String> {
        state.inventory().rules().into_iter().map(|rule| rule.name).collect()
    }

    fn set(state: &State, id: &str, record: Option<SavedRule>) {
        let rule = record.map(|saved| saved.rule(id));
        state.change(|inventory| inventory.plan_rule(id, rule));
    }
}
