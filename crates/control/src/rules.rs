//! Placement rules, as operators define them. `godwit_planner::placement` applies them;
//! `cluster::rule_state` determines their present state.

pub(crate) mod http;
#[cfg(test)]
mod http_tests;
mod record;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::sync::Arc;

use godwit_api::control::{
    CreateRule, JournalKind, Page, Problem, ProblemCode, RuleHosts, RuleInfo, RuleKind,
    RuleStrength,
};
use godwit_planner::placement::{self, Hosts, Rule, Strength};

use crate::cluster::inventory::{Cursor, Inventory, RuleFilter};
use crate::cluster::names::check_name;
use crate::cluster::rule_state::rule_info;
use crate::cluster::state::State;
use crate::journal::entries::NewEntry;
use crate::storage::planning::Planning;

pub(crate) use record::{RULES, SavedRule};

/// Most rules of a cluster. Placement checks each rule for every host and every VM that the rule
/// names.
const MOST_RULES: usize = 1000;
/// Most VMs, and most hosts, that a rule names.
const MOST_NAMES: usize = 256;
/// Most labels that select hosts; a host has no more labels.
const MOST_LABELS: usize = 64;

/// Service for placement rules.
#[derive(Clone, Debug)]
pub(crate) struct Rules {
    state: Arc<State>,
    planning: Planning,
}

impl Rules {
    pub(crate) fn new(state: Arc<State>, planning: Planning) -> Rules {
        Rules { state, planning }
    }

    /// Creates a rule. VMs and hosts that it names may be created later.
    pub(crate) async fn create(&self, request: CreateRule) -> Result<RuleInfo, Problem> {
        let rule = read(request)?;
        let rules = self.clone();
        self.planning
            .change(|keeper| async move {
                check_beside_others(&rule, &rules.state.inventory().rules())?;
                let entry = noted(JournalKind::RuleCreated, &rule.name, "created");
                let saved = SavedRule::from(&rule);
                keeper.insert_with(keeper.noting(entry)?, RULES, &rule.name, &saved).await?;
                let name = rule.name.clone();
                rules.state.change(|inventory| inventory.plan_rule(&name, Some(rule)));
                rules.show(&name)
            })
            .await
    }

    /// Returns one rule, with every VM that breaks it.
    pub(crate) fn show(&self, name: &str) -> Result<RuleInfo, Problem> {
        let inventory = self.state.inventory();
        let rule = inventory.rule(name).ok_or_else(|| no_rule(name))?;
        Ok(rule_info(rule, &inventory, usize::MAX))
    }

    /// Returns a page of rules, by name.
    pub(crate) fn list(&self, filter: &RuleFilter, cursor: &Cursor) -> Page<RuleInfo> {
        self.state.inventory().rules_page(filter, cursor)
    }

    /// Deletes a rule. This moves no VM.
    pub(crate) async fn delete(&self, name: &str) -> Result<(), Problem> {
        let name = name.to_owned();
        let rules = self.clone();
        self.planning
            .change(|keeper| async move {
                if rules.state.inventory().rule(&name).is_none() {
                    return Err(no_rule(&name));
                }
                let entry = noted(JournalKind::RuleDeleted, &name, "deleted");
                keeper.remove_with(keeper.noting(entry)?, RULES, &name).await?;
                rules.state.change(|inventory: &mut Inventory| inventory.plan_rule(&name, None));
                Ok(())
            })
            .await
    }
}

/// Returns the entry of the journal about a change of a rule.
fn noted(kind: JournalKind, rule: &str, what: &str) -> NewEntry {
    NewEntry::info(kind, format!("rule {rule} was {what}")).about("rule", rule)
}

fn no_rule(name: &str) -> Problem {
    let detail = format!("no rule \"{name}\"");
    Problem::new(ProblemCode::NotFound, detail, "see `godwit control rule list`")
}

fn wrong(detail: impl Into<String>, remedy: impl Into<String>) -> Problem {
    Problem::new(ProblemCode::InvalidRequest, detail, remedy)
}

/// Converts a request to a rule of placement, unless it contradicts itself or has no effect.
fn read(request: CreateRule) -> Result<Rule, Problem> {
    let CreateRule { name, kind, strength, vms, hosts } = request;
    check_name(&name)?;
    check_names("VM", &vms)?;
    let kind = match kind {
        RuleKind::Together => placement::RuleKind::Together,
        RuleKind::Apart => placement::RuleKind::Apart,
        RuleKind::On => placement::RuleKind::On(read_hosts(kind, hosts.as_ref())?),
        RuleKind::NotOn => placement::RuleKind::NotOn(read_hosts(kind, hosts.as_ref())?),
    };
    if matches!(kind, placement::RuleKind::Together | placement::RuleKind::Apart) {
        if hosts.is_some() {
            let detail = "a rule of kind together or apart names no hosts";
            return Err(wrong(
                detail,
                "split it: this rule without hosts, and a rule of kind on or not-on",
            ));
        }
        if vms.len() < 2 {
            let detail = "a rule of kind together or apart needs at least two VMs";
            return Err(wrong(detail, "name another VM"));
        }
    } else if vms.is_empty() {
        return Err(wrong("the rule names no VM", "name the VMs that it applies to"));
    }
    let strength = match strength {
        RuleStrength::Must => Strength::Must,
        RuleStrength::Should => Strength::Should,
    };
    Ok(Rule { name, strength, kind, vms })
}

fn read_hosts(kind: RuleKind, hosts: Option<&RuleHosts>) -> Result<Hosts, Problem> {
    let hosts = hosts.filter(|hosts| !hosts.names.is_empty() || !hosts.labels.is_empty());
    let Some(RuleHosts { names, labels }) = hosts else {
        let detail = match kind {
            RuleKind::On => "the rule leaves no host for its VMs",
            _ => "the rule excludes no host for its VMs",
        };
        return Err(wrong(detail, "name hosts or their labels"));
    };
    check_names("host", names)?;
    if labels.len() > MOST_LABELS {
        return Err(wrong("too many labels", format!("use at most {MOST_LABELS}")));
    }
    if labels.contains_key("") {
        return Err(wrong("a label has no key", "add its key"));
    }
    Ok(Hosts { names: names.clone(), labels: labels.clone() })
}

/// Checks names of one kind: each must be valid and occur once.
fn check_names(what: &str, names: &[String]) -> Result<(), Problem> {
    if names.len() > MOST_NAMES {
        let detail = format!("the rule names {} {what}s", names.len());
        return Err(wrong(
            detail,
            format!("use at most {MOST_NAMES}; select hosts by a label, or create several rules"),
        ));
    }
    let mut seen = BTreeSet::new();
    for name in names {
        check_name(name).map_err(|problem| {
            wrong(format!("{what} {name:?}: {}", problem.detail), problem.remedy)
        })?;
        if !seen.insert(name) {
            return Err(wrong(format!("the rule names {what} {name} twice"), "name it once"));
        }
    }
    Ok(())
}

/// Checks that there is room for a rule and that no other rule contradicts it.
fn check_beside_others(rule: &Rule, others: &[Rule]) -> Result<(), Problem> {
    let others = others.iter().filter(|other| other.name != rule.name);
    if others.clone().count() >= MOST_RULES {
        return Err(wrong(format!("there are already {MOST_RULES} rules"), "delete unused rules"));
    }
    match others.into_iter().find_map(|other| Some((other, clash(rule, other)?))) {
        Some((other, why)) => {
            let detail = format!("rule {} contradicts rule {}: {why}", rule.name, other.name);
            Err(wrong(detail, "delete that rule first, or make this one a `should` rule"))
        }
        None => Ok(()),
    }
}

/// Returns why two `must` rules contradict each other. `None`: their definitions do not.
fn clash(one: &Rule, other: &Rule) -> Option<String> {
    use placement::RuleKind as K;
    if one.strength != Strength::Must || other.strength != Strength::Must {
        return None;
    }
    let mut shared = one.vms.iter().filter(|vm| other.vms.contains(vm));
    let first = shared.next()?;
    match (&one.kind, &other.kind) {
        (K::Together, K::Apart) | (K::Apart, K::Together) => {
            let second = shared.next()?;
            Some(format!("{first} and {second} would have to be together and apart"))
        }
        (K::On(on), K::NotOn(not_on)) | (K::NotOn(not_on), K::On(on)) => {
            let is_forbidden =
                on.labels.is_empty() && on.names.iter().all(|name| not_on.names.contains(name));
            is_forbidden.then(|| format!("it leaves {first} no host"))
        }
        (K::On(on), K::On(also)) => {
            let are_named = on.labels.is_empty() && also.labels.is_empty();
            let has_none = !on.names.iter().any(|name| also.names.contains(name));
            (are_named && has_none).then(|| format!("they leave {first} no host"))
        }
        _ => None,
    }
}
