//! The input of placement.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::queue::HostFacts;

/// A host, for placement.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Host {
    /// Facts that the queue uses as well.
    pub facts: HostFacts,
    pub cores: u32,
    /// Busy cores, averaged over some minutes.
    pub busy_cores: f64,
    /// vCPUs of its VMs, including arriving ones.
    pub vcpus_placed: u32,
    /// Migrations that arrive now.
    pub arrivals: u32,
    /// Most migrations that may arrive at once ([`crate::queue::Limits::into_host`]).
    pub arrivals_limit: u32,
    /// Labels set by the operator.
    pub labels: BTreeMap<String, String>,
    /// Its VMs, including arriving ones.
    pub vms: Vec<String>,
}

/// A VM to be placed.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Vm {
    pub name: String,
    pub memory_bytes: u64,
    /// Its virtual CPUs.
    pub vcpus: u32,
    /// Cores that it keeps busy, averaged over some minutes; `None` assumes half of its vCPUs.
    pub busy_cores: Option<f64>,
    /// See [`crate::queue::WaitingJob`].
    pub reference_group: Option<String>,
}

impl Vm {
    pub(super) fn load(&self) -> f64 {
        self.busy_cores.unwrap_or_else(|| f64::from(self.vcpus) / 2.0).max(0.0)
    }
}

/// A set of hosts by name or by labels. A host that matches either is in it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Hosts {
    /// Names of hosts.
    #[serde(default)]
    pub names: Vec<String>,
    /// Labels, all of which a host must have; an empty map matches no host.
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
}

impl Hosts {
    /// Whether the set contains a host.
    #[must_use]
    pub fn contains(&self, host: &Host) -> bool {
        self.mean(&host.facts.name, &host.labels)
    }

    /// Whether the set contains a host with this name and these labels.
    #[must_use]
    pub fn mean(&self, host: &str, labels: &BTreeMap<String, String>) -> bool {
        let has = |(label, value): (&String, &String)| labels.get(label) == Some(value);
        self.names.iter().any(|name| name == host)
            || (!self.labels.is_empty() && self.labels.iter().all(has))
    }
}

/// Whether a rule may be broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Strength {
    /// The rule is never broken.
    Must,
    /// The rule is broken if all alternatives are worse.
    Should,
}

/// Requirement of a rule for its VMs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RuleKind {
    /// All on one host (affinity).
    Together,
    /// No two on one host (anti-affinity).
    Apart,
    /// Only on these hosts.
    On(Hosts),
    /// On none of these hosts.
    NotOn(Hosts),
}

/// A rule of an operator.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rule {
    pub name: String,
    /// Whether it may be broken.
    pub strength: Strength,
    /// The requirement.
    pub kind: RuleKind,
    /// The VMs of the rule.
    pub vms: Vec<String>,
}

/// A result of preflight that prevents a VM from moving to a host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Obstacle {
    /// Stable code in kebab case, for programs.
    pub code: String,
    /// What is impossible and why, in one line.
    pub message: String,
}

/// Results of preflight by host. A host without an entry has none.
pub type Obstacles = BTreeMap<String, Vec<Obstacle>>;
