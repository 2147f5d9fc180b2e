//! What the queue is told: jobs, what runs, hosts. Times are milliseconds since 1970, as the manager's clock has them.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use super::limits::Limits;

/// How much a move matters to who asked for it.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(rename_all = "kebab-case")]
pub enum Priority {
    /// When nothing else is to be moved.
    Low,
    /// As moves are.
    #[default]
    Normal,
    /// Before others.
    High,
    /// Before all that has not waited for very long.
    Urgent,
}

/// A move that somebody asked for and that has not been begun.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WaitingJob {
    /// Names it; unique.
    pub id: String,
    /// The VM, by the name that it has in the whole cluster.
    pub vm: String,
    /// The host that runs it.
    pub source: String,
    /// The hosts that it may go to, best first: one where an operator chose it. A few are enough: each is looked at.
    pub targets: Vec<String>,
    /// How much it matters.
    pub priority: Priority,
    /// Who shares with whom: the drain that it belongs to, or who submitted it.
    pub group: String,
    pub memory_bytes: u64,
    /// How long it would take alone on the link.
    pub estimate_ms: u64,
    /// The datastores that its disks are on.
    pub datastores: Vec<String>,
    /// Clones of one image have one: pages of one are told by references to another that is at the destination.
    pub reference_group: Option<String>,
    /// When it was asked for.
    pub submitted_ms: u64,
    /// Migrations of it that have failed.
    pub failed_attempts: u32,
    /// After a failure: not before this.
    pub not_before_ms: Option<u64>,
    /// The code of the last failure.
    pub last_failure: Option<String>,
}

/// A migration that is under way or being begun, of a job or of somebody who asked an agent by hand.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunningMove {
    pub migration: String,
    pub vm: String,
    /// From where; no host's name where nobody tells.
    pub source: String,
    /// To where; no host's name where nobody tells.
    pub target: String,
    /// The group of its job; none: it is no job's, somebody began it at an agent.
    pub group: Option<String>,
    /// The datastores that its disks are on.
    pub datastores: Vec<String>,
    /// As in [`WaitingJob`].
    pub reference_group: Option<String>,
}

/// Whether a host's agent is heard.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Presence {
    #[default]
    Heard,
    /// It was, and is silent since.
    Away,
    /// It has not been heard since this manager began: nothing is decided about it.
    Unknown,
}

/// A host as the queue needs it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostFacts {
    pub name: String,
    /// Whether its agent is heard.
    pub presence: Presence,
    /// It takes no VMs; those that it has may leave.
    pub maintenance: bool,
    /// What its migration network carries, bits a second; none: not known.
    pub link_bits_per_s: Option<u64>,
    /// Guest memory that it can have in all.
    pub memory_total_bytes: u64,
    /// Guest memory that is free, as its agent says: what an arrival has taken already is off it.
    pub memory_free_bytes: u64,
    /// What running arrivals will still take of [`HostFacts::memory_free_bytes`], those included that are only being begun.
    pub memory_promised_bytes: u64,
    /// Reference groups of which a member runs here.
    pub reference_groups: BTreeSet<String>,
}

impl HostFacts {
    /// Guest memory that a further VM can get.
    #[must_use]
    pub fn memory_left_bytes(&self) -> u64 {
        self.memory_free_bytes.saturating_sub(self.memory_promised_bytes)
    }
}

/// When a group was last served at a source: a move of its jobs from there began or ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Served {
    pub source: String,
    pub group: String,
    /// When.
    pub at_ms: u64,
}

/// All that is known at one moment.
#[derive(Clone, Copy, Debug)]
pub struct Situation<'a> {
    /// That moment.
    pub now_ms: u64,
    /// Jobs that wait, in any order.
    pub waiting: &'a [WaitingJob],
    /// All migrations that are under way or being begun. A job is in one of the two lists.
    pub running: &'a [RunningMove],
    /// The inventory.
    pub hosts: &'a [HostFacts],
    /// What is never exceeded.
    pub limits: &'a Limits,
    /// Who was served when; without it fair shares are of what runs alone.
    pub served: &'a [Served],
}
