//! Rules about where VMs may be.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// What a rule asks for, of the VMs that it names.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema,
)]
#[serde(rename_all = "kebab-case")]
pub enum RuleKind {
    /// All on one host (affinity).
    Together,
    /// No two on one host (anti-affinity).
    Apart,
    /// On some hosts alone.
    On,
    /// On none of some hosts.
    NotOn,
}

impl RuleKind {
    /// The name that the API uses.
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

/// Whether a rule may be broken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum RuleStrength {
    /// No VM is moved where it would be.
    #[default]
    Must,
    /// Where all else is worse.
    Should,
}

impl RuleStrength {
    /// The name that the API uses.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            RuleStrength::Must => "must",
            RuleStrength::Should => "should",
        }
    }
}

/// Hosts by name or by labels. It means a host if either does.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct RuleHosts {
    /// These, whether they are there or not.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schema(max_items = 256)]
    pub names: Vec<String>,
    /// Those that have all of these labels.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
}

/// `POST /api/v1/rules`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({ "name": "db-apart", "kind": "apart", "vms": ["db1", "db2"] }))]
pub struct CreateRule {
    /// Names it.
    #[schema(min_length = 1, max_length = 63, pattern = "^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    pub name: String,
    /// What it asks for.
    pub kind: RuleKind,
    /// Whether it may be broken.
    #[serde(default)]
    pub strength: RuleStrength,
    /// The VMs that it is for, whether they are there or not: at least two for `together` and `apart`.
    #[schema(min_items = 1, max_items = 256)]
    pub vms: Vec<String>,
    /// The hosts that `on` and `not-on` are about; the other kinds have none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hosts: Option<RuleHosts>,
}

/// Whether a rule is kept at present.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum RuleState {
    /// By every VM that it names and that is there.
    Kept,
    /// By some of them it is not.
    Broken,
}

impl RuleState {
    /// The name that the API uses.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            RuleState::Kept => "kept",
            RuleState::Broken => "broken",
        }
    }
}

/// A VM by which a rule is broken.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RuleBreaker {
    /// The VM.
    pub vm: String,
    /// The host that has it; while it moves, the one that runs it.
    pub host: String,
    /// How it breaks the rule, one line.
    pub why: String,
}

/// A rule, and whether it is kept.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(example = json!({
    "name": "db-apart", "kind": "apart", "strength": "must", "vms": ["db1", "db2", "db3"], "state": "broken", "broken_by_count": 2,
    "broken_by": [
        { "vm": "db1", "host": "host-a", "why": "on host-a, with db2" }, { "vm": "db2", "host": "host-a", "why": "on host-a, with db1" }
    ],
    "absent": ["db3"]
}))]
pub struct RuleInfo {
    pub name: String,
    /// What it asks for.
    pub kind: RuleKind,
    /// Whether it may be broken.
    pub strength: RuleStrength,
    /// The VMs that it is for.
    pub vms: Vec<String>,
    /// The hosts that `on` and `not-on` are about.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hosts: Option<RuleHosts>,
    /// Whether it is kept, by where hosts told last that VMs are.
    pub state: RuleState,
    /// VMs by which it is broken.
    pub broken_by_count: u64,
    /// They, by name: in a list and in events the first of them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub broken_by: Vec<RuleBreaker>,
    /// VMs that it names and that no host tells of.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub absent: Vec<String>,
}
