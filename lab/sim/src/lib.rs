//! Hosts that hand a guest to each other, with everything around the production state machines simulated: network, clock, disks,
//! hypervisors and the guest's memory. `godwit_migration`'s [`Source`](godwit_migration::source::Source),
//! [`Destination`](godwit_migration::destination::Destination) and [`handover`](godwit_migration::handover) decide; what a
//! [`World`] adds is what drivers and agents do with their decisions, one step at a time, so that a fault can come between any two.
//!
//! Two things drive it: `tests/handover_model.rs` tries every order of steps and faults (stateright), [`simulate`] long random ones by
//! seed.

mod agent;
mod choices;
mod destination;
mod faults;
mod heal;
mod rules;
#[cfg(test)]
mod scenarios;
mod simulate;
mod source;
mod world;

pub use choices::Choice;
pub use rules::Rules;
pub use simulate::{Figures, Plan, simulate};
pub use world::{HostId, Limits, Options, World};
