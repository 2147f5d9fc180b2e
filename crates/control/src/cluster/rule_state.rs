//! State of a placement rule: kept, or broken by which VMs. It follows from the hosts' last
//! reports.
//! A VM that moves counts on the host where it runs, and on its target only once it runs there.

use std::collections::BTreeMap;

use godwit_api::control::{RuleBreaker, RuleHosts, RuleInfo, RuleKind, RuleState, RuleStrength};
use godwit_planner::placement::{self, Hosts, Rule, Strength};
use godwit_planner::words::Names;

use crate::cluster::inventory::Inventory;

/// Most other VMs that a reason names.
const NAMED_VMS: usize = 3;

/// Returns a rule and its state, with at most `most` of the VMs that break it.
pub(crate) fn rule_info(rule: &Rule, inventory: &Inventory, most: usize) -> RuleInfo {
    let mut places: BTreeMap<&str, &str> = BTreeMap::new();
    let mut absent = Vec::new();
    for vm in &rule.vms {
        match inventory.vm_info(vm) {
            Some(info) => drop(places.insert(vm, &info.host)),
            None => absent.push(vm.clone()),
        }
    }
    let mut broken_by = breakers(rule, &places, inventory);
    let broken_by_count = broken_by.len() as u64;
    broken_by.truncate(most);
    let (kind, hosts) = match &rule.kind {
        placement::RuleKind::Together => (RuleKind::Together, None),
        placement::RuleKind::Apart => (RuleKind::Apart, None),
        placement::RuleKind::On(hosts) => (RuleKind::On, Some(hosts)),
        placement::RuleKind::NotOn(hosts) => (RuleKind::NotOn, Some(hosts)),
    };
    RuleInfo {
        name: rule.name.clone(),
        kind,
        strength: match rule.strength {
            Strength::Must => RuleStrength::Must,
            Strength::Should => RuleStrength::Should,
        },
        vms: rule.vms.clone(),
        hosts: hosts.map(|Hosts { names, labels }| RuleHosts {
            names: names.clone(),
            labels: labels.clone(),
        }),
        state: if broken_by_count == 0 { RuleState::Kept } else { RuleState::Broken },
        broken_by_count,
        broken_by,
        absent,
    }
}

/// Returns the VMs that break a rule, by name. `places` has the host of each of the rule's VMs.
fn breakers(rule: &Rule, places: &BTreeMap<&str, &str>, inventory: &Inventory) -> Vec<RuleBreaker> {
    let means = |hosts: &Hosts, host: &str| {
        inventory.host_plan(host).is_some_and(|plan| hosts.mean(host, &plan.labels))
    };
    let broken = |vm: &str, host: &str, why: String| RuleBreaker {
        vm: vm.to_owned(),
        host: host.to_owned(),
        why,
    };
    let each = places.iter().map(|(vm, host)| (*vm, *host));
    match &rule.kind {
        placement::RuleKind::On(hosts) => each
            .filter(|(_, host)| !means(hosts, host))
            .map(|(vm, host)| {
                broken(vm, host, format!("on {host}, which is not one of the rule's hosts"))
            })
            .collect(),
        placement::RuleKind::NotOn(hosts) => each
            .filter(|(_, host)| means(hosts, host))
            .map(|(vm, host)| broken(vm, host, format!("on {host}, which the rule excludes")))
            .collect(),
        placement::RuleKind::Apart => {
            let at = by_host(places);
            let with = |vm: &str, host: &str| names(at[host].iter().filter(|other| **other != vm));
            each.filter(|(_, host)| at[host].len() > 1)
                .map(|(vm, host)| broken(vm, host, format!("on {host}, with {}", with(vm, host))))
                .collect()
        }
        placement::RuleKind::Together => {
            let at = by_host(places);
            // The host with most of the VMs counts as theirs; of equals, the first by name.
            let most = at.iter().rev().max_by_key(|(_, vms)| vms.len()).map(|(host, _)| *host);
            let Some(most) = most else { return Vec::new() };
            let there = names(at[most].iter());
            each.filter(|(_, host)| *host != most)
                .map(|(vm, host)| broken(vm, host, format!("on {host}, and {there} on {most}")))
                .collect()
        }
    }
}

fn by_host<'a>(places: &BTreeMap<&'a str, &'a str>) -> BTreeMap<&'a str, Vec<&'a str>> {
    let mut at: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for (vm, host) in places {
        at.entry(host).or_default().push(vm);
    }
    at
}

fn names<'a>(all: impl Iterator<Item = &'a &'a str> + Clone) -> String {
    let first: Vec<String> = all.clone().take(NAMED_VMS).map(|name| (*name).to_owned()).collect();
    Names(&first, all.count()).to_string()
}
