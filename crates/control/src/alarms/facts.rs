//! What the manager knows about hosts, VMs, rules, datastores, certificates and moves, as facts for
//! the decision about alarms. Texts from other machines become one short line.

use std::collections::BTreeMap;

use godwit_api::VmState;
use godwit_api::control::{ManagedDatastore, Move, MoveState, PlannedPower, Problem, RuleState};
use godwit_pki::describe;
use godwit_planner::alarms::{
    AlarmFacts, CertificateFacts, DatastoreFacts, HaFacts, HostFacts, MoveFacts, MoveMark,
    RuleFacts, VmFacts, VmPower,
};
use godwit_planner::placement::Strength;

use super::{AlarmSetup, Means, OwnCertificate, one_line};
use crate::access::certificates::ends_of_hosts;
use crate::cluster::inventory::Inventory;
use crate::cluster::rule_state::rule_info;
use crate::cluster::text::beginning;

/// Longest reason in an alarm, bytes.
const MOST_REASON_BYTES: usize = 200;

/// Longest text about the high availability, bytes.
const MOST_HA_BYTES: usize = 500;

/// Collects the facts, without a question to a host or the store.
pub(super) fn collect(means: &Means, certificates: &[CertificateFacts]) -> AlarmFacts {
    let moves = moves(means.moves.all().open());
    let inventory = means.state.inventory();
    let is_known = |one: &&CertificateFacts| {
        let host = one.object.strip_prefix("host:");
        host.is_none_or(|host| inventory.host_state(host).is_some())
    };
    AlarmFacts {
        hosts: hosts(&inventory),
        vms: vms(&inventory),
        rules: rules(&inventory),
        datastores: datastores(&inventory),
        certificates: certificates.iter().filter(is_known).cloned().collect(),
        moves,
        ha: ha(means),
    }
}

/// Returns the troubles of the high availability; their texts may have words of hosts.
fn ha(means: &Means) -> Vec<HaFacts> {
    let short =
        |one: HaFacts| HaFacts { text: beginning(&one_line(&one.text), MOST_HA_BYTES), ..one };
    means.troubles.all().into_iter().map(short).collect()
}

fn hosts(inventory: &Inventory) -> Vec<HostFacts> {
    let outside = inventory.plans().filter(|(_, plan)| !plan.maintenance);
    let facts = outside.map(|(name, _)| {
        let summary = inventory.host_summary(name);
        let reason = summary.as_ref().and_then(|summary| summary.reason.as_deref());
        HostFacts {
            name: name.to_owned(),
            is_up: inventory.is_up(name),
            reason: reason.map(|reason| beginning(&one_line(reason), MOST_REASON_BYTES)),
            vms: summary.as_ref().map_or(0, |summary| summary.vms),
        }
    });
    facts.collect()
}

/// Returns the VMs that the manager was asked to run, and those of other origin that have failed.
fn vms(inventory: &Inventory) -> Vec<VmFacts> {
    let are_all_up = inventory.unreachable_host().is_none();
    let should_run =
        |name: &&str| inventory.vm_plan(name).is_some_and(|plan| plan.power == PlannedPower::On);
    let planned = inventory.planned_vms().filter(should_run);
    let failed = inventory
        .all_vms()
        .filter(|info| info.state == VmState::Failed && inventory.vm_plan(&info.name).is_none());
    let names = planned.chain(failed.map(|info| info.name.as_str()));
    let facts = names
        .map(|name| VmFacts { name: name.to_owned(), power: power(inventory, name, are_all_up) });
    facts.collect()
}

fn power(inventory: &Inventory, vm: &str, are_all_up: bool) -> VmPower {
    match inventory.vm_info(vm) {
        None if are_all_up => VmPower::Missing,
        None => VmPower::Unknown,
        Some(info) if !inventory.is_up(&info.host) => VmPower::Unknown,
        Some(info) if matches!(info.state, VmState::Stopped | VmState::Failed) => {
            VmPower::Down { host: info.host.clone(), state: info.state.name().to_owned() }
        }
        Some(_) => VmPower::Runs,
    }
}

fn rules(inventory: &Inventory) -> Vec<RuleFacts> {
    let are_all_up = inventory.unreachable_host().is_none();
    let rules = inventory.rules();
    let mandatory = rules.iter().filter(|rule| rule.strength == Strength::Must);
    let facts = mandatory.map(|rule| {
        let info = rule_info(rule, inventory, 1);
        let first = info.broken_by.first().filter(|_| info.state == RuleState::Broken);
        RuleFacts {
            name: info.name.clone(),
            broken: first.map(|breaker| format!("VM {} is {}", breaker.vm, breaker.why)),
            breakers: info.broken_by_count,
            is_unsure: !are_all_up && !info.absent.is_empty(),
        }
    });
    facts.collect()
}

fn datastores(inventory: &Inventory) -> Vec<DatastoreFacts> {
    let all = inventory.all_datastores();
    let mut times = BTreeMap::<&str, u32>::new();
    for one in &all {
        *times.entry(&one.name).or_default() += 1;
    }
    let with_hosts = all.iter().filter(|one| !one.hosts.is_empty());
    let facts = with_hosts.map(|one| {
        let is_unique = times.get(one.name.as_str()) == Some(&1);
        let name = if is_unique { &one.name } else { &one.id };
        DatastoreFacts { name: one_line(name), space: space(one) }
    });
    facts.collect()
}

/// Returns total and free bytes, as the reachable hosts report them.
fn space(one: &ManagedDatastore) -> Option<(u64, u64)> {
    let current = one.hosts.iter().filter(|at| at.is_current);
    let total = current.clone().filter_map(|at| at.total_bytes).max()?;
    Some((total, current.filter_map(|at| at.free_bytes).min()?))
}

fn moves<'a>(open: impl Iterator<Item = &'a Move>) -> Vec<MoveFacts> {
    let begun = open.filter(|one| matches!(one.state, MoveState::Starting | MoveState::Running));
    let facts = begun.map(|one| {
        let progress = one.progress.as_ref();
        let disks = progress.and_then(|progress| progress.disks.as_ref());
        MoveFacts {
            id: one.id.clone(),
            vm: one.vm.clone(),
            from: one.from.clone(),
            to: one.to.clone().unwrap_or_else(|| "a host not chosen yet".to_owned()),
            mark: MoveMark {
                attempts: one.attempts,
                is_running: one.state == MoveState::Running,
                round: progress.map_or(0, |progress| progress.round),
                sent_bytes: progress.map_or(0, |progress| progress.sent_bytes),
                remaining_bytes: progress.map_or(0, |progress| progress.remaining_bytes),
                disk_bytes: disks.map_or(0, |disks| disks.sent_bytes),
            },
        }
    });
    facts.collect()
}

/// Reads when certificates end: those of hosts from the store, the leader's own from their files.
pub(super) async fn certificates(means: &Means) -> Result<Vec<CertificateFacts>, Problem> {
    let hosts = ends_of_hosts(&means.keeper).await?.into_iter().map(|(host, ends_unix_ms)| {
        CertificateFacts {
            object: format!("host:{host}"),
            what: format!("the certificate of host {host}"),
            ends_unix_ms,
            remedy: format!(
                "renew it, or let the host join again if it has joined: docs/recover.md, \
                \"A certificate expires\" (host {host})"
            ),
        }
    });
    let own = means.setup.get().map(AlarmSetup::own_certificates).unwrap_or_default();
    let own = own.to_vec();
    let manager = means.keeper.candidate().name.clone();
    let read = tokio::task::spawn_blocking(move || own_certificates(&manager, &own));
    Ok(hosts.chain(read.await.unwrap_or_default()).collect())
}

fn own_certificates(manager: &str, own: &[OwnCertificate]) -> Vec<CertificateFacts> {
    let facts = own.iter().filter_map(|OwnCertificate { what, path }| {
        let described = describe(path);
        if let Err(error) = &described {
            tracing::warn!(%error, "cannot read when a certificate ends");
        }
        let ends_unix_s = described.ok()?.not_after.unix_timestamp();
        Some(CertificateFacts {
            object: format!("manager:{manager}"),
            what: format!("{what} of manager {manager}"),
            ends_unix_ms: u64::try_from(ends_unix_s).unwrap_or(0).saturating_mul(1000),
            remedy: "issue another with `godwit pki`, and restart the manager".to_owned(),
        })
    });
    facts.collect()
}

#[cfg(test)]
mod tests {
    use godwit_types::Progress;
    use serde_json::json;

    use super::*;

    fn one(state: &str, sent_bytes: u64) -> Move {
        let moved = json!({
            "id": "v1", "vm": "web", "from": "a", "to": "b", "state": state,
            "priority": "normal", "asked_by": "ana", "asked_unix_ms": 1, "attempts": 2
        });
        let progress = Progress { sent_bytes, ..Progress::begin(1 << 30) };
        Move { progress: Some(progress), ..serde_json::from_value(moved).unwrap() }
    }

    #[test]
    fn a_move_that_sends_has_another_mark_and_one_that_waits_has_none() {
        let mark = |one: &Move| moves(std::iter::once(one)).pop().map(|facts| facts.mark);
        let first = mark(&one("running", 1));
        assert_eq!(first, mark(&one("running", 1)));
        assert_ne!(first, mark(&one("running", 2)));
        assert_ne!(first, mark(&one("starting", 1)));
        assert_eq!(mark(&one("waiting", 1)), None);
    }
}
