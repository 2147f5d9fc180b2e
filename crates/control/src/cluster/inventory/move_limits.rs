//! Limits of concurrent moves. Limits that were set at run time override the configuration; limits
//! of single hosts override both.

use std::collections::BTreeMap;

use godwit_api::control::{Change, HostMoves, LinkMoves, MoveLimits};
use godwit_planner::queue::{HostLimit, Limits, moves_at_once};

use super::Inventory;

/// Speeds of a link from which it can carry one more concurrent move (docs/queue.md).
const STEPS_BITS_PER_S: [u64; 8] = [
    100_000_000,
    500_000_000,
    750_000_000,
    1_000_000_000,
    1_780_000_000,
    3_170_000_000,
    5_630_000_000,
    10_000_000_000,
];

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

/// Limits from the configuration, and those set at run time.
#[derive(Debug, Default)]
pub(crate) struct KnownLimits {
    configured: Limits,
    plan: LimitsPlan,
}

impl Inventory {
    /// Sets the limits of the manager's configuration.
    pub(crate) fn configure_limits(&mut self, limits: Limits) {
        self.limits.configured = limits;
    }

    /// Sets the limits of the run time; none: removes them all.
    pub fn plan_limits(&mut self, plan: Option<LimitsPlan>) -> Option<Change> {
        let plan = plan.unwrap_or_default();
        if self.limits.plan == plan {
            return None;
        }
        self.limits.plan = plan;
        Some(Change::Limits(Box::new(self.move_limits())))
    }

    /// Returns the limits set at run time.
    #[must_use]
    pub fn limits_plan(&self) -> &LimitsPlan {
        &self.limits.plan
    }

    /// Returns the limits without those set for single hosts at run time.
    fn limits_of_all(&self) -> Limits {
        let (mut limits, plan) = (self.limits.configured.clone(), &self.limits.plan);
        limits.total = plan.in_all.or(limits.total);
        limits.per_datastore = plan.per_datastore.unwrap_or(limits.per_datastore);
        limits.out_of_host = plan.out_of_host.or(limits.out_of_host);
        limits.into_host = plan.into_host.or(limits.into_host);
        limits.datastores.extend(plan.datastores.iter().map(|(path, most)| (path.clone(), *most)));
        limits
    }

    /// Returns the limits of concurrent moves.
    #[must_use]
    pub fn limits(&self) -> Limits {
        let mut limits = self.limits_of_all();
        for (name, plan) in self.plans() {
            if let Some(most) = plan.most_moves {
                limits
                    .hosts
                    .insert(name.to_owned(), HostLimit { out: Some(most), into: Some(most) });
            }
        }
        limits
    }

    /// Returns the limits of concurrent moves from a host and to it. For queries about very many
    /// hosts.
    pub(crate) fn moves_at_once(&self, host: &str) -> (u32, u32) {
        let plan = self.host_plan(host);
        if let Some(most) = plan.and_then(|plan| plan.most_moves) {
            return (most, most);
        }
        let (configured, set) = (&self.limits.configured, &self.limits.plan);
        let link = moves_at_once(plan.and_then(|plan| plan.link_bits_per_s));
        let own = configured.hosts.get(host).copied().unwrap_or_default();
        let out = own.out.or(set.out_of_host).or(configured.out_of_host);
        let into = own.into.or(set.into_host).or(configured.into_host);
        (out.unwrap_or(link), into.unwrap_or(link))
    }

    /// Returns the limits of concurrent moves for the API.
    #[must_use]
    pub fn move_limits(&self) -> MoveLimits {
        let Limits { total, per_datastore, datastores, hosts, out_of_host, into_host } =
            self.limits();
        let hosts = hosts
            .into_iter()
            .map(|(name, HostLimit { out, into })| (name, HostMoves { out, into }));
        let steps = std::iter::once(None).chain(STEPS_BITS_PER_S.into_iter().map(Some));
        let by_link =
            steps.map(|bits_per_s| LinkMoves { bits_per_s, moves: moves_at_once(bits_per_s) });
        MoveLimits {
            out_of_host,
            into_host,
            per_datastore,
            in_all: total,
            datastores,
            hosts: hosts.collect(),
            by_link: by_link.collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::inventory::HostPlan;

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
            ["a", "b", "c"].map(|host| inventory.moves_at_once(host)),
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
            ["a", "b", "c"].map(|host| inventory.moves_at_once(host)),
            [(7, 7), (1, 4), (2, 4)]
        );
        let limits = inventory.limits();
        for host in ["a", "b", "c"] {
            let link = inventory.host_plan(host).unwrap().link_bits_per_s;
            let at_once = (limits.out_of(host, link), limits.into_host(host, link));
            assert_eq!(at_once, inventory.moves_at_once(host), "{host}");
        }
        let shown = inventory.move_limits();
        assert_eq!((shown.in_all, shown.per_datastore, shown.out_of_host), (Some(0), 128, Some(2)));
        assert_eq!((shown.datastores["/slow"], shown.datastores["/fast"]), (3, 50));
        assert_eq!(shown.hosts["a"], HostMoves { out: Some(7), into: Some(7) });
        inventory.plan_limits(None);
        assert_eq!(
            (inventory.limits().total, inventory.move_limits().out_of_host),
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
