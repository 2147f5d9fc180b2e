//! The decisions that a test may replace by wrong ones, to see that they are found.

use godwit_migration::handover::{self, Found, Known, OfDestination, OfSource, Recovery, Role};

/// What agents decide by.
#[derive(Clone, Copy, Debug)]
pub struct Rules {
    /// What a started agent does with a VM.
    pub recover: fn(Role, Found) -> Recovery,
    /// What a source concludes from its destination's word.
    pub of_destination: fn(Known, u64) -> OfDestination,
    /// What a destination concludes from its source's.
    pub of_source: fn(Known, u64) -> OfSource,
    /// That the guest may run at the destination is durable before it does.
    pub notes_take_over: bool,
    /// That it may run at the destination is durable at the source before it is stopped.
    pub notes_hand_over: bool,
}

impl Default for Rules {
    fn default() -> Self {
        Rules {
            recover: handover::recover,
            of_destination: handover::of_destination,
            of_source: handover::of_source,
            notes_take_over: true,
            notes_hand_over: true,
        }
    }
}
