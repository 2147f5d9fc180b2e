//! The input of the queue: jobs, running moves, hosts. Times are milliseconds since 1970 on the
//! manager's clock.

use std::collections::BTreeSet;

use godwit_api::control::MovePriority;
use serde::{Deserialize, Serialize};

use super::limits::Limits;

/// A requested move that has not begun.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WaitingJob {
    /// Unique ID.
    pub id: String,
    /// The VM, by its name in the cluster.
    pub vm: String,
    /// The host that runs it.
    pub source: String,
    /// Hosts that it may go to, best first; a single one if an operator chose it. A few are enough:
    /// each is checked.
    pub targets: Vec<String>,
    /// Importance of the move.
    pub priority: MovePriority,
    /// Unit of fair sharing: the drain that it belongs to, or the user who submitted it.
    pub group: String,
    pub memory_bytes: u64,
    /// Duration of its move alone on the link.
    pub estimate_ms: u64,
    /// Datastores of its disks.
    pub datastores: Vec<String>,
    /// Common value of clones of one image: pages of one can be sent as references to another at
    /// the destination.
    pub reference_group: Option<String>,
    /// Time of the request.
    pub submitted_ms: u64,
    /// Number of failed migrations.
    pub failed_attempts: u32,
    /// Earliest start after a failure.
    pub not_before_ms: Option<u64>,
    /// Code of the last failure.
    pub last_failure: Option<String>,
}

/// A migration that runs or is being begun, of a job or begun at an agent by hand.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunningMove {
    pub migration: String,
    pub vm: String,
    /// Source host; not a host's name if unknown.
    pub source: String,
    /// Target host; not a host's name if unknown.
    pub target: String,
    /// Group of its job; `None` if it was begun at an agent, without a job.
    pub group: Option<String>,
    /// Datastores of its disks.
    pub datastores: Vec<String>,
    /// See [`WaitingJob`].
    pub reference_group: Option<String>,
}

/// Whether a host's agent is reachable.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Presence {
    #[default]
    #[serde(rename = "heard")]
    Up,
    /// The agent was reachable, and no longer responds.
    Away,
    /// The agent has not reported since this manager started: nothing is decided about the host.
    Unknown,
}

/// A host, for the queue.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostFacts {
    pub name: String,
    /// Whether its agent is reachable.
    pub presence: Presence,
    /// Whether it accepts no VMs; those that it has may leave.
    pub maintenance: bool,
    /// Speed of its migration network, bits per second; `None` if unknown.
    pub link_bits_per_s: Option<u64>,
    /// Most guest memory that it can have.
    pub memory_total_bytes: u64,
    /// Free guest memory, from its agent. The part that an arrival has already taken is deducted.
    pub memory_free_bytes: u64,
    /// Part of [`HostFacts::memory_free_bytes`] that arrivals will still take, including those that
    /// are being begun.
    pub memory_promised_bytes: u64,
    /// Reference groups of its VMs.
    pub reference_groups: BTreeSet<String>,
}

impl HostFacts {
    /// Guest memory available to a further VM.
    #[must_use]
    pub fn memory_left_bytes(&self) -> u64 {
        self.memory_free_bytes.saturating_sub(self.memory_promised_bytes)
    }
}

/// Last service of a group at a source: a move of its jobs from there began or ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Served {
    pub source: String,
    pub group: String,
    /// Time of that service.
    pub at_ms: u64,
}

/// All facts at one moment.
#[derive(Clone, Copy, Debug)]
pub struct Situation<'a> {
    /// The moment.
    pub now_ms: u64,
    /// Waiting jobs, in any order.
    pub waiting: &'a [WaitingJob],
    /// All migrations that run or are being begun. A job is in one of the two lists.
    pub running: &'a [RunningMove],
    /// The inventory.
    pub hosts: &'a [HostFacts],
    /// Limits that are never exceeded.
    pub limits: &'a Limits,
    /// Times of service; without them fair shares consider running moves only.
    pub served: &'a [Served],
}
