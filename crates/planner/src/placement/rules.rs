//! Rules that a host would break for a VM.

use std::collections::HashMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use super::candidates::{Host, Rule, RuleKind, Strength};
use crate::words::Names;

/// How a host breaks a rule.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "breach", rename_all = "kebab-case")]
#[allow(missing_docs, reason = "the variants say what their fields are")]
pub enum RuleBreach {
    /// The VM must be with VMs that are on other hosts.
    NotWith { rule: String, vms: Vec<String>, hosts: Vec<String> },
    /// The VM must not be with a VM that is there.
    With { rule: String, vm: String },
    /// The VM must be on other hosts.
    NotAllowed { rule: String },
    /// The VM must not be there.
    Forbidden { rule: String },
}

impl fmt::Display for RuleBreach {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RuleBreach::NotWith { rule, vms, hosts } => {
                let (vms, hosts) = (Names(vms, vms.len()), Names(hosts, hosts.len()));
                write!(f, "rule {rule}: it must be with {vms}, on {hosts}")
            }
            RuleBreach::With { rule, vm } => {
                write!(f, "rule {rule}: it must not be with {vm}, which is there")
            }
            RuleBreach::NotAllowed { rule } => write!(f, "rule {rule}: it must be on other hosts"),
            RuleBreach::Forbidden { rule } => write!(f, "rule {rule}: it must not be there"),
        }
    }
}

/// The hosts of each VM: one, two while it moves, or the planned one.
pub(super) type Places<'a> = HashMap<&'a str, Vec<usize>>;

/// The rules of one VM, looked up once and checked for each host.
pub(super) struct RulesOfVm<'r> {
    all: Vec<(&'r Rule, Partners<'r>)>,
}

/// The other VMs of a rule, with their hosts.
struct Partners<'r>(Vec<(&'r str, Vec<usize>)>);

impl<'r> RulesOfVm<'r> {
    /// Looks up the rules of a VM. VMs that are `leaving` with it do not restrict it: they come
    /// along, or stay on the host that it leaves.
    pub(super) fn new(
        rules: impl Iterator<Item = &'r Rule>,
        vm: &str,
        places: &Places<'_>,
        leaving: &dyn Fn(&str) -> bool,
    ) -> Self {
        let of = |rule: &'r Rule| {
            let others = rule.vms.iter().filter(|other| *other != vm);
            let placed = others.filter_map(|other| {
                let hosts = places.get(other.as_str()).filter(|hosts| !hosts.is_empty())?;
                let bound = !(rule.kind == RuleKind::Together && leaving(other));
                bound.then(|| (other.as_str(), hosts.clone()))
            });
            (rule, Partners(placed.collect()))
        };
        RulesOfVm { all: rules.map(of).collect() }
    }

    /// Whether a host breaks no `must` rule.
    pub(super) fn allow(&self, host: &Host, index: usize) -> bool {
        let mut musts = self.all.iter().filter(|(rule, _)| rule.strength == Strength::Must);
        musts.all(|(rule, partners)| !is_broken(rule, partners, host, index))
    }

    /// Returns the `should` rules that a host breaks.
    pub(super) fn should_broken(
        &self,
        host: &Host,
        index: usize,
    ) -> impl Iterator<Item = &'r Rule> {
        let shoulds = self.all.iter().filter(|(rule, _)| rule.strength == Strength::Should);
        shoulds
            .filter(move |(rule, partners)| is_broken(rule, partners, host, index))
            .map(|(rule, _)| *rule)
    }

    /// Returns the `must` rules that a host breaks, and how.
    pub(super) fn must_breaches(
        &self,
        host: &Host,
        index: usize,
        hosts: &[Host],
    ) -> Vec<RuleBreach> {
        let musts = self.all.iter().filter(|(rule, _)| rule.strength == Strength::Must);
        let broken = musts.filter(|(rule, partners)| is_broken(rule, partners, host, index));
        broken.map(|(rule, partners)| breach(rule, partners, index, hosts)).collect()
    }
}

fn is_broken(rule: &Rule, Partners(partners): &Partners<'_>, host: &Host, index: usize) -> bool {
    match &rule.kind {
        RuleKind::Together => partners.iter().any(|(_, hosts)| !hosts.contains(&index)),
        RuleKind::Apart => partners.iter().any(|(_, hosts)| hosts.contains(&index)),
        RuleKind::On(hosts) => !hosts.contains(host),
        RuleKind::NotOn(hosts) => hosts.contains(host),
    }
}

fn breach(
    rule: &Rule,
    Partners(partners): &Partners<'_>,
    index: usize,
    hosts: &[Host],
) -> RuleBreach {
    let name = rule.name.clone();
    match &rule.kind {
        RuleKind::On(_) => RuleBreach::NotAllowed { rule: name },
        RuleKind::NotOn(_) => RuleBreach::Forbidden { rule: name },
        RuleKind::Apart => {
            let there = partners.iter().find(|(_, hosts)| hosts.contains(&index));
            let vm = there.map(|(vm, _)| (*vm).to_owned()).unwrap_or_default();
            RuleBreach::With { rule: name, vm }
        }
        RuleKind::Together => {
            let elsewhere = partners.iter().filter(|(_, hosts)| !hosts.contains(&index));
            let (mut vms, mut on) = (Vec::new(), Vec::new());
            for (vm, places) in elsewhere {
                vms.push((*vm).to_owned());
                on.extend(places.iter().map(|place| hosts[*place].facts.name.clone()));
            }
            on.sort_unstable();
            on.dedup();
            RuleBreach::NotWith { rule: name, vms, hosts: on }
        }
    }
}
