//! The decisions that a test may replace by wrong ones, to see that they are found.

use godwit_migration::handover::{
    self, Found, Incarnation, Known, OfDestination, OfSource, Ownership, Recovery, Role,
};

/// What agents decide by.
#[derive(Clone, Copy, Debug)]
pub struct Rules {
    /// What a started agent does with a VM.
    pub recover: fn(Role, Found) -> Recovery,
    /// What a source concludes from its destination's word.
    pub of_destination: fn(Known, Ownership) -> OfDestination,
    /// What a destination concludes from its source's.
    pub of_source: fn(Known, Ownership) -> OfSource,
    /// That the guest may run at the destination is durable before it does.
    pub notes_take_over: bool,
    /// That it may run at the destination is durable at the source before it is stopped.
    pub notes_hand_over: bool,
    /// Each life of a VM has an incarnation of its own; else a uuid alone says whose record it is.
    pub incarnations: bool,
    /// What depends on a write that failed does not happen; else it does.
    pub heeds_failed_writes: bool,
}

impl Rules {
    /// The incarnation of a life of the VM.
    pub(crate) fn incarnation(&self, life: u32) -> Incarnation {
        if self.incarnations { Incarnation::new(u128::from(life) + 1) } else { Incarnation::UNRECORDED }
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
