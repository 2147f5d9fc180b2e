//! Where a VM goes: a ranking of all hosts, each with its reason. [`rank`] is a function of what is known at one moment.
//!
//! **Ruled out** is a host that can't take the VM: it is away, in maintenance, has not the memory, a `must` rule or a preflight check
//! forbids it, or the VM runs there already. All that is in the way is told, not the first thing alone.
//!
//! **The score** of the others is the sum of these parts (`score.rs`), at most 100:
//!
//! | part | points | of |
//! |---|---|---|
//! | memory | 40 | what is free after the arrival, as a share of the host's memory: what runs out first, and can't be taken back |
//! | cpu | 30 | cores that are idle after it, as a share of all: what the VM uses now counts, not what it may use |
//! | vcpus | 10 | how far vCPUs are from four a core: the same for when all become busy at once |
//! | lanes | 15 | 1 / (1 + arrivals / limit): a host where many arrive takes longer, and its link is shared |
//! | clones | 5 | a clone of the VM's image runs there: its pages travel as references |
//!
//! Each `should` rule that the host breaks costs 25: it is broken where the others are worse by more than that. Scores are compared in
//! hundredths; where they are equal, by the host's name.

mod candidates;
mod judge;
mod rules;
mod score;
#[cfg(test)]
mod tests;

use serde::{Deserialize, Serialize};

pub use candidates::{Host, Hosts, Obstacle, Obstacles, Rule, RuleKind, Strength, Vm};
pub use rules::RuleBreach;
pub use score::Score;

pub(crate) use judge::{Judge, Unit, ruled_out};

/// What a host's place in the ranking is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Ranked {
    pub host: String,
    /// Its points, and of what they are.
    pub score: Score,
    /// `should` rules that it breaks, by name.
    pub breaks: Vec<String>,
    /// Why it stands where it does, one line.
    pub why: String,
}

/// Why a host can't take the VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
#[allow(missing_docs, reason = "the variants say what their fields are")]
pub enum Exclusion {
    RunsThere,
    /// Its agent is silent.
    Away,
    /// Its agent has not been heard since this manager began.
    Unknown,
    /// It takes no VMs.
    Maintenance,
    /// It has not the memory: `left_bytes` are free and not promised.
    Memory {
        needed_bytes: u64,
        left_bytes: u64,
    },
    /// A `must` rule forbids it.
    Rule {
        breach: RuleBreach,
    },
    /// A check says that the VM can't move there.
    Preflight {
        obstacle: Obstacle,
    },
}

/// A host that can't take the VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RuledOut {
    pub host: String,
    /// All that is in the way.
    pub reasons: Vec<Exclusion>,
    /// The same in one line.
    pub text: String,
}

/// Where a VM can go, and where not. Every host is in one of the two lists.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Ranking {
    /// Best first.
    pub fits: Vec<Ranked>,
    /// By name.
    pub ruled_out: Vec<RuledOut>,
}

/// Ranks all hosts for a VM. `obstacles` are what preflight has found, by host.
#[must_use]
pub fn rank(hosts: &[Host], rules: &[Rule], vm: &Vm, obstacles: &Obstacles) -> Ranking {
    Judge::new(hosts, rules).rank(vm, obstacles)
}
