//! Hosts that hand a guest to each other. Everything around the production state machines is
//! simulated: network, clock, disks, hypervisors and the guest's memory. `godwit_migration`'s
//! [`Source`](godwit_migration::source::Source),
//! [`Destination`](godwit_migration::destination::Destination) and
//! [`handover`](godwit_migration::handover) decide. A [`World`] adds what drivers and agents do
//! with their decisions, one step at a time, so that a fault can occur between any two.
//!
//! It is used in two ways: `tests/handover_model.rs` checks every order of steps and faults
//! (stateright), and [`simulate`] runs long random ones by seed.
//!
//! [`ha`] does both for the leases of hosts.

mod agent;
mod choices;
mod destination;
mod dice;
mod faults;
pub mod ha;
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
