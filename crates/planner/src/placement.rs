//! Placement of a VM: a ranking of all hosts, each with its reason. [`rank`] is a function of the
//! facts at one moment.
//!
//! **Excluded** is a host that cannot take the VM: it is away or in maintenance, it lacks memory, a
//! `must` rule or a preflight check forbids it, or the VM runs there already. All reasons are
//! listed, not only the first one.
//!
//! **The score** of the others is the sum of these parts (`score.rs`), at most 100:
//!
//! - Memory, 40: free memory after the arrival, as a share of the host's memory. Memory runs out
//!   first, and cannot be taken back.
//! - CPU, 30: idle cores after the arrival, as a share of all cores. The VM's present use counts,
//!   not its maximum.
//! - vCPUs, 10: distance from four vCPUs per core, for the case that all become busy at once.
//! - Lanes, 15: 1 / (1 + arrivals / limit). With many arrivals a move takes longer, because they
//!   share the link.
//! - Clones, 5: a clone of the VM's image runs there, so that pages can be sent as references.
//!
//! Each `should` rule that the host breaks costs 25. So a rule is broken if the alternatives are
//! worse by more than that. Scores are compared in hundredths; equal ones are ordered by the host's
//! name.

mod candidates;
mod judge;
mod rules;
mod score;
#[cfg(test)]
mod tests;

use godwit_api::control::RankedHost;
use serde::{Deserialize, Serialize};

pub use candidates::{Host, Hosts, Obstacle, Obstacles, Rule, RuleKind, Strength, Vm};
pub use rules::RuleBreach;
pub use score::{NEARLY_FULL_REMEDY, is_nearly_full};

pub(crate) use judge::{Judge, Unit, ruled_out};

/// Why a host cannot take the VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
#[allow(missing_docs, reason = "the variants say what their fields are")]
pub enum Exclusion {
    RunsThere,
    /// Its agent does not respond.
    Away,
    /// Its agent has not reported since this manager started.
    Unknown,
    /// It accepts no VMs.
    Maintenance,
    /// It lacks memory: `left_bytes` are free and not reserved.
    Memory {
        needed_bytes: u64,
        left_bytes: u64,
    },
    /// A `must` rule forbids it.
    Rule {
        breach: RuleBreach,
    },
    /// A preflight check found that the VM cannot move there.
    Preflight {
        obstacle: Obstacle,
    },
}

/// A host that cannot take the VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RuledOut {
    pub host: String,
    /// All reasons.
    pub reasons: Vec<Exclusion>,
    /// The reasons in one line.
    pub text: String,
}

/// Hosts that can take a VM and hosts that cannot. Every host is in one of the two lists.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Ranking {
    /// Suitable hosts, best first.
    pub fits: Vec<RankedHost>,
    /// Excluded hosts, by name.
    pub ruled_out: Vec<RuledOut>,
}

/// Ranks all hosts for a VM. `obstacles` are the results of preflight by host.
#[must_use]
pub fn rank(hosts: &[Host], rules: &[Rule], vm: &Vm, obstacles: &Obstacles) -> Ranking {
    Judge::new(hosts, rules).rank(vm, obstacles)
}
