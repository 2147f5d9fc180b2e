//! Decisions that a test may replace by wrong ones, to check that they are detected.

use godwit_migration::handover::{self, Found, Known, OfDestination, OfSource, Recovery, Role};
use godwit_types::{Incarnation, Ownership};

/// Decisions of agents.
#[derive(Clone, Copy, Debug)]
pub struct Rules {
    /// What a restarted agent does with a VM.
    pub recover: fn(Role, Found) -> Recovery,
    /// What a source concludes from its destination's answer.
    pub of_destination: fn(Known, Ownership) -> OfDestination,
    /// What a destination concludes from its source's answer.
    pub of_source: fn(Known, Ownership) -> OfSource,
    /// Whether the destination durably records that the guest may run there before it runs.
    pub notes_take_over: bool,
    /// Whether the source durably records that the guest may run at the destination before it is
    /// stopped.
    pub notes_hand_over: bool,
    /// Whether each life of a VM has its own incarnation. If not, a record is identified only by
    /// the uuid.
    pub incarnations: bool,
    /// Whether actions that depend on a failed write are left out.
    pub heeds_failed_writes: bool,
}

impl Rules {
    /// Returns the incarnation of a life of the VM.
    pub(crate) fn incarnation(&self, life: u32) -> Incarnation {
        if self.incarnations {
            Incarnation::new(u128::from(life) + 1)
        } else {
            Incarnation::UNRECORDED
        }
    }
}

impl Default for Rules {
    fn default() -> Self {
        Rules {
            recover: handover::recover,
            of_destination: handover::of_destination,
            of_source: handover::of_source,
            notes_take_over: true,
            notes_hand_over: true,
            incarnations: true,
            heeds_failed_writes: true,
        }
    }
}
