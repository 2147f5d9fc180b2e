//! What placement is told.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::queue::HostFacts;

/// A host as placement needs it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Host {
    /// What the queue knows of it too.
    pub facts: HostFacts,
    pub cores: u32,
    /// Cores that are busy, averaged over some minutes.
    pub busy_cores: f64,
    /// vCPUs of the VMs that it has and that arrive.
    pub vcpus_placed: u32,
    /// Migrations that arrive now.
    pub arrivals: u32,
    /// Migrations that may arrive at once ([`crate::queue::Limits::into_host`]).
    pub arrivals_limit: u32,
    /// As the operator has labelled it.
    pub labels: BTreeMap<String, String>,
    /// VMs that it has, and those that arrive.
    pub vms: Vec<String>,
}

/// A VM that is to be placed.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Vm {
    pub name: String,
    pub memory_bytes: u64,
    /// Its virtual CPUs.
    pub vcpus: u32,
    /// Cores that it keeps busy, averaged over some minutes; none: half of its vCPUs are assumed to be.
    pub busy_cores: Option<f64>,
    /// As in [`crate::queue::WaitingJob`].
    pub reference_group: Option<String>,
}

impl Vm {
    pub(super) fn load(&self) -> f64 {
        self.busy_cores.unwrap_or_else(|| f64::from(self.vcpus) / 2.0).max(0.0)
    }
}

/// Hosts by name or by labels. It names a host if either does.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Hosts {
    /// These.
    #[serde(default)]
    pub names: Vec<String>,
    /// Those that have all of these labels; none where it is empty.
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
}

impl Hosts {
    /// Whether a host is among them.
    #[must_use]
    pub fn contains(&self, host: &Host) -> bool {
        self.mean(&host.facts.name, &host.labels)
    }

    /// The same of a host by its name and its labels.
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
    /// Never.
    Must,
    /// Where all else is worse.
    Should,
}

/// What a rule asks for, of the VMs that it names.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RuleKind {
    /// All on one host (affinity).
    Together,
    /// No two on one host (anti-affinity).
    Apart,
    /// On these hosts alone.
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
    /// What it asks for.
    pub kind: RuleKind,
    /// The VMs that it is for.
    pub vms: Vec<String>,
}

/// Something that keeps a VM from a host, as preflight found it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Obstacle {
    /// Stable, kebab-case, for programs.
    pub code: String,
    /// What can't be done and why, one line.
    pub message: String,
}

/// What preflight has found, by host. A host that is not named has none.
pub type Obstacles = BTreeMap<String, Vec<Obstacle>>;
