//! Limits of concurrent moves. Limits that were set at run time override the configuration; limits
//! of single hosts override both.

use std::collections::BTreeMap;

use godwit_api::control::{Change, HostMoves, LinkMoves, MoveLimits};
use godwit_planner::queue::{HostLimit, LINK_STEPS_BITS_PER_S, Limits, moves_at_once};

use super::{HostPlan, Inventory};

/// Limits set at run time. Where a field is none or a datastore is missing, the configuration
/// applies.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LimitsPlan {
    pub out_of_host: Option<u32>,
    pub into_host: Option<u32>,
    /// Limit of moves of VMs with disks on one datastore.
    pub per_datastore: Option<u32>,
    /// Limit of all moves in the cluster.
    pub in_all: Option<u32>,
    pub datastores: BTreeMap<String, u32>,
}

/// Limits without those set for single hosts at run time.
#[derive(Debug, Default)]
pub(crate) struct KnownLimits {
    configured: Limits,
    plan: LimitsPlan,
    /// What both together mean.
    resolved: Limits,
}

impl KnownLimits {
    fn resolve(&mut self) {
        let (mut limits, plan) = (self.configured.clone(), &self.plan);
        limits.in_all = plan.in_all.or(limits.in_all);
        limits.per_datastore = plan.per_datastore.unwrap_or(limits.per_datastore);
        limits.out_of_host = plan.out_of_host.or(limits.out_of_host);
        limits.into_host = plan.into_host.or(limits.into_host);
        limits.datastores.extend(plan.datastores.iter().map(|(path, most)| (path.clone(), *most)));
        self.resolved = limits;
    }
}

impl Inventory {
    /// Sets the limits of the manager's configuration.
    pub(crate) fn configure_limits(&mut self, limits: Limits) {
        self.limits.configured = limits;
        self.limits.resolve();
    }

    /// Sets the limits of the run time; none: removes them all.
    pub fn plan_limits(&mut self, plan: Option<LimitsPlan>) -> Option<Change> {
        let plan = plan.unwrap_or_default();
        if self.limits.plan == plan {
            return None;
        }
        self.limits.plan = plan;
        self.limits.resolve();
        Some(Change::Limits(Box::new(self.move_limits())))
    }

    /// Returns the limits set at run time.
    #[must_use]
    pub fn limits_plan(&self) -> &LimitsPlan {
        &self.limits.plan
    }

    /// Returns the limits of concurrent moves.
    #[must_use]
    pub fn limits(&self) -> Limits {
        let mut limits = self.limits.resolved.clone();
        let set = self.plans().filter_map(|(name, plan)| Some((name.to_owned(), own_limit(plan)?)));
        limits.hosts.extend(set);
        limits
    }

    /// Returns the limits of concurrent moves from a host and to it. For queries about very many
    /// hosts.
    pub(crate) fn host_limits(&self, host: &str) -> (u32, u32) {
        let plan = self.host_plan(host);
        let HostLimit { out, into } = plan.and_then(own_limit).unwrap_or_default();
        let (link, limits) = (plan.and_then(|plan| plan.link_bits_per_s), &self.limits.resolved);
        (
            out.unwrap_or_else(|| limits.out_of(host, link)),
            into.unwrap_or_else(|| limits.into_host(host, link)),
        )
    }

    /// Returns the limits of concurrent moves for the API.
    #[must_use]
    pub fn move_limits(&self) -> MoveLimits {
        let Limits { in_all, per_datastore, datastores, hosts, out_of_host, into_host } =
            self.limits();
        let hosts = hosts
            .into_iter()
            .map(|(name, HostLimit { out, into })| (name, HostMoves { out, into }));
        let steps = std::iter::once(None).chain(LINK_STEPS_BITS_PER_S.into_iter().map(Some));
        let by_link =
            steps.map(|bits_per_s| LinkMoves { bits_per_s, moves: moves_at_once(bits_per_s) });
        MoveLimits {
            out_of_host,
            into_host,
            per_datastore,
            in_all,
            datastores,
            hosts: hosts.collect(),
            by_link: by_link.collect(),
        }
    }
}

/// Returns the limit set for a host at run time.
fn own_limit(plan: &HostPlan) -> Option<HostLimit> {
    plan.most_moves.map(|most| HostLimit { out: Some(most), into: Some(most) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_set_at_run_time_override_the_configuration_and_those_of_hosts_override_both() {
        let mut inventory = Inventory::default();
        let own = |most_moves| HostPlan {
            most_moves,
            link_bits_per_s: Some(1_000_000_000),
            ..HostPlan::default()
        };
        inventory.plan_host("a", own(Some(7)));
        inventory.plan_host("b", own(None));
        inventory.plan_host("c", own(None));
        let configured =
            r#"{ "total": 9, "datastores": { "/slow": 3 }, "hosts": { "b": { "out": 1 } } }"#;
        inventory.configure_limits(serde_json::from_str(configured).unwrap());
        assert_eq!(
            ["a", "b", "c"].map(|host| inventory.host_limits(host)),
            [(7, 7), (1, 4), (4, 4)]
        );
        let datastores = BTreeMap::from([("/fast".to_owned(), 50)]);
        let plan = LimitsPlan {
            out_of_host: Some(2),
            in_all: Some(0),
            datastores,
            ..LimitsPlan::default()
        };
        assert!(matches!(inventory.plan_limits(Some(plan.clone())), Some(Change::Limits(_))));
        assert_eq!(inventory.plan_limits(Some(plan)), None);
        assert_eq!(
            ["a", "b", "c"].map(|host| inventory.host_limits(host)),
            [(7, 7), (1, 4), (2, 4)]
        );
        let limits = inventory.limits();
        for host in ["a", "b", "c"] {
            let link = inventory.host_plan(host).unwrap().link_bits_per_s;
            let at_once = (limits.out_of(host, link), limits.into_host(host, link));
            assert_eq!(at_once, inventory.host_limits(host), "{host}");
        }
        let shown = inventory.move_limits();
        assert_eq!((shown.in_all, shown.per_datastore, shown.out_of_host), (Some(0), 128, Some(2)));
        assert_eq!((shown.datastores["/slow"], shown.datastores["/fast"]), (3, 50));
        assert_eq!(shown.hosts["a"], HostMoves { out: Some(7), into: Some(7) });
        inventory.plan_limits(None);
        assert_eq!(
            (inventory.limits().in_all, inventory.move_limits().out_of_host),
            (Some(9), None)
        );
    }

    #[test]
    fn each_step_of_link_speed_allows_one_more_move() {
        let by_link = Inventory::default().move_limits().by_link;
        let moves: Vec<u32> = by_link.iter().skip(1).map(|step| step.moves).collect();
        assert_eq!(moves, [1, 2, 3, 4, 5, 6, 7, 8]);
        for step in by_link.iter().skip(2) {
            let below = moves_at_once(step.bits_per_s.map(|bits| bits - 1));
            assert_eq!(below + 1, step.moves, "{step:?}");
        }
    }
}
