//! The phases of a migration: one vocabulary for code, logs, metrics, API, console and
//! documentation.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Where a migration is. The order is the order in which phases are entered; pre-copy and
/// convergence alternate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub enum Phase {
    /// Both hosts check that the VM can move, before anything is made.
    Preflight,
    /// Rounds of the disks travel while the guest runs, if they travel with the VM.
    Disks,
    /// The destination allocates memory and starts the shadow VM.
    Prepare,
    /// Rounds of memory travel while the guest runs.
    PreCopy,
    /// The link is cut while the guest runs: both hosts keep what they have, and the source tries
    /// to reach the destination again.
    Reconnect,
    /// A round is over: the destination catches up, what remains is counted, the policy decides.
    Convergence,
    /// The guest's vCPUs stand still: last pages, device state, commit.
    Switchover,
    /// The guest runs at the destination while pages are still missing there (post-copy).
    PageIn,
    /// The guest runs at the destination; the network learns of it and the source lets go.
    Announce,
    /// Nothing moves any more: the report is written.
    Report,
}

impl Phase {
    pub const ALL: [Phase; 10] = [
        Phase::Preflight,
        Phase::Disks,
        Phase::Prepare,
        Phase::PreCopy,
        Phase::Reconnect,
        Phase::Convergence,
        Phase::Switchover,
        Phase::PageIn,
        Phase::Announce,
        Phase::Report,
    ];

    /// Returns the name that logs, metrics, the API and JSON use.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Phase::Preflight => "preflight",
            Phase::Disks => "disks",
            Phase::Prepare => "prepare",
            Phase::PreCopy => "pre-copy",
            Phase::Reconnect => "reconnect",
            Phase::Convergence => "convergence",
            Phase::Switchover => "switchover",
            Phase::PageIn => "page-in",
            Phase::Announce => "announce",
            Phase::Report => "report",
        }
    }
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_is_the_same_in_json() {
        for phase in Phase::ALL {
            assert_eq!(serde_json::to_value(phase).unwrap(), phase.name());
        }
    }
}
