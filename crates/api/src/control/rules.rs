//! Placement rules for VMs.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Constraint that a rule places on its VMs.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema,
)]
#[serde(rename_all = "kebab-case")]
pub enum RuleKind {
    /// Keep all VMs on the same host (affinity).
    Together,
    /// Keep each VM on a different host (anti-affinity).
    Apart,
    /// Run the VMs only on the given hosts.
    On,
    /// Never run the VMs on the given hosts.
    NotOn,
}

impl RuleKind {
    /// Returns the name that the API uses.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            RuleKind::Together => "together",
            RuleKind::Apart => "apart",
            RuleKind::On => "on",
            RuleKind::NotOn => "not-on",
        }
    }
}

/// Whether a rule may be violated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum RuleStrength {
    /// Mandatory: no VM is moved to a host that violates the rule.
    #[default]
    Must,
    /// Preferred: violated only if every alternative is worse.
    Should,
}

impl RuleStrength {
    /// Returns the name that the API uses.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            RuleStrength::Must => "must",
            RuleStrength::Should => "should",
        }
    }
}

/// Hosts selected by name or by labels; either selects a host.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct RuleHosts {
    /// Host names; the hosts need not exist.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schema(max_items = 256)]
    pub names: Vec<String>,
    /// Labels that a host must have, all of them.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
}

/// Request of `POST /api/v1/rules`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({ "name": "db-apart", "kind": "apart", "vms": ["db1", "db2"] }))]
pub struct CreateRule {
    /// Name of the rule.
    #[schema(min_length = 1, max_length = 63, pattern = "^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    pub name: String,
    /// Constraint of the rule.
    pub kind: RuleKind,
    /// Whether the rule may be violated.
    #[serde(default)]
    pub strength: RuleStrength,
    /// VMs that the rule applies to, at least two for `together` and `apart`; the VMs need not
    /// exist.
    #[schema(min_items = 1, max_items = 256)]
    pub vms: Vec<String>,
    /// Hosts for `on` and `not-on`; the other kinds have none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hosts: Option<RuleHosts>,
}

/// Whether a rule is satisfied now.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum RuleState {
    /// Satisfied by every existing VM of the rule.
    Kept,
    /// Violated by at least one VM.
    Broken,
}

impl RuleState {
    /// Returns the name that the API uses.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            RuleState::Kept => "kept",
            RuleState::Broken => "broken",
        }
    }
}

/// A VM that violates a rule.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RuleBreaker {
    /// Name of the VM.
    pub vm: String,
    /// Host that has the VM; during a move, the host that runs it.
    pub host: String,
    /// How the VM violates the rule, in one line.
    pub why: String,
}

/// A rule and its current state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(example = json!({
    "name": "db-apart", "kind": "apart", "strength": "must", "vms": ["db1", "db2", "db3"],
    "state": "broken", "broken_by_count": 2,
    "broken_by": [
        { "vm": "db1", "host": "host-a", "why": "on host-a, with db2" }, { "vm": "db2",
        "host": "host-a", "why": "on host-a, with db1" }
    ],
    "absent": ["db3"]
}))]
pub struct RuleInfo {
    pub name: String,
    /// Constraint of the rule.
    pub kind: RuleKind,
    /// Whether the rule may be violated.
    pub strength: RuleStrength,
    /// VMs that the rule applies to.
    pub vms: Vec<String>,
    /// Hosts for `on` and `not-on`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hosts: Option<RuleHosts>,
    /// Whether the rule is satisfied, by the last reports of the hosts.
    pub state: RuleState,
    /// Number of VMs that violate the rule.
    pub broken_by_count: u64,
    /// VMs that violate the rule, by name. Lists and events contain only the first ones.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub broken_by: Vec<RuleBreaker>,
    /// VMs of the rule that no host reports.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub absent: Vec<String>,
}
